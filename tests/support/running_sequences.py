# SPDX-License-Identifier: Apache-2.0
"""Running sequences without an engine: KV cache, forward and decoder driven directly."""

import random
from collections.abc import Iterator
from typing import Any

import torch

from hf_triton.runner.decode import Decoder, DecodingMode
from hf_triton.runner.forward import Forward
from hf_triton.runner.kv_cache import KVCache
from hf_triton.runner.transfer import to_device


class RunningSequences:
    """Running sequences: add prompts, give each a greedy token in a step, remove sequences."""

    def __init__(self, model: Any, mode: DecodingMode) -> None:
        self.forward = Forward(model)
        self.decoder = Decoder(self.forward, mode)
        self.memory = KVCache(self.forward.device)
        self.slots: list[tuple[int, list[int]]] = []  # number and tokens, by slot
        self.tokens: dict[int, list[int]] = {}

    @torch.inference_mode()
    def add(self, number: int, prompt: list[int]) -> None:
        prefilled, logits = self.forward.prefill(prompt)
        self.memory.add(prefilled, 0, len(prompt))
        self.slots.append((number, [int(logits.argmax())]))

    def newest(self) -> torch.Tensor:
        return to_device([tokens[-1] for _, tokens in self.slots], torch.int64, self.memory.clock_index.device)

    def step(self) -> torch.Tensor:
        logits = self.decoder.step(self.memory, self.newest())
        for (_, tokens), token_id in zip(self.slots, logits.argmax(-1).tolist(), strict=True):
            tokens.append(token_id)
        return logits

    def comparable(self, prompt: list[int], tokens: list[int]) -> list[int]:
        """The new tokens up to the length at which an engine would recompute the sequence."""
        most = self.forward.recompute_length - len(prompt)
        return tokens if most <= 0 or len(tokens) <= most else tokens[: int(most)]

    @torch.inference_mode()
    def remove(self, slot: int) -> None:
        number, tokens = self.slots[slot]
        self.tokens[number] = tokens
        self.memory.remove(slot)
        last = self.slots.pop()
        if slot < len(self.slots):
            self.slots[slot] = last


def schedule(num_sequences: int, max_num_seqs: int) -> Iterator[tuple[str, int]]:
    """`add n`, `step`, `remove slot`, at random."""
    source, waiting, num_running = random.Random(4), list(range(num_sequences)), 0
    while waiting or num_running:
        if waiting and num_running < max_num_seqs and source.random() < 0.3:
            yield "add", waiting.pop(0)
            num_running += 1
        elif num_running and source.random() < 0.08:
            num_running -= 1
            yield "remove", source.randrange(num_running + 1)
        elif num_running:
            yield "step", 0


def prompts(count: int, longest: int = 50) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(3, 300) for _ in range(source.randrange(1, longest))] for _ in range(count)]
