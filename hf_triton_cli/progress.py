# SPDX-License-Identifier: Apache-2.0
"""Shows a download on standard error."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

import click

from hf_triton.folders.fetch import Event


@contextlib.contextmanager
def show_download(name: str) -> Iterator[Callable[[Event], None]]:
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
