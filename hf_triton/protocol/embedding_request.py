# SPDX-License-Identifier: Apache-2.0
"""`embedding_request`: what Triton's OpenAI frontend sends for /v1/embeddings, and the vLLM backend takes. One JSON.

`{"input": a string, strings, token ids or arrays of them, "pooling_params": {"dimensions": [256]}}`, beside it
`return_num_input_tokens` and `return_num_output_tokens`; the answer is `text_output`, a JSON array for each input, and
the counts. Read from triton-inference-server/vllm_backend, src/utils/request.py, and server, python/openai.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.task_declaration import NUM_TOKENS, TaskOptions, TaskOutput
from hf_triton.protocol.tensor_values import Array, decode_string, encode_strings
from hf_triton.protocol.validation import parse_json
from hf_triton.sentence import param

EMBEDDING_REQUEST: Final = "embedding_request"
VLLM_FLAGS: Final = {"return_num_input_tokens": NUM_TOKENS, "return_num_output_tokens": "num_output_tokens"}
"""The output that each flag asks for."""
VLLM_OUTPUTS: Final = {
    "text_output": TaskOutput(
        "TYPE_STRING", "the vector as JSON, for `embedding_request`", by_default=False, is_json=True
    ),
    "num_output_tokens": TaskOutput("TYPE_UINT32", "0, for `embedding_request`", by_default=False),
}
OPTIONS: Final = ("dimensions", "prompt_name", "normalize", *TaskOptions.model_fields)
PASSED_OVER: Final = ("model", "user", "encoding_format")
"""What OpenAI's requests hold beside: the frontend uses it."""


def vllm_outputs(inputs: Mapping[str, Array], parameters: Mapping[str, object]) -> list[str]:
    """The outputs for a client of the vLLM backend that names none."""
    asked = [output for flag, output in VLLM_FLAGS.items() if _flag(flag, inputs.get(flag, parameters.get(flag)))]
    return ["text_output", *asked]


def _flag(name: str, value: object) -> bool:
    found = value.ravel().tolist() if isinstance(value, np.ndarray) else [value]
    if len(found) != 1 or not isinstance(found[0], bool | None):
        raise RequestError("invalid_parameter", f"{param(name)} must be true or false, got {clip(value)}")
    return bool(found[0])


def parse_embedding_request(
    inputs: Mapping[str, Array], parameters: Mapping[str, object]
) -> tuple[dict[str, Array], dict[str, object]]:
    """The inputs and parameters that a request with `embedding_request` stands for."""
    others = {name: array for name, array in inputs.items() if name not in (EMBEDDING_REQUEST, *VLLM_FLAGS)}
    options = {name: value for name, value in parameters.items() if name not in (EMBEDDING_REQUEST, *VLLM_FLAGS)}
    request = _parse(inputs.get(EMBEDDING_REQUEST, parameters.get(EMBEDDING_REQUEST)))
    pooling = request.pop("pooling_params", None) or {}
    dimensions = pooling.get("dimensions") if isinstance(pooling, dict) else None
    if dimensions is not None:
        options["dimensions"] = dimensions[0] if isinstance(dimensions, list) and len(dimensions) == 1 else dimensions
    name, texts = _texts(request.pop("input", None))
    for key, value in request.items():
        if key not in (*OPTIONS, *PASSED_OVER):
            raise RequestError("unknown_parameter", f"{param(EMBEDDING_REQUEST)} holds the unknown name {clip(key)}")
        if key in OPTIONS and value is not None:
            options[key] = value
    return {**others, name: encode_strings(texts, (len(texts),))}, options


def _parse(value: object) -> dict[str, Any]:
    if isinstance(value, np.ndarray):
        if value.size != 1 or value.dtype != np.object_:
            raise RequestError(
                "invalid_input", f"{param(EMBEDDING_REQUEST)} holds one string (BYTES), got {list(value.shape)}"
            )
        value = decode_string(param(EMBEDDING_REQUEST), value.ravel()[0], "invalid_input")
    try:
        request = parse_json(value) if isinstance(value, str) else None
    except ValueError as error:
        raise RequestError("invalid_input", f"{param(EMBEDDING_REQUEST)} is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise RequestError(
            "invalid_input", f"{param(EMBEDDING_REQUEST)} must be a JSON object with input, got {clip(value)}"
        )
    return request


def _texts(value: object) -> tuple[str, Sequence[str]]:
    """The name of the input that `input` stands for, and its elements."""
    values: list[Any] = value if isinstance(value, list) else [value]
    if values and all(isinstance(element, str) for element in values):
        return "text", values
    if values and all(type(element) is int for element in values):
        return "token_ids", [json.dumps(values)]
    if values and all(isinstance(element, list) for element in values):
        return "token_ids", [json.dumps(element) for element in values]
    raise RequestError(
        "invalid_input",
        f"input of {param(EMBEDDING_REQUEST)} must be a string, an array of strings, token ids or an array of arrays "
        f"of token ids, got {clip(value)}",
    )
