# SPDX-License-Identifier: Apache-2.0
"""Outputs and parameters of a response: from generated text to tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hf_triton.protocol.ports import OUTPUTS, PROMPT_LOGPROBS, TEXT_OUTPUTS
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.protocol.tensors import Array, encode_strings


def encode_outputs(
    completions: Sequence[Mapping[str, Any]], request: GenerationRequest, output_names: Iterable[str]
) -> dict[str, Array]:
    """The outputs of a response: the text, and what else the request asks for.

    Args:
        completions: A value for each of `OUTPUTS`, in row order, those of one prompt side by side. None for the
            `prompt_logprobs` of a prompt that does not ask for them.
        request: The request.
        output_names: The outputs that the folder declares.
    """
    outputs = {}
    for name in output_names:
        values = [completion[name] for completion in completions]
        if name == PROMPT_LOGPROBS:
            if any(value is not None for value in values):
                outputs[name] = encode_strings([value or "null" for value in values], request.shape)
        elif request.fills_text if name in TEXT_OUTPUTS else getattr(request.options, f"return_{name}"):
            outputs[name] = _encode_values(name, values, request)
    return outputs


def _encode_values(name: str, values: Sequence[Any], request: GenerationRequest) -> Array:
    if OUTPUTS[name] == "TYPE_STRING":
        return encode_strings(values, request.shape)
    dtype = np.float32 if OUTPUTS[name] == "TYPE_FP32" else np.uint32
    return np.array(values, dtype).reshape(*request.shape[:-1], -1)


def encode_deltas(
    deltas: Sequence[Mapping[str, Any]], request: GenerationRequest, output_names: Iterable[str]
) -> dict[str, Array]:
    """The outputs of one response of a stream.

    Args:
        deltas: What is new of each completion, by output; all have the same outputs.
        request: The request.
        output_names: The outputs that the folder declares.
    """
    return {
        name: _encode_values(name, [delta[name] for delta in deltas], request)
        for name in output_names
        if name in deltas[0]
    }


def encode_timings(
    arrival_s: float, *, admitted_s: float | None, first_token_s: float | None, answered_s: float
) -> dict[str, int]:
    """The response parameters of `return_timings`; milestones that were not reached are left out.

    Args:
        arrival_s: When the request arrived; all times are of one clock.
        admitted_s: When its first prompt left the queue.
        first_token_s: When its first completion had a token.
        answered_s: When its response was built.
    """
    ends_s = {
        "queue_time_us": admitted_s,
        "time_to_first_token_us": first_token_s,
        "e2e_request_latency_us": answered_s,
    }
    return {name: round((end_s - arrival_s) * 1e6) for name, end_s in ends_s.items() if end_s is not None}
