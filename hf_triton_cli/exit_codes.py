# SPDX-License-Identifier: Apache-2.0
"""The exit codes of `hf-triton`, by an error's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hf_triton.errors import HfTritonError

FAILED: Final = 1
WRONG: Final = 2
NOT_FOUND: Final = 3
UNREACHABLE: Final = 4
UNSERVABLE: Final = 5
"""A folder that `check` finds an error in."""
INTERRUPTED: Final = 130
TERMINATED: Final = 143
"""SIGTERM ended a conversation."""

EXIT_CODES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("model_not_found", "restricted", "path_not_found"), NOT_FOUND),
    **dict.fromkeys(("hub_not_found", "hub_revision_not_found", "hub_auth", "hub_gated"), NOT_FOUND),
    **dict.fromkeys(("server_unreachable", "hub_unavailable", "hub_timeout", "hub_rate_limited"), UNREACHABLE),
    "offline_and_not_cached": UNREACHABLE,
    **dict.fromkeys(("invalid_setting", "wrong_usage"), WRONG),
}
"""Other errors are FAILED."""


def exit_code(error: BaseException) -> int:
    """The exit code of an error; where another of ours caused it, the cause's."""
    if isinstance(error.__cause__, HfTritonError):
        return exit_code(error.__cause__)
    return EXIT_CODES.get(getattr(error, "code", ""), FAILED)
