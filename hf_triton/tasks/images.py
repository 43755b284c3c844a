# SPDX-License-Identifier: Apache-2.0
"""Reads image files: PNG, JPEG, WebP or GIF, or base64 of them, as transformers' `load_image` does. Knows no model.

Nothing is fetched. A file's head says how large its image is, and an image that is too large is not decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import Any, Final

from hf_triton.errors import RequestError

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
KINDS: Final = "PNG, JPEG, WebP or GIF"
MAGIC: Final = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF....WEBP|GIF8[79]a", re.DOTALL)
"""How the files begin that are read; base64 of them begins otherwise."""
DATA_URI: Final = re.compile(rb"data:[^,]{0,200};base64,", re.IGNORECASE)
ADDRESS: Final = re.compile(rb"\s*(https?|ftp|file|s3|gs)://", re.IGNORECASE)
MAX_RATIO: Final = 100
"""The longer side by the shorter one: a processor that gives the shorter one a size makes the other huge."""


def read_image(data: bytes, max_pixels: int, name: str) -> Any:
    """Read a file, or base64 of it, with a data URI's head or without.

    Args:
        data: The file. Of an animation, the first image counts.
        max_pixels: A larger image is refused, before it is decoded.
        name: What messages call it.

    Returns:
        Pillow's image in mode RGB, turned as its EXIF data say.

    Raises:
        RequestError: It cannot be read, or is too large.
    """
    from PIL import Image
    from transformers.image_utils import load_image

    file = io.BytesIO(_plain(data, name))
    try:
        with Image.open(file, formats=FORMATS) as image:
            _check_size(*image.size, max_pixels, name)
            return load_image(image)
    except RequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _refusal(f"{name} has more than the {max_pixels} pixels that are accepted: make it smaller") from None
    except Exception:  # pillow's readers raise errors of many kinds for a damaged file
        raise _refusal(f"{name} is damaged or cut off, and cannot be read as {KINDS}: encode it anew") from None


def _plain(data: bytes, name: str) -> bytes:
    """The file itself."""
    if MAGIC.match(data):
        return data
    if not data:
        raise _refusal(f"{name} is empty: give a file of {KINDS}")
    if ADDRESS.match(data):
        raise _refusal(f"{name} is an address, and nothing is fetched: send the file itself, or base64 of it")
    head = DATA_URI.match(data)
    try:
        decoded = base64.b64decode(data[head.end() if head else 0 :].translate(None, b" \t\r\n"), validate=True)
    except binascii.Error:
        decoded = b""
    if not MAGIC.match(decoded):
        raise _refusal(f"{name} is not {KINDS}, nor base64 of it")
    return decoded


def _check_size(width: int, height: int, max_pixels: int, name: str) -> None:
    if width * height > max_pixels:
        raise _refusal(
            f"{name} has {width} x {height} pixels, more than the {max_pixels} that are accepted (setting "
            "max_image_pixels): make it smaller"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise _refusal(
            f"{name} has {width} x {height} pixels: its longer side may be {MAX_RATIO} times the shorter one at most"
        )


def _refusal(sentence: str) -> RequestError:
    return RequestError("invalid_input", sentence)
