# SPDX-License-Identifier: Apache-2.0
"""The extras of the package that make a product, and the error where one is not installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from hf_triton.errors import HfTritonError

GATEWAY: Final = (
    *("click", "fastapi", "fastapi_offline", "grpc", "httptools", "prometheus_client"),
    *("python_multipart", "tritonclient", "uvicorn", "uvloop"),
)
MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "model": (
        *("accelerate", "huggingface_hub", "jinja2", "llguidance", "regex", "safetensors", "sentencepiece"),
        *("torch", "transformers"),
    ),
    "gateway": GATEWAY,
    "cli": (*GATEWAY, "httpx", "rich"),
}
"""What is imported of an extra's packages, by the extra."""
NUM_NAMED: Final = 3
"""Missing packages that a message names."""


class MissingExtraError(HfTritonError, ImportError):
    """Packages are not installed that an extra brings."""

    def __init__(self, sentence: str) -> None:
        super().__init__("client_missing", sentence)


def missing_modules(extra: str) -> list[str]:
    """What of an extra is not installed; nothing is imported."""
    return [name for name in MODULES[extra] if not _is_installed(name)]


def check_extras(user: str, *extras: str, everything: str | None = None) -> None:
    """Check that the extras that `user` needs are installed; the message may name `everything` in their place.

    Raises:
        MissingExtraError: Packages of them are missing.
    """
    missing = {extra: modules for extra in extras if (modules := missing_modules(extra))}
    if missing:
        modules = list(dict.fromkeys(name for names in missing.values() for name in names))
        named = f"{', '.join(modules[:NUM_NAMED])}{' and others' if len(modules) > NUM_NAMED else ''}"
        raise MissingExtraError(
            f"{user} needs {named}, not installed: `pip install 'hf-triton[{everything or ','.join(missing)}]'`"
        )


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
