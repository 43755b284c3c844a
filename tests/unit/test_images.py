# SPDX-License-Identifier: Apache-2.0
"""Image files of all kinds are read as transformers reads them; hostile ones get a sentence each."""

import base64
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from hf_triton.errors import RequestError
from hf_triton.tasks.images import read_image
from tests.support.images import encoded, made_image

MAX_PIXELS = 10_000
IMAGE = made_image(60, 40)
PNG = encoded(IMAGE)
TURNED = Image.Exif()
TURNED[0x0112] = 6


def made(mode: str) -> Image.Image:
    return (
        Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60) * 27)
        if mode == "I;16"
        else IMAGE.convert(mode)
    )


def with_alpha() -> Image.Image:
    image = IMAGE.convert("RGBA")
    image.putalpha(100)
    return image


def palette_with_alpha() -> Image.Image:
    image = IMAGE.convert("P")
    image.info["transparency"] = 3
    return image


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG whose head says a size, whatever its data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def gif_with_frame(width: int, height: int) -> bytes:
    """A GIF whose only frame is larger than its head says."""
    file = encoded(made_image(10, 10), "GIF")
    place = file.rindex(b"\x2c\x00\x00\x00\x00") + 5
    return file[:place] + struct.pack("<HH", width, height) + file[place + 4 :]


def jpeg_with_scans(count: int) -> bytes:
    file = encoded(IMAGE, "JPEG", progressive=True)
    last = file.rindex(b"\xff\xda")
    return file[:last] + file[last:-2] * count + file[-2:]


IN_PIECES = (
    PNG[:33] + (bytes(4) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))) * 50_000 + PNG[33:],
    encoded(IMAGE, "JPEG").replace(b"\xff\xd8", b"\xff\xd8" + b"\xff\xfe\0\2" * 60_000, 1),
    encoded(IMAGE, "JPEG").replace(b"\xff\xd8", b"\xff\xd8" + b"\xff" * 200_000, 1),
    encoded(IMAGE, "GIF")[:13] + b"\0" * 200_000,
)
"""A second for each megabyte, as Pillow walks over it."""


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(PNG, id="png"),
        pytest.param(encoded(IMAGE, "JPEG"), id="jpeg"),
        pytest.param(encoded(IMAGE, "WEBP"), id="webp"),
        pytest.param(encoded(IMAGE, "GIF"), id="gif"),
        pytest.param(encoded(made("CMYK"), "JPEG"), id="cmyk"),
        pytest.param(encoded(made("L")), id="grey"),
        pytest.param(encoded(made("1")), id="one bit"),
        pytest.param(encoded(made("I;16")), id="16 bits"),
        pytest.param(encoded(with_alpha()), id="alpha"),
        pytest.param(encoded(palette_with_alpha()), id="palette with alpha"),
        pytest.param(encoded(IMAGE, "JPEG", exif=TURNED), id="turned by EXIF"),
        pytest.param(encoded(IMAGE, "GIF", save_all=True, append_images=[made_image(60, 40, 9)]), id="animated gif"),
        pytest.param(encoded(IMAGE, "PNG", save_all=True, append_images=[made_image(60, 40, 9)]), id="animated png"),
        pytest.param(encoded(IMAGE, "WEBP", save_all=True, append_images=[made_image(60, 40, 9)]), id="animated webp"),
        pytest.param(encoded(made_image(1, 1)), id="one pixel"),
        pytest.param(encoded(made_image(5, 3)), id="three rows"),
    ],
)
def test_files_are_read_as_transformers_reads_them(file: bytes) -> None:
    expected = load_image(base64.b64encode(file).decode())
    as_text = base64.b64encode(file)
    for data in (file, as_text, b"data:image/png;base64," + as_text, b"\n".join([as_text[:20], as_text[20:]])):
        image = read_image(data, MAX_PIXELS, "image")
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), np.asarray(expected))


NOT_AN_IMAGE = "image is not PNG, JPEG, WebP or GIF, nor base64 of it"
DAMAGED = "image is damaged or cut off, and cannot be read as PNG, JPEG, WebP or GIF: encode it anew"
ADDRESS = (
    "image is an address, and nothing is fetched: send the file itself, or base64 of it (data:image/png;base64,...)"
)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "image is empty: give a file of PNG, JPEG, WebP or GIF"),
        (b"https://example.com/cat.png", ADDRESS),
        (b"/etc/passwd", NOT_AN_IMAGE),
        (b"a cat", NOT_AN_IMAGE),
        (b"data:image/png;base64,", NOT_AN_IMAGE),
        (b"data:image/png," + PNG, NOT_AN_IMAGE),
        (base64.b64encode(b"a cat"), NOT_AN_IMAGE),
        (base64.b64encode(PNG)[:-3], NOT_AN_IMAGE),
        (encoded(IMAGE, "TIFF"), NOT_AN_IMAGE),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", NOT_AN_IMAGE),
        (PNG[:8], DAMAGED),
        (encoded(IMAGE, "JPEG")[:200], DAMAGED),
        (encoded(IMAGE, "WEBP")[:40], DAMAGED),
        (PNG.replace(b"IDAT", b"IDAx"), DAMAGED),
        (png_of(20, 20), DAMAGED),
        (
            png_of(5000, 5000),
            "image has 5000 x 5000 pixels, more than the 10000 that are accepted (setting max_image_pixels): make it "
            "smaller",
        ),
        (
            encoded(made_image(16000, 1)),
            "image has 16000 x 1 pixels, more than the 10000 that are accepted (setting max_image_pixels): make it "
            "smaller",
        ),
        (
            encoded(made_image(303, 3)),
            "image has 303 x 3 pixels: its longer side may be 100 times the shorter one at most",
        ),
        (
            gif_with_frame(200, 300),
            "image has 200 x 300 pixels, more than the 10000 that are accepted (setting max_image_pixels): make it "
            "smaller",
        ),
        (jpeg_with_scans(50), "image has more than the 50 scans that are read of a JPEG: encode it anew"),
        *((file, "image is in too many small pieces: encode it anew") for file in IN_PIECES),
        (png_of(2**30, 2**30), "image has more than the 10000 pixels that are accepted: make it smaller"),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_image(data, MAX_PIXELS, "image")
    assert (caught.value.code, caught.value.sentence) == ("invalid_input", sentence)


def test_a_bomb_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Image.Image, "load", load)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(RequestError, match="5000 x 5000"):
        read_image(png_of(5000, 5000, bytes(75_005_000)), MAX_PIXELS, "image")
