# SPDX-License-Identifier: Apache-2.0
"""What a task of an encoder takes and gives: texts, options, outputs, each declared once. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import annotated_types
import numpy as np
from pydantic import BaseModel, ConfigDict

from hf_triton.errors import SettingsError, clip
from hf_triton.protocol.declared_ports import TENSOR_TYPES
from hf_triton.protocol.names import IMAGE as IMAGE
from hf_triton.protocol.names import INPUT_ALIASES, TEXT_ALIASES
from hf_triton.protocol.names import JSON_OUTPUT as JSON_OUTPUT
from hf_triton.protocol.token_rows import TOKEN_INPUTS, TOKEN_TYPE
from hf_triton.protocol.validation import suggest, value_type

NUM_TOKENS: Final = "num_input_tokens"
NUMPY_TYPES: Final = {"TYPE_FP32": np.float32, "TYPE_UINT32": np.uint32, "TYPE_INT64": np.int64}
"""The types of outputs that are numbers."""


@dataclass(frozen=True)
class TextInput:
    """An input of texts, BYTES `[n]` or `[batch, 1]`. Inputs with one element go with every row of the others."""

    name: str
    meaning: str
    aliases: tuple[str, ...] = ()
    """Names under which other servers' clients send it."""
    is_optional: bool = False
    is_file: bool = False
    """Whether an element is the bytes of a file, or base64 of them, and no text."""


MLSERVER_TASKS: Final = (
    *("text-classification", "token-classification", "question-answering"),
    *("fill-mask", "zero-shot-classification", "feature-extraction"),
)
"""Tasks of encoders that MLServer has too: what comes in its inputs is answered as it answers."""
MAX_FILLS: Final = 1000
"""Tokens that fill-mask lists for a mask at most."""
TEXT: Final = "text"
PAIR: Final = "text_pair"
AUDIO: Final = "audio"
TEXTS: Final = TextInput(TEXT, "the texts", TEXT_ALIASES)
TOKEN_IDS: Final = "token_ids"
TOKEN_TEXTS: Final = TextInput(
    TOKEN_IDS,
    "instead of `text`, the token ids of each text, special tokens included: a string with a JSON array",
    is_optional=True,
)
IMAGES: Final = TextInput(
    IMAGE, "the images: PNG, JPEG, WebP or GIF, or base64 of them", INPUT_ALIASES[IMAGE], is_file=True
)


@dataclass(frozen=True)
class TaskOutput:
    """An output with a value, or an array, for each row."""

    data_type: str
    """`TYPE_STRING`, or one of `NUMPY_TYPES`."""
    meaning: str
    num_dims: int = 0
    """Dimensions of a row's value: 0 for a scalar, 1 for a vector."""
    by_default: bool = True
    """Whether it is filled for a client that names no outputs."""
    is_json: bool = False
    """Whether it is the result as JSON text, which the task need not give as a tensor."""
    is_ragged: bool = False
    """Whether the arrays of the rows, of unequal length, stand one below the other; without dimensions, a row's value
    is itself such an array of numbers."""
    is_padded: bool = False
    """Whether the integers of the rows, of unequal number, stand side by side, with zeros behind the shorter ones."""

    def __post_init__(self) -> None:
        known = ("TYPE_STRING", *NUMPY_TYPES)
        if self.data_type not in known:
            raise SettingsError(f"the type of a task's output must be {' or '.join(known)}, got {clip(self.data_type)}")


class DeclaredOptions(BaseModel):
    """Request parameters of a task; None means "not given"."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TaskOptions(DeclaredOptions):
    """Request parameters that every task of an encoder takes. Subclass it to add some."""

    truncate: bool | None = None
    """Whether a text that is longer than the model's context is cut; otherwise it is refused. By default the folder's
    setting `truncate`."""

    truncation_side: Literal["left", "right"] | None = None
    """The side where a text is cut: `left`, its start, or `right`, its end. By default as the tokenizer's files say,
    mostly `right`."""

    truncate_prompt_tokens: Annotated[int, annotated_types.Ge(-1), annotated_types.Le(2**31 - 1)] | None = None
    """Longer texts are cut to this many tokens, special tokens included; -1 is the model's context, as `truncate`
    true."""

    lora_name: str | None = None
    """Name of the LoRA adapter to compute with, of the setting `adapters` or the folder's `adapters/`. By default, and
    if empty, none."""


@dataclass(frozen=True)
class TaskDeclaration:
    """The requests and responses of a task."""

    name: str
    """The task's name in the setting `task`."""
    texts: tuple[TextInput, ...]
    outputs: Mapping[str, TaskOutput]
    """The outputs beside `output` and `num_input_tokens`, which every task has."""
    options: type[DeclaredOptions] = TaskOptions
    has_json: bool = True
    """Whether `output` is filled for a client that names no outputs."""
    takes_tokens: bool = False
    """Whether a request may hold token ids in place of the texts, see `token_rows`."""
    other_inputs: Mapping[str, str] = field(default_factory=dict)
    """Optional inputs that are neither texts nor options, with their types; the task's `read` takes them out."""
    document: str = "docs/encoders.md"
    """The document of its inputs and outputs."""

    @property
    def all_outputs(self) -> Mapping[str, TaskOutput]:
        common = {
            JSON_OUTPUT: TaskOutput("TYPE_STRING", "the result as JSON", by_default=self.has_json, is_json=True),
            NUM_TOKENS: TaskOutput("TYPE_UINT32", "tokens that the model read for the row", by_default=False),
        }
        return {**self.outputs, **common}

    def text_names(self) -> list[str]:
        return [name for text in self.texts for name in (text.name, *text.aliases)]

    @property
    def given_texts(self) -> tuple[str, ...]:
        """The text inputs that a request gives: those that it must have, or else the first."""
        return tuple(text.name for text in self.texts if not text.is_optional) or (self.texts[0].name,)

    @property
    def input_types(self) -> dict[str, tuple[str, ...]]:
        """The tensor types of every input or parameter by name, the declared one first."""
        options = {name: TENSOR_TYPES[value_type(self.options, name)[0]] for name in self.options.model_fields}
        return {
            **dict.fromkeys(self.text_names(), ("TYPE_STRING",)),
            **dict.fromkeys(self.token_names, (TOKEN_TYPE,)),
            **options,
            **{name: (data_type,) for name, data_type in self.other_inputs.items()},
        }

    @property
    def token_names(self) -> tuple[str, ...]:
        return TOKEN_INPUTS if self.takes_tokens else ()


def missing_task_ports(
    declaration: TaskDeclaration, config: Mapping[str, Any], parameters_as_inputs: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The inputs and outputs that config.pbtxt leaves out, in Triton's form; see `declared_ports.missing_ports`."""
    has_inputs, has_outputs = ({port["name"] for port in config[side]} for side in ("input", "output"))
    batch = [] if config["max_batch_size"] > 0 else [-1]
    inputs = _inputs(declaration, batch, parameters_as_inputs) if parameters_as_inputs or not has_inputs else ()
    outputs = [
        {"name": name, "data_type": output.data_type, "dims": [*batch, *[-1] * output.num_dims] or [1]}
        for name, output in declaration.all_outputs.items()
    ]
    return [port for port in inputs if port["name"] not in has_inputs], [
        port for port in outputs if port["name"] not in has_outputs
    ]


def _inputs(declaration: TaskDeclaration, batch: list[int], parameters_as_inputs: bool) -> Iterator[dict[str, Any]]:
    """All inputs; of the options else only those that are arrays, which Triton's JSON passes on to inputs only."""
    for name, types in declaration.input_types.items():
        dims = [1]
        if name in declaration.text_names():
            dims = batch or [1]
        elif name in declaration.token_names:
            dims = [*batch, -1]
        elif name in declaration.options.model_fields and value_type(declaration.options, name)[1]:
            dims = [-1]
        elif name in declaration.options.model_fields and not parameters_as_inputs:
            continue
        yield {"name": name, "data_type": types[0], "dims": dims, "optional": True}


def check_task_input(declaration: TaskDeclaration, name: str, data_type: str) -> None:
    """Refuse an input of a config.pbtxt that the task does not have, or one of another type."""
    types = declaration.input_types.get(name)
    if types is None:
        raise SettingsError(
            f"config.pbtxt declares the input '{name}', which a model for {declaration.name} does not take"
            f"{suggest(name, declaration.input_types, declaration.document)}"
        )
    if data_type not in types:
        raise SettingsError(f"config.pbtxt declares {name} as {data_type}; it must be {' or '.join(types)}")


def check_task_output(declaration: TaskDeclaration, name: str, data_type: str) -> None:
    """Refuse an output of a config.pbtxt that the task does not have, or one of another type."""
    known = declaration.all_outputs
    if name not in known:
        raise SettingsError(
            f"config.pbtxt declares the output '{name}', which a model for {declaration.name} does not have"
            f"{suggest(name, known, declaration.document)}"
        )
    if known[name].data_type != data_type:
        raise SettingsError(f"config.pbtxt declares {name} as {data_type}; it must be {known[name].data_type}")
