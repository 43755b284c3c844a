# SPDX-License-Identifier: Apache-2.0
"""Folders and requests as the gateway sees them, and Triton's gRPC messages of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, get_args

from pydantic_core import to_json
from tritonclient.grpc import service_pb2

from hf_triton.errors import ERROR_FORM, ERROR_FORM_VERSION
from hf_triton.protocol.model_info import ModelInfo
from hf_triton.protocol.names import (
    IMAGE,
    MESSAGES,
    MODEL_SETTINGS,
    PROMPT,
    PROMPT_TOKEN_IDS,
    TEXT_OUTPUTS,
    TEXT_TO_TEXT,
    TaskName,
    declared_input,
)
from hf_triton.protocol.thinking_switches import SWITCHES, switched, unread
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.client_names import OWN_NAMES, ClientNames
from hf_triton_gateway.http.gateway_tracer import caller

DOOR_SUFFIX: Final = "_stream"
ADAPTER_MARK: Final = ":"
"""Stands between a model's name and that of one of its LoRA adapters."""
LORA_NAME: Final = "lora_name"
REASONING_EFFORT: Final = "reasoning_effort"
TEMPLATE_KWARGS: Final = "chat_template_kwargs"
THINKING_BUDGET: Final = "thinking_budget"
TEXT_GENERATION: Final = "text-generation"
EMBEDDINGS: Final = "embeddings"
RERANK: Final = "rerank"
CLASSIFICATION: Final = "text-classification"
TOKEN_CLASSIFICATION: Final = "token-classification"
FILL_MASK: Final = "fill-mask"
SPARSE: Final = "sparse-embeddings"
FEATURES: Final = "feature-extraction"
SPEECH: Final = "automatic-speech-recognition"
IMAGE_CLASSIFICATION: Final = "image-classification"
QUESTION_ANSWERING: Final = "question-answering"
ZERO_SHOT: Final = "zero-shot-classification"
EMBEDDING: Final = "embedding"
"""The output of a model for embeddings."""
ENDPOINTS: Final[Mapping[str, str]] = {
    TEXT_GENERATION: "/v1/chat/completions",
    EMBEDDINGS: "/v1/embeddings",
    RERANK: "/v1/rerank",
    CLASSIFICATION: "/v1/classify",
    TOKEN_CLASSIFICATION: "/v1/token-classification",
    FILL_MASK: "/v1/fill-mask",
    SPARSE: "/embed_sparse",
    FEATURES: "/embed_all",
    SPEECH: "/v1/audio/transcriptions",
    IMAGE_CLASSIFICATION: "/v1/classify with images",
    QUESTION_ANSWERING: "/",
    ZERO_SHOT: "/",
}
"""The endpoint of each task's models."""
TASKS: Final[Mapping[str, str | None]] = {
    **dict.fromkeys(get_args(TaskName)),
    **{task: task for task in ENDPOINTS},
    **dict.fromkeys(TEXT_TO_TEXT, TEXT_GENERATION),
}
"""The task that a model's own one is here; None: it has no endpoint."""
NOUNS: Final[Mapping[str, str]] = {
    "text": "texts",
    "text_pair": "pairs of texts",
    "token_ids": "token ids",
    "image": "images",
}
"""What sentences call inputs."""
FORMATS: Final[Mapping[str, str]] = {"UINT32": "I", "INT32": "i", "FP32": "f", "INT64": "q", "UINT64": "Q"}

KINDS: Final = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
"""The field of Triton's message for a parameter of a type."""

Outputs: TypeAlias = dict[str, list[Any]]
"""The outputs of a response by name: strings or numbers, one for each sequence."""


@dataclass(frozen=True)
class Folder:
    """A model folder that is ready, by its completed config."""

    name: str
    max_batch_size: int
    is_decoupled: bool
    inputs: frozenset[str]
    outputs: frozenset[str]
    parameters: Mapping[str, str]
    info: ModelInfo | None = None
    """What the model's process says; None: it says nothing, and ports and parameters tell."""
    required: frozenset[str] = frozenset()
    """The inputs that Triton demands of each request."""
    fixed_sizes: Mapping[str, int] = field(default_factory=dict)
    """The number of elements that each request must have of a required input, where the folder's `dims` fix it."""

    @classmethod
    def from_config(cls, name: str, config: Any) -> Folder:
        return cls(
            name,
            config.max_batch_size,
            config.model_transaction_policy.decoupled,
            frozenset(port.name for port in config.input),
            frozenset(port.name for port in config.output),
            {key: value.string_value for key, value in config.parameters.items()},
            required=frozenset(port.name for port in config.input if not port.optional),
            fixed_sizes={
                port.name: port.dims[0]
                for port in config.input
                if not (port.optional or config.max_batch_size) and len(port.dims) == 1 and port.dims[0] > 0
            },
        )

    @property
    def task(self) -> str | None:
        """What the folder's model does; None if the gateway has no endpoint for it."""
        if self.info is not None and self.info.task in TASKS:
            return TASKS[self.info.task]
        if EMBEDDING in self.outputs:
            return EMBEDDINGS
        if self.inputs >= {"query", "documents"}:
            return RERANK
        if self.outputs >= {"label", "score"} and "text" in self.inputs and "candidate_labels" not in self.inputs:
            return CLASSIFICATION
        if self.outputs >= {"label", "score"} and "image" in self.inputs:
            return IMAGE_CLASSIFICATION
        generates = PROMPT in self.inputs and not self.outputs.isdisjoint(TEXT_OUTPUTS)
        return TEXT_GENERATION if generates else None

    @property
    def takes_cancel(self) -> bool:
        """Whether its process knows the request that cancels another one: it is this library's."""
        return self.info is not None or self.stream_of is not None

    @property
    def adapters(self) -> list[str]:
        """The LoRA adapters that its settings name; those of its subfolder may come and go."""
        try:
            named = json.loads(self.parameters.get("adapters") or "{}")
        except ValueError:
            return []
        return sorted(named) if isinstance(named, dict) else []

    @property
    def stream_of(self) -> str | None:
        """The folder that this one streams from, if it is a stream door."""
        if not self.is_decoupled or not self.parameters.keys().isdisjoint(MODEL_SETTINGS):
            return None
        named = self.parameters.get("stream_of")
        return named or (self.name.removesuffix(DOOR_SUFFIX) if self.name.endswith(DOOR_SUFFIX) else None)


@dataclass(frozen=True)
class TextRequest:
    """One request to an encoder, in the names of its task."""

    model: str
    request_id: str
    task: str
    texts: Mapping[str, Sequence[str | bytes]]
    """The texts of each input, or its files."""
    outputs: Sequence[str]
    """The outputs to fill."""
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    names: ClientNames = OWN_NAMES
    """What the client calls our parameters and rows, for error messages."""

    @property
    def model_name(self) -> str:
        """The model, without the adapter that `model` may name behind it."""
        return base_name(self.model)

    @property
    def size(self) -> int:
        return sum(len(text) for texts in self.texts.values() for text in texts)


def adapter_name(model: str, named: object) -> str | None:
    """The adapter that a request names behind its model; None: it names none. `lora_name` may name no other."""
    adapter = model.partition(ADAPTER_MARK)[2]
    if adapter and named and named != adapter:
        raise ApiError(400, f"model names the adapter {adapter}, and lora_name {named}", param=LORA_NAME)
    return adapter or None


def base_name(model: str) -> str:
    """A model without the adapter that is named behind it; an empty name is none."""
    name, _, adapter = model.partition(ADAPTER_MARK)
    return name if adapter else model


@dataclass(frozen=True)
class Generation:
    """One request for generated text, in the names of `hf_triton.protocol`."""

    model: str
    request_id: str
    sampling: Mapping[str, object]
    """Generation parameters."""
    options: Mapping[str, bool | int | str]
    """Request options and chat options."""
    prompts: Sequence[str] = ()
    images: Sequence[bytes] = ()
    """Image files beside one prompt."""
    messages: Sequence[object] | None = None
    """OpenAI's list of messages, instead of prompts."""
    prompt_token_ids: Sequence[int] | None = None
    """One prompt's token ids, instead of prompts."""
    returns: Collection[str] = ("finish_reason", "num_input_tokens", "num_output_tokens")
    """Outputs to fill beside the text, if the folder declares them."""
    names: ClientNames = OWN_NAMES
    """What the client calls our parameters and rows, for error messages."""
    num_bytes: int = 0
    """The bytes of its messages and options, estimated."""
    hidden: Sequence[str] = ()
    """The client's names of images that tools answered."""

    @property
    def task(self) -> str:
        """What the model must do."""
        return TEXT_GENERATION

    @property
    def size(self) -> int:
        given = sum(map(len, self.prompts)) + sum(map(len, self.images))
        return max(self.num_bytes, given, 8 * len(self.prompt_token_ids or ()))

    def unread_variables(self, info: ModelInfo) -> list[str]:
        """The client's names of variables, a budget and images that change nothing for a model."""
        has_budget = THINKING_BUDGET in self.sampling and not info.reasons
        others = [*([] if info.takes_images else self.hidden), *([self.names.of(THINKING_BUDGET)] * has_budget)]
        if info.template_variables is None:
            return others
        given = {REASONING_EFFORT: self.names.of(REASONING_EFFORT)}
        given = {name: place for name, place in given.items() if name in self.options}
        named = json.loads(str(self.options.get(TEMPLATE_KWARGS, "{}")))
        switches = {name: self.names.names.get(name) for name in SWITCHES}
        given |= {name: switches.get(name) or f"{TEMPLATE_KWARGS}.{name}" for name in named}
        values = {**{name: self.options.get(name) for name in given}, **named}
        closes_block = info.reasons and switched(values) is False
        names = unread(values, [*info.template_variables, *(SWITCHES if closes_block else ())])
        return [*others, *(given[name] for name in names)]

    @property
    def model_name(self) -> str:
        """The model, without the adapter that `model` may name behind it."""
        return base_name(self.model)

    @property
    def sampling_parameters(self) -> Mapping[str, object]:
        """The generation parameters, the adapter's name among them."""
        adapter = adapter_name(self.model, self.sampling.get(LORA_NAME))
        return {**self.sampling, LORA_NAME: adapter} if adapter else self.sampling


def infer_request(folder: Folder, request: Generation | TextRequest, *, is_stream: bool) -> Any:
    message = service_pb2.ModelInferRequest(model_name=folder.name, id=request.request_id)
    try:
        if isinstance(request, TextRequest):
            parameters = _add_texts(message, folder, request)
        else:
            parameters = _add_generation(message, folder, request, is_stream=is_stream)
        if folder.info is not None and folder.info.error_form == ERROR_FORM_VERSION:
            parameters[ERROR_FORM] = ERROR_FORM_VERSION
        for name, value in parameters.items():
            setattr(message.parameters[name], KINDS[type(value)], value)
    except (UnicodeEncodeError, RecursionError):
        raise ApiError(400, "the request holds half of a surrogate pair, which is not Unicode") from None
    return message


def _add_texts(message: Any, folder: Folder, request: TextRequest) -> dict[str, object]:
    """Add the texts and the wanted outputs of a request to an encoder; returns its parameters."""
    num_rows = max(map(len, request.texts.values()), default=1)
    for name, texts in request.texts.items():
        declared = declared_input(name, folder.inputs, folder.required)
        if declared is None:
            sentence = f"the model '{folder.name}' takes no {NOUNS.get(name, name)}"
            raise ApiError(400, sentence, param=request.names.of(name), code="unsupported_parameter")
        is_shared = len(texts) == 1 and folder.max_batch_size > 0  # whose inputs have as many rows each
        _add_strings(message, folder, declared, [*texts] * num_rows if is_shared else texts)
    for name in request.outputs:
        message.outputs.add(name=name)
    return {**request.parameters, **caller()}


def _add_generation(message: Any, folder: Folder, generation: Generation, *, is_stream: bool) -> dict[str, object]:
    """Add the prompt of a generation; returns its parameters."""
    returns = {f"return_{name}": True for name in generation.returns if name in folder.outputs}
    parameters: dict[str, object] = {"stream": is_stream, **returns, **generation.options, **caller()}
    if sampling := generation.sampling_parameters:
        parameters["sampling_parameters"] = json.dumps(sampling)
    if generation.messages is not None:
        pieces = (json.dumps(message, ensure_ascii=False) for message in generation.messages)
        text = f"[{', '.join(pieces)}]"
        if MESSAGES in folder.inputs:
            _add_strings(message, folder, MESSAGES, [text])
        else:
            _check_required(folder, "chats")
            parameters[MESSAGES] = text
    elif generation.prompt_token_ids is not None:
        if PROMPT_TOKEN_IDS in folder.inputs:
            try:
                _add_ids(message, folder, generation.prompt_token_ids)
            except struct.error:
                name = generation.names.of(PROMPT_TOKEN_IDS)
                raise ApiError(400, f"{name} holds a token id that no model has", param=name) from None
        else:
            _check_required(folder, "prompts of token ids")
            parameters[PROMPT_TOKEN_IDS] = to_json(generation.prompt_token_ids).decode()
    else:
        name = declared_input(PROMPT, folder.inputs, folder.required) or PROMPT
        _add_strings(message, folder, name, generation.prompts)
        if generation.images:
            if IMAGE not in folder.inputs:
                raise ApiError(400, f"the model '{folder.name}' takes no images", code="unsupported_parameter")
            _add_strings(message, folder, IMAGE, generation.images, of_one=True)
        if name != PROMPT:  # is answered in the form of the server that calls it so, unless outputs are named
            for output in sorted({*TEXT_OUTPUTS, *generation.returns} & folder.outputs):
                message.outputs.add(name=output)
    return parameters


def _check_required(folder: Folder, what: str) -> None:
    """Refuse what comes without an input to a folder that declares inputs which are not optional."""
    if folder.required:
        names = ", ".join(sorted(folder.required))
        message = (
            f"the folder {folder.name} requires the input {names}: take `input` out of its config.pbtxt for {what}"
        )
        raise ApiError(400, message, param="model", code="unsupported_parameter")


def _add_strings(
    request: Any, folder: Folder, name: str, texts: Sequence[str | bytes], *, of_one: bool = False
) -> None:
    """Add an input with an element for each row of the request, or with all of them for its only row."""
    size = folder.fixed_sizes.get(name, len(texts))
    if size != len(texts):
        message = (
            f"a request to the folder {folder.name} has {size} of {name}, got {len(texts)}: send so many, or make its "
            "dims [ -1 ] in config.pbtxt"
        )
        raise ApiError(400, message, code="unsupported_parameter")
    shape = [len(texts)] if not folder.max_batch_size else [1, len(texts)] if of_one else [len(texts), 1]
    request.inputs.add(name=name, datatype="BYTES", shape=shape)
    encoded = [text if isinstance(text, bytes) else text.encode() for text in texts]
    request.raw_input_contents.append(b"".join(struct.pack("<I", len(text)) + text for text in encoded))


def _add_ids(request: Any, folder: Folder, token_ids: Sequence[int]) -> None:
    """Add a prompt's token ids as an input, which Triton demands of folders with a batch size."""
    shape = [1, len(token_ids)] if folder.max_batch_size else [len(token_ids)]
    request.inputs.add(name=PROMPT_TOKEN_IDS, datatype="INT64", shape=shape)
    request.raw_input_contents.append(struct.pack(f"<{len(token_ids)}q", *token_ids))


def size_of(outputs: Outputs) -> int:
    """The memory that outputs take, estimated, in bytes."""
    return sum(
        sum(map(len, values)) if values and isinstance(values[0], str) else 8 * len(values)
        for values in outputs.values()
    )


class StreamSize:
    """How many bytes the next piece of a stream is made of: what has come since the last, and at the end everything."""

    def __init__(self) -> None:
        self.total = self._since = 0

    def of(self, outputs: Outputs, *, is_whole: bool = False) -> int:
        """The size with a response's outputs; of a piece that repeats earlier ones, everything."""
        num_bytes = size_of(outputs)
        self.total += num_bytes
        self._since += num_bytes
        return self.total if is_whole or "finish_reason" in outputs else self._since

    def sent(self) -> None:
        self._since = 0


def read_outputs(response: Any) -> Outputs:
    contents = response.raw_output_contents
    return {
        output.name: _read_tensor(output.datatype, contents[index]) for index, output in enumerate(response.outputs)
    }


def _read_tensor(datatype: str, content: bytes) -> list[Any]:
    if datatype != "BYTES":
        form = FORMATS[datatype]
        return list(struct.unpack(f"<{len(content) // struct.calcsize(form)}{form}", content))
    texts, start = [], 0
    while start < len(content):
        end = start + 4 + int.from_bytes(content[start : start + 4], "little")
        texts.append(content[start + 4 : end].decode(errors="replace"))
        start = end
    return texts
