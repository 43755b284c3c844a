# SPDX-License-Identifier: Apache-2.0
"""Image files as clients send them: alone, as base64, or in parts of messages. Fetches nothing, decodes no pixels."""

from __future__ import annotations

import base64
import binascii
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hf_triton.errors import RequestError
from hf_triton.protocol.names import IMAGE, MESSAGES
from hf_triton.sentence import param, plain

KINDS: Final = "PNG, JPEG, WebP or GIF"
MAGIC: Final = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF....WEBP|GIF8[79]a", re.DOTALL)
"""How the files begin that are read; base64 of them begins otherwise."""
DATA_URI: Final = re.compile(rb"data:[^,]{0,200};base64,", re.IGNORECASE)
ADDRESS: Final = re.compile(rb"\s*(https?|ftp|file|s3|gs)://", re.IGNORECASE)
PARTS: Final = ("image_url", "input_image", IMAGE)
"""Types of the parts of messages that are images: of OpenAI's APIs, and of Anthropic's."""
SOURCES: Final = ("image_url", "source", IMAGE, "url", "base64", "data")
"""Fields of such a part, in all forms, that may hold the image."""
INNER: Final = ("url", "data")
"""Fields of an object in one of them that do."""
FORM: Final = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
LOOSE: Final = (IMAGE, "images", "image_url", "image_urls", "image_data")
"""Fields in which clients of other servers put images beside a content, or beside all messages."""
FILE: Final = "file"
"""The file of a part that has been read, until it is taken out."""
PLACE: Final = "place"
"""Where the client has that part: `messages[0].content[1]`."""
MIN_BASE64: Final = 64
"""Shorter strings count as text."""
MAX_QUOTES: Final = 1 << 18
"""In JSON with more of them no string is looked at."""
MAX_BASE64: Final = 1 << 26
"""Characters of base64 that the JSON of one request may hold."""
_ALPHABET: Final = f"{string.ascii_letters}{string.digits}+/=\\\r\n".encode()
"""JSON may write `\\/`, and line ends as `\\n`."""


def image_file(data: bytes, name: str, max_bytes: int | None = None) -> bytes:
    """The file itself.

    Args:
        data: The file, or base64 of it, with a data URI's head or without.
        name: What messages call it.
        max_bytes: A larger file is refused; None: any is taken.

    Raises:
        RequestError: It is too large, or nothing that is read.
    """
    if not MAGIC.match(data):
        data = _decoded(data, name, max_bytes)
    if max_bytes is not None and len(data) > max_bytes:
        raise _too_large(name, len(data), max_bytes)
    return data


def _decoded(data: bytes, name: str, max_bytes: int | None) -> bytes:
    if not data:
        raise _refusal(f"{name} is empty: give a file of {KINDS}")
    if ADDRESS.match(data):
        raise _refusal(
            f"{name} is an address, and nothing is fetched: send the file itself, or base64 of it "
            "(data:image/png;base64,...)"
        )
    head = DATA_URI.match(data)
    encoded = data[head.end() if head else 0 :].translate(None, b" \t\r\n")
    if max_bytes is not None and len(encoded) > 4 * (max_bytes // 3 + 1):
        raise _too_large(name, len(encoded) * 3 // 4, max_bytes)
    try:
        decoded = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        decoded = b""
    if not MAGIC.match(decoded):
        raise _refusal(f"{name} is not {KINDS}, nor base64 of it")
    return decoded


def _too_large(name: str, num_bytes: int, max_bytes: int) -> RequestError:
    return _refusal(
        f"{name} has {num_bytes} bytes, more than the {max_bytes} that are accepted (setting max_image_bytes): make it "
        "smaller"
    )


def _refusal(sentence: str) -> RequestError:
    return RequestError("invalid_input", sentence)


def too_many(name: str, max_images: int) -> RequestError:
    return _refusal(
        f"{name} holds more than the {max_images} images that are accepted (setting max_images): send fewer"
    )


def not_taken(what: str, obstacle: str) -> RequestError:
    """The refusal of a model that takes no images."""
    why = f" ({plain(obstacle)})" if obstacle else ""
    return _refusal(f"{what}, and this model reads text alone{why}: leave it out")


# --- parts of messages -----------------------------------------------------------------------------------------------


def is_image(part: object) -> bool:
    """Whether a part of a message is an image, in the form of any API."""
    return isinstance(part, dict) and part.get("type") in PARTS and not part.get("text")


def is_read(part: object) -> bool:
    """Whether a part is an image that `ImageParts` has read."""
    return isinstance(part, dict) and isinstance(part.get(FILE), bytes)


def image_source(part: Mapping[str, Any]) -> object:
    """What an image's part holds: a data URI, base64 or an address, if it is right; None: nothing."""
    value = next((part[name] for name in SOURCES if part.get(name) is not None), None)
    if isinstance(value, dict):
        value = next((value[name] for name in INNER if value.get(name) is not None), value)
    return value


def is_address(source: object) -> bool:
    return isinstance(source, str) and ADDRESS.match(source[:64].encode(errors="replace")) is not None


def is_elsewhere(part: Mapping[str, Any]) -> bool:
    """Whether a part names an image, by an address or as a file of another server, and does not hold it."""
    source = image_source(part)
    is_row = source is None and part["type"] == IMAGE
    return is_address(source) or not (is_row or isinstance(source, str))


class ImageParts:
    """Reads the images in the parts of one chat's messages.

    Args:
        max_images: Images that are accepted; 0: the model takes none.
        max_image_bytes: Bytes of each file.
        files: Those of the input `image`, in the order of the parts `{"type": "image"}` that hold no file themselves.
        obstacle: Why the model takes none.
    """

    def __init__(
        self, max_images: int = 0, max_image_bytes: int = 0, files: Sequence[bytes] = (), obstacle: str = ""
    ) -> None:
        self.max_images = max_images
        self._obstacle = obstacle
        self._max_image_bytes = max_image_bytes
        self._files = iter(files)
        self._num_files = len(files)
        self._num_images = 0
        self._num_placed = 0

    def read(self, place: str, part: dict[str, Any]) -> dict[str, Any]:
        """A part that holds the file; raises RequestError if it cannot be read."""
        name = param(place)
        if not self.max_images:
            raise not_taken(f"{name} is an image", self._obstacle)
        self._num_images += 1
        if self._num_images > self.max_images:
            raise too_many(param(MESSAGES), self.max_images)
        source = image_source(part)
        if source is None and part["type"] == IMAGE:
            self._num_placed += 1
            if not self._num_files:
                raise _refusal(f"{name} holds no image: give it as {FORM}, or to Triton's own endpoints in `{IMAGE}`")
            if (file := next(self._files, None)) is None:
                raise _refusal(
                    f"{name} holds no image, and the input {param(IMAGE)} has {self._num_files}: give it there, or as "
                    f"{FORM}"
                )
        elif isinstance(source, str):
            file = image_file(source.encode(errors="replace"), name, self._max_image_bytes)
        else:
            raise _refusal(f"{name} must be like {FORM}: the server keeps no files, and fetches none")
        return {"type": IMAGE, FILE: file, PLACE: place}

    def check_end(self) -> None:
        """Refuse files of the input `image` that no part stands for."""
        if self._num_placed < self._num_files:
            raise _refusal(
                f"{param(IMAGE)} has {self._num_files} images, and {param(MESSAGES)} {self._num_placed} parts "
                '{"type": "image"} that stand for them: give as many'
            )


def take_files(messages: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """The files of the parts that have been read, in order, by their places; the parts lose them."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content if is_read(part))
    return {part.pop(PLACE): part.pop(FILE) for part in parts}


def count_base64(text: str) -> int:
    """The characters of those strings in JSON that are long and base64, as images are: they are no part of a prompt."""
    return sum(map(len, _base64_strings(text))) if text.count('"') <= MAX_QUOTES else 0


def _base64_strings(text: str) -> Iterator[str]:
    for piece in text.split('"'):  # what has no brackets cannot be anything but a string
        if len(piece) < MIN_BASE64 or not piece.isascii():
            continue
        encoded = piece.encode()
        head = DATA_URI.match(encoded)
        if not encoded[head.end() if head else 0 :].translate(None, _ALPHABET):
            yield piece
