# SPDX-License-Identifier: Apache-2.0
"""A decoding step of one model in ranks, on all cards of the machine, beside the same step on one card.

    python benchmarks/gpu/ranks.py llama-3-8b --out FOLDER
    python benchmarks/gpu/ranks.py tiny --out FOLDER --small        two processes on a CPU

`calls` are Python calls of rank 0 in a step, `bytes` what it sends each other rank, and `cpu_ms` the processor time of
all ranks together. Steps are eager. Has never run on two cards.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from figures import Figures, read_options, release, wall_s
from models import CONFIGS, build_decoder

from hf_triton.hub.pretrained import load_config, load_model, silence_transformers
from hf_triton.hub.ranks import describe, start_ranks
from hf_triton.runner.model_runner import PACKED, ModelRunner
from hf_triton.runner.ranks.leading import LeadingRunner
from hf_triton.runner.step import Step, TokenRange
from hf_triton.settings import ModelSettings

LOADS = (1, 512), (32, 512), (64, 2048)
SMALL_LOADS = (1, 64), (8, 64)
NUM_ROUNDS = 20


def decoding_step(num_sequences: int, num_cached: int, block_size: int) -> Step:
    """A token of each of some sequences, whose blocks are their own."""
    width = num_cached // block_size + 1
    return Step(
        tuple(
            TokenRange(
                number,
                num_cached,
                num_cached + 1,
                [7],
                list(range(number * width, (number + 1) * width)),
                num_cached + 1,
                samples=(number,),
                slot=number,
            )
            for number in range(num_sequences)
        )
    )


def count_calls(runner: ModelRunner, step: Step) -> int:
    """Python calls of a step."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        runner.run(step)
    finally:
        sys.setprofile(None)
    return count


def processor_s(others: Sequence[int]) -> float:
    """Processor time that this process and others have used, on Linux."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in others]
    return time.process_time() + sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def measure(runner: ModelRunner, options: Namespace, log: Figures, size: int, pids: Sequence[int] = ()) -> None:
    loads = SMALL_LOADS if options.small else LOADS
    for num_sequences, num_cached in loads:
        step = decoding_step(num_sequences, num_cached, runner.block_size)
        with log.attempt(ranks=size, load=f"{num_sequences} x {num_cached}"):
            runner.allocate(num_sequences * (num_cached // runner.block_size + 1))
            runner.run(step)
            used_s = processor_s(pids)
            spans = [wall_s(lambda step=step: runner.run(step), runner.device) for _ in range(NUM_ROUNDS)]  # type: ignore[misc]
            used_s = processor_s(pids) - used_s
            sent = len(ForkingPickler.dumps(("run", (step, None)))) if size > 1 else 0
            log.add(
                ranks=size,
                load=f"{num_sequences} x {num_cached}",
                ms=1000 * statistics.median(spans),
                cpu_ms=1000 * used_s / NUM_ROUNDS,
                calls=count_calls(runner, step),
                bytes=sent,
            )


def main(options: Namespace) -> None:
    log, size = Figures("ranks", options.out), 2 if options.small else torch.cuda.device_count()
    if size < 2:
        log.add(name="ranks", skipped="the machine has one card")
        return
    silence_transformers()
    with tempfile.TemporaryDirectory(dir=options.out) as name:
        folder = Path(name)
        build_decoder(options.model, torch.device("cpu")).save_pretrained(folder)
        release()
        for ranks_size in (1, size):
            settings = ModelSettings(huggingface_model=name, tensor_parallel_size=ranks_size)
            ranks = start_ranks(folder, folder, settings) if ranks_size > 1 else None
            device_map = {"": options.device.type}
            model = load_model(folder, load_config(folder, settings), settings, device_map).eval()
            if ranks is None:
                measure(ModelRunner(model, PACKED), options, log, 1)
            else:
                with ranks.loading():
                    ranks.check_equal(describe(model), "as its part of the model")
                    pids = [process.pid for process in ranks._processes.values()]
                    measure(LeadingRunner(ranks, model, PACKED), options, log, size, pids)
                ranks.close()
            del model
            release()


if __name__ == "__main__":
    main(read_options(main.__doc__ or __doc__, tuple(CONFIGS)))
