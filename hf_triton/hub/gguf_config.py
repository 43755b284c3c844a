# SPDX-License-Identifier: Apache-2.0
"""Gives the config that transformers makes of a GGUF header what it leaves out of it: the scaling of positions first.

What changes a model's answers and cannot be applied is refused by name; what may change them is named in the log.
"""

from __future__ import annotations

import logging
import math
import re
import struct
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import CheckpointError, clip
from hf_triton.files import open_regular
from hf_triton.hub.gguf_header import GgufArray, GgufHeader

logger = logging.getLogger(__name__)

F32: Final = 0
MAX_FACTORS: Final = 4096
FREQUENCIES: Final = "rope_freqs.weight"
"""A tensor that divides each pair's frequency, as Llama 3.1 and later have it."""
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors of the same kind, for contexts beyond the one that the model was first trained with, and for others."""
HEAD: Final = "output.weight"
TIED: Final = ("falcon", "bloom")
"""Architectures that transformers ties whatever a file has."""
LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all models have whose frequencies are divided so."""
ATTRIBUTES: Final = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Keys that transformers does not read for every architecture, and entries of configs that mean the same."""
WITHOUT_EFFECT: Final = re.compile(r"attention\.(value_length|causal)|rope\.(dimension_count|scal)|context_length")
"""Keys that say again what others say, or that are looked at here."""


def apply_header(config: Any, header: GgufHeader, file: Path, name: str) -> None:
    """Complete a config, see above.

    Raises:
        CheckpointError: The header asks for what is not served, or contradicts itself.
    """
    own = header.own
    if len(header.files) > 1 and header.architecture not in TIED:  # by the tensors of one part, transformers cannot say
        config.tie_word_embeddings = HEAD not in header.tensors
    read = _read_keys(header.architecture)
    if read is not None:
        _apply_attributes(config, own, read, file.name)
    try:
        scaling = _scaling(config, header)
        if scaling is not None:
            _scale(config, scaling)
    except ValueError as error:
        raise CheckpointError(
            "unsupported_model",
            f"{file.name} of {name} scales positions in a way that is not served ({error}): serve the repository with "
            "the original safetensors",
        ) from None


def _read_keys(architecture: str) -> set[str] | None:
    """The keys that transformers reads; None: it has code of its own for this architecture."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

    if architecture in GGUF_CONFIG_ARCHS:
        return None
    mapping: dict[str, dict[str, Any]] = GGUF_CONFIG_MAPPING  # type: ignore[assignment]
    names = {re.sub("[-_]", "", family): set(keys) for family, keys in mapping.items()}
    return names.get(re.sub("[-_]", "", architecture), set())


def _apply_attributes(config: Any, own: dict[str, Any], read: set[str], file_name: str) -> None:
    unread = []
    for key, value in own.items():
        if key in read or WITHOUT_EFFECT.match(key) or isinstance(value, str) or value in (0, False):
            continue
        attribute = ATTRIBUTES.get(key, "")
        positions = getattr(config, "rope_parameters", None)
        if key == "rope.freq_base" and isinstance(positions, dict) and "rope_theta" in positions:
            config.rope_parameters = positions | {"rope_theta": value}
        elif not isinstance(value, GgufArray) and hasattr(config, attribute):
            setattr(config, attribute, value)
        else:
            unread.append(key)
    if unread:
        logger.warning(
            "%s has keys that are not read (%s): texts may differ from llama.cpp's",
            file_name,
            ", ".join(sorted(unread)),
        )


def _scaling(config: Any, header: GgufHeader) -> dict[str, Any] | None:
    """What a header says of positions, as transformers' `rope_parameters` without their base; None: nothing."""
    own, prefix = header.own, "rope.scaling."
    given = {key.removeprefix(prefix): value for key, value in own.items() if key.startswith(prefix)}
    if not given and "rope.scale_linear" not in own and not {LONG, SHORT, FREQUENCIES} & header.tensors.keys():
        return None
    kind = given.pop("type", "linear")
    factor = given.pop("factor", None) or own.get("rope.scale_linear") or 1.0
    if isinstance(factor, str | bool | GgufArray) or factor <= 0:
        raise ValueError(f"factor {clip(factor)}")
    trained = given.pop("original_context_length", None) or getattr(config, "max_position_embeddings", None)
    given.pop("finetuned", None)
    attention = given.pop("attn_factor", 1.0)
    if kind == "none":
        return None
    if kind == "longrope" or {LONG, SHORT} & header.tensors.keys():
        long, short = _factors(header, LONG), _factors(header, SHORT)
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": trained,
            "attention_factor": attention,
        }
    if FREQUENCIES in header.tensors:
        return _llama3(config, _factors(header, FREQUENCIES))
    betas = {name: given.pop(f"yarn_{name}", None) for name in ("beta_fast", "beta_slow")}
    unknown = {key: value for key, value in given.items() if value not in (0, 1.0) and value is not None}
    if kind == "yarn" and not unknown:
        whole = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        whole |= {name: value for name, value in betas.items() if value}
        if attention != 1.0:
            whole["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
        return whole if factor != 1 else None
    if attention != 1.0:
        unknown["attn_factor"] = attention
    if kind != "linear" or unknown:
        raise ValueError(", ".join(f"{key} {clip(value)}" for key, value in ({"type": kind} | unknown).items()))
    return {"rope_type": "linear", "factor": factor} if factor != 1 else None


def _factors(header: GgufHeader, name: str) -> list[float]:
    """The numbers of a tensor, which must be float32 numbers."""
    tensor = header.tensors.get(name)
    if tensor is None or tensor.kind != F32 or math.prod(tensor.shape) > MAX_FACTORS:
        raise ValueError(f"the tensor {name} is missing, or has no float32 numbers")
    count = math.prod(tensor.shape)
    with open_regular(header.files[tensor.part]) as stream:
        stream.seek(tensor.start)
        return list(struct.unpack(f"<{count}f", stream.read(4 * count)))


def _llama3(config: Any, factors: list[float]) -> dict[str, Any] | None:
    """The scaling of Llama 3.1 and later; it must be the one that divides frequencies so."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if all(factor == 1 for factor in factors) or not any(factors):  # a header without its tensors has zeros
        return None
    scaling = {"rope_type": "llama3", "factor": max(factors), **LLAMA3}
    trial = type(config)(**config.to_dict())
    _scale(trial, scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](trial, torch.device("cpu"))
    base = trial.rope_parameters["rope_theta"]
    plain = base ** -(torch.arange(0, 2 * len(factors), 2, dtype=torch.float32) / (2 * len(factors)))
    if scaled.shape != plain.shape or not torch.allclose(plain / torch.tensor(factors), scaled, rtol=1e-3):
        raise ValueError(f"{FREQUENCIES} is not the scaling of Llama 3")
    return scaling


def _scale(config: Any, scaling: dict[str, Any]) -> None:
    """Put it into a config that has a place for it; with several kinds of layers, into that of full attention."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        raise ValueError(f"{type(config).__name__} has no place for {scaling['rope_type']}")
    if hasattr(config, name := "original_max_position_embeddings") and name in scaling:
        setattr(config, name, scaling[name])
    if isinstance(parameters.get("full_attention"), dict):
        config.rope_parameters = parameters | {"full_attention": _merged(parameters["full_attention"], scaling)}
    else:
        config.rope_parameters = _merged(parameters, scaling)


def _merged(parameters: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """Merge scaling into parameters, of which those of another kind keep their base alone."""
    if parameters.get("rope_type") == scaling["rope_type"]:
        return parameters | scaling
    kept = ("rope_theta", "partial_rotary_factor")
    return {name: parameters[name] for name in kept if name in parameters} | scaling
