# SPDX-License-Identifier: Apache-2.0
"""`hf-triton status`: what a running Triton and its models do at the moment, by its statistics and metrics."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import click

from hf_triton.server import open_local
from hf_triton_cli.client.listing import describe_models, with_sleep
from hf_triton_cli.client.running_triton import (
    CALL_TIMEOUT_S,
    READY,
    Triton,
    complete_models,
    triton_options,
    unknown_model,
)
from hf_triton_cli.tables import show_table, size_words

PREFIX: Final = "hf_triton_"
RUNNING: Final = "rows_running"
WAITING: Final = "prompts_waiting"
USED_TOKENS: Final = "kv_cache_tokens"
MAX_TOKENS: Final = "kv_cache_max_tokens"
PROMPT_TOKENS: Final = "prompt_tokens_total"
GENERATED_TOKENS: Final = "generation_tokens_total"
REQUESTS: Final = "requests_total"
GAUGES: Final = (RUNNING, WAITING, USED_TOKENS, MAX_TOKENS, PROMPT_TOKENS, GENERATED_TOKENS, REQUESTS)

Figures = Mapping[str, float]


@click.command(epilog="Example: hf-triton status demo --json")
@click.argument("model", required=False, shell_complete=complete_models)
@triton_options
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Triton's metrics address; by default the host of --triton, and the port after its gRPC port.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def status(model: str | None, triton: Triton, metrics: str | None, as_json: bool) -> None:
    """Show whether a running Triton is ready, and the load of its models, or of MODEL alone."""
    described = _describe_server(triton)
    models = describe_models(triton)
    if model is not None and model not in [entry["model"] for entry in models]:
        raise unknown_model(model, [entry["model"] for entry in models])
    figures = read_metrics(metrics or _metrics_address(triton.address))
    counts = _count_requests(triton)
    rows = [
        _describe_model(entry, None if figures is None else figures.get(entry["model"]), counts.get(entry["model"]))
        for entry in models
        if model in (None, entry["model"])
    ]
    if as_json:
        click.echo(json.dumps({"server": described, "models": rows}, ensure_ascii=False, indent=2))
        return
    state = "ready" if described["ready"] else "live, but not ready" if described["live"] else "not live"
    release = f"{described['release']} ({described['version']})" if described["release"] else described["version"]
    click.echo(
        f"Triton {release} at {triton.address}: {click.style(state, fg='green' if described['ready'] else 'yellow')}"
    )
    show_table(list(map(_shown_row, rows)), below="reason")
    if figures is None:
        click.echo("No figures of the engines: the metrics port does not answer; name it with --metrics HOST:PORT.")


def _describe_server(triton: Triton) -> dict[str, Any]:
    headers, timeout_s = triton.headers, CALL_TIMEOUT_S
    with triton.connect() as client:
        about = client.get_server_metadata(headers=headers, client_timeout=timeout_s)
        return {
            "address": triton.address,
            "live": client.is_server_live(headers=headers, client_timeout=timeout_s),
            "ready": client.is_server_ready(headers=headers, client_timeout=timeout_s),
            "name": about.name,
            "version": about.version,
            "release": triton_release(about.version),
            "extensions": list(about.extensions),
        }


def triton_release(version: str) -> str | None:
    """The release, as its container is named, of a version of the server; None: it is not known.

    One minor version a month: 2.41.0 is of 23.12, and 2.59.0 of 25.06.
    """
    matched = re.fullmatch(r"2\.(\d+)\.0", version)
    if matched is None or not 41 <= int(matched[1]) <= 59:
        return None
    year, month = divmod(int(matched[1]) - 41 + 11, 12)
    return f"{23 + year}.{month + 1:02}"


def _shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the table has it."""
    use, num_bytes = row["kv_use"], row["memory_bytes"]
    words = {"kv_use": use if use is None else f"{use:.0%}", "memory_bytes": num_bytes and size_words(num_bytes)}
    names = {"memory_bytes": "size", "prompt_tokens": "tokens_in", "generated_tokens": "tokens_out"}
    shown = {names.get(name, name): words.get(name, value) for name, value in row.items() if name != "version"}
    return with_sleep(shown)


def _count_requests(triton: Triton) -> dict[str, int]:
    """Requests executed by Triton's own statistics, by model, all versions together."""
    counts: dict[str, int] = defaultdict(int)
    with triton.connect() as client:
        answer = client.get_inference_statistics(headers=triton.headers, client_timeout=CALL_TIMEOUT_S)
    for entry in answer.model_stats:
        counts[entry.name] += entry.inference_count
    return counts


def _describe_model(model: Mapping[str, Any], figures: Figures | None, num_inferences: int | None) -> dict[str, Any]:
    """A row; figures that are not known are None."""
    known: Figures = (figures or {}) if model["state"] == READY else {}
    max_tokens = known.get(MAX_TOKENS, 0.0)
    return {
        "model": model["model"],
        "version": model["version"],
        "state": model["state"],
        "sleeping": model["sleeping"],
        "engine": model["engine"],
        "memory_bytes": model["memory_bytes"],
        "running": _whole(known.get(RUNNING)),
        "waiting": _whole(known.get(WAITING)),
        "kv_use": known.get(USED_TOKENS, 0.0) / max_tokens if max_tokens else None,
        "requests": _whole(known.get(REQUESTS, num_inferences)),
        "prompt_tokens": _whole(known.get(PROMPT_TOKENS)),
        "generated_tokens": _whole(known.get(GENERATED_TOKENS)),
        "reason": model["reason"],
    }


def _whole(figure: float | None) -> int | None:
    return None if figure is None else int(figure)


def _metrics_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


def read_metrics(address: str) -> dict[str, dict[str, float]] | None:
    """Figures by model and metric, summed over labels and versions; None if no metrics are there."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with open_local(f"http://{address}/metrics", CALL_TIMEOUT_S) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except (OSError, ValueError, IndexError):  # nothing answers, or what does sends no metrics
        return None
    figures: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in families:
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            if sample.name.startswith(PREFIX) and name in GAUGES:
                figures[sample.labels.get("model", "")][name] += sample.value
    return figures
