# SPDX-License-Identifier: Apache-2.0
"""One model through the real tritonserver and the OpenAI gateway, beside the same engine alone in this process.

    python benchmarks/gpu/served.py qwen3-0.6b --out FOLDER

    engine       requests of one length in the engine, so many in flight; `alone`: one at a time
    generate     the same over Triton's /generate, in another process on the same card
    completions  the same over the gateway's /v1/completions; `streams`: streamed, with the clients' times

`of_engine` is the part of the engine's own tokens per second that a way reaches. Every response is checked for its
length. Needs the extras `gateway`, `cli` and `server`, or a tritonserver on PATH; else it is left out with a sentence.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Figures, read_options, release
from loads import Request, random_prompts, run_requests
from models import CONFIGS, build_decoder
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.folders import ROOT, make_folder
from benchmarks.lean_client import LeanClient, LostAnswerError
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.errors import ServerError
from hf_triton.extras import MissingExtraError, check_extras
from hf_triton.runner.cuda import fuse
from hf_triton.runner.way_probe import find_way
from hf_triton.sampling.params import SamplingParams
from hf_triton.server import TritonServer, find_tritonserver, free_ports

MODEL = "served"
MAX_CACHE_TOKENS = 200_000
START_S = 180.0
CONFIG = "instance_group [ { kind: KIND_MODEL } ]"  # the card, if there is one
Prompts = Callable[[int], list[list[int]]]
WAYS = {
    "generate": (f"/v2/models/{MODEL}/generate", False),
    "completions": ("/v1/completions", False),
    "streams": ("/v1/completions", True),
}


@dataclass(frozen=True)
class Plan:
    """How much is measured: many requests at a time, and some alone."""

    width: int = 64
    num_requests: int = 192
    num_prompt: int = 256
    num_new: int = 128
    num_alone: int = 4

    @property
    def loads(self) -> list[tuple[str, int, int]]:
        """Name, requests and width of each."""
        lengths = f"({self.num_prompt} + {self.num_new})"
        return [(f"{self.width} x {lengths}", self.num_requests, self.width), (f"1 x {lengths}", self.num_alone, 1)]


SMALL = Plan(width=4, num_requests=8, num_prompt=12, num_new=8, num_alone=1)


def why_not() -> str | None:
    """What is missing to serve; None: nothing."""
    try:
        check_extras("the gateway", "gateway", "cli")
        with tempfile.TemporaryDirectory() as scratch:
            find_tritonserver(Path(scratch))
    except (MissingExtraError, ServerError) as error:
        return str(error)
    return None


def save(model: Any, folder: Path) -> Path:
    """The model with a tokenizer whose token i is the word `wi`."""
    vocabulary = {f"w{number}": number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@contextmanager
def served(checkpoint: Path, root: Path, width: int) -> Iterator[dict[str, LeanClient]]:
    """Clients of tritonserver and of a gateway before it, by the way."""
    from hf_triton_cli.serving.gateway_process import GatewayProcess
    from hf_triton_gateway.gateway_config import GatewayConfig

    settings = {"max_num_seqs": width, "max_cache_tokens": MAX_CACHE_TOKENS, "exclude_input_in_output": "true"}
    make_folder(root, MODEL, checkpoint, CONFIG, **settings)
    shutil.copytree(ROOT / "stream_door", root / f"{MODEL}_stream")
    with TritonServer(root, exit_on_error=True, ready_timeout_s=START_S) as server:
        gateway = GatewayProcess(GatewayConfig(triton=server.grpc_url, port=free_ports(1)[0]))
        gateway.start()
        try:
            gateway.wait_until_started()
            own = f"http://{gateway.config.host}:{gateway.config.port}"
            clients = {way: LeanClient(server.http_url if way == "generate" else own) for way in WAYS}
            try:
                yield clients
            finally:
                for client in clients.values():
                    client.close()
        finally:
            gateway.stop()


def ask(client: LeanClient, way: str, prompts: list[list[int]], width: int, num_new: int) -> dict[str, float]:
    """Tokens per second, and the first token's time where it is streamed.

    Raises:
        LostAnswerError: A response has another length.
    """
    path, is_stream = WAYS[way]
    bodies = []
    for prompt in prompts:
        text = " ".join(f"w{token}" for token in prompt)
        openai = {"model": MODEL, "prompt": text, "max_tokens": num_new, "stream": is_stream}
        bodies.append({"text_input": text, "max_new_tokens": num_new} if way == "generate" else openai)
    client.connect(width)
    wall_s, answers = client.post(path, bodies, width)
    for answer in answers:
        pieces = re.findall(r"data: (\{.*)", answer) if is_stream else [answer]
        texts = [body.get("text_output") or body["choices"][0]["text"] for body in map(json.loads, pieces)]
        if (got := len("".join(texts).split())) != num_new:
            raise LostAnswerError(f"{got} tokens of {num_new} at {path}: {answer[:200]}")
    first = {"ttft_p50_ms": 1000 * statistics.median(client.first_s)} if is_stream else {}
    return {"tokens_per_s": len(prompts) * num_new / wall_s, **first}


def in_engine(model: Any, plan: Plan, prompts: Prompts) -> Iterator[dict[str, float]]:
    """The figures of each load in an engine of this process."""
    fuse(model)
    way = find_way(model).way
    assert way is not None
    engine = ContinuousBatchingEngine(
        model, EngineOptions(max_num_seqs=plan.width, max_cache_tokens=MAX_CACHE_TOKENS), way
    )
    with closing(engine):
        for number, (_, count, width) in enumerate([plan.loads[0], *plan.loads]):
            requests = [Request(prompt, SamplingParams(plan.num_new)) for prompt in prompts(count)]
            found = run_requests(engine, requests, width)
            if number:  # the first warms up
                yield {name: found[name] for name in ("tokens_per_s", "ttft_p50_ms")}


def main(options: Namespace) -> None:
    figures, plan, seeds = Figures("served", options.out), SMALL if options.small else Plan(), itertools.count()
    if reason := why_not():
        figures.add(model=options.model, name="served", skipped=reason)
        return

    def prompts(count: int) -> list[list[int]]:
        """New ones every time, which no prefix cache has."""
        return random_prompts(count, plan.num_prompt, CONFIGS[options.model][1][0], next(seeds))

    with tempfile.TemporaryDirectory() as folder:
        model, root = build_decoder(options.model, options.device), Path(folder)
        checkpoint, own = save(model, root / "checkpoint"), []
        for (load, _, _), found in zip(plan.loads, in_engine(model, plan, prompts), strict=True):
            figures.add(model=options.model, name="engine", load=load, **found)
            own.append(found["tokens_per_s"])
        del model
        release()
        with served(checkpoint, root / "repository", plan.width) as clients:
            for way, client in clients.items():
                with figures.attempt(model=options.model, name=way):
                    ask(client, way, prompts(plan.width), plan.width, plan.num_new)  # warms up
                    for (load, count, width), alone in zip(plan.loads, own, strict=True):
                        found = ask(client, way, prompts(count), width, plan.num_new)
                        figures.add(
                            model=options.model, name=way, load=load, **found, of_engine=found["tokens_per_s"] / alone
                        )


if __name__ == "__main__":
    main(read_options(__doc__, tuple(CONFIGS)))
