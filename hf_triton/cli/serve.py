# SPDX-License-Identifier: Apache-2.0
"""`hf-triton serve`: a tritonserver in the foreground, with the demo model where no repository is given."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

import hf_triton
from hf_triton.errors import ServerError
from hf_triton.server import ModelState, TritonServer, busy_ports

DEMO_NAME = "demo"
DEMO_CONFIG = """backend: "python"
parameters {{ key: "huggingface_model" value {{ string_value: "{checkpoint}" }} }}
parameters {{ key: "max_output_length" value {{ string_value: "64" }} }}
instance_group [ {{ kind: KIND_CPU }} ]
"""
DEMO_MODEL = "from hf_triton import TritonPythonModel as TritonPythonModel\n"

CURLS = """
Try, in another terminal:

  curl -X POST localhost:{port}/v2/models/{name}/generate -d '{{"text_input":"How can you be"}}'
  curl -X POST localhost:{port}/v2/models/{name}/infer \\
    -d '{{"inputs":[{{"name":"text_input","datatype":"BYTES","shape":[1],"data":["I am going"]}}]}}'

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
    busy = busy_ports(ports)
    if busy:
        raise click.UsageError(
            f"port {' and '.join(map(str, busy))} in use: stop what listens there, or choose others with --http-port, "
            "--grpc-port and --metrics-port (make serve HTTP_PORT=... GRPC_PORT=... METRICS_PORT=...)"
        )
    if model_repository is not None:
        _check_folders(model_repository)
    show_log = verbose or model_repository is not None
    for number in (signal.SIGINT, signal.SIGTERM):  # a supervisor's stop is Ctrl+C to us; a shell's `&` ignores SIGINT
        signal.signal(number, signal.default_int_handler)
    with _repository(model_repository) as repository:
        server = TritonServer(
            repository,
            ports=ports,
            host=host,
            ready_timeout_s=load_timeout,
            log=sys.stderr.fileno() if show_log else None,
        )
        click.echo("Starting tritonserver and loading models; a model that is not cached is downloaded first.")
        with contextlib.suppress(KeyboardInterrupt), server:
            _show(server.models(), http_port)
            _wait(server)
    click.echo("Stopped.")


def _check_folders(repository: Path) -> None:
    """Refuse what tritonserver would wait for without an end: a version folder without its model.py."""
    for version in sorted(repository.glob("*/[0-9]*/")):
        if version.parent.name.split() != [version.parent.name]:
            raise click.UsageError(
                f"'{version.parent.name}' has a space in its name, which Triton cannot start: rename it"
            )
        is_ours = 'backend: "python"' in _text(version.parent / "config.pbtxt")
        if is_ours and not (version / "model.py").exists():
            raise click.UsageError(
                f"{version.parent.name} has no {version.name}/model.py: copy one from a model folder"
            )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _show(models: list[ModelState], http_port: int) -> None:
    """Say which folders are served and why the others are not.

    Raises:
        ServerError: None is served.
    """
    ready = sorted(model.name for model in models if model.state == "READY")
    for model in models:
        if model.name not in ready:
            click.echo(f"Not served: {model.name}: {model.sentence}", err=True)
    if not ready:
        raise ServerError(
            "server_failed", "no model is served: correct what is said above, and look at the log above it"
        )
    click.echo(f"Ready: {', '.join(ready)}.")
    click.echo(CURLS.format(port=http_port, name=ready[0]))


def _wait(server: TritonServer) -> None:
    try:
        while server.is_running():
            time.sleep(0.2)
    except KeyboardInterrupt:
        click.echo("Stopping: requests in flight are finished first; Ctrl+C again stops at once.")
        raise
    raise ServerError("server_failed", f"tritonserver ended by itself; its log ends:\n{server.log_tail()}")


@contextlib.contextmanager
def _repository(given: Path | None) -> Iterator[Path]:
    """The repository to serve; without one, a temporary one with the demo folder in it."""
    if given is not None:
        yield given
        return
    checkpoint = Path(hf_triton.__file__).parent / "demo"
    with tempfile.TemporaryDirectory(prefix="hf_triton_demo_") as root:
        folder = Path(root) / DEMO_NAME
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(DEMO_CONFIG.format(checkpoint=checkpoint))
        (folder / "1" / "model.py").write_text(DEMO_MODEL)
        yield Path(root)
