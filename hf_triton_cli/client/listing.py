# SPDX-License-Identifier: Apache-2.0
"""`hf-triton list`: the models of a running Triton and their states."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from hf_triton.protocol.load_reasons import first_sentence
from hf_triton_cli.client.running_triton import Triton, triton_options
from hf_triton_cli.tables import show_table, size_words

if TYPE_CHECKING:
    from hf_triton_gateway.triton.triton_messages import Folder


@click.command("list", epilog="Example: hf-triton list --triton gpu1:8001 --json")
@triton_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_models(triton: Triton, as_json: bool) -> None:
    """Show the models of a running Triton: state, version, task, engine, context, stream door, adapters."""
    models = describe_models(triton)
    if as_json:
        click.echo(json.dumps(models, ensure_ascii=False, indent=2))
    elif not models:
        click.echo("There is no model: the model repository is empty.")
    else:
        show_table(list(map(_row, models)), below="reason")


def _row(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model as the table has it."""
    num_bytes = model["memory_bytes"]
    words = {"memory_bytes": num_bytes and size_words(num_bytes), "adapters": ", ".join(model["adapters"])}
    row = {"size" if name == "memory_bytes" else name: words.get(name, value) for name, value in model.items()}
    return with_sleep(row)


def with_sleep(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose state says whether the model sleeps."""
    return {**row, "state": "ASLEEP"} if row.pop("sleeping") else row


def describe_models(triton: Triton) -> list[dict[str, Any]]:
    """Each model folder with its state, by name; a stream door is part of its model."""
    entries = triton.index()
    folders = asyncio.run(_read_folders(triton))
    doors = {folder.stream_of: name for name, folder in folders.items() if folder.stream_of}
    return [_describe(entry, folders.get(entry.name), doors) for entry in entries if entry.name not in doors.values()]


async def _read_folders(triton: Triton) -> Mapping[str, Folder]:
    async with triton.asked() as models:
        return await models.folders()


def _describe(entry: Any, folder: Folder | None, doors: Mapping[str, str]) -> dict[str, Any]:
    info = folder and folder.info
    streams = "itself" if folder is not None and folder.is_decoupled else doors.get(entry.name)
    return {
        "model": entry.name,
        "version": entry.version,
        "state": entry.state or "NOT LOADED",
        "sleeping": info and info.is_sleeping,
        "task": info.task if info else folder and folder.task,
        "engine": info and info.engine,
        "context": info and info.context_length,
        "memory_bytes": info and (info.memory_bytes or None),
        "stream": streams,
        "adapters": folder.adapters if folder else [],
        "reason": first_sentence(entry.reason),
    }
