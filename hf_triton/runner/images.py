# SPDX-License-Identifier: Apache-2.0
"""The images of a step: features, kept by an image's number, and what a forward of tokens that stand for some is given.

An image's features are rows, one for each of its places. A forward gets the rows of those places that are among its
tokens, in their order, as in transformers' own chunked prefill (`mm_encoder_outputs`), so a chunk may cut an image. A
token that looks like a placeholder and is none gets a row too: its own embedding. Positions of several axes are in
`step_tensors.py`. Text alone enters nothing of this.

Tokens of an image that attend to each other (`Way.joins_images`) are in one forward of one range. The model makes their
masks itself, given which tokens of the sequence they are; the rule of such a mask is evaluated at positions in the
sequence, as any other (`mask_rules.py`), and has no window, so that torch attends to copies.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.runner.float32 import is_in_float32
from hf_triton.runner.image_inputs import Arrays, ImageInput, ImageSample
from hf_triton.runner.step import Step
from hf_triton.runner.step_tensors import StepTensors
from hf_triton.runner.transfer import to_index

TYPES: Final = ("token_type_ids", "mm_token_type_ids")
"""Arguments that tell a model which tokens stand for an image."""
LARGEST_TOKENS: Final = 4096
"""A GPU has memory for the tower's run of an image of so many tokens, or of a whole context, if that is shorter."""
LIVE_OUTPUTS: Final = 4
"""Outputs of the largest of a tower's modules that live at a time: its input, its output, a residual, a copy."""


@dataclass(frozen=True)
class ImageFeatures:
    """What the vision tower has computed for one image."""

    places: npt.NDArray[np.int64]
    digest: bytes
    layers: list[torch.Tensor]
    """`[features, hidden]`: the embeddings, then what further layers add (Qwen3-VL's deepstack)."""
    are_lists: list[bool]
    """Whether a model expects a list of tensors of each, or one."""
    kind: type
    """The class of the tower's output."""

    def output(self, layers: list[torch.Tensor]) -> Any:
        """An output of the tower with rows of these layers, as the model expects it."""
        made = [[rows] if is_list else rows[None] for rows, is_list in zip(layers, self.are_lists, strict=True)]
        return self.kind(pooler_output=made[0], **({"deepstack_features": made[1:]} if made[1:] else {}))


class Images:
    """The vision tower of a model, and the features that sequences need.

    Args:
        joins: Whether the tokens of an image attend to each other.
    """

    def __init__(self, model: Any, *, joins: bool) -> None:
        self._model = model
        self._kept: dict[int, ImageFeatures] = {}
        self.num_runs = 0
        """Runs of the vision tower so far."""
        names = inspect.signature(model.forward).parameters
        self._types = next((name for name in TYPES if name in names), None) if joins else None

    def __len__(self) -> int:
        """Images whose features are kept."""
        return len(self._kept)

    def begin(self, step: Step) -> None:
        """Compute the features that a step needs, once for equal images, and drop those that no sequence needs."""
        self.drop(step.dropped_images)
        for image in step.images:
            if image.number not in self._kept:
                same = next((kept for kept in self._kept.values() if kept.digest == image.digest), None)
                if same is None:
                    self.num_runs += 1
                    same = _features(image, run_tower(self._model, image))
                self._kept[image.number] = replace(same, places=image.places)

    def drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._kept.pop(number, None)

    def arguments(self, step: StepTensors) -> dict[str, Any]:
        """Arguments of a forward, beside those of text, some of whose ranges have images."""
        at, layers = self._places_and_rows(step)
        token_ids = step.token_ids().numpy()
        strays = np.setdiff1d(np.flatnonzero(np.isin(token_ids, token_ids[at])), at)
        if len(strays):
            device, dtype = layers[0].device, layers[0].dtype
            order = to_index(np.argsort(np.concatenate([at, strays])).tolist(), device)
            ids = to_index(token_ids[strays].tolist(), step.device)
            own = self._model.get_input_embeddings()(ids).to(device, dtype)
            added = [own, *(torch.zeros_like(own) for _ in layers[1:])]
            layers = [torch.cat(pair)[order] for pair in zip(layers, added, strict=True)]
        first = self._kept[next(number for part in step.ranges for number in part.images)]
        arguments: dict[str, Any] = {"mm_encoder_outputs": {"image": first.output(layers)}}
        if self._types is not None:
            arguments[self._types] = self._token_types(step)
        return arguments

    def _places_and_rows(self, step: StepTensors) -> tuple[npt.NDArray[np.int64], list[torch.Tensor]]:
        """The tokens of a forward that stand for images, ascending, and their rows of every layer."""
        at, parts = [], []
        for part, first in zip(step.ranges, step.bounds, strict=False):
            for number in part.images:
                kept = self._kept[number]
                low, high = np.searchsorted(kept.places, (part.start, part.end))
                at.append(kept.places[low:high] - part.start + first)
                parts.append([rows[low:high] for rows in kept.layers])
        return np.concatenate(at), [torch.cat(rows) for rows in zip(*parts, strict=True)]

    def _token_types(self, step: StepTensors) -> torch.Tensor:
        """`[1, tokens of the sequence]`: 1 where a token stands for an image of the forward's range."""
        (part,) = step.ranges
        types = np.zeros(part.end, np.int64)
        for number in part.images:
            types[self._kept[number].places] = 1
        return torch.from_numpy(types)[None].to(step.device)


@torch.inference_mode()
def run_tower(model: Any, image: ImageInput) -> Any:
    """What the vision tower computes of one image."""
    return model.base_model.get_image_features(**as_tensors(model, image.arguments), return_dict=True)


def as_tensors(model: Any, arguments: Arrays) -> dict[str, torch.Tensor]:
    """Arguments of a model on its device, those with fractions in its own type."""
    device: torch.device = model.get_input_embeddings().weight.device
    dtype = torch.float32 if is_in_float32() else model.dtype
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arguments.items()}
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}


def _features(image: ImageInput, output: Any) -> ImageFeatures:
    """Keep what a tower has computed of an image.

    Raises:
        ValueError: It has another number of features than the prompt has places for them.
    """
    deep = output.get("deepstack_features") or []
    forms = [output["pooler_output"], *deep]
    layers = [torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in form]) for form in forms]
    if any(len(rows) != len(image.places) for rows in layers):
        raise ValueError(f"an image has {len(layers[0])} features, and the prompt {len(image.places)} places for them")
    are_lists = [not isinstance(form, torch.Tensor) for form in forms]
    return ImageFeatures(image.places, image.digest, layers, are_lists, type(output))


@dataclass(frozen=True)
class ImageMemory:
    """What images take of a GPU, by a model of cost."""

    per_token: int
    """Bytes of one feature that is kept."""
    reserved: Mapping[torch.device, int]
    """Bytes of the largest run of the tower, and of features that no sequence needs any more."""


def image_memory(model: Any, sample: ImageSample, context_length: int) -> ImageMemory:
    """Measure the outputs of the tower's modules on the largest image of a sample; others are in proportion."""
    image = max(sample.images.images, key=lambda each: len(each.places))
    sizes = [0]

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        sizes.extend(each.nbytes for each in outputs if isinstance(each, torch.Tensor))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        output = run_tower(model, image)
    finally:
        for handle in handles:
            handle.remove()
    layers = _features(image, output).layers
    per_token = sum(rows.nbytes for rows in layers) // len(image.places)
    pixels = sum(array.nbytes for array in image.arguments.values())
    states = sum(each.nbytes for each in output.get("hidden_states") or ())  # LLaVA reads a layer before the last
    num_tokens = max(len(image.places), min(LARGEST_TOKENS, context_length))
    run = (LIVE_OUTPUTS * max(sizes) + pixels + states) * num_tokens // len(image.places)
    return ImageMemory(per_token, {layers[0].device: run + LARGEST_TOKENS * per_token})
