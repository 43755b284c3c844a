# SPDX-License-Identifier: Apache-2.0
"""Drawing tokens: the operation `hf_triton::draw` beside torch's operations, and the host's work of a step.

    python benchmarks/gpu/sampling.py --out FOLDER

`us` is the operation, `torch_us` the same draws by torch, `differ` the tokens that are not the same: few, as rounding
differs. `host_us` is the host's time to launch the sampling of a step with parameters in Python, and to read its tokens
after the device has finished, `logprobs_us` the same with log probabilities. Rows with a block are of another program
than the kernel chooses.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from argparse import Namespace
from dataclasses import replace
from unittest import mock

import torch
from figures import Figures, finish, median_s, read_options

from hf_triton.sampling.draw import draw, draw_by_torch, is_usable
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.row_params import RowParams
from hf_triton.sampling.sampler import SampledTokens
from hf_triton.sampling.sequence_sampler import SequenceSampler

KINDS = {
    "temperature": SamplingParams(8, do_sample=True, temperature=0.7),
    "top_p": SamplingParams(8, do_sample=True, top_p=0.9),
    "top_k, top_p": SamplingParams(8, do_sample=True, temperature=0.7, top_k=50, top_p=0.95),
    "min_p": SamplingParams(8, do_sample=True, min_p=0.05),
}
VOCABULARY, NUM_ROWS, DTYPES = 128_256, (1, 16, 64, 256), (torch.bfloat16, torch.float32)
SMALL = 1000, (1, 4), (torch.float32,)
NUM_HOST_ROUNDS = 30
BLOCKS = ((2048, 256), (4096, 512), (4096, 256), (8192, 1024), (16_384, 512))
"""Scores of a program at a time, and scores of a warp."""


def host_us(logits: torch.Tensor, params: list[SamplingParams]) -> float:
    """Median microseconds, without the device's time."""
    samplers = [SequenceSampler(each, 0, []) for each in params]
    spans = []
    for _ in range(NUM_HOST_ROUNDS):
        started_s = time.perf_counter()
        sampled = SampledTokens(logits, samplers)
        launched_s = time.perf_counter()
        finish(logits.device)
        finished_s = time.perf_counter()
        tokens = sampled.read()
        spans.append(launched_s - started_s + time.perf_counter() - finished_s)
        for sampler, token in zip(samplers, tokens, strict=True):
            sampler.accept(token.token_id)
    return 1e6 * statistics.median(spans)


def sweep(figures: Figures, logits: torch.Tensor, params: RowParams) -> None:
    """Other programs."""
    kernel = importlib.import_module("hf_triton.runner.cuda.draw_kernel")
    for block, per_warp in BLOCKS:
        with (
            figures.attempt(block=block, per_warp=per_warp),
            mock.patch.multiple(kernel, MAX_BLOCK=block, SCORES_PER_WARP=per_warp),
        ):
            took_s = median_s(lambda: draw(logits, params), logits.device)
            figures.add(rows=len(logits), block=block, per_warp=per_warp, us=1e6 * took_s)


def main(options: Namespace) -> None:
    figures, device = Figures("sampling", options.out), options.device
    size, num_rows, dtypes = SMALL if options.small else (VOCABULARY, NUM_ROWS, DTYPES)
    for (name, one), rows, dtype in itertools.product(KINDS.items(), num_rows, dtypes):
        names = {"kind": name, "rows": rows, "dtype": str(dtype).removeprefix("torch.")}
        with figures.attempt(**names):
            params = [replace(one, seed=seed) for seed in range(rows)]
            packed = RowParams.build(params, [each.seed * 2**40 for each in params])
            logits = (3 * torch.randn(rows, size, device=device)).to(dtype)
            tokens, expected = draw(logits, packed), draw_by_torch(logits, packed)
            figures.add(
                **names,
                us=1e6 * median_s(lambda each=logits, by=packed: draw(each, by), device),
                torch_us=1e6 * median_s(lambda each=logits, by=packed: draw_by_torch(each, by), device),
                host_us=host_us(logits, params),
                logprobs_us=host_us(logits, [replace(each, logprobs=1) for each in params]),
                differ=int((tokens != expected).sum()),
                is_usable=device.type == "cpu" or is_usable(device, dtype, size),
            )
            if not options.small and name == "top_k, top_p" and rows in (1, 64):
                sweep(figures, logits, packed)


if __name__ == "__main__":
    main(read_options(__doc__))
