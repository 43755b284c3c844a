# SPDX-License-Identifier: Apache-2.0
"""`hf-triton serve`: a tritonserver in the foreground, with the demo model where no repository is given."""

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
from hf_triton.cli.folders import explained, flaws, is_model_folder, model_folders, silent_reason
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
        raise click.UsageError(
            f"port {' and '.join(map(str, busy))} in use: stop what listens there, or choose others with --http-port, "
            "--grpc-port and --metrics-port (make serve HTTP_PORT=... GRPC_PORT=... METRICS_PORT=...)"
        )
    left_out = {} if model_repository is None else _check_folders(model_repository)
    show_log = verbose or model_repository is not None
    for number in (signal.SIGINT, signal.SIGTERM):  # a supervisor's stop is Ctrl+C to us; a shell's `&` ignores SIGINT
        signal.signal(number, signal.default_int_handler)
    with _repository(model_repository, left_out) as repository:
        server = TritonServer(
            repository,
            ports=ports,
            host=host,
            ready_timeout_s=load_timeout,
            log=sys.stderr.fileno() if show_log else None,
        )
        click.echo("Starting tritonserver and loading models; a model that is not cached is downloaded first.")
        is_serving = False
        with contextlib.suppress(KeyboardInterrupt), server:
            _show(server, left_out)
            is_serving = True
            _wait(server)
    was_cut_short = is_serving and server.process is not None and server.process.returncode != 0
    click.echo(
        "Stopped with connections still open: if a request was in flight, it has no answer."
        if was_cut_short
        else "Stopped."
    )


def _check_folders(repository: Path) -> Mapping[str, str]:
    """What is wrong with folders that tritonserver had better not see, by name.

    Raises:
        click.UsageError: This is no folder of model folders.
        ServerError: Something is wrong with every one of them.
    """
    if is_model_folder(repository):
        raise click.UsageError(
            f"{repository} is a model folder itself: give the folder that holds it, in which every folder is served; "
            "to serve this one alone, copy it into a new folder and give that"
        )
    folders = model_folders(repository)
    if not folders:
        raise click.UsageError(f"there is no model folder in {repository}: copy one in")
    left_out = flaws(repository)
    if len(left_out) == len(folders):
        _show_reasons(left_out)
        raise ServerError("server_failed", "no model is served: correct what is said above")
    return left_out


def _show(server: TritonServer, left_out: Mapping[str, str]) -> None:
    """Say which folders are served and why the others are not.

    Raises:
        ServerError: None is served.
    """
    models = server.models()
    ready = sorted({model.name for model in models if model.state == "READY"})
    reasons = {
        model.name: explained(model.sentence) or silent_reason(server.model_repository / model.name)
        for model in models
        if model.name not in ready
    }
    _show_reasons({**left_out, **reasons})
    if not ready:
        more = "--verbose shows the server's log" if server.read_log() else "the log above it may say more"
        raise ServerError("server_failed", f"no model is served: correct what is said above; {more}")
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
        click.echo("Stopping: requests in flight and open connections are waited for; Ctrl+C again stops at once.")
        raise
    raise ServerError("server_failed", f"tritonserver ended by itself, {server.ending_words()}{server.log_words()}")


def _repository(given: Path | None, left_out: Collection[str]) -> contextlib.AbstractContextManager[Path]:
    """The repository to serve: the given one, without some of its folders, or that of the demo."""
    if given is None:
        return _demo_repository()
    return _links_to_others(given, left_out) if left_out else contextlib.nullcontext(given)


@contextlib.contextmanager
def _links_to_others(given: Path, left_out: Collection[str]) -> Iterator[Path]:
    """A temporary repository of links to the folders that are not left out."""
    with tempfile.TemporaryDirectory(prefix="hf_triton_served_") as root:
        for folder in model_folders(given):
            if folder.name not in left_out:
                (Path(root) / folder.name).symlink_to(folder.resolve())
        yield Path(root)


@contextlib.contextmanager
def _demo_repository() -> Iterator[Path]:
    """A temporary repository with the demo folder in it."""
    checkpoint = Path(hf_triton.__file__).parent / "demo"
    with tempfile.TemporaryDirectory(prefix="hf_triton_demo_") as root:
        folder = Path(root) / DEMO_NAME
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(DEMO_CONFIG.format(checkpoint=checkpoint))
        (folder / "1" / "model.py").write_text(DEMO_MODEL)
        yield Path(root)
