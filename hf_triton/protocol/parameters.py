# SPDX-License-Identifier: Apache-2.0
"""Generation parameters: each declared once, with its type, range and meaning.

Knows neither tensors nor models. `GenerationParameters` holds what a request or a folder sets; every field is optional.
The task resolves it with its defaults to `SamplingParams`, for the engine, and `TaskParams`, for itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

import annotated_types
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.dialects import ALIASES, BEAM_SEARCH, GUIDES, SUGGESTIONS, UNSUPPORTED, has_no_effect
from hf_triton.protocol.structured_output import (
    GRAMMARS,
    Grammar,
    GrammarText,
    check_response_format,
    read_guides,
    read_object,
    read_response_format,
)
from hf_triton.protocol.validation import (
    MAX_ENTRIES,
    MAX_NAME,
    MAX_TOKEN_IDS,
    problems,
    read_integer_keys,
    read_one_or_many,
    read_strings,
    read_token_ids,
    read_words,
    suggest,
)
from hf_triton.sentence import param, param_list, renamed

MAX_NEW_TOKENS: Final = 1_048_576
MAX_RETURN_SEQUENCES: Final = 64
MAX_BEAMS: Final = 32
MAX_LENGTH_PENALTY: Final = 10
MAX_NGRAM_SIZE: Final = 128  # searching for longer ones in a long sequence would delay the batch
MAX_STOP_STRINGS: Final = 16
MAX_LOGPROBS: Final = 20
MAX_SECONDS: Final = 86_400
MAX_SALT_CHARACTERS: Final = 1024
MAX_SUFFIX: Final = 2**20
GREEDY_BELOW: Final = 1e-3  # dividing logits by less overflows float16, and is greedy anyway

ShortText = Annotated[str, annotated_types.MinLen(1), annotated_types.MaxLen(1000)]
TokenId = Annotated[int, annotated_types.Ge(0), annotated_types.Le(2**31 - 1)]
Penalty = Annotated[float, annotated_types.Ge(-2), annotated_types.Le(2)]
Bias = Annotated[float, annotated_types.Ge(-100), annotated_types.Le(100)]


class GenerationParameters(BaseModel):
    """Parameters of one prompt; None means "not given"."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_new_tokens: Annotated[int, annotated_types.Ge(1), annotated_types.Le(MAX_NEW_TOKENS)] | None = None
    """Maximum number of tokens to generate. By default the folder's setting `max_output_length`. Prompt and completion
    must fit the model's context together."""

    min_new_tokens: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_NEW_TOKENS)] | None = None
    """Minimum number of tokens to generate before an end-of-sequence token is allowed. A stop string may still end the
    completion earlier."""

    do_sample: bool | None = None
    """Whether to sample tokens (true) or to take the most likely one (false, greedy). By default true if the request
    gives a `temperature`, `top_p`, `top_k`, `min_p` or `typical_p`, otherwise what the checkpoint's generation_config
    says."""

    temperature: Annotated[float, annotated_types.Ge(0), annotated_types.Le(100)] | None = None
    """Divides the logits before sampling: lower values are more deterministic, higher values more random. Values below
    0.001, 0 included, mean greedy."""

    top_p: Annotated[float, annotated_types.Gt(0), annotated_types.Le(1)] | None = None
    """Sample from the most likely tokens whose cumulative probability reaches this value. Must be in (0, 1]. 1 keeps
    all tokens."""

    top_k: Annotated[int, annotated_types.Ge(-1), annotated_types.Le(2**31 - 1)] | None = None
    """Sample from this many most likely tokens. 0 and -1 keep all tokens."""

    min_p: Annotated[float, annotated_types.Ge(0), annotated_types.Le(1)] | None = None
    """Sample from the tokens whose probability is at least this fraction of the most likely token's. Must be in [0, 1].
    0 keeps all tokens. Nguyen et al. 2024."""

    typical_p: Annotated[float, annotated_types.Gt(0), annotated_types.Le(1)] | None = None
    """Locally typical sampling: sample from the tokens whose information content is closest to the expected one, up to
    this cumulative probability. Must be in (0, 1]. 1 keeps all tokens. Meister et al. 2022."""

    seed: Annotated[int, annotated_types.Ge(0), annotated_types.Le(2**63 - 1)] | None = None
    """Seed of the random generator. The same prompt, parameters and seed give the same completion whatever else the
    server runs, except for rounding, which depends on the batch's shape: in bfloat16 and float16 some completions
    change, in float32 hardly any."""

    repetition_penalty: Annotated[float, annotated_types.Ge(0.01), annotated_types.Le(100)] | None = None
    """Penalizes tokens that occur in the prompt or the completion: positive logits are divided by this value, negative
    ones multiplied. Values above 1 discourage repetition, values below 1 encourage it. 1 is off. CTRL, Keskar et al.
    2019, section 4.1."""

    presence_penalty: Penalty | None = None
    """Subtracted from the logits of tokens that occur in the completion; the prompt does not count. 0 is off."""

    frequency_penalty: Penalty | None = None
    """Subtracted from the logit of a token once per occurrence in the completion; the prompt does not count. 0 is
    off."""

    no_repeat_ngram_size: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_NGRAM_SIZE)] | None = None
    """No sequence of this many tokens occurs twice in prompt and completion. 0 is off."""

    bad_words: (
        Annotated[tuple[ShortText, ...], annotated_types.MaxLen(MAX_ENTRIES), BeforeValidator(read_words)] | None
    ) = None
    """Strings that must not be generated. Each is tokenized, and its token sequence is banned; another tokenization of
    the same string is not. Empty strings are ignored. Example: `["foo", "bar"]`."""

    logit_bias: (
        Annotated[dict[TokenId, Bias], annotated_types.MaxLen(MAX_ENTRIES), BeforeValidator(read_integer_keys)] | None
    ) = None
    """Added to the logits of tokens, by token id: `{"50256": -100}`."""

    allowed_token_ids: (
        Annotated[
            tuple[TokenId, ...],
            annotated_types.MinLen(1),
            annotated_types.MaxLen(MAX_TOKEN_IDS),
            BeforeValidator(read_token_ids),
        ]
        | None
    ) = None
    """Only these tokens are generated: an end-of-sequence token only if it is one of them. A grammar and a thinking
    budget hold as well, and where they and this list have no token in common, the output ends if it may end there, and
    the request fails if not. The list overrides `min_new_tokens` and `bad_words`, log probabilities are the model's
    own, and beam search does not take it."""

    suffix: Annotated[str, annotated_types.MaxLen(MAX_SUFFIX)] | None = None
    """The text behind the completion, which fills in what is between the prompt and it. For prompts of text, and models
    whose tokenizer has the tokens for it: Qwen2.5-Coder, CodeLlama, StarCoder, CodeGemma, DeepSeek-Coder, Codestral.
    Empty: none."""

    stop_strings: (
        Annotated[tuple[ShortText, ...], annotated_types.MaxLen(MAX_STOP_STRINGS), BeforeValidator(read_words)] | None
    ) = None
    """Generation stops before the first of these strings, which is not part of the output. A string that is a JSON
    array is read as one. Empty strings are ignored. Example: `["\\n\\n", "User:"]`."""

    include_stop_str_in_output: bool | None = None
    """Whether the output ends with the stop string that ended it."""

    stop_token_ids: (
        Annotated[tuple[TokenId, ...], annotated_types.MaxLen(64), BeforeValidator(read_one_or_many)] | None
    ) = None
    """Token ids that end the completion like an end-of-sequence token, in addition to those, also with `ignore_eos`.
    The token is not part of the output."""

    ignore_eos: bool | None = None
    """Whether to continue after an end-of-sequence token, up to `max_new_tokens`."""

    eos_token_id: (
        Annotated[
            tuple[TokenId, ...],
            annotated_types.MinLen(1),
            annotated_types.MaxLen(64),
            BeforeValidator(read_one_or_many),
        ]
        | None
    ) = None
    """End-of-sequence token ids to use instead of the model's own."""

    response_format: (
        Annotated[dict[str, Any], BeforeValidator(read_response_format), AfterValidator(check_response_format)] | None
    ) = None
    """Output format as in OpenAI's API: `{"type": "json_schema", "json_schema": {"schema": {...}}}` gives JSON that the
    schema allows, `{"type": "json_object"}` any JSON object, `{"type": "text"}` any text. An output that is whole has
    the finish reason `stop`; `max_new_tokens`, `max_time` and `stop_strings` cut it anywhere. The format overrides
    `min_new_tokens` and `bad_words`, and cannot be combined with `ignore_eos`. The same holds for the four `guided_`
    parameters."""

    guided_json: Annotated[dict[str, Any], BeforeValidator(read_object)] | None = None
    """JSON schema that the output follows; short for a `response_format` with this schema."""

    guided_regex: GrammarText | None = None
    """Regular expression that the whole output matches, in the syntax of Rust's `regex`: no look-around, no
    backreferences; `\\d` and `\\w` match digits and letters of all scripts, `[0-9]` and `[A-Za-z]` those of English."""

    guided_choice: (
        Annotated[
            tuple[ShortText, ...],
            annotated_types.MinLen(1),
            annotated_types.MaxLen(MAX_ENTRIES),
            BeforeValidator(read_strings),
        ]
        | None
    ) = None
    """Strings of which the output is one. A string that is a JSON array is read as one. Example: `["yes", "no"]`."""

    guided_grammar: GrammarText | None = None
    """Grammar that the output follows, in llguidance's Lark syntax, starting at its rule `start`: `start: "page "
    NUMBER` and, on a line of its own, `NUMBER: /[0-9]+/`. Terminals are greedy: what follows one must begin with a
    character that the terminal does not take. Or in GBNF, llama.cpp's syntax, starting at `root ::= `."""

    thinking_budget: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_NEW_TOKENS)] | None = None
    """Maximum number of tokens that the model thinks, before the closing tag of its thinking is forced: `</think>`. 0
    closes the block at once. For models whose response template names the tags; others pass it over."""

    num_beams: Annotated[int, annotated_types.Ge(1), annotated_types.Le(MAX_BEAMS)] | None = None
    """Number of hypotheses that beam search keeps; 1 is no beam search. In the batch engine (setting `engine`), with
    the results of transformers' `generate`. Its parameters `length_penalty` and `early_stopping` are by default the
    checkpoint's. Not combined with sampling, `best_of`, log probabilities, structured output and streams."""

    length_penalty: (
        Annotated[float, annotated_types.Ge(-MAX_LENGTH_PENALTY), annotated_types.Le(MAX_LENGTH_PENALTY)] | None
    ) = None
    """For beam search: a hypothesis's log probability is divided by its length to this power, so that higher values
    favour long completions. 1 is the mean per token, 0 the sum."""

    early_stopping: bool | None = None
    """For beam search: whether to end it once `num_beams` hypotheses have finished, or to go on as long as a better one
    is likely."""

    num_return_sequences: Annotated[int, annotated_types.Ge(1), annotated_types.Le(MAX_RETURN_SEQUENCES)] | None = None
    """Number of completions per prompt; more than one needs sampling, or `num_beams` of at least as many: the best
    hypotheses, the best one first."""

    best_of: Annotated[int, annotated_types.Ge(1), annotated_types.Le(MAX_RETURN_SEQUENCES)] | None = None
    """Number of completions to generate per prompt, of which the `num_return_sequences` with the highest mean log
    probability per token are returned. By default `num_return_sequences`."""

    logprobs: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_LOGPROBS)] | None = None
    """Number of most likely tokens that the output `logprobs` lists at each position, in addition to the generated
    token."""

    prompt_logprobs: Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_LOGPROBS)] | None = None
    """Fills the output `prompt_logprobs`: a JSON array with one object per prompt token, like those of `logprobs`, with
    the token itself and this many most likely ones; `null` for the first token, and instead of the array for a prompt
    without this parameter. A stream has it in its last response and, of a prompt of up to 256 tokens, beside the text
    with which a completion begins. To score a prompt, set `max_new_tokens` to 1.
    Encoder-decoder models reject it."""

    truncate_prompt_tokens: Annotated[int, annotated_types.Ge(-1), annotated_types.Le(2**31 - 1)] | None = None
    """Keep only this many tokens of the prompt, the last ones; -1 keeps as many as fit the context beside
    `max_new_tokens`. By default a prompt that does not fit is an error. The setting `max_prompt_bytes` holds for the
    prompt as it is sent."""

    max_time: Annotated[float, annotated_types.Gt(0), annotated_types.Le(MAX_SECONDS)] | None = None
    """Time limit in seconds, queueing included. When it is over, the completion ends with the tokens that it has."""

    src_lang: Annotated[str, annotated_types.MinLen(1)] | None = None
    """Language of the prompt, for the task `translation`: as the tokenizer spells it (`eng_Latn`, `en_XX`, `en`), or as
    the checkpoint's `task_specific_params` do (T5's `en`). Not for models of one pair of languages."""

    tgt_lang: Annotated[str, annotated_types.MinLen(1)] | None = None
    """Language to translate into, likewise."""

    lora_name: str | None = None
    """Name of the LoRA adapter to generate with, of the setting `adapters` or the folder's `adapters/`. By default, and
    if it is empty, none."""

    cache_salt: Annotated[str, annotated_types.MinLen(1), annotated_types.MaxLen(MAX_SALT_CHARACTERS)] | None = None
    """A text that no other client knows: only prompts with the same one share the KV cache of a prefix, so that neither
    `num_cached_tokens` nor times tell what others have sent. By default those without one share."""

    queue_priority: Annotated[int, annotated_types.Ge(-100), annotated_types.Le(100)] | None = None
    """Priority in the queue: lower values go first. Requests of equal priority take turns, one prompt each. By default
    0."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.do_sample is False and (name := self.warper) is not None:
            raise ValueError(f"{param(name)} has no effect with {param('do_sample')} false: leave one of them out")
        if self.do_sample is True and self.temperature is not None and self.temperature < GREEDY_BELOW:
            raise ValueError(
                f"{param('temperature')} {self.temperature:g} means greedy and contradicts {param('do_sample')} true: "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if self.max_new_tokens is not None:
            check_min_new_tokens(self.min_new_tokens, self.max_new_tokens)
        if self.num_return_sequences is not None:
            check_best_of(self.best_of, self.num_return_sequences)
        if self.truncate_prompt_tokens == 0:
            raise ValueError(f"{param('truncate_prompt_tokens')} must be -1 or an integer >= 1, got 0")
        if self.ignore_eos and self.eos_token_id is not None:
            raise ValueError(
                f"{param('eos_token_id')} has no effect with {param('ignore_eos')} true: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_beams(self) -> Self:
        if self.num_beams is not None and self.num_beams > 1:
            check_beams(self.num_beams, self.num_return_sequences or 1, self.beam_obstacle)
        return self

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        names = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(names) > 1:
            raise ValueError(f"{param_list(names[:2], ' and ')} both constrain the output: leave one of them out")
        also = self.end_parameter
        if self.grammar and also:
            raise ValueError(f"{param(also)} would end the output against {param(names[0])}: leave one of them out")
        return self

    @property
    def gives_grammar(self) -> bool:
        """Whether a parameter of `GRAMMARS` is given; `response_format` may still ask for plain text."""
        return any(getattr(self, name) is not None for name in GRAMMARS)

    @property
    def is_constrained(self) -> bool:
        is_plain = self.response_format is not None and self.response_format["type"] == "text"
        return self.gives_grammar and not is_plain

    @property
    def grammar(self) -> Grammar | None:
        """The constraint on the output, if any."""
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
    def warper(self) -> str | None:
        """A given parameter of `WARPERS` that changes the distribution."""
        for name in WARPERS:
            value = getattr(self, name)
            if value is not None and value not in (NEUTRAL_VALUES[name], 0, -1):
                return name
        return None

    @property
    def beam_obstacle(self) -> str | None:
        """A given parameter that beam search does not combine with."""
        if self.do_sample:
            return "do_sample"
        if self.best_of is not None and self.best_of > 1:
            return "best_of"
        if self.logprobs is not None:
            return "logprobs"
        if self.thinking_budget is not None:
            return "thinking_budget"
        return self.warper or (self.grammar.parameter if self.grammar else None)

    @property
    def end_parameter(self) -> str | None:
        """A given parameter whose end-of-sequence tokens are not those of a grammar."""
        if self.stop_token_ids:
            return "stop_token_ids"
        return "ignore_eos" if self.ignore_eos else None

    @property
    def wants_sampling(self) -> bool | None:
        """Whether to sample; None if no parameter says so."""
        if self.do_sample is not None:
            return self.do_sample
        if self.num_beams is not None and self.num_beams > 1:
            return False
        if self.temperature is not None:
            return self.temperature >= GREEDY_BELOW
        return True if any(getattr(self, name) is not None for name in WARPERS) else None


WARPERS: Final = ("temperature", "top_p", "top_k", "min_p", "typical_p")
"""Parameters that change the distribution to sample from."""
NEUTRAL_VALUES: Final[Mapping[str, float]] = {
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
"""The value with which each parameter has no effect."""


def check_min_new_tokens(min_new_tokens: int | None, max_new_tokens: int) -> None:
    if min_new_tokens is not None and min_new_tokens > max_new_tokens:
        raise ValueError(
            f"{param('min_new_tokens')} {min_new_tokens} is more than {param('max_new_tokens')} {max_new_tokens}: "
            "lower one or raise the other"
        )


def check_best_of(best_of: int | None, num_return_sequences: int) -> None:
    if best_of is not None and best_of < num_return_sequences:
        raise ValueError(
            f"{param('best_of')} {best_of} is less than {param('num_return_sequences')} {num_return_sequences}: "
            "raise one or lower the other"
        )


def beam_conflict(obstacle: str, num_beams: int) -> str:
    """The sentence about a parameter that beam search does not combine with."""
    return f"{param(obstacle)} cannot be combined with {param('num_beams')} {num_beams}: leave one of them out"


def check_beams(num_beams: int, num_return_sequences: int, obstacle: str | None) -> None:
    """Check what a search of several beams is asked for; `obstacle` is a parameter that does not combine with it."""
    if obstacle is not None:
        raise ValueError(beam_conflict(obstacle, num_beams))
    if num_return_sequences > num_beams:
        raise ValueError(
            f"{param('num_return_sequences')} {num_return_sequences} is more than {param('num_beams')} {num_beams}: "
            "lower one or raise the other"
        )


def read_beam_search(values: Mapping[str, object]) -> Mapping[str, object]:
    """Read vLLM's `use_beam_search`: the number of beams is `best_of`, or `n`, unless it is given by its own name."""
    wanted = values.get(BEAM_SEARCH)
    rest = {name: value for name, value in values.items() if name != BEAM_SEARCH}
    if wanted is None or wanted is False or not {"num_beams", "beam_width"}.isdisjoint(rest):
        return rest
    if wanted is not True:
        raise RequestError("invalid_parameter", f"{param(BEAM_SEARCH)} must be true or false, got {clip(wanted)}")
    width = rest.pop("best_of", None) or rest.get("n") or rest.get("num_return_sequences")
    if width is None:
        raise RequestError(
            "invalid_parameter", f"{param(BEAM_SEARCH)} needs {param('n')}, the number of beams and of completions"
        )
    return {"num_beams": width, **rest}


def parse_parameters(values: Mapping[str, object]) -> GenerationParameters:
    """Check one prompt's parameters, by our names or their aliases."""
    if BEAM_SEARCH in values:
        values = read_beam_search(values)
    if "max_completion_tokens" in values:  # OpenAI's clients also send its former name
        values = {name: value for name, value in values.items() if name != "max_tokens"}
    named = [(given, ALIASES.get(given, given), value) for given, value in values.items() if given not in GUIDES]
    spellings: dict[str, str] = {}
    checked: dict[str, object] = {}
    for given, name, value in (*named, *read_guides(values)):
        if has_no_effect(given, value):
            continue
        if name not in GenerationParameters.model_fields:
            raise unknown_parameter(given)
        if value is None:  # null in JSON: not given
            continue
        if name in spellings:
            raise RequestError(
                "invalid_parameter", f"{param_list((spellings[name], given), ' and ')} mean the same: leave one out"
            )
        spellings[name], checked[name] = given, value
    try:
        return GenerationParameters.model_validate(checked)
    except ValidationError as error:
        sentence = "; ".join(problem.open_sentence for problem in problems(GenerationParameters, error))
        raise RequestError("invalid_parameter", renamed(sentence, lambda name: spellings.get(name, name))) from None


def unknown_parameter(name: str, also: tuple[str, ...] = ()) -> RequestError:
    """The error for an unknown parameter; it suggests those of generation, and the names `also`."""
    if name in UNSUPPORTED:
        sentence = f"there is no parameter {clip(name)} ({UNSUPPORTED[name]}): leave it out"
    else:
        known = [*GenerationParameters.model_fields, *ALIASES, BEAM_SEARCH, *GUIDES, *also]
        meant = SUGGESTIONS.get(name)
        hint = suggest(meant if meant in known else name, known, "docs/requests.md", param)
        sentence = f"there is no parameter {clip(name)}{hint}"
    return RequestError("unknown_parameter", sentence, field=name[:MAX_NAME])
