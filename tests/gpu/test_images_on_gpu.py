# SPDX-License-Identifier: Apache-2.0
"""Images on a GPU: features are computed eagerly; decoding behind them replays graphs, positions of axes included."""

import copy

import pytest
import torch

from hf_triton.runner.model_comparison import distance
from hf_triton.runner.reference import logits_after
from hf_triton.runner.step import Step, TokenRange
from tests.gpu.conftest import Replays
from tests.support.image_models import Prompt, build_seeing, expected, make_runner, make_sample, way_of

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "qwen3.5", "gemma3", "mistral3"])
def test_decoding_behind_images_replays(name: str, replays: Replays) -> None:
    """Beside text, in graphs of two tokens and of one; a step with an image replays its text."""
    plain = build_seeing(name)
    sample = make_sample(name, plain, (0, 1))
    runner = make_runner(copy.deepcopy(plain).to("cuda"), way_of(name))
    assert runner.capture(4) is None
    num_trials = len(replays.sizes)
    prompt = Prompt(runner, sample)
    text = [7, 9, 11, 13, 17]

    def decode(at: int) -> TokenRange:
        return TokenRange(3, at, at + 1, text[at : at + 1], [3], at + 1, samples=(3,), slot=3)

    runner.run(Step((TokenRange(3, 0, 3, text[:3], [3], 3, slot=3),)))
    middle = sample.images.images[1].start
    first, second, third = prompt.decodes()
    end = len(sample.prompt_ids)
    before = len(replays.sizes)
    steps = [
        (prompt.range(0, middle),),
        (decode(3), prompt.range(middle, end)),
        (decode(4), first),
        (second,),
        (third,),
    ]
    logits = [runner.run(Step(ranges)).clone() for ranges in steps]
    assert num_trials <= before
    assert [size.num_tokens for size in replays.sizes[before:]] == [1, 2, 1, 1]
    found = torch.stack([logits[1][1], logits[2][1], logits[3][0], logits[4][0]]).cpu()
    assert distance(expected(plain, sample), found) < 1e-4
    texts = torch.stack([logits[1][0], logits[2][0]]).cpu()
    assert distance(logits_after(plain, [text[:3]], [text[3:]])[1:, 0], texts) < 1e-4
