# SPDX-License-Identifier: Apache-2.0
"""The prompts of a request: strings, one chat or token ids, from a tensor or a parameter. Knows no model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from pydantic_core import from_json

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.chat_request import Chat, parse_chat
from hf_triton.protocol.image_files import ImageParts, image_file, not_taken, too_many
from hf_triton.protocol.names import IMAGE, MESSAGES, PROMPT, PROMPT_TOKEN_IDS
from hf_triton.protocol.tensor_values import Array, decode_string
from hf_triton.sentence import param
from hf_triton.sentence import row as row_words

SOURCES: Final = (PROMPT, MESSAGES, PROMPT_TOKEN_IDS)
"""A request gives one of them."""
BYTES_PER_TOKEN: Final = 16
"""More than any prompt has on average; bounds what is tokenized at all."""
MAX_TOKEN_ID: Final = 2**31 - 1

TokenIds = tuple[int, ...]
Prompt = str | Chat | TokenIds
"""A string, a chat, or token ids."""


@dataclass(frozen=True)
class Limits:
    max_prompts: int
    max_prompt_bytes: int
    """Bytes of the longest prompt."""
    max_images: int = 0
    """Images of one request; 0: the model takes none."""
    max_image_bytes: int = 0
    """Bytes of the largest file of an image."""
    image_obstacle: str = ""
    """Why the model takes none, if that is not plain."""


def prompt_name(prompt: Prompt, row: int) -> str:
    """What sentences call a prompt."""
    if isinstance(prompt, Chat):
        return param(MESSAGES)
    return f"{param(PROMPT)}{row_words(row)}" if isinstance(prompt, str) else param(PROMPT_TOKEN_IDS)


def prompt_shape(inputs: Mapping[str, Array]) -> tuple[int, ...]:
    """The shape of `text_input`, which the outputs follow."""
    if PROMPT in inputs:
        return inputs[PROMPT].shape
    source = next((inputs[name] for name in SOURCES if name in inputs), None)
    return (1,) if source is None else (*source.shape[:-1], 1)


def decode_texts(name: str, array: Array, limits: Limits, noun: str = "text") -> list[str]:
    """Read a BYTES tensor of UTF-8, of any shape in C order, as strings; messages call each a `noun`.

    Raises:
        RequestError: There are no elements or too many, or one is too long or not UTF-8; the message names its row.
    """
    elements = enumerate(read_elements(name, array, limits, noun))
    return [decode_string(f"{param(name)}{row_words(row)}", element, "invalid_input") for row, element in elements]


def read_elements(name: str, array: Array, limits: Limits, noun: str = "file") -> list[bytes]:
    """Read a BYTES tensor as it is; arguments and errors as `decode_texts` has them."""
    if array.size == 0:
        raise RequestError("invalid_input", f"{param(name)} holds no {noun}, its shape is {list(array.shape)}")
    if array.dtype != np.object_:
        raise RequestError("invalid_input", f"{param(name)} must be strings (BYTES), got {array.dtype}")
    if array.size > limits.max_prompts:
        raise RequestError(
            "invalid_input",
            f"{param(name)} holds {array.size} {noun}s, more than the {limits.max_prompts} that are accepted (setting "
            "max_prompts): send several requests",
        )
    elements: list[bytes] = array.ravel().tolist()
    for row, element in enumerate(elements):
        check_size(len(element), limits, f"{param(name)}{row_words(row)}")
    return elements


def read_images(value: object, limits: Limits) -> tuple[bytes, ...]:
    """The files of the input `image`: a tensor of them or of base64, a string as a parameter, or None.

    Raises:
        RequestError: The model takes none or fewer, or one is too large or no image; the message names its row.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        elements = [value.encode(errors="replace")]
    elif isinstance(value, np.ndarray) and value.dtype == np.object_:
        elements = value.ravel().tolist()
    else:
        raise RequestError("invalid_input", f"{param(IMAGE)} must be files of images, or base64 of them (BYTES)")
    if elements and not limits.max_images:
        raise not_taken(f"{param(IMAGE)} is given", limits.image_obstacle)
    if len(elements) > limits.max_images:
        raise too_many(param(IMAGE), limits.max_images)
    names = (f"{param(IMAGE)}{row_words(row)}" for row in range(len(elements)))
    return tuple(
        image_file(element, name, limits.max_image_bytes) for element, name in zip(elements, names, strict=True)
    )


def decode_chat(value: object, options: Mapping[str, object], limits: Limits, files: Sequence[bytes] = ()) -> Chat:
    """Read `messages`, a tensor of JSON or a parameter, with the request's `ChatOptions` and files of images."""
    if isinstance(value, np.ndarray):
        value = [decode_string(param(MESSAGES), element) for element in _one_row(MESSAGES, value, "chat")]
    if not isinstance(value, str | list):
        raise RequestError("invalid_input", f"{param(MESSAGES)} must be a JSON string, got {clip(value)}")
    images = ImageParts(limits.max_images, limits.max_image_bytes, files, limits.image_obstacle)
    return parse_chat(value, options, limits.max_prompt_bytes, images)


def decode_token_ids(value: object, limits: Limits, name: str = PROMPT_TOKEN_IDS) -> TokenIds:
    """Read token ids: a tensor of integers, which count as many bytes as they have, or of JSON, or a parameter."""
    if isinstance(value, np.ndarray):
        row = _one_row(name, value, "prompt")
        if row.dtype == np.object_:
            value = decode_string(param(name), row[0]) if row.size == 1 else row.tolist()
        else:
            check_size(row.nbytes, limits, param(name))
            value = row.tolist()
    if isinstance(value, str):
        check_size(len(value), limits, param(name))  # digits are one byte each
        with contextlib.suppress(ValueError):
            value = from_json(value)
    if not isinstance(value, list) or not value:
        raise RequestError(
            "invalid_input", f"{param(name)} must be a JSON array of 1 or more token ids, got {clip(value)}"
        )
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise RequestError(
                "invalid_input",
                f"{param(f'{name}[{index}]')} must be an integer >= 0 and <= {MAX_TOKEN_ID}, got {clip(token_id)}",
            )
    return tuple(value)


def check_size(num_bytes: int, limits: Limits, about: str) -> None:
    """Check the size of a prompt; an error's sentence begins with `about`."""
    if num_bytes > limits.max_prompt_bytes:
        raise RequestError(
            "context_exceeded",
            f"{about} has {num_bytes} bytes, more than the {limits.max_prompt_bytes} that are accepted "
            "(setting max_prompt_bytes)",
            sizes={"bytes": num_bytes, "limit": limits.max_prompt_bytes},
        )


def _one_row(name: str, array: Array, kind: str) -> Array:
    """The elements of a tensor `[n]` or `[1, n]`."""
    if array.ndim > 1 and len(array) > 1:
        raise RequestError("invalid_input", f"{param(name)} holds one {kind}: send {len(array)} requests")
    return array.ravel()
