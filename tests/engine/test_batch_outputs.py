# SPDX-License-Identifier: Apache-2.0
"""The batch engine generates what `model.generate` generates for each prompt alone, with the checkpoint's defaults."""

from pathlib import Path
from typing import Any

import pytest

from hf_triton.engine.sequence import Completion
from hf_triton.hub.checkpoint import Checkpoint
from hf_triton.protocol.parameters import parse_parameters
from hf_triton.runner.batch_probe import Sharing, probe_batching
from hf_triton.sampling.params import SamplingParams
from hf_triton.tasks.text_generation.resolve import resolve_sampling_params
from hf_triton.testing import build_tiny_checkpoint
from tests.support.architectures import BASE, build
from tests.support.batch_engine import FilledEngine, GenerateSpy, Submission, draw_prompts, mixed_submissions
from tests.support.engine import LoadModel
from tests.support.marks import full
from tests.support.reference import load_reference, solo_ids

SHARING = {"rwkv": "alone"}
"""What the probe finds; `padded` for all others."""


@pytest.mark.parametrize("architecture", ["llama", "rwkv", "t5", *full("gpt2", "bloom", "bart")])
def test_greedy_output_is_that_of_generate_in_any_batch(architecture: str, model_of: LoadModel) -> None:
    model = model_of(architecture)
    submissions = mixed_submissions(12)
    expected = [submission.expected_ids(model) for submission in submissions]
    sharing = probe_batching(model)
    assert sharing == SHARING.get(architecture, "padded")
    spy = GenerateSpy(model)
    with FilledEngine(spy, sharing) as filled:
        filled.run(submissions)
    assert [submission.token_ids for submission in submissions] == expected
    assert (max(spy.batch_sizes) > 1) == (sharing != "alone")


@pytest.mark.parametrize(
    ("sharing", "possible_batches"), [("padded", [1]), ("equal_length", range(2, 8)), ("alone", [8])]
)
def test_every_kind_of_sharing_gives_the_same_output(sharing: Sharing, possible_batches: list[int], llama: Any) -> None:
    submissions = [Submission(ids, SamplingParams(8)) for ids in [*draw_prompts(6, longest=3), *([[7, 8, 9]] * 2)]]
    spy = GenerateSpy(llama)
    with FilledEngine(spy, sharing) as filled:
        filled.run(submissions)
    assert [each.token_ids for each in submissions] == [each.expected_ids(llama) for each in submissions]
    assert len(spy.batch_sizes) in possible_batches


@pytest.mark.parametrize("penalty", [0.1, 1.5])
def test_a_repetition_penalty_does_not_see_the_padding(penalty: float, llama: Any) -> None:
    """Below 1 it favours tokens of the context: in short prompts beside a long one that would be the padding."""
    params = SamplingParams(6, repetition_penalty=penalty)
    submissions = [Submission(ids, params) for ids in [*draw_prompts(1), *([token] for token in range(10, 40))]]
    expected = [submission.expected_ids(llama) for submission in submissions]
    with FilledEngine(llama) as filled:
        filled.run(submissions)
    assert [submission.token_ids for submission in submissions] == expected


def test_max_num_seqs_bounds_every_batch(llama: Any) -> None:
    spy = GenerateSpy(llama)
    with FilledEngine(spy, max_num_seqs=4) as filled:
        filled.run([Submission(ids, SamplingParams(4)) for ids in draw_prompts(11)])
    assert spy.batch_sizes == [4, 4, 3]


CHECKPOINT_DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no_repeat_ngram_size": ("llama", {"no_repeat_ngram_size": 2}),
    "min_length": ("llama", {"min_length": 30}),
    "min_new_tokens": ("llama", {"min_new_tokens": 8}),
    "bad_words_ids": ("llama", {"bad_words_ids": [[0, 7, 338], [9]]}),
    "sequence_bias": ("llama", {"sequence_bias": [[[0, 7, 50], 100.0]]}),
    "suppress_tokens": ("llama", {"suppress_tokens": list(range(3, 200))}),
    "begin_suppress_tokens": ("llama", {"begin_suppress_tokens": list(range(3, 200))}),
    "exponential_decay_length_penalty": ("llama", {"exponential_decay_length_penalty": (3, 1.8)}),
    "forced_eos_token_id": ("llama", {"forced_eos_token_id": 1}),
    "forced_bos_token_id": ("bart", {"forced_bos_token_id": 9}),
    "encoder_no_repeat_ngram_size": ("bart", {"encoder_no_repeat_ngram_size": 1}),
    "encoder_repetition_penalty": ("t5", {"encoder_repetition_penalty": 1000.0}),
    "several eos ids": ("llama", {"eos_token_id": [1, *range(100, 140)]}),
    "min_new_tokens and min_length": (
        "llama",
        {"min_new_tokens": 3, "min_length": 60, "eos_token_id": [1, *range(100, 240)]},
    ),
    "no eos id": ("llama", {"eos_token_id": None}),
    "beams": ("llama", {"num_beams": 3}),
    "max_length": ("llama", {"max_length": 5}),
    "return_dict_in_generate": ("llama", {"return_dict_in_generate": True, "output_scores": True}),
    "sampling": ("llama", {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
    "prompt lookup": ("llama", {"prompt_lookup_num_tokens": 3}),
    "min_length, encoder-decoder": ("bart", {"min_length": 12, "no_repeat_ngram_size": 2}),
    "repetition_penalty": ("llama", {"repetition_penalty": 0.7}),
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")  # transformers' own, of one short row
@pytest.mark.parametrize("name", CHECKPOINT_DEFAULTS)
def test_checkpoint_defaults_apply_to_each_sequence_alone(
    name: str, model_of: LoadModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, defaults = CHECKPOINT_DEFAULTS[name]
    model = model_of(architecture)
    for key, value in defaults.items():
        monkeypatch.setattr(model.generation_config, key, value)
    own = Checkpoint(None, model, 4096).generation_defaults()
    submissions = [
        Submission(ids, resolve_sampling_params(parse_parameters({"max_new_tokens": length, "do_sample": False}), own))
        for ids, length in [
            *((each.prompt_ids, each.params.max_new_tokens) for each in mixed_submissions(10)),
            ([7], 8),
        ]
    ]
    expected = [solo_ids(model, each.prompt_ids, each.params.max_new_tokens) for each in submissions]
    with FilledEngine(model) as filled:
        filled.run(submissions)
    assert [submission.token_ids for submission in submissions] == [[ids] for ids in expected]


def test_a_request_can_switch_off_checkpoint_defaults(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = draw_prompts(6)
    plain = [[solo_ids(llama, ids, 12)] for ids in prompts]
    neutral: dict[str, object] = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0}
    for name, value in {"repetition_penalty": 3.0, "no_repeat_ngram_size": 1, "min_new_tokens": 11}.items():
        monkeypatch.setattr(llama.generation_config, name, value)
    own = Checkpoint(None, llama, 4096).generation_defaults()
    params = [resolve_sampling_params(parse_parameters({"max_new_tokens": 12, **off}), own) for off in (neutral, {})]
    submissions = [Submission(ids, each) for each in params for ids in prompts]
    with FilledEngine(llama) as filled:
        filled.run(submissions)
    outputs = [submission.token_ids for submission in submissions]
    assert outputs[:6] == plain
    assert outputs[6:] == [[solo_ids(llama, ids, 12)] for ids in prompts]
    assert outputs[6:] != plain


def test_finish_reason_is_eos_or_length(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = solo_ids(llama, [5, 6, 7], 6)
    end = max(ids.index(token_id) for token_id in ids)  # the last token that is new
    monkeypatch.setattr(llama.generation_config, "eos_token_id", [ids[end]])
    stopped, cut = Submission([5, 6, 7], SamplingParams(6)), Submission([5, 6, 7], SamplingParams(end))
    with FilledEngine(llama) as filled:
        filled.run([stopped, cut])
    assert stopped.outcome == [Completion(ids[:end], "eos")]
    assert cut.outcome == [Completion(ids[:end], "length")]


def test_no_batch_exceeds_the_context_length(tmp_path: Path) -> None:
    spy = GenerateSpy(load_reference(build_tiny_checkpoint(tmp_path, "gpt2", n_positions=64)).model)
    submissions = [
        Submission([5] * 60, SamplingParams(4)),
        Submission([6] * 4, SamplingParams(60)),
        Submission([7] * 50, SamplingParams(4)),
    ]
    with FilledEngine(spy, context_length=64) as filled:
        filled.run(submissions)
    assert spy.batch_sizes == [2, 1]  # the long prompts together, the long completion alone; none twice
    assert all(isinstance(submission.outcome, list) for submission in submissions)


def test_a_prompt_of_one_token_continues_no_earlier_sequence() -> None:
    sizes = {"lru_width": 32, "attention_window_size": 16, "num_hidden_layers": 3}
    model = build("RecurrentGemmaConfig", BASE | sizes)
    first, second = [Submission([5], SamplingParams(8)) for _ in range(2)]
    with FilledEngine(model, "equal_length") as filled:
        filled.run([first])
        filled.run([Submission([7, 90, 30, 41] * 9, SamplingParams(20))])
        filled.run([second])
    assert first.token_ids == second.token_ids
