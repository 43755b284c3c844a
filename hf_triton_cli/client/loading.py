# SPDX-License-Identifier: Apache-2.0
"""`hf-triton load` and `hf-triton unload`: for a Triton in explicit mode."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Final

import click

from hf_triton.errors import HfTritonError, ServerError
from hf_triton.protocol.load_reasons import first_sentence
from hf_triton.protocol.names import DOOR_SUFFIX
from hf_triton_cli.client.running_triton import READY, Triton, complete_models, triton_options, unknown_model
from hf_triton_gateway.triton.triton_words import says

POLL_S: Final = 0.2
TIMEOUT: Final = click.option(
    "--timeout", type=click.FloatRange(1), default=7200, show_default=True, help="Seconds to wait, downloads included."
)


@click.command(epilog="Example: hf-triton load llama7b")
@click.argument("name", shell_complete=complete_models)
@triton_options
@TIMEOUT
def load(name: str, triton: Triton, timeout: float) -> None:
    """Load the model folder NAME, or load it again, and wait until it is ready; its stream door NAME_stream too."""
    doors = _require_folder(triton, name)
    started_s = time.monotonic()
    with _explicit(name), show_progress(f"Loading {name}"), triton.connect() as client:
        for folder in (name, *doors):
            client.load_model(folder, headers=triton.headers, client_timeout=timeout)
    states = [entry for entry in triton.index() if entry.name == name]
    if not any(entry.state == READY for entry in states):
        reason = next((first_sentence(entry.reason) for entry in states if entry.reason), "the server's log says why")
        raise ServerError("server_failed", f"{name} is not ready after loading: {reason}")
    click.echo(f"{name} is ready after {time.monotonic() - started_s:.1f} s.")


@click.command(epilog="Example: hf-triton unload llama7b")
@click.argument("name", shell_complete=complete_models)
@triton_options
@TIMEOUT
def unload(name: str, triton: Triton, timeout: float) -> None:
    """Unload the model folder NAME and its stream door NAME_stream.

    It waits until the requests in flight are answered and the model is out of memory.
    """
    folders = [*_require_folder(triton, name), name]
    started_s = time.monotonic()
    with _explicit(name), show_progress(f"Unloading {name}"):
        with triton.connect() as client:
            for folder in folders:
                client.unload_model(folder, headers=triton.headers, client_timeout=timeout)
        while any(entry.name in folders and entry.state in (READY, "UNLOADING") for entry in triton.index()):
            if time.monotonic() - started_s > timeout:
                raise ServerError("server_failed", f"{name} is still being unloaded after {timeout:g} s")
            time.sleep(POLL_S)
    click.echo(f"{name} is unloaded after {time.monotonic() - started_s:.1f} s.")


def _require_folder(server: Triton, name: str) -> list[str]:
    """The folder of a known model's stream door, if the repository has one."""
    names = sorted({entry.name for entry in server.index()})
    if name not in names:
        raise unknown_model(name, names)
    return [door for door in names if door == f"{name}{DOOR_SUFFIX}"]


@contextlib.contextmanager
def _explicit(name: str) -> Iterator[None]:
    """Say how to start a server that loads on demand, where this one does not; else why the folder fails."""
    try:
        yield
    except HfTritonError as error:
        if says(error.sentence, "not_explicit"):
            raise ServerError(
                "server_failed",
                "this Triton loads and unloads no models by request: start it with `hf-triton serve REPOSITORY -- "
                "--model-control-mode=explicit '--load-model=*'`, or a tritonserver of your own with these two flags",
            ) from None
        if says(error.sentence, "unreadable"):
            raise ServerError(
                "server_failed",
                f"{name}: its config.pbtxt or folder cannot be read: `hf-triton check FOLDER` says why",
            ) from None
        if error.code == "server_failed":
            raise ServerError("server_failed", f"{name}: {first_sentence(error.sentence)}") from None
        raise


@contextlib.contextmanager
def show_progress(title: str) -> Iterator[None]:
    """Show that something is under way: a spinner with the time on a terminal, otherwise one line."""
    if not sys.stderr.isatty():
        click.echo(f"{title} ...", err=True)
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(title, total=None)
        yield
