# SPDX-License-Identifier: Apache-2.0
"""GGUF files in this server beside llama.cpp's: `python benchmarks/llama_cpp.py --bin FOLDER`.

FOLDER has llama.cpp's programs `llama-server` and `llama-quantize`, built on this machine. A Llama of random weights in
float32 becomes Q8_0 and Q4_K_M by the second one, and both servers read the same file, each with one thread. They take
turns, and every answer is checked for its length:

    A  22 requests one after the other, prompts of 32 tokens, 32 new tokens
    B  64 requests, 16 at a time, prompts of 32 tokens, 32 new tokens
    C  64 requests, 16 at a time, prompts of 8 to 128 tokens, 8 to 192 new ones

Figures are tokens per second, or with `--busy` per second of the server's processor time, on a machine with other work;
the ratio to llama.cpp's in the same round; and the memory of the process that computes: what it shares with no other,
and its part of the rest (PSS), beside the bytes of the file.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import gguf
import numpy as np
import psutil
from folders import make_folder, processor
from lean_client import LeanClient, LostAnswerError

from hf_triton.server import free_ports
from hf_triton.testing import TritonServer

FILES: Final = "Q8_0", "Q4_K_M"
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
PRINTABLE: Final = [*range(33, 127), *range(161, 173), *range(174, 256)]
START_S: Final = 120.0
WARM_UP: Final = 4
"""Requests of each load before the first round."""


@dataclass(frozen=True)
class Size:
    """A Llama; heads have 64 numbers, and two share their keys."""

    num_layers: int
    hidden: int
    ffn: int
    vocabulary: int = 8192


SIZES: Final = {"34M": Size(8, 512, 1536), "0.6B": Size(24, 1280, 5120, 16384), "tiny": Size(2, 256, 512, 512)}

Load = tuple[int, list[tuple[str, int]]]
"""Requests in flight, and each one's prompt and number of new tokens."""


def loads(count: int) -> dict[str, Load]:
    """The loads, of `count` requests; the first one has a third."""
    source = random.Random(0)

    def request(num_prompt: int, num_new: int) -> tuple[str, int]:
        return "".join(source.choices(LETTERS, k=num_prompt)), num_new

    mixed = [request(source.randint(8, 128), source.choice((8, 16, 32, 64, 128, 192))) for _ in range(count)]
    same = [request(32, 32) for _ in range(count)]
    return {"A": (1, [request(32, 32) for _ in range(-(-count // 3))]), "B": (16, same), "C": (16, mixed)}


def write_model(size: Size, file: Path) -> None:
    """Random weights in float32, and a tokenizer in which each byte is a token."""
    source, key_size = np.random.default_rng(0), size.hidden // 2
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(1024)
    writer.add_embedding_length(size.hidden)
    writer.add_block_count(size.num_layers)
    writer.add_feed_forward_length(size.ffn)
    writer.add_head_count(size.hidden // 64)
    writer.add_head_count_kv(size.hidden // 128)
    writer.add_rope_dimension_count(64)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = iter(range(256, 512))
    tokens = [chr(byte) if byte in PRINTABLE else chr(next(letters)) for byte in range(256)]
    tokens += ["~~", *(f"<{number}>" for number in range(257, size.vocabulary))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["~ ~"])  # llama.cpp wants one
    for name in ("bos", "eos"):
        getattr(writer, f"add_{name}_token_id")(0)

    def add(name: str, *shape: int) -> None:
        matrix = source.standard_normal(shape, np.float32) * np.float32(0.05)
        writer.add_tensor(f"{name}.weight", matrix if len(shape) > 1 else np.ones(shape, np.float32))

    for name in ("token_embd", "output"):
        add(name, size.vocabulary, size.hidden)
    add("output_norm", size.hidden)
    for layer in range(size.num_layers):
        block = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm"):
            add(f"{block}.{name}", size.hidden)
        for name, rows in (("attn_q", size.hidden), ("attn_k", key_size), ("attn_v", key_size)):
            add(f"{block}.{name}", rows, size.hidden)
        add(f"{block}.attn_output", size.hidden, size.hidden)
        for name in ("ffn_gate", "ffn_up"):
            add(f"{block}.{name}", size.ffn, size.hidden)
        add(f"{block}.ffn_down", size.hidden, size.ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass(frozen=True)
class Way:
    """One of the servers."""

    client: LeanClient
    path: str
    pid: int
    server: int
    """The process that has all others of the server."""

    def processor_s(self) -> float:
        server = psutil.Process(self.server)
        return sum(sum(each.cpu_times()[:2]) for each in (server, *server.children(recursive=True)))

    def body(self, prompt: str, num_new: int) -> dict[str, Any]:
        if self.path == "/completion":
            return {"prompt": prompt, "n_predict": num_new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        return {"text_input": prompt, "max_new_tokens": num_new, "ignore_eos": True, "return_num_output_tokens": True}

    def tokens_per_s(self, load: Load, *, is_busy: bool) -> float:
        """Tokens per second of wall time, or of processor time on a busy machine."""
        width, requests = load
        self.client.connect(width)
        begun_s = self.processor_s()
        wall_s, answers = self.client.post(self.path, [self.body(*each) for each in requests], width)
        for answer, (_, num_new) in zip(answers, requests, strict=True):
            found = json.loads(answer)
            count = found["tokens_predicted"] if "tokens_predicted" in found else found["num_output_tokens"]
            if count != num_new:
                raise LostAnswerError(f"{count} tokens of {num_new}")
        return sum(num_new for _, num_new in requests) / (self.processor_s() - begun_s if is_busy else wall_s)

    def memory_mb(self) -> float:
        """Its proportional set size."""
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        return int(text.split("\nPss:")[1].split()[0]) / 1000


@contextmanager
def llama_server(program: Path, file: Path) -> Iterator[Way]:
    port = free_ports(1)[0]
    sizes = ["-t", "1", "-tb", "1", "-np", "16", "-c", "8192", "--no-webui", "-fit", "off"]
    command = [program, "-m", file, *sizes, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
            while not _is_up(f"{url}/health"):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise click.ClickException("llama-server did not start")
                time.sleep(0.1)
            with closing(LeanClient(url)) as client:
                yield Way(client, "/completion", process.pid, process.pid)
        finally:
            process.kill()


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def own_server(file: Path, root: Path) -> Iterator[Way]:
    make_folder(
        root,
        "model",
        file.parent,
        gguf_file=file.name,
        enable_prefix_caching="false",
        exclude_input_in_output="true",
        max_num_seqs=16,
    )
    with TritonServer(root, environment={"OMP_NUM_THREADS": "1"}) as server:
        [process] = psutil.Process(server.process.pid).children()
        with closing(LeanClient(server.http_url)) as client:
            yield Way(client, "/v2/models/model/generate", process.pid, server.process.pid)


def measure(
    programs: Path, name: str, rounds: int, count: int, folder: Path, *, is_busy: bool
) -> Iterator[dict[str, Any]]:
    plain = folder / f"{name}.gguf"
    write_model(SIZES[name], plain)
    for kind in FILES:
        file = folder / kind / f"{name}-{kind}.gguf"
        file.parent.mkdir()
        quantize = [programs / "llama-quantize", plain, file, kind]
        subprocess.run(quantize, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with ExitStack() as stack:
            ways = {
                "llama.cpp": stack.enter_context(llama_server(programs / "llama-server", file)),
                "hf_triton": stack.enter_context(own_server(file, folder / f"repository-{kind}")),
            }
            for number in range(rounds + 1):
                order = list(ways) if number % 2 else list(reversed(ways))
                for load, requests in loads(count if number else WARM_UP).items():
                    speeds = {way: ways[way].tokens_per_s(requests, is_busy=is_busy) for way in order}
                    if number:
                        yield {"model": name, "file": kind, "load": load, **speeds}
            memory = {way: each.memory_mb() for way, each in ways.items()}
            yield {"model": name, "file": kind, "load": "memory, MB", **memory, "file_mb": file.stat().st_size / 1e6}
        file.unlink()
    plain.unlink()


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'model':<6}{'file':<8}{'load':<12}{'llama.cpp':>10}{'hf_triton':>10}{'ratio':>7}")
    keys = dict.fromkeys((row["model"], row["file"], row["load"]) for row in rows)
    for key in keys:
        same = [row for row in rows if (row["model"], row["file"], row["load"]) == key]
        theirs, ours = (statistics.median(row[way] for row in same) for way in ("llama.cpp", "hf_triton"))
        ratio = statistics.median(row["hf_triton"] / row["llama.cpp"] for row in same)
        print(f"{key[0]:<6}{key[1]:<8}{key[2]:<12}{theirs:>10.1f}{ours:>10.1f}{ratio:>7.2f}")


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--bin", "programs", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--model", "models", type=click.Choice(list(SIZES)), multiple=True, default=("34M", "0.6B"))
@click.option("--rounds", default=3, show_default=True)
@click.option("--requests", "count", default=64, show_default=True, help="Of B and C; A has a third.")
@click.option("--busy", "is_busy", is_flag=True, help="Count processor time.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON of all rounds.")
def main(programs: Path, models: tuple[str, ...], rounds: int, count: int, is_busy: bool, out: Path | None) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        rows = []
        for name in models:
            folder = Path(scratch, name)
            folder.mkdir()
            for row in measure(programs, name, rounds, count, folder, is_busy=is_busy):
                rows.append(row)
                print(json.dumps(row), flush=True)
    show(rows)
    if out is not None:
        machine = {"cpu": processor(), "cores": os.cpu_count()}
        out.write_text(json.dumps({"machine": machine, "rounds": rows}, indent=1))


if __name__ == "__main__":
    main()
