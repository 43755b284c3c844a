# SPDX-License-Identifier: Apache-2.0
"""The trial of images at load: a prompt with images, in chunks and in company, by logits beside those of `generate`.

    step 1   the first chunk of a prompt that cuts its first image | a short text
    step 2   the text decodes | the rest of the prompt             | the same prompt, whole
    step 3   the text decodes | the prompt decodes                 | the other one decodes

An image whose tokens attend to each other is not cut: the first chunk ends behind it. Whether they see those of other
images too (Molmo 2), which chunks do not, two images show.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from hf_triton.runner.faults import described, is_fatal, is_memory
from hf_triton.runner.float32 import is_in_float32
from hf_triton.runner.image_inputs import ImageSample
from hf_triton.runner.images import as_tensors
from hf_triton.runner.model_comparison import Comparison
from hf_triton.runner.model_runner import ModelRunner, Way
from hf_triton.runner.reference import logits_after, make_continuation, make_prompt
from hf_triton.runner.step import Step, TokenRange

logger = logging.getLogger(__name__)

ImageMode = Literal["continuous", "generate", "no"]
"""How a model runs prompts with images: as others, by its own `generate`, one at a time, or not at all."""
BLOCK_SIZE, PLAIN_BLOCK_SIZE = 4, 5
"""As in the probe of text (`way_probe.py`)."""
TEXT = 4, 1
"""Length and seed of the text."""


@dataclass(frozen=True)
class ImageFinding:
    """How a model runs images."""

    mode: ImageMode = "no"
    obstacle: str = ""
    """Why they do not run as text does: what was measured, and what is allowed; empty: they do, or none were tried."""
    way: Way | None = None
    """The way that runs both; None: it is that of text."""


def find_images(model: Any, way: Way | None, sample: ImageSample | None) -> ImageFinding:
    """Try a prompt with images.

    Args:
        model: In eval mode, on its device.
        way: The one in which it runs text; None: by `generate`.
        sample: None: the model takes text alone.
    """
    if sample is None:
        return ImageFinding()
    try:
        probe = ImageProbe(model, sample)
        if bool(probe.comparison.expected.isnan().any()):
            raise ValueError("its logits behind an image are NaN")
        if max(sample.prompt_ids) >= probe.comparison.expected.shape[1]:
            raise ValueError("the placeholder is no token of its vocabulary, in which penalties count the prompt's")
    except Exception as error:  # a model may do anything in its forward
        return ImageFinding("no", f"it does not generate from images: {_described(error)}")
    if way is None:
        return ImageFinding("generate", "the model runs in the batch engine")
    try:
        way = probe.complete(way)
        verdict = probe.comparison.judge(partial(probe.compute, way), probe.plainly(way))
    except Exception as error:
        return ImageFinding("generate", _described(error))
    measured = f"its logits behind an image differ from those of generate by {verdict.text}"
    logger.debug("the model runs images as %s: %s", way, measured)
    return ImageFinding("continuous", way=way) if verdict.is_right else ImageFinding("generate", measured)


def _described(error: Exception) -> str:
    if is_memory(error) or is_fatal(error):
        raise error
    return described(error)


class ImageProbe:
    """Runs the schedule of a sample with images."""

    def __init__(self, model: Any, sample: ImageSample) -> None:
        self._model = model
        self._images = sample.images
        self._text = make_prompt(model, *TEXT)
        self._prompt = sample.prompt_ids
        self._after = make_continuation(model, 2, seed=5)
        """The tokens that are decoded."""
        self.comparison = Comparison(model, self._reference)
        """Compares with what `generate` has computed."""

    def _reference(self) -> torch.Tensor:
        """The logits that the schedule gives, by `generate` on each prompt alone, `[rows, vocabulary]`."""
        text = logits_after(self._model, [self._text], [self._after])[:, 0]
        arguments = as_tensors(self._model, self._images.arguments)
        behind, last = logits_after(self._model, [self._prompt], [self._after[:1]], arguments)[:, 0]
        return torch.stack([text[0], text[1], behind, behind, text[2], last, last])

    def complete(self, way: Way) -> Way:
        """The same way, and what it must know of images."""
        positions = self._images.positions
        way = replace(way, joins_images=True, num_axes=0 if positions is None else len(positions))
        return replace(way, joins_images=self._sees_ahead(way))

    def plainly(self, way: Way) -> Any:
        """Computes the same without a CPU's kernel; None: there is none."""
        return partial(self.compute, way, PLAIN_BLOCK_SIZE) if self._model.device.type == "cpu" else None

    @torch.inference_mode()
    def _sees_ahead(self, way: Way) -> bool:
        """Whether a token of an image sees one behind it, in any layer's mask."""
        runner = ModelRunner(self._model, way, block_size=BLOCK_SIZE)
        runner.allocate(3 * -(-len(self._prompt) // BLOCK_SIZE))
        (part,) = self._ranges(0, BLOCK_SIZE, [(0, len(self._prompt))])
        runner.see(Step(images=self._images.images))
        runner.run(Step((part,)))
        return any(bool(mask.triu(1).any()) for mask in runner.cache.step.masks.values())

    @torch.inference_mode()
    def compute(self, way: Way, block_size: int = BLOCK_SIZE) -> torch.Tensor:
        """The logits of the schedule's steps, `[rows, vocabulary]` float32 on the CPU."""
        if self._model.device.type == "cpu" and is_in_float32():
            block_size = PLAIN_BLOCK_SIZE
        end, first = len(self._prompt), self._images.images[0]
        middle = first.end if way.joins_images else (first.start + first.end) // 2
        chunks = [(0, middle), (middle, end)] if 0 < middle < end and not way.prefills_whole else [(0, end)]
        cut = self._ranges(1, block_size, [*chunks, (end, end + 1)])
        whole = self._ranges(2, block_size, [(0, end), (end, end + 1)])
        number, ids = 0, self._text + self._after
        table = list(range(0, 3 * -(-len(ids) // block_size), 3))
        texts = [
            TokenRange(number, low, high, ids[low:high], table, high, samples=(number,), slot=number)
            for low, high in ((0, len(self._text)), *((at, at + 1) for at in range(len(self._text), len(ids))))
        ]
        steps = [
            (*([next(cut)] if len(chunks) > 1 else []), texts[0]),
            (texts[1], next(cut), next(whole)),
            (texts[2], next(cut), next(whole)),
        ]
        runner = ModelRunner(self._model, way, block_size=block_size)
        runner.allocate(3 * max(len(table), -(-(end + 1) // block_size)), 3)
        runner.see(Step(images=self._images.images))
        return torch.cat([runner.run(Step(ranges)) for ranges in steps]).float().cpu()

    def _ranges(self, number: int, block_size: int, bounds: list[tuple[int, int]]) -> Iterator[TokenRange]:
        """Tokens of a sequence with images, whose blocks lie between those of the others."""
        ids, images = self._prompt + self._after, self._images
        positions = images.positions
        if positions is not None:
            behind = np.tile(np.arange(len(self._prompt), len(ids)) + images.offset, (len(positions), 1))
            positions = np.concatenate([positions, behind], 1)
        for start, end in bounds:
            yield TokenRange(
                number,
                start,
                end,
                ids[start:end],
                [3 * at + number for at in range(-(-end // block_size))],
                end,
                samples=(number,) if end >= len(self._prompt) else (),
                slot=number,
                images=tuple(image.number for image in images.images if image.start < end and image.end > start),
                positions=None if positions is None else positions[:, start:end],
            )
