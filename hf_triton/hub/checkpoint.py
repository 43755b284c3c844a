# SPDX-License-Identifier: Apache-2.0
"""From a folder on disk to a tokenizer and a model on their device. Asks nobody outside.

What transformers lets pass is refused here: weights that do not match the config (it fills them in at random), pickle
files, Python code from the repository, attention code named by a downloaded config.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Final

from hf_triton.errors import CheckpointError, LoadError, SettingsError
from hf_triton.hub.resolve import Hub
from hf_triton.hub.snapshot import purge_damaged
from hf_triton.protocol.parameters import GREEDY_BELOW, NEUTRAL, WARPERS, GenerationParameters, parse_parameters
from hf_triton.runner.device import DeviceContext
from hf_triton.settings import ModelSettings

logger = logging.getLogger(__name__)

CONTEXT_NAMES: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
"""What model configs call the longest sequence."""
CHAT_TEMPLATE: Final = "chat_template.json"
"""Where older processors of images keep what tokenizers do not read."""
DEFAULT_CONTEXT: Final = 32768
OTHER_PURPOSES: Final = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)
"""How the classes of models end that write no text."""
STALE_BUFFERS: Final = r"(inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids)$"
"""Tensors that older transformers versions saved and newer ones compute; not part of a model's weights."""


@dataclass(frozen=True)
class Placement:
    """Where Triton wants an instance."""

    kind: str
    """`CPU`, `GPU`, or `MODEL`, which leaves the choice to us: spread over all GPUs, or the CPU where there is none."""
    device_id: int

    def device_map(self) -> Any:
        """The placement as transformers takes it.

        Raises:
            CheckpointError: PyTorch cannot use the GPU.
        """
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

    def make_current(self) -> None:
        """Have this thread's kernels run on its GPU; torch chooses by its tensors, and what others write may not."""
        import torch

        if self.kind == "GPU":
            torch.cuda.set_device(self.device_id)


@dataclass
class Checkpoint:
    """A loaded model and what is known of it. A folder's own `load` may put others in the place of its parts."""

    tokenizer: Any
    model: Any
    """In eval mode, on its device."""
    context_length: int
    """Tokens that a prompt and its continuation may have together."""

    @property
    def vocabulary_size(self) -> int:
        """Rows of the input embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model reads the prompt and writes apart."""
        return bool(self.model.config.is_encoder_decoder)

    def generation_defaults(self) -> GenerationParameters:
        """What the checkpoint's generation_config says about the choice of tokens; neutral values say nothing.

        A checkpoint that does not say `do_sample` is greedy, as it is in transformers, whatever temperature it holds.
        So is one with a temperature that leaves nothing to draw (Qwen2.5-VL's 0.000001).
        """
        config = self.model.generation_config
        temperature = getattr(config, "temperature", None)
        do_sample = bool(config.do_sample) and not (temperature is not None and 0 < temperature < GREEDY_BELOW)
        values = {name: getattr(config, name, None) for name in NEUTRAL if do_sample or name not in WARPERS}
        said = {name: value for name, value in values.items() if value is not None and value != NEUTRAL[name]}
        return parse_parameters({"do_sample": do_sample, **said})


def load_checkpoint(hub: Hub, settings: ModelSettings, placement: Placement) -> Checkpoint:
    """Find and load what the settings name; a damaged cache entry is purged and fetched again, once.

    Raises:
        LoadError: One sentence with the model, the cause and the remedy.
    """
    folders = _find(hub)
    before = _stamps(folders)
    try:
        return _load(*folders, settings, placement)
    except LoadError as error:
        damaged = [name for folder in set(folders) if hub.can_fetch_again(folder) for name in purge_damaged(folder)]
        if not damaged and _stamps(folders) == before:  # another instance of the model may have mended them
            raise
        logger.warning("%s damaged in the cache (%s); fetching again", ", ".join(damaged) or "files", error.code)
    return _load(*_find(hub), settings, placement)


def _find(hub: Hub) -> tuple[Path, Path]:
    """The folders of the model and of its tokenizer; often the same."""
    folder = hub.model_folder()
    return folder, hub.tokenizer_folder() or folder


def _stamps(folders: tuple[Path, ...]) -> list[int]:
    """When files were last added to the folders, or removed."""
    return [folder.stat().st_mtime_ns for folder in folders]


def _load(folder: Path, tokenizer_folder: Path, settings: ModelSettings, placement: Placement) -> Checkpoint:
    with DeviceContext():
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        config = _load_config(folder, settings)
        _check_generation_config(folder, settings)
        tokenizer = _load_tokenizer(tokenizer_folder, settings)
        model = _load_model(folder, config, settings, placement)
    model.eval()
    checkpoint = Checkpoint(tokenizer, model, context_length(config, settings.max_context_length))
    vocabulary_size = _explained(settings, "the model", lambda: checkpoint.vocabulary_size)
    if len(tokenizer) > vocabulary_size:
        logger.warning("the tokenizer knows %d tokens and the model %d", len(tokenizer), vocabulary_size)
    _explained(settings, "generation_config.json", checkpoint.generation_defaults)
    logger.info(
        "%s in %s on %s, attention %s, context of %d tokens",
        type(model).__name__,
        str(model.dtype).removeprefix("torch."),
        model.device,
        model.config._attn_implementation,
        checkpoint.context_length,
    )
    _warn_of_slow_dtype(model)
    return checkpoint


def _warn_of_slow_dtype(model: Any) -> None:
    """Say so where a CPU has no instructions for the model's dtype."""
    import torch

    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    has_instructions = {
        # oneDNN takes bfloat16 wherever there is AVX-512, which does not have it from the beginning.
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and (not torch.cpu._is_avx512_supported() or torch.cpu._is_avx512_bf16_supported()),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    if not has_instructions.get(model.dtype, True):
        logger.warning(
            "this processor has no instructions for %s: texts come several times as fast with the setting dtype %s",
            str(model.dtype).removeprefix("torch."),
            "bfloat16" if has_instructions[torch.bfloat16] else "float32",
        )


def context_length(config: Any, limit: int | None) -> int:
    """Tokens that fit the model: `limit`, which may not be more than its config says; without, that, or 32768.

    Raises:
        SettingsError: The limit is more than the model can take.
    """
    text_config = config.get_text_config()
    sizes = [size for name in CONTEXT_NAMES if isinstance(size := getattr(text_config, name, None), int) and size > 0]
    if limit is not None and sizes and limit > sizes[0]:
        raise SettingsError(f"max_context_length must be <= {sizes[0]}, the model's own context, got {limit}")
    return limit or next(iter(sizes), DEFAULT_CONTEXT)


# --- parts -----------------------------------------------------------------------------------------------------------


def _load_config(folder: Path, settings: ModelSettings) -> Any:
    from transformers import AutoConfig

    return _explained(
        settings,
        "config.json",
        lambda: AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code, local_files_only=True),
    )


def _check_generation_config(folder: Path, settings: ModelSettings) -> None:
    """Refuse a generation_config.json that cannot be read; transformers would go on without it."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").exists():
        _explained(settings, "generation_config.json", lambda: GenerationConfig.from_pretrained(folder))


def _load_tokenizer(folder: Path, settings: ModelSettings) -> Any:
    from transformers import AutoTokenizer

    tokenizer = _explained(
        settings,
        f"the tokenizer {settings.tokenizer}" if settings.tokenizer else "the tokenizer",
        lambda: AutoTokenizer.from_pretrained(
            folder, trust_remote_code=settings.trust_remote_code, local_files_only=True
        ),
    )
    if tokenizer.chat_template is None and (folder / CHAT_TEMPLATE).exists():
        tokenizer.chat_template = _explained(settings, CHAT_TEMPLATE, lambda: _read_chat_template(folder))
    return tokenizer


def _read_chat_template(folder: Path) -> str | dict[str, str] | None:
    """One template, or several by name, in the forms that transformers reads of a tokenizer."""
    template: Any = json.loads((folder / CHAT_TEMPLATE).read_text(encoding="utf-8-sig"))["chat_template"]
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}
    texts = list(template.values()) if isinstance(template, dict) else [template]
    if template is not None and not all(isinstance(text, str) for text in texts):
        raise TypeError("chat_template is no text")
    found: str | dict[str, str] | None = template
    return found


def _load_model(folder: Path, config: Any, settings: ModelSettings, placement: Placement) -> Any:
    _check_purpose(settings, config)
    auto_class = auto_class_of(config)
    device_map = placement.device_map()
    placement.make_current()
    if settings.load_format == "dummy":
        load = _dummy_loader(auto_class, config, settings, device_map)
        return _explained(settings, "the model", lambda: _with_attention(settings, load))
    arguments: dict[str, Any] = {
        "config": config,
        "dtype": settings.dtype,
        "device_map": device_map,
        "trust_remote_code": settings.trust_remote_code,
        "local_files_only": True,
        "use_safetensors": None if settings.allow_pickle else True,
        "ignore_mismatched_sizes": True,  # they are refused below, in words of our own
        "output_loading_info": True,
    }
    if settings.quantization_config:
        arguments["quantization_config"] = dict(settings.quantization_config)
    model, info = _explained(
        settings,
        "the weights",
        lambda: _with_attention(
            settings, lambda attention: auto_class.from_pretrained(folder, attn_implementation=attention, **arguments)
        ),
    )
    check_weights(settings, info)
    return model


def _check_purpose(settings: ModelSettings, config: Any) -> None:
    """Refuse a checkpoint of a model that writes nothing; transformers would give it a head that nobody trained.

    Raises:
        CheckpointError: Its config.json says so.
    """
    for name in config.architectures or ():
        if name.endswith(OTHER_PURPOSES):
            raise CheckpointError(
                "unsupported_model",
                f"{settings.huggingface_model} is a {name} by its config.json, which writes no text: take a model that "
                "does",
            )


def auto_class_of(config: Any) -> Any:
    """The auto class of transformers that loads a model which writes texts.

    Of a model that reads images or sound too that is the one with all its parts, unless its text part is a model of its
    own (Llama 4, Qwen3.5): then it is that.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

    usual = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    known = (each for each in (usual, AutoModelForMultimodalLM) if type(config) in each._model_mapping)
    return next(known, usual)  # which says what it knows, or runs the repository's own code


def _dummy_loader(auto_class: Any, config: Any, settings: ModelSettings, device_map: Any) -> Callable[[str], Any]:
    """Random weights through the loader's own path, so that they are placed as real ones would be."""

    def load(attention: str) -> Any:
        import torch

        kind = auto_class._model_mapping[type(config)]
        is_part = kind.config_class is config.sub_configs.get("text_config")  # as auto classes have it
        dtype = config.dtype or torch.float32 if settings.dtype == "auto" else getattr(torch, settings.dtype)
        return kind.from_pretrained(
            None,
            config=config.get_text_config() if is_part else config,
            state_dict={},
            dtype=dtype,
            device_map=device_map,
            attn_implementation=attention,
            local_files_only=True,
        )

    return load


def _with_attention(settings: ModelSettings, load: Callable[[str], Any]) -> Any:
    """Load with the attention code that the settings name; `auto` tries sdpa, then eager."""
    if settings.attn_implementation != "auto":
        return load(settings.attn_implementation)
    try:
        return load("sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return load("eager")


def check_weights(settings: ModelSettings, info: Any) -> None:
    """Refuse a checkpoint whose tensors are not those of the model.

    Args:
        settings: To name the model, and whether more tensors than the model's are allowed.
        info: transformers' loading info: `missing_keys`, `unexpected_keys`, `mismatched_keys`, `error_msgs`.

    Raises:
        CheckpointError: Tensors are missing, have other shapes, or there are more of them.
    """
    extra = [name for name in info["unexpected_keys"] if not re.search(STALE_BUFFERS, name)]
    shapes = [f"{name} is {list(found)} and must be {list(wanted)}" for name, found, wanted in info["mismatched_keys"]]
    faults = [
        _fault("missing", info["missing_keys"]),
        _fault("of a wrong shape", shapes),
        _fault("not the model's", () if settings.allow_extra_weights else extra),
        _fault("unreadable", info.get("error_msgs") or ()),
    ]
    found = "; ".join(filter(None, faults))
    if found:
        hint = (
            ", or set allow_extra_weights to true if they may be left out"
            if extra and len(faults[2]) == len(found)
            else ""
        )
        revision = "" if settings.revision == "main" else f" (revision {settings.revision})"
        raise CheckpointError(
            "weights_mismatch",
            f"the tensors of {settings.huggingface_model}{revision} do not match its config.json: "
            f"{found}: use a complete checkpoint of this architecture{hint}",
        )


def _fault(what: str, names: Collection[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {what} ({shown})"


def _explained(settings: ModelSettings, part: str, load: Callable[[], Any]) -> Any:
    """Load a part; say in one sentence why where it fails."""
    try:
        return load()
    except LoadError:
        raise
    except Exception as error:
        raise _explain(settings, part, error) from error


def _explain(settings: ModelSettings, part: str, error: Exception) -> CheckpointError:
    name, text = settings.huggingface_model, " ".join(str(error).split())
    short = shorten(text, 300, placeholder=" ...")
    if "trust_remote_code" in text:
        return CheckpointError(
            "needs_trust_remote_code",
            f"{name} brings its own Python code: read it, and set trust_remote_code to true in config.pbtxt to run it",
        )
    if "does not recognize this architecture" in text or "Unrecognized configuration class" in text:
        return _unsupported(name, text)
    if "weights_only" in text:
        return CheckpointError(
            "weights_not_safe",
            f"the pickle weights of {name} hold more than tensors, which could run code when they are read: do not use "
            "them; find safetensors",
        )
    if isinstance(error, ImportError):
        return CheckpointError(
            "checkpoint_invalid",
            f"{part} of {name} cannot be loaded without a Python package ({short}): install it, or leave out the "
            "setting that asks for it",
        )
    remedy = "fetch the checkpoint again, or choose another revision"
    if settings.quantization_config and "quantiz" in text.lower():
        remedy = "correct the setting quantization_config"
    return CheckpointError(
        "checkpoint_invalid", f"{part} of {name} cannot be loaded ({type(error).__name__}: {short}): {remedy}"
    )


def _unsupported(name: str, text: str) -> CheckpointError:
    import transformers

    found = re.search(r"(?<=model type `)[^`]+|(?<=\.)\w+Config(?=')", text)
    kind = f" ({found[0]})" if found else ""
    return CheckpointError(
        "unsupported_model",
        f"transformers {transformers.__version__} has no text generation model of the kind of {name}{kind}: choose "
        "another model, or build the image with a newer transformers (--build-arg TRANSFORMERS=...); where there is no "
        "image, install one",
    )
