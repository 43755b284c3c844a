# SPDX-License-Identifier: Apache-2.0
"""The console script `hf-triton`: says which extra a command needs, where not even the command line is installed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from typing import Final

from hf_triton.extras import MissingExtraError, check_extras

CLIENT: Final = ("cli",)
FOLDERS: Final = ("model", "cli")
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("run", "serve"), FOLDERS),
    **dict.fromkeys(("new", "check", "pull", "bundle", "size", "optimize", "export"), FOLDERS),
    **dict.fromkeys(("settings", "list", "status", "load", "unload", "sleep", "wake"), CLIENT),
    **dict.fromkeys(("generate", "chat", "run-batch", "bench"), CLIENT),
    "openai": ("gateway",),
}
"""The extras that a command needs."""
STARTS_TRITON: Final = ("run", "serve")


def check_command(name: str) -> None:
    """Refuse a command whose packages are missing; where the name is of none, the help."""
    if name not in NEEDS:
        check_extras("`hf-triton`", "gateway", everything="cli")
        return
    needs_server = name in STARTS_TRITON and shutil.which("tritonserver") is None
    check_extras(f"`hf-triton {name}`", *NEEDS[name], everything="server" if needs_server else None)


def main() -> None:
    """Run the command of the command line."""
    try:
        check_command(next(iter(sys.argv[1:]), ""))
    except MissingExtraError as error:
        sys.exit(f"error: {error}")
    from hf_triton_cli.commands import main as run

    run()
