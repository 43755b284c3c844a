# SPDX-License-Identifier: Apache-2.0
"""An encoder of all-MiniLM-L6-v2's shape in the engine of encoders, beside transformers with padding.

    python benchmarks/gpu/encoder.py --out FOLDER

Texts of log-normal lengths (4 to 256 tokens, median 24), mean-pooled. `padded` is the model as transformers runs it, in
batches of 64 texts sorted by length. `distance` is the largest of a text's vector, in cosines, from its vector in
float32 with padding.
"""

from __future__ import annotations

import random
from argparse import Namespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from figures import Figures, read_options, wall_s
from models import build_encoder_model

from hf_triton.encoder.engine import EncoderEngine
from hf_triton.encoder.forward import build_forward
from hf_triton.encoder.jobs import EncoderInput

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BATCH = 64


def texts(count: int, max_tokens: int) -> list[EncoderInput]:
    source = random.Random(0)
    lengths = [min(max_tokens, max(4, round(source.lognormvariate(3.18, 0.9)))) for _ in range(count)]
    return [EncoderInput([1000 + source.randrange(20000) for _ in range(length)]) for length in lengths]


def mean(states: torch.Tensor) -> torch.Tensor:
    return states.mean(0)


@torch.inference_mode()
def padded(model: Any, inputs: list[EncoderInput]) -> npt.NDArray[np.float32]:
    """Vectors `[texts, size]`."""
    order = sorted(range(len(inputs)), key=lambda index: len(inputs[index].ids))
    vectors = np.empty((len(inputs), model.config.hidden_size), np.float32)
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        longest = len(inputs[batch[-1]].ids)
        ids = torch.tensor([inputs[index].ids + [0] * (longest - len(inputs[index].ids)) for index in batch])
        mask = (ids != 0).to(model.device)
        states = model(input_ids=ids.to(model.device), attention_mask=mask).last_hidden_state.float()
        means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        vectors[batch] = means.cpu().numpy()
    return vectors


def lowest_cosine(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(1) / norms).min())


def main(options: Namespace) -> None:
    figures, device = Figures("encoder", options.out), options.device
    inputs, rounds = (texts(4, 16), 1) if options.small else (texts(4096, 256), 5)
    expected = padded(build_encoder_model(device, torch.float32, is_small=options.small), inputs)
    for dtype in DTYPES:
        names = {"model": "minilm", "load": f"{len(inputs)} texts", "name": str(dtype).removeprefix("torch.")}
        with figures.attempt(**names):
            model = build_encoder_model(device, dtype, is_small=options.small)
            seconds = [wall_s(lambda model=model: padded(model, inputs), device) for _ in range(1 + rounds)]  # type: ignore[misc]
            engine = EncoderEngine(build_forward(model, ("last_hidden_state",), per_token=True, reduce=mean))
            try:
                vectors = np.stack(engine.run(inputs))
                own_s = [wall_s(lambda engine=engine: engine.run(inputs), device) for _ in range(rounds)]  # type: ignore[misc]
                alone_s = [wall_s(lambda engine=engine: engine.run(inputs[:1]), device) for _ in range(4 * rounds)]  # type: ignore[misc]
            finally:
                engine.close()
            figures.add(
                **names,
                way=engine.way,
                texts_per_s=len(inputs) / min(own_s),
                padded_texts_per_s=len(inputs) / min(seconds[1:]),
                of_padded=min(seconds[1:]) / min(own_s),
                alone_ms=1000 * sorted(alone_s)[len(alone_s) // 2],
                distance=1 - lowest_cosine(vectors, expected),
            )


if __name__ == "__main__":
    main(read_options(__doc__))
