# SPDX-License-Identifier: Apache-2.0
"""Loads config, tokenizer and weights with transformers, and refuses what transformers would let pass.

That is: weights that do not match the config (transformers initializes the rest at random), pickle files, Python code
from the repository, and an attention implementation named by a downloaded config. No network.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import logging
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import CheckpointError, LoadError, SettingsError, clip
from hf_triton.files import read_json
from hf_triton.hub.gguf import find_gguf
from hf_triton.hub.gguf_config import apply_header
from hf_triton.hub.gguf_header import check_gguf
from hf_triton.hub.gguf_tokenizer import mend_tokenizer
from hf_triton.hub.imports import hidden
from hf_triton.hub.kernels import CAPABILITIES, describe_lack, use_pulled
from hf_triton.hub.kind import find_tasks, read_object
from hf_triton.hub.load_failures import explain_load
from hf_triton.hub.processor import check_sides, image_obstacle, reads_images
from hf_triton.hub.scales import BLOCK, check_scales, whole_blocks
from hf_triton.hub.sentence_names import SPARSE_LINEAR
from hf_triton.hub.sizes import check_sizes
from hf_triton.hub.weights import check_finite, check_weights
from hf_triton.protocol.names import TEXT_TO_TEXT, TaskName
from hf_triton.runner.cpu import grouped_layers, small_layers
from hf_triton.settings import ModelSettings

logger = logging.getLogger(__name__)

CHAT_TEMPLATE: Final = "chat_template.json"
"""Older image processors keep their chat template here, which tokenizers do not read."""
GPU_PACKAGES: Final = "fla", "causal_conv1d", "mamba_ssm"
"""Kernels for hybrid and state-space models."""
MAX_COUNT: Final = 1_000_000
COUNTED: Final = re.compile("layer|label|expert|block|depth|stage")
"""Parts of names of numbers in configs, for each of which transformers makes a list that long."""
TOKENIZER: Final = "tokenizer.json"
SPEECH: Final = "AutoModelForSpeechSeq2Seq"
WHISPER: Final = "WhisperForConditionalGeneration"
IMAGE_CLASSIFIER: Final = "AutoModelForImageClassification"
IMAGES_AND_TEXTS: Final = "AutoModelForZeroShotImageClassification"
READ_IMAGES: Final = (IMAGE_CLASSIFIER, IMAGES_AND_TEXTS)
"""Classes of models with an image processor."""


@contextlib.contextmanager
def loading(part: str, settings: ModelSettings, folder: Path | None = None) -> Iterator[None]:
    """Turn an exception in the block into a `CheckpointError` of `part`, see `explain_load`; `folder` may show why."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        has_quantization = bool(settings.quantization_config)
        raise explain_load(error, part, settings.huggingface_model, has_quantization, folder) from error


def silence_transformers() -> None:
    """Turn off transformers' progress bars and warnings, in whose place errors of ours stand."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def gguf_of(folder: Path, settings: ModelSettings) -> str | None:
    """The GGUF file that a checkpoint is loaded from; None: it is loaded from other weights."""
    return find_gguf(folder, settings.gguf_file, allow_pickle=settings.allow_pickle)


def keeps_gguf_bits(settings: ModelSettings, *, is_on_cpu: bool) -> bool:
    """Whether the layers of a GGUF file keep their bits, of formats that a kernel for this processor has."""
    return is_on_cpu and settings.dtype == "auto" and grouped_layers() is not None


def load_config(folder: Path, settings: ModelSettings) -> Any:
    """Load the model's config, and check that its generation_config.json can be read.

    transformers would continue without the latter.
    """
    from transformers import AutoConfig, GenerationConfig

    if gguf := gguf_of(folder, settings):
        header = check_gguf(folder / gguf, settings.huggingface_model)
        with loading(f"the header of {gguf}", settings, folder):
            config = AutoConfig.from_pretrained(folder, gguf_file=gguf, local_files_only=True)
            apply_header(config, header, folder / gguf, settings.huggingface_model)
        return config
    _check_counts(folder, settings)
    with loading("config.json", settings, folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code, local_files_only=True)
    if (folder / "generation_config.json").exists():
        with loading("generation_config.json", settings, folder):
            GenerationConfig.from_pretrained(folder)
    _prefer_fp8(config)
    return config


def _check_counts(folder: Path, settings: ModelSettings) -> None:
    """Refuse numbers of layers and labels that no model has: transformers makes lists of them before it sees any."""
    with contextlib.suppress(RecursionError):  # transformers refuses it
        for name, number in _counts(read_object(folder / "config.json")):
            if number > MAX_COUNT:
                raise CheckpointError(
                    "checkpoint_invalid",
                    f"config.json of {settings.huggingface_model} has {name[:80]} {clip(number)}, more than "
                    f"the {MAX_COUNT} that are read: correct it, or choose another revision",
                )


def _counts(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """The numbers in a config that count parts of a model, and their names."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _counts(entry, key)
    elif isinstance(value, list):
        for entry in value:
            yield from _counts(entry, name)
    elif type(value) is int and COUNTED.search(name):
        yield name, value


def load_tokenizer(folder: Path, settings: ModelSettings) -> Any:
    """Load the tokenizer, with the chat template of an image processor if it has none of its own.

    Raises:
        CheckpointError: It cannot be loaded, or transformers found none of its files and made up an empty one.
    """
    from transformers import AutoTokenizer

    gguf = None if settings.tokenizer else gguf_of(folder, settings)
    part = f"the tokenizer of {gguf}" if gguf else f"the tokenizer {settings.tokenizer or ''}".rstrip()
    with loading(part, settings, folder):
        tokenizer = AutoTokenizer.from_pretrained(
            folder,
            trust_remote_code=settings.trust_remote_code,
            local_files_only=True,
            **({"gguf_file": gguf} if gguf else {}),
        )
        if gguf:
            header = check_gguf(folder / gguf, settings.huggingface_model)
            mend_tokenizer(tokenizer, header, settings.huggingface_model)
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    if len(tokenizer) <= len(special):
        names = [name for name in tokenizer.vocab_files_names.values() if name != TOKENIZER]
        raise CheckpointError(
            "checkpoint_incomplete",
            f"the tokenizer of {settings.tokenizer or settings.huggingface_model} has no token but special ones: its "
            f"class {type(tokenizer).__name__} reads {' or '.join([TOKENIZER, ' and '.join(names)][: 1 + bool(names)])}"
            ", and there is none: set tokenizer to a repository or folder that has it",
        )
    if tokenizer.chat_template is None and (folder / CHAT_TEMPLATE).exists():
        with loading(CHAT_TEMPLATE, settings, folder):
            tokenizer.chat_template = _read_chat_template(folder)
    return tokenizer


def load_image_processor(folder: Path, settings: ModelSettings) -> Any:
    """Load the image processor that computes with pillow and numpy alone, in its thread.

    Raises:
        CheckpointError: It cannot be loaded, or pillow is missing.
    """
    if importlib.util.find_spec("PIL") is None:
        raise CheckpointError(
            "unsupported_model", "images are read by the package pillow: pip install 'hf-triton[image]'"
        )
    from transformers import AutoImageProcessor

    with loading("preprocessor_config.json", settings, folder):
        load: Any = AutoImageProcessor.from_pretrained
        processor = load(folder, backend="pil", trust_remote_code=settings.trust_remote_code, local_files_only=True)
    check_sides(processor, settings)
    return processor


def _read_chat_template(folder: Path) -> str | dict[str, str] | None:
    """One template, or several by name, in the forms that transformers accepts of a tokenizer."""
    template: Any = read_json(folder / CHAT_TEMPLATE, "utf-8-sig")["chat_template"]
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    sources = list(template.values()) if isinstance(template, dict) else [template]
    if template is not None and not all(isinstance(source, str) for source in sources):
        raise TypeError("chat_template is not a string")
    checked: str | dict[str, str] | None = template
    return checked


def load_model(
    folder: Path, config: Any, settings: ModelSettings, device_map: Any, auto_class_name: str | None = None
) -> Any:
    """Load the model onto its device; with random weights if the settings say `load_format: dummy`.

    A model that is not computed with has no weights: it is on torch's device `meta`. `auto_class_name` is transformers'
    class for the task of an encoder; None for text generation.

    Raises:
        CheckpointError: The model does not do the task, or its weights cannot be loaded or do not match its config.
    """
    # transformers takes any kernels that it can import; a folder's own code can import them before and after
    with hidden(GPU_PACKAGES if device_map == {"": "cpu"} else ()):
        return _load_model(folder, config, settings, device_map, auto_class_name)


def _load_model(
    folder: Path, config: Any, settings: ModelSettings, device_map: Any, auto_class_name: str | None
) -> Any:
    use_pulled()
    auto_class = model_class(folder, config, settings, auto_class_name)
    if not settings.has_weights:
        import torch

        with loading("the model", settings, folder), torch.device("meta"):
            return auto_class.from_config(config, trust_remote_code=settings.trust_remote_code)
    check_small_weights(folder, config, settings, auto_class_name, is_on_cpu=device_map in ({"": "cpu"}, {"": "meta"}))
    if settings.load_format == "dummy":
        with loading("the model", settings, folder):
            model = _with_attention(settings, _dummy_loader(auto_class, config, settings, device_map))
            if settings.bits is not None and (small := small_layers()):
                small.make_small(model, settings.bits)
            return model
    check_sizes(auto_class, folder, config, settings)
    check_scales(folder, stored_quantization(config), settings)
    why = undo_without_kernels(config, settings, is_on_cpu=device_map == {"": "cpu"})
    if why is not None:
        logger.warning("%s: its quantisation is undone at load, since %s", settings.huggingface_model, why)
    arguments: dict[str, Any] = {
        "config": config,
        **_small_weights(settings, device_map),
        "dtype": settings.dtype,
        "device_map": device_map,
        "trust_remote_code": settings.trust_remote_code,
        "local_files_only": True,
        "use_safetensors": None if settings.allow_pickle else True,
        "ignore_mismatched_sizes": True,  # `check_weights` refuses them, with our sentence
        "output_loading_info": True,
    }
    gguf = gguf_of(folder, settings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(loading(f"the weights of {gguf}" if gguf else "the weights", settings, folder))
        stack.enter_context(hidden(["kernels"] if gguf else ()))
        stack.enter_context(whole_blocks(stored_quantization(config)))
        if gguf:
            from hf_triton.hub.gguf_weights import reading

            header = check_gguf(folder / gguf, settings.huggingface_model)
            keeps_bits = keeps_gguf_bits(settings, is_on_cpu=device_map == {"": "cpu"})
            own = stack.enter_context(reading(header, keeps_bits=keeps_bits))
            arguments |= {"gguf_file": gguf, "quantization_config": own}
        if settings.tensor_parallel_size > 1:
            from transformers.distributed.configuration_utils import DistributedConfig

            divided = DistributedConfig(tp_size=settings.tensor_parallel_size)
            arguments |= {"device_map": None, "distributed_config": divided}
        if settings.quantization_config:
            arguments["quantization_config"] = _quantization(settings, is_undone=why is not None)
        model, info = _with_attention(
            settings, lambda attention: auto_class.from_pretrained(folder, attn_implementation=attention, **arguments)
        )
        _decompress(model)
    if why is not None:
        logger.info("the weights take %.3g GB", model.get_memory_footprint(return_buffers=False) / 1e9)
    check_weights(settings, info, model, is_headless=auto_class_name == "AutoModel")
    check_finite(settings, model)
    return model


def check_small_weights(
    folder: Path, config: Any, settings: ModelSettings, auto_class_name: str | None, *, is_on_cpu: bool
) -> None:
    """Refuse the setting `weights` where nothing can keep it.

    Raises:
        SettingsError: The sentence says what to change.
    """
    if settings.bits is None:
        return
    name, remedy = settings.huggingface_model, None
    if auto_class_name is not None or settings.task in TEXT_TO_TEXT or config.is_encoder_decoder:
        remedy = "is for language models that generate text from a prompt alone: leave it out"
    elif not is_on_cpu:
        remedy = "is for CPUs: set KIND_CPU in instance_group, or use quantization_config in its place"
    elif gguf_of(folder, settings):
        remedy = f"rounds weights of full precision, and {name} is a GGUF file: leave it out, or name the safetensors"
    elif is_quantized(config):
        remedy = f"rounds weights of full precision, and {name} is quantised: leave it out, or name the original"
    elif small_layers() is None:
        remedy = "needs numba (pip install 'hf-triton[cpu]') and a processor with AVX2: leave it out"
    if remedy is not None:
        raise SettingsError(f"the setting weights ({settings.weights}) {remedy}")


def _small_weights(settings: ModelSettings, device_map: Any) -> dict[str, Any]:
    """What `from_pretrained` is given for the setting `weights`."""
    small = small_layers() if settings.bits is not None and device_map != {"": "meta"} else None
    return {"quantization_config": small.SmallWeights(settings.bits)} if small else {}


def is_quantized(config: Any) -> bool:
    """Whether a checkpoint is quantised on disk."""
    return any(getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))


def stored_quantization(config: Any) -> dict[str, Any]:
    """The quantisation of a checkpoint on disk; empty: there is none. The config's own object, if that is a dict."""
    found = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    return next((each for each in found if isinstance(each, dict)), {})


def undo_without_kernels(config: Any, settings: ModelSettings, *, is_on_cpu: bool = False) -> str | None:
    """Have a checkpoint's quantisation undone at load, if this machine has not what computes it; returns why.

    transformers does so without a GPU; with one it fetches kernels of the Hub, at the first request. The config then
    says so; None: it is not undone, or transformers knows itself.
    """
    import torch

    own = stored_quantization(config)
    wanted = own | settings.quantization_config
    method = str(wanted.get("quant_method"))
    if wanted.get("dequantize") or method not in CAPABILITIES or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability() < CAPABILITIES[method]:
        return None
    why = f"{method} is not computed on a CPU" if is_on_cpu else describe_lack(method, settings.huggingface_model)
    rows, block = _rows_of_experts(config), wanted.get("weight_block_size", BLOCK)
    if why is None and method == "fp8" and rows and block and rows % block[0]:
        why = f"its experts have {rows} rows, no whole blocks of {block[0]}, and transformers joins two of them"
    if why is not None and not own:
        raise CheckpointError("checkpoint_invalid", f"{why}; or leave out the setting quantization_config")
    if why is not None:
        own["dequantize"] = True
    return why


def _rows_of_experts(config: Any) -> int | None:
    """Rows of an expert's first matrices; None: there are no experts."""
    text = config.get_text_config()
    has_experts = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    names = ("moe_intermediate_size", "intermediate_size") if has_experts else ()
    return next((rows for name in names if isinstance(rows := getattr(text, name, None), int)), None)


def check_quantization(config: Any, settings: ModelSettings) -> tuple[str, bool, str | None] | None:
    """Check without weights that transformers can load what is, or is to be, quantised.

    Returns the method, whether it is undone at load, and why, if it is for want of kernels; None if there is none.
    """
    if not settings.quantization_config and not is_quantized(config):
        return None
    import torch
    from transformers.quantizers import auto

    device_map = {"": "cuda" if torch.cuda.is_available() else "cpu"}
    config = copy.deepcopy(config)
    use_pulled()
    with loading("the weights", settings):
        why = undo_without_kernels(config, settings)
        wanted = _quantization(settings, is_undone=why is not None) if settings.quantization_config else None
        find: Any = auto.get_hf_quantizer
        quantizer = find(config, wanted, device_map, weights_only=True, user_agent={})[0]
    if quantizer is None:
        return None
    method = quantizer.quantization_config.quant_method
    is_undone = bool(getattr(quantizer.quantization_config, "dequantize", False))
    return str(getattr(method, "value", method)), is_undone, why


def check_attention(auto_class: Any, config: Any, settings: ModelSettings) -> None:
    """Check without weights that the model has the attention implementation of the setting."""
    if settings.attn_implementation == "auto" or type(config) not in auto_class._model_mapping:
        return
    import torch

    use_pulled()
    with loading("the model", settings), torch.device("meta"):
        auto_class.from_config(config, dtype=torch.bfloat16, attn_implementation=settings.attn_implementation)


def _quantization(settings: ModelSettings, *, is_undone: bool = False) -> Any:
    """The setting as transformers' own object, which may also say how a quantised checkpoint is loaded."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    kind = json.dumps(settings.quantization_config.get("quant_type"))
    if "Float8DynamicActivation" in kind and not computes_fp8():
        raise CheckpointError(
            "device_unavailable",
            "the setting quantization_config has torchao compute in FP8, which needs a GPU of CUDA capability 8.9 (L4, "
            "RTX 40, H100) or later: use one, or another method",
        )
    build: Any = AutoQuantizationConfig.from_dict
    return build(settings.quantization_config | ({"dequantize": True} if is_undone else {}))


def _decompress(model: Any) -> None:
    """Have compressed-tensors widen weights now, not at the first forward, and leave no wrapper around each module.

    Its wrappers keep parameters where others do not reach them (casts, adapters), and each forward pays for them.
    """
    if hasattr(model, "ct_decompress_hook"):
        from compressed_tensors.offload import remove_dispatch  # type: ignore[import-untyped]

        model.hf_quantizer.compressor.decompress_model(model)
        remove_dispatch(model)


def _prefer_fp8(config: Any) -> None:
    """Have FP8 of compressed-tensors computed in FP8, if the device can; transformers widens it at the first forward.

    The setting `quantization_config` comes before it.
    """
    found = stored_quantization(config)
    if found.get("quant_method") == "compressed-tensors" and computes_fp8():
        found.setdefault("use_optimized_inference", True)


def computes_fp8() -> bool:
    """Whether the device multiplies FP8 matrices (CUDA capability 8.9: L4, RTX 40, H100)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def model_class(folder: Path, config: Any, settings: ModelSettings, auto_class_name: str | None = None) -> Any:
    """The auto class of transformers that loads the model. Arguments as `load_model` has them."""
    is_gguf = gguf_of(folder, settings) is not None
    if auto_class_name is not None:
        if is_gguf:
            raise CheckpointError(
                "unsupported_model",
                f"{settings.huggingface_model} is served from a GGUF file, and the folder's task is one of encoders: "
                "name the repository with the original safetensors, or set task to text-generation",
            )
        return _encoder_class(auto_class_name, settings, config)
    _check_generates(folder, settings, config, is_gguf=is_gguf)
    sees = reads_images(config) and not image_obstacle(folder, settings)
    return _check_reads_text(auto_class_of(config, sees=sees), settings, config)


def check_known(auto_class: Any, config: Any, settings: ModelSettings) -> None:
    """Refuse a model that neither transformers nor the repository's own code has."""
    if type(config) not in auto_class._model_mapping and not settings.trust_remote_code:
        raise CheckpointError(
            "unsupported_model",
            f"{architecture_names(config)} is not one of the models of transformers' {auto_class.__name__}: choose "
            "another model, or set task to what it does",
        )


def _check_generates(folder: Path, settings: ModelSettings, config: Any, *, is_gguf: bool) -> None:
    """Refuse a model for another task, to which transformers would add an untrained language model head."""
    if settings.task in TEXT_TO_TEXT and not config.is_encoder_decoder:
        raise CheckpointError(
            "unsupported_model",
            f"the task {settings.task} needs an encoder-decoder such as T5, BART or Marian, and "
            f"{settings.huggingface_model} is a {architecture_names(config)} according to its config.json: set task to "
            "text-generation, and put the instruction into the prompt",
        )
    tasks = [] if is_gguf else find_tasks(folder)  # by a config.json, which is not read
    if not tasks or tasks[0] == "text-generation" or (settings.task and "text-generation" in tasks):
        return
    task = tasks[0]
    about = f"{settings.huggingface_model} is a {architecture_names(config)} according to its config.json"
    if task not in typing.get_args(TaskName):
        advice = "which does not generate text: choose a model that does"
    elif settings.task is not None:
        advice = f"which does not generate text: set task to {task}, or choose a model that does"
    else:
        advice = (
            f"a model for {task} that was not on disk when the folder's inputs were declared: set task to {task}, or "
            "load the folder again"
        )
    raise CheckpointError("unsupported_model", f"{about}, {advice}")


def architecture_names(config: Any) -> str:
    """What a config says that its model is."""
    return ", ".join(map(str, config.architectures or ())) or type(config).__name__


def _encoder_class(name: str, settings: ModelSettings, config: Any) -> Any:
    """The auto class of a task of an encoder; the checkpoint must have a trained head for it."""
    import transformers

    if name == "AutoModel":
        return _text_encoder(settings, config)
    if name == SPEECH and WHISPER not in (config.architectures or ()):
        raise CheckpointError(
            "unsupported_model",
            f"{settings.huggingface_model} is a {architecture_names(config)} according to its config.json, and "
            f"automatic-speech-recognition serves Whisper ({WHISPER}) alone: choose such a checkpoint",
        )
    head, auto_class = name.removeprefix("AutoModel"), getattr(transformers, name)
    rows = auto_class._model_mapping._model_mapping.values()
    known = {each for row in rows for each in ([row] if isinstance(row, str) else row)}
    endings = (head, "ForPreTraining") if head == "ForMaskedLM" else (head,)  # whose weights decide
    names = config.architectures or ()
    other = f", or {SPARSE_LINEAR[-1]} beside it" if settings.task == "sparse-embeddings" else ""
    if names and not any(each in known or each.endswith(endings) for each in names):
        raise CheckpointError(
            "unsupported_model",
            f"{settings.huggingface_model} is a {architecture_names(config)} according to its config.json, and the "
            f"folder's task needs a model {head}{other}: choose another checkpoint, or another task",
        )
    return auto_class


def _text_encoder(settings: ModelSettings, config: Any) -> Any:
    """The auto class of a model without its head; of T5 and its like, the encoder alone."""
    from transformers import AutoModel, AutoModelForTextEncoding

    if type(config) in AutoModelForTextEncoding._model_mapping:
        return AutoModelForTextEncoding
    if config.is_encoder_decoder:
        raise CheckpointError(
            "unsupported_model",
            f"{settings.huggingface_model} has an encoder and a decoder, and transformers has no class for the encoder "
            f"of a {architecture_names(config)} alone: choose another model",
        )
    return AutoModel


def _check_reads_text(auto_class: Any, settings: ModelSettings, config: Any) -> Any:
    """The class; refuses an encoder-decoder whose encoder reads images or sound, as an image captioner's does."""
    kind = auto_class._model_mapping.get(type(config), None)
    reads = getattr(kind, "main_input_name", "input_ids")
    if config.is_encoder_decoder and reads != "input_ids":
        raise CheckpointError(
            "unsupported_model",
            f"{settings.huggingface_model} is a {architecture_names(config)} according to its config.json, which reads "
            f"{reads} and no text: choose a model that does",
        )
    return auto_class


def auto_class_of(config: Any, *, sees: bool = False) -> Any:
    """The auto class of transformers that loads a model for text generation.

    For a model that also reads images or sound, it is the class of the whole model, unless its text part is a model of
    its own (Llama 4, Qwen3.5) and it takes no images here.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
        AutoModelForSeq2SeqLM,
    )

    if sees:
        return AutoModelForImageTextToText
    usual = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    known = (auto for auto in (usual, AutoModelForMultimodalLM) if type(config) in auto._model_mapping)
    return next(known, usual)  # which lists what it knows, or runs the repository's own code


def _dummy_loader(auto_class: Any, config: Any, settings: ModelSettings, device_map: Any) -> Callable[[str], Any]:
    """Initialize random weights through the loader's own code, so that they are placed like real ones."""

    def load(attention: str) -> Any:
        import torch

        kind = auto_class._model_mapping[type(config)]
        is_text_part = kind.config_class is config.sub_configs.get("text_config")  # as auto classes decide it
        dtype = config.dtype or torch.float32 if settings.dtype == "auto" else getattr(torch, settings.dtype)
        return kind.from_pretrained(
            None,
            config=config.get_text_config() if is_text_part else config,
            state_dict={},
            dtype=dtype,
            device_map=device_map,
            attn_implementation=attention,
            local_files_only=True,
        )

    return load


def _with_attention(settings: ModelSettings, load: Callable[[str], Any]) -> Any:
    """Load with the attention implementation of the settings; `auto` tries sdpa, then eager."""
    if settings.attn_implementation != "auto":
        return load(settings.attn_implementation)
    try:
        return load("sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return load("eager")
