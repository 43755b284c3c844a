# SPDX-License-Identifier: Apache-2.0
"""A rank that fails where the variable FAILS says, as `place:how`: run in place of `hf_triton.hub.ranks`."""

import os
import signal
import sys
from typing import Any

import torch

import hf_triton.hub.pretrained
import hf_triton.runner.way_probe
from hf_triton.hub import ranks
from hf_triton.runner.model_runner import ModelRunner
from hf_triton.runner.ranks import parts
from hf_triton.runner.ranks.following import run_rank

PLACES: dict[str, tuple[Any, str]] = {
    "imports": (ranks, "import_transformers"),
    "group": (ranks, "join_group"),
    "weights": (hf_triton.hub.pretrained, "load_model"),
    "parts": (parts, "check_parts"),
    "trial": (hf_triton.runner.way_probe, "find_way"),
    "runner": (ModelRunner, "__init__"),
    "cache": (ModelRunner, "memory_per_token"),
    "blocks": (ModelRunner, "allocate"),
}
STEP = "step"
"""A step of requests, which has more than one chunk; in place of a name of `PLACES`."""


def fail(*given: Any, **options: Any) -> Any:
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fail_in_steps_of_many(runner: ModelRunner, step: Any, *given: Any) -> Any:
    return fail() if len(step.ranges) > 4 else RUN(runner, step, *given)


if __name__ == "__main__":
    PLACE, _, HOW = os.environ["FAILS"].partition(":")
    RUN = ModelRunner.run
    if PLACE == STEP:
        ModelRunner.run = fail_in_steps_of_many  # type: ignore[method-assign]
    else:
        setattr(*PLACES[PLACE], fail)
    run_rank(int(sys.argv[2]), ranks._load)
