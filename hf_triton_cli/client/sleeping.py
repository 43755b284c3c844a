# SPDX-License-Identifier: Apache-2.0
"""`hf-triton sleep` and `hf-triton wake`: a model gives its memory back and keeps its process."""

from __future__ import annotations

import asyncio

import click

from hf_triton.errors import ServerError
from hf_triton.protocol.sleep import SleepAnswer
from hf_triton_cli.client.loading import show_progress
from hf_triton_cli.client.running_triton import Triton, complete_models, triton_options
from hf_triton_cli.tables import size_words

TIMEOUT = click.option(
    "--timeout", type=click.FloatRange(1), default=600, show_default=True, help="Seconds to wait for the model."
)


@click.command(epilog="Example: hf-triton sleep llama7b")
@click.argument("name", shell_complete=complete_models)
@triton_options
@TIMEOUT
def sleep(name: str, triton: Triton, timeout: float) -> None:
    """Have the model NAME give its memory back, once no request is in flight; the next request wakes it."""
    with show_progress(f"Putting {name} to sleep"):
        answer = asyncio.run(_set_sleeping(triton, name, timeout, is_sleeping=True))
    if not answer.is_sleeping:
        raise ServerError("server_failed", f"{name} stays awake: a request came before it slept")
    if answer.seconds:
        click.echo(f"{name} sleeps after {answer.seconds:.2f} s; it gave {size_words(answer.given_back_bytes)} back.")
    else:
        click.echo(f"{name} slept already.")


@click.command(epilog="Example: hf-triton wake llama7b")
@click.argument("name", shell_complete=complete_models)
@triton_options
@TIMEOUT
def wake(name: str, triton: Triton, timeout: float) -> None:
    """Have the model NAME wake before a request comes."""
    with show_progress(f"Waking {name}"):
        answer = asyncio.run(_set_sleeping(triton, name, timeout, is_sleeping=False))
    click.echo(f"{name} is awake after {answer.seconds:.2f} s." if answer.seconds else f"{name} was awake already.")


async def _set_sleeping(triton: Triton, name: str, timeout_s: float, *, is_sleeping: bool) -> SleepAnswer:
    async with triton.asked(timeout_s) as models:
        return await models.set_sleeping(name, is_sleeping=is_sleeping)
