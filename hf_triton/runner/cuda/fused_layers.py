# SPDX-License-Identifier: Apache-2.0
"""Decoder layers whose residual adds are one kernel with the norm behind them.

A trial finds the layers that normalise, attend, add, normalise, feed forward and add (Llama's kind): in float32, on the
states of a forward. The second sum goes to the norm that had it as input in that forward, of the next layer or behind
the last one; the norm recognises its input by identity.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hf_triton.runner.cuda.fused_norms import FusedNorm, forward_of
from hf_triton.runner.cuda.fused_operations import add_rms_norm
from hf_triton.runner.faults import described
from hf_triton.runner.seen_calls import Call

logger = logging.getLogger(__name__)

PARTS: Final = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
TOLERANCE: Final = 1e-5
"""A part of the largest number of a row of float32 states."""


@dataclass
class FusedLayer:
    layer: Any
    original: Any
    """The layer's own forward, for what the trial did not have."""
    after: Any
    """The module that normalises what the layer returns; None: it is not known."""

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        layer = self.layer
        between = forward_of(layer.post_attention_layernorm)
        if arguments or type(between) is not FusedNorm or not between.takes(hidden_states):
            output: torch.Tensor = self.original(hidden_states, *arguments, **options)
            return output
        attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
        if isinstance(attended, tuple):  # attention weights stand behind; linear attention returns the states alone
            attended = attended[0]
        states, normed = add_rms_norm(hidden_states, attended, between.weight, between.eps)
        fed = layer.mlp(normed)
        after = None if self.after is None else forward_of(self.after)
        if type(after) is not FusedNorm or not after.takes(states):
            return states.add(fed)
        states, normed = add_rms_norm(states, fed, after.weight, after.eps)
        after.keep(states, normed)
        return states


def fuse_layers(calls: Sequence[Call]) -> int:
    """Replace the forwards of layers with fused norms, by the calls of one forward in order; how many."""
    norm_of = {
        id(call.arguments[0]): call.module
        for call in calls
        if len(call.arguments) == 1 and type(forward_of(call.module)) is FusedNorm
    }
    count = 0
    for call in calls:
        layer = call.module
        if not all(hasattr(layer, part) for part in PARTS) or "_hf_hook" in vars(layer) or len(call.arguments) != 1:
            continue
        if any(layer.post_attention_layernorm._forward_hooks.values()):
            continue
        try:
            after = norm_of.get(id(call.output))
            if _adds(call):
                layer.forward = FusedLayer(layer, layer.forward, after)
                count += 1
        except Exception as error:  # a layer may do anything in its forward
            logger.debug("%s is not fused (%s)", type(layer).__name__, described(error))
    return count


@torch.no_grad()
def _adds(call: Call) -> bool:
    """Whether a layer computes what `FusedLayer` computes: tried with a copy in float32."""
    if (
        not isinstance(call.output, torch.Tensor)
        or type(forward_of(call.module.post_attention_layernorm)) is not FusedNorm
    ):
        return False
    trial = copy.deepcopy(call.module).float()
    for module in trial.modules():
        if type(norm := forward_of(module)) is FusedNorm:
            norm.dtype = torch.float32
            norm.weight = norm.weight.float()
    (states,), options = call.arguments, {name: _widened(each) for name, each in call.options.items()}
    states = states.float()
    expected, found = trial(states, **options), FusedLayer(trial, None, None)(states, **options)
    difference, largest = ((each).abs().amax(-1) for each in (expected - found, expected))
    return bool((difference <= TOLERANCE * largest).all())


def _widened(option: Any) -> Any:
    """Widen numbers of fewer bits to float32."""
    if isinstance(option, tuple):
        return tuple(map(_widened, option))
    is_half = isinstance(option, torch.Tensor) and option.dtype in (torch.bfloat16, torch.float16)
    return option.float() if is_half else option
