# SPDX-License-Identifier: Apache-2.0
"""The way back of one request: tokens become pieces and texts, and the outcomes of its prompts one answer.

Knows neither engine nor Triton: the answer goes to a `Reply`.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

from hf_triton.engine.types import Completion, FinishReason, Outcome
from hf_triton.errors import CancelledError, HfTritonError, where
from hf_triton.protocol.responses import GeneratedOutput
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Constraint, LogitsProcessor, TokenLogprobs
from hf_triton.tasks.hooks import CheckedHooks
from hf_triton.tasks.text_generation.resolve import RequestParams
from hf_triton.tasks.text_generation.tokenizer import TextCodec, TextStream, up_to_stop

logger = logging.getLogger(__name__)

FINISH_REASONS: Final[dict[FinishReason, str]] = {
    "eos": "stop",
    "stop_string": "stop",
    "length": "length",
    "deadline": "deadline",
}
"""The engine's reasons, and what clients know them by."""
MAX_QUICK_TOKENS: Final = 4096
"""New tokens of an answer that is made at once, in some 20 ms."""
MAX_QUICK_LOGPROBS: Final = 256
"""Of them and of prompt tokens those with log probabilities."""
LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity; the number is OpenAI's


class Reply(Protocol):
    """Where the answer to a request goes. Called in the engine's thread as a rule, so it must be quick.

    Either `finish` or `refuse` is called, once and last.
    """

    def start(self, num_texts: int) -> None:
        """A stream of so many texts begins. Called for streams alone, once, before anything else."""

    def add(self, text: int, piece: str) -> None:
        """A text goes on with a piece that is not empty. Called for streams alone.

        Args:
            text: Which: the number of the prompt times `num_return_sequences`, plus that of the prompt's text.
            piece: Joined, a text's pieces and what `finish` has of it are the text.
        """

    def finish(self, make_texts: Callable[[], list[GeneratedOutput]], *, takes_long: bool) -> None:
        """There is an answer: the texts of all prompts in order.

        Args:
            make_texts: Writes them; raises an `HfTritonError`, which is the answer then.
            takes_long: Whether others should not wait for it.
        """

    def refuse(self, error: HfTritonError) -> None:
        """The whole request ends with an error."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request, checked."""

    front: str
    """What its texts begin with: itself, or nothing."""
    ids: list[int]
    preceding_ids: list[int]
    """The tokens that its texts follow: its own, or none where the model writes apart (T5)."""
    plan: SamplingParams
    task: RequestParams
    constraint: Callable[[], Constraint] | None = None
    """Makes what each of its texts may hold; None: anything."""


class ResponseBuilder:
    """Collects what becomes of a request's prompts and gives its one answer: with the last of them, or the first error.

    Args:
        prompts: At least one.
        codec: The model's tokenizer.
        reply: Where the answer goes.
        is_cancelled: Whether the client gave the request up.
        hooks: The folder's own.
        streams: Whether the texts go out piece by piece.
        run_aside: Runs what may take long in another thread.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        codec: TextCodec,
        reply: Reply,
        is_cancelled: Callable[[], bool],
        *,
        hooks: CheckedHooks,
        streams: bool,
        run_aside: Callable[[Callable[[], None]], object],
    ) -> None:
        self._prompts = prompts
        self._codec = codec
        self._reply = reply
        self._is_cancelled = is_cancelled
        self._hooks = hooks
        self._run_aside = run_aside
        listener = reply if streams and not hooks.overrides("postprocess") else None
        self._writers = [PromptOutputs(codec, prompt, hooks, listener, row) for row, prompt in enumerate(prompts)]
        if streams:
            reply.start(sum(prompt.plan.num_sequences for prompt in prompts))
        self._completions: dict[int, list[Completion]] = {}
        self._is_answered = False
        self._is_made = False
        self._lock = threading.Lock()

    def is_given_up(self) -> bool:
        """Whether nobody waits for the request any more."""
        return self._is_answered or self._is_cancelled()

    def listener(self, row: int) -> Callable[[int, int], bool] | None:
        """What must hear the tokens of a prompt's texts, in the engine's thread; None: nobody."""
        writer = self._writers[row]
        if not writer.is_needed:
            return None

        def on_token(copy: int, token_id: int) -> bool:
            try:
                return writer.push(copy, token_id)
            except BaseException as error:  # a panic in the tokenizer's Rust code is no Exception
                self.refuse(fault("reading a new token", error))
                return True

        return on_token

    def logits_processor(self) -> LogitsProcessor | None:
        """The folder's own for one text. Where it fails, the request is refused, and the engine notices nothing."""
        try:
            processor = self._hooks.logits_processor()
        except HfTritonError as error:
            self.refuse(error)
            return None
        if processor is None:
            return None

        def process(token_ids: list[int], scores: Any) -> Any:
            if self._is_answered:
                return scores
            try:
                return processor(token_ids, scores)
            except HfTritonError as error:
                self.refuse(error)
                return scores

        return process

    def put(self, row: int, outcome: Outcome) -> None:
        """Take one prompt's outcome."""
        if isinstance(outcome, HfTritonError):
            self.refuse(outcome)
            return
        with self._lock:
            self._completions[row] = outcome
            is_complete = len(self._completions) == len(self._prompts)
        if is_complete and self._is_first_answer():
            if self._hooks.overrides("postprocess"):  # nobody knows how long that takes
                self._finish_aside()
            else:
                self._reply.finish(self._all_texts, takes_long=self._takes_long())

    def refuse(self, error: HfTritonError) -> None:
        """Answer with an error; the request's other prompts are given up."""
        if self._is_first_answer():
            self._reply.refuse(error)

    def _is_first_answer(self) -> bool:
        with self._lock:
            was_answered, self._is_answered = self._is_answered, True
        return not was_answered

    def _finish_aside(self) -> None:
        try:
            self._run_aside(self._finish_made)
        except RuntimeError as error:  # there is no thread to be had; one that comes later may still find this
            if self._is_first_making():
                self._reply.refuse(fault("calling postprocess", error))

    def _is_first_making(self) -> bool:
        with self._lock:
            was_made, self._is_made = self._is_made, True
        return not was_made

    def _finish_made(self) -> None:
        """Make the texts, then hand them over."""
        if not self._is_first_making():
            return
        try:
            texts = self._all_texts()
        except HfTritonError as error:
            self._reply.refuse(error)
        else:
            self._reply.finish(lambda: texts, takes_long=self._takes_long())

    def _takes_long(self) -> bool:
        """Whether the answer takes long to write and to send."""
        completions = [each for row in self._completions.values() for each in row]
        num_tokens = sum(len(each.token_ids) for each in completions)
        num_logprobs = sum(len(each.logprobs or ()) + len(each.prompt_logprobs or ()) for each in completions)
        return num_tokens > MAX_QUICK_TOKENS or num_logprobs > MAX_QUICK_LOGPROBS

    def _all_texts(self) -> list[GeneratedOutput]:
        try:
            return [text for row in range(len(self._prompts)) for text in self._texts(row)]
        except BaseException as error:  # as above
            raise fault("putting the answer together", error) from None

    def _texts(self, row: int) -> list[GeneratedOutput]:
        """The texts of one prompt."""
        if self._is_cancelled():
            raise CancelledError
        writer, completions = self._writers[row], self._completions[row]
        found = completions[0].prompt_logprobs  # the others' are the same
        prompt_logprobs = None if found is None else _logprobs_json(self._codec, [None, *found])
        return [self._text(writer, copy, each, prompt_logprobs) for copy, each in enumerate(completions)]

    def _text(
        self, writer: PromptOutputs, copy: int, completion: Completion, prompt_logprobs: str | None
    ) -> GeneratedOutput:
        logprobs = completion.logprobs
        text, is_stopped = writer.finish(copy, completion)
        return GeneratedOutput(
            text=text,
            finish_reason="stop" if is_stopped else FINISH_REASONS[completion.finish_reason],
            num_input_tokens=len(writer.prompt.ids),
            num_output_tokens=len(completion.token_ids),
            cumulative_logprob=sum(each.logprob for each in logprobs or ()),
            logprobs="" if logprobs is None else _logprobs_json(self._codec, logprobs),
            prompt_logprobs=prompt_logprobs,
        )


class PromptOutputs:
    """Writes the texts of one prompt.

    Args:
        codec: The model's tokenizer.
        prompt: The prompt.
        hooks: The folder's own.
        reply: Where pieces go; None: the texts go out whole.
        row: The prompt's number.
    """

    def __init__(self, codec: TextCodec, prompt: Prompt, hooks: CheckedHooks, reply: Reply | None, row: int) -> None:
        self.prompt = prompt
        self._codec = codec
        self._hooks = hooks
        self._has_rule = hooks.overrides("is_complete") and prompt.constraint is None
        self._reply = reply
        self._first_text = row * prompt.plan.num_sequences
        self.is_needed = reply is not None or self._has_rule or bool(prompt.task.stop_strings)
        """Whether it must hear every token."""
        self._streams: list[TextStream] = (
            [codec.stream(prompt.preceding_ids, prompt.task.stop_strings) for _ in range(prompt.plan.num_sequences)]
            if self.is_needed
            else []
        )
        self._fronts = [prompt.front] * prompt.plan.num_sequences  # what is still to be sent before the first piece
        self._texts = [""] * prompt.plan.num_sequences  # so far, for the folder's own stopping rule

    def push(self, copy: int, token_id: int) -> bool:
        """Write a token; whether the text ends with it."""
        stream = self._streams[copy]
        piece = stream.push(token_id)
        if self._reply is not None and (piece or self._fronts[copy]):
            self._reply.add(self._first_text + copy, self._fronts[copy] + piece)
            self._fronts[copy] = ""
        return stream.is_stopped or self._is_complete(copy, piece)

    def _is_complete(self, copy: int, piece: str) -> bool:
        if not (self._has_rule and piece):
            return False
        self._texts[copy] += piece
        return self._hooks.is_complete(self._texts[copy])

    def finish(self, copy: int, completion: Completion) -> tuple[str, bool]:
        """The text; of a stream, what was not in its pieces. And whether a stop string ended it.

        That may be known only now: `bc` is not looked at within `abc` while that may become `abcd`.
        """
        if self._reply is not None:
            rest = self._streams[copy].finish()
            return self._fronts[copy] + rest, self._streams[copy].is_stopped
        # Not of the stream's own making: `best_of` has reordered the completions.
        prompt = self.prompt
        whole = self._codec.continuation(prompt.preceding_ids, completion.token_ids)
        text = up_to_stop(whole, prompt.task.stop_strings)
        return prompt.front + self._hooks.postprocess(text), len(text) < len(whole)


def _logprobs_json(codec: TextCodec, logprobs: Iterable[TokenLogprobs | None]) -> str:
    """Log probabilities in the vLLM backend's form: for each place an object of tokens by their ids, or null.

    Place by place, because `json` lets no other thread run: a long prompt has a hundred thousand entries.
    """
    decoded = cache(lambda token_id: codec.decode([token_id]))
    return f"[{', '.join(json.dumps(each and _place(decoded, each)) for each in logprobs)}]"


def _place(decoded: Callable[[int], str], found: TokenLogprobs) -> dict[int, dict[str, object]]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(found.top, start=1)}
    return {
        token_id: {
            "logprob": logprob if math.isfinite(logprob) else LEAST_LOGPROB,
            "rank": ranks.get(token_id),
            "decoded_token": decoded(token_id),
        }
        for token_id, logprob in {found.token_id: found.logprob, **dict(found.top)}.items()
    }


def fault(doing: str, error: BaseException) -> HfTritonError:
    """An error of ours as it is, else a fault of our own: where it was goes to the log."""
    if isinstance(error, HfTritonError):
        return error
    logger.error("%s failed: %s", doing, where(error))
    return HfTritonError("internal", f"{doing} failed; the server's log says where")
