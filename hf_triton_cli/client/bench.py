# SPDX-License-Identifier: Apache-2.0
"""`hf-triton bench`: NVIDIA's AIPerf against a running Triton, through a gateway of its own. Measures nothing itself.

AIPerf pins versions of rich and prometheus_client that differ from this package's, so it lives in its own environment.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hf_triton.errors import ServerError
from hf_triton.server import describe_status, free_ports
from hf_triton_cli.client.running_triton import Triton, complete_models, triton_options
from hf_triton_cli.numbers import NUMBERS
from hf_triton_cli.serving.gateway_process import GatewayProcess
from hf_triton_cli.tables import new_figure, show_table

if TYPE_CHECKING:
    from hf_triton_gateway.triton.triton_models import Model

VERSION: Final = "0.13.0"
INSTALL: Final = f"pipx install aiperf=={VERSION}"
REPORT: Final = "profile_export_aiperf.json"
PERCENTILES: Final = ("p50", "p90", "p99")
RATES: Final[Mapping[str, str]] = {"request_throughput": "requests/s", "output_token_throughput": "tokens/s"}
TIMES: Final[Mapping[str, str]] = {
    "time_to_first_token": "TTFT",
    "inter_token_latency": "ITL",
    "request_latency": "latency",
}
"""AIPerf's names of what is measured in milliseconds, and the table's."""


@click.command(epilog="Example: hf-triton bench demo --concurrency 1,4,16 --requests 64 --out bench")
@click.argument("model", required=False, shell_complete=complete_models)
@triton_options
@click.option(
    "--concurrency", type=NUMBERS, default="1,4,16", show_default=True, metavar="N,N,...", help="Requests at a time."
)
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="Requests per concurrency.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, help="Length of a prompt.")
@click.option("--output-tokens", type=click.IntRange(1), default=64, show_default=True, help="Length of a completion.")
@click.option("--tokenizer", help="AIPerf's for prompts: builtin, a Hub name or a path; by default the model's own.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for reports, JSON and a plot.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def bench(
    model: str | None,
    triton: Triton,
    concurrency: Sequence[int],
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    tokenizer: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure MODEL under load with AIPerf; MODEL may be left out if one is served.

    Requests go through an OpenAI gateway that the command starts and stops. AIPerf comes by `pipx install
    aiperf==0.13.0`.
    """
    program = shutil.which("aiperf")
    if program is None:
        raise ServerError("client_missing", f"there is no aiperf on PATH: `{INSTALL}`")
    chosen = asyncio.run(_choose(triton, model))
    name, tokenizer = chosen.name, tokenizer or _tokenizer(chosen.folder.parameters)
    folder = out or Path(f"bench-{name}")
    folder.mkdir(parents=True, exist_ok=True)
    shape = ["--synthetic-input-tokens-mean", prompt_tokens, "--output-tokens-mean", output_tokens]
    rows = []
    gateway = GatewayProcess(triton.config.model_copy(update={"port": free_ports(1)[0]}), headers=triton.headers)
    try:
        gateway.start()
        gateway.wait_until_started()
        for level in concurrency:
            click.echo(f"{name}: {requests} requests, {level} at a time ...", err=True)
            report = folder / f"concurrency-{level}"
            load = ["--concurrency", level, "--request-count", requests, *shape]
            own = ["--model", name, "--url", f"http://127.0.0.1:{gateway.config.port}", "--tokenizer", tokenizer]
            rows.append(_describe(level, _measure(program, [*own, *load], report)))
    finally:
        gateway.stop()
    (folder / "bench.json").write_text(json.dumps(rows, indent=2) + "\n")
    _plot(name, rows, folder / "bench.png")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        show_table(rows)
    click.echo(f"Reports are in {folder}.", err=True)


async def _choose(triton: Triton, name: str | None) -> Model:
    async with triton.asked() as models:
        return await triton.choose(models, name)


def _tokenizer(settings: Mapping[str, str]) -> str:
    """The tokenizer that a folder names; AIPerf's own if it is a path that does not exist here."""
    name = settings.get("tokenizer") or settings.get("huggingface_model", "")
    is_elsewhere = name.startswith((".", "/")) and not (name.startswith("/") and Path(name).is_dir())
    return name if name and not is_elsewhere else "builtin"


def _measure(program: str, arguments: Sequence[object], report: Path) -> Mapping[str, Any]:
    """Run AIPerf; returns its summary."""
    report.mkdir(exist_ok=True)
    fixed = ["--endpoint-type", "completions", "--streaming", "--use-server-token-count", "--ui", "none"]
    command = [program, "profile", *map(str, arguments), *fixed, "--artifact-dir", str(report)]
    log = report / "aiperf.log"
    with log.open("wb") as output:
        status = subprocess.run(
            [*command, "--extra-inputs", "ignore_eos:true"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    found = sorted(report.rglob(REPORT))
    if status or not found:
        raise ServerError("server_failed", f"aiperf exited {describe_status(status)}: {log} says why")
    summary: Mapping[str, Any] = json.loads(found[-1].read_text())
    return summary


def _describe(level: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table; what AIPerf does not report is None."""
    figures = {title: summary.get(metric, {}).get("avg") for metric, title in RATES.items()}
    for metric, title in TIMES.items():
        figures |= {f"{title} {name} ms": summary.get(metric, {}).get(name) for name in PERCENTILES}
    return {"concurrency": level} | {name: figure and round(figure, 2) for name, figure in figures.items()}


def _plot(name: str, rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Throughput and latency by concurrency; nothing where matplotlib is not installed."""
    figure = new_figure()
    if figure is None:
        return
    left, right = figure.subplots(1, 2)
    levels = [row["concurrency"] for row in rows]
    left.plot(levels, [row["tokens/s"] for row in rows], marker="o")
    left.set(title=name, xlabel="concurrency", ylabel="tokens/s")
    for percentile in PERCENTILES:
        right.plot(levels, [row[f"latency {percentile} ms"] for row in rows], marker="o", label=percentile)
    right.set(xlabel="concurrency", ylabel="latency, ms")
    right.legend()
    figure.savefig(file)
