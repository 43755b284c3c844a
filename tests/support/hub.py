# SPDX-License-Identifier: Apache-2.0
"""Cached checkpoints by the names of their files, and a Hub client that looks for them in temporary folders."""

from pathlib import Path
from typing import Any

from hf_triton.hub.locate import Hub
from hf_triton.settings import ModelSettings

MODEL, COMMIT = "org/model", "0123456789abcdef0123456789abcdef01234567"
CANARY = "hf_canaryTokenThatMustNotBeShown"


def write_snapshot(cache: Path, *, without: str = "", revision: str = "main") -> Path:
    """A complete checkpoint, by the names of its files, in the cache layout of the Hub's client."""
    repository = cache / "models--org--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(COMMIT)
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {without}:
        (snapshot / name).write_text("{}")
    return snapshot


def build_hub(
    tmp_path: Path, environment: dict[str, str] | None = None, *, download: Any = None, **settings: Any
) -> Hub:
    chosen = ModelSettings(**({"huggingface_model": MODEL} | settings))
    given = {} if download is None else {"download": download}
    return Hub(tmp_path / "folder", chosen, {"HF_HOME": str(tmp_path / "home")} | (environment or {}), **given)
