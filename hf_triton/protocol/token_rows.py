# SPDX-License-Identifier: Apache-2.0
"""Token ids in place of texts, as transformers' tokenizers give them: padded to the longest row, with a mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hf_triton.errors import RequestError
from hf_triton.protocol.prompts import Limits, check_size
from hf_triton.protocol.tensor_values import Array
from hf_triton.sentence import param, row

INPUT_IDS: Final = "input_ids"
ATTENTION_MASK: Final = "attention_mask"
TOKEN_TYPE_IDS: Final = "token_type_ids"
TOKEN_INPUTS: Final = (INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS)
TOGETHER: Final = f"{param(INPUT_IDS)} and {param(ATTENTION_MASK)} go together"
TOKEN_TYPE: Final = "TYPE_INT64"


@dataclass(frozen=True)
class TokenRow:
    ids: list[int]
    type_ids: list[int] | None = None


def read_token_rows(inputs: Mapping[str, Any], limits: Limits) -> list[TokenRow]:
    """Read `input_ids`, `attention_mask` and, if it is there, `token_type_ids`.

    Args:
        inputs: By name, INT64 `[rows, length]`; the mask is 1 for tokens and 0 for padding, before or behind them.
        limits: What to accept; a row counts as many bytes as its integers have.
    """
    tensors = {name: _matrix(name, inputs[name]) for name in TOKEN_INPUTS if name in inputs}
    for name in (INPUT_IDS, ATTENTION_MASK):
        if name not in tensors:
            raise RequestError("invalid_input", f"{param(name)} is missing: {TOGETHER}")
    ids, mask, types = (tensors.get(name) for name in TOKEN_INPUTS)
    assert ids is not None
    assert mask is not None
    for name, tensor in tensors.items():
        if tensor.shape != ids.shape:
            raise RequestError(
                "invalid_input",
                f"{param(name)} has the shape {list(tensor.shape)} and {param(INPUT_IDS)} {list(ids.shape)}: they "
                "must agree",
            )
    if not 1 <= len(ids) <= limits.max_prompts:
        raise RequestError(
            "invalid_input",
            f"{param(INPUT_IDS)} holds {len(ids)} rows, and 1 to {limits.max_prompts} are accepted (setting "
            "max_prompts)",
        )
    check_size(ids.shape[1] * ids.itemsize, limits, f"a row of {param(INPUT_IDS)}")
    rows = []
    for number, own in enumerate(mask):
        span = _span(number, own)
        rows.append(TokenRow(ids[number, span].tolist(), None if types is None else types[number, span].tolist()))
    return rows


def pad_rows(rows: list[Array]) -> Array:
    """Rows of integers as one array `[rows, longest]`, with zeros behind the shorter ones."""
    padded = np.zeros((len(rows), max(map(len, rows), default=0)), np.int64)
    for number, ids in enumerate(rows):
        padded[number, : len(ids)] = ids
    return padded


def _matrix(name: str, value: object) -> Array:
    if not isinstance(value, np.ndarray):
        raise RequestError("invalid_input", f"{param(name)} is a tensor: send it as an input, with /infer or gRPC")
    if value.ndim != 2:
        raise RequestError(
            "invalid_input", f"{param(name)} must have the shape [rows, tokens], got {list(value.shape)}"
        )
    return value


def _span(number: int, mask: Array) -> slice:
    """The span from a row's first token to its last."""
    tokens = np.flatnonzero(mask)
    span = slice(int(tokens[0]), int(tokens[-1]) + 1) if tokens.size else slice(0)
    if len(mask[span]) != tokens.size or not (mask[span] == 1).all():
        raise RequestError(
            "invalid_input",
            f"{param(ATTENTION_MASK)}{row(number)} must be 1 for the tokens and 0 for the padding before or behind "
            "them",
        )
    return span
