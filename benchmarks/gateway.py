# SPDX-License-Identifier: Apache-2.0
"""What OpenAI's API costs in front of Triton: `OMP_NUM_THREADS=1 python benchmarks/gateway.py`.

The Llama of `benchmarks/engine.py` in one folder with its stream door, one thread of torch, 32 prompt tokens. All ways
take turns in every round; ratios are within a round, and their medians are shown with quartiles, because machines are
shared and noisy. Every response is checked for its length.

    alone ms  one request of 8 new tokens, with nothing else in flight
    whole     tokens/s, 16 requests of 32 new tokens at a time; `generate` is Triton's own endpoint
    streams   tokens/s, 16 streams of 32 new tokens at a time; `direct` reads the door's gRPC streams with the gateway's
              own client in this process

`completions x2` and `chat x2` are two gateway processes. `--beside` adds `transformers serve` with continuous batching,
which is another engine, on the same checkpoint; in a fourth of the rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import transformers
from engine import build_model
from folders import ROOT, Figures, make_folder, save, take_turns
from lean_client import LeanClient, LostAnswerError
from server import build_prompts
from server import save as save_checkpoint

from hf_triton.testing import TritonServer
from hf_triton_cli.serving.gateway_process import GatewayProcess
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.triton.endpoint import Endpoint
from hf_triton_gateway.triton.triton_messages import Generation
from hf_triton_gateway.triton.triton_models import TritonModels

WIDTH, NUM_REQUESTS = 16, 32
NUM_NEW_TOKENS, NUM_ALONE_TOKENS = 32, 8
NUM_ALONE = 4
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ALONE = "alone ms"
MODEL = "plain"
START_S = 120
CACHE = ("--cb-block-size", "32", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "1024")
"""A KV cache for 8,192 tokens; by its own choice it takes most of the memory."""


class Way:
    """One endpoint of one server."""

    def __init__(self, url: str, path: str, model: str, texts: Sequence[str], *, is_stream: bool = False) -> None:
        self._client = LeanClient(url)
        self._path = path
        self._model = model
        self._texts = texts
        self._is_stream = is_stream

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def wall_s(self, count: int, width: int, num_tokens: int) -> float:
        """Seconds of `count` requests, `width` of them in flight.

        Raises:
            LostAnswerError: A response is missing or has another length.
        """
        bodies = [self._body(text, num_tokens) for text in self._texts[:count]]
        self._client.connect(width)
        wall_s, answers = self._client.post(self._path, bodies, width)
        for answer in answers:
            if (got := _num_tokens(answer, is_stream=self._is_stream)) != num_tokens:
                raise LostAnswerError(f"{got} tokens of {num_tokens} at {self._path}: {answer[:300]}")
        return wall_s

    def _body(self, text: str, num_tokens: int) -> dict[str, object]:
        if self._path.endswith("generate"):
            return {"text_input": text, "max_new_tokens": num_tokens}
        is_chat = self._path.endswith("chat/completions")
        prompt = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        return {"model": self._model, "max_tokens": num_tokens, "stream": self._is_stream, **prompt}


def _num_tokens(answer: str, *, is_stream: bool) -> int:
    """Tokens of a response, which are its words."""
    if not is_stream:
        body = json.loads(answer)
        texts = [body["text_output"]] if "text_output" in body else [_text(body["choices"][0])]
    else:
        lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
        texts = [_text(choice) for line in lines for choice in json.loads(line)["choices"]]
    return len("".join(texts).split())


def _text(choice: dict[str, object]) -> str:
    piece = choice.get("message") or choice.get("delta") or choice
    assert isinstance(piece, dict)
    return str(piece.get("content") or piece.get("text") or "")


class Direct:
    """The door's gRPC streams, read by the gateway's client."""

    def __init__(self, address: str, texts: Sequence[str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._address = address
        self._texts = texts
        self._models = self._loop.run_until_complete(self._connect())

    async def _connect(self) -> TritonModels:
        return TritonModels(Endpoint(self._address), 600.0)

    def close(self) -> None:
        """Disconnect."""
        self._loop.run_until_complete(self._models.close())
        self._loop.close()

    def wall_s(self, count: int, width: int, num_tokens: int) -> float:
        """Seconds of `count` requests, as those of `Way`."""
        started_s = time.perf_counter()
        self._loop.run_until_complete(self._run(count, width, num_tokens))
        return time.perf_counter() - started_s

    async def _run(self, count: int, width: int, num_tokens: int) -> None:
        texts = iter(self._texts[:count])

        async def ask() -> None:
            for text in texts:
                generation = Generation(MODEL, "", {"max_new_tokens": num_tokens}, {}, prompts=[text])
                pieces = [out["text_output"][0] async for out in self._models.stream(generation)]
                if len("".join(pieces).split()) != num_tokens:
                    raise LostAnswerError(f"{len(pieces)} pieces for {num_tokens} tokens")

        await asyncio.gather(*(ask() for _ in range(width)))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], port: int) -> Iterator[str]:
    """Run a server until the block ends; its address, once it is healthy."""
    url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{' '.join(command)[:200]} did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def gateway(triton: str, workers: int) -> Iterator[str]:
    """`hf-triton openai` with as many processes; its address."""
    config = GatewayConfig(triton=triton, port=free_port(), workers=workers)
    process = GatewayProcess(config)
    process.start()
    try:
        process.wait_until_started()
        yield f"http://{config.host}:{config.port}"
    finally:
        process.stop()


def transformers_serve(checkpoint: Path) -> contextlib.AbstractContextManager[str]:
    """`transformers serve` with one thread of torch."""
    port = free_port()
    program = Path(sys.executable).with_name("transformers")
    options = ["--continuous-batching", "--device", "cpu", "--port", str(port), "--host", "127.0.0.1", *CACHE]
    return running([str(program), "serve", str(checkpoint), *options], port)


def build_repository(root: Path) -> tuple[Path, Path]:
    """The model repository, and the checkpoint that it serves."""
    checkpoint, repository = save_checkpoint(build_model(), root / "checkpoint"), root / "repository"
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    make_folder(
        repository,
        MODEL,
        checkpoint,
        enable_prefix_caching="false",
        exclude_input_in_output="true",
        max_num_seqs=WIDTH,
    )
    shutil.copytree(ROOT / "stream_door", repository / f"{MODEL}_stream")
    return repository, checkpoint


def measure(ways: dict[str, dict[str, Way | Direct]], rounds: int) -> Figures:
    """Measure a figure of each way for each round, by case."""

    def tokens_per_s(case: str, way: str) -> float:
        return NUM_REQUESTS * NUM_NEW_TOKENS / ways[case][way].wall_s(NUM_REQUESTS, WIDTH, NUM_NEW_TOKENS)

    def alone_ms(_: str, way: str) -> float:
        return 1e3 * ways[ALONE][way].wall_s(1, 1, NUM_ALONE_TOKENS)

    figures = take_turns([ALONE], list(ways[ALONE]), rounds * NUM_ALONE, alone_ms)
    for case in [case for case in ways if case != ALONE]:
        few = max(2, rounds // 4) if case.startswith("beside") else rounds
        figures |= take_turns([case], list(ways[case]), few, tokens_per_s)
    return figures


def show(figures: Figures) -> None:
    """Print a table: each way beside its case's first."""
    print(f"{'':16}{'':22}{'median':>10}{'to first':>10}{'quartiles':>16}")
    for case, found in figures.items():
        first = next(iter(found[0]))
        for way in found[0]:
            differs = case == ALONE
            against = [each[way] - each[first] if differs else each[way] / each[first] for each in found]
            low, middle, high = statistics.quantiles(against, n=4)
            median = statistics.median(each[way] for each in found)
            print(f"{case:16}{way:22}{median:>10.2f}{middle:>10.3f}{f'{low:.3f}-{high:.3f}':>16}")


@click.command()
@click.option("--rounds", type=click.IntRange(2), default=12, show_default=True, help="Rounds of each case.")
@click.option("--beside", is_flag=True, help="Measure `transformers serve` too.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write all figures as JSON.")
def main(rounds: int, beside: bool, out: Path | None) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in build_prompts(NUM_REQUESTS)]
    with contextlib.ExitStack() as stack:
        repository, checkpoint = build_repository(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        environment = {"OMP_NUM_THREADS": "1"}
        server = stack.enter_context(TritonServer(repository, environment=environment, exit_on_error=True))
        gateways = {
            name: stack.enter_context(gateway(server.grpc_url, workers)) for name, workers in {"": 1, " x2": 2}.items()
        }

        def way(url: str, path: str, *, model: str = MODEL, is_stream: bool = False) -> Way:
            opened = Way(url, path, model, texts, is_stream=is_stream)
            stack.callback(opened.close)
            return opened

        def endpoints(*, is_stream: bool) -> dict[str, Way | Direct]:
            found: dict[str, Way | Direct] = {}
            for name, url in gateways.items():
                found[f"completions{name}"] = way(url, "/v1/completions", is_stream=is_stream)
                found[f"chat{name}"] = way(url, "/v1/chat/completions", is_stream=is_stream)
            return found

        direct = Direct(server.grpc_url, texts)
        stack.callback(direct.close)
        generate = f"/v2/models/{MODEL}/generate"
        ways: dict[str, dict[str, Way | Direct]] = {
            ALONE: {"generate": way(server.http_url, generate), **endpoints(is_stream=False)},
            "whole": {"generate": way(server.http_url, generate), **endpoints(is_stream=False)},
            "streams": {"direct": direct, **endpoints(is_stream=True)},
        }
        if beside:
            other, path = stack.enter_context(transformers_serve(checkpoint)), "/v1/chat/completions"
            for case, is_stream in {"beside": False, "beside, streams": True}.items():
                ways[case] = {
                    "chat": way(gateways[""], path, is_stream=is_stream),
                    "transformers serve": way(other, path, model=str(checkpoint), is_stream=is_stream),
                }
        before = os.getloadavg()[0]
        figures = measure(ways, rounds)
    show(figures)
    print(f"\nload average before {before:.1f}, after {os.getloadavg()[0]:.1f}")
    if out is not None:
        save(figures, out)


if __name__ == "__main__":
    main()
