# SPDX-License-Identifier: Apache-2.0
"""What a model's tokens take, found without weights: its runner's steps run on torch's device `meta`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from hf_triton.runner.faults import described
from hf_triton.runner.model_runner import ModelRunner, Way
from hf_triton.runner.step_attention import attention_configs
from hf_triton.runner.way_probe import WAYS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outline:
    """A model with a KV cache."""

    bytes_per_token: int
    """Keys and values of one token in all layers; of a model without keys, its id."""
    has_keys: bool
    slot_tokens: int
    """Tokens that take as much as the states of a sequence; 0: it has none."""


def measure_outline(model: Any) -> Outline | None:
    """Run a token through a model on the device `meta`, whose configs are changed.

    Returns:
        None: without weights it runs in no way of the continuous engine.
    """
    for config in attention_configs(model):
        config._experts_implementation = "batched_mm"  # others read which experts are chosen
    for way in WAYS:
        try:
            with torch.device("meta"), torch.inference_mode():
                return _measure(model, way)
        except Exception as error:  # a model may do anything in its forward
            logger.debug("without weights, the model does not run as %s (%s)", way, described(error))
    return None


def _measure(model: Any, way: Way) -> Outline:
    runner = ModelRunner(model, way)
    bytes_per_token, slot_tokens = runner.memory_per_token()
    if not runner.cache.blocks() and not slot_tokens:
        raise TypeError("its forward keeps nothing in the cache")
    return Outline(sum(bytes_per_token.values()), runner.cache.has_keys, slot_tokens)
