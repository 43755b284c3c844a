# SPDX-License-Identifier: Apache-2.0
"""Translates exceptions of transformers to an error code and a sentence, whose remedy the exception decides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any, Final

from hf_triton.errors import CheckpointError, clip
from hf_triton.hub.failures import causes_of
from hf_triton.hub.gguf import SUFFIX
from hf_triton.hub.kind import read_object

NEEDS_GPTQMODEL: Final = "requires (gptqmodel|optimum)(?![\\w-])|GPU is required to quantize or run quantize model"
"""What transformers says of GPTQ and AWQ without these packages; the last is GPTQ on a CPU, which gptqmodel runs on."""
NEEDS_GPU: Final = "(requires a|No) GPU|A GPU is needed|only supported on GPUs"
REMOVE_SETTING: Final = ", or leave out the setting that asks for it"
NEEDS_PACKAGE: Final = r"pip install (?:-U |--upgrade )?[`'\"]?([\w.-]*\w)|pypi\.org/project/([\w.-]*\w)"
QUANTIZED_PACKAGES: Final = ("bitsandbytes", "compressed-tensors", "compressed_tensors", "torchao")
"""What the extra `quantized` installs."""
OUT_OF_MEMORY: Final = "out of memory|can't allocate memory|cannot allocate memory"
DAMAGED: Final = (
    "not a valid JSON|Unable to (load|open) (weights|file)|PytorchStreamReader|unpickl|"
    "(expected|EOF|invalid) .*at line [0-9]+ column|Error parsing line|incomplete metadata|invalid load key|"
    "invalid header or archive"
)
"""What transformers, tokenizers, safetensors and torch say of a file that broke off or is another one."""
DAMAGED_TYPES: Final = ("JSONDecodeError", "UnicodeDecodeError", "SafetensorError", "EOFError", "BadZipFile")
CONFIGS: Final = {"generation_config.json": "generation_config.json", "the tokenizer": "tokenizer_config.json"}
"""The file whose entries a part of the checkpoint depends on; config.json, if it is none of these."""
OTHER_NAMES: Final = {"Padding_idx": "pad_token_id", "quantization config": "quantization_config"}
"""What messages call an entry of config.json."""


def explain_load(
    error: Exception, part: str, name: str, has_quantization_setting: bool, folder: Path | None = None
) -> CheckpointError:
    """Translate an exception of transformers.

    `part` is what cannot be loaded (`the tokenizer`, `config.json`); configs of `folder` may have the wrong entry.
    """
    message = " ".join(str(error).split())
    short = shorten(message, 300, placeholder=" ...")
    if "trust_remote_code" in message:
        return CheckpointError(
            "needs_trust_remote_code",
            f"{name} brings its own Python code: read it, and set trust_remote_code to true in config.pbtxt to run it",
        )
    if "does not recognize this architecture" in message or "Unrecognized configuration class" in message:
        return _unsupported_model(name, message)
    if "weights_only" in message:
        return CheckpointError(
            "weights_not_safe",
            f"the pickle weights of {name} hold more than tensors, which can run code when they are read: do not use "
            "them; find safetensors",
        )
    if family := re.search(r"GGUF model with architecture (.+) is not supported", message):
        return _unsupported_gguf(name, family[1])
    if re.search(NEEDS_GPTQMODEL, message):
        return CheckpointError(
            "checkpoint_invalid",
            f"{part} of {name} cannot be loaded without the packages gptqmodel and optimum ({short}): install them as "
            "docs/quantisation.md says, or choose other weights",
        )
    if re.search(NEEDS_GPU, message):
        return CheckpointError(
            "device_unavailable",
            f"{part} of {name} cannot be loaded on this machine ({short}): use one with such a GPU, or choose other "
            "weights",
        )
    package = _package(error, message, folder)
    if package is not None:
        remedy = "`pip install 'hf-triton[quantized]'`" if package in QUANTIZED_PACKAGES else f"install {package}"
        of_setting = REMOVE_SETTING if has_quantization_setting or "attention" in message.lower() else ""
        return CheckpointError(
            "checkpoint_invalid",
            f"{part} of {name} cannot be loaded without a Python package ({short}): {remedy}{of_setting}",
        )
    remedy = _remedy(error, message, part, folder)
    if has_quantization_setting and part == "the weights":
        is_of_setting = "quantiz" in message.lower() or isinstance(error, AssertionError | TypeError | ValueError)
        remedy = "correct the setting quantization_config" + ("" if is_of_setting else f", or {remedy}")
    return CheckpointError(
        "checkpoint_invalid", f"{part} of {name} cannot be loaded ({type(error).__name__}: {short}): {remedy}"
    )


def _unsupported_model(name: str, message: str) -> CheckpointError:
    import transformers

    match = re.search(r"(?<=model type `)[^`]+|(?<=\.)\w+Config(?=')", message)
    kind = f" ({match[0]})" if match else ""
    return CheckpointError(
        "unsupported_model",
        f"transformers {transformers.__version__} has no text generation model for the architecture of {name}{kind}: "
        "choose another model, or build the image with a newer transformers (--build-arg TRANSFORMERS=...); outside "
        "the image, install a newer one",
    )


def _unsupported_gguf(name: str, family: str) -> CheckpointError:
    import transformers
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    known = sorted({*GGUF_CONFIG_ARCHS, *GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"})
    return CheckpointError(
        "unsupported_model",
        f"transformers {transformers.__version__} does not read GGUF files of the architecture {clip(family)}, as "
        f"{name} has: serve the repository with the original safetensors; it reads {', '.join(known)}",
    )


def _package(error: Exception, message: str, folder: Path | None) -> str | None:
    """The package that is missing, `it` if the message alone names it; None: none is."""
    named = re.search(NEEDS_PACKAGE, message)
    if named:
        package = named[1] or named[2]
        return None if package == "tiktoken" and _has_broken_sentencepiece(folder) else package
    if isinstance(error, ModuleNotFoundError) and error.name:
        return error.name.partition(".")[0]
    return "it" if isinstance(error, ImportError) else None


def _has_broken_sentencepiece(folder: Path | None) -> bool:
    """Whether a tokenizer.model is not tiktoken's, which is text: transformers takes any that breaks off for one."""
    files = sorted(folder.glob("*.model")) if folder else []
    return any(not file.read_bytes()[:1].isalnum() for file in files)


def _remedy(error: Exception, message: str, part: str, folder: Path | None) -> str:
    """What to do, by what went wrong: memory, a damaged file, or an entry of a config."""
    if isinstance(error, MemoryError) or re.search(OUT_OF_MEMORY, message, re.IGNORECASE):
        if "CUDA" in message:
            return (
                "use a smaller dtype or quantization_config, or set gpu_memory_fraction or max_cache_tokens to less in "
                "the other folders on this GPU"
            )
        return "use a smaller dtype, quantization_config, or a machine with more memory"
    is_damaged = any(type(cause).__name__ in DAMAGED_TYPES for cause in causes_of(error)) or re.search(DAMAGED, message)
    if is_damaged or "tiktoken" in message:
        return "fetch the checkpoint again, or choose another revision"
    if part.endswith(SUFFIX):
        return "choose another GGUF file, or the repository with the original safetensors"
    file = next((own for start, own in CONFIGS.items() if part.startswith(start)), "config.json")
    if "Should have a `model_type`" in message:
        return f"add model_type to {file}, or choose a model in the form of transformers"
    entries = list(_entries(read_object(folder / file))) if folder else []
    names = {other for words, other in OTHER_NAMES.items() if words in message}
    names |= {match for pair in re.findall(r"`(\w+)`|'(\w+)'", message) for match in pair if match}
    wrong = [path for path, _ in entries if path in names]
    wrong = wrong or [f"{path} ({clip(value)})" for path, value in entries if isinstance(value, str) and value in names]
    if wrong:
        return f"correct {wrong[0]} in {file}, or choose another revision"
    if part.startswith("the tokenizer"):
        if folder and (folder / "tokenizer.json").exists():
            return "correct tokenizer.json, or choose another revision"
        return "set tokenizer to a repository or folder with a tokenizer.json, or choose another revision"
    return f"correct {file}, or choose another revision"


def _entries(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of a config and of those inside it, by their dotted names; outer ones first."""
    if not isinstance(config, dict):
        return
    for name, value in config.items():
        yield f"{prefix}{name}", value
    for name, value in config.items():
        yield from _entries(value, f"{prefix}{name}.")
