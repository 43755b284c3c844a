# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/completions`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import annotated_types
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_triton_gateway.app_state import Gateway, gateway_of, request_id_of
from hf_triton_gateway.chat.answers import (
    COUNTS,
    StreamedTokens,
    finish_reason_of,
    json_output,
    response_head,
    stop_reason_of,
    text_of,
    usage,
    usage_of,
)
from hf_triton_gateway.chat.fields import MAX_PROMPTS, GenerationFields, Texts, TokenIds
from hf_triton_gateway.chat.merge import all_results, merged
from hf_triton_gateway.chat.openai_logprobs import TextOffsets, completion_logprobs
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import JsonRoute, beside, beside_loop, json_response
from hf_triton_gateway.http.disconnect import run_while_connected
from hf_triton_gateway.http.sse import DONE, RESPONSES, EventStream, chunk, chunk_start, event
from hf_triton_gateway.triton.triton_messages import Generation, Outputs, StreamSize, size_of

router = APIRouter(route_class=JsonRoute)
MAX_LOGPROBS: Final = 20


class CompletionRequest(GenerationFields):
    """The body of `/v1/completions`."""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], annotated_types.MaxLen(MAX_PROMPTS)]
    """A prompt or a list of prompts, as text or as token ids."""

    max_tokens: Annotated[int, annotated_types.Ge(0)] | None = None
    """Maximum number of tokens to generate; 0 with `echo` scores the prompt."""

    suffix: str | None = None
    """The text behind the completion, which fills in what is between the prompt and it; for models of code whose
    tokenizer has the tokens for it. Empty: none."""

    echo: bool | None = None
    """Whether the text begins with the prompt."""

    logprobs: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_LOGPROBS)] | None = None
    """Number of most likely tokens to list at each position; also the log probability of each token. With `echo` the
    prompt's too."""

    @property
    def only_scores(self) -> bool:
        """Whether the prompt is scored and nothing is generated."""
        return self.max_tokens == 0

    def generations(self, request_id: str, max_batch_size: int) -> list[Generation]:
        """What to ask of Triton: one request for `max_batch_size` prompts (0: all), or for a prompt of token ids."""
        sampling, options = self.sampling_parameters(), {"exclude_input_in_output": not self.echo}
        if self.only_scores:
            if not self.echo:
                raise self.no_tokens(", or 0 with echo true; got 0")
            sampling["max_new_tokens"] = 1  # not returned
            options["exclude_input_in_output"] = True
        if self.suffix:
            if self.echo:
                raise ApiError(400, "echo cannot be combined with suffix: leave one of them out", param="echo")
            sampling["suffix"] = self.suffix
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
            options["return_logprobs"] = True
            if self.echo:
                sampling["prompt_logprobs"] = self.logprobs
        counts = COUNTS[:-1] if self.only_scores else COUNTS  # of the prompt alone
        returns = ("finish_reason", "stop_string", *counts, *self.token_outputs)
        texts, ids = self._prompts()

        def generation(first_row: int = 0, name: str = "prompt", **prompt: Any) -> Generation:
            names = self.client_names(text_input=name, prompt_token_ids=name)
            names = replace(names, rows=range(first_row, len(texts)) if isinstance(self.prompt, list) else ())
            return Generation(self.model, request_id, sampling, options, returns=returns, names=names, **prompt)

        size = max_batch_size or len(texts) or 1
        places = [f"prompt[{index}]" for index in range(len(ids))] if len(ids) > 1 else ["prompt"]
        return [
            *(generation(start, prompts=texts[start : start + size]) for start in range(0, len(texts), size)),
            *(generation(name=place, prompt_token_ids=one) for place, one in zip(places, ids, strict=False)),
        ]

    def no_tokens(self, what: str) -> ApiError:
        """The error about a `max_tokens` of 0."""
        name = self.word("max_tokens")
        return ApiError(400, f"{name} must be an integer >= 1{what}", param=name)

    def _prompts(self) -> tuple[list[str], list[list[int]]]:
        """The prompts as texts or as token ids."""
        prompts: Any = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        if not prompts or [] in prompts:
            raise ApiError(400, "prompt holds no prompt: give a string, token ids, or a list of them", param="prompt")
        return (prompts, []) if isinstance(prompts[0], str) else ([], prompts)


@dataclass(frozen=True)
class _Answer:
    """What the choices of one Triton request need."""

    body: CompletionRequest
    generation: Generation
    first_index: int

    @property
    def num_choices(self) -> int:
        return max(1, len(self.generation.prompts)) * self.body.num_choices

    def choice(self, outputs: Outputs, index: int) -> dict[str, Any]:
        text, logprobs = text_of(outputs, index), None
        if self.body.only_scores:
            text = self.generation.prompts[index // self.body.num_choices] if self.generation.prompts else ""
        if self.body.logprobs is not None:
            positions = json_output(outputs, "prompt_logprobs", index) or []
            if not self.body.only_scores:
                positions += json_output(outputs, "logprobs", index) or []
            logprobs = completion_logprobs(positions, text)
        choice: dict[str, Any] = {
            "index": self.first_index + index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if self.body.only_scores else finish_reason_of(outputs, index),
            "stop_reason": None if self.body.only_scores else stop_reason_of(outputs, index),
        }
        if "prompt_token_ids" in outputs:
            choice["prompt_token_ids"] = json_output(outputs, "prompt_token_ids", index)
        if "token_ids" in outputs:
            choice["token_ids"] = [] if self.body.only_scores else json_output(outputs, "token_ids", index)
        return choice

    def usage(self, outputs: Outputs) -> dict[str, Any]:
        return usage_of(outputs, self.body.num_choices)


def _answers(body: CompletionRequest, generations: Sequence[Generation]) -> list[_Answer]:
    answers: list[_Answer] = []
    first_index = 0
    for generation in generations:
        answers.append(_Answer(body, generation, first_index))
        first_index += answers[-1].num_choices
    return answers


@router.post("/v1/completions", responses=RESPONSES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts."""
    gateway = gateway_of(request)
    if body.stream and body.only_scores:
        raise body.no_tokens(" for a stream, got 0")
    folder = await run_while_connected(request.receive, gateway.models.folder(body.model, is_stream=bool(body.stream)))
    generations = await beside_loop(request, body.generations, request_id_of(request), folder.max_batch_size)
    answers = _answers(body, generations)
    if body.stream:
        return EventStream(request, _stream(gateway, body, answers))
    works = all_results(gateway.models.generate(answer.generation) for answer in answers)
    responses = await run_while_connected(request.receive, works)
    pairs = list(zip(answers, responses, strict=True))
    return await json_response(sum(map(size_of, responses)), _completion, pairs)


def _completion(pairs: Sequence[tuple[_Answer, Outputs]]) -> dict[str, Any]:
    """OpenAI's `text_completion` of all prompts."""
    choices = [answer.choice(outputs, index) for answer, outputs in pairs for index in range(answer.num_choices)]
    usages = [answer.usage(outputs) for answer, outputs in pairs]
    return _head(pairs[0][0].generation) | {"choices": choices, "usage": _sum(usages)}


def _head(generation: Generation) -> dict[str, Any]:
    return response_head(f"cmpl-{generation.request_id}", "text_completion", generation.model)


def _sum(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    prompts, completions = (sum(each[name] for each in usages) for name in ("prompt_tokens", "completion_tokens"))
    known = [each["prompt_tokens_details"]["cached_tokens"] for each in usages if "prompt_tokens_details" in each]
    return usage(prompts, completions, sum(known) if known else None)


async def _stream(gateway: Gateway, body: CompletionRequest, answers: Sequence[_Answer]) -> AsyncGenerator[bytes]:
    """The events of OpenAI's streamed `text_completion`: deltas, and usage if asked for."""
    head = _head(answers[0].generation)
    choices = [[_ChoiceStream(answer, head, index) for index in range(answer.num_choices)] for answer in answers]
    sizes = [StreamSize() for _ in answers]
    streams, usages = [gateway.models.stream(answer.generation) for answer in answers], []
    async with aclosing(merged(streams)) as responses:
        place: int
        outputs: Outputs
        async for place, outputs in responses:
            if data := await beside(sizes[place].of(outputs), _chunks, choices[place], outputs):
                yield data
                sizes[place].sent()
            if "finish_reason" in outputs:
                usages.append(answers[place].usage(outputs))
    if body.includes_usage:
        yield event(head | {"choices": [], "usage": _sum(usages)})
    yield DONE


def _chunks(choices: Sequence[_ChoiceStream], outputs: Outputs) -> bytes:
    return b"".join(choice.chunk(outputs) for choice in choices)


class _ChoiceStream:
    """The chunks of one choice of a streamed completion; they all begin with `head`."""

    def __init__(self, answer: _Answer, head: dict[str, Any], index: int) -> None:
        self._body = body = answer.body
        self._head = body.chunk_head(head)
        self._start = chunk_start(self._head)
        self._index = index
        self._number = answer.first_index + index
        self._tokens = StreamedTokens(index)
        self._is_plain = body.logprobs is None and not (body.return_token_ids or body.counts_continuously)
        self._has_begun = False
        self._prompt_ids: list[int] | None = None
        """The stream's first response has them: other choices may have text there, and this one none."""
        self._offsets = TextOffsets()
        self._is_scored = not (body.echo and body.logprobs is not None)
        """Whether the prompt's log probabilities have been sent, or are not asked for; the completion's follow them."""
        self._scores: list[Any] | None = None
        self._echo = ""
        """The text that waits for them: those of a long prompt come in the last response alone."""

    def chunk(self, outputs: Outputs) -> bytes:
        """The chunk of a response; empty if it has nothing new."""
        text, is_last = text_of(outputs, self._index), "finish_reason" in outputs
        if self._prompt_ids is None and self._body.return_token_ids:
            self._prompt_ids = json_output(outputs, "prompt_token_ids", self._index)
        if not self._is_scored and self._scores is None:
            self._scores = json_output(outputs, "prompt_logprobs", self._index)
        if not (text or is_last):
            self._tokens.read(outputs)
            return b""
        if self._is_plain and not is_last:
            return chunk(self._start, self._number, b"text", json.dumps(text))
        self._tokens.read(outputs)
        choice: dict[str, Any] = {
            "index": self._number,
            "text": text,
            "logprobs": self._logprobs(text, is_last=is_last),
            "finish_reason": finish_reason_of(outputs, self._index) if is_last else None,
        }
        if is_last:
            choice["stop_reason"] = stop_reason_of(outputs, self._index)
        if self._body.return_token_ids:
            choice["token_ids"] = self._tokens.take_ids()
            if not self._has_begun:
                choice["prompt_token_ids"] = self._prompt_ids
        self._has_begun = True
        usage = {"usage": self._tokens.usage()} if self._body.counts_continuously else {}
        return event({**self._head, **usage, "choices": [choice]}, is_small=not is_last)

    def _logprobs(self, text: str, *, is_last: bool) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        scores: list[Any] = []
        if not self._is_scored:
            self._echo += text
            if self._scores is None and not is_last:
                return None
            self._is_scored, scores, text = True, self._scores or [], self._echo
        positions = [*scores, *self._tokens.take_positions()]
        return completion_logprobs(positions, text, self._offsets) if positions else None
