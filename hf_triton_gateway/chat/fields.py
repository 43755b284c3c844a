# SPDX-License-Identifier: Apache-2.0
"""The fields of requests, shared by the endpoints, and their names in `hf_triton.protocol`.

Sampling fields take their types and ranges from `GenerationParameters`: nothing is declared twice.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, get_args

import annotated_types
from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema

from hf_triton.errors import clip
from hf_triton.protocol.chat_request import MAX_MESSAGES, MAX_TOOLS
from hf_triton.protocol.dialects import ALIASES as DIALECTS
from hf_triton.protocol.dialects import BEAM_SEARCH
from hf_triton.protocol.image_files import LOOSE
from hf_triton.protocol.parameters import MAX_STOP_STRINGS, WARPERS, GenerationParameters
from hf_triton.protocol.structured_output import VLLM_GUIDES
from hf_triton.protocol.validation import is_slip, problems
from hf_triton.sentence import first_field, param, renamed
from hf_triton_gateway.http.api_errors import ApiError, unknown_field
from hf_triton_gateway.http.bodies import MAX_VALUES
from hf_triton_gateway.http.client_names import ClientNames, head_of
from hf_triton_gateway.http.hints import pass_over
from hf_triton_gateway.triton.triton_messages import TEXT_GENERATION

CONFIG: Final = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

SAMPLING: Final[Mapping[str, str]] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "priority": "queue_priority",
    "timeout": "max_time",
    "thinking_token_budget": "thinking_budget",
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "typical_p", "do_sample", "seed"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
            *("logit_bias", "bad_words", "ignore_eos", "best_of", "max_time", "truncate_prompt_tokens"),
            *("stop_token_ids", "include_stop_str_in_output", "length_penalty", "early_stopping"),
            *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("lora_name", "thinking_budget", "cache_salt", "allowed_token_ids"),
        )
    },
}
"""OpenAI's and vLLM's names of sampling parameters, and ours."""
PASSED_ON: Final[Mapping[str, str]] = {
    "stop": "stop_strings",
    "structured_outputs": "structured_outputs",
    "guided_decoding": "guided_decoding",
    BEAM_SEARCH: BEAM_SEARCH,
}
"""The names of parameters whose fields are declared here, and ours."""
CLIENT_NAMES: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "queue_priority": "priority",
    "stop_strings": "stop",
}
"""What OpenAI's clients call our parameters."""
MAX_TOP_LOGPROBS: Final = 20

MAX_TEXTS: Final = 10_000
"""One request has no more."""
MAX_PROMPTS: Final = 1024
"""Prompts of token ids in one request: each is a request to Triton."""
MAX_ITEMS: Final = 1024
"""Lists that say nothing else have no more items."""
Messages = Annotated[list[dict[str, Any]], annotated_types.MinLen(1), annotated_types.MaxLen(MAX_MESSAGES)]
Tools = Annotated[list[dict[str, Any]], annotated_types.MaxLen(MAX_TOOLS)]
StopStrings = Annotated[list[str], annotated_types.MaxLen(MAX_STOP_STRINGS)]
Texts = Annotated[list[str], annotated_types.MaxLen(MAX_TEXTS)]
TokenIds = Annotated[list[int], annotated_types.MaxLen(MAX_VALUES)]
TokenLists = Annotated[list[TokenIds], annotated_types.MaxLen(MAX_TEXTS)]


def sampling_fields(name: str, fields: Collection[str]) -> type[BaseModel]:
    """A model with fields of SAMPLING, as `GenerationParameters` declares them."""
    declared = {field: GenerationParameters.model_fields[SAMPLING[field]] for field in fields}
    definitions: dict[str, Any] = {field: (own.annotation, None) for field, own in declared.items()}
    made: type[BaseModel] = create_model(name, __config__=CONFIG | {"use_attribute_docstrings": False}, **definitions)
    made.model_config = CONFIG  # the models that inherit it have docstrings
    return made


if TYPE_CHECKING:

    class SamplingFields(BaseModel):
        """The fields of SAMPLING."""

        n: int | None
        max_tokens: int | None
        best_of: int | None
else:
    SamplingFields = sampling_fields("SamplingFields", SAMPLING)


ALIASES: Final[Mapping[str, str]] = {
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "regex": "guided_regex",
    **dict.fromkeys(("ebnf", "grammar"), "guided_grammar"),
    "json_schema": "guided_json",
    "truncation_direction": "truncation_side",
}
"""Names of Ollama, llama.cpp, SGLang and TEI for our fields, where the body has those and not the field itself."""
OWN_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    **{own: (name,) for name, own in SAMPLING.items()},
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "stop_strings": ("stop", "stop_sequences"),
}
"""The fields of parameters that have transformers' names, by endpoint."""
MEANINGS: Final[Mapping[str, str]] = {
    **DIALECTS,
    **{name: own for own, names in OWN_NAMES.items() for name in names},
    **SAMPLING,
    **PASSED_ON,
    "instructions": "system",
    **dict.fromkeys(("input", "multi_modal_data", *LOOSE), "messages"),
    "output_config": "response_format",
    "reasoning": "reasoning_effort",
}
"""What names of fields stand for at all endpoints, to suggest the one that an endpoint has."""
GENERATION_CONFIG: Final = "generation_config"
"""What `transformers chat` sends: what to generate with, as the folder's file of this name has it."""
AS_ABSENT: Final[Mapping[str, object]] = {
    **dict.fromkeys(("seed", "num_predict", "n_predict"), -1),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), -1),
    "max_tokens_per_doc": 0,
}
"""Values of numbers that mean what leaving the field out means."""
UNSERVED: Final = frozenset(
    (
        *("options", "parameters", "sampling_params", "extra_body", "generationConfig", "responseFormat", "maxTokens"),
        *("random_seed", "sampling_seed", "topK", "topP", "temp", "typical", "rep_pen", "penalty", "top_n_sigma"),
        *("max_length", "min_length", "max_input_tokens", "max_total_tokens", "max_tokens_to_sample", "stop_words"),
        *("min_output_tokens", "stop_at", "stop_regex", "suppress_tokens", "force_words_ids", "forced_eos_token_id"),
        *("banned_tokens", "custom_token_bans", "allowed_tokens", "logits_bias", "custom_logit_processor", "watermark"),
        *("guidance_scale", "penalty_alpha", "epsilon_cutoff", "eta_cutoff", "add_special_tokens", "num_beam_groups"),
        *("prefill", "prefix", "assistant_prefix", "response_prefix", "negative_prompt", "system_prompt", "template"),
        *("enable_thinking", "thinking_config", "reasoning_budget", "response_schema", "structured_output", "schema"),
        *("json_mode", "json_object", "json", "choice", "grammar_string", "text_format", "structural_tag"),
        *("guided_structural_tag", "prompt_embeds", "input_ids", "input_embeds", "context", "multi_modal_data", *LOOSE),
        *("lora_path", "lora_request", "adapter", "adapters", "adapter_id", "background", "conversation"),
    )
)
"""Fields of other servers that would change the answer, under names that no endpoint here has: refused."""
MAX_UNKNOWN: Final = 32
"""Unknown fields that are passed over: each is compared with the known ones."""
NOTHING: Final[tuple[object, ...]] = (None, [], {})
"""Values that ask for nothing, in any field without which a request is whole."""


@dataclass(frozen=True)
class Ignored:
    """A field that is passed over: all of its values, or those that ask for nothing."""

    values: tuple[object, ...] | None = ()
    """The values that ask for nothing, beside those of NOTHING; None: any value is passed over."""
    reason: str = "is not supported"
    is_hint: bool = False
    """Whether a value that asks for something changes no answer: it is passed over, and the response names it."""

    def check(self, name: str, value: object) -> None:
        """Pass a value over, or refuse it."""
        if self.values is None or any(value is one or value == one for one in (*NOTHING, *self.values)):
            return
        if self.is_hint:
            pass_over(name)
            return
        allowed = " or ".join(["null", *map(clip, self.values)])
        raise ApiError(
            400,
            f"{param(name)} {self.reason}: leave it out, or set it to {allowed}; got {clip(value)}",
            param=name,
            code="unsupported_parameter",
        )


OFF: Final = "is a way of sampling that is always off"
HINT: Final = Ignored(is_hint=True)
ONE_TIER: Final = Ignored(("auto", "default", "standard_only"), is_hint=True)
"""The rule of `service_tier`: there is one here."""
IGNORED: Final[Mapping[str, Ignored]] = {
    **dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), HINT),
    **dict.fromkeys(("prompt_cache_options", "cache_prompt", "prediction", "web_search_options"), HINT),
    "service_tier": ONE_TIER,
    "modality": Ignored(("text",), "is text here"),
    "verbosity": Ignored(("medium",), is_hint=True),
    "guided_decoding_backend": Ignored(("auto",), is_hint=True),
    "store": Ignored((False,), "keeps completions, and this server keeps none"),
    "modalities": Ignored((["text"],), "is text alone"),
    "functions": Ignored(reason="is the former name of tools"),
    "function_call": Ignored(("none",), "is the former name of tool_choice"),
    **dict.fromkeys(("audio", "moderation"), Ignored()),
    "suffix": Ignored(("",), "is for /v1/completions"),
    "truncation_side": Ignored(("left",), "is left for models that generate"),
    "skip_special_tokens": Ignored((True,), "is always true"),
    "spaces_between_special_tokens": Ignored((True,), "is always true"),
    "return_tokens_as_token_ids": Ignored((False,), "is always false"),
    **dict.fromkeys(("chat_template", "chat_template_content_format"), Ignored(("auto",), "is the server's own")),
    **dict.fromkeys(("documents", "mm_processor_kwargs", "kv_transfer_params"), Ignored()),
    **dict.fromkeys(("mirostat", "xtc_probability", "dry_multiplier", "dynatemp_range", "top_a"), Ignored((0,), OFF)),
    "tfs_z": Ignored((1,), OFF),
    **dict.fromkeys(("structural_tag", "stop_regex", "samplers", "logprob_token_ids"), Ignored()),
    **dict.fromkeys(("return_hidden_states", "no_stop_trim", "return_routed_experts"), Ignored((False,))),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), Ignored((True,), "is always true")),
    **dict.fromkeys(("logits_processors", "vllm_xargs", "guided_whitespace_pattern"), Ignored()),
}
"""Fields of OpenAI's API and of other servers. Hints are passed over; others, if they ask for nothing."""


INCLUDE_USAGE: Final = "include_usage"
CONTINUOUS_USAGE: Final = "continuous_usage_stats"
STREAM_OPTIONS: Final = (INCLUDE_USAGE, CONTINUOUS_USAGE, "include_obfuscation")
"""What `stream_options` may hold; the last is accepted and changes nothing."""


def _bounded(schema: Any) -> Any:
    """A schema whose lists have a maximum length, and end at the first wrong item.

    pydantic makes an error of each wrong item: 2 kB for two bytes of a body.
    """
    if isinstance(schema, list):
        return [_bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {key: _bounded(each) for key, each in schema.items()}
    if schema.get("type") == "list":
        return {"max_length": MAX_ITEMS, **bounded, "fail_fast": True}
    return bounded


class Fields(BaseModel):
    """A request's body: its problems are `ApiError`s that name the field."""

    model_config = CONFIG
    ignored: ClassVar[Mapping[str, Ignored]] = IGNORED
    task_of_model: ClassVar[str | None] = None
    """What the model must do that a body means which names none, or ANY_TASK; None: it must name one."""
    is_open: ClassVar[bool] = False
    """Whether an unknown field is passed over: a whole body's, since new clients and those of other servers send fields
    that change nothing here. One that is near a known one, or means something at another endpoint, is refused."""
    _everywhere: ClassVar[set[str]] = {*GenerationParameters.model_fields, *ALIASES}
    _words: dict[str, str] = PrivateAttr(default_factory=dict)
    """What the client calls fields that it gives by another name."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        """Note the fields of a whole body."""
        if cls.is_open:
            cls._everywhere.update(cls.model_fields)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The fields' validation, with a bound on every list."""
        schema: CoreSchema = _bounded(handler(source))
        return schema

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(values, dict):
            return validate(values)  # refused: it must be an object
        words: Mapping[str, str] = {}
        if cls.is_open and values.get(GENERATION_CONFIG) is not None:
            values, words = _with_generation_config(values, cls.model_fields)
        known: dict[str, Any] = {}
        sent: dict[str, str] = {}
        num_unknown = 0
        for given, value in values.items():
            name = cls._own_name(given)
            if name in cls.model_fields:
                if _is_absent(given, value):
                    continue
                if name in known:
                    message = f"{sent[name]} and {given} are one field: leave one of them out"
                    raise ApiError(400, message, param=given, code="invalid_parameter")
                sent[name] = words.get(given, given)
                known[name] = _whole(value) if name in cls.whole_numbers() else value
            elif rule := cls.ignored.get(name) or (IGNORED.get(name) if cls.is_open else None):
                rule.check(name, value)
            elif value in NOTHING:
                pass_over(name)
            elif cls.is_open and num_unknown < MAX_UNKNOWN and not cls._is_slip(name):
                num_unknown += 1
                pass_over(name)
            else:
                raise unknown_field(name, cls.known(), cls._meant(name))
        try:
            checked = validate(known)
            checked._words = {name: word for name, word in sent.items() if name != word}
            return checked
        except ValidationError as error:
            problem = problems(cls, error)[0]
            place = problem.name or first_field(problem.open_sentence)
            code = "missing_required_parameter" if problem.is_missing else "invalid_parameter"
            sentence = renamed(problem.open_sentence, lambda path: _spelt(path, sent))
            raise ApiError(400, sentence, param=place and _spelt(place, sent), code=code) from None

    @classmethod
    def _own_name(cls, name: str) -> str:
        """The field that a name means."""
        own = ALIASES.get(name, name)
        return own if own in cls.model_fields and name not in cls.model_fields else name

    @classmethod
    def _is_slip(cls, name: str) -> bool:
        """Whether a name that is no field was meant to be one."""
        return is_slip(name.lower(), cls.model_fields) or name in cls._everywhere or name in UNSERVED

    @classmethod
    def known(cls) -> Collection[str]:
        """The names of the fields that a client can send."""
        return cls.model_fields

    @classmethod
    def _meant(cls, name: str) -> str | None:
        """The field that means what another endpoint's field of this name means."""
        name = ALIASES.get(name, name)
        own = MEANINGS.get(name, name)
        return next((field for field in cls.model_fields if MEANINGS.get(field, field) == own), None)

    def word(self, name: str) -> str:
        """What the client calls a field."""
        return self._words.get(name, name)

    def names_of(self, names: Mapping[str, str | None], **more: Any) -> ClientNames:
        """Names for error messages, as this request spells its fields; `names` are the body's fields by our names."""
        words = {own: name and self.word(name) for own, name in names.items()}
        fields = {*type(self).known(), *map(head_of, self._words.values())}
        return ClientNames({**self._words, **words}, fields, **more)

    @classmethod
    @cache
    def whole_numbers(cls) -> frozenset[str]:
        """The fields that take whole numbers, or lists of them, and no others."""
        kinds = {name: _kinds(field.annotation) for name, field in cls.model_fields.items()}
        return frozenset(name for name, kind in kinds.items() if int in kind and float not in kind)


def _spelt(path: str, sent: Mapping[str, str]) -> str:
    """A place as the client spells its field."""
    head = head_of(path)
    return sent.get(head, head) + path[len(head) :]


def _is_absent(name: str, value: object) -> bool:
    """Whether a value means what leaving the field out means."""
    return value is None or (type(value) in (int, float) and AS_ABSENT.get(name) == value)


def _with_generation_config(
    values: Mapping[str, Any], known: Collection[str]
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """The fields, and behind them those of transformers' `generation_config`, an object or its JSON text.

    Also the places of the latter, by field.
    """
    given = values[GENERATION_CONFIG]
    try:
        config = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        config = None
    if not isinstance(config, dict):
        message = f"{GENERATION_CONFIG} must be a JSON object, or its text, got {clip(given)}"
        raise ApiError(400, message, param=GENERATION_CONFIG, code="invalid_parameter")
    fields, places = {}, {}
    for name, value in config.items():
        own = next((each for each in OWN_NAMES.get(name, ()) if each in known), None)
        if own is not None:
            fields[own], places[own] = value, f"{GENERATION_CONFIG}.{name}"
        else:
            pass_over(f"{GENERATION_CONFIG}.{name}")
    own_values = {
        name: value for name, value in values.items() if name != GENERATION_CONFIG and not _is_absent(name, value)
    }
    return {**fields, **own_values}, {name: place for name, place in places.items() if name not in own_values}


def _kinds(annotation: object) -> set[object]:
    """The types that an annotation is made of."""
    parts = get_args(annotation)
    return {annotation}.union(*map(_kinds, parts)) if parts else {annotation}


def _whole(value: Any) -> Any:
    """Numbers such as 3.0 as whole ones: JSON has one kind of number, and some clients write all of them so."""
    if isinstance(value, list):
        return [_whole(each) for each in value] if any(type(each) is float for each in value) else value
    return int(value) if type(value) is float and value.is_integer() else value


class GenerationFields(Fields, SamplingFields):
    """The fields that chats and completions share."""

    is_open: ClassVar[bool] = True
    task_of_model: ClassVar[str | None] = TEXT_GENERATION

    model: Annotated[str, annotated_types.MinLen(1)]
    """One of `/v1/models`; by default the only one of its task, or `--default-model`."""

    stream: bool | None = None
    """Whether to send the response in pieces, as server-sent events."""

    stream_options: dict[str, Any] | None = None
    """With `stream` only: `{"include_usage": true}` ends the stream with a chunk of usage; with
    `"continuous_usage_stats": true` beside it, each chunk has the usage of its choice so far."""

    stop: str | StopStrings | None = None
    """Up to 16 strings; generation stops before the first of them."""

    structured_outputs: dict[str, Any] | None = None
    """vLLM's form of the `guided_` fields: `json`, `regex`, `choice` or `grammar`."""

    guided_decoding: dict[str, Any] | None = None
    """Former name of `structured_outputs`."""

    use_beam_search: bool | None = None
    """Whether to search by `n` beams, in models that run in the batch engine."""

    return_token_ids: bool | None = None
    """Whether to add the token ids of prompt and completion."""

    @property
    def num_choices(self) -> int:
        """Completions of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        if self.stream_options is None:
            return False
        included = self.stream_options.get(INCLUDE_USAGE)
        return bool(self.stream_options.get(CONTINUOUS_USAGE) if included is None else included)

    @property
    def counts_continuously(self) -> bool:
        """Whether each chunk of a stream has usage."""
        return (
            self.includes_usage and self.stream_options is not None and bool(self.stream_options.get(CONTINUOUS_USAGE))
        )

    @property
    def token_outputs(self) -> tuple[str, ...]:
        """The outputs of token ids that the answer is made of."""
        if self.return_token_ids:
            return "token_ids", "prompt_token_ids"
        return ("token_ids",) if self.counts_continuously else ()

    def chunk_head(self, head: dict[str, Any]) -> dict[str, Any]:
        """What a stream's chunks begin with: where only its end has usage, theirs is null."""
        return head if self.counts_continuously or not self.includes_usage else head | {"usage": None}

    def sampling_parameters(self) -> dict[str, object]:
        """The sampling parameters that are given, by our names."""
        self._check_stream_options()
        given: dict[str, object] = {}
        for name, own in (*SAMPLING.items(), *PASSED_ON.items()):
            if (value := getattr(self, name)) is not None:
                given[own] = value  # max_completion_tokens wins over its former name, max_tokens
        if self.num_choices > 1 and not (self.use_beam_search or given.keys() & {"do_sample", *WARPERS}):
            given["do_sample"] = True  # n asks for different completions
        return given

    def _check_stream_options(self) -> None:
        if not self.stream_options:
            return
        if not self.stream:
            raise ApiError(
                400, f"{param('stream_options')} is for {param('stream')} true: leave one out", param="stream_options"
            )
        for name, value in self.stream_options.items():
            if name not in STREAM_OPTIONS:
                raise unknown_field(f"stream_options.{name}", [f"stream_options.{known}" for known in STREAM_OPTIONS])
            if not isinstance(value, bool | None):
                message = f"{param(f'stream_options.{name}')} must be true or false, got {clip(value)}"
                raise ApiError(400, message, param=f"stream_options.{name}")

    def client_names(self, **more: str) -> ClientNames:
        """Names of our parameters as this request spells them, for error messages; `more` of other fields."""
        given = {own: name for name, own in (*SAMPLING.items(), *PASSED_ON.items()) if getattr(self, name) is not None}
        guides = {
            VLLM_GUIDES[name]: f"{form}.{name}"
            for form in ("guided_decoding", "structured_outputs")
            for name in getattr(self, form) or ()
            if name in VLLM_GUIDES
        }
        width = self.word("n" if self.best_of is None else "best_of")
        names = {**CLIENT_NAMES, "num_beams": f"{BEAM_SEARCH} with {width}", **guides, **given, **more}
        return self.names_of(names)
