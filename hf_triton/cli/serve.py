# SPDX-License-Identifier: Apache-2.0
"""`hf-triton serve`: a tritonserver in the foreground; without a repository it serves the demo model."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import click

import hf_triton
from hf_triton.cli.examples import example_requests
from hf_triton.cli.folders import defects, guess_reason, is_model_folder, model_folders, with_remedy
from hf_triton.errors import ServerError
from hf_triton.server import TritonServer, busy_ports

DEMO_NAME = "demo"
DEMO_CONFIG = """backend: "python"
parameters {{ key: "huggingface_model" value {{ string_value: "{checkpoint}" }} }}
parameters {{ key: "max_output_length" value {{ string_value: "64" }} }}
instance_group [ {{ kind: KIND_CPU }} ]
"""
DEMO_MODEL = "from hf_triton import TritonPythonModel as TritonPythonModel\n"

TRY = """
Try, in another terminal:

{requests}

Ctrl+C stops the server.
"""


@click.command()
@click.argument("model_repository", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--http-port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--grpc-port", type=click.IntRange(1, 65535), default=8001, show_default=True)
@click.option("--metrics-port", type=click.IntRange(1, 65535), default=8002, show_default=True)
@click.option(
    "--load-timeout",
    type=click.FloatRange(1),
    default=7200,
    show_default=True,
    help="Seconds for loading, downloads included.",
)
@click.option("--verbose", is_flag=True, help="Show the server's own log.")
def serve(
    model_repository: Path | None,
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    load_timeout: float,
    verbose: bool,
) -> None:
    """Serve the folders in MODEL_REPOSITORY; without one, the small demo model that comes with hf_triton."""
    ports = (http_port, grpc_port, metrics_port)
    if len(set(ports)) < len(ports):
        raise click.UsageError(
            "--http-port, --grpc-port and --metrics-port must be three different ports, got "
            f"{', '.join(map(str, ports))}"
        )
    busy = busy_ports(ports)
    if busy:
        noun = "port" if len(busy) == 1 else "ports"
        raise click.UsageError(
            f"{noun} {' and '.join(map(str, busy))} in use: stop the program that listens there, or choose others "
            "with --http-port, --grpc-port and --metrics-port (make serve HTTP_PORT=... GRPC_PORT=... METRICS_PORT=...)"
        )
    excluded = {} if model_repository is None else _check_folders(model_repository)
    show_log = verbose or model_repository is not None
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's `&` ignores SIGINT
        signal.signal(number, signal.default_int_handler)
    with _served_repository(model_repository, excluded) as repository:
        server = TritonServer(
            repository,
            ports=ports,
            host=host,
            ready_timeout_s=load_timeout,
            log=sys.stderr.fileno() if show_log else None,
        )
        click.echo("Starting tritonserver and loading models; a model that is not cached is downloaded first.")
        was_ready = False
        with contextlib.suppress(KeyboardInterrupt), server:
            _show(server, excluded)
            was_ready = True
            _wait(server)
    was_killed = was_ready and server.process is not None and server.process.returncode != 0
    click.echo("Stopped with open connections: requests in flight were not answered." if was_killed else "Stopped.")


def _check_folders(repository: Path) -> Mapping[str, str]:
    """The defects, by name, of folders that must be kept from tritonserver.

    Raises:
        click.UsageError: The folder is not a model repository.
        ServerError: All of its folders have defects.
    """
    if is_model_folder(repository):
        raise click.UsageError(
            f"{repository} is a model folder, not a model repository: pass its parent folder to serve all folders in "
            "it; to serve this one alone, copy it into a new folder and pass that"
        )
    folders = model_folders(repository)
    if not folders:
        raise click.UsageError(f"there is no model folder in {repository}: copy one in")
    excluded = defects(repository)
    if len(excluded) == len(folders):
        _show_reasons(excluded)
        raise ServerError("server_failed", "no model is served: correct the errors above")
    return excluded


def _show(server: TritonServer, excluded: Mapping[str, str]) -> None:
    """Print which folders are served, and why the others are not.

    Raises:
        ServerError: No folder is served.
    """
    models = server.models()
    ready = sorted({model.name for model in models if model.state == "READY"})
    reasons = {
        model.name: with_remedy(model.sentence) or guess_reason(server.model_repository / model.name)
        for model in models
        if model.name not in ready
    }
    _show_reasons({**excluded, **reasons})
    if not ready:
        more = "--verbose shows the server's log" if server.read_log() else "the log above it may say more"
        raise ServerError("server_failed", f"no model is served: correct the errors above; {more}")
    click.echo(f"Ready: {', '.join(ready)}.")
    requests = example_requests(map(server.model_config, ready), server.host, server.http_port)
    click.echo(TRY.format(requests=requests))


def _show_reasons(reasons: Mapping[str, str]) -> None:
    for name, reason in sorted(reasons.items()):
        click.echo(f"Not served: {name}: {reason}", err=True)


def _wait(server: TritonServer) -> None:
    try:
        while server.is_running():
            time.sleep(0.2)
    except KeyboardInterrupt:
        click.echo("Stopping: waiting for requests in flight and open connections; Ctrl+C again stops at once.")
        raise
    raise ServerError("server_failed", f"tritonserver exited {server.describe_exit()}{server.describe_log()}")


def _served_repository(given: Path | None, excluded: Collection[str]) -> contextlib.AbstractContextManager[Path]:
    """The repository to serve: the given one without excluded folders, or the demo's."""
    if given is None:
        return _demo_repository()
    return _linked_repository(given, excluded) if excluded else contextlib.nullcontext(given)


@contextlib.contextmanager
def _linked_repository(given: Path, excluded: Collection[str]) -> Iterator[Path]:
    """A temporary repository of links to the other folders."""
    with tempfile.TemporaryDirectory(prefix="hf_triton_served_") as root:
        for folder in model_folders(given):
            if folder.name not in excluded:
                (Path(root) / folder.name).symlink_to(folder.resolve())
        yield Path(root)


@contextlib.contextmanager
def _demo_repository() -> Iterator[Path]:
    """A temporary repository with the demo folder."""
    checkpoint = Path(hf_triton.__file__).parent / "demo"
    with tempfile.TemporaryDirectory(prefix="hf_triton_demo_") as root:
        folder = Path(root) / DEMO_NAME
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(DEMO_CONFIG.format(checkpoint=checkpoint))
        (folder / "1" / "model.py").write_text(DEMO_MODEL)
        yield Path(root)
