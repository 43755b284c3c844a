# SPDX-License-Identifier: Apache-2.0
"""`hf-triton run-batch`: a file of requests, in the form of OpenAI's batches, to a file of results."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

from hf_triton.errors import HfTritonError, clip
from hf_triton_cli.client.batch_file import count_requests, count_results, has_failed, read_requests
from hf_triton_cli.client.chat import exit_at_sigterm
from hf_triton_cli.exit_codes import FAILED, INTERRUPTED
from hf_triton_cli.say import say
from hf_triton_cli.shared_options import SET

KEY: Final = "OPENAI_API_KEY"
DEFAULT_URL: Final = "http://localhost:9000"
Address = tuple[str, str | None]
"""A gateway's address, and the model that it is asked for, whatever a request names."""
STDOUT: Final = Path("-")
NUM_REPORTS: Final = 10
"""Lines of progress where there is no terminal."""
EXAMPLES: Final = """\b
Examples:
  hf-triton run-batch requests.jsonl -o results.jsonl
  hf-triton run-batch requests.jsonl -o results.jsonl --model Qwen/Qwen3-0.6B
"""


def _read_url(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    from pydantic import HttpUrl, TypeAdapter, ValidationError

    try:
        return str(TypeAdapter(HttpUrl).validate_python(value)).rstrip("/").removesuffix("/v1")
    except ValidationError:
        raise click.BadParameter(f"it must be as {DEFAULT_URL}, got {clip(value)}") from None


@click.command(name="run-batch", epilog=EXAMPLES)
@click.argument("requests", type=click.File("rb"))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File of results.")
@click.option("--url", metavar="URL", callback=_read_url, help=f"Address of the gateway.  [default: {DEFAULT_URL}]")
@click.option("--model", metavar="MODEL", help="Serve this model meanwhile, and ask it whatever a request names.")
@SET
@click.option("--concurrency", type=click.IntRange(1, 1024), default=32, show_default=True, help="Requests at a time.")
@click.option("--timeout-s", type=click.FloatRange(1), default=3600, show_default=True, help="Of a request.")
def run_batch(
    requests: BinaryIO,
    output: Path,
    url: str | None,
    model: str | None,
    settings: Mapping[str, str],
    concurrency: int,
    timeout_s: float,
) -> None:
    """Answer REQUESTS, a batch file of OpenAI's API, or `-` for standard input.

    A line of it is {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}, and its result
    {"custom_id": "1", "response": {"status_code": 200, "body": {...}}, "error": null}. Results stand in the order of
    the requests; if some are there, the run goes on behind them. The gateway's key is OPENAI_API_KEY.
    """
    if model is not None and url is not None:
        raise click.UsageError("--url is of a server that runs, and --model serves one: give one of them")
    if model is None and settings:
        raise click.UsageError("--set is for --model")
    if not (key := os.environ.get(KEY, "")).isascii() or not key.isprintable():
        raise click.UsageError(f"{KEY} must be letters, digits and signs of ASCII")
    exit_at_sigterm()
    with _seekable(requests) as file:
        num_requests = count_requests(file)
        with _opened(output) as results:
            num_done, num_failed = count_results(results, file) if _is_kept(output) else (0, 0)
            if num_done:
                say(f"{num_done:,} of {num_requests:,} have their results already.", err=True)
            run = _Run(num_requests, num_done, num_failed)
            if num_done < num_requests:
                _answer(run, file, results, _gateway(url, model, settings), (concurrency, timeout_s))
    if run.num_failed:
        say(f"{run.num_failed:,} of {num_requests:,} requests failed: their results say why.", err=True)
        sys.exit(FAILED)


@dataclass
class _Run:
    num_requests: int
    num_done: int
    num_failed: int


def _answer(
    run: _Run, file: BinaryIO, results: BinaryIO, gateway: AbstractContextManager[Address], limits: tuple[int, float]
) -> None:
    """Ask what has no result yet."""
    with gateway as (url, model):
        try:
            asyncio.run(_write_results(run, file, results, (url, os.environ.get(KEY) or None, model, *limits)))
        except KeyboardInterrupt:
            say(f"\nStopped behind {run.num_done:,} of {run.num_requests:,}; the same command goes on.", err=True)
            sys.exit(INTERRUPTED)


async def _write_results(run: _Run, file: BinaryIO, results: BinaryIO, client: tuple[Any, ...]) -> None:
    from hf_triton_cli.client.batch_client import BatchClient

    async with BatchClient(*client) as asked:
        await asked.check()
        waiting = islice(read_requests(file), run.num_done, None)
        with _progress(run.num_requests, run.num_done) as show:
            async with contextlib.aclosing(asked.results(waiting)) as found:
                async for result in found:
                    _append(results, json.dumps(result).encode() + b"\n")
                    run.num_done += 1
                    run.num_failed += has_failed(result)
                    show(run.num_done)


@contextlib.contextmanager
def _seekable(file: BinaryIO) -> Iterator[BinaryIO]:
    """The file, or what a pipe gives as one."""
    if file.seekable():
        yield file
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(file, copy)
        yield copy


def _is_kept(output: Path) -> bool:
    """Whether results can be read again: those in a file, and not those that go to a pipe or device."""
    return output != STDOUT and (output.is_file() or not output.exists())


@contextlib.contextmanager
def _opened(output: Path) -> Iterator[BinaryIO]:
    """What the results are written to, behind those that are there; a file is this run's alone."""
    if output == STDOUT:
        yield sys.stdout.buffer
        return
    is_kept = _is_kept(output)
    try:
        results: BinaryIO = output.open("a+b" if is_kept else "wb")
    except OSError as error:
        raise click.UsageError(f"{output} cannot be written: {error.strerror}") from None
    try:
        if is_kept:
            _lock(results)
        yield results
    finally:
        with contextlib.suppress(OSError):  # what could not be written is an error already
            results.close()


def _lock(results: BinaryIO) -> None:
    try:
        fcntl.flock(results, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise click.UsageError(f"another run writes {results.name}: wait for it, or name another file") from None
    except OSError:  # a file system without locks
        pass


def _append(results: BinaryIO, line: bytes) -> None:
    try:
        results.write(line)
        results.flush()
    except BrokenPipeError:  # as `head` ends
        raise
    except OSError as error:
        raise HfTritonError("disk_full", f"the results cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def _gateway(url: str | None, model: str | None, settings: Mapping[str, str]) -> Iterator[Address]:
    """A gateway's address, and the name of the model that is served for this run alone."""
    if model is None:
        yield url or DEFAULT_URL, None
        return
    from hf_triton.server import free_ports
    from hf_triton_cli.serving.gateway_process import GatewayProcess
    from hf_triton_cli.serving.run import serving
    from hf_triton_gateway.gateway_config import GatewayConfig

    with serving(model, settings) as (name, server), contextlib.ExitStack() as stack:
        gateway = GatewayProcess(GatewayConfig(triton=server.grpc_url, port=free_ports(1)[0]))
        stack.callback(gateway.stop)
        gateway.start()
        gateway.wait_until_started()
        yield f"http://127.0.0.1:{gateway.config.port}", name


@contextlib.contextmanager
def _progress(num_requests: int, num_done: int) -> Iterator[Any]:
    """Show how many are done: a bar on a terminal, otherwise a line for each tenth."""
    if not sys.stderr.isatty():
        step = -(-num_requests // NUM_REPORTS)

        def show(done: int) -> None:
            if done % step == 0 or done == num_requests:
                say(f"{done:,} of {num_requests:,}", err=True)

        yield show
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=num_requests, completed=num_done)
        yield lambda done: progress.update(bar, completed=done)
