# SPDX-License-Identifier: Apache-2.0
"""Downloads checkpoints before a server starts: with progress, and with errors that come at once."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from hf_triton.errors import HubError
from hf_triton.hub.process import download
from hf_triton.hub.resolve import Hub
from hf_triton.settings import ModelSettings

Event = Mapping[str, Any]
TYPED: Final[Mapping[str, str]] = {
    "correct huggingface_model": "correct the name",
    "set huggingface_model to": "name",
    "set revision to it": "name it behind @",
}


def use_standard_cache() -> None:
    """Make the Hub's standard cache a named one: what a command downloads must not end in a temporary folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    os.environ.setdefault("HF_HOME", os.path.expanduser(os.path.join(cache, "huggingface")))


def fetch(model_folder: Path, settings: ModelSettings) -> Path:
    """Find a folder's checkpoint, or download it, as the model would; also its tokenizer if it has one of its own.

    Args:
        model_folder: Relative paths start there.
        settings: The folder's.

    Returns:
        The folder with the model's files.

    Raises:
        HubError: It cannot be found or downloaded.
        CheckpointError: It lacks files.
    """
    with _progress(settings.huggingface_model) as on_event:
        hub = Hub(model_folder, settings, os.environ, download=partial(download, on_event=on_event))
        folder = hub.resolve_model()
        hub.resolve_tokenizer()
    return folder


def in_typed_words(error: HubError) -> HubError:
    """An error about a model whose name was typed: its remedy speaks of the name, not of the settings of a folder."""
    sentence = error.sentence
    for setting, name in TYPED.items():
        sentence = sentence.replace(setting, name)
    return HubError(error.code, sentence)


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Callable[[Event], None]]:
    """Show a download: a bar on a terminal, otherwise the library's own log lines."""
    if not sys.stderr.isatty():
        with log_lines():
            yield lambda event: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"Downloading {name}", total=None, visible=False)

        def show(event: Event) -> None:
            if "num_bytes" in event:
                verb = "Verifying" if event["is_checking"] else "Downloading"
                total = event["total_bytes"] or None
                progress.update(
                    bar, completed=event["num_bytes"], total=total, description=f"{verb} {name}", visible=True
                )

        yield show


@contextlib.contextmanager
def log_lines() -> Iterator[None]:
    """Print what the library logs about a download, one line each."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if ": found in the " not in message:
                click.echo(message, err=True)

    log, handler = logging.getLogger("hf_triton.hub"), Lines(logging.INFO)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
