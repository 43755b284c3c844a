# SPDX-License-Identifier: Apache-2.0
"""What an adapter's files say, checked against the model before peft sees any of it. Changes no model.

The tensors say which layers an adapter changes. peft gets the names of these layers with a rank and an alpha for each,
never a pattern of the files: patterns may take for ever, and name layers that the file has no tensors for.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import regex  # type: ignore[import-untyped]
import torch

from hf_triton.errors import clip
from hf_triton.runner.lora.adapter_files import LITERAL, MAX_NAME_CHARACTERS, AdapterConfig, refuse

MAX_COPIES: Final = 256
"""The most of a part of a pattern, when it is compiled."""
MAX_MATCHING_S: Final = 3.0
"""CPU time for all patterns of an adapter together."""
PARTS: Final = re.compile(
    r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B|"
    r"token_adapter\.trainable_tokens_delta)"
)
"""A layer, and what an adapter has of it."""
NO_EXPERTS: Final = "experts of a mixture are not served with LoRA: merge it into its base model"
TOKENS: Final = "token_adapter.trainable_tokens_delta"


@dataclass
class AdapterPlan:
    """What an adapter changes, layer by layer; its tensors fit."""

    tensors: dict[str, torch.Tensor]
    """Tensors that only repeat the base model's are left out."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Layers with LoRA have one each, by name."""
    alphas: dict[str, float] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    """The layers that the adapter replaces."""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """The rows of embeddings that it replaces, by layer."""


def plan_adapter(
    config: AdapterConfig, tensors: Mapping[str, torch.Tensor], layers: Mapping[str, torch.nn.Module]
) -> AdapterPlan:
    """Check an adapter against a model; raises CheckpointError if they do not fit."""
    plan = AdapterPlan(dict(tensors))
    parts: dict[str, dict[str, torch.Tensor]] = {}
    whole: dict[str, dict[str, torch.Tensor]] = {}
    saved = _saved_layers(config, layers)
    for name, tensor in tensors.items():
        layer, part = split_name(name)
        if layer not in layers:
            remedy = f": {NO_EXPERTS}" if "experts" in name.split(".") else ""
            refuse(f"has, and the model has not, {_listed([name])}{remedy}")
        if "experts" in layer.split(".")[:-1]:  # each sees a selection of the tokens, of which peft knows no adapters
            refuse(f"changes {layer}: {NO_EXPERTS}")
        is_whole = "." not in part and not part.startswith("lora_")
        (whole if is_whole else parts).setdefault(layer, {})[part] = tensor
        if is_whole and layer not in saved:
            _check_repeats(layers[layer], part, name, tensor)
            del plan.tensors[name]
    _plan_saved(plan, saved, {name: whole[name] for name in whole if name in saved}, layers)
    _plan_tokens(plan, config, parts, layers)
    _plan_lora(plan, config, {name: own for name, own in parts.items() if own}, layers)
    return plan


def split_name(name: str) -> tuple[str, str]:
    """A tensor's name as that of a layer, and what the adapter has of it: for a layer that it has whole, `weight`."""
    match = PARTS.fullmatch(name)
    layer, _, part = name.replace(".base_layer.", ".").rpartition(".")
    return (match[1], match[2]) if match else (layer, part)


def _check_repeats(layer: Any, part: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that peft would load over the base model's own, which all rows share."""
    own = getattr(layer, part, None)
    if not isinstance(own, torch.Tensor):
        refuse(f"has, and the model has not, {_listed([name])}")
    if own.layout != torch.strided:
        own = own.to_dense()
    if own.shape != tensor.shape or not torch.equal(tensor.to(own), own):
        refuse(f"replaces {name} of the model: merge it into its base model")


def _saved_layers(config: AdapterConfig, layers: Mapping[str, torch.nn.Module]) -> list[str]:
    """The layers that `modules_to_save` names, by themselves or by a module around them (a head of two layers).

    peft looks at the ends of names alone: `classifier` names `pre_classifier` too.
    """
    named = tuple(f"{name}." for name in layers if name.endswith(tuple(config.saved)))
    return [name for name, layer in layers.items() if f"{name}.".startswith(named) and [*layer.parameters(False)]]


def _plan_saved(
    plan: AdapterPlan,
    saved: list[str],
    whole: Mapping[str, dict[str, torch.Tensor]],
    layers: Mapping[str, torch.nn.Module],
) -> None:
    for name, own in whole.items():
        layer: Any = layers[name]
        if not isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
            refuse(f"replaces {name}, a {type(layer).__name__}, and may replace linear layers and embeddings alone")
        bias = getattr(layer, "bias", None)
        expected = {"weight": list(layer.weight.shape), **({} if bias is None else {"bias": list(bias.shape)})}
        _check_shapes(name, own, expected)
        plan.saved.append(name)
    if lacking := [name for name in saved if name not in whole]:
        refuse(f"lacks {_listed(lacking)}, which modules_to_save names")


def _plan_tokens(
    plan: AdapterPlan,
    config: AdapterConfig,
    parts: Mapping[str, dict[str, torch.Tensor]],
    layers: Mapping[str, torch.nn.Module],
) -> None:
    """Move the tokens' rows from `parts` to the plan."""
    names = [name for name, own in parts.items() if TOKENS in own]
    by_layer = config.tokens
    if isinstance(by_layer, list):
        by_layer = dict.fromkeys(names[:1], by_layer) if by_layer and names else {}
        if config.tokens and not names:
            refuse(f"lacks {TOKENS}, which trainable_token_indices names")
    for end, ids in by_layer.items():
        name = next((name for name in names if _ends_with(name, [end])), None)
        if name is None or name in plan.tokens:
            refuse(f"lacks {TOKENS} of {clip(end)}, which trainable_token_indices names")
        layer: Any = layers[name]
        if not isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
            refuse(f"replaces rows of {name}, a {type(layer).__name__}, which is no embedding")
        num_rows, size = layer.weight.shape
        if any(token_id >= num_rows for token_id in ids):
            refuse(f"replaces row {max(ids)} of {name}, which has {num_rows}")
        _check_shapes(name, {TOKENS: parts[name].pop(TOKENS)}, {TOKENS: [len(ids), size]})
        plan.tokens[name] = ids
    if extra := [name for name in names if name not in plan.tokens]:
        refuse(f"has, and trainable_token_indices does not name, {_listed(extra)}")


def _plan_lora(
    plan: AdapterPlan,
    config: AdapterConfig,
    parts: Mapping[str, dict[str, torch.Tensor]],
    layers: Mapping[str, torch.nn.Module],
) -> None:
    if not parts:
        refuse("has no tensors of LoRA")
    if config.targets is not None:
        if extra := [name for name in parts if not _ends_with(name, config.targets)]:
            refuse(f"has, and target_modules does not name, {_listed(extra)}")
        if extra := [name for name in parts if name not in config.targets and not _is_numbered(name, config)]:
            refuse(f"has, and layers_to_transform does not name, {_listed(extra)}")
        lacking = [name for name in layers if _ends_with(name, config.targets) and name not in parts]
        if lacking := [] if config.is_partial else [name for name in lacking if not _ends_with(name, config.saved)]:
            refuse(f"lacks {_listed(lacking)}, which target_modules names")
    if both := [name for name in parts if name in plan.saved]:
        refuse(f"has LoRA and other tensors of {_listed(both)}")
    matching = _Matching()
    ranks, alphas = matching.compile(config.ranks), matching.compile(config.alphas)
    for name, own in parts.items():
        plan.ranks[name] = matching.find(ranks, name, config.rank)
        plan.alphas[name] = matching.find(alphas, name, config.alpha)
        _check_shapes(name, own, _lora_shapes(name, layers[name], plan.ranks[name], has_bias=config.has_bias))


def _is_numbered(name: str, config: AdapterConfig) -> bool:
    """Whether a layer is one of `config.layers`, by the first number behind the name of a list, as peft finds it."""
    if config.layers is None:
        return True
    parts = name.split(".")
    places = [at for at in range(1, len(parts) - 1) if parts[at].isdecimal()]
    if config.layer_lists:
        places = [at for at in places if parts[at - 1] in config.layer_lists]
    else:
        places = [at for at in places if at > 1]
    return bool(places) and int(parts[places[0]]) in config.layers


def _lora_shapes(name: str, layer: Any, rank: int, *, has_bias: bool) -> dict[str, list[int]]:
    """The shapes of an adapter's tensors for a layer."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, torch.nn.Embedding):
        return {
            "lora_embedding_A": [rank, layer.num_embeddings],
            "lora_embedding_B": [layer.embedding_dim, rank],
        }
    num_in: Any
    num_out: Any
    if isinstance(layer, Conv1D):
        num_in, num_out = layer.weight.shape
    else:
        num_in = getattr(layer, "in_features", getattr(layer, "infeatures", None))
        num_out = getattr(layer, "out_features", getattr(layer, "outfeatures", None))
    if num_in is None or num_out is None:
        refuse(f"changes {name}, a {type(layer).__name__}, and LoRA changes linear layers and embeddings alone")
    shapes = {"lora_A.weight": [rank, num_in], "lora_B.weight": [num_out, rank]}
    return shapes | ({"lora_B.bias": [num_out]} if has_bias else {})


def _check_shapes(layer: str, own: Mapping[str, torch.Tensor], expected: Mapping[str, list[int]]) -> None:
    for part in sorted(own.keys() | expected.keys()):
        name = f"{layer}.{part}"
        if part not in expected:
            refuse(f"has, and the model has not, {_listed([name])}")
        if part not in own:
            refuse(f"lacks {_listed([name])}")
        shape = list(own[part].shape)
        if shape != expected[part]:
            refuse(
                f"has tensors of other shapes than the model, as {name}: {shape} in place of {expected[part]}: it was "
                "made for another base model"
            )


def _num_copies(pattern: str) -> int:
    """Count how often regex compiles a part of a pattern at most: `{3}` thrice, and what is in `(...)+` twice."""
    braces = [re.findall(r"\d+", each) for each in re.findall(r"\{[^{}]*\}", pattern)]
    repeats = [1 + max(map(int, numbers)) for numbers in braces if numbers]
    return math.prod(repeats) << min(pattern.count(")"), pattern.count("+"))


class _Matching:
    """Looks layers up by peft's patterns, in bounded time."""

    def __init__(self) -> None:
        self._started_s = time.thread_time()

    def compile(self, patterns: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        """The patterns as peft understands them, with their values."""
        return [(self._compile(key), value) for key, value in patterns.items()]

    def find(self, patterns: list[tuple[Any, Any]], name: str, default: Any) -> Any:
        """The value of the first pattern that fits a layer."""
        for pattern, value in patterns:
            try:
                if pattern.match(name, timeout=MAX_MATCHING_S):
                    return value
            except TimeoutError:
                self._refuse_slow()
            self._check_time()
        return default

    def _compile(self, key: str) -> Any:
        try:
            if len(key) > MAX_NAME_CHARACTERS:
                raise ValueError(f"longer than {MAX_NAME_CHARACTERS} characters")
            if _num_copies(key) > MAX_COPIES:  # each takes memory
                raise ValueError("repeats parts too often")
            re.compile(key)  # refuses what peft cannot read, such as recursion
            pattern = regex.compile(rf"(.*\.)?({key})$")
        except (re.error, regex.error, ValueError, RecursionError, OverflowError) as error:
            refuse(f"cannot be read ({clip(key)} in rank_pattern or alpha_pattern is no pattern: {error})")
        self._check_time()
        return pattern

    def _check_time(self) -> None:
        if time.thread_time() - self._started_s > MAX_MATCHING_S:
            self._refuse_slow()

    def _refuse_slow(self) -> NoReturn:
        refuse("has patterns in rank_pattern or alpha_pattern that take too long to match: name the layers themselves")


def _ends_with(name: str, ends: Collection[str]) -> bool:
    """Whether a layer's name, or its end behind a dot, is one of some."""
    parts = name.split(".")
    return any(".".join(parts[start:]) in ends for start in range(len(parts)))


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(_clip_name(name) for name in sorted(names)[:3]) + more


def _clip_name(name: str) -> str:
    return name if LITERAL.fullmatch(name) and len(name) <= 200 else clip(name)
