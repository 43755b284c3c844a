# SPDX-License-Identifier: Apache-2.0
"""Processor seconds, seconds and memory from `hf-triton serve` to the first token of each folder.

    OMP_NUM_THREADS=1 python benchmarks/start.py [OLD NEW]

Servers with 1, 4 and 8 folders of the demo model, each with the gateway and the stream doors, as they are installed by
default. In each round every number of folders starts once with each checkout, and once the plain import starts
(`import torch; from transformers import LlamaForCausalLM`) that the ratio is to; they take turns. Shown are medians.

    processor   seconds of all processes together, those included that have ended (Triton's look at each folder)
    plain       the same in plain imports of the same round
    ready       seconds until each folder is loaded; first: until the last folder has answered with a token
    model       processor seconds of a folder's process; PSS: its memory, shared pages divided among those who have them
    parts       of the first folder's process, from its log line: processor seconds

`--cold` has the files of the installed packages read from the disk, and kernels compiled: what is in the page cache is
given back before each start, as far as no other process maps it.

Modules of the checkouts are compiled first, as those of an installed package are.
"""

from __future__ import annotations

import compileall
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import click
from folders import ROOT, make_folder, processor

from hf_triton.server import free_ports

PLAIN = "import torch; from transformers import LlamaForCausalLM"
LINE = re.compile(r"f1: started in [\d.]+ s \([\d.]+ s of processor time\): ([^\n\"]*)")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Figures = dict[str, float]


def forget_files() -> None:
    """Give the pages of all installed files back to the system, as far as nothing maps them."""
    for place in ("purelib", "stdlib"):
        for path in Path(sysconfig.get_path(place)).rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def import_plainly() -> Figures:
    """The plain import's seconds and processor seconds."""
    before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", PLAIN], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"processor": spent_s, "first": time.perf_counter() - started_s}


def spent(pid: int, *, with_ended: bool) -> float:
    """Processor seconds of a process, with those of its children that have ended if that is wanted."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, numbers[11 : 15 if with_ended else 13])) / TICKS_PER_S


def family(pid: int) -> list[int]:
    """A process and all that come from it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def pss_mb(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(rollup.split("\nPss:")[1].split()[0]) / 1000


def is_live(port: int) -> bool:
    """Whether Triton answers, which it does once each folder is loaded."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/live", timeout=5):
            return True
    except OSError:
        return False


def start(tree: Path, num_folders: int, *, is_cold: bool) -> Figures:
    """Start a server of a checkout, ask each folder for a token, and stop it."""
    with tempfile.TemporaryDirectory() as scratch:
        repository, log = Path(scratch, "models"), Path(scratch, "log")
        shutil.copytree(tree / "hf_triton" / "demo", Path(scratch, "demo"))
        names = [f"f{number + 1}" for number in range(num_folders)]
        for name in names:
            make_folder(repository, name, Path(scratch, "demo"))
        http, grpc, metrics, openai = free_ports(4)
        ports = dict(zip(("http", "grpc", "metrics", "openai"), (http, grpc, metrics, openai), strict=True))
        options = [word for name, port in ports.items() for word in (f"--{name}-port", str(port))]
        if is_cold:
            forget_files()
        started_s = time.perf_counter()
        with log.open("wb") as file:
            server = subprocess.Popen(
                [sys.executable, "-m", "hf_triton_cli", "serve", "--verbose", *options, repository],
                stdout=file,
                stderr=file,
                env=os.environ | {"PYTHONPATH": str(tree)},
                cwd=scratch,
            )
        try:
            while not is_live(http):
                if server.poll() is not None:
                    raise click.ClickException(log.read_text())
                time.sleep(0.02)
            figures = {"ready": time.perf_counter() - started_s}
            for name in names:
                body = json.dumps({"text_input": "Hello", "max_new_tokens": 1}).encode()
                url = f"http://127.0.0.1:{http}/v2/models/{name}/generate"
                with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
                    assert answer.status == 200
            figures["first"] = time.perf_counter() - started_s
            processes = family(server.pid)
            figures["processor"] = sum(spent(pid, with_ended=True) for pid in processes)
            figures["ended s"] = figures["processor"] - sum(spent(pid, with_ended=False) for pid in processes)
            kinds = defaultdict(list)
            for pid in processes:
                kinds[kind(command_line(pid))].append(pid)
            for name, pids in kinds.items():
                figures[f"{name} s"] = statistics.mean(spent(pid, with_ended=False) for pid in pids)
                figures[f"{name} PSS MB"] = statistics.mean(map(pss_mb, pids))
            line = LINE.search(log.read_text())
            for part in line[1].split(", ") if line else ():
                name, _, seconds = part.rpartition(" ")
                figures[f"part {name}"] = float(seconds)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
        return figures


def kind(command: str) -> str:
    """Which of a server's processes it is."""
    if "_stub" in command:
        return "door" if "_stream/" in command else "model"
    names = {"sentinel": "shell", "hf_triton_gateway": "gateway", "bin/tritonserver": "triton", "serve": "command"}
    return next((name for word, name in names.items() if word in command), "other")


@click.command()
@click.argument("trees", nargs=-1, type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path))
@click.option("--rounds", default=3, show_default=True)
@click.option("--folders", default="1,4,8", show_default=True, help="Numbers of folders.")
@click.option("--cold", is_flag=True, help="Read the packages from the disk.")
@click.option("--out", type=click.Path(path_type=Path), help="Write all figures, as JSON.")
def main(trees: tuple[Path, ...], rounds: int, folders: str, cold: bool, out: Path | None) -> None:
    """Measure, and print a table."""
    trees = trees or (ROOT,)
    for tree in trees:
        for package in ("hf_triton", "hf_triton_cli", "hf_triton_gateway"):
            compileall.compile_dir(tree / package, quiet=2)
    all_figures: dict[str, list[Figures]] = defaultdict(list)
    for _ in range(rounds):
        plain = import_plainly()
        for count in map(int, folders.split(",")):
            for number, tree in enumerate(trees):
                figures = start(tree, count, is_cold=cold)
                again = import_plainly()
                each = {name: (plain[name] + again[name]) / 2 for name in plain}
                figures |= {"plain": figures["processor"] / each["processor"], "plain import s": each["processor"]}
                all_figures[f"{count} folders, {'new' if number else 'old' if trees[1:] else tree.name}"].append(
                    figures
                )
                plain = again
                print(count, tree, {name: round(value, 2) for name, value in figures.items()}, flush=True)
    for case, found in all_figures.items():
        print(f"\n{case}")
        for name in found[-1]:
            values = [figures[name] for figures in found if name in figures]
            print(f"  {name:<28}{statistics.median(values):>9.2f}   ({min(values):.2f} to {max(values):.2f})")
    if out:
        out.write_text(json.dumps({"cpu": processor(), "cold": cold, "figures": all_figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
