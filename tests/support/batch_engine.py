# SPDX-License-Identifier: Apache-2.0
"""The batch engine with a full queue, what is submitted to it, and models that show or fail its calls."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.sequence import Completion, Outcome, SequenceGroup
from hf_triton.errors import HfTritonError
from hf_triton.runner.batch_probe import Sharing
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import TokenLogprobs
from hf_triton.testing.checkpoints import VOCAB_SIZE
from tests.support.engine import WAIT_S, token_ids
from tests.support.listener import group_of
from tests.support.reference import solo_ids

FIRST_PLAIN_ID = 3  # below are special tokens


class GenerateSpy:
    """A model that passes the input of every call of `generate` to a function, which may raise."""

    def __init__(self, model: Any, look: Callable[[torch.Tensor], None] = lambda input_ids: None) -> None:
        self._model = model
        self._look = look
        self.batch_sizes: list[int] = []
        """Of each call, oldest first."""

    def generate(self, *, input_ids: torch.Tensor, **arguments: Any) -> Any:
        self.batch_sizes.append(len(input_ids))
        self._look(input_ids)
        return self._model.generate(input_ids=input_ids, **arguments)

    def __call__(self, **arguments: Any) -> Any:
        return self._model(**arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class FailingForward:
    """While entered, the model raises in a forward pass for which `is_wrong(input_ids)` is true."""

    def __init__(self, model: Any, is_wrong: Callable[[torch.Tensor], bool], error: Exception) -> None:
        self._model, self._is_wrong, self._error = model, is_wrong, error

    def _check(self, _: object, __: object, arguments: dict[str, Any]) -> None:
        if self._is_wrong(arguments["input_ids"]):
            raise self._error

    def __enter__(self) -> None:
        self._handle = self._model.register_forward_pre_hook(self._check, with_kwargs=True)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


@dataclass
class Submission:
    """One prompt, the tokens that its listener gets, and its outcomes: a list, to notice a second one."""

    prompt_ids: list[int]
    params: SamplingParams
    on_token: Callable[["Submission"], bool] = lambda submission: False
    """Called after a token was added to `heard`."""
    heard: list[tuple[int, int]] = field(default_factory=list)
    """Index of the sequence and token of each call of the listener."""
    outcomes: list[Outcome] = field(default_factory=list)
    is_done: threading.Event = field(default_factory=threading.Event)

    def group(self, is_cancelled: Callable[[], bool] = lambda: False, **arguments: Any) -> SequenceGroup:
        return group_of(
            self.prompt_ids,
            self.params,
            on_token=self._hear,
            on_finish=self._finish,
            is_cancelled=is_cancelled,
            **arguments,
        )

    def _finish(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.is_done.set()

    def _hear(self, index: int, token_id: int, _: TokenLogprobs | None) -> bool:
        self.heard.append((index, token_id))
        return self.on_token(self)

    @property
    def outcome(self) -> Outcome:
        assert self.is_done.wait(WAIT_S), "no outcome"
        assert len(self.outcomes) == 1, "more than one outcome"
        return self.outcomes[0]

    @property
    def completions(self) -> list[Completion]:
        outcome = self.outcome
        assert not isinstance(outcome, HfTritonError), outcome
        return outcome

    @property
    def token_ids(self) -> list[list[int]]:
        return token_ids(self.outcome)

    @property
    def heard_ids(self) -> list[list[int]]:
        """The tokens that the listener got, by sequence."""
        return [[token_id for at, token_id in self.heard if at == index] for index in range(self.params.num_sequences)]

    def expected_ids(self, model: Any) -> list[list[int]]:
        """What `model.generate` generates for the prompt alone, greedily."""
        penalty = self.params.repetition_penalty
        return [solo_ids(model, self.prompt_ids, self.params.max_new_tokens, repetition_penalty=penalty)]


class FilledEngine:
    """A batch engine that starts when its queue is filled, so that whatever can share a batch does."""

    def __init__(self, model: Any, sharing: Sharing = "padded", **options: Any) -> None:
        options = {"max_num_seqs": 32, "context_length": 4096, **options}
        self.engine = BatchEngine(model, EngineOptions(**options), sharing)

    def submit(self, *groups: SequenceGroup) -> None:
        with self.engine.queue.changed:  # the engine takes nothing before all are queued
            for group in groups:
                self.engine.submit([group])

    def run(self, submissions: list[Submission]) -> None:
        self.submit(*(submission.group() for submission in submissions))
        for submission in submissions:
            assert submission.is_done.wait(WAIT_S), "no outcome"

    def __enter__(self) -> "FilledEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


def draw_prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    source = random.Random(seed)
    return [
        [source.randrange(FIRST_PLAIN_ID, VOCAB_SIZE) for _ in range(source.randint(1, longest))] for _ in range(count)
    ]


def mixed_submissions(count: int, seed: int = 0) -> list[Submission]:
    """Greedy, with prompts and lengths of all kinds, some with a repetition penalty."""
    source = random.Random(seed)
    return [
        Submission(ids, SamplingParams(source.randint(1, 16), repetition_penalty=(1.0, 0.2, 1.3, 1.0)[at % 4]))
        for at, ids in enumerate(draw_prompts(count, seed))
    ]


def sampled_submissions(num_pairs: int = 5) -> list[Submission]:
    """Sampled with a seed and greedy by turns, short and long."""
    source = random.Random(num_pairs)
    sampled = [
        SamplingParams(
            source.randint(1, 14),
            do_sample=True,
            temperature=source.choice([0.7, 1.5, 5.0]),
            top_p=source.choice([0.5, 0.9, 1.0]),
            top_k=source.choice([0, 5, 50]),
            seed=source.randrange(100),
            repetition_penalty=source.choice([1.0, 1.3]),
            num_return_sequences=source.choice([1, 1, 2, 3]),
        )
        for _ in range(num_pairs)
    ]
    greedy = [SamplingParams(source.randint(1, 14), repetition_penalty=source.choice([1.0, 0.5])) for _ in sampled]
    params = (each for pair in zip(sampled, greedy, strict=True) for each in pair)
    return [Submission(ids, each) for ids, each in zip(draw_prompts(2 * num_pairs), params, strict=True)]
