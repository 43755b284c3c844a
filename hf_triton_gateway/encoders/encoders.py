# SPDX-License-Identifier: Apache-2.0
"""Requests to encoders: a client's texts as requests to Triton, side by side, and their outputs joined again."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import annotated_types
from fastapi import Request
from pydantic import BeforeValidator
from pydantic_core import to_json

from hf_triton.protocol.task_declaration import TOKEN_IDS
from hf_triton.sentence import param
from hf_triton_gateway.app_state import Gateway, gateway_of, request_id_of
from hf_triton_gateway.chat import answers
from hf_triton_gateway.chat.fields import Fields
from hf_triton_gateway.chat.merge import all_results
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import beside
from hf_triton_gateway.http.disconnect import run_while_connected
from hf_triton_gateway.triton.triton_messages import LORA_NAME, Folder, Outputs, TextRequest, adapter_name, size_of

BATCH_SIZE: Final = 128
"""Texts of one request to Triton, unless the folder takes fewer."""
MAX_SIDE_BY_SIDE: Final = 2
"""Requests of one client to Triton at a time: the next one is there when a pass ends, and others get their turn."""
NUM_TOKENS: Final = "num_input_tokens"
SIDES: Final[Mapping[str, Literal["left", "right"]]] = {"START": "left", "END": "right"}
"""The sides where Cohere's words cut."""


def _lower(value: object) -> object:
    """TEI's `Left` as `left`."""
    return value.lower() if isinstance(value, str) else value


class EncoderFields(Fields):
    """The fields that all requests to encoders share."""

    is_open: ClassVar[bool] = True

    model: Annotated[str, annotated_types.MinLen(1)]
    """One of `/v1/models`; by default the only one of its task, or `--default-model`."""

    truncate: bool | Literal["NONE", "START", "END"] | None = None
    """Whether a text that is longer than the model's context is cut; otherwise it is refused. Cohere's and NIM's words
    say where, too: `START` or `END`; `NONE` is false."""

    truncation_side: Annotated[Literal["left", "right"], BeforeValidator(_lower)] | None = None
    """The side where a text is cut: `left`, its start, or `right`, its end. By default as the tokenizer says, mostly
    `right`."""

    truncate_prompt_tokens: Annotated[int, annotated_types.Ge(-1), annotated_types.Le(2**31 - 1)] | None = None
    """Longer texts are cut to this many tokens, special tokens included; -1 is the model's context."""

    lora_name: str | None = None
    """Name of a LoRA adapter of the model. By default the one behind a colon in `model`, if there is one."""

    def cutting(self) -> dict[str, bool | int | str | None]:
        """How texts are cut, in the names of encoders' parameters."""
        truncate, side = self.truncate, self.truncation_side
        if isinstance(truncate, str):
            own_side = SIDES.get(truncate)
            if own_side and side and own_side != side:
                message = f"{param('truncate')} {truncate} and {param('truncation_side')} {side} contradict each other"
                raise ApiError(400, message, param="truncate")
            truncate, side = own_side is not None, own_side or side
        return {"truncate": truncate, "truncation_side": side, "truncate_prompt_tokens": self.truncate_prompt_tokens}


async def encode(
    request: Request,
    body: EncoderFields,
    task: str,
    texts: Mapping[str, Sequence[str]],
    outputs: Sequence[str],
    *,
    parameters: Mapping[str, bool | int | float | str | None] | None = None,
    names: Mapping[str, str | None] | None = None,
    places: Sequence[int | str] | None = None,
) -> Outputs:
    """The outputs for texts, one below the other, and the model's tokens of each text.

    Args:
        request: The client's.
        body: Its fields.
        task: Of the model.
        texts: Of each input; an input of one text goes with every text of the others.
        outputs: Those of the task that are needed.
        parameters: Of the task; None is not sent.
        names: The client's names of the inputs.
        places: The client's numbers of the texts, or their places; empty: it sent one; None: as they are counted.
    """
    gateway, longest = gateway_of(request), max(texts, key=lambda name: len(texts[name]))
    count = len(texts[longest])
    own = body.names_of(names or {})
    own = dataclasses.replace(own, subject=own.of(longest))
    rows = range(count if count > 1 else 0) if places is None else places
    adapter = adapter_name(body.model, body.lora_name) or body.lora_name
    sources = (parameters or {}, body.cutting(), {LORA_NAME: adapter})
    given = {name: value for source in sources for name, value in source.items() if value is not None}

    async def run() -> Outputs:
        folder = await gateway.models.folder(body.model, task=task)
        size = _batch_size(folder)
        parts = [
            TextRequest(
                body.model,
                request_id_of(request),
                task,
                {name: each if len(each) == 1 else each[start : start + size] for name, each in texts.items()},
                (*outputs, NUM_TOKENS),
                given,
                dataclasses.replace(own, rows=rows[start : start + size]),
            )
            for start in range(0, count, size)
        ]
        found = await _run_all(gateway, parts, _num_side_by_side(folder, size))
        return await beside(sum(map(size_of, found)), _joined, found)

    try:
        async with asyncio.timeout(gateway.config.timeout_s):
            return await run_while_connected(request.receive, run())
    except TimeoutError:
        message = f"the {count} texts were not done within {gateway.config.timeout_s:g} s: send fewer in a request"
        raise ApiError(504, message, code="deadline_exceeded") from None


def _batch_size(folder: Folder) -> int:
    own = _own_limit(folder, "max_prompts") or BATCH_SIZE
    return min(BATCH_SIZE, folder.max_batch_size or BATCH_SIZE, own, *folder.fixed_sizes.values())


def _num_side_by_side(folder: Folder, size: int) -> int:
    """The number of requests that do not refuse each other for what may wait in a folder."""
    max_waiting = _own_limit(folder, "max_waiting_prompts")
    return MAX_SIDE_BY_SIDE if max_waiting is None else max(1, min(MAX_SIDE_BY_SIDE, max_waiting // size))


def _own_limit(folder: Folder, setting: str) -> int | None:
    """A number among a folder's settings; None: it is not known."""
    if folder.info is not None:
        return int(getattr(folder.info, setting))
    own = folder.parameters.get(setting, "")
    return int(own) if own.isascii() and own.isdigit() else None


async def _run_all(gateway: Gateway, parts: Sequence[TextRequest], num_side_by_side: int) -> list[Outputs]:
    """All requests, some at a time; the first that fails cancels the others."""
    free = asyncio.Semaphore(num_side_by_side)

    async def run(part: TextRequest) -> Outputs:
        async with free:
            return await gateway.models.generate(part)

    return await all_results(map(run, parts))


def _joined(parts: Sequence[Outputs]) -> Outputs:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def usage_of(outputs: Outputs) -> dict[str, int]:
    """OpenAI's usage object of a request without completions."""
    num_tokens = sum(outputs[NUM_TOKENS])
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def rows_of(values: list[Any], num_rows: int) -> list[list[Any]]:
    """The values of each row, of as many for each."""
    width = len(values) // num_rows
    return [values[start : start + width] for start in range(0, len(values), width)]


def as_base64(vector: Sequence[float]) -> str:
    """The bytes of a vector's float32 numbers, little-endian."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def response_head(body: EncoderFields, request: Request, kind: str) -> dict[str, Any]:
    """What the response to a request of a kind begins with."""
    return answers.response_head(f"{kind}-{request_id_of(request)}", "list", body.model)


def text_list(name: str, value: str | Sequence[str]) -> list[str]:
    """One text or several, none of them empty."""
    texts = [value] if isinstance(value, str) else list(value)
    if not texts:
        raise ApiError(400, f"{name} is an empty list: give one text or more", param=name)
    for number, text in enumerate(texts):
        if not text:
            place = name if isinstance(value, str) else f"{name}[{number}]"
            raise ApiError(400, f"{place} is empty: give a text", param=name)
    return texts


def texts_or_tokens(field: str, value: str | list[str] | list[int] | list[list[int]]) -> tuple[str, list[str]]:
    """The name of a model's input, and its texts, or of each the JSON of its token ids, none of them empty."""
    given: Any = value
    if not given or isinstance(given, str) or isinstance(given[0], str):
        return "text", text_list(field, given)
    lists = [given] if isinstance(given[0], int) else given
    if [] in lists:
        raise ApiError(400, f"{field} holds an empty list of token ids: give one token or more", param=field)
    return TOKEN_IDS, [to_json(each).decode() for each in lists]
