# SPDX-License-Identifier: Apache-2.0
"""Outputs and parameters of a response, from generated text to tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_triton.protocol.ports import OUTPUTS, PROMPT_LOGPROBS, TEXTS
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.protocol.tensors import Array, encode_strings


@dataclass(frozen=True)
class GeneratedOutput:
    """One text of an answer."""

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    cumulative_logprob: float
    """Natural logarithm; 0 where log probabilities were not asked for."""
    logprobs: str
    """JSON, see `return_logprobs`; empty where they were not asked for."""
    prompt_logprobs: str | None = None
    """JSON, see `GenerationParameters.prompt_logprobs`; None where they were not asked for."""


def encode_outputs(
    texts: Sequence[GeneratedOutput], request: GenerationRequest, output_names: Iterable[str]
) -> dict[str, Array]:
    """An answer's outputs: the text, and what else the request asks for.

    Args:
        texts: In row order, the sequences of one prompt side by side.
        request: What is answered.
        output_names: The outputs that the folder declares.
    """
    outputs = {}
    for name in output_names:
        if name in TEXTS:
            outputs[name] = encode_strings([each.text for each in texts], request.shape)
        elif name == PROMPT_LOGPROBS:
            found = [each.prompt_logprobs for each in texts]
            if any(each is not None for each in found):
                outputs[name] = encode_strings([each or "null" for each in found], request.shape)
        elif getattr(request.options, f"return_{name}"):
            values = [getattr(each, name) for each in texts]
            is_text = OUTPUTS[name] == "TYPE_STRING"
            outputs[name] = encode_strings(values, request.shape) if is_text else _numbers(name, values, request.shape)
    return outputs


def encode_timings(
    arrival_s: float, *, admitted_s: float | None, first_token_s: float | None, answered_s: float
) -> dict[str, int]:
    """What `return_timings` asks for, as parameters of a response; of what did not happen there is none.

    Args:
        arrival_s: When the request came; all by one clock.
        admitted_s: When its first prompt left the queue.
        first_token_s: When its first text had a token.
        answered_s: When its answer was made.
    """
    ends_s = {
        "queue_time_us": admitted_s,
        "time_to_first_token_us": first_token_s,
        "e2e_request_latency_us": answered_s,
    }
    return {name: round((end_s - arrival_s) * 1e6) for name, end_s in ends_s.items() if end_s is not None}


def encode_deltas(pieces: Sequence[str], request: GenerationRequest, output_names: Iterable[str]) -> dict[str, Array]:
    """A part of a stream: what each text goes on with, empty where it does not."""
    return {name: encode_strings(pieces, request.shape) for name in output_names if name in TEXTS}


def _numbers(name: str, values: Sequence[float], shape: tuple[int, ...]) -> Array:
    dtype = np.float32 if OUTPUTS[name] == "TYPE_FP32" else np.uint32
    return np.array(values, dtype).reshape(*shape[:-1], -1)
