# SPDX-License-Identifier: Apache-2.0
"""Headers that the gateway sends to Triton with every call, such as the key of a restricted API. Never logged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from hf_triton.errors import SettingsError

LINE: Final = re.compile(r"([A-Za-z0-9_.-]+):[ \t]*([\x20-\x7e]*?)[ \t]*")
RESERVED: Final = re.compile(r"grpc-.*|.*-bin|te|content-type|user-agent")
"""Names that gRPC keeps for itself, or whose values are not text."""


def read_headers(path: Path) -> dict[str, str]:
    """Read a file of headers, `NAME: VALUE`, one a line, and comments that begin with #. No error quotes a line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(f"triton_headers_file {path} cannot be read: {reason}") from None
    headers = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = LINE.fullmatch(line.strip())
        if match is None or RESERVED.fullmatch(match[1].lower()):
            raise SettingsError(
                f"triton_headers_file {path}, line {number}: "
                "must be NAME: VALUE, in ASCII, with a name that gRPC does not reserve"
            )
        headers[match[1].lower()] = match[2]
    return headers
