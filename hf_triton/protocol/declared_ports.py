# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of a model: what `auto_complete_config` adds, and which configurations can be served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from hf_triton.errors import SettingsError
from hf_triton.protocol.dialects import ALIASES, DIALECT_INPUTS, DIALECT_TYPES, SUGGESTIONS
from hf_triton.protocol.names import (
    IMAGE,
    JSON_OUTPUT,
    LEGACY_TEXT,
    MESSAGES,
    PROMPT,
    PROMPT_ALIASES,
    PROMPT_TOKEN_IDS,
    TEXT,
)
from hf_triton.protocol.prompts import SOURCES
from hf_triton.protocol.request_options import BEFORE_INPUTS, PARAMETERS
from hf_triton.protocol.validation import suggest, value_type

MESSAGE: Final = "message"
PROMPT_LOGPROBS: Final = "prompt_logprobs"
OUTPUTS: Final[Mapping[str, str]] = {
    TEXT: "TYPE_STRING",
    LEGACY_TEXT: "TYPE_STRING",
    "finish_reason": "TYPE_STRING",
    "stop_string": "TYPE_STRING",
    "num_input_tokens": "TYPE_UINT32",
    "num_output_tokens": "TYPE_UINT32",
    "num_cached_tokens": "TYPE_UINT32",
    "num_reasoning_tokens": "TYPE_UINT32",
    MESSAGE: "TYPE_STRING",
    "prompt_token_ids": "TYPE_STRING",
    "token_ids": "TYPE_STRING",
    "cumulative_logprob": "TYPE_FP32",
    "logprobs": "TYPE_STRING",
    JSON_OUTPUT: "TYPE_STRING",
    PROMPT_LOGPROBS: "TYPE_STRING",
}
"""Every output and its type. `text_output` is always filled, `prompt_logprobs` by the parameter of that name, others if
the request sets `return_NAME` or lists some outputs but not all."""
STRING_ARRAYS: Final = ("stop", "stop_words", "stop_strings", "bad_words")
"""Parameters that are always declared as inputs: Triton passes JSON arrays on to inputs only."""
INTEGER_TYPES: Final = tuple(f"TYPE_{sign}{bits}" for sign in ("INT", "UINT") for bits in (64, 32, 16, 8))
TENSOR_TYPES: Final[Mapping[type, tuple[str, ...]]] = {
    bool: ("TYPE_BOOL",),
    int: INTEGER_TYPES,
    float: ("TYPE_FP32", "TYPE_FP64", "TYPE_FP16", *INTEGER_TYPES),
    str: ("TYPE_STRING",),
    dict: ("TYPE_STRING",),
}
"""Tensor types by the Python type of a parameter or its elements, the declared one first; objects are JSON strings."""


def missing_ports(
    config: Mapping[str, Any], parameters_as_inputs: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The inputs and outputs that config.pbtxt leaves out, in Triton's form; every request parameter, if so asked."""
    has_inputs, has_outputs = ({port["name"] for port in config[side]} for side in ("input", "output"))
    prompt_dims = [1 if config["max_batch_size"] > 0 else -1]
    dims = {
        **dict.fromkeys((PROMPT, *PROMPT_ALIASES), prompt_dims),
        **{name: [-1] for name in (MESSAGES, PROMPT_TOKEN_IDS, IMAGE)},
    }
    names = [PROMPT]
    if parameters_as_inputs or not has_inputs:  # a folder that declares inputs gets no others
        names += [*PROMPT_ALIASES, PROMPT_TOKEN_IDS, IMAGE, *STRING_ARRAYS]
        if parameters_as_inputs or config["max_batch_size"] > 0:  # where Triton refuses requests without an input
            names.append(MESSAGES)
    if parameters_as_inputs:
        others = (*PARAMETERS, *ALIASES, *DIALECT_INPUTS)
        names += [name for name in others if name not in (*STRING_ARRAYS, *BEFORE_INPUTS)]
    inputs: list[dict[str, Any]] = [  # optional, so that the error for a missing prompt is ours
        {
            "name": name,
            "data_type": _triton_types(name)[0],
            "dims": dims.get(name) or [-1 if is_array(name) else 1],
            "optional": True,
        }
        for name in names
    ]
    outputs = [
        {"name": name, "data_type": data_type, "dims": [-1]}
        for name, data_type in OUTPUTS.items()
        if name != LEGACY_TEXT and not (name == TEXT and LEGACY_TEXT in has_outputs)
    ]
    return [port for port in inputs if port["name"] not in has_inputs], [
        port for port in outputs if port["name"] not in has_outputs
    ]


def _triton_types(name: str) -> tuple[str, ...]:
    """The tensor types that can hold an input, the declared one first."""
    if name in (PROMPT, *PROMPT_ALIASES, MESSAGES, IMAGE):
        return ("TYPE_STRING",)
    if name == PROMPT_TOKEN_IDS:
        return (*INTEGER_TYPES, "TYPE_STRING")
    if name in DIALECT_INPUTS:
        return (DIALECT_INPUTS[name],)
    types = TENSOR_TYPES[element_type(name)]
    if is_array(name):
        types = tuple(dict.fromkeys([*types, "TYPE_STRING"]))  # or the array as a JSON string
    return tuple(dict.fromkeys([DIALECT_TYPES.get(name, types[0]), *types]))


def is_array(name: str) -> bool:
    """Whether a parameter takes an array of strings or numbers."""
    return name not in DIALECT_INPUTS and _declared_type(name)[1]


def element_type(name: str) -> type:
    """A parameter's type, or that of its elements."""
    return _declared_type(name)[0]


def _declared_type(name: str) -> tuple[type, bool]:
    parameter = ALIASES.get(name, name)
    return value_type(PARAMETERS[parameter], parameter)


def check_config(
    config: Mapping[str, Any],
    check_input: Callable[[str, str], None] | None = None,
    check_output: Callable[[str, str], None] | None = None,
) -> None:
    """Refuse a configuration, as Triton gives it, that cannot be served as it is written.

    `check_input` and `check_output` refuse a name or type, by default those of text generation.

    Raises:
        SettingsError: An input or output is unknown, of a wrong type or shape, or reshaped; a sequence batcher adds
            inputs; the response cache is on, which would confuse requests.
    """
    for port in config["input"]:
        (check_input or _check_input)(port["name"], port["data_type"])
        _check_dims(port, config.get("max_batch_size", 0) > 0)
    for port in config["output"]:
        (check_output or _check_output)(port["name"], port["data_type"])
    for port in (*config["input"], *config["output"]):
        if port.get("reshape"):
            raise SettingsError(
                f"config.pbtxt reshapes {port['name']}: take reshape out, the last dimension counts the prompts"
            )
    for kind in ("control_input", "state"):
        if config.get("sequence_batching", {}).get(kind):
            raise SettingsError(
                f"sequence_batching has {kind}, but requests are independent of each other: take it out of config.pbtxt"
            )
    if config.get("response_cache", {}).get("enable"):
        raise SettingsError(
            "response_cache is on, but Triton's cache ignores request parameters and would answer one request with "
            "the response to another: take it out of config.pbtxt"
        )


def _check_dims(port: Mapping[str, Any], is_batched: bool) -> None:
    """Refuse an input's dimensions that no client's tensor has: `[n]`, or `[batch, n]` with the batch's own."""
    dims, most = list(map(int, port.get("dims", ()))), 1 if is_batched else 2
    if not 1 <= len(dims) <= most:
        batch = ", behind the batch of max_batch_size" if is_batched else " or [ -1, 1 ]"
        raise SettingsError(
            f"config.pbtxt declares {port['name']} with dims {dims}; it must have [ -1 ] or [ 1 ]{batch}"
        )


def _check_input(name: str, data_type: str) -> None:
    parameter = ALIASES.get(name, name)
    is_known = name in (*SOURCES, IMAGE, *PROMPT_ALIASES, *DIALECT_INPUTS) or parameter in PARAMETERS
    if not is_known or name in BEFORE_INPUTS:
        raise SettingsError(
            f"config.pbtxt declares the input '{name}', but there is no such request parameter"
            f"{suggest(SUGGESTIONS.get(name, name), [*SOURCES, IMAGE, *PARAMETERS, *ALIASES], 'docs/requests.md')}"
        )
    types = _triton_types(name)
    if data_type not in types:
        raise SettingsError(f"config.pbtxt declares {name} as {data_type}; it must be {' or '.join(types)}")


def _check_output(name: str, data_type: str) -> None:
    if name not in OUTPUTS:
        raise SettingsError(
            f"config.pbtxt declares the output '{name}', but there is no such output"
            f"{suggest(name, OUTPUTS, 'docs/requests.md')}"
        )
    if OUTPUTS[name] != data_type:
        raise SettingsError(f"config.pbtxt declares {name} as {data_type}; it must be {OUTPUTS[name]}")
