# SPDX-License-Identifier: Apache-2.0
"""Outputs and parameters of a response: from generated text to tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hf_triton.protocol.declared_ports import OUTPUTS, PROMPT_LOGPROBS
from hf_triton.protocol.names import LEGACY_TEXT, TEXT
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.protocol.tensor_values import Array, encode_strings


def outputs_to_fill(
    request: GenerationRequest, declared: Iterable[str], *, has_prompt_logprobs: bool = False
) -> list[str]:
    """The outputs of a response: the text, and what else the request asks for."""
    implied = {TEXT: request.fills_text, LEGACY_TEXT: request.fills_text, PROMPT_LOGPROBS: has_prompt_logprobs}
    return [
        name for name in declared if (implied[name] if name in implied else getattr(request.options, f"return_{name}"))
    ]


def encode_output(name: str, values: Sequence[Any], shape: tuple[int, ...]) -> Array:
    """An output of a response; the values are in row order, those of one prompt side by side."""
    if OUTPUTS[name] == "TYPE_STRING":
        return encode_strings(values, shape)
    dtype = np.float32 if OUTPUTS[name] == "TYPE_FP32" else np.uint32
    return np.array(values, dtype).reshape(*shape[:-1], -1)


def encode_timings(
    arrival_s: float, *, admitted_s: float | None, first_token_s: float | None, answered_s: float
) -> dict[str, int]:
    """The response parameters of `return_timings`, from one clock; milestones that were not reached are left out."""
    ends_s = {
        "queue_time_us": admitted_s,
        "time_to_first_token_us": first_token_s,
        "e2e_request_latency_us": answered_s,
    }
    return {name: round((end_s - arrival_s) * 1e6) for name, end_s in ends_s.items() if end_s is not None}
