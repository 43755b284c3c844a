# SPDX-License-Identifier: Apache-2.0
"""`hf-triton run`: serves one model and talks to it in the same terminal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from hf_triton.errors import HfTritonError, ServerError, SettingsError
from hf_triton.folders.doors import door_repository, encoder_declaration, has_chat_template
from hf_triton.folders.folders import defects, guess_reason, model_folders, with_remedy
from hf_triton.folders.served_repository import DEMO_NAME, served_repository
from hf_triton.folders.sources import fetch_models, is_repository, model_repository
from hf_triton.server import TritonServer
from hf_triton_cli.client.chat import exit_at_sigterm, talk
from hf_triton_cli.client.generate import Sampling, complete, sampling_options
from hf_triton_cli.client.loading import show_progress
from hf_triton_cli.client.running_triton import Triton
from hf_triton_cli.client.session import Session
from hf_triton_cli.progress import show_download
from hf_triton_cli.shared_options import SET
from hf_triton_gateway.triton.endpoint import Endpoint

LOAD_TIMEOUT_S = 7200.0
EXAMPLES = """\b
Examples:
  hf-triton run Qwen/Qwen3-0.6B
  hf-triton run Qwen/Qwen3-0.6B "Why is the sky blue?" --max-tokens 200
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", required=False)
@click.argument("prompt", required=False)
@sampling_options
@click.option("--system", metavar="TEXT", help="System prompt.")
@SET
def run(
    model: str | None,
    prompt: str | None,
    sampling: Sampling,
    system: str | None,
    settings: Mapping[str, str],
) -> None:
    """Serve MODEL and talk to it here, or print its answer to PROMPT; /bye ends both.

    A model without a chat template completes PROMPT.

    MODEL is what `hf-triton serve` takes: a name on the Hub, a checkpoint or a model folder. Without it, the demo model
    is served. The server listens on free ports of this machine: `hf-triton serve` is for other clients.
    """
    if prompt is not None and not prompt.strip():
        raise click.UsageError("the prompt is empty")
    exit_at_sigterm()
    chats = True

    def check(folder: Path) -> None:
        nonlocal chats
        if task := encoder_declaration(folder):
            raise _wrong_task(model, task.name)
        if not (chats := has_chat_template(folder)) and (prompt is None or system is not None):
            what = "--system needs" if prompt is not None else "a conversation needs"
            raise ServerError(
                "wrong_task",
                f"{model} has no chat template, which {what}: `hf-triton run {model} PROMPT` completes a prompt, and "
                "--set chat_template=FILE names a Jinja file",
            )

    with serving(model, settings, check) as (name, server), asyncio.Runner() as runner:
        triton = Triton(Endpoint(server.grpc_url))
        try:
            if prompt is not None and not chats:
                runner.run(complete(triton, name, prompt, sampling))
            else:
                talk(Session(triton, runner, sampling.values, system), name, prompt)
        except HfTritonError as error:
            raise _wrong_task(model or name) if error.code == "wrong_task" else error from None


@contextlib.contextmanager
def serving(
    model: str | None, settings: Mapping[str, Any], check: Callable[[Path], None] = lambda folder: None
) -> Iterator[tuple[str, TritonServer]]:
    """A server with one model, on free ports; and the model's name.

    Args:
        model: As `hf-triton serve` takes it; None: the demo model.
        settings: Of a checkpoint's folder.
        check: Refuses a model by its folder, before it is loaded.

    Raises:
        click.UsageError: It is a model repository, or settings are given for a folder.
        HfTritonError: The model does not exist, or cannot be loaded.
    """
    if model is None and settings:
        raise click.UsageError("--set is for models: name one")
    if model is not None and is_repository(model):
        raise click.UsageError(f"{model} is a model repository: name one of its folders, or use `hf-triton serve`")
    with contextlib.ExitStack() as stack:
        served = None if model is None else model_repository([model], settings, stream=False, progress=show_download)
        given = stack.enter_context(served) if served else None
        name = DEMO_NAME if given is None else model_folders(given)[0].name
        if given is not None:
            for defect in defects(given).values():
                raise ServerError("server_failed", f"{name} cannot be served: {defect}") from SettingsError(defect)
            for failure in fetch_models([given / name], show_download).values():
                raise ServerError("server_failed", f"{name} cannot be served: {failure}") from failure
            check(given / name)
        repository = stack.enter_context(served_repository(given, ()))
        doors = stack.enter_context(door_repository(repository, ()))
        server = TritonServer(repository, doors, ready_timeout_s=LOAD_TIMEOUT_S)
        with show_progress(f"Loading {name}"):
            stack.enter_context(server)
        state = next(entry for entry in server.models() if entry.name == name)
        if state.state != "READY":
            reason = with_remedy(state.sentence) or guess_reason(repository / name) or "see Triton's log"
            raise ServerError("server_failed", f"{name} cannot be served: {reason}")
        yield name, server


def _wrong_task(model: str | None, task: str | None = None) -> ServerError:
    """The error for a model that generates no text: how to serve it, and where it is asked if its task is known."""
    from hf_triton_gateway.triton.triton_messages import ENDPOINTS

    endpoint = ENDPOINTS.get(task or "")
    asked = f", and POST {endpoint} asks it" if endpoint else " and shows a request to it"
    what = f"is for {task}, and generates no text" if task else "generates no text"
    return ServerError("wrong_task", f"{model} {what}: `hf-triton serve {model}` serves it{asked}")
