# SPDX-License-Identifier: Apache-2.0
"""In bfloat16 and float16 a batch's shape changes the last bits: the continuous engine rounds no worse than `generate`.

The logprobs of every sequence are compared with those that the same weights give it in float64. The engine's differ
from them by no more than those of `generate` do, alone or in padded batches, and its tokens differ from those of
`generate` only after a tie that is nearer than that.
"""

import copy
from typing import Any

import pytest
import torch

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.sequence import Completion
from hf_triton.runner.padding import pad
from hf_triton.runner.way_probe import find_way
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint
from tests.support.engine import Client, prompts
from tests.support.marks import full
from tests.support.reference import load_reference

NUM_NEW = 24
ITEMS = prompts(32, seed=31)
SLACK = 2  # both sides are the largest of many roundings


OTHER_KERNELS = (("falcon", torch.bfloat16),)
"""`generate` has the same bits there, alone and padded, by torch's plain products; the engine calls a fused kernel."""

Scored = tuple[list[int], list[float]]
"""Tokens, and the logprob of each."""


def generate(model: Any, width: int) -> list[Scored]:
    return [each for start in range(0, len(ITEMS), width) for each in run(model, ITEMS[start : start + width])]


def run(model: Any, batch: list[list[int]]) -> list[Scored]:
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
    scores = torch.stack(output.logits, dim=1).float().log_softmax(-1)
    return [(each.argmax(-1).tolist(), each.max(-1).values.tolist()) for each in scores]


def generate_continuous(model: Any) -> list[Scored]:
    way = find_way(model).way
    assert way is not None
    engine = ContinuousBatchingEngine(model, EngineOptions(max_num_seqs=8), way)
    client = Client(engine)
    for prompt in ITEMS:
        client.submit(prompt, SamplingParams(NUM_NEW, logprobs=0))
    completions = [outcome[0] for outcome in client.outcomes() if isinstance(outcome, list)]
    engine.close()
    return [scored(each) for each in completions]


def scored(completion: Completion) -> Scored:
    assert completion.logprobs is not None
    return completion.token_ids, [each.logprob for each in completion.logprobs]


@torch.inference_mode()
def exact_scores(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log probabilities `[steps, vocabulary]` after a prompt and after each of the tokens but the last."""
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].log_softmax(-1)


def largest_rounding(model: Any, outputs: list[Scored]) -> float:
    """The largest distance of the logprobs from the exact ones."""
    distances = []
    for prompt, (tokens, logprobs) in zip(ITEMS, outputs, strict=True):
        exact = exact_scores(model, prompt, tokens).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        distances.append((exact - torch.tensor(logprobs)).abs().max().item())
    return max(distances)


def largest_difference(outputs: list[Scored], others: list[Scored]) -> float:
    """The largest distance of the logprobs from those of `others` while the tokens are equal."""
    distances = [0.0]
    for one, other in zip(outputs, others, strict=True):
        for token_id, logprob, other_id, other_logprob in zip(*one, *other, strict=True):
            if token_id != other_id:
                break
            distances.append(abs(logprob - other_logprob))
    return max(distances)


def largest_gap(model: Any, outputs: list[Scored], others: list[Scored]) -> float:
    """The largest exact distance of two tokens at which outputs diverge."""
    distances = [0.0]
    for prompt, (tokens, _), (other_tokens, _) in zip(ITEMS, outputs, others, strict=True):
        parted = [place for place, (one, other) in enumerate(zip(tokens, other_tokens, strict=True)) if one != other]
        if parted:
            scores = exact_scores(model, prompt, tokens)[parted[0]]
            distances.append(abs(float(scores[tokens[parted[0]]] - scores[other_tokens[parted[0]]])))
    return max(distances)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *full(torch.float16)], ids=str)
@pytest.mark.parametrize(
    "architecture",
    ["llama", *full("falcon", "persimmon", "gpt_neox")],
)
def test_half_precision_rounds_as_in_generate(architecture: str, dtype: torch.dtype, tmp_path: Any) -> None:
    build_tiny_checkpoint(tmp_path, architecture, eos_token_id=None)
    model = load_reference(tmp_path).model.to(dtype)
    exact = copy.deepcopy(model).double()
    alone, padded, continuous = generate(model, 1), generate(model, 8), generate_continuous(model)
    allowed = SLACK * max(largest_rounding(exact, alone), largest_rounding(exact, padded))
    assert 0 < largest_rounding(exact, continuous) <= allowed
    assert largest_gap(exact, alone, continuous) <= 2 * allowed  # both tokens of a tie are rounded
    if (architecture, dtype) not in OTHER_KERNELS:
        assert largest_difference(continuous, alone) <= SLACK * largest_difference(padded, alone)
