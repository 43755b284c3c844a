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


class Texts:
    """Running sequences: prompts join, a step gives each a greedy token, finished sequences leave."""

    def __init__(self, model: Any, mode: DecodingMode) -> None:
        self.forward = Forward(model)
        self.decoder = Decoder(self.forward, mode)
        self.memory = KVCache(self.forward.device)
        self.rows: list[tuple[int, list[int]]] = []  # number and tokens, in the order of the memory's rows
        self.tokens: dict[int, list[int]] = {}

    @torch.inference_mode()
    def join(self, number: int, prompt: list[int]) -> None:
        prefilled, logits = self.forward.prefill(prompt)
        self.memory.add(prefilled, 0, len(prompt))
        self.rows.append((number, [int(logits.argmax())]))

    def newest(self) -> torch.Tensor:
        return to_device([tokens[-1] for _, tokens in self.rows], torch.int64, self.memory.clock_index.device)

    def step(self) -> torch.Tensor:
        logits = self.decoder.step(self.memory, self.newest())
        for (_, tokens), token_id in zip(self.rows, logits.argmax(-1).tolist(), strict=True):
            tokens.append(token_id)
        return logits

    def comparable(self, prompt: list[int], tokens: list[int]) -> list[int]:
        """The new tokens up to where an engine would read the text anew."""
        most = self.forward.recompute_length - len(prompt)
        return tokens if most <= 0 or len(tokens) <= most else tokens[: int(most)]

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        number, tokens = self.rows[row]
        self.tokens[number] = tokens
        self.memory.remove(row)
        last = self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last


def schedule(num_texts: int, max_num_seqs: int) -> Iterator[tuple[str, int]]:
    """`join n`, `step`, `leave row`, at random."""
    source, waiting, num_rows = random.Random(4), list(range(num_texts)), 0
    while waiting or num_rows:
        if waiting and num_rows < max_num_seqs and source.random() < 0.3:
            yield "join", waiting.pop(0)
            num_rows += 1
        elif num_rows and source.random() < 0.08:
            num_rows -= 1
            yield "leave", source.randrange(num_rows + 1)
        elif num_rows:
            yield "step", 0


def prompts(count: int, longest: int = 50) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(3, 300) for _ in range(source.randrange(1, longest))] for _ in range(count)]
