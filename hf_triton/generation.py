# SPDX-License-Identifier: Apache-2.0
"""What a prompt may ask of generation: every parameter declared once, with its range, its aliases and its meaning.

Knows neither tensors nor models. `GenerationParameters` is what a request or a folder says (anything may be left out);
`SamplingPlan` is what the engine is told (nothing is left out).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from hf_triton.declare import problems, suggest
from hf_triton.errors import RequestError, clip

ALIASES: Final[Mapping[str, str]] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "random_seed": "seed",
}
"""Other dialects' names for our parameters. Ours are transformers' own."""

MAX_NEW_TOKENS: Final = 1_048_576
MAX_RETURN_SEQUENCES: Final = 64
GREEDY_BELOW: Final = 1e-3  # dividing logits by less overflows float16, and the result is greedy anyway


class GenerationParameters(BaseModel):
    """What one prompt asks for; None means "not said"."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    max_new_tokens: Annotated[int, annotated_types.Ge(1), annotated_types.Le(MAX_NEW_TOKENS)] | None = None
    """How many tokens to generate at most. By default the folder's `max_output_length`. The prompt and these tokens
    must fit the model's context together."""

    do_sample: bool | None = None
    """Whether tokens are drawn at random (true) or the likeliest is taken (false, greedy). By default true where the
    request gives a `temperature`, `top_p` or `top_k`, else what the checkpoint's generation_config says."""

    temperature: Annotated[float, annotated_types.Ge(0), annotated_types.Le(100)] | None = None
    """Flattens (> 1) or sharpens (< 1) the distribution that tokens are drawn from. 0 means greedy."""

    top_p: Annotated[float, annotated_types.Gt(0), annotated_types.Le(1)] | None = None
    """Draw from the likeliest tokens whose probabilities add up to this. 1 keeps all tokens."""

    top_k: Annotated[int, annotated_types.Ge(-1), annotated_types.Le(2**31 - 1)] | None = None
    """Draw from this many likeliest tokens. 0 and -1 keep all tokens."""

    seed: Annotated[int, annotated_types.Ge(0), annotated_types.Le(2**63 - 1)] | None = None
    """Makes a drawn text repeatable: the same prompt, parameters and seed give the same text, whatever else the
    server does at the time (in float32; bfloat16 and float16 round by the shape of the batch)."""

    repetition_penalty: Annotated[float, annotated_types.Ge(0.01), annotated_types.Le(100)] | None = None
    """Divides (> 1) or multiplies (< 1) the scores of tokens that the prompt or the text already holds. 1 is off.
    CTRL, Keskar et al. 2019, section 4.1."""

    num_return_sequences: Annotated[int, annotated_types.Ge(1), annotated_types.Le(MAX_RETURN_SEQUENCES)] | None = None
    """How many texts to draw for each prompt; more than one needs sampling."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.do_sample is False:
            for name in ("temperature", "top_p", "top_k"):
                value = getattr(self, name)
                if value is not None and value not in (NEUTRAL[name], 0, -1):
                    raise ValueError(f"{name} has no effect with do_sample false: leave one of them out")
        if self.do_sample is True and self.temperature == 0:
            raise ValueError("temperature 0 means greedy and contradicts do_sample true: leave one of them out")
        return self

    @property
    def asks_to_sample(self) -> bool | None:
        """Whether this asks for sampling; None where it says nothing about it."""
        if self.do_sample is not None:
            return self.do_sample
        if self.temperature is not None:
            return self.temperature >= GREEDY_BELOW
        return True if self.top_p is not None or self.top_k is not None else None


NEUTRAL: Final[Mapping[str, float]] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
"""The value of each parameter that changes nothing."""


def parse_parameters(values: Mapping[str, object]) -> GenerationParameters:
    """Check one prompt's parameters.

    Args:
        values: By our names or their aliases.

    Raises:
        RequestError: A name is unknown, two names mean the same, or a value is impossible.
    """
    spellings: dict[str, str] = {}
    for given in values:
        name = ALIASES.get(given, given)
        if name not in GenerationParameters.model_fields:
            raise unknown_parameter(given)
        if name in spellings:
            raise RequestError("invalid_parameter", f"{spellings[name]} and {given} mean the same: leave one out")
        spellings[name] = given
    named = {name: values[given] for name, given in spellings.items()}
    try:
        return GenerationParameters.model_validate(named)
    except ValidationError as error:
        sentence = "; ".join(problem.sentence for problem in problems(GenerationParameters, error))
        raise RequestError("invalid_parameter", sentence) from None


def unknown_parameter(name: str, also: tuple[str, ...] = ()) -> RequestError:
    """The refusal of a parameter that nobody declared."""
    known = [*GenerationParameters.model_fields, *ALIASES, *also]
    return RequestError("unknown_parameter", f"there is no parameter {clip(name)}{suggest(name, known)}")


@dataclass(frozen=True)
class SamplingPlan:
    """How the engine picks tokens for one prompt, every value settled."""

    max_new_tokens: int
    do_sample: bool = False
    temperature: float = 1.0
    """Above 0; 1 where `do_sample` is false."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    seed: int | None = None
    repetition_penalty: float = 1.0
    num_return_sequences: int = 1


def settle(*layers: GenerationParameters) -> SamplingPlan:
    """Settle a prompt's plan from layers of parameters, the first that says something winning.

    Args:
        layers: The request's, the folder's, the checkpoint's. One of them must say `max_new_tokens`.

    Raises:
        RequestError: Together they make no sense.
    """

    def first(name: str, default: Any) -> Any:
        return next((value for layer in layers if (value := getattr(layer, name)) is not None), default)

    do_sample = next((asked for layer in layers if (asked := layer.asks_to_sample) is not None), False)
    temperature = float(first("temperature", 1.0))
    if do_sample and temperature < GREEDY_BELOW:
        temperature = 1.0  # a lower layer is greedy, the layer above it asks to sample and names no temperature
    count = int(first("num_return_sequences", 1))
    if count > 1 and not do_sample:
        raise RequestError(
            "invalid_parameter",
            f"num_return_sequences {count} would give {count} equal texts without sampling: set a temperature",
        )
    return SamplingPlan(
        max_new_tokens=int(first("max_new_tokens", 1)),
        do_sample=do_sample,
        temperature=temperature if do_sample else 1.0,
        top_p=float(first("top_p", 1.0)) if do_sample else 1.0,
        top_k=max(int(first("top_k", 0)), 0) if do_sample else 0,
        seed=first("seed", None) if do_sample else None,
        repetition_penalty=float(first("repetition_penalty", 1.0)),
        num_return_sequences=count,
    )
