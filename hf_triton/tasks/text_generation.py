# SPDX-License-Identifier: Apache-2.0
"""Text generation: a checked request becomes sequences for the engine, and their tokens become texts.

Knows no Triton: the answer goes to a callback.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from hf_triton.engine.interface import Engine, Outcome, Sequence
from hf_triton.errors import HfTritonError, RequestError, UnavailableError, where
from hf_triton.generation import GenerationParameters, SamplingPlan, parse_parameters, settle
from hf_triton.settings import ModelSettings
from hf_triton.text import TextCodec
from hf_triton.wire import GenerationRequest

if TYPE_CHECKING:
    from hf_triton.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

NUM_TOKENIZER_THREADS = 2  # tokenizers run outside the interpreter's lock: a long prompt does not hold up a short one

Answer = Callable[[list[str] | HfTritonError], None]
"""Takes the texts of all prompts in order, or the error of the whole request."""


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
        self._context_length = context_length
        self._is_encoder_decoder = is_encoder_decoder
        self._defaults = defaults
        self._max_output_length = max_output_length
        self._max_rows = max_rows
        self._excludes_prompt = excludes_prompt
        self._tokenizers = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="hf_triton-tokenizer")

    def submit(self, request: GenerationRequest, answer: Answer, is_cancelled: Callable[[], bool]) -> None:
        """Start on a request and return at once; `answer` is called exactly once, in another thread.

        Args:
            request: One or many prompts; an error of one is the answer of all, and nothing is generated.
            answer: Where the texts go.
            is_cancelled: Asked now and then.
        """
        try:
            self._tokenizers.submit(self._begin, request, answer, is_cancelled)
        except RuntimeError:  # the pool is shut down
            answer(UnavailableError("shutting_down", "the model is being unloaded: send the request again later"))

    def is_healthy(self) -> bool:
        """Whether requests can be taken."""
        return self._engine.is_healthy()

    def close(self) -> None:
        """Answer everything that is still waiting, then stop."""
        self._tokenizers.shutdown(wait=True)
        self._engine.close()

    def _begin(self, request: GenerationRequest, answer: Answer, is_cancelled: Callable[[], bool]) -> None:
        try:
            prompts = [self._codec.encode(text, row) for row, text in enumerate(request.prompts)]
            plans = [
                self._plan(row, len(ids), parameters)
                for row, (ids, parameters) in enumerate(zip(prompts, request.parameters, strict=True))
            ]
            gathering = _Gathering(len(prompts), partial(self._finish, request, prompts, answer))
        except HfTritonError as error:
            answer(error)
            return
        except BaseException as error:  # a panic in the tokenizer's Rust code is no Exception
            logger.error("preparing a request failed: %s", where(error))
            answer(HfTritonError("internal", "the request could not be prepared; the server's log says why"))
            return
        for row, (ids, plan) in enumerate(zip(prompts, plans, strict=True)):
            self._engine.submit(Sequence(ids, plan, partial(gathering.put, row), is_cancelled))

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
        asked = next((each.max_new_tokens for each in (parameters, *self._defaults) if each.max_new_tokens), None)
        if asked is not None and asked > room:
            raise RequestError(
                "context_exceeded",
                f"text_input row {row} has {num_prompt_tokens} tokens, which leaves room for max_new_tokens <= {room} "
                f"in the context of {self._context_length}, got {asked}",
            )
        fallback = GenerationParameters(max_new_tokens=min(self._max_output_length, room))
        plan = settle(parameters, *self._defaults, fallback)
        if plan.num_return_sequences > self._max_rows:
            raise RequestError(
                "invalid_parameter",
                f"num_return_sequences must be <= {self._max_rows} here (setting max_batch_rows), "
                f"got {plan.num_return_sequences}",
            )
        return plan

    def _finish(
        self, request: GenerationRequest, prompts: list[list[int]], answer: Answer, outcomes: list[Outcome]
    ) -> None:
        """All sequences of a request are done: put its texts together. Runs in the engine's thread."""
        try:
            answer(self._texts(request, prompts, outcomes))
        except HfTritonError as error:
            answer(error)
        except BaseException as error:  # as above
            logger.error("putting an answer together failed: %s", where(error))
            answer(HfTritonError("internal", "the answer could not be put together; the server's log says why"))

    def _texts(self, request: GenerationRequest, prompts: list[list[int]], outcomes: list[Outcome]) -> list[str]:
        excludes_prompt = request.exclude_input_in_output
        if excludes_prompt is None:
            excludes_prompt = self._excludes_prompt
        texts = []
        for prompt, ids, outcome in zip(request.prompts, prompts, outcomes, strict=True):
            if isinstance(outcome, HfTritonError):
                raise outcome
            texts += [self._text(prompt, ids, completion.token_ids, excludes_prompt) for completion in outcome]
        return texts

    def _text(self, prompt: str, prompt_ids: list[int], token_ids: list[int], excludes_prompt: bool) -> str:
        if self._is_encoder_decoder:
            return self._codec.completion(token_ids)
        continuation = self._codec.continuation(prompt_ids, token_ids)
        return continuation if excludes_prompt else prompt + continuation


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

    engine = build_engine(
        checkpoint.model,
        settings.engine,
        max_rows=settings.max_batch_rows,
        context_length=checkpoint.context_length,
        on_fatal=on_fatal,
    )
    return TextGeneration(
        engine,
        TextCodec(checkpoint.tokenizer, checkpoint.vocabulary_size),
        context_length=checkpoint.context_length,
        is_encoder_decoder=checkpoint.is_encoder_decoder,
        defaults=(parse_parameters(settings.generation_defaults), checkpoint.generation_defaults()),
        max_output_length=settings.max_output_length,
        max_rows=settings.max_batch_rows,
        excludes_prompt=settings.exclude_input_in_output,
    )


class _Gathering:
    """Collects the outcomes of a request's sequences, in row order, and tells when the last is in."""

    def __init__(self, num_rows: int, on_complete: Callable[[list[Outcome]], None]) -> None:
        self._outcomes: list[Outcome | None] = [None] * num_rows
        self._num_missing = num_rows
        self._on_complete = on_complete
        self._lock = threading.Lock()

    def put(self, row: int, outcome: Outcome) -> None:
        """Take one row's outcome."""
        with self._lock:
            self._outcomes[row] = outcome
            self._num_missing -= 1
            is_last = self._num_missing == 0
        if is_last:
            self._on_complete([each for each in self._outcomes if each is not None])
