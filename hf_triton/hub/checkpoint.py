# SPDX-License-Identifier: Apache-2.0
"""Loads the tokenizer and the model of a folder's settings onto its device; repairs a damaged cache once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import CheckpointError, LoadError, SettingsError
from hf_triton.hub.graph_facts import check_graph, load_graph
from hf_triton.hub.imports import import_transformers
from hf_triton.hub.locate import Hub
from hf_triton.hub.pretrained import (
    IMAGE_CLASSIFIER,
    READ_IMAGES,
    SPEECH,
    load_config,
    load_image_processor,
    load_model,
    load_tokenizer,
    loading,
    silence_transformers,
)
from hf_triton.hub.processor import load_processor
from hf_triton.hub.snapshot import purge_damaged
from hf_triton.protocol.parameters import (
    GREEDY_BELOW,
    NEUTRAL_VALUES,
    WARPERS,
    GenerationParameters,
    parse_parameters,
)
from hf_triton.runner.device import DeviceContext
from hf_triton.runner.dtypes import has_instructions
from hf_triton.runner.positions import max_positions
from hf_triton.settings import ModelSettings
from hf_triton.start_clock import start_clock

if TYPE_CHECKING:
    from hf_triton.runner.ranks.processes import Ranks

logger = logging.getLogger(__name__)

CONTEXT_NAMES: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
"""Names of the context length in model configs."""


SAMPLES: Final = "a", "1"
"""Texts that have no token in common but those that are added to each."""


@dataclass(frozen=True)
class Placement:
    """The device that Triton chose for a model instance."""

    kind: str
    """`CPU`, `GPU`, or `MODEL`, which leaves the choice to us: spread over all GPUs, or the CPU if there is none."""
    device_id: int

    def device_map(self) -> Any:
        """The placement as transformers takes it; raises CheckpointError if PyTorch cannot use the GPU."""
        import torch

        if self.kind == "CPU" or (self.kind == "MODEL" and not torch.cuda.is_available()):
            return {"": "cpu"}
        if self.kind == "MODEL":
            return "auto"
        if not torch.cuda.is_available() or self.device_id >= torch.cuda.device_count():
            raise CheckpointError(
                "device_unavailable",
                f"Triton places this model on GPU {self.device_id}, and PyTorch {torch.__version__} sees "
                f"{torch.cuda.device_count()} GPUs: install a CUDA build, or set instance_group to KIND_CPU",
            )
        return {"": f"cuda:{self.device_id}"}


@dataclass
class Checkpoint:
    """A loaded model with its tokenizer. A folder's own `load` may replace them."""

    tokenizer: Any
    model: Any
    """It is in eval mode, on its device."""
    context_length: int
    """Maximum tokens of a prompt and its completion together; of an encoder, of a text with its special tokens; 0: it
    reads no text."""
    folder: Path = Path()
    """Its files."""
    image_processor: Any = None
    """transformers' own, of an encoder that reads images."""
    stop_strings: tuple[str, ...] = ()
    """Its generation_config's, which a request's own replace."""
    processor: Any = None
    """transformers' own, of a model that generates text and takes images."""
    image_obstacle: str = ""
    """Why a model that could read images has no processor."""
    ranks: Ranks | None = None
    """The other processes that the model is divided among; None: it is whole."""

    @property
    def vocabulary_size(self) -> int:
        """Rows of the input embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether an encoder computes the prompt."""
        return bool(self.model.config.is_encoder_decoder)

    def generation_defaults(self, *, with_beams: bool = False) -> GenerationParameters:
        """The sampling parameters of the checkpoint's generation_config, without neutral values.

        A checkpoint without `do_sample` is greedy whatever its temperature, as in transformers. A checkpoint whose
        temperature makes sampling greedy (0, or Qwen2.5-VL's 0.000001) is greedy too.

        Args:
            with_beams: Whether `num_beams` is one of them, unless the checkpoint samples.
        """
        config = self.model.generation_config
        temperature = getattr(config, "temperature", None)
        do_sample = bool(config.do_sample) and not (temperature is not None and 0 <= temperature < GREEDY_BELOW)
        values = {name: getattr(config, name, None) for name in NEUTRAL_VALUES if do_sample or name not in WARPERS}
        effective = {
            name: value for name, value in values.items() if value is not None and value != NEUTRAL_VALUES[name]
        }
        if self.stop_strings:
            effective["stop_strings"] = self.stop_strings
        if with_beams and not do_sample and (config.num_beams or 1) > 1:
            effective["num_beams"] = config.num_beams
        return parse_parameters({"do_sample": do_sample, **effective})


def load_checkpoint(
    hub: Hub, settings: ModelSettings, placement: Placement, auto_class: str | None = None
) -> Checkpoint:
    """Find and load the checkpoint of the settings; a damaged cache entry is removed and downloaded again, once.

    Raises:
        LoadError: One sentence with the model, the cause and the remedy.
    """
    folders = _resolve(hub)
    start_clock.end("files")
    times_before = [folder.stat().st_mtime_ns for folder in folders]
    try:
        import_transformers([hub.model_folder, *folders], settings)
        return _load(*folders, settings, placement, auto_class, hub.model_folder)
    except LoadError as error:
        repairable = filter(hub.can_download_again, set(folders))
        damaged = [name for folder in repairable for name in purge_damaged(folder)]
        is_unchanged = [folder.stat().st_mtime_ns for folder in folders] == times_before
        if not damaged and is_unchanged:  # else another instance has repaired them
            raise
        logger.warning("%s damaged in the cache (%s); downloading again", ", ".join(damaged) or "files", error.code)
    return _load(*_resolve(hub), settings, placement, auto_class, hub.model_folder)


def _resolve(hub: Hub) -> tuple[Path, Path]:
    """The folders of the model and of its tokenizer; often the same."""
    folder = hub.resolve_model()
    return folder, hub.resolve_tokenizer() or folder


def _load(
    folder: Path,
    tokenizer_folder: Path,
    settings: ModelSettings,
    placement: Placement,
    auto_class: str | None,
    model_folder: Path,
) -> Checkpoint:
    if settings.tensor_parallel_size > 1:
        from hf_triton.hub.ranks import describe, start_ranks

        ranks = start_ranks(folder, model_folder, settings)
        with ranks.loading():
            checkpoint = _load_parts(folder, tokenizer_folder, settings, placement, auto_class)
            ranks.check_equal(describe(checkpoint.model), "as its part of the model")
        return replace(checkpoint, ranks=ranks)
    return _load_parts(folder, tokenizer_folder, settings, placement, auto_class)


def _load_parts(
    folder: Path, tokenizer_folder: Path, settings: ModelSettings, placement: Placement, auto_class: str | None
) -> Checkpoint:
    with DeviceContext():
        silence_transformers()
        config = load_config(folder, settings)
        tokenizer = None if auto_class == IMAGE_CLASSIFIER else load_tokenizer(tokenizer_folder, settings)
        image_processor = load_image_processor(folder, settings) if auto_class in READ_IMAGES else None
        processor, obstacle = (None, "") if auto_class else load_processor(folder, config, settings)
        if tokenizer is not None and processor is not None and not tokenizer.chat_template:
            tokenizer.chat_template = getattr(processor, "chat_template", None)
        start_clock.end("tokenizer")
        device_map = placement.device_map()
        if placement.kind == "GPU":
            import torch

            torch.cuda.set_device(placement.device_id)  # kernels outside torch run on the thread's current device
        if settings.runtime == "torch":
            model = load_model(folder, config, settings, device_map, auto_class)
    if settings.runtime != "torch":  # out of the context, where torch has the threads that this model has alone
        model = _load_graph(folder, config, settings, placement, auto_class)
    model.eval()
    start_clock.end("weights")
    length = context_length(config, settings.max_context_length)
    if tokenizer is None:
        length = 0
    elif auto_class is not None:
        length = min(length, max_positions(model) or length, tokenizer.model_max_length)
    with loading("generation_config.json", settings, folder):
        stop_strings = () if auto_class else _take_stop_strings(model)
    checkpoint = Checkpoint(tokenizer, model, length, folder, image_processor, stop_strings, processor, obstacle)
    if image_processor is None:
        _check_vocabulary(checkpoint, settings)
    if auto_class is None:
        with loading("generation_config.json", settings, folder):
            checkpoint.generation_defaults()
    is_torch = settings.runtime == "torch"
    logger.info(
        "%s in %s on %s, %s, context of %d tokens",
        type(model).__name__,
        str(model.dtype).removeprefix("torch.") if is_torch else settings.precision,
        model.device,
        f"attention {model.config._attn_implementation}" if is_torch else f"runtime {settings.runtime}",
        checkpoint.context_length,
    )
    if auto_class is None or settings.dtype != "auto":  # by default an encoder leaves a slow dtype
        _warn_of_slow_dtype(model)
    return checkpoint


def _check_vocabulary(checkpoint: Checkpoint, settings: ModelSettings) -> None:
    """Warn of tokens that the model does not have; refuse a tokenizer whose every prompt has one."""
    with loading("the model", settings, checkpoint.folder):
        vocabulary_size = checkpoint.vocabulary_size
    if len(checkpoint.tokenizer) <= vocabulary_size:
        return
    logger.warning("the tokenizer has %d tokens and the model %d", len(checkpoint.tokenizer), vocabulary_size)
    with loading("the tokenizer", settings, checkpoint.folder):
        added = [ids for text in SAMPLES if (ids := checkpoint.tokenizer(text)["input_ids"])]
    if added and all(max(ids) >= vocabulary_size for ids in added):
        raise CheckpointError(
            "checkpoint_invalid",
            f"the tokenizer of {settings.tokenizer or settings.huggingface_model} begins or ends each prompt with a "
            f"token that the model does not have (token {max(added[0])} of {vocabulary_size}): tokenizer and model do "
            "not belong together",
        )


def _take_stop_strings(model: Any) -> tuple[str, ...]:
    """Take them out of the generation_config, since `generate` would look for them itself, and ask for a tokenizer."""
    taken, model.generation_config.stop_strings = model.generation_config.stop_strings, None
    if not isinstance(taken, str | list | None):
        raise TypeError("`stop_strings` is neither a string nor a list")
    return (taken,) if isinstance(taken, str) else tuple(taken or ())


def _load_graph(
    folder: Path, config: Any, settings: ModelSettings, placement: Placement, auto_class: str | None
) -> Any:
    if auto_class in (None, SPEECH):
        raise SettingsError(
            f"runtime {settings.runtime} is for tasks of encoders, and the folder generates text: set runtime to torch"
        )
    from hf_triton.runner.graph_model import GPU_PROVIDERS

    check_graph(folder, settings)  # says first that there is no such GPU
    is_for_gpu = settings.runtime in GPU_PROVIDERS
    if (placement.device_map() == {"": "cpu"}) is is_for_gpu:
        own, other, kind = ("a GPU", "the CPU", "GPU") if is_for_gpu else ("the CPU", "a GPU", "CPU")
        raise SettingsError(
            f"runtime {settings.runtime} computes on {own}, and Triton places this model on {other}: add "
            f"instance_group [{{ kind: KIND_{kind} }}] to config.pbtxt"
        )
    return load_graph(folder, config, settings, placement.device_id)


def _warn_of_slow_dtype(model: Any) -> None:
    """Warn if the CPU has no instructions for the model's dtype."""
    import torch

    if model.device.type == "cpu" and not has_instructions(model.dtype):
        logger.warning(
            "this processor has no instructions for %s: the model is several times faster with the setting dtype %s",
            str(model.dtype).removeprefix("torch."),
            "bfloat16" if has_instructions(torch.bfloat16) else "float32",
        )


def context_length(config: Any, limit: int | None) -> int:
    """The model's context length in tokens: `limit` if given, else the config's value, else 32768.

    Raises:
        SettingsError: `limit` is more than the config's value.
    """
    text_config = config.get_text_config()
    sizes = [size for name in CONTEXT_NAMES if isinstance(size := getattr(text_config, name, None), int) and size > 0]
    if limit is not None and sizes and limit > sizes[0]:
        raise SettingsError(f"max_context_length must be <= {sizes[0]}, the model's own context, got {limit}")
    return limit or next(iter(sizes), 32768)
