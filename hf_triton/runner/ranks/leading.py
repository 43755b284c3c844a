# SPDX-License-Identifier: Apache-2.0
"""Rank 0's runner: it tells the other ranks each thing that it does, and they do it too.

Each decision that may depend on the device is rank 0's, or is compared with those of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from hf_triton.runner.budget import size_words
from hf_triton.runner.faults import RankError, loggable
from hf_triton.runner.model_runner import ModelRunner, Way
from hf_triton.runner.ranks.following import describe_share
from hf_triton.runner.ranks.parts import check_parts
from hf_triton.runner.ranks.processes import Ranks
from hf_triton.runner.step import Step
from hf_triton.runner.step_tensors import InflightTokens
from hf_triton.runner.way_probe import Finding, find_way

logger = logging.getLogger(__name__)


def find_way_together(ranks: Ranks, model: Any, context_length: int) -> Finding:
    """See `find_way`; raises CheckpointError if the ranks find different ones, or their parts are no whole."""
    ranks.send("find_way", context_length)
    check_parts(model)
    finding = find_way(model, context_length)
    ranks.check_equal(finding.way, "as the way to run the model")
    return finding


class LeadingRunner(ModelRunner):
    """Runs a model's steps on this rank and the others."""

    def __init__(self, ranks: Ranks, model: Any, way: Way, *, block_size: int | None = None) -> None:
        self._ranks = ranks
        self._shares: list[dict[str, Any]] = []
        self._is_leading = False
        ranks.send("begin", way, block_size)
        super().__init__(model, way, block_size=block_size)

    @contextmanager
    def _leading(self, name: str, *arguments: Any) -> Iterator[None]:
        """Have the ranks do the same; what it does on the way, they do too, and are not told."""
        if self._is_leading:
            yield
            return
        self._is_leading = True
        try:
            self._ranks.send(name, *arguments)
            yield
        finally:
            self._is_leading = False

    def allocate(self, num_blocks: int, num_slots: int = 1) -> None:
        with self._leading("allocate", num_blocks, num_slots):
            super().allocate(num_blocks, num_slots)
        num_tokens = num_blocks * self.block_size
        self._ranks.shares = [each | {"cache_bytes": each["cache_bytes"] * num_tokens} for each in self._shares]
        for rank, each in enumerate(self._ranks.shares):
            sizes = size_words(each["weights_bytes"]), size_words(each["cache_bytes"])
            logger.info(
                "rank %d of %d on %s: %s of weights, %s of KV cache", rank, self._ranks.size, each["device"], *sizes
            )

    def give_back(self, blocks: list[int]) -> None:
        with self._leading("give_back", blocks):
            super().give_back(blocks)

    def trim_slots(self, num_slots: int) -> None:
        with self._leading("trim_slots", num_slots):
            super().trim_slots(num_slots)

    def sleep(self) -> None:
        with self._leading("sleep"):
            super().sleep()

    def wake(self) -> None:
        self._ranks.send("restore")
        super().wake()

    def memory_per_token(self) -> tuple[Mapping[torch.device, int], int]:
        """See `ModelRunner.memory_per_token`; on a CPU, of all ranks, which share its memory."""
        with self._leading("memory_per_token"):
            bytes_per_token, slot_tokens = super().memory_per_token()
        self._shares = [describe_share(self, bytes_per_token), *self._ranks.answers()]
        if self.device.type == "cpu":
            bytes_per_token = {self.device: sum(each["cache_bytes"] for each in self._shares)}
        return bytes_per_token, slot_tokens

    def capture(self, max_sequences: int, num_drafted: int = 0) -> str | None:
        with self._leading("capture", max_sequences, num_drafted):
            reason = super().capture(max_sequences, num_drafted)
        self._ranks.check_equal((reason, self.partly), "of CUDA graphs")
        return reason

    def run(self, step: Step, inflight: InflightTokens | None = None) -> torch.Tensor:
        if self._is_leading:
            return super().run(step, inflight)
        # Whatever fails on one rank leaves the others behind in the middle of a forward, and ends all of them.
        try:
            needs_tokens = inflight is not None and any(not part.token_ids for part in step.ranges)
            tokens = (len(inflight.token_ids), dict(inflight.row_of)) if inflight and needs_tokens else None
            with self._leading("run", step, tokens):
                if inflight and needs_tokens:
                    distributed.broadcast(inflight.token_ids, 0)
                return super().run(step, inflight)
        except RankError:
            raise
        except Exception as error:
            raise self._ranks.error(f"a step failed on rank 0 ({loggable(error)})") from error
