# SPDX-License-Identifier: Apache-2.0
"""Text generation: a checked request becomes sequences for the engine, and their tokens become texts.

Knows no Triton: the answer goes to a callback.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from hf_triton.engine.interface import Completion, Engine, Outcome, Sequence
from hf_triton.errors import HfTritonError, RequestError, UnavailableError, where
from hf_triton.generation import (
    GenerationParameters,
    SamplingPlan,
    TaskPlan,
    check_token_ids,
    parse_parameters,
    settle,
    settle_task,
)
from hf_triton.settings import ModelSettings
from hf_triton.text import TextCodec
from hf_triton.wire import GenerationRequest

if TYPE_CHECKING:
    from hf_triton.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

NUM_TOKENIZER_THREADS = 2  # tokenizers run outside the interpreter's lock: a long prompt does not hold up a short one
NUM_BAD_WORDS_KEPT = 32  # the prompts of a request, and often the requests of a client, have the same ones

Answer = Callable[[list[str] | HfTritonError], None]
"""Takes the texts of all prompts in order, or the error of the whole request."""


@dataclass(frozen=True)
class _Prompt:
    """One prompt of a request, checked."""

    ids: list[int]
    plan: SamplingPlan
    task: TaskPlan


class TextGeneration:
    """Turns requests into texts.

    Args:
        engine: Runs the sequences. It is closed with this task.
        codec: The model's tokenizer.
        context_length: Tokens that a prompt and its continuation may have together.
        is_encoder_decoder: Whether the model reads the prompt and writes apart (T5): the two are bounded each, and the
            answer does not contain the prompt.
        defaults: The folder's and the checkpoint's parameters, the first that says something winning.
        max_output_length: New tokens where nobody says how many.
        max_rows: Texts that one prompt may ask for.
        excludes_prompt: Whether the answer leaves the prompt out where the request does not say.
    """

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        *,
        context_length: int,
        is_encoder_decoder: bool,
        defaults: tuple[GenerationParameters, ...],
        max_output_length: int,
        max_rows: int,
        excludes_prompt: bool,
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._encode_bad_words = lru_cache(NUM_BAD_WORDS_KEPT)(codec.encode_bad_words)
        self._context_length = context_length
        self._is_encoder_decoder = is_encoder_decoder
        self._defaults = defaults
        self._max_output_length = max_output_length
        self._max_rows = max_rows
        self._excludes_prompt = excludes_prompt
        self._tokenizers = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="hf_triton-tokenizer")

    def submit(
        self,
        request: GenerationRequest,
        answer: Answer,
        is_cancelled: Callable[[], bool],
        timeout_s: float | None = None,
    ) -> None:
        """Start on a request and return at once; `answer` is called exactly once, in another thread.

        Args:
            request: One or many prompts; an error of one is the answer of all, and the others are given up.
            answer: Where the texts go.
            is_cancelled: Asked at every token; true gives the request up.
            timeout_s: Seconds from now that its prompts may take, as `max_time` does; None: as long as it takes.
        """
        arrival_s = time.monotonic()
        try:
            self._tokenizers.submit(self._begin, request, answer, is_cancelled, arrival_s, timeout_s)
        except RuntimeError:  # the pool is shut down
            answer(UnavailableError("shutting_down", "the model is being unloaded: send the request again later"))

    def is_healthy(self) -> bool:
        """Whether requests can be taken."""
        return self._engine.is_healthy()

    def close(self) -> None:
        """Answer everything that is still waiting, then stop."""
        self._tokenizers.shutdown(wait=True)
        self._engine.close()

    def _begin(
        self,
        request: GenerationRequest,
        answer: Answer,
        is_cancelled: Callable[[], bool],
        arrival_s: float,
        timeout_s: float | None,
    ) -> None:
        try:
            ids = [self._codec.encode(text, row) for row, text in enumerate(request.prompts)]
            rows = zip(ids, request.parameters, strict=True)
            prompts = [self._prompt(row, *each) for row, each in enumerate(rows)]
            gathering = _Gathering(len(prompts), partial(self._texts, request, prompts), answer, is_cancelled)
            sequences = [
                self._sequence(row, prompt, gathering, arrival_s, timeout_s) for row, prompt in enumerate(prompts)
            ]
        except HfTritonError as error:
            answer(error)
        except BaseException as error:  # a panic in the tokenizer's Rust code is no Exception
            answer(_fault("preparing the request", error))
        else:
            self._engine.submit(sequences)

    def _sequence(
        self, row: int, prompt: _Prompt, gathering: _Gathering, arrival_s: float, timeout_s: float | None
    ) -> Sequence:
        times_s = [time_s for time_s in (prompt.task.max_time_s, timeout_s) if time_s is not None]
        return Sequence(
            prompt.ids,
            prompt.plan,
            on_finish=partial(gathering.put, row),
            is_cancelled=gathering.is_given_up,
            on_token=self._stop_listener(prompt, gathering) if prompt.task.stop_strings else None,
            deadline_s=arrival_s + min(times_s) if times_s else None,
            priority=prompt.task.queue_priority,
        )

    def _stop_listener(self, prompt: _Prompt, gathering: _Gathering) -> Callable[[int, int], bool]:
        """What watches a prompt's texts for stop strings, in the engine's thread."""
        streams = [
            self._codec.stream(self._preceding(prompt), prompt.task.stop_strings) for _ in range(prompt.plan.num_rows)
        ]

        def on_token(copy: int, token_id: int) -> bool:
            try:
                streams[copy].push(token_id)
                return streams[copy].is_stopped
            except BaseException as error:  # as above; the engine serves others too
                gathering.refuse(_fault("reading a new token", error))
                return True

        return on_token

    def _preceding(self, prompt: _Prompt) -> list[int]:
        """The tokens that a prompt's texts follow."""
        return [] if self._is_encoder_decoder else prompt.ids

    def _prompt(self, row: int, ids: list[int], parameters: GenerationParameters) -> _Prompt:
        plan, task = self._plan(row, len(ids), parameters), settle_task(parameters, *self._defaults)
        check_token_ids(plan, self._codec.vocabulary_size)
        return _Prompt(ids, replace(plan, bad_words_ids=self._encode_bad_words(task.bad_words)), task)

    def _plan(self, row: int, num_prompt_tokens: int, parameters: GenerationParameters) -> SamplingPlan:
        """The settled plan of one prompt, checked against the context.

        Raises:
            RequestError: The prompt, or the prompt and the new tokens asked for, do not fit.
        """
        room = self._context_length - (0 if self._is_encoder_decoder else num_prompt_tokens)
        if num_prompt_tokens > self._context_length or room < 1:
            raise RequestError(
                "context_exceeded",
                f"text_input row {row} has {num_prompt_tokens} tokens, and the context of {self._context_length} must "
                "hold the prompt and at least one new token",
            )
        most = next((each.max_new_tokens for each in (parameters, *self._defaults) if each.max_new_tokens), None)
        for name, asked in (("max_new_tokens", most), ("min_new_tokens", parameters.min_new_tokens)):
            if asked is not None and asked > room:
                raise RequestError(
                    "context_exceeded",
                    f"text_input row {row} has {num_prompt_tokens} tokens, which leaves room for {name} <= {room} "
                    f"in the context of {self._context_length}, got {asked}",
                )
        fallback = GenerationParameters(max_new_tokens=min(self._max_output_length, room))
        plan = settle(parameters, *self._defaults, fallback)
        if plan.num_rows > self._max_rows:
            name = "num_return_sequences" if plan.best_of is None else "best_of"
            raise RequestError(
                "invalid_parameter",
                f"{name} must be <= {self._max_rows} here (setting max_batch_rows), got {plan.num_rows}",
            )
        return plan

    def _texts(
        self, request: GenerationRequest, prompts: list[_Prompt], completions: list[list[Completion]]
    ) -> list[str]:
        excludes_prompt = request.exclude_input_in_output
        if excludes_prompt is None:
            excludes_prompt = self._excludes_prompt
        texts = []
        for text, prompt, copies in zip(request.prompts, prompts, completions, strict=True):
            front = "" if excludes_prompt or self._is_encoder_decoder else text
            texts += [front + self._text(prompt, completion) for completion in copies]
        return texts

    def _text(self, prompt: _Prompt, completion: Completion) -> str:
        return self._codec.continuation(self._preceding(prompt), completion.token_ids, prompt.task.stop_strings)


def build_text_generation(
    checkpoint: Checkpoint, settings: ModelSettings, on_fatal: Callable[[], None]
) -> TextGeneration:
    """The task of a loaded checkpoint, its engine running.

    Args:
        checkpoint: Model and tokenizer.
        settings: The folder's.
        on_fatal: Called after the engine has failed for good.
    """
    from hf_triton.engine.choose import build_engine

    codec = TextCodec(checkpoint.tokenizer, checkpoint.vocabulary_size)
    engine = build_engine(
        checkpoint.model,
        settings.engine,
        max_rows=settings.max_batch_rows,
        max_waiting=settings.max_waiting_prompts,
        max_cache_tokens=settings.max_cache_tokens,
        shares_prefixes=settings.share_prefixes,
        decoding=settings.decoding,
        context_length=checkpoint.context_length,
        on_fatal=on_fatal,
    )
    return TextGeneration(
        engine,
        codec,
        context_length=checkpoint.context_length,
        is_encoder_decoder=checkpoint.is_encoder_decoder,
        defaults=(parse_parameters(settings.generation_defaults), checkpoint.generation_defaults()),
        max_output_length=settings.max_output_length,
        max_rows=settings.max_batch_rows,
        excludes_prompt=settings.exclude_input_in_output,
    )


class _Gathering:
    """Collects the outcomes of a request's prompts and gives its one answer: with the last of them, or the first error.

    Args:
        num_prompts: How many outcomes to wait for.
        make_texts: Makes the texts of all completions, in prompt order. Runs in the engine's thread.
        answer: Called exactly once.
        is_cancelled: Whether the client gave the request up.
    """

    def __init__(
        self,
        num_prompts: int,
        make_texts: Callable[[list[list[Completion]]], list[str]],
        answer: Answer,
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._completions: dict[int, list[Completion]] = {}
        self._num_prompts = num_prompts
        self._make_texts = make_texts
        self._answer = answer
        self._is_cancelled = is_cancelled
        self._is_answered = False
        self._lock = threading.Lock()

    def is_given_up(self) -> bool:
        """Whether nobody waits for the request any more."""
        return self._is_answered or self._is_cancelled()

    def put(self, row: int, outcome: Outcome) -> None:
        """Take one prompt's outcome."""
        if isinstance(outcome, HfTritonError):
            self.refuse(outcome)
            return
        with self._lock:
            self._completions[row] = outcome
            is_complete = len(self._completions) == self._num_prompts and not self._is_answered
        if is_complete:
            self._complete()

    def refuse(self, error: HfTritonError) -> None:
        """Answer with an error; the request's other prompts are given up."""
        self._deliver(error)

    def _complete(self) -> None:
        try:
            texts = self._make_texts([self._completions[row] for row in range(self._num_prompts)])
        except BaseException as error:  # a panic in the tokenizer's Rust code is no Exception
            self.refuse(_fault("putting the answer together", error))
        else:
            self._deliver(texts)

    def _deliver(self, result: list[str] | HfTritonError) -> None:
        with self._lock:
            was_answered, self._is_answered = self._is_answered, True
        if not was_answered:
            self._answer(result)


def _fault(doing: str, error: BaseException) -> HfTritonError:
    """A fault of our own: where it was goes to the log."""
    logger.error("%s failed: %s", doing, where(error))
    return HfTritonError("internal", f"{doing} failed; the server's log says where")
