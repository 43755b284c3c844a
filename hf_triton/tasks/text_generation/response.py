# SPDX-License-Identifier: Apache-2.0
"""The response to one request: tokens become deltas, and the outcomes of its prompts one final response.

Knows neither engine nor Triton: deltas and response go to an `InferenceRequest`, from the sender's thread.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

from hf_triton.engine.sequence import Completion, FinishReason, Outcome, SequenceGroup
from hf_triton.errors import CancelledError, HfTritonError, as_own_error, panics_as_errors
from hf_triton.protocol.ports import JSON_OUTPUT, LEGACY_TEXT, MESSAGE, PROMPT_LOGPROBS, TEXT
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.protocol.responses import encode_deltas, encode_outputs, encode_timings
from hf_triton.sampling.types import LogitsProcessor, TokenLogprobs
from hf_triton.tasks.interface import ResponseConfig
from hf_triton.tasks.request import InferenceRequest
from hf_triton.tasks.text_generation.detokenizer import MarkedTextStream, TextStream, up_to_stop
from hf_triton.tasks.text_generation.message import MessagePlan, MessageReader
from hf_triton.tasks.text_generation.prepare import PromptPreparer
from hf_triton.tasks.text_generation.resolve import PreparedPrompt

FINISH_REASONS: Final[dict[FinishReason, str]] = {
    "eos": "stop",
    "stop_string": "stop",
    "length": "length",
    "deadline": "deadline",
}
"""The engine's finish reasons, and the clients' names for them."""
MAX_QUICK_TOKENS: Final = 4096
"""New tokens of a response that the sender's thread builds itself, in 20 ms."""
MAX_QUICK_LOGPROBS: Final = 256
"""The same for tokens with log probabilities, the prompt's included."""
LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity; the number is OpenAI's


@dataclass
class _News:
    """What a sequence of a stream has new since the last send."""

    text: str = ""
    unread: str = ""
    """The same for the reader of its message."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add_token(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)


class GenerationResponse:
    """Collects the outcomes of a request's prompts and sends its one final response: with the last, or the first error.

    Args:
        request: What is answered.
        checked: The same, checked.
        config: How the folder's requests are answered.
        preparer: Has the model's tokenizer and the folder's hooks.
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
        self._codec = preparer.codec
        self._hooks = preparer.hooks
        self._text_field = preparer.text_field
        self._describe_tokens = preparer.describe_tokens
        self._pool = pool
        self._sends_deltas = self.streams and not self._hooks.overrides("postprocess")
        self._sends_tokens = self._sends_deltas and bool(
            checked.options.return_token_ids or checked.options.return_logprobs
        )
        self._news: list[_News] = []  # one for each sequence of a stream
        self._readers: list[MessageReader] = []  # likewise, if it has messages
        self._num_sent_tokens: list[int] = []
        self._has_queued_deltas = self._has_sent = False
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
        if self._sends_deltas:
            self._news = [_News() for prompt in self.prompts for _ in range(prompt.params.num_sequences)]
            self._num_sent_tokens = [0] * len(self._news)
            self._readers = [
                prompt.message_plan.build_reader()
                for prompt in self.prompts
                if prompt.message_plan is not None
                for _ in range(prompt.params.num_sequences)
            ]
        return [self._sequence_group(row, prompt) for row, prompt in enumerate(self.prompts)]

    def _sequence_group(self, row: int, prompt: PreparedPrompt) -> SequenceGroup:
        stops = bool(prompt.stop_strings) or self._has_stopping_rule(prompt)
        searches = prompt.params.num_beams > 1
        if (self._sends_deltas or stops) and not searches:
            num_sequences = prompt.params.num_sequences
            prompt.streams = [self._text_stream(prompt) for _ in range(num_sequences)]
            for stream in prompt.streams:
                stream.unsent = prompt.text
        return SequenceGroup(
            prompt.ids,
            prompt.params,
            on_finish=partial(self.finish, row),
            is_cancelled=self.is_cancelled,
            on_token=partial(self._on_token, row) if prompt.streams else None,
            is_complete=partial(self._is_complete, prompt) if searches and stops else None,
            constraint=prompt.constraint,
            deadline_s=self.request.deadline_s(prompt.max_time_s),
            logits_processor=self.logits_processor,
            priority=prompt.queue_priority,
            adapter=prompt.adapter,
            times=self.request.times,
        )

    def _text_stream(self, prompt: PreparedPrompt) -> TextStream:
        before, stops, has_stop = prompt.preceding_ids, prompt.stop_strings, prompt.includes_stop
        if self._sends_deltas and prompt.message_plan is not None and (markers := prompt.message_plan.markers):
            return self._codec.marked_stream(before, stops, markers, includes_stop=has_stop)
        return self._codec.stream(before, stops, includes_stop=has_stop)

    def _has_stopping_rule(self, prompt: PreparedPrompt) -> bool:
        return prompt.constraint is None and self._hooks.overrides("is_complete")

    def logits_processor(self) -> LogitsProcessor | None:
        """The folder's own for one sequence. If it fails, the request is refused, and the engine continues."""
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

    def _on_token(self, row: int, index: int, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Decode a token of a sequence. Returns whether the sequence ends with it."""
        prompt = self.prompts[row]
        stream = prompt.streams[index]
        try:
            with panics_as_errors():
                delta = stream.push(token_id)
            if self._sends_tokens:
                with self._lock:
                    self._news[row * prompt.params.num_sequences + index].add_token(token_id, logprobs)
            if self._sends_deltas and (delta or stream.unsent):
                self._add_delta(row * prompt.params.num_sequences + index, stream, delta)
                stream.unsent = ""
            if stream.is_stopped or not (delta and self._has_stopping_rule(prompt)):
                return stream.is_stopped
            stream.text += delta
            return self._hooks.is_complete(stream.text)
        except Exception as error:
            self.refuse(as_own_error("decoding a token", error))
            return True

    def _is_complete(self, prompt: PreparedPrompt, token_ids: list[int]) -> bool:
        """Whether a hypothesis of beam search ends with its last token."""
        try:
            with panics_as_errors():
                whole = self._codec.continuation(prompt.preceding_ids, token_ids)
            if up_to_stop(whole, prompt.stop_strings, includes_stop=False)[1]:
                return True
            return self._has_stopping_rule(prompt) and self._hooks.is_complete(whole)
        except Exception as error:
            self.refuse(as_own_error("decoding a token", error))
            return True

    def finish(self, row: int, outcome: Outcome) -> None:
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
        """Whether the response takes long to build and to send."""
        completions = [completion for row in self._completions.values() for completion in row]
        num_logprobs = sum(len(each.logprobs or ()) + len(each.prompt_logprobs or ()) for each in completions)
        return (
            sum(len(completion.token_ids) for completion in completions) > MAX_QUICK_TOKENS
            or num_logprobs > MAX_QUICK_LOGPROBS
            or self._hooks.overrides("postprocess")
            or bool(self.checked.options.return_message)
        )

    def _add_delta(self, index: int, stream: TextStream, delta: str) -> None:
        """Queue a delta of a sequence; deltas that the sender has not sent yet are sent together."""
        with self._lock:
            self._news[index].text += stream.unsent + delta
            if self._readers:
                self._news[index].unread += _marked(stream, delta)
            was_queued, self._has_queued_deltas = self._has_queued_deltas, True
        if not was_queued:
            self._config.sender.put(self._send_deltas)

    # --- the sender's side -------------------------------------------------------------------------------------------

    def _send_deltas(self) -> None:
        """Send what is new, if any sequence has text; tokens without text wait for the next one."""
        with self._lock:
            self._has_queued_deltas = False
            news = self._news
            if not any(new.text for new in news):
                return
            self._news = [_News() for _ in news]
            for index, new in enumerate(news):
                self._num_sent_tokens[index] += len(new.token_ids)
        deltas = [self._delta(index, new) for index, new in enumerate(news)]
        self._has_sent = True
        self.request.add(encode_deltas(deltas, self.checked, self._config.output_names))

    def _delta(self, index: int, new: _News) -> dict[str, Any]:
        """The outputs of a sequence that the stream's next response has."""
        options = self.checked.options
        delta: dict[str, Any] = {TEXT: new.text, LEGACY_TEXT: new.text}
        if self._readers:
            delta[MESSAGE] = json.dumps(_read(self._readers[index], new.unread))
        if options.return_token_ids:
            delta["token_ids"] = json.dumps(new.token_ids)
        if options.return_logprobs:
            delta["logprobs"] = self._logprobs_json(new.logprobs)
        if not self._has_sent:
            prompt_ids = [prompt.ids for prompt in self.prompts for _ in range(prompt.params.num_sequences)][index]
            if options.return_num_input_tokens:
                delta["num_input_tokens"] = len(prompt_ids)
            if options.return_prompt_token_ids:
                delta["prompt_token_ids"] = json.dumps(prompt_ids)
        return delta

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
                outputs = encode_outputs(self._outputs(), self.checked, self._config.output_names)
            times = self.request.times
            timings = encode_timings(
                times.arrival_s,
                admitted_s=times.admitted_s,
                first_token_s=times.first_token_s,
                answered_s=time.monotonic(),
            )
            self.request.answer(outputs, timings if self.checked.options.return_timings else {})
        except Exception as error:  # want of memory, for a long response
            self.request.refuse(as_own_error("building the response", error))

    def _send_error(self, error: HfTritonError) -> None:
        try:
            self._send_deltas()
        finally:
            self.request.refuse(error)

    def _outputs(self) -> list[dict[str, Any]]:
        """The values of all outputs, for each completion."""
        outputs, options = [], self.checked.options
        for row, prompt in enumerate(self.prompts):
            logprobs = self._completions[row][0].prompt_logprobs  # the same for all
            prompt_logprobs = None if logprobs is None else self._logprobs_json([None, *logprobs])
            for index, completion in enumerate(self._completions[row]):
                text, message, stop_string = self._text(row, index, completion)
                num_sent = self._num_sent_tokens[row * prompt.params.num_sequences + index] if self._sends_tokens else 0
                outputs.append(
                    {
                        TEXT: text,
                        LEGACY_TEXT: text,
                        MESSAGE: "" if message is None else json.dumps(message),
                        "finish_reason": "stop" if stop_string else FINISH_REASONS[completion.finish_reason],
                        "stop_string": stop_string,
                        "num_input_tokens": len(prompt.ids),
                        "num_output_tokens": len(completion.token_ids),
                        "prompt_token_ids": json.dumps(prompt.ids) if options.return_prompt_token_ids else "",
                        "token_ids": json.dumps(completion.token_ids[num_sent:]) if options.return_token_ids else "",
                        "cumulative_logprob": sum(each.logprob for each in completion.logprobs or ()),
                        "logprobs": ""
                        if completion.logprobs is None
                        else self._logprobs_json(completion.logprobs[num_sent:]),
                        PROMPT_LOGPROBS: prompt_logprobs,
                        JSON_OUTPUT: self._json(prompt, text) if options.return_output else "",
                    }
                )
        return outputs

    def _json(self, prompt: PreparedPrompt, text: str) -> str:
        """The output `output`: a completion's text in MLServer's form, or a prompt's tokens."""
        value = {self._text_field: text}
        if self.checked.options.tokenize_only:
            value = self._describe_tokens(prompt)
        return json.dumps(value, ensure_ascii=False)

    def _text(self, row: int, index: int, completion: Completion) -> tuple[str, dict[str, Any] | None, str]:
        """A completion's text and message, of a stream what no delta had; and the stop string that ended it, or "".

        That may be known only now: with the stop strings `bc` and `abcd`, `abc` stops once no more tokens follow.
        """
        prompt = self.prompts[row]
        if self.checked.options.tokenize_only:
            return prompt.text, {} if self.checked.options.return_message else None, ""
        if self._sends_deltas:
            stream = prompt.streams[index]
            rest = stream.finish()
            message = None
            if self._readers:
                reader = self._readers[row * prompt.params.num_sequences + index]
                message = _read(reader, _marked(stream, rest), is_last=True)
            return stream.unsent + rest, message, stream.stop_string
        # Not from `prompt.streams`: `best_of` has reordered the completions.
        whole = self._codec.continuation(prompt.preceding_ids, completion.token_ids)
        text, stop_string = up_to_stop(whole, prompt.stop_strings, includes_stop=prompt.includes_stop)
        message = None if prompt.message_plan is None else self._message(prompt, prompt.message_plan, text, completion)
        return prompt.text + self._hooks.postprocess(text), message, stop_string

    def _message(self, prompt: PreparedPrompt, plan: MessagePlan, text: str, completion: Completion) -> dict[str, Any]:
        """The whole message of a completion; for a stream in the form of a delta."""
        if not plan.markers.keys().isdisjoint(completion.token_ids):
            stream = self._codec.marked_stream(
                prompt.preceding_ids, prompt.stop_strings, plan.markers, includes_stop=prompt.includes_stop
            )
            for token_id in completion.token_ids:
                stream.push(token_id)
            stream.finish()
            text = stream.take_marked()
        reader = plan.build_reader()
        reader.feed(text)
        reader.finish()
        message = reader.take() if self.streams else reader.message()
        if message.get("content"):
            message["content"] = self._hooks.postprocess(message["content"])
        return message

    def _logprobs_json(self, logprobs: Iterable[TokenLogprobs | None]) -> str:
        """Log probabilities in the vLLM backend's form: for each position an object of tokens by their ids, or null.

        Position by position, because `json` lets no other thread run: a long prompt has a hundred thousand entries.
        """
        decode = cache(lambda token_id: self._codec.decode([token_id]))
        return f"[{', '.join(json.dumps(each and _position(decode, each)) for each in logprobs)}]"


def _marked(stream: TextStream, text: str) -> str:
    """New text of a stream, with the special tokens that a message's reader has to see."""
    return stream.take_marked() if isinstance(stream, MarkedTextStream) else text


def _read(reader: MessageReader, text: str, *, is_last: bool = False) -> dict[str, Any]:
    """Read new text of a completion. Returns the delta of its message."""
    reader.feed(text)
    if is_last:
        reader.finish()
    return reader.take()


def _position(decode: Callable[[int], str], logprobs: TokenLogprobs) -> dict[int, dict[str, object]]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(logprobs.top, start=1)}
    return {
        token_id: {
            "logprob": logprob if math.isfinite(logprob) else LEAST_LOGPROB,
            "rank": ranks.get(token_id),
            "decoded_token": decode(token_id),
        }
        for token_id, logprob in {logprobs.token_id: logprobs.logprob, **dict(logprobs.top)}.items()
    }
