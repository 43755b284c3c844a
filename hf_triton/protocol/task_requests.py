# SPDX-License-Identifier: Apache-2.0
"""Requests to the tasks of encoders: from tensors and parameters to rows of texts and checked options; and back."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from hf_triton.errors import HfTritonError, RequestError, clip
from hf_triton.protocol.names import PROMPT_ALIASES
from hf_triton.protocol.prompts import Limits, decode_texts, read_elements
from hf_triton.protocol.request_values import given_name, merge_values, one_value
from hf_triton.protocol.requests import PARAMETER_NAMES
from hf_triton.protocol.task_declaration import (
    JSON_OUTPUT,
    MLSERVER_TASKS,
    NUM_TOKENS,
    NUMPY_TYPES,
    TOKEN_IDS,
    DeclaredOptions,
    TaskDeclaration,
)
from hf_triton.protocol.tensor_values import Array, encode_strings
from hf_triton.protocol.token_rows import TokenRow, pad_rows, read_token_rows
from hf_triton.protocol.validation import MAX_NAME, suggest, validated, value_type
from hf_triton.sentence import param, param_list, remedy

Options = TypeVar("Options", bound=DeclaredOptions)
Row = Mapping[str, Any]
"""The texts of one row, by the input's own name; `bytes` of an input of files."""


@dataclass(frozen=True)
class TaskRequest(Generic[Options]):
    rows: Sequence[Row | TokenRow]
    options: Options
    shape: tuple[int, ...]
    """The shape of the longest text input, which the outputs follow; `[rows]` for token ids."""
    default_outputs: Sequence[str] | None = None
    """The outputs for a client that names none, in order: `output` alone for MLServer's; None: as the declaration
    says."""


@dataclass(frozen=True)
class TaskResult:
    json: Any
    """The output `output`: what `json.dumps` takes, or a numpy array."""
    tensors: Mapping[str, Any]
    """The task's own outputs by name: a string, a number, or an array with the output's dimensions."""


def read_task_request(
    declaration: TaskDeclaration,
    options: type[Options],
    inputs: Mapping[str, Array],
    parameters: Mapping[str, object],
    limits: Limits,
) -> TaskRequest[Options]:
    """Check a request. Texts are BYTES `[n]` or `[batch, 1]`, one for each row or one for all, or parameters."""
    given = merge_values(inputs, parameters)
    known = {*declaration.text_names(), *options.model_fields, *declaration.token_names}
    if (unknown := next((name for name in given if name not in known), None)) is not None:
        raise _unknown(declaration, unknown)
    names = [name for name in options.model_fields if name in given]
    asked = validated(
        options, {name: one_value(name, given[name], is_array=value_type(options, name)[1]) for name in names}
    )
    tokens = {name: given[name] for name in declaration.token_names if name in given}
    if tokens:
        _check_no_text(declaration, given, next(iter(tokens)))
        token_rows = read_token_rows(tokens, limits)
        return TaskRequest(token_rows, asked, (len(token_rows),))
    texts: dict[str, list[Any]] = {}
    shape: tuple[int, ...] = (1,)
    is_from_mlserver = False
    for text in declaration.texts:
        found = given_name((text.name, *text.aliases), given)
        if found is not None:
            array = _as_array(found, given[found])
            texts[text.name] = (read_elements if text.is_file else decode_texts)(found, array, limits)
            shape = max(shape, array.shape, key=lambda dims: int(np.prod(dims)))
            is_from_mlserver |= found in PROMPT_ALIASES and declaration.name in MLSERVER_TASKS
    _check_texts(declaration, texts)
    num_rows = max(map(len, texts.values()))
    rows = [{name: values[row if len(values) > 1 else 0] for name, values in texts.items()} for row in range(num_rows)]
    default_outputs = (JSON_OUTPUT,) if is_from_mlserver else None
    return TaskRequest(rows, asked, shape, default_outputs)


def _unknown(declaration: TaskDeclaration, name: str) -> RequestError:
    if name in PARAMETER_NAMES:
        return RequestError(
            "unknown_parameter",
            f"{param(name)} is a parameter of text generation, and this model does {declaration.name}: leave it out",
        )
    shown = f"'{param(name)}'" if re.fullmatch(r"\w{1,60}", name) else clip(name)
    hint = suggest(name, declaration.input_types, declaration.document, param)
    return RequestError(
        "unknown_parameter",
        f"there is no input or parameter {shown} in {declaration.name}{remedy(hint)}",
        field=name[:MAX_NAME],
    )


def _as_array(name: str, value: object) -> Array:
    """A text that is given as a parameter, as a tensor of one element."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, str):
        raise RequestError("invalid_input", f"{param(name)} must be a string or an array of strings, got {clip(value)}")
    return encode_strings([value], (1,))


def _check_no_text(declaration: TaskDeclaration, given: Collection[str], tokens: str) -> None:
    """Refuse texts beside token ids."""
    text = next((name for name in declaration.text_names() if name in given), None)
    if text is not None:
        raise RequestError("invalid_input", f"{param(tokens)} stands in place of {param(text)}: give one of them")


def _check_texts(declaration: TaskDeclaration, texts: Mapping[str, Sequence[str]]) -> None:
    """Check that all required texts are there, or token ids in their place, and that their numbers agree."""
    if TOKEN_IDS in texts and len(texts) > 1:
        others = param_list((name for name in texts if name != TOKEN_IDS), " and ")
        raise RequestError("invalid_input", f"{param(TOKEN_IDS)} stands in place of {others}: give one of them")
    for text in declaration.texts:
        if not {text.name, TOKEN_IDS} & texts.keys() and not text.is_optional:
            also = f" (also {', '.join(text.aliases)})" if text.aliases else ""
            name = param(text.name)
            raise RequestError(
                "invalid_input", f"{name} is missing: {declaration.name} needs {name}, {text.meaning}{also}"
            )
    counts = {name: len(found) for name, found in texts.items() if len(found) > 1}
    if len(set(counts.values())) > 1:
        listed = " and ".join(f"{count} of {param(name)}" for name, count in counts.items())
        raise RequestError("invalid_input", f"got {listed}: give as many of each, or one for all")


def encode_results(
    results: Sequence[TaskResult],
    nums_tokens: Sequence[int],
    declaration: TaskDeclaration,
    shape: tuple[int, ...],
    names: Collection[str],
) -> dict[str, Array]:
    """The outputs of a response, those of `names` in order; `shape` is that of the texts.

    Raises:
        HfTritonError: A result has no tensor for an output.
    """
    outputs: dict[str, Array] = {}
    for name in names:
        output = declaration.all_outputs[name]
        if output.is_json:
            outputs[name] = encode_strings([_to_json(result.json) for result in results], shape)
            continue
        values: list[Any] = list(nums_tokens) if name == NUM_TOKENS else [_tensor(result, name) for result in results]
        if output.data_type == "TYPE_STRING":
            strings = [text for value in values for text in value] if output.num_dims else values
            outputs[name] = encode_strings(strings, (len(results), 1) if output.num_dims else shape)
        elif output.is_padded:
            outputs[name] = pad_rows(values)
        else:
            array = np.concatenate(values) if output.is_ragged else np.asarray(values)
            array = array.astype(NUMPY_TYPES[output.data_type], copy=False)
            outputs[name] = array if output.num_dims else array.reshape(-1, *shape[1:])
    return outputs


def _tensor(result: TaskResult, name: str) -> Any:
    if name not in result.tensors:
        given = ", ".join(result.tensors) or "none"
        sentence = f"the task's result has no tensor {clip(name)}, an output of its declaration; it has {given}"
        raise HfTritonError("internal", sentence)
    return result.tensors[name]


def _to_json(value: Any) -> str:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value, ensure_ascii=False)


def outputs_to_fill(
    declaration: TaskDeclaration,
    named: Collection[str],
    declared: Collection[str],
    default: Sequence[str] | None = None,
) -> list[str]:
    """The outputs that a client lists; those that are filled by default if it does not choose. In order."""
    if named:
        return [name for name in declaration.all_outputs if name in named]
    if default is None:
        default = [name for name, output in declaration.all_outputs.items() if output.by_default]
    return [name for name in default if name in declared]
