# SPDX-License-Identifier: Apache-2.0
"""The real server under load, and what the way through it costs beside the bare engine: `make bench`.

Random weights, eos off, one thread of torch for each process: the figures are about the serving path and this machine,
not about a model. Every answer is checked for its length, and the command ends with status 1 if one is lost.

On a Llama of 3.4 million parameters:

    rate     50 requests/s for 3 s with one-word prompts and 8 new tokens; latency from the planned time of sending
    flood    8,000 requests of 4 new tokens, 128 at a time
    width    1, 2, 4, 8 and 16 requests of 32 new tokens at a time
    prompts  one request of 512 prompts and 8 new tokens

On the 34 million of `benchmarks/engine.py`, 32 prompt tokens, the ways taking turns in every round; ratios and
differences are within a round, and their medians are shown:

    overhead  tokens/s, 16 requests at a time, through the server / in the engine of this process, 32 new tokens and
              128; the milliseconds that the server adds to a request of 8 that is alone, after one to the engine,
              which has what the server needs out of the caches, and in turn, after another of its own (one client);
              tokens/s streamed / answered at once
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import click
import torch
import transformers
from engine import VOCABULARY, build_model, build_packed_model, roll
from folders import make_folder
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_triton.engine.rolling import RollingEngine
from hf_triton.testing import TritonServer

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 16
NUM_PROMPT_TOKENS = NUM_NEW_TOKENS = 32
NUM_LONG_TOKENS = 128
NUM_OVERHEAD_REQUESTS = 128
NUM_ALONE_TOKENS = 8
NUM_ALONE = 60
NUM_IN_TURN = 10

Figures = dict[str, float]


class LostAnswerError(Exception):
    """A request that was not answered as asked."""


# --- what is served --------------------------------------------------------------------------------------------------


def build_small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY // 4,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    """The model with a tokenizer whose token i is the word `wi`."""
    vocabulary = {f"w{number}": number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def add_folder(repository: Path, name: str, checkpoint: Path, config: str = "", **settings: object) -> None:
    make_folder(
        repository, name, checkpoint, config, share_prefixes="false", exclude_input_in_output="true", **settings
    )


# --- the client ------------------------------------------------------------------------------------------------------


class Client:
    """Kept-alive connections to one server."""

    def __init__(self, server: TritonServer) -> None:
        self._url = server.http_url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def _post(self, path: str, body: object) -> bytes:
        async with self._session.post(f"{self._url}/v2/models/{path}", json=body) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise LostAnswerError(f"status {answer.status}: {content[:200]!r}")
            return content

    async def generate(self, model: str, text: str, num_tokens: int) -> None:
        """One request, answered at once."""
        content = await self._post(f"{model}/generate", {"text_input": text, "max_new_tokens": num_tokens})
        check(json.loads(content)["text_output"], num_tokens)

    async def stream(self, model: str, text: str, num_tokens: int) -> None:
        """One request, answered piece by piece."""
        content = await self._post(f"{model}/generate_stream", {"text_input": text, "max_new_tokens": num_tokens})
        pieces = [json.loads(line[6:])["text_output"] for line in content.splitlines() if line.startswith(b"data: ")]
        if len(pieces) < num_tokens // 2:
            raise LostAnswerError(f"{num_tokens} tokens in {len(pieces)} pieces")
        check("".join(pieces), num_tokens)

    async def infer(self, model: str, texts: list[str], num_tokens: int) -> None:
        """Many prompts in one request."""
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        content = await self._post(f"{model}/infer", {"inputs": [tensor], "parameters": {"max_new_tokens": num_tokens}})
        [output] = json.loads(content)["outputs"]
        if len(output["data"]) != len(texts):
            raise LostAnswerError(f"{len(output['data'])} texts for {len(texts)} prompts")
        for text in output["data"]:
            check(text, num_tokens)


def check(text: str, num_tokens: int) -> None:
    if len(text.split()) != num_tokens:
        raise LostAnswerError(f"{len(text.split())} tokens of {num_tokens}")


class Run:
    """Requests, their latencies in seconds, and what went wrong with them."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.errors: Counter[str] = Counter()
        self._started_s = time.perf_counter()
        self.wall_s = 0.0

    async def ask(self, request: Awaitable[None], planned_s: float | None = None) -> None:
        started_s = time.perf_counter() if planned_s is None else planned_s
        try:
            await request
            self.latencies.append(time.perf_counter() - started_s)
        except (LostAnswerError, aiohttp.ClientError, TimeoutError) as error:
            self.errors[f"{type(error).__name__}: {error}"] += 1
        self.wall_s = time.perf_counter() - self._started_s

    def figures(self) -> Figures:
        if not self.latencies:
            return {"answers": 0, "errors": self.errors.total()}
        cuts = statistics.quantiles([*self.latencies, self.latencies[-1]], n=100, method="inclusive")
        return {
            "answers": len(self.latencies),
            "errors": self.errors.total(),
            "requests/s": len(self.latencies) / self.wall_s,
            "p50 ms": 1000 * cuts[49],
            "p99 ms": 1000 * cuts[98],
        }


async def at_rate(request: Callable[[int], Awaitable[None]], per_s: float, count: int) -> Run:
    """Requests at planned times, however long the answers take."""
    run, start_s = Run(), time.perf_counter()

    async def ask(number: int) -> None:
        planned_s = start_s + number / per_s
        await asyncio.sleep(planned_s - time.perf_counter())
        await run.ask(request(number), planned_s)

    await asyncio.gather(*(ask(number) for number in range(count)))
    return run


async def at_width(request: Callable[[int], Awaitable[None]], width: int, count: int) -> Run:
    """`count` requests, `width` of them in flight."""
    run, numbers = Run(), iter(range(count))

    async def ask() -> None:
        for number in numbers:
            await run.ask(request(number))

    await asyncio.gather(*(ask() for _ in range(width)))
    return run


# --- the cases -------------------------------------------------------------------------------------------------------


async def load_cases(client: Client) -> dict[str, Run]:
    """By name, on the small model."""

    def request(num_tokens: int) -> Callable[[int], Awaitable[None]]:
        return lambda number: client.generate("small", f"w{number % 2000}", num_tokens)

    await at_width(request(8), 16, 64)
    runs = {"rate 50/s": await at_rate(request(8), 50, 150)}
    runs["flood 128"] = await at_width(request(4), 128, 8000)
    for width in (1, 2, 4, 8, 16):
        runs[f"width {width}"] = await at_width(request(32), width, 16 * width)
    prompts = [f"w{number}" for number in range(512)]
    runs["512 prompts"] = await at_width(lambda _: client.infer("small", prompts, 8), 1, 1)
    return runs


def build_prompts(count: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(VOCABULARY) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(count)]


async def overhead(client: Client, engine: RollingEngine, prompts: list[list[int]]) -> tuple[Figures, list[Run]]:
    """One round: the engine of this process, the server, and the server's stream."""
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
    runs: list[Run] = []

    async def in_server(num_tokens: int, numbers: list[int], ask: Callable[..., Awaitable[None]], model: str) -> float:
        run = await at_width(lambda place: ask(model, texts[numbers[place]], num_tokens), WIDTH, len(numbers))
        runs.append(run)
        return run.wall_s

    def in_engine(num_tokens: int, numbers: list[int]) -> float:
        started_s = time.perf_counter()
        roll(engine, [(prompts[number], num_tokens) for number in numbers], WIDTH)
        return time.perf_counter() - started_s

    everyone = list(range(len(prompts)))
    some = everyone[: len(everyone) // 2]
    engine_s, long_engine_s = in_engine(NUM_NEW_TOKENS, everyone), in_engine(NUM_LONG_TOKENS, some)
    server_s = await in_server(NUM_NEW_TOKENS, everyone, client.generate, "plain")
    long_server_s = await in_server(NUM_LONG_TOKENS, some, client.generate, "plain")
    stream_s = await in_server(NUM_NEW_TOKENS, everyone, client.stream, "streamed")
    alone: list[tuple[float, float]] = []
    for place in range(NUM_ALONE):
        number = [place % len(prompts)]
        alone_engine_s = in_engine(NUM_ALONE_TOKENS, number)
        alone.append((alone_engine_s, await in_server(NUM_ALONE_TOKENS, number, client.generate, "plain")))
    in_turn: tuple[list[float], list[float]] = [], []
    for _ in range(NUM_ALONE // NUM_IN_TURN):
        numbers = [place % len(prompts) for place in range(NUM_IN_TURN)]
        in_turn[0].extend([in_engine(NUM_ALONE_TOKENS, [number]) for number in numbers][1:])
        in_turn[1].extend(
            [await in_server(NUM_ALONE_TOKENS, [number], client.generate, "plain") for number in numbers][1:]
        )
    num_tokens = len(prompts) * NUM_NEW_TOKENS
    figures = {
        "engine tokens/s": num_tokens / engine_s,
        "server tokens/s": num_tokens / server_s,
        "stream tokens/s": num_tokens / stream_s,
        "server / engine": engine_s / server_s,
        "long server / engine": long_engine_s / long_server_s,
        "stream / server": server_s / stream_s,
        "engine alone ms": 1000 * statistics.median(bare_s for bare_s, _ in alone),
        "server alone ms": 1000 * statistics.median(served_s for _, served_s in alone),
        "added alone ms": 1000 * statistics.median(served_s - bare_s for bare_s, served_s in alone),
        "added in turn ms": 1000 * (statistics.median(in_turn[1]) - statistics.median(in_turn[0])),
    }
    return figures, runs


async def measure(server: TritonServer, large: LlamaForCausalLM, rounds: int) -> tuple[dict[str, Run], list[Figures]]:
    """All cases. Lost answers of the overhead rounds are added to the runs."""
    async with Client(server) as client:
        runs = await load_cases(client)
        engine = RollingEngine(large, max_rows=WIDTH, shares_prefixes=False)
        prompts = build_prompts(NUM_OVERHEAD_REQUESTS)
        try:
            await overhead(client, engine, prompts[:WIDTH])  # warm up
            figures = []
            for number in range(rounds):
                row, asked = await overhead(client, engine, prompts)
                figures.append(row)
                runs |= {f"round {number}.{place}": run for place, run in enumerate(asked) if run.errors}
        finally:
            engine.close()
    return runs, figures


def show(cases: dict[str, Figures], medians: Figures) -> None:
    names = ["answers", "errors", "requests/s", "p50 ms", "p99 ms"]
    print(f"{'':14}" + "".join(f"{name:>12}" for name in names))
    for case, figures in cases.items():
        print(f"{case:14}" + "".join(f"{figures.get(name, math.nan):>12.1f}" for name in names))
    print()
    for name, value in medians.items():
        print(f"{name:22}{value:>10.2f}")


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Rounds of the overhead; medians are shown.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for server.json.")
def main(rounds: int, out: Path | None) -> None:
    """Measure, and print tables."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    load_before = os.getloadavg()
    large = build_packed_model()
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "repository"
        checkpoint = save(build_model(), Path(scratch) / "large")
        add_folder(repository, "small", save(build_small_model(), Path(scratch) / "small"), max_batch_rows=128)
        add_folder(repository, "plain", checkpoint, max_batch_rows=WIDTH)
        decoupled = "model_transaction_policy { decoupled: true }"
        add_folder(repository, "streamed", checkpoint, decoupled, max_batch_rows=WIDTH, stream="true")
        with TritonServer(repository, environment={"OMP_NUM_THREADS": "1"}, exit_on_error=True) as server:
            runs, rows = asyncio.run(measure(server, large, rounds))
    cases = {name: run.figures() for name, run in runs.items()}
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    show(cases, medians)
    loads = {"before": load_before, "after": os.getloadavg()}
    print("\nload average " + ", ".join(f"{when} {load[0]:.1f}" for when, load in loads.items()))
    errors = {name: dict(run.errors) for name, run in runs.items() if run.errors}
    if out is not None:
        machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "load average": loads}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        content = {"machine": machine, "versions": versions, "cases": cases, "errors": errors}
        out.mkdir(parents=True, exist_ok=True)
        (out / "server.json").write_text(json.dumps(content | {"overhead": medians, "rounds": rows}, indent=1))
    if errors:
        sys.exit(f"answers were lost: {errors}")


if __name__ == "__main__":
    main()
