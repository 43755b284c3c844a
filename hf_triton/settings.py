# SPDX-License-Identifier: Apache-2.0
"""What a model folder may say: config.pbtxt parameters and environment variables become one frozen, checked value.

Knows neither Triton nor the Hub. A setting comes from config.pbtxt's `parameters`, else from the environment variable
`HF_TRITON_` + its name in capitals, else it has its default. An unknown or impossible one is refused at load.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from hf_triton.errors import RequestError, SettingsError
from hf_triton.protocol.dialects import ALIASES
from hf_triton.protocol.parameters import GenerationParameters, parse_parameters
from hf_triton.protocol.validation import parse_boolean, problems, suggest

ENVIRONMENT_PREFIX: Final = "HF_TRITON_"
TRITONS_OWN: Final = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})
"""config.pbtxt parameters that Triton's Python backend reads itself."""
SECRET_WORDS: Final = ("token", "secret", "password", "api_key")

Seconds = Annotated[float, annotated_types.Gt(0), annotated_types.Le(7 * 24 * 3600)]
Count = Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)]


class ModelSettings(BaseModel):
    """Everything a folder may set. Subclass it for settings of your own: `settings_class` of the model names it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, str_strip_whitespace=True
    )

    huggingface_model: Annotated[str, annotated_types.MinLen(1)]
    """The model: its name on the Hub (`tiiuae/falcon-7b`), or a folder on disk (beginning with `/`, `./` or `../`,
    a relative one taken from the model folder)."""

    revision: Annotated[str, annotated_types.MinLen(1)] = "main"
    """Branch, tag or commit on the Hub. A 40-digit commit is the only one that never changes."""

    tokenizer: Annotated[str, annotated_types.MinLen(1)] | None = None
    """Where the tokenizer comes from when it is not the model's own: a Hub name or a folder."""

    tokenizer_revision: Annotated[str, annotated_types.MinLen(1)] = "main"
    """Branch, tag or commit of a separate `tokenizer`."""

    chat_template: Annotated[str, annotated_types.MinLen(1)] | None = None
    """A file with a Jinja chat template, in place of the tokenizer's own. A relative path is taken from the model
    folder."""

    cache_dir: str | None = None
    """A Hub cache folder to look in first and to download to. A relative one is taken from the model folder."""

    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` gives random weights of the shapes that the config says, so that a machine can be sized without a
    download of weights."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Number format of the weights. `auto` keeps the checkpoint's own; the log says so where a CPU has no instructions
    for that."""

    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """The attention code. `auto` is `sdpa` where the model has it, else `eager`; never what a downloaded config asks
    for, because that may name code on the Hub."""

    quantization_config: dict[str, Any] = {}
    """The whole of transformers' quantization config as JSON, such as
    `{"quant_method": "bitsandbytes", "load_in_4bit": true}`. Its package must be installed."""

    trust_remote_code: bool = False
    """Whether Python code from the model's repository may run in the server."""

    allow_pickle: bool = False
    """Whether weights may be read from pickle files (`pytorch_model.bin`) where there are no safetensors."""

    allow_extra_weights: bool = False
    """Whether the checkpoint may hold tensors that the model does not use, such as the image part of a model served
    for its text."""

    download_timeout_s: Seconds = 7200.0
    """Seconds that the download may take in all."""

    download_stall_timeout_s: Seconds = 180.0
    """Seconds without a byte from the Hub after which the download is given up."""

    max_output_length: Count = 128
    """New tokens to generate where a request does not say `max_new_tokens`. The prompt is not counted. At the end of
    the context this default becomes what is left of it."""

    max_context_length: Annotated[int, annotated_types.Ge(2), annotated_types.Le(2**31 - 1)] | None = None
    """Tokens that a prompt and its continuation may have together. By default what the model's config says, and 32768
    where it says nothing."""

    max_prompt_bytes: Count | None = None
    """Bytes that one prompt may have, checked before it is tokenized, because a tokenizer takes seconds for a
    megabyte. By default 16 times the context."""

    engine: Literal["auto", "rolling", "batch"] = "auto"
    """What runs the model. `rolling`: prompts join the running batch and leave it at any step. `batch`: `generate`, a
    padded batch at a time. `auto` tries at load whether rolling gives what `generate` gives."""

    max_prompts: Count = 1024
    """Prompts that one request may hold."""

    max_batch_rows: Annotated[int, annotated_types.Ge(1), annotated_types.Le(4096)] = 32
    """Texts that the engine generates at a time; the others wait."""

    max_waiting_prompts: Count = 4096
    """Prompts that may wait for a row, and as many for the tokenizer, a grammar or `build_prompt`. What comes on top is
    refused at once (`queue_full`, status 503), but for a request that finds nobody waiting."""

    max_cache_tokens: Annotated[int, annotated_types.Ge(256), annotated_types.Le(2**31 - 1)] | None = None
    """Tokens of key/value memory that the rolling engine may hold, padding counted. By default it takes what the device
    has free (on a CPU within the limits of its cgroup) as it needs it, and gives it back when it has nothing to do, but
    for what `share_prefixes` keeps. Where the texts outgrow it, the youngest wait; a request that could never fit is
    refused: prompt and `max_new_tokens` together, rounded up to a multiple of 128, must fit twice. States of hybrid
    models are not counted, but for those of past texts."""

    share_prefixes: bool = True
    """Whether the rolling engine computes a beginning that several prompts have in common, such as a system prompt or
    the turns before, only once. The time of an answer then tells whether somebody else sent the same beginning."""

    decoding: Literal["auto", "eager", "cuda_graphs"] = "auto"
    """How the rolling engine runs a step. `auto` is `cuda_graphs` on a GPU where the model can be captured, else
    `eager`."""

    pack_weights: Literal["auto"] | bool = "auto"
    """Whether the linear layers of a model on a CPU get their weights in the layout that oneDNN computes with, which
    rounds differently and takes memory beside the checkpoint file in the page cache. `auto` times each shape of layer
    at load, for 1, 4 and 16 rows, and packs those that are faster; the choice may differ between two starts."""

    generation_defaults: dict[str, Any] = {}
    """Request parameters to use where a request leaves them out, as JSON: `{"temperature": 0.7, "top_p": 0.9}`. Those
    that say how an answer is given have settings of their own (`stream`, `exclude_input_in_output`), or no default
    (`return_logprobs` and its like)."""

    exclude_input_in_output: bool = False
    """Whether `text_output` leaves the prompt out where a request does not say."""

    stream: bool = False
    """Whether a folder that says `model_transaction_policy { decoupled: true }` answers piece by piece where a request
    does not say. Then `/generate`, which takes one response only, needs `stream` false in the request."""

    metrics: bool = True
    """Whether what the model does is counted, for the server's metrics endpoint."""

    parameters_as_inputs: bool = False
    """Whether every request parameter is also declared as an optional input tensor, for clients that send tensors.
    JSON clients then get Triton's own messages for values of a wrong type."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.load_format == "dummy" and self.quantization_config:
            raise ValueError("quantization_config needs real weights: leave it out, or set load_format to auto")
        return self


class DoorSettings(BaseModel):
    """What a stream door's folder may set, which has no model of its own; the rest is set where the model is."""

    model_config = ModelSettings.model_config

    stream_of: Annotated[str, annotated_types.MinLen(1)] | None = None
    """The folder whose model writes the text. By default the door's own name without `_stream` at its end."""

    stream: bool = True
    """Whether the door answers piece by piece where a request does not say."""

    parameters_as_inputs: bool = False
    """Whether every request parameter is also declared as an optional input tensor."""


OUR_FIELDS: Final = frozenset([*ModelSettings.model_fields, *DoorSettings.model_fields])
Settings = TypeVar("Settings", ModelSettings, DoorSettings)


@dataclass(frozen=True)
class LoadedSettings(Generic[Settings]):
    """Settings and where each one came from."""

    settings: Settings
    sources: Mapping[str, str]
    """`config.pbtxt`, the variable's name, or `default`, by setting."""

    def describe(self) -> list[str]:
        """The start-up table: one setting a line, with its source."""
        values = {name: getattr(self.settings, name) for name in type(self.settings).model_fields}
        width = max(map(len, values))
        return [f"{name:<{width}} = {_shown(value)}  ({self.sources[name]})" for name, value in values.items()]


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return "-" if value is None else str(value)


def load_settings(
    parameters: Mapping[str, str],
    environment: Mapping[str, str],
    settings_class: type[Settings] = ModelSettings,  # type: ignore[assignment]
) -> LoadedSettings[Settings]:
    """Read and check a folder's settings.

    Args:
        parameters: config.pbtxt's `parameters`, by key.
        environment: The process's environment.
        settings_class: The declarations.

    Raises:
        SettingsError: Something is unknown, unusable or contradictory; the message names it, its value, where it came
            from and what would do.
    """
    fields = settings_class.model_fields
    _refuse_unknown(parameters, environment, fields)
    set_variables = {key: text for key, text in environment.items() if text.strip()}
    _refuse_twice(set_variables, fields)
    texts = {name: text for key, text in set_variables.items() if (name := _field_name(key, fields))}
    sources = dict.fromkeys(fields, "default") | {name: ENVIRONMENT_PREFIX + name.upper() for name in texts}
    ours = {key: text for key, text in parameters.items() if key in fields}
    texts |= ours
    sources |= dict.fromkeys(ours, "config.pbtxt")
    values = {name: _parse(text, fields[name].annotation) for name, text in texts.items()}
    try:
        settings = settings_class.model_validate(values)
        if isinstance(settings, ModelSettings):
            parse_parameters(settings.generation_defaults)
    except ValidationError as error:
        found = problems(settings_class, error)
        raise SettingsError("; ".join(_with_source(each.name, each.sentence, sources) for each in found)) from None
    except RequestError as error:
        sentence = error.sentence
        if "; known are" in sentence:
            sentence += "; those that say how an answer is given have no default here"
        raise SettingsError(_with_source("generation_defaults", f"generation_defaults: {sentence}", sources)) from None
    return LoadedSettings(settings, sources)


def _with_source(name: str, sentence: str, sources: Mapping[str, str]) -> str:
    source = sources.get(name, "default")
    if source != "default":
        return f"{sentence} (from {source})"
    if name and sentence.endswith("is required"):
        return f'{sentence}: add parameters {{ key: "{name}" value {{ string_value: "..." }} }} to config.pbtxt'
    return sentence


def _field_name(variable: str, fields: Iterable[str]) -> str | None:
    name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
    return name if variable.startswith(ENVIRONMENT_PREFIX) and name in fields else None


def _refuse_twice(variables: Mapping[str, str], fields: Iterable[str]) -> None:
    """Refuse a setting that two variables give, whose names differ in capitals, unless they say the same."""
    found: dict[str, str] = {}
    for variable, text in variables.items():
        name = _field_name(variable, fields)
        first = found.setdefault(name, variable) if name else variable
        if variables[first] != text:
            raise SettingsError(f"the environment has both {first} and {variable}, which differ: keep one of them")


def _refuse_unknown(parameters: Mapping[str, str], environment: Mapping[str, str], fields: Iterable[str]) -> None:
    for key in parameters:
        if key in fields or key in TRITONS_OWN:
            continue
        if key in GenerationParameters.model_fields or key in ALIASES:
            raise SettingsError(
                f"'{key}' (from config.pbtxt) is a parameter of requests and no setting: give its default as "
                f'parameters {{ key: "generation_defaults" value {{ string_value: "{{\\"{key}\\": ...}}" }} }}'
            )
        if any(word in key.lower() for word in SECRET_WORDS):
            raise SettingsError(
                f"'{key}' in config.pbtxt would be shown to every client by GET /v2/models/NAME/config: "
                "give the access token in the environment variable HF_TOKEN, or its file in HF_TOKEN_PATH"
            )
        raise SettingsError(f"there is no setting '{key}' (from config.pbtxt){suggest(key, fields)}")
    for variable in environment:
        if variable.startswith(ENVIRONMENT_PREFIX) and _field_name(variable, {*fields, *OUR_FIELDS}) is None:
            known = [ENVIRONMENT_PREFIX + name.upper() for name in sorted({*fields, *OUR_FIELDS})]
            hint = suggest(variable, known)
            if "did you mean" in hint:  # any other may be a setting of another folder's own
                raise SettingsError(f"there is no setting behind the environment variable {variable}{hint}")


def _parse(text: str, annotation: Any) -> Any:
    """Read a setting's text as its type; what cannot be read is left for the check to refuse."""
    if annotation is bool or bool in typing.get_args(annotation):
        return parse_boolean(text)
    if typing.get_origin(annotation) in (dict, list):
        try:
            return json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, thousands of brackets
            return text
    return text
