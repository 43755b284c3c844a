# SPDX-License-Identifier: Apache-2.0
"""Resolves layers of parameters (request, folder, checkpoint) to sampling parameters and what the task does itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from hf_triton.errors import RequestError
from hf_triton.protocol.parameters import (
    GREEDY_BELOW,
    GenerationParameters,
    beam_conflict,
    check_beams,
    check_best_of,
    check_min_new_tokens,
)
from hf_triton.protocol.request_options import RequestOptions
from hf_triton.protocol.structured_output import Grammar
from hf_triton.protocol.tool_choice import ForcedCall
from hf_triton.sampling.params import SamplingParams
from hf_triton.sentence import param, remedy


@dataclass(frozen=True)
class TaskParams:
    """What a prompt asks of the task itself, beside sampling."""

    stop_strings: tuple[str, ...] = ()
    includes_stop: bool = False
    """Whether a completion ends with its stop string."""
    stop_token_ids: tuple[int, ...] = ()
    """These are added to `SamplingParams.eos_ids`."""
    truncate_prompt_tokens: int | None = None
    """Tokens of the prompt to keep; -1: as many as fit."""
    bad_words: tuple[str, ...] = ()
    """These become `SamplingParams.bad_words_ids`."""
    max_time_s: float | None = None
    """Waiting included; None: no limit."""
    queue_priority: int = 0
    """Lower values leave the queue first."""
    src_lang: str | None = None
    tgt_lang: str | None = None
    """Languages of the task `translation`."""
    lora_name: str = ""
    """The adapter's name; empty: none."""
    cache_salt: str = ""
    """Requests with an equal one share cached prefixes, those with an empty one too."""
    thinking_budget: int | None = None
    """Tokens of thinking; None: no limit."""
    grammar: Grammar | None = None
    """What the completions must follow."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The tokens that they may have; None: any."""
    suffix: str = ""
    """What is behind them; empty: nothing is known of it."""


@dataclass(frozen=True)
class PromptDefaults:
    """What a folder and its checkpoint say of every prompt."""

    layers: tuple[GenerationParameters, ...]
    """The folder's and the checkpoint's parameters; the first that sets one wins."""
    eos_ids: frozenset[int]
    """The model's own end-of-sequence tokens."""
    context_length: int
    """Tokens that a prompt and its completion may have together."""
    max_output_length: int
    """New tokens if neither request nor layers set a number."""
    max_num_seqs: int
    """Sequences that one prompt may ask for."""
    is_encoder_decoder: bool = False
    """Whether prompt and completion are bounded each, and outputs never contain the prompt (T5)."""
    excludes_prompt: bool = False
    """Whether outputs leave the prompt out if the request does not say."""
    strict_tools: bool = False
    """Whether tools that do not say so are strict."""

    def first(self, name: str) -> Any:
        """A parameter's value in the first layer that sets it; None: none does."""
        return next((value for layer in self.layers if (value := getattr(layer, name)) is not None), None)


SAMPLING_FIELDS: Final = frozenset(field.name for field in fields(SamplingParams))
GREEDY_FIELDS: Final = SAMPLING_FIELDS - {"temperature", "top_p", "top_k", "min_p", "typical_p", "seed"}
"""The fields that have a meaning if nothing is sampled."""
RENAMED: Final = {"includes_stop": "include_stop_str_in_output", "max_time_s": "max_time"}
TASK_FIELDS: Final = {RENAMED.get(field.name, field.name): field.name for field in fields(TaskParams)}
"""The fields of `TaskParams` by parameter."""


def resolve_sampling_params(
    *layers: GenerationParameters, max_new_tokens: int = 1, room: float = math.inf
) -> SamplingParams:
    """Resolve a prompt's sampling parameters; the first layer that sets a parameter wins.

    Args:
        layers: The request's, the folder's, the checkpoint's.
        max_new_tokens: The number if no layer sets it.
        room: New tokens that the context has room for; a larger number of a lower layer is cut to it.

    Returns:
        Parameters without `bad_words_ids`, which need the tokenizer. The request's own `min_new_tokens` fit; larger
        ones of another layer keep a completion from ending before `max_new_tokens`.

    Raises:
        RequestError: The layers contradict each other.
    """
    merged = _merge(layers)
    num_beams = merged["num_beams"] = _num_beams(layers)
    do_sample = next((asked for layer in layers if (asked := layer.wants_sampling) is not None), False)
    do_sample = merged["do_sample"] = do_sample and num_beams == 1
    if num_beams > 1:
        merged.pop("best_of", None)
    if do_sample and merged.get("temperature", 1.0) < GREEDY_BELOW:
        merged["temperature"] = 1.0  # of a lower layer, which is greedy; the layer above asks to sample
    if "logit_bias" in merged:
        merged["logit_bias"] = tuple((token_id, float(bias)) for token_id, bias in merged["logit_bias"].items())
    merged["top_k"] = max(merged.get("top_k", 0), 0)  # transformers' -1 keeps all tokens, too
    merged["eos_ids"] = _eos_ids(layers)
    merged["max_new_tokens"] = min(merged.get("max_new_tokens", max_new_tokens), room)
    names = SAMPLING_FIELDS if do_sample else GREEDY_FIELDS
    params = SamplingParams(**{name: value for name, value in merged.items() if name in names})
    _check_params(params, layers[0])
    return params


def resolve_task_params(*layers: GenerationParameters) -> TaskParams:
    """Resolve what the task does itself, from the same layers.

    Raises:
        RequestError: A layer's end-of-sequence tokens contradict the grammar of a layer below.
    """
    grammar, merged = _grammar(layers), _merge(layers)
    if grammar is not None:
        merged |= {"stop_strings": _stop_strings_beside(layers), "stop_token_ids": ()}
    own = {field: merged[name] for name, field in TASK_FIELDS.items() if name in merged}
    return TaskParams(**own, grammar=grammar)


def beam_obstacle(
    asked: TaskParams,
    forced_call: ForcedCall | None,
    options: RequestOptions,
    *,
    streams: bool,
    holds_calls: bool = False,
) -> str | None:
    """What a request asks for, beside a prompt's own parameters, that beam search does not give."""
    if streams:
        return "stream"
    if forced_call is not None:
        return "tool_choice"
    if asked.grammar is not None:
        return asked.grammar.parameter
    if holds_calls:
        return "tools"
    if asked.allowed_token_ids is not None:
        return "allowed_token_ids"
    names = ("return_logprobs", "return_cumulative_logprob")
    return next((name for name in names if getattr(options, name)), None)


def without_beams(parameters: GenerationParameters, obstacle: str | None) -> GenerationParameters:
    """A prompt's parameters; with an obstacle without the beams that are a default.

    Raises:
        RequestError: The request itself asks for beams.
    """
    if obstacle is None:
        return parameters
    if parameters.num_beams is not None and parameters.num_beams > 1:
        raise RequestError("invalid_parameter", beam_conflict(obstacle, parameters.num_beams))
    return parameters.model_copy(update={"num_beams": 1})


def check_token_ids(params: SamplingParams, vocabulary_size: int) -> None:
    """Refuse parameters that name tokens which the model does not have.

    Raises:
        RequestError: One of `logit_bias` or `eos_token_id` is beyond the vocabulary.
    """
    named = {"logit_bias": [token_id for token_id, _ in params.logit_bias], "eos_token_id": params.eos_ids or ()}
    for name, token_ids in named.items():
        highest = max(token_ids, default=0)
        if highest >= vocabulary_size:
            raise RequestError(
                "invalid_parameter",
                f"{param(name)} names the token {highest}, and the model's token ids are below {vocabulary_size}",
            )


def _merge(layers: Sequence[GenerationParameters]) -> dict[str, Any]:
    """The parameters that any layer sets, by name; the first layer that sets one wins."""
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        for name, value in vars(layer).items():
            if value is not None:
                merged[name] = value
    return merged


def _grammar(layers: Sequence[GenerationParameters]) -> Grammar | None:
    index = next((index for index, layer in enumerate(layers) if layer.gives_grammar), None)
    grammar = None if index is None else layers[index].grammar
    if index is None or grammar is None:
        return None
    also = next((name for layer in layers[:index] if (name := layer.end_parameter)), None)
    if also:
        raise RequestError(
            "invalid_parameter",
            f"{param(also)} would end the output against the folder's {grammar.parameter}: leave it out"
            + remedy(f', or say {param("response_format")} {{"type": "text"}}'),
        )
    return grammar


def _stop_strings_beside(layers: Sequence[GenerationParameters]) -> tuple[str, ...]:
    """The stop strings down to the layer that sets the grammar; those of the layers below are for other outputs."""
    index = next(index for index, layer in enumerate(layers) if layer.gives_grammar)
    return next((layer.stop_strings for layer in layers[: index + 1] if layer.stop_strings is not None), ())


def _eos_ids(layers: Sequence[GenerationParameters]) -> frozenset[int] | None:
    """The end-of-sequence tokens of the first layer that sets any; None: the model's own."""
    speaking = [layer for layer in layers if layer.ignore_eos is not None or layer.eos_token_id is not None]
    if speaking and speaking[0].ignore_eos:
        return frozenset()
    token_ids = next((layer.eos_token_id for layer in speaking if layer.eos_token_id is not None), None)
    return None if token_ids is None else frozenset(token_ids)


def _num_beams(layers: Sequence[GenerationParameters]) -> int:
    """The beams of the first layer that sets any; 1 if a layer above it asks for what they do not combine with."""
    for layer in layers:
        if layer.num_beams is not None:
            return layer.num_beams
        if layer.beam_obstacle is not None:
            return 1
    return 1


def _check_params(params: SamplingParams, request: GenerationParameters) -> None:
    """Refuse contradictions between layers."""
    if params.num_beams == 1:
        _check_without_beams(params, request)
    try:
        if params.num_beams > 1:
            check_beams(params.num_beams, params.num_return_sequences, None)
        check_min_new_tokens(request.min_new_tokens, params.max_new_tokens)
        check_best_of(params.best_of, params.num_return_sequences)
    except ValueError as error:
        raise RequestError("invalid_parameter", str(error)) from None


def _check_without_beams(params: SamplingParams, request: GenerationParameters) -> None:
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(request, name) not in (None, neutral):
            raise RequestError(
                "invalid_parameter", f"{param(name)} has no effect without {param('num_beams')} above 1: leave it out"
            )
    for name, count in (("num_return_sequences", params.num_return_sequences), ("best_of", params.num_sequences)):
        if count > 1 and not params.do_sample:
            raise RequestError(
                "invalid_parameter",
                f"{param(name)} {count} would give {count} equal completions without sampling: set a "
                f"{param('temperature')}, or {param(name)} 1",
            )
