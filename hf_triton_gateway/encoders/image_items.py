# SPDX-License-Identifier: Apache-2.0
"""Inputs that may be images: a list of texts and of OpenAI's parts, with data URIs. Fetches and decodes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

import annotated_types
from fastapi import Request

from hf_triton.protocol.task_declaration import IMAGE, TEXT
from hf_triton_gateway.chat.conversation import parse_at
from hf_triton_gateway.chat.fields import HINT, MAX_TEXTS, Fields, Ignored
from hf_triton_gateway.encoders.encoders import NUM_TOKENS, EncoderFields, encode, rows_of, texts_or_tokens
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import MAX_IMAGE_BYTES, JsonRoute
from hf_triton_gateway.triton.triton_messages import Outputs, size_of

Parts = Annotated[list[str | dict[str, Any]], annotated_types.MaxLen(MAX_TEXTS)]
Items: TypeAlias = dict[str, dict[int, str]]
"""Elements by the model's input, and by their places in the client's list."""
ItemOutputs: TypeAlias = list[tuple[list[int], Outputs]]
"""The outputs of each kind of item, with the items' places in the client's list."""
DATA_URI: Final = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)


class ImageRoute(JsonRoute):
    """A route whose body may hold images."""

    max_body_bytes: ClassVar[int] = MAX_IMAGE_BYTES


class _Url(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {"detail": HINT}
    url: str


class _ImagePart(Fields):
    type: Literal["image_url"]
    image_url: str | dict[str, Any]


class _TextPart(Fields):
    type: Literal["text"]
    text: Annotated[str, annotated_types.MinLen(1)]


def read_items(field: str, value: Any, *, strings_too: bool = False) -> Items:
    """The texts, token ids or images of a field; with `strings_too` a string that is an image's data URI is one."""
    parts = value if isinstance(value, list) else [value]
    if not any(isinstance(part, dict) or (strings_too and _is_image(part)) for part in parts):
        name, texts = texts_or_tokens(field, value)
        return {name: dict(enumerate(texts))}
    items: Items = {}
    for place, part in enumerate(parts):
        name, element = _read_part(f"{field}[{place}]", part, strings_too=strings_too)
        items.setdefault(name, {})[place] = element
    return items


def _read_part(place: str, part: Any, *, strings_too: bool) -> tuple[str, str]:
    if strings_too and _is_image(part):
        return IMAGE, part
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if isinstance(part, dict) and part.get("type") == "text":
        return TEXT, parse_at(_TextPart, place, part).text
    image = parse_at(_ImagePart, place, part).image_url
    url = image if isinstance(image, str) else parse_at(_Url, f"{place}.image_url", image).url
    if not _is_image(url):
        message = f"{place}.image_url must be a data URI (data:image/png;base64,...): nothing is fetched"
        raise ApiError(400, message, param=f"{place}.image_url", code="invalid_parameter")
    return IMAGE, url


def _is_image(value: object) -> bool:
    return isinstance(value, str) and DATA_URI.match(value) is not None


async def encode_items(
    request: Request,
    body: EncoderFields,
    task: str,
    items: Items,
    outputs: Sequence[str],
    parameters: Mapping[str, bool | int | str | None],
    field: str = "input",
) -> ItemOutputs:
    """The outputs of all items, which are of a field; other arguments as `encode` has them."""
    found: ItemOutputs = []
    is_one = sum(map(len, items.values())) == 1
    for name, elements in items.items():
        texts, places, names = {name: [*elements.values()]}, [*elements], {name: field}
        told = () if is_one else places
        given = await encode(request, body, task, texts, outputs, parameters=parameters, names=names, places=told)
        found.append((places, given))
    return found


def size_of_items(found: ItemOutputs) -> int:
    return sum(size_of(outputs) for _, outputs in found)


def item_rows(found: ItemOutputs, outputs: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The outputs of each item in the client's order, and the usage."""
    rows: dict[int, dict[str, Any]] = {}
    for places, given in found:
        values = zip(*(rows_of(given[output], len(places)) for output in outputs), strict=True)
        rows |= {place: dict(zip(outputs, row, strict=True)) for place, row in zip(places, values, strict=True)}
    num_tokens = sum(sum(given[NUM_TOKENS]) for _, given in found)
    return [rows[place] for place in sorted(rows)], {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
