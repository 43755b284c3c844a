# SPDX-License-Identifier: Apache-2.0
"""Image files that a command sends, as they are: PNG, JPEG, WebP or GIF. The server looks into them."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any, Final

import click

KINDS: Final = {
    "png": rb"\x89PNG\r\n\x1a\n",
    "jpeg": rb"\xff\xd8\xff",
    "webp": rb"RIFF.{4}WEBP",
    "gif": rb"GIF8[79]a",
}
"""How the files of each type begin."""
MAX_MB: Final = 20


def read_image_file(name: str) -> bytes:
    """Read a file.

    Raises:
        click.UsageError: It cannot be read, is too large, or is no image.
    """
    try:
        with Path(name).expanduser().open("rb") as stream:
            data = stream.read(MAX_MB * 10**6 + 1)
    except (OSError, RuntimeError, ValueError) as error:  # of ~NAME without such a user; of a name with a zero byte
        raise click.UsageError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_MB * 10**6:
        raise click.UsageError(f"{name} has more than the {MAX_MB} MB that are sent: make it smaller")
    if _kind(data) is None:
        raise click.UsageError(f"{name} is no file of PNG, JPEG, WebP or GIF")
    return data


def content_of(text: str, images: list[bytes]) -> str | list[dict[str, Any]]:
    """The content of a message: its images before its text."""
    if not images:
        return text
    urls = (f"data:image/{_kind(data)};base64,{base64.b64encode(data).decode()}" for data in images)
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]


def _kind(data: bytes) -> str | None:
    return next((kind for kind, head in KINDS.items() if re.match(head, data, re.DOTALL)), None)
