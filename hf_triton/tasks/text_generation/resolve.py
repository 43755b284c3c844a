# SPDX-License-Identifier: Apache-2.0
"""Layers of parameters (request, folder, checkpoint) to what the engine and the task are asked, nothing left open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_triton.errors import RequestError
from hf_triton.protocol.parameters import GREEDY_BELOW, GenerationParameters, check_best_of, check_min_new_tokens
from hf_triton.protocol.structured_output import Grammar
from hf_triton.sampling.params import SamplingParams


@dataclass(frozen=True)
class RequestParams:
    """What the task, which has the tokenizer and the clock, does itself for one prompt, every value settled."""

    stop_strings: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    """To become `SamplingParams.bad_words_ids`."""
    max_time_s: float | None = None
    """Waiting included; None: as long as it takes."""
    queue_priority: int = 0
    """The lower goes first."""
    grammar: Grammar | None = None
    """What the texts must follow; there are no stop strings then."""


def resolve_sampling_params(*layers: GenerationParameters, max_new_tokens: int = 1) -> SamplingParams:
    """Settle a prompt's plan from layers of parameters, the first that says something winning.

    Args:
        layers: The request's, the folder's, the checkpoint's.
        max_new_tokens: Where none of them says how many.

    Returns:
        Without `bad_words_ids`, which need the tokenizer. Of the request's own `min_new_tokens` it is known that they
        fit; those of another layer keep the text from ending before `max_new_tokens` where they are more.

    Raises:
        RequestError: Together they make no sense.
    """
    said = _merge(layers)
    do_sample = next((asked for layer in layers if (asked := layer.wants_sampling) is not None), False)
    temperature = float(said.get("temperature", 1.0))
    if do_sample and temperature < GREEDY_BELOW:
        temperature = 1.0  # a lower layer is greedy, the layer above it asks to sample and names no temperature
    plan = SamplingParams(
        max_new_tokens=int(said.get("max_new_tokens", max_new_tokens)),
        min_new_tokens=int(said.get("min_new_tokens", 0)),
        do_sample=do_sample,
        temperature=temperature if do_sample else 1.0,
        top_p=float(said.get("top_p", 1.0)) if do_sample else 1.0,
        top_k=max(int(said.get("top_k", 0)), 0) if do_sample else 0,
        min_p=float(said.get("min_p", 0.0)) if do_sample else 0.0,
        typical_p=float(said.get("typical_p", 1.0)) if do_sample else 1.0,
        seed=said.get("seed") if do_sample else None,
        repetition_penalty=float(said.get("repetition_penalty", 1.0)),
        presence_penalty=float(said.get("presence_penalty", 0.0)),
        frequency_penalty=float(said.get("frequency_penalty", 0.0)),
        no_repeat_ngram_size=int(said.get("no_repeat_ngram_size", 0)),
        logit_bias=tuple((token_id, float(bias)) for token_id, bias in said.get("logit_bias", {}).items()),
        eos_ids=_eos_ids(layers),
        num_return_sequences=int(said.get("num_return_sequences", 1)),
        best_of=said.get("best_of"),
        logprobs=said.get("logprobs"),
        prompt_logprobs=said.get("prompt_logprobs"),
    )
    _check_plan(plan, layers[0].min_new_tokens)
    return plan


def resolve_request_params(*layers: GenerationParameters) -> RequestParams:
    """Settle what `settle` leaves to the task, from the same layers.

    Raises:
        RequestError: A layer would end texts where the grammar of a layer below does not let them.
    """
    grammar, said = _grammar(layers), _merge(layers)
    return RequestParams(
        stop_strings=said.get("stop_strings", ()) if grammar is None else (),
        bad_words=said.get("bad_words", ()),
        max_time_s=said.get("max_time"),
        queue_priority=said.get("queue_priority", 0),
        grammar=grammar,
    )


def check_token_ids(plan: SamplingParams, vocabulary_size: int) -> None:
    """Refuse a plan that names tokens which the model does not have.

    Raises:
        RequestError: One of `logit_bias` or `eos_token_id` is beyond the vocabulary.
    """
    named = {"logit_bias": [token_id for token_id, _ in plan.logit_bias], "eos_token_id": plan.eos_ids or ()}
    for name, token_ids in named.items():
        highest = max(token_ids, default=0)
        if highest >= vocabulary_size:
            raise RequestError(
                "invalid_parameter",
                f"{name} names the token {highest}, and the model's token ids are below {vocabulary_size}",
            )


def _merge(layers: Sequence[GenerationParameters]) -> dict[str, Any]:
    """What the layers say, by name, the first that says something winning."""
    said: dict[str, Any] = {}
    for layer in reversed(layers):
        said |= {name: value for name, value in vars(layer).items() if value is not None}
    return said


def _grammar(layers: Sequence[GenerationParameters]) -> Grammar | None:
    """By the first layer that says anything of it; what the layers below it say of stop strings is off then."""
    place = next((place for place, layer in enumerate(layers) if layer.gives_grammar), None)
    grammar = None if place is None else layers[place].grammar
    if place is None or grammar is None:
        return None
    also = next((name for layer in layers[:place] if (name := layer.early_stop_parameter)), None)
    if also:
        raise RequestError(
            "invalid_parameter",
            f"{also} would end the text where the folder's {grammar.parameter} does not: leave it out, or say "
            'response_format {"type": "text"}',
        )
    return grammar


def _eos_ids(layers: Sequence[GenerationParameters]) -> frozenset[int] | None:
    """By the first layer that says anything of the end; None where that is left to the model."""
    speaking = [layer for layer in layers if layer.ignore_eos is not None or layer.eos_token_id is not None]
    if speaking and speaking[0].ignore_eos:
        return frozenset()
    token_ids = next((layer.eos_token_id for layer in speaking if layer.eos_token_id is not None), None)
    return None if token_ids is None else frozenset(token_ids)


def _check_plan(plan: SamplingParams, least_asked: int | None) -> None:
    """Refuse what only the layers together show.

    Args:
        plan: Of all layers.
        least_asked: The request's own `min_new_tokens`.
    """
    for name, count in (("num_return_sequences", plan.num_return_sequences), ("best_of", plan.num_sequences)):
        if count > 1 and not plan.do_sample:
            raise RequestError(
                "invalid_parameter",
                f"{name} {count} would give {count} equal texts without sampling: set a temperature, or {name} 1",
            )
    try:
        check_min_new_tokens(least_asked, plan.max_new_tokens)
        check_best_of(plan.best_of, plan.num_return_sequences)
    except ValueError as error:
        raise RequestError("invalid_parameter", str(error)) from None
