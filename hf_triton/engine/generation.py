# SPDX-License-Identifier: Apache-2.0
"""What the engines that generate share: a sequence group gets its sequences when it leaves the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_triton.engine.options import EngineOptions
from hf_triton.engine.protocols import eos_ids
from hf_triton.engine.sequence import SequenceGroup
from hf_triton.engine.worker import Worker
from hf_triton.errors import RequestError, panics_as_errors
from hf_triton.runner.faults import error_outcome
from hf_triton.sampling.sequence_sampler import SequenceSampler

if TYPE_CHECKING:
    import torch


class GenerationWorker(Worker[SequenceGroup]):
    """A worker whose groups are prompts.

    Args:
        model: Its generation_config names the end-of-sequence tokens of groups that do not.
        images: How it runs prompts with images: `continuous`, as text; `generate`, one after the other; `no`.
        image_obstacle: Why not as text.
    """

    def __init__(
        self, model: Any, device: torch.device, options: EngineOptions, images: str = "no", image_obstacle: str = ""
    ) -> None:
        self.options = options
        self.images, self.image_obstacle = images, image_obstacle
        if images != "no":
            options.observer.expect_images()
        self._eos_ids = eos_ids(model)
        idle_release_s = options.config.idle_release_s
        super().__init__(
            device, options.on_fatal, model=model, adapters=options.adapters, idle_release_s=idle_release_s
        )

    def image_error(self) -> RequestError | None:
        """The error of a group with images; None: they can be run."""
        if self.images != "no":
            return None
        reason = self.image_obstacle or "it reads text alone"
        return RequestError("invalid_parameter", f"this model takes no images: {reason}")

    def start(self, group: SequenceGroup, *, arrival_number: int = 0, context_ids: list[int] | None = None) -> None:
        """Create the sequences of a group, or finish it with an error. Penalties see `context_ids`, or the prompt."""
        params = group.params
        eos_ids = self._eos_ids if params.eos_ids is None else params.eos_ids
        context = group.prompt_ids if context_ids is None else context_ids

        def new_sampler(index: int) -> SequenceSampler:
            constraint = group.constraint() if group.constraint else None
            return SequenceSampler(params, index, context, eos_ids, constraint, group.listener.logits_processor())

        try:
            with panics_as_errors():
                group.start(new_sampler, eos_ids, self.options.observer.on_admit(group), arrival_number)
        except Exception as error:  # one request's mistake must not end the loop that serves the others
            group.finish(error_outcome(error))
