# SPDX-License-Identifier: Apache-2.0
"""Names this command in messages as it was typed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

NAME: Final = "hf-triton"


def as_typed(message: str) -> str:
    """A message whose commands, "`hf-triton load NAME`", can be copied: PATH may not have this program."""
    typed = Path(sys.argv[0])
    on_path = shutil.which(NAME)
    if typed.name != NAME or (on_path is not None and typed.exists() and typed.samefile(on_path)):
        return message
    return message.replace(f"`{NAME} ", f"`{typed} ")
