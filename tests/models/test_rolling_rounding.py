# SPDX-License-Identifier: Apache-2.0
"""In bfloat16 and float16 a batch's shape changes the last bits: the rolling engine rounds no worse than `generate`.

Beside a padded batch of `generate`, a text's log probabilities stray from those of the text alone by some rounding. The
engine's stray by as much, and a text differs from the one alone only after a tie that is nearer than that.
"""

from typing import Any

import pytest
import torch

from hf_triton.engine.interface import Completion
from hf_triton.engine.rolling import RollingEngine
from hf_triton.generation import SamplingPlan
from hf_triton.runner.padding import pad
from hf_triton.testing import build_tiny_checkpoint
from tests.models.test_rolling_engine import Client, prompts
from tests.reference import load_reference

NUM_NEW = 24
ITEMS = prompts(32, seed=31)
SLACK = 2  # the largest of so many roundings, beside the largest of so many others


def alone_and_beside(model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log probabilities `[steps, vocabulary]` float32 of each text by `generate`: alone, and in padded batches of 8."""
    return [run(model, [prompt])[0] for prompt in ITEMS], [
        each for start in range(0, len(ITEMS), 8) for each in run(model, ITEMS[start : start + 8])
    ]


def run(model: Any, batch: list[list[int]]) -> list[torch.Tensor]:
    input_ids, attention_mask = pad(batch, 0, torch.device("cpu"), at_left=True)
    output = model.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        max_new_tokens=NUM_NEW,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return list(torch.stack(output.logits, dim=1).float().log_softmax(-1))


def rounding(alone: torch.Tensor, others: list[int], logprobs: list[float]) -> tuple[float, float]:
    """How far another run strays while the texts are equal, and the gap of the tie where they part."""
    largest = 0.0
    for scores, token_id, logprob in zip(alone, others, logprobs, strict=True):
        if token_id != int(scores.argmax()):
            return largest, float(scores.max() - scores[token_id])
        largest = max(largest, abs(float(scores[token_id]) - logprob))
    return largest, 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "falcon", "gpt_neox"])
def test_half_precision_rounds_as_in_padded_generate(architecture: str, dtype: torch.dtype, tmp_path: Any) -> None:
    build_tiny_checkpoint(tmp_path, architecture, eos_token_id=None)
    model = load_reference(tmp_path).model.to(dtype)
    alone, beside = alone_and_beside(model)
    engine = RollingEngine(model, max_rows=8)
    client = Client(engine)
    for prompt in ITEMS:
        client.submit(prompt, SamplingPlan(NUM_NEW, logprobs=0))
    completions = [outcome[0] for outcome in client.outcomes() if isinstance(outcome, list)]
    engine.close()
    padded = [
        rounding(scores, each.argmax(-1).tolist(), each.max(-1).values.tolist())
        for scores, each in zip(alone, beside, strict=True)
    ]
    rolling = [rounding(scores, *plain(each)) for scores, each in zip(alone, completions, strict=True)]
    allowed = SLACK * max(largest for largest, _ in padded)
    assert max(largest for largest, _ in rolling) <= allowed
    assert max(gap for _, gap in rolling) <= 2 * allowed  # both tokens of a tie are rounded


def plain(completion: Completion) -> tuple[list[int], list[float]]:
    assert completion.logprobs is not None
    return completion.token_ids, [each.logprob for each in completion.logprobs]
