# SPDX-License-Identifier: Apache-2.0
"""What a prompt may ask of generation: every parameter declared once, with its range, its aliases and its meaning.

Knows neither tensors nor models. `GenerationParameters` is what a request or a folder says (anything may be left out);
of it, `SamplingParams` is what the engine is told and `RequestParams` what the task does itself (nothing is left out).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

import annotated_types
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    model_validator,
)

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.dialects import ALIASES, MEANT, NOT_THERE, is_done_anyway
from hf_triton.protocol.structured_output import GRAMMARS, Grammar, GrammarText, check_response_format, read_object
from hf_triton.protocol.validation import (
    MAX_ENTRIES,
    Problem,
    problems,
    read_integer_keys,
    read_one_or_many,
    read_strings,
    suggest,
)

MAX_NEW_TOKENS: Final = 1_048_576
MAX_RETURN_SEQUENCES: Final = 64
MAX_NGRAM_SIZE: Final = 128  # looking for longer ones in a long text would hold up the other rows
MAX_STOP_STRINGS: Final = 16
MAX_LOGPROBS: Final = 20
MAX_SECONDS: Final = 86_400
GREEDY_BELOW: Final = 1e-3  # dividing logits by less overflows float16, and the result is greedy anyway

ShortText = Annotated[str, annotated_types.MinLen(1), annotated_types.MaxLen(1000)]
TokenId = Annotated[int, annotated_types.Ge(0), annotated_types.Le(2**31 - 1)]
Penalty = Annotated[float, annotated_types.Ge(-2), annotated_types.Le(2)]
Bias = Annotated[float, annotated_types.Ge(-100), annotated_types.Le(100)]


class GenerationParameters(BaseModel):
    """What one prompt asks for; None means "not said"."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    max_new_tokens: Annotated[int, annotated_types.Ge(1), annotated_types.Le(MAX_NEW_TOKENS)] | None = None
    """How many tokens to generate at most. By default the folder's `max_output_length`. The prompt and these tokens
    must fit the model's context together."""

    min_new_tokens: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_NEW_TOKENS)] | None = None
    """How many tokens to generate before an end-of-sequence token may come. Stop strings end a text all the same."""

    do_sample: bool | None = None
    """Whether tokens are drawn at random (true) or the likeliest is taken (false, greedy). By default true where the
    request gives a `temperature`, `top_p`, `top_k`, `min_p` or `typical_p`, else what the checkpoint's
    generation_config says."""

    temperature: Annotated[float, annotated_types.Ge(0), annotated_types.Le(100)] | None = None
    """Flattens (> 1) or sharpens (< 1) the distribution that tokens are drawn from. 0, and what is below 0.001, means
    greedy."""

    top_p: Annotated[float, annotated_types.Gt(0), annotated_types.Le(1)] | None = None
    """Draw from the likeliest tokens whose probabilities add up to this. 1 keeps all tokens."""

    top_k: Annotated[int, annotated_types.Ge(-1), annotated_types.Le(2**31 - 1)] | None = None
    """Draw from this many likeliest tokens. 0 and -1 keep all tokens."""

    min_p: Annotated[float, annotated_types.Ge(0), annotated_types.Le(1)] | None = None
    """Draw from the tokens that are at least this many times as probable as the likeliest. 0 keeps all tokens.
    Nguyen et al. 2024."""

    typical_p: Annotated[float, annotated_types.Gt(0), annotated_types.Le(1)] | None = None
    """Draw from the tokens whose surprise is closest to what is expected, up to this probability together. 1 keeps all
    tokens. Meister et al. 2022."""

    seed: Annotated[int, annotated_types.Ge(0), annotated_types.Le(2**63 - 1)] | None = None
    """Makes a drawn text repeatable: the same prompt, parameters and seed give the same text, whatever else the
    server does at the time, up to rounding by the shape of the batch: in float32 none of 1,500 texts of 20 tokens came
    out otherwise in other company; bfloat16 and float16 round more coarsely, and some do."""

    repetition_penalty: Annotated[float, annotated_types.Ge(0.01), annotated_types.Le(100)] | None = None
    """Divides (> 1) or multiplies (< 1) the scores of tokens that the prompt or the text already holds. 1 is off.
    CTRL, Keskar et al. 2019, section 4.1."""

    presence_penalty: Penalty | None = None
    """Is taken off the scores of tokens that the text already holds; the prompt does not count. 0 is off."""

    frequency_penalty: Penalty | None = None
    """Is taken off the score of a token once for each time the text already holds it; the prompt does not count. 0 is
    off."""

    no_repeat_ngram_size: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_NGRAM_SIZE)] | None = None
    """No run of this many tokens comes twice in prompt and text. 0 is off."""

    bad_words: (
        Annotated[tuple[ShortText, ...], annotated_types.MaxLen(MAX_ENTRIES), BeforeValidator(read_strings)] | None
    ) = None
    """Texts that are not written, spelled with the tokens that the tokenizer gives them; an empty one is none."""

    logit_bias: (
        Annotated[dict[TokenId, Bias], annotated_types.MaxLen(MAX_ENTRIES), BeforeValidator(read_integer_keys)] | None
    ) = None
    """What is added to the scores of tokens, by token id: `{"50256": -100}`."""

    stop_strings: (
        Annotated[tuple[ShortText, ...], annotated_types.MaxLen(MAX_STOP_STRINGS), BeforeValidator(read_strings)] | None
    ) = None
    """Texts that end the text in front of the first of them. A text that reads as a JSON array is taken for one, an
    empty one for none."""

    ignore_eos: bool | None = None
    """Whether the text goes on after an end-of-sequence token, to `max_new_tokens`."""

    eos_token_id: (
        Annotated[
            tuple[TokenId, ...],
            annotated_types.MinLen(1),
            annotated_types.MaxLen(64),
            BeforeValidator(read_one_or_many),
        ]
        | None
    ) = None
    """Tokens that end the text, in place of the model's own."""

    response_format: (
        Annotated[dict[str, Any], BeforeValidator(read_object), AfterValidator(check_response_format)] | None
    ) = None
    """The form of the text, as OpenAI has it: `{"type": "json_schema", "json_schema": {"schema": {...}}}` writes JSON
    that the schema allows, `{"type": "json_object"}` any JSON object, `{"type": "text"}` any text. The text is whole
    even where `max_new_tokens` or `max_time` ends it, and a form of which no text fits `max_new_tokens` is refused. It
    goes before `min_new_tokens` and `bad_words`, and does not go with `stop_strings`. So do the four that follow."""

    guided_json: Annotated[dict[str, Any], BeforeValidator(read_object)] | None = None
    """A JSON schema that the text follows; the same as `response_format` with this schema."""

    guided_regex: GrammarText | None = None
    """A regular expression that the whole text matches, in the syntax of Rust's `regex`: no look-around, no references
    back; `\\d` and `\\w` are digits and letters of all scripts, `[0-9]` and `[A-Za-z]` those of English."""

    guided_choice: (
        Annotated[
            tuple[ShortText, ...],
            annotated_types.MinLen(1),
            annotated_types.MaxLen(MAX_ENTRIES),
            BeforeValidator(read_strings),
        ]
        | None
    ) = None
    """Texts of which one is written. A text that reads as a JSON array is taken for one."""

    guided_grammar: GrammarText | None = None
    """A grammar that the text follows, in the Lark syntax of llguidance, from its rule `start` on:
    `start: "page " NUMBER`, and on a line of its own `NUMBER: /[0-9]+/`. A terminal takes all that it can: what
    follows it must begin with something else."""

    num_return_sequences: Annotated[int, annotated_types.Ge(1), annotated_types.Le(MAX_RETURN_SEQUENCES)] | None = None
    """How many texts to draw for each prompt; more than one needs sampling."""

    best_of: Annotated[int, annotated_types.Ge(1), annotated_types.Le(MAX_RETURN_SEQUENCES)] | None = None
    """How many texts to draw for each prompt, of which the `num_return_sequences` are kept whose tokens are likeliest
    on average. By default just as many."""

    logprobs: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_LOGPROBS)] | None = None
    """How many of the likeliest tokens the output `logprobs` shows in each place, beside the token itself."""

    prompt_logprobs: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_LOGPROBS)] | None = None
    """Fills the output `prompt_logprobs`: a JSON array with an object for each token of the prompt, as those of
    `logprobs`, of the token itself and so many of the likeliest; `null` for the first one, which nothing precedes, and
    in place of the array for a prompt that does not ask. A stream has it in its last response. To have a text scored
    alone, ask for `max_new_tokens` 1. Encoder-decoder models refuse it."""

    max_time: Annotated[float, annotated_types.Gt(0), annotated_types.Le(MAX_SECONDS)] | None = None
    """Seconds that the prompt may take, waiting included; then the text ends with what it has."""

    queue_priority: Annotated[int, annotated_types.Ge(-100), annotated_types.Le(100)] | None = None
    """Where prompts wait, the lower goes first; among equals, requests take turns, a prompt each. By default 0."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.do_sample is False:
            for name in WARPERS:
                value = getattr(self, name)
                if value is not None and value not in (NEUTRAL[name], 0, -1):
                    raise ValueError(f"{name} has no effect with do_sample false: leave one of them out")
        if self.do_sample is True and self.temperature is not None and self.temperature < GREEDY_BELOW:
            raise ValueError(
                f"temperature {self.temperature:g} means greedy and contradicts do_sample true: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if self.max_new_tokens is not None:
            check_min_new_tokens(self.min_new_tokens, self.max_new_tokens)
        if self.num_return_sequences is not None:
            check_best_of(self.best_of, self.num_return_sequences)
        if self.ignore_eos and self.eos_token_id is not None:
            raise ValueError("eos_token_id has no effect with ignore_eos true: leave one of them out")
        return self

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        names = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(names) > 1:
            raise ValueError(f"{names[0]} and {names[1]} both say what the text may be: leave one of them out")
        if self.grammar and (also := self.ends_text_elsewhere):
            raise ValueError(f"{also} would end the text where {names[0]} does not: leave one of them out")
        return self

    @property
    def says_grammar(self) -> bool:
        """Whether this says anything of the text's form, be it that there is none."""
        return any(getattr(self, name) is not None for name in GRAMMARS)

    @property
    def follows_grammar(self) -> bool:
        """Whether this says what the text must follow."""
        is_plain = self.response_format is not None and self.response_format["type"] == "text"
        return self.says_grammar and not is_plain

    @property
    def grammar(self) -> Grammar | None:
        """What the text must follow, where this says it."""
        if self.response_format is not None and self.response_format["type"] != "text":
            schema = self.response_format.get("json_schema", {"schema": {"type": "object"}})["schema"]
            return Grammar("json_schema", json.dumps(schema), "response_format")
        if self.guided_json is not None:
            return Grammar("json_schema", json.dumps(self.guided_json), "guided_json")
        if self.guided_regex is not None:
            return Grammar("regex", self.guided_regex, "guided_regex")
        if self.guided_choice is not None:
            return Grammar("choice", json.dumps(self.guided_choice), "guided_choice")
        return None if self.guided_grammar is None else Grammar("lark", self.guided_grammar, "guided_grammar")

    @property
    def ends_text_elsewhere(self) -> str | None:
        """The parameter by which a text would end where a grammar does not let it."""
        if self.stop_strings:
            return "stop_strings"
        return "ignore_eos" if self.ignore_eos else None

    @property
    def asks_to_sample(self) -> bool | None:
        """Whether this asks for sampling; None where it says nothing about it."""
        if self.do_sample is not None:
            return self.do_sample
        if self.temperature is not None:
            return self.temperature >= GREEDY_BELOW
        return True if any(getattr(self, name) is not None for name in WARPERS) else None


WARPERS: Final = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""What shapes the distribution that tokens are drawn from."""
NEUTRAL: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
}
"""The value of each parameter that changes nothing."""


def check_min_new_tokens(least: int | None, most: int) -> None:
    if least is not None and least > most:
        raise ValueError(f"min_new_tokens {least} is more than max_new_tokens {most}: lower one or raise the other")


def check_best_of(best_of: int | None, count: int) -> None:
    if best_of is not None and best_of < count:
        raise ValueError(f"best_of {best_of} is less than num_return_sequences {count}: raise one or lower the other")


def parse_parameters(values: Mapping[str, object]) -> GenerationParameters:
    """Check one prompt's parameters.

    Args:
        values: By our names or their aliases.

    Raises:
        RequestError: A name is unknown, two names mean the same, or a value is impossible.
    """
    if "max_completion_tokens" in values:  # clients of OpenAI's send its old name too
        values = {name: value for name, value in values.items() if name != "max_tokens"}
    values = {name: value for name, value in values.items() if not is_done_anyway(name, value)}
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
        sentences = [_as_spelled(each, spellings) for each in problems(GenerationParameters, error)]
        raise RequestError("invalid_parameter", "; ".join(sentences)) from None


def _as_spelled(problem: Problem, spellings: Mapping[str, str]) -> str:
    """A problem's sentence, which begins with a parameter's name or is about several, by the names that were given."""
    if not problem.name:
        return re.sub(r"\w+", lambda word: spellings.get(word[0], word[0]), problem.sentence)
    rest = problem.sentence.removeprefix(problem.name)
    return problem.sentence if rest == problem.sentence else f"{spellings[problem.name]}{rest}"


def unknown_parameter(name: str, also: tuple[str, ...] = ()) -> RequestError:
    """The refusal of a parameter that nobody declared."""
    if name in NOT_THERE:
        return RequestError(
            "unknown_parameter", f"there is no parameter {clip(name)} ({NOT_THERE[name]}): leave it out"
        )
    known = [*GenerationParameters.model_fields, *ALIASES, *also]
    meant = MEANT.get(name)
    hint = suggest(meant if meant in known else name, known)
    return RequestError("unknown_parameter", f"there is no parameter {clip(name)}{hint}")
