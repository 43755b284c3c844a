# SPDX-License-Identifier: Apache-2.0
"""Reads image files: PNG, JPEG, WebP or GIF, or base64 of them, as transformers' `load_image` does. Knows no model.

Nothing is fetched. A file's head says how large its image is, and an image that is too large is not decoded.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any, Final

from hf_triton.errors import RequestError
from hf_triton.protocol.image_files import KINDS, image_file

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
JPEG: Final = b"\xff\xd8\xff"
SCAN: Final = b"\xff\xda"
"""The marker before each scan of a JPEG; data of scans have none."""
MAX_SCANS: Final = 50
"""Of a progressive JPEG, which usually has ten. Each goes over all pixels, and a small file has room for 100,000."""
MAX_READS: Final = 100_000
"""Of a file, piece by piece: half a second. 20 MiB have room for millions of empty chunks, markers or bytes to skip."""
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
    from transformers.image_utils import load_image

    with _opened(data, max_pixels, name) as image:
        return load_image(image)


def read_size(data: bytes, max_pixels: int, name: str) -> tuple[int, int]:
    """Width and height by a file's head; arguments and errors as `read_image` has them."""
    with _opened(data, max_pixels, name) as image:
        width, height = image.size
        return width, height


@contextlib.contextmanager
def _opened(data: bytes, max_pixels: int, name: str) -> Iterator[Any]:
    """A file as Pillow opens it, its size checked; errors in the block are refusals too."""
    from PIL import Image

    plain = image_file(data, name)
    if plain.count(SCAN) > MAX_SCANS and plain.startswith(JPEG):
        raise _refusal(f"{name} has more than the {MAX_SCANS} scans that are read of a JPEG: encode it anew")
    try:
        with Image.open(_Pieces(plain, name), formats=FORMATS) as image:
            width, height = image.size
            for _, box, *_ in image.tile:  # the first frame of a GIF may be larger than the whole
                width, height = (width, height) if box is None else (max(width, box[2]), max(height, box[3]))
            _check_size(width, height, max_pixels, name)
            yield image
    except RequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _refusal(f"{name} has more than the {max_pixels} pixels that are accepted: make it smaller") from None
    except Exception:  # pillow's readers raise errors of many kinds for a damaged file
        raise _refusal(f"{name} is damaged or cut off, and cannot be read as {KINDS}: encode it anew") from None


class _Pieces(io.BytesIO):
    """A file that is read in so many pieces at most."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self._name = name
        self._num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._num_reads += 1
        if self._num_reads > MAX_READS:
            raise _refusal(f"{self._name} is in too many small pieces: encode it anew")
        return super().read(size)


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
