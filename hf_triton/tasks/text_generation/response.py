# SPDX-License-Identifier: Apache-2.0
"""The response to one request: tokens become deltas, and the outcomes of its prompts one final response.

Knows neither engine nor Triton: deltas and response go to an `InferenceRequest`, from the sender's thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from hf_triton.engine.sequence import Completion, FinishReason, Outcome, SequenceGroup, SequenceListener
from hf_triton.errors import CancelledError, HfTritonError, as_own_error, panics_as_errors
from hf_triton.grammar.constraint import OwnConstraint
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.protocol.response_outputs import encode_timings
from hf_triton.sampling.types import Constraint, LogitsProcessor, TokenLogprobs
from hf_triton.tasks.interface import ResponseConfig
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.text_generation.detokenizer import MarkedTextStream, TextStream, up_to_stop
from hf_triton.tasks.text_generation.message import REASONING_CONTENT, MessagePlan, MessageReader
from hf_triton.tasks.text_generation.outputs import UNFINISHED, OutputEncoder, Piece
from hf_triton.tasks.text_generation.prepare import PreparedPrompt, PromptPreparer

MAX_QUICK_TOKENS: Final = 4096
"""New tokens of a response that the sender's thread builds itself, in 20 ms."""
MAX_QUICK_LOGPROBS: Final = 256
"""The same for tokens with log probabilities, the prompt's included."""
CUT: Final[tuple[FinishReason, ...]] = ("length", "deadline")
"""What ends a completion that the model would have continued."""


@dataclass
class _Writing:
    """One sequence while it is generated."""

    stream: TextStream
    unsent: str
    """What a stream sends before the first delta."""
    reader: MessageReader | None
    seen: str = ""
    """The text that a stopping rule has seen."""
    piece: Piece = field(default_factory=Piece)
    """What is new since the last send."""
    num_sent_tokens: int = 0
    reasoning: str = ""
    """The message's so far."""

    def take_piece(self) -> Piece:
        """What is new, which is sent now."""
        piece, self.piece = self.piece, Piece()
        self.num_sent_tokens += len(piece.token_ids)
        return piece

    def read(self, text: str, ended_by: FinishReason | None = None) -> dict[str, Any]:
        """Read new text, the last if `ended_by` says why the completion has ended. Returns the message's delta."""
        if self.reader is None:
            return {}
        self.reader.feed(text)
        if ended_by is not None:
            self.reader.finish(is_cut=ended_by in CUT)
        delta = self.reader.take()
        self.reasoning += delta.get(REASONING_CONTENT, "")
        return delta


class GenerationResponse(SequenceListener):
    """Collects the outcomes of a request's prompts and sends its one final response: with the last, or the first error.

    Args:
        pool: Builds the responses that take long, so that the sender's thread does not wait.
    """

    def __init__(
        self,
        request: InferenceRequest,
        checked: GenerationRequest,
        config: ResponseConfig,
        preparer: PromptPreparer,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.request = request
        self.checked = checked
        self.streams = config.streams_if(checked.options.stream)
        self.prompts: list[PreparedPrompt] = []
        """The prompts that are prepared, in order."""
        self._config = config
        self._encoder = OutputEncoder(checked, config.output_names, preparer)
        self._codec = preparer.codec
        self._hooks, self._overridden = preparer.hooks, preparer.overridden
        self._pool = pool
        self._sends_deltas = self.streams and "postprocess" not in self._overridden
        self._sends_tokens = self._sends_deltas and bool(
            checked.options.return_token_ids or checked.options.return_logprobs
        )
        self._writing: list[list[_Writing]] = []  # by prompt and sequence; empty if no token is decoded before the end
        self._groups: list[weakref.ref[SequenceGroup]] = []
        """The engine's, which know this response: it frees them when they have ended."""
        self._has_queued_deltas = self._has_sent = False
        self._has_begun: set[int] = set()
        """The completions with text that was sent, counted through all prompts."""
        self._num_scores = 0
        self._completions: dict[int, list[Completion]] = {}
        self._has_ended = False
        self._lock = threading.Lock()

    def has_ended(self) -> bool:
        """Whether the request is answered, cancelled or out of time; if so, it is refused."""
        if not self._has_ended and (error := self.request.ending()) is not None:
            self.refuse(error)
        return self._has_ended

    def is_cancelled(self) -> bool:
        """Whether the engine can drop the request's sequences. Cheap: asked at every step."""
        return self._has_ended or self.request.is_cancelled()

    # --- the engine's side -------------------------------------------------------------------------------------------

    def begin(self) -> list[SequenceGroup]:
        """The engine's sequence groups, one for each of the prepared prompts."""
        groups = [self._sequence_group(row, prompt) for row, prompt in enumerate(self.prompts)]
        self._groups = [weakref.ref(group) for group in groups]
        return groups

    def _sequence_group(self, row: int, prompt: PreparedPrompt) -> SequenceGroup:
        asked, params = prompt.asked, prompt.params
        listens = self._sends_deltas or bool(asked.stop_strings) or self._has_stopping_rule(prompt)
        num_written = params.num_sequences if listens and params.num_beams == 1 else 0
        self._writing.append([self._begin_writing(prompt) for _ in range(num_written)])
        return SequenceGroup(
            prompt.ids,
            params,
            listener=self,
            row=row,
            listens_to_tokens=listens,
            constraint=partial(self._constraint, prompt.constraint) if prompt.constraint else None,
            deadline_s=self.request.deadline_s(asked.max_time_s),
            priority=asked.queue_priority,
            adapter=prompt.adapter,
            images=prompt.images,
            cache_salt=asked.cache_salt,
            times=self.request.times,
        )

    def _constraint(self, build: Callable[[], Constraint]) -> Constraint:
        """A sequence's own. If it fails, the request is refused, and the engine continues."""
        return OwnConstraint(build(), self.refuse)

    def _begin_writing(self, prompt: PreparedPrompt) -> _Writing:
        plan = prompt.message_plan
        reader = plan.build_reader() if self._sends_deltas and plan is not None else None
        return _Writing(self._text_stream(prompt), prompt.text, reader)

    def _text_stream(self, prompt: PreparedPrompt) -> TextStream:
        before, stops, has_stop = prompt.preceding_ids, prompt.asked.stop_strings, prompt.asked.includes_stop
        if self._sends_deltas and prompt.message_plan is not None and (markers := prompt.message_plan.markers):
            return self._codec.marked_stream(before, stops, markers, includes_stop=has_stop)
        return self._codec.stream(before, stops, includes_stop=has_stop)

    def _has_stopping_rule(self, prompt: PreparedPrompt) -> bool:
        return "is_complete" in self._overridden and prompt.asked.grammar is None

    def logits_processor(self) -> LogitsProcessor | None:
        """The folder's own for one sequence. If it fails, the request is refused, and the engine continues."""
        if "logits_processor" not in self._overridden:
            return None
        try:
            processor = self._hooks.logits_processor()
        except HfTritonError as error:
            self.refuse(error)
            return None
        if processor is None:
            return None

        def process(token_ids: list[int], scores: Any) -> Any:
            if self._has_ended:
                return scores
            try:
                return processor(token_ids, scores)
            except HfTritonError as error:
                self.refuse(error)
                return scores

        return process

    def on_token(self, row: int, index: int, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Decode a token of a sequence. Returns whether the sequence ends with it."""
        writing = self._writing[row][index]
        stream = writing.stream
        try:
            with panics_as_errors():
                delta = stream.push(token_id)
            if self._sends_tokens:
                with self._lock:
                    writing.piece.token_ids.append(token_id)
                    writing.piece.logprobs += [] if logprobs is None else [logprobs]
            if self._sends_deltas and (delta or writing.unsent):
                self._add_delta(writing, delta)
            if stream.is_stopped or not (delta and self._has_stopping_rule(self.prompts[row])):
                return stream.is_stopped
            writing.seen += delta
            return self._hooks.is_complete(writing.seen)
        except Exception as error:
            self.refuse(as_own_error("decoding a token", error))
            return True

    def is_complete(self, row: int, token_ids: list[int]) -> bool:
        """Whether a hypothesis of beam search ends with its last token."""
        prompt = self.prompts[row]
        try:
            with panics_as_errors():
                whole = self._codec.continuation(prompt.preceding_ids, token_ids)
            if up_to_stop(whole, prompt.asked.stop_strings, includes_stop=False)[1]:
                return True
            return self._has_stopping_rule(prompt) and self._hooks.is_complete(whole)
        except Exception as error:
            self.refuse(as_own_error("decoding a token", error))
            return True

    def on_finish(self, row: int, outcome: Outcome) -> None:
        """Take the outcome of one prompt; with the last one, the response is sent."""
        if isinstance(outcome, HfTritonError):
            self.refuse(outcome)
            return
        with self._lock:
            self._completions[row] = outcome
            is_complete = len(self._completions) == len(self.prompts)
        if is_complete:
            self._config.sender.put(self._send_from_pool if self._takes_long() else self._send)

    def refuse(self, error: HfTritonError) -> None:
        """End the response with an error, after the deltas so far; the request's other prompts are dropped."""
        if self._end():
            self._config.sender.put(partial(self._send_error, error))

    def _end(self) -> bool:
        """Claim the final response; only the first caller may send it."""
        with self._lock:
            had_ended, self._has_ended = self._has_ended, True
        return not had_ended

    def _takes_long(self) -> bool:
        completions = [completion for row in self._completions.values() for completion in row]
        num_logprobs = sum(len(each.logprobs or ()) + len(each.prompt_logprobs or ()) for each in completions)
        return (
            sum(len(completion.token_ids) for completion in completions) > MAX_QUICK_TOKENS
            or num_logprobs > MAX_QUICK_LOGPROBS
            or "postprocess" in self._overridden
            or bool(self.checked.options.return_message)
        )

    def _add_delta(self, writing: _Writing, delta: str) -> None:
        """Queue a delta of a sequence; deltas that the sender has not sent yet are sent together."""
        with self._lock:
            writing.piece.text += writing.unsent + delta
            if writing.reader is not None:
                writing.piece.unread += _marked(writing.stream, delta)
            writing.unsent = ""
            was_queued, self._has_queued_deltas = self._has_queued_deltas, True
        if not was_queued:
            self._config.sender.put(self._send_deltas)

    # --- the sender's side -------------------------------------------------------------------------------------------

    def _send_deltas(self) -> None:
        """Send what is new, if any sequence has text; tokens without text wait for the next one."""
        if not self._sends_deltas:
            return
        writing = [(prompt, each) for prompt, row in zip(self.prompts, self._writing, strict=False) for each in row]
        with self._lock:
            self._has_queued_deltas = False
            if not any(each.piece.text for _, each in writing):
                return
            pieces = [each.take_piece() for _, each in writing]
        for (_, each), piece in zip(writing, pieces, strict=True):
            piece.message = each.read(piece.unread)
        self._add_prompt_scores(pieces)
        deltas = [(prompt, piece) for (prompt, _), piece in zip(writing, pieces, strict=True)]
        outputs = self._encoder.encode_deltas(deltas, is_first=not self._has_sent)
        self._has_sent = True
        self.request.add(outputs)

    def _add_prompt_scores(self, pieces: list[Piece]) -> None:
        """Add the log probabilities of prompts to the pieces with which completions begin, unless they are many.

        Then the last response alone has them, which the pool builds.
        """
        rows = [row for row, writing in enumerate(self._writing) for _ in writing]
        for number, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            group, completions = self._groups[row](), self._completions.get(row)
            scores = (
                group.prompt_logprobs if group is not None else completions[0].prompt_logprobs if completions else None
            )
            if piece.text and number not in self._has_begun and scores is not None:
                self._has_begun.add(number)
                self._num_scores += len(scores)
                if self._num_scores <= MAX_QUICK_LOGPROBS:
                    piece.completion = replace(UNFINISHED, prompt_logprobs=scores)

    def _send_from_pool(self) -> None:
        """Send the final response from the pool, after the deltas that the sender's thread has sent."""
        try:
            self._pool.submit(self._send)
        except RuntimeError:  # the pool is shut down, or no thread is available
            self._send()

    def _send(self) -> None:
        if not self._end():
            return
        try:
            self._send_deltas()
            if self.request.is_cancelled():
                self.request.refuse(CancelledError())
                return
            with panics_as_errors():
                outputs = self._encoder.encode(
                    [
                        (prompt, self._last_piece(row, index, completion))
                        for row, prompt in enumerate(self.prompts)
                        for index, completion in enumerate(self._completions[row])
                    ]
                )
            self.request.answer(outputs, self._timings() if self.checked.options.return_timings else {})
        except Exception as error:  # want of memory, for a long response
            self.request.refuse(as_own_error("building the response", error))

    def _timings(self) -> dict[str, int]:
        times = self.request.times
        return encode_timings(
            times.arrival_s,
            admitted_s=times.admitted_s,
            first_token_s=times.first_token_s,
            answered_s=time.monotonic(),
        )

    def _send_error(self, error: HfTritonError) -> None:
        try:
            self._send_deltas()
        finally:
            self.request.refuse(error)

    def _last_piece(self, row: int, index: int, completion: Completion) -> Piece:
        """A completion, or of a stream what no delta had.

        A stop string may be known only now: with `bc` and `abcd`, `abc` stops once no more tokens follow.
        """
        prompt = self.prompts[row]
        if self.checked.options.tokenize_only:
            return Piece(prompt.text, completion=completion)
        if self._sends_deltas:
            writing = self._writing[row][index]
            rest, num_sent = writing.stream.finish(), writing.num_sent_tokens
            text, stop_string = writing.unsent + rest, writing.stream.stop_string
            message = writing.read(_marked(writing.stream, rest), completion.finish_reason)
            reasoning = writing.reasoning
        else:  # not from `writing`: `best_of` has reordered the completions
            whole = self._codec.continuation(prompt.preceding_ids, completion.token_ids)
            new, stop_string = up_to_stop(whole, prompt.asked.stop_strings, includes_stop=prompt.asked.includes_stop)
            message = {} if prompt.message_plan is None else self._message(prompt, prompt.message_plan, new, completion)
            reasoning = message.get(REASONING_CONTENT, "")
            new = self._hooks.postprocess(new) if "postprocess" in self._overridden else new
            text, num_sent = prompt.text + new, 0
        return Piece(
            text,
            token_ids=completion.token_ids[num_sent:],
            logprobs=(completion.logprobs or [])[num_sent:],
            message=message,
            reasoning=reasoning,
            stop_string=stop_string,
            completion=completion,
        )

    def _message(self, prompt: PreparedPrompt, plan: MessagePlan, text: str, completion: Completion) -> dict[str, Any]:
        """The whole message of a completion; for a stream in the form of a delta."""
        asked = prompt.asked
        if not plan.markers.keys().isdisjoint(completion.token_ids):
            stream = self._codec.marked_stream(
                prompt.preceding_ids, asked.stop_strings, plan.markers, includes_stop=asked.includes_stop
            )
            for token_id in completion.token_ids:
                stream.push(token_id)
            stream.finish()
            text = stream.take_marked()
        reader = plan.build_reader()
        reader.feed(text)
        reader.finish(is_cut=completion.finish_reason in CUT)
        message = reader.take() if self.streams else reader.message()
        if message.get("content"):
            message["content"] = self._hooks.postprocess(message["content"])
        return message


def _marked(stream: TextStream, text: str) -> str:
    """New text of a stream, with the special tokens that a message's reader has to see."""
    return stream.take_marked() if isinstance(stream, MarkedTextStream) else text
