# SPDX-License-Identifier: Apache-2.0
"""The probe at load: which way a model runs steps is tried, by logits beside those of `generate`, judged in float32.

Exceptions alone do not show it: several models run another way without one, and are wrong. One schedule of three steps
has all that can go wrong: a context in chunks, sequences beside each other, decoding, and blocks that are full:

    step 1   chunk 1 of the long prompt | the short prompt
    step 2   the short one decodes      | chunk 2 of the long prompt
    step 3   the short one decodes      | the long one decodes

If chunks are wrong, whole prompts are tried, and a preempted sequence that is recomputed with its output. Tokens are
given, so that ways which round differently do not part. While it runs, windows have a few tokens, fewer than prompts.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch

from hf_triton.runner.faults import described, is_fatal, is_memory
from hf_triton.runner.float32 import is_in_float32, largest_layer_bytes
from hf_triton.runner.image_inputs import ImageSample
from hf_triton.runner.image_probe import ImageFinding, find_images
from hf_triton.runner.model_comparison import Comparison, Verdict
from hf_triton.runner.model_runner import ModelRunner, Way
from hf_triton.runner.reference import NUM_STEPS, check_numbers, logits_after, make_continuation, make_prompt
from hf_triton.runner.step import Step, TokenRange
from hf_triton.runner.step_attention import NotPackableError

logger = logging.getLogger(__name__)

WAYS: Final = (Way(), Way(calls_torch=True), Way(gathers=True))
"""They are tried in this order."""
CANDIDATES: Final = tuple(replace(way, prefills_whole=is_whole) for way in WAYS for is_whole in (False, True))
"""All that may be found for text."""
SHORT, LONG = (4, 1), (12, 3)
"""Length and seed of the prompts: multiples of a block, so that decoding begins another one."""
FIRST_CHUNK: Final = 9
"""Tokens of the long prompt: what is left is less than a window, so that its last token sees states of the first chunk,
and those have seen less than in a whole prompt if attention goes both ways."""
BLOCK_SIZE: Final = 4
"""The probe's sequences have several blocks."""
PLAIN_BLOCK_SIZE: Final = 5
"""The same, of blocks that a CPU's kernel does not take: torch attends to them, as in `generate`. In float32 they save
compiling the kernel for a dtype that is not served, which takes seconds."""
MAX_BLOCKS: Final = 4
"""A sequence's: the long prompt's and those of what is decoded behind it."""
WINDOW: Final = 5
"""Tokens of every window while the probe runs: more than a block, fewer than the prompts."""
WINDOWS: Final = ("sliding_window", "attention_chunk_size")
"""Configs say here how far attention reaches; models look there at every forward."""


@dataclass(frozen=True)
class Finding:
    way: Way | None
    """The first one that is right; None: no way is."""
    obstacle: str
    """Why the fastest way is not taken: what was measured, and what is allowed; empty: it is."""
    images: ImageFinding = field(default_factory=ImageFinding)
    """How it runs prompts with images."""
    logits: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """What the way computed when it was found right; None: another one raised what may be the machine's at the time."""


def find_way(model: Any, context_length: int | None = None, sample: ImageSample | None = None) -> Finding:
    """The first way in which logits, in company and in chunks, are those of `generate` alone; None: no way is.

    The finding says why it is not the fastest. It raises what `generate` does on a prompt alone.

    Args:
        model: In eval mode, on its device.
        context_length: The most tokens of a sequence, which windows as long as that do not bound; None: any.
        sample: A prompt with images, which decides nothing about text; None: the model takes text alone.
    """
    started_s = time.perf_counter()
    with short_windows(model, context_length):
        finding = _find(WayProbe(model))
        images = find_images(model, finding.way, sample)
    logger.debug(
        "the probe at load took %.2f s; in float32 it takes up to %.1f MB more, a layer's weights",
        time.perf_counter() - started_s,
        largest_layer_bytes(model) / 1e6,
    )
    return replace(finding, way=images.way or finding.way, images=images)


def _find(probe: WayProbe) -> Finding:
    obstacles: list[str] = []
    is_lasting = True
    for way in WAYS:
        for prefills_whole in (False, True):
            candidate = replace(way, prefills_whole=prefills_whole)
            try:
                verdict = probe.judge(candidate)
            except Exception as error:  # a model may do anything in its forward
                if is_memory(error) or is_fatal(error):
                    raise
                logger.debug("the model does not run as %s (%s)", candidate, described(error))
                obstacles.append(described(error))
                is_lasting &= isinstance(error, NotPackableError)
                break
            measured = f"its logits differ from those of generate by {verdict.text}"
            logger.debug("the model runs as %s: %s", candidate, measured)
            if verdict.is_right:
                obstacle = obstacles[0] if obstacles else ""
                return Finding(candidate, obstacle, logits=probe.found if is_lasting else None)
            obstacles.append(measured)
    return Finding(None, obstacles[0])


@contextmanager
def short_windows(model: Any, context_length: int | None = None) -> Iterator[None]:
    """While it is entered, windows of attention that a sequence can outgrow have at most `WINDOW` tokens."""
    modules = (module.config for module in model.modules() if hasattr(module, "config"))
    configs = {id(config): config for config in (model.config.get_text_config(decoder=True), *modules)}
    changed = [
        (config, name, size)
        for config in configs.values()
        for name in WINDOWS
        if type(size := getattr(config, name, None)) is int and WINDOW < size < (context_length or size + 1)
    ]
    try:
        for config, name, _ in changed:
            setattr(config, name, WINDOW)
        yield
    finally:
        for config, name, size in changed:
            setattr(config, name, size)


class Schedule:
    """The steps of the probe, whose logits a way computes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._short, self._long = make_prompt(model, *SHORT), make_prompt(model, *LONG)
        after = make_continuation(model, NUM_STEPS, seed=5)
        self._after_short, self._after_long = after[:2], after[2:]
        """The tokens that are decoded."""

    @torch.inference_mode()
    def compute(self, way: Way, block_size: int = BLOCK_SIZE) -> torch.Tensor:
        """The logits of the schedule's steps, `[rows, vocabulary]` float32 on the CPU."""
        if self._model.device.type == "cpu" and is_in_float32():
            block_size = PLAIN_BLOCK_SIZE
        runner = ModelRunner(self._model, way, block_size=block_size)
        runner.allocate(3 * MAX_BLOCKS, 3)
        steps = self._steps(block_size, prefills_whole=way.prefills_whole)
        logits = [runner.run(Step(ranges)) for ranges in steps]
        if not way.prefills_whole:  # nothing is recomputed: its row is the one before
            logits.append(logits[-1][-1:])
        return torch.cat(logits).float().cpu()

    def _steps(self, block_size: int, *, prefills_whole: bool) -> Iterator[tuple[TokenRange, ...]]:
        def tokens(number: int, token_ids: list[int], start: int, end: int, *, samples: bool = True) -> TokenRange:
            """Tokens of a sequence, whose blocks lie between those of the others, the last one first."""
            table = [3 * (MAX_BLOCKS - 1 - at) + number for at in range(-(-end // block_size))]
            numbers = (number,) if samples else ()
            return TokenRange(number, start, end, token_ids[start:end], table, end, samples=numbers, slot=number)

        short, long = self._short + self._after_short, self._long + self._after_long
        begin, middle, end = len(self._short), FIRST_CHUNK, len(self._long)
        chunks = [(0, end)] if prefills_whole else [(0, middle), (middle, end)]
        first = [] if prefills_whole else [tokens(1, long, *chunks[0], samples=False)]
        yield (*first, tokens(0, short, 0, begin))
        yield tokens(0, short, begin, begin + 1), tokens(1, long, *chunks[-1])
        yield tokens(0, short, begin + 1, begin + 2), tokens(1, long, end, end + 1)
        if prefills_whole:  # a preempted sequence: its prompt and output in one forward
            yield (tokens(2, long, 0, end + 1),)


class WayProbe(Schedule):
    """Judges ways of running a model by its own `generate`; raises CheckpointError if all its logits are NaN."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.found: torch.Tensor | None = None
        """What the way that was judged last computes in the served dtype."""
        self.comparison = Comparison(model, self._reference, quick=self._plain)
        """Compares with what `generate` has computed."""
        first, second, behind, third, last, _ = self.comparison.expected
        check_numbers(model, torch.stack([first, second, third]), torch.stack([behind, last]))

    def judge(self, way: Way) -> Verdict:
        """Whether steps that run so compute what `generate` computes; raises what the model raises."""
        has_kernels = self._model.device.type == "cpu"
        plainly = partial(self.compute, way, PLAIN_BLOCK_SIZE) if has_kernels else None
        return self.comparison.judge(partial(self._compute_found, way), plainly)

    def _compute_found(self, way: Way) -> torch.Tensor:
        logits = self.compute(way)
        if not is_in_float32():
            self.found = logits
        return logits

    def _reference(self) -> torch.Tensor:
        """The logits that the schedule gives, by `generate` on each prompt alone, `[rows, vocabulary]`."""
        first, second, third = logits_after(self._model, [self._short], [self._after_short])[:, 0]
        behind, last = logits_after(self._model, [self._long], [self._after_long])[:, 0]
        return torch.stack([first, second, behind, third, last, last])

    @torch.inference_mode()
    def _plain(self) -> torch.Tensor:
        """The same by one forward without a cache: what pads the short sequence is behind all that is wanted of it."""
        more = {"use_cache": False} if "use_cache" in inspect.signature(self._model.forward).parameters else {}
        short, long = self._short + self._after_short, self._long + self._after_long
        rows = [short + [0] * (len(long) - len(short)), long]
        ids = torch.tensor(rows, device=self._model.get_input_embeddings().weight.device)
        logits = self._model(input_ids=ids, **more).logits.float().cpu()
        first, second, third = logits[0, len(self._short) - 1 : len(short)]
        behind, last = logits[1, len(self._long) - 1 :]
        return torch.stack([first, second, behind, third, last, last])
