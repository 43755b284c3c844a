# SPDX-License-Identifier: Apache-2.0
"""Reads an adapter's config and tensors, and refuses what is not served. Knows no model."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from hf_triton.errors import CheckpointError, SettingsError, clip
from hf_triton.files import ADAPTER_IS_PICKLE, ADAPTER_PICKLE, read_bytes

PREFIX: Final = "base_model.model."
"""Every name in an adapter's file begins so."""
MAX_CONFIG_BYTES: Final = 1_000_000
MAX_NAME_CHARACTERS: Final = 1000
MAX_PATTERNS: Final = 4096
KEEPING_INITS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""The values of `init_lora_weights` with which peft leaves the base model's weights as they are."""
READ: Final = {
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "lora_bias"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "trainable_token_indices", "init_lora_weights"),
}
"""The settings that are looked at."""
WITHOUT_EFFECT: Final = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out"),
    *("inference_mode", "lora_dropout", "lora_ga_config", "loftq_config", "megatron_config"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
    "velora_config",
}
"""The settings that say nothing of what an unmerged adapter computes."""
CHANGING_BASE: Final = ("bias", "layer_replication")
KINDS: Final = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
SAVED_FROM_MODEL: Final = re.compile(
    r"\.modules_to_save\.default(?=\.)|(?<=\.lora_[AB])\.default(?=\.)|(?<=\.lora_embedding_[AB])\.default$"
)
"""What a state dict has in the names of tensors and a saved adapter does not: the adapter's own name."""
COMPUTED: Final = "rotary_emb.inv_freq"
"""The end of the name of a buffer that older models saved, and that newer ones compute, as peft passes it over."""
LITERAL: Final = re.compile(r"[\w.]+")
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def refuse(sentence: str) -> NoReturn:
    """Raise the CheckpointError that refuses an adapter; the sentence goes on after its name."""
    raise CheckpointError("adapter_invalid", sentence)


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter_config.json says of a LoRA adapter."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """Patterns of layers' names are the keys."""
    alphas: Mapping[str, float]
    """Patterns of layers' names are the keys."""
    is_rank_stabilized: bool
    has_bias: bool
    targets: frozenset[str] | None
    """Ends of layers' names; None if a pattern chose the layers."""
    layers: frozenset[int] | None
    """Numbers of the layers that `targets` is for; None: all."""
    layer_lists: frozenset[str]
    """Names of the lists that the numbers count in; empty: any."""
    is_partial: bool
    """Whether layers are left out of `targets`."""
    saved: frozenset[str]
    """Ends of the names of layers that the adapter replaces."""
    tokens: list[int] | Mapping[str, list[int]]
    """The rows of the input embedding, or of layers by the end of their names, that the adapter replaces."""


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read an adapter_config.json.

    Raises:
        CheckpointError: It cannot be read, is of another method, or has a setting that is not served.
        SettingsError: peft is not installed.
    """
    file = folder / "adapter_config.json"
    try:
        values = json.loads(read_bytes(file, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        refuse(f"cannot be read ({short(error)})")
    if not isinstance(values, dict):
        refuse("cannot be read (adapter_config.json is not an object)")
    _check_method(values)
    tokens = values.get("trainable_token_indices")
    targets = values.get("target_modules")
    is_list = isinstance(targets, list)
    return AdapterConfig(
        rank=_number(values, "r", 8, int),
        alpha=_number(values, "lora_alpha", 8, int, float),
        ranks=_numbers(values, "rank_pattern", int),
        alphas=_numbers(values, "alpha_pattern", int, float),
        is_rank_stabilized=_flag(values, "use_rslora"),
        has_bias=_flag(values, "lora_bias"),
        targets=_names(values, "target_modules") if is_list else None,
        layers=_layer_numbers(values.get("layers_to_transform")),
        layer_lists=_names(values, "layers_pattern"),
        is_partial=any(values.get(name) not in (None, [], "") for name in ("layers_to_transform", "exclude_modules")),
        saved=_names(values, "modules_to_save"),
        tokens={name: _token_ids(ids) for name, ids in tokens.items()}
        if isinstance(tokens, dict)
        else _token_ids(tokens or []),
    )


def _check_method(values: Mapping[str, Any]) -> None:
    """Refuse what is not LoRA, changes the base model, or is an option of peft that is not known here."""
    try:
        from peft import LoraConfig, PeftType
    except ImportError:
        raise SettingsError("adapters need the package peft: pip install 'hf-triton[lora]'") from None
    method = values.get("peft_type")
    if method != "LORA":
        if method not in list(PeftType.__members__):
            refuse(f"cannot be read (peft_type is {clip(method)})")
        refuse(f"is a {method} adapter, and LoRA adapters can be chosen alone")
    if values.get("alora_invocation_tokens"):
        refuse("is an aLoRA adapter, which begins within a prompt: train it as LoRA")
    if (init := values.get("init_lora_weights")) not in KEEPING_INITS:
        # PiSSA, OLoRA and others subtract from the base's weights
        refuse(f"changes its base model (init_lora_weights: {clip(init)}): merge it into its base model")
    for option in dataclasses.fields(LoraConfig):
        name, value = option.name, values.get(option.name)
        if name in READ or name in WITHOUT_EFFECT or value in (None, False, option.default):
            continue
        if value in ([], {}) and name not in KINDS:
            continue
        if name in CHANGING_BASE:
            refuse(f"changes its base model ({name}: {clip(value)}): merge it into its base model")
        refuse(
            f"is a {KINDS[name]} adapter ({name}), which is not served: merge it into its base model"
            if name in KINDS
            else f"sets {name}, which is not served: merge it into its base model"
        )


def _number(values: Mapping[str, Any], name: str, default: Any, *types: type) -> Any:
    return _positive(values.get(name, default), name, *types)


def _positive(value: object, name: str, *types: type) -> Any:
    is_number = isinstance(value, types) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
        refuse(f"cannot be read ({name} is {clip(value)}, not a positive number)")
    return value


def _numbers(values: Mapping[str, Any], name: str, *types: type) -> dict[str, Any]:
    patterns = values.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        refuse(f"cannot be read ({name} is not an object of at most {MAX_PATTERNS} numbers)")
    return {key: _positive(value, name, *types) for key, value in patterns.items()}


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name) or False
    if not isinstance(value, bool):
        refuse(f"cannot be read ({name} is {clip(value)}, not true or false)")
    return value


def _names(values: Mapping[str, Any], name: str) -> frozenset[str]:
    names = values.get(name) or []
    names = [names] if isinstance(names, str) and name == "layers_pattern" else names
    if not isinstance(names, list) or not all(isinstance(part, str) and LITERAL.fullmatch(part) for part in names):
        refuse(f"cannot be read ({name} is {clip(names)}, not a list of layers' names)")
    return frozenset(names)


def _layer_numbers(given: object) -> frozenset[int] | None:
    numbers = given if isinstance(given, list) else [] if given is None else [given]
    if any(type(number) is not int for number in numbers):
        refuse(f"cannot be read (layers_to_transform is {clip(given)}, not numbers of layers)")
    return frozenset(numbers) or None


def _token_ids(ids: object) -> list[int]:
    if not isinstance(ids, list) or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        refuse("cannot be read (trainable_token_indices has other values than token ids)")
    if len(set(ids)) != len(ids):
        refuse("cannot be read (trainable_token_indices names a token twice)")
    return ids


def read_tensors(folder: Path, max_bytes: int) -> dict[str, torch.Tensor]:
    """Read an adapter's tensors onto the CPU, by their names without `PREFIX`.

    Raises:
        CheckpointError: The file cannot be read or is larger than `max_bytes`, or a tensor has an unusable value.
    """
    from safetensors.torch import load

    file = folder / "adapter_model.safetensors"
    if not file.exists() and (folder / ADAPTER_PICKLE).exists():
        refuse(ADAPTER_IS_PICKLE)
    try:
        weights = load(read_bytes(file, max_bytes))  # a map of a file that shrinks kills the process
    except Exception as error:
        refuse(f"cannot be read ({short(error)})")
    tensors: dict[str, torch.Tensor] = {}
    for given, weight in weights.items():
        name = SAVED_FROM_MODEL.sub("", given.removeprefix(PREFIX))
        if name in tensors:
            refuse(f"has two tensors for {clip(name)}: save it by peft's save_pretrained")
        if not name.endswith(COMPUTED):
            tensors[name] = weight
    for name, weight in sorted(tensors.items()):
        if len(name) > MAX_NAME_CHARACTERS:
            refuse(f"cannot be read (a tensor's name has more than {MAX_NAME_CHARACTERS} characters)")
        if weight.dtype not in DTYPES:
            refuse(f"has tensors of {weight.dtype}, as {name}: save it with 32 or 16 bits")
        if not bool(weight.isfinite().all()):
            refuse(f"has NaN or infinite numbers in {name}")
    return tensors


def short(error: Exception) -> str:
    """An error's type and message on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 200 else text[:197] + '...'}"
