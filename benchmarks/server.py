# SPDX-License-Identifier: Apache-2.0
"""The real server under load, and what it costs beside the bare engine: `make bench`.

Random weights, eos off, one thread of torch in each process: the figures are about the request path and this machine,
not about a model. Every response is checked for its length, and the command ends with status 1 if one is lost.

On a Llama of 3.4 million parameters:

    rate     50 requests/s for 3 s with one-word prompts and 8 new tokens; latency from the planned time of sending
    flood    8,000 requests of 4 new tokens, 128 at a time
    width    1, 2, 4, 8 and 16 requests of 32 new tokens at a time
    prompts  one request of 512 prompts and 8 new tokens

On the 34 million of `benchmarks/engine.py`, 32 prompt tokens, beside the engine in the same process of the same server
(`inside.py`), taking turns in every round; ratios and differences are within a round, and their medians are shown:

    overhead  tokens/s, 16 requests at a time, through the server / in the engine, 32 new tokens and 128, and 32
              streamed; the milliseconds that the server adds to a lone request of 8
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
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
from engine import VOCABULARY, build_model
from folders import make_folder, processor
from inside import INSIDE, Request
from lean_client import LeanClient, LostAnswerError
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_triton.testing import TritonServer

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 16
NUM_PROMPT_TOKENS = NUM_NEW_TOKENS = 32
NUM_LONG_TOKENS = 128
MIN_PIECES = 16
"""Events of a stream; one holds several tokens if they come faster than they can be sent."""
NUM_OVERHEAD_REQUESTS = 128
NUM_ALONE_TOKENS = 8
NUM_ALONE = 60

Figures = dict[str, float]


# --- models ----------------------------------------------------------------------------------------------------------


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
        repository, name, checkpoint, config, enable_prefix_caching="false", exclude_input_in_output="true", **settings
    )
    shutil.copy(ROOT / "benchmarks" / "inside.py", repository / name / "1" / "model.py")


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
        """One request with one response."""
        content = await self._post(f"{model}/generate", {"text_input": text, "max_new_tokens": num_tokens})
        check(json.loads(content)["text_output"], num_tokens)

    async def infer(self, model: str, texts: list[str], num_tokens: int) -> None:
        """Many prompts in one request."""
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        content = await self._post(f"{model}/infer", {"inputs": [tensor], "parameters": {"max_new_tokens": num_tokens}})
        [output] = json.loads(content)["outputs"]
        if len(output["data"]) != len(texts):
            raise LostAnswerError(f"{len(output['data'])} outputs for {len(texts)} prompts")
        for text in output["data"]:
            check(text, num_tokens)


def check(text: str, num_tokens: int) -> None:
    if len(text.split()) != num_tokens:
        raise LostAnswerError(f"{len(text.split())} tokens of {num_tokens}")


class Run:
    """Requests, their latencies in seconds, and their errors."""

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
    """Requests at planned times, however long the responses take."""
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
    """Run the cases of the small model, by name."""

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


class Ways:
    """Ways to the same engine, alone and through the server."""

    def __init__(self, client: LeanClient, prompts: list[list[int]]) -> None:
        self._client = client
        self._prompts = prompts

    def inside_s(self, model: str, requests: list[Request], width: int) -> float:
        """Seconds of the engine alone."""
        asked = json.dumps({"requests": requests, "width": width})
        _, [answer] = self._client.post(f"/v2/models/{model}/generate", [{"id": INSIDE, "text_input": asked}], 1)
        return float(json.loads(answer)["text_output"])

    def take(self, model: str, num_tokens: int, count: int, width: int = WIDTH) -> tuple[float, float]:
        """Seconds of the engine alone, and through the server, streamed if the model streams."""
        prompts = self._prompts[:count]
        inside_s = self.inside_s(model, [(prompt, num_tokens) for prompt in prompts], width)
        texts = [" ".join(f"w{token}" for token in prompt) for prompt in prompts]
        bodies = [{"text_input": text, "max_new_tokens": num_tokens} for text in texts]
        path = "generate_stream" if model == "streamed" else "generate"
        served_s, answers = self._client.post(f"/v2/models/{model}/{path}", bodies, width)
        for answer in answers:
            pieces = text_pieces(answer)
            check("".join(pieces), num_tokens)
            if model == "streamed" and len(pieces) < MIN_PIECES:
                raise LostAnswerError(f"{num_tokens} tokens in {len(pieces)} pieces")
        return inside_s, served_s


def text_pieces(answer: str) -> list[str]:
    """The text of each event of a response, or its only text."""
    lines = answer.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")] or lines
    return [json.loads(event)["text_output"] for event in events]


def overhead(ways: Ways, count: int) -> Figures:
    """One round: each way beside its folder's engine."""
    inside_s, served_s = ways.take("plain", NUM_NEW_TOKENS, count)
    long_inside_s, long_served_s = ways.take("plain", NUM_LONG_TOKENS, count // 2)
    stream_inside_s, streamed_s = ways.take("streamed", NUM_NEW_TOKENS, count)
    alone = [ways.take("plain", NUM_ALONE_TOKENS, 1, width=1) for _ in range(NUM_ALONE)]
    server, stream = inside_s / served_s, stream_inside_s / streamed_s
    return {
        "engine tokens/s": count * NUM_NEW_TOKENS / inside_s,
        "server tokens/s": count * NUM_NEW_TOKENS / served_s,
        "stream tokens/s": count * NUM_NEW_TOKENS / streamed_s,
        "server / engine": server,
        "long server / engine": long_inside_s / long_served_s,
        "stream / engine": stream,
        "stream / server": stream / server,
        "engine alone ms": 1000 * statistics.median(bare_s for bare_s, _ in alone),
        "server alone ms": 1000 * statistics.median(served_s for _, served_s in alone),
        "added alone ms": 1000 * statistics.median(served_s - bare_s for bare_s, served_s in alone),
    }


async def measure_load(server: TritonServer) -> dict[str, Run]:
    """Figures by case."""
    async with Client(server) as client:
        return await load_cases(client)


def measure_overhead(server: TritonServer, rounds: int) -> list[Figures]:
    """Figures by round, without the first, which warms up."""
    client = LeanClient(server.http_url)
    try:
        ways = Ways(client, build_prompts(NUM_OVERHEAD_REQUESTS))
        overhead(ways, WIDTH)
        return [overhead(ways, NUM_OVERHEAD_REQUESTS) for _ in range(rounds)]
    finally:
        client.close()


def show(cases: dict[str, Figures], medians: Figures) -> None:
    names = ["answers", "errors", "requests/s", "p50 ms", "p99 ms"]
    print(f"{'':14}" + "".join(f"{name:>12}" for name in names))
    for case, figures in cases.items():
        print(f"{case:14}" + "".join(f"{figures.get(name, math.nan):>12.1f}" for name in names))
    print()
    for name, value in medians.items():
        print(f"{name:22}{value:>10.3f}")


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Rounds of the overhead; medians are shown.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for server.json.")
def main(rounds: int, out: Path | None) -> None:
    """Measure, and print tables."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "repository"
        checkpoint = save(build_model(), Path(scratch) / "large")
        add_folder(repository, "small", save(build_small_model(), Path(scratch) / "small"), max_num_seqs=128)
        add_folder(repository, "plain", checkpoint, max_num_seqs=WIDTH)
        decoupled = "model_transaction_policy { decoupled: true }"
        add_folder(repository, "streamed", checkpoint, decoupled, max_num_seqs=WIDTH, stream="true")
        with TritonServer(repository, environment={"OMP_NUM_THREADS": "1"}, exit_on_error=True) as server:
            runs, rows = asyncio.run(measure_load(server)), measure_overhead(server, rounds)
    cases = {name: run.figures() for name, run in runs.items()}
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    show(cases, medians)
    loads = {"before": load_before, "after": os.getloadavg()}
    print("\nload average " + ", ".join(f"{when} {load[0]:.1f}" for when, load in loads.items()))
    errors = {name: dict(run.errors) for name, run in runs.items() if run.errors}
    if out is not None:
        machine = {"cpu": processor(), "cores": os.cpu_count(), "load average": loads}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        content = {"machine": machine, "versions": versions, "cases": cases, "errors": errors}
        out.mkdir(parents=True, exist_ok=True)
        (out / "server.json").write_text(json.dumps(content | {"overhead": medians, "rounds": rows}, indent=1))
    if errors:
        sys.exit(f"answers were lost: {errors}")


if __name__ == "__main__":
    main()
