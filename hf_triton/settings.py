# SPDX-License-Identifier: Apache-2.0
"""Settings of a model folder, from config.pbtxt and the environment to one frozen, checked object.

Knows neither Triton nor the Hub. A setting comes from config.pbtxt's `parameters`, then from the environment variable
`HF_TRITON_` + its name in capitals, then from its default. An unknown name or an impossible value fails the load.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar

import annotated_types
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from hf_triton.errors import RequestError, SettingsError, clip
from hf_triton.protocol.dialects import ALIASES
from hf_triton.protocol.durations import Duration
from hf_triton.protocol.names import SERVER_VARIABLE, TaskName
from hf_triton.protocol.parameters import GenerationParameters, parse_parameters
from hf_triton.protocol.validation import parse_boolean, problems, suggest

ENVIRONMENT_PREFIX: Final = "HF_TRITON_"
TRITON_SETTINGS: Final = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})
"""config.pbtxt parameters that Triton's Python backend reads itself."""
CONFIG: Final = "config.pbtxt"
SERVICE_LINK: Final = re.compile(
    r"HF_TRITON_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""What Kubernetes tells each pod of a Service whose name begins with `hf-triton`. No setting."""
HUB_ADDRESS: Final = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/((?!(?:datasets|spaces|docs|collections|papers)/)[\w.-]+/[\w.-]+)(:\w[\w.-]*)?"
    r"(?:/(tree|blob|resolve)/([\w.-]+)(?:/([\w./-]+?))?)?/?(?:\?[^#]*)?(?:#.*)?"
)
"""The address of a model's page, or of a file of it, with the revision behind `tree`, `blob` or `resolve`."""
MOST_SEQS: Final = 4096
"""The most sequences that one model can run at a time."""
HINTS: Final[Mapping[str, str]] = {"task": "; a folder whose 1/model.py has a task_class sets no task"}
"""More to say of a wrong value, by setting."""
SECRET_WORDS: Final = ("token", "secret", "password", "api_key")

Seconds = Annotated[float, annotated_types.Gt(0), annotated_types.Le(7 * 24 * 3600)]
Count = Annotated[int, annotated_types.Ge(1), annotated_types.Le(2**31 - 1)]


def compile_header_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of headers' names as Triton does: capitals count if it begins with `(?-i)` alone.

    Raises:
        ValueError: It is no regular expression.
    """
    is_exact = pattern.startswith("(?-i)")
    try:
        return re.compile(pattern.removeprefix("(?-i)"), re.NOFLAG if is_exact else re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"forwarded_headers must be a regular expression, got {clip(pattern)}: {error}") from None


def _check_adapter_name(name: str) -> str:
    if not ADAPTER_NAME.fullmatch(name):
        raise ValueError(f"a name in adapters must be 1 to 64 of A-Z a-z 0-9 . _ -, got {clip(name)}")
    return name


def _check_file_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.+ -]*(/\w[\w.+ -]*)?", name):
        raise ValueError(
            f"gguf_file must be a file's name in the repository, or a quantisation (Q4_K_M), got {clip(name)}"
        )
    return name


def hub_name(model: str) -> str:
    """A model's name as commands take it, if it is given as the address of its page on the Hub: `Qwen/Qwen3-0.6B`."""
    found = HUB_ADDRESS.fullmatch(model)
    if found is None:
        return model
    name, quantisation, kind, revision, file = found.groups()
    named = quantisation or (f":{file}" if file and kind != "tree" else "")
    return f"{name}{named}{f'@{revision}' if revision not in (None, 'main') else ''}"


def _check_model_name(model: str) -> str:
    name = hub_name(model)
    if name != model and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        alone = re.split("[:@]", name)[0]
        raise ValueError(
            f"huggingface_model must be {alone} alone, got {clip(model)}: set revision or gguf_file to more"
        )
    return name


def _check_header_pattern(pattern: str) -> str:
    compile_header_pattern(pattern)
    return pattern


@dataclass(frozen=True)
class FormerName:
    """Metadata of a field: its name in earlier versions, still accepted."""

    name: str


@dataclass(frozen=True)
class FormerValue:
    """Metadata of a field: one of its values as earlier versions spelled it, still accepted."""

    old: str
    new: str


ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of LoRA adapters; a colon stands between a model's and an adapter's."""
DEFAULT_MODELS: Final[Mapping[TaskName, tuple[str, str]]] = {
    "text-generation": ("HuggingFaceTB/SmolLM3-3B", "a07cc9a"),
    "feature-extraction": ("distilbert/distilbert-base-cased", "6ea8117"),
    "text-classification": ("distilbert/distilbert-base-uncased-finetuned-sst-2-english", "714eb0f"),
    "token-classification": ("dbmdz/bert-large-cased-finetuned-conll03-english", "4c53496"),
    "fill-mask": ("distilbert/distilroberta-base", "fb53ab8"),
    "zero-shot-classification": ("facebook/bart-large-mnli", "d7645e1"),
    "image-classification": ("google/vit-base-patch16-224", "3f49326"),
    # Tasks of transformers 4 alone:
    "question-answering": ("distilbert/distilbert-base-cased-distilled-squad", "564e9b5"),
    "summarization": ("sshleifer/distilbart-cnn-12-6", "a4f8f3e"),
    "translation": ("google-t5/t5-base", "a9723ea"),
    "text2text-generation": ("google-t5/t5-base", "a9723ea"),
}
"""The models that transformers' pipelines take for a task, and their revisions."""


class ModelSettings(BaseModel):
    """Settings of a model folder. Subclass it to add your own; the model's `settings_class` names the subclass."""

    model_config = ConfigDict(
        defer_build=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        str_strip_whitespace=True,
    )

    huggingface_model: Annotated[str, annotated_types.MinLen(1), AfterValidator(_check_model_name)]
    """The model to serve: a name on the Hub (`tiiuae/falcon-7b`) or the address of its page, or a path that begins with
    `/`, `./` or `../`. Relative paths start at the model folder. A folder with a `task` may leave it out, and gets the
    default model of transformers' pipeline for that task, if there is one."""

    task: TaskName | None = None
    """What the model does. By default what the checkpoint's files say: `embeddings` or `sparse-embeddings` for models
    of sentence-transformers, `embeddings` for encoders without a head, otherwise what the model's head is for.
    `feature-extraction`, `tokenization`, `zero-shot-classification`, `summarization`, `translation` and
    `text2text-generation` must be set."""

    revision: Annotated[str, annotated_types.MinLen(1)] = "main"
    """Branch, tag or commit of the model on the Hub. Only a 40-digit commit never changes."""

    gguf_file: Annotated[str, AfterValidator(_check_file_name)] | None = None
    """The GGUF file to load: its name in the repository or folder, or the end of it, the quantisation (`Q4_K_M`). By
    default, if there are no other weights, the only one. On a CPU its layers keep their bits unless `dtype` is set."""

    tokenizer: Annotated[str, annotated_types.MinLen(1)] | None = None
    """Hub name or path of a tokenizer to use instead of the model's own."""

    tokenizer_revision: Annotated[str, annotated_types.MinLen(1)] = "main"
    """Branch, tag or commit of `tokenizer`."""

    chat_template: Annotated[str, annotated_types.MinLen(1)] | None = None
    """Path of a Jinja chat template to use instead of the tokenizer's own. Relative paths start at the model folder."""

    response_template: Annotated[str, annotated_types.MinLen(1)] | None = None
    """How the model writes tool calls and reasoning, for the output `message`: the name of a response template of
    hf_triton (see docs/chat.md), or the path of a JSON file in transformers' form; `none` leaves all in the content.
    By default the checkpoint's own, else the one that fits the chat template. Relative paths start at the model
    folder."""

    strict_tools: bool = False
    """Whether the arguments of each call follow the tool's schema also where the model chooses to call it, as if each
    tool that does not say so were `strict`."""

    cache_dir: str | None = None
    """Hub cache to look in first and to download to. Relative paths start at the model folder."""

    load_format: Literal["auto", "dummy"] = "auto"
    """How to load the weights. `dummy` fills them with random values without downloading them, to size a machine."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of the weights. `auto` keeps the checkpoint's; the log warns if the CPU has no instructions for it."""

    runtime: Literal["torch", "onnx", "onnx-cuda", "onnx-tensorrt", "openvino"] = "torch"
    """What computes an encoder: PyTorch; or, with the graph of a folder that `hf-triton optimize` wrote, OpenVINO, or
    ONNX Runtime on a CPU, by its provider for CUDA or for TensorRT, on the processor or GPU and with the version that
    the folder was written for."""

    precision: Literal["float32", "int8"] = "float32"
    """Number format of that graph."""

    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention implementation. `auto` is `sdpa` if the model supports it, otherwise `eager`. The checkpoint's own
    choice is ignored, because it may name code on the Hub."""

    quantization_config: dict[str, Any] = {}
    """transformers' quantization config as JSON: `{"quant_method": "bitsandbytes", "load_in_4bit": true}`. The method's
    package must be installed."""

    weights: Literal["auto", "int8", "int4"] = "auto"
    """Bits that linear layers of a language model keep on a CPU. Each is rounded when its weight is read: `int8` keeps
    8 bits, `int4` 4 bits, with a scale for each 32 numbers; the output head and the embeddings have 8 bits in both.
    `auto` rounds nothing. Not with a GPU, a quantised checkpoint or tasks of encoders: see docs/quantisation.md."""

    trust_remote_code: bool = False
    """Whether to run Python code from the model's repository. Turn it on only for repositories that you trust."""

    allow_pickle: bool = False
    """Whether to load pickled weights (`pytorch_model.bin`) if there are no safetensors. A pickle can run any code."""

    allow_extra_weights: bool = False
    """Whether the checkpoint may hold tensors that the model does not use, such as the vision tower of a model that is
    served as a language model."""

    download_timeout_s: Seconds = 7200.0
    """Time limit in seconds for the whole download."""

    download_stall_timeout_s: Seconds = 180.0
    """Seconds without data from the Hub after which the download fails."""

    max_output_length: Count = 128
    """Default of `max_new_tokens`, the maximum number of tokens to generate; the prompt does not count. The default
    shrinks to the space that the prompt leaves in the context."""

    max_context_length: Annotated[int, annotated_types.Ge(2), annotated_types.Le(2**31 - 1)] | None = None
    """Maximum number of tokens of prompt and completion together. By default the model config's, or 32768 if the config
    gives none."""

    max_prompt_bytes: Count | None = None
    """Maximum size of one prompt in UTF-8 bytes, checked before tokenization, which takes seconds for a megabyte. By
    default 16 times the context length; for encoders at least 262144, as they cut texts or read them in windows; for
    files of audio 67108864. Of models that read images, the maximum size of one image as it is sent; by default 32
    MiB."""

    engine: Annotated[Literal["auto", "continuous", "batch"], FormerValue("rolling", "continuous")] = "auto"
    """Engine that generates. `continuous` is continuous batching: sequences join and leave the running batch at any
    step. `batch` runs transformers' `generate` on one padded batch after the other, for models that need it, such as
    encoder-decoders. `auto` compares both at load and takes `continuous` if the logits agree."""

    tensor_parallel_size: Annotated[int, annotated_types.Ge(1), annotated_types.Le(64)] = 1
    """Number of processes, ranks, that a model which generates text is divided among. Each has a part of every layer,
    and a GPU of its own of those that the server sees. Needs `instance_group [{ kind: KIND_MODEL, count: 1 }]`.
    Experimental: run over gloo on CPUs; never on two GPUs. The document on operations says what cannot be divided."""

    max_prompts: Count = 1024
    """Maximum number of prompts in one request."""

    max_num_seqs: Annotated[
        Annotated[int, annotated_types.Ge(1), annotated_types.Le(MOST_SEQS)] | None, FormerName("max_batch_rows")
    ] = None
    """Maximum number of sequences decoded concurrently; further ones are queued. By default 32, and 256 on a CUDA
    GPU."""

    max_waiting_prompts: Count = 4096
    """Maximum number of queued prompts. A request that exceeds it is rejected at once (`queue_full`, status 503),
    unless the queue is empty."""

    max_cache_tokens: Annotated[int, annotated_types.Ge(256), annotated_types.Le(2**31 - 1)] | None = None
    """KV cache size of the continuous engine in tokens; it is used in blocks of 64 tokens, on a GPU of 16. By default,
    on a CPU, the cache grows with demand into the free memory (into the cgroup's limit), and shrinks when the engine is
    idle, except for cached prefixes; on a GPU it is allocated at load, see `gpu_memory_fraction`. If the running
    sequences outgrow it, the youngest is preempted. A request whose prompt and `max_new_tokens`, rounded up to whole
    blocks, can never fit is rejected. States of hybrid models do not count."""

    gpu_memory_fraction: Annotated[float, annotated_types.Gt(0), annotated_types.Le(1)] | None = None
    """The part of a GPU's whole memory that one instance takes: a tenth of it is left for a step's tensors and CUDA
    graphs, and the KV cache of the continuous engine gets what the weights leave of the rest. By default instances on
    one GPU share it equally, and the cache takes no more than `max_num_seqs` sequences of 4096 tokens, or of the
    context if that is shorter, need. `max_cache_tokens` comes before it. It does nothing on a CPU, for encoders, and in
    the batch engine."""

    enable_prefix_caching: Annotated[bool, FormerName("share_prefixes")] = True
    """Whether the continuous engine reuses the KV cache of a prefix that prompts share, such as a system prompt or the
    earlier messages of a chat, in whole blocks of 64 tokens, on a GPU of 16. Response times, and counts of cached
    tokens, then reveal whether another request had the same prefix: see the parameter `cache_salt`."""

    prefix_state_fraction: Annotated[float, annotated_types.Ge(0), annotated_types.Le(1)] = 0.25
    """Memory for states of prefixes of a hybrid or state-space model, as a part of what its KV cache and the states of
    `max_num_seqs` sequences take. The prefix cache keeps as many as fit; on a CPU no more than 64 MiB of them, or the
    size of the weights if that is more. 0 keeps none, and no prefix is reused."""

    prompt_lookup: Annotated[int, annotated_types.Ge(0), annotated_types.Le(16)] = 0
    """Maximum number of tokens that the continuous engine proposes for a sequence in a step: those that followed its
    last two tokens where they stand before in its prompt or completion. The model checks them in one step, so text
    that repeats its prompt comes several tokens at a time, and stays what it is without; 12 is a good start. 0 proposes
    none. What a proposed token costs is timed at load: with more sequences than it pays for none is proposed, nor for a
    sequence whose proposals fail."""

    decoding: Literal["auto", "eager", "cuda_graphs"] = "auto"
    """How the continuous engine, and an encoder that PyTorch computes, run the forwards of small steps (up to 1,024
    tokens) on a GPU. `auto` captures them as CUDA graphs at load, and runs them eagerly, with a reason in the log, if
    the model cannot be captured; `cuda_graphs` refuses to load then; `eager` captures nothing. The
    document on LoRA adapters says which of their steps are captured. On a CPU the engine records the calls of steps of
    up to 16 tokens at load and makes them without the model's modules, if a trial finds the same bits; `eager` does
    not."""

    pack_weights: Literal["auto"] | bool = "auto"
    """Whether to repack the weights of linear layers for oneDNN on a CPU. `auto` times each shape of layer at load, for
    1, 4 and 16 rows, and packs those that are faster; two starts may choose differently. Packed weights round
    differently, and take memory that unpacked ones share with the page cache."""

    adapters: Annotated[
        dict[Annotated[str, AfterValidator(_check_adapter_name)], str], annotated_types.MaxLen(256)
    ] = {}
    """LoRA adapters that requests choose by `lora_name`, as JSON: Hub name, with `@REVISION` or without, or path, by
    the name that requests use: `{"sql": "someone/llama-sql-lora", "tone": "./tone"}`. Relative paths start at the model
    folder. Adapters in its subfolder `adapters/` need no setting, and may come and go while it serves."""

    generation_defaults: dict[str, Any] = {}
    """Defaults of generation parameters, as JSON: `{"temperature": 0.7, "top_p": 0.9}`. Not for parameters of a whole
    request: `stream` and `exclude_input_in_output` are settings, and `return_logprobs` and the like have no default."""

    pooling: Literal["cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken"] | None = None
    """How `embeddings` makes one vector of the vectors of a text's tokens. By default as the checkpoint's
    `modules.json` says; a checkpoint without one needs this setting."""

    normalize: bool | None = None
    """Whether `embeddings` have length 1. By default as the checkpoint's `modules.json` says, and true without one; of
    models with vectors of images, false."""

    truncate: bool = False
    """Default of the request parameter `truncate`: whether a text that is longer than the model's context is cut, in
    place of an error. For tasks of encoders."""

    max_batch_tokens: Annotated[int, annotated_types.Ge(16), annotated_types.Le(2**31 - 1)] | None = None
    """Maximum number of tokens of one forward pass of an encoder; a request that arrives meanwhile waits for one pass.
    By default 1024 on a CPU and 16384 on a GPU."""

    max_audio_seconds: Annotated[float, annotated_types.Gt(0), annotated_types.Le(24 * 3600)] = 3600.0
    """Maximum length of one audio in seconds, for `automatic-speech-recognition`."""

    max_image_pixels: Count = 1 << 25
    """Maximum width times height of one image, checked before it is decoded: a small file may hold a huge image."""

    max_images: Annotated[int, annotated_types.Ge(0), annotated_types.Le(1024)] = 16
    """Maximum number of images of one prompt, for a model that generates text and reads images. 0: it is served for its
    text alone."""

    max_image_bytes: Count = 20 << 20
    """Maximum size of one image file of a prompt in bytes, as the file is, without base64. The images of a prompt do
    not count in `max_prompt_bytes`."""

    exclude_input_in_output: bool = False
    """Default of the request parameter `exclude_input_in_output`: whether `text_output` leaves out the prompt."""

    stream: bool = False
    """Default of the request parameter `stream`, in a folder with `model_transaction_policy { decoupled: true }`. If
    true, `/generate` needs `stream` false in the request, because it takes one response only."""

    keep_alive: Duration | None = None
    """How long a gateway with `--on-demand` keeps the model when it is idle; by default for its own `--keep-alive`. The
    gateway reads it in config.pbtxt, not in the environment."""

    pinned: bool = False
    """Whether a gateway with `--on-demand` keeps the model once it is loaded, however long it is idle and whatever else
    is asked for: it neither unloads it nor puts it to sleep. Read in config.pbtxt, as `keep_alive`."""

    metrics: bool = True
    """Whether to export metrics on the server's metrics endpoint."""

    parameters_as_inputs: bool = False
    """Whether to declare every request parameter as an optional input tensor, for clients that send tensors. JSON
    clients then get Triton's own messages for values of a wrong type."""

    forwarded_headers: Annotated[str, AfterValidator(_check_header_pattern)] | None = None
    """Regular expression that finds the names of the HTTP and gRPC headers that Triton forwards as parameters, in
    capitals or not. By default those of the server's own `--http-header-forward-pattern` and
    `--grpc-header-forward-pattern`."""

    @property
    def bits(self) -> int | None:
        """The number of bits that the setting `weights` names; None: weights are not rounded."""
        return {"int8": 8, "int4": 4}.get(self.weights)

    @property
    def has_weights(self) -> bool:
        """Whether the folder computes with its model."""
        return self.task != "tokenization"

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        """Refuse beside ranks what changes weights behind the plan that divides them, or runs no steps."""
        if self.tensor_parallel_size > 1:
            others = {
                "adapters": not self.adapters,
                "quantization_config": not self.quantization_config,
                "weights": self.weights == "auto",
                "gguf_file": self.gguf_file is None,
                "load_format": self.load_format == "auto",
                "runtime": self.runtime == "torch",
                "engine": self.engine != "batch",
                "pack_weights": self.pack_weights is not True,
                "task": self.task in (None, "text-generation"),
            }
            if clashing := [name for name, is_free in others.items() if not is_free]:
                raise ValueError(
                    f"tensor_parallel_size {self.tensor_parallel_size} divides a model of full precision that "
                    f"generates text in the continuous engine: leave out {clashing[0]}, or tensor_parallel_size, "
                    "without which KIND_MODEL spreads the layers over all GPUs"
                )
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.load_format == "dummy" and self.quantization_config:
            raise ValueError("quantization_config needs real weights: leave it out, or set load_format to auto")
        if self.bits is not None and (self.quantization_config or self.gguf_file or self.runtime != "torch"):
            raise ValueError(
                "weights rounds a checkpoint of full precision that torch computes: leave out quantization_config, "
                "gguf_file and runtime, or weights"
            )
        if self.gguf_file and (self.quantization_config or self.runtime != "torch"):
            raise ValueError(
                "a GGUF file has its own quantisation and is computed by torch: leave out runtime and "
                "quantization_config, or gguf_file"
            )
        if self.runtime == "torch" and self.precision != "float32":
            raise ValueError("precision is that of a graph: set runtime to onnx, or dtype in place of precision")
        if self.runtime != "torch" and self.adapters:
            raise ValueError(f"runtime {self.runtime} computes a graph, which takes no adapters: set runtime to torch")
        if self.runtime != "torch" and (self.load_format, self.dtype, self.quantization_config) != ("auto", "auto", {}):
            raise ValueError(
                f"runtime {self.runtime} computes a graph, whose numbers are fixed: leave out load_format, dtype and "
                "quantization_config, or set runtime to torch"
            )
        return self


class DoorSettings(BaseModel):
    """Settings of a stream door's folder, which has no model of its own."""

    model_config = ModelSettings.model_config

    stream_of: Annotated[str, annotated_types.MinLen(1)] | None = None
    """The folder that serves the model. By default the door's own name without the suffix `_stream`."""

    stream: bool = True
    """Default of the request parameter `stream`: whether the response is sent in deltas."""

    parameters_as_inputs: bool = False
    """Whether to declare every request parameter as an optional input tensor."""

    forwarded_headers: Annotated[str, AfterValidator(_check_header_pattern)] | None = None
    """Regular expression that finds the names of the HTTP and gRPC headers that Triton forwards as parameters, in
    capitals or not. By default those of the server's own `--http-header-forward-pattern` and
    `--grpc-header-forward-pattern`."""


def _accepted_names(settings_class: type[BaseModel]) -> dict[str, str]:
    """Every name that a setting is accepted by, former ones included, and the field that it sets.

    Raises:
        SettingsError: A subclass declares a field by a former name; nothing would read it.
    """
    fields = settings_class.model_fields
    former = {
        entry.name: name for name, field in fields.items() for entry in field.metadata if isinstance(entry, FormerName)
    }
    for old in former.keys() & fields:
        raise SettingsError(f"{settings_class.__name__} declares {old}, which is {former[old]} now: rename it")
    return {name: name for name in fields} | former


SETTING_NAMES: Final[Mapping[str, str]] = {**_accepted_names(DoorSettings), **_accepted_names(ModelSettings)}
"""Every name that a setting of this package is accepted by, and its field."""
AnySettings = TypeVar("AnySettings", ModelSettings, DoorSettings)


@dataclass(frozen=True)
class LoadedSettings(Generic[AnySettings]):
    """Settings and where each one came from."""

    settings: AnySettings
    sources: Mapping[str, str]
    """Each setting's source: `config.pbtxt` or where else it stands, an environment variable's name, or `default`."""

    def describe(self) -> str:
        """The settings that have another source than their defaults, on one line."""
        values = {name: getattr(self.settings, name) for name, source in self.sources.items() if source != "default"}
        return ", ".join(f"{name} = {_shown(value)} ({self.sources[name]})" for name, value in values.items())


def _shown(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def default_model(task: str | None) -> dict[str, str]:
    """The settings of a task's default model; empty: it has none."""
    found = next((model for name, model in DEFAULT_MODELS.items() if name == task), None)
    return {} if found is None else {"huggingface_model": found[0], "revision": found[1]}


def load_settings(
    parameters: Mapping[str, str],
    environment: Mapping[str, str],
    settings_class: type[AnySettings] = ModelSettings,  # type: ignore[assignment]
    origin: str = CONFIG,
) -> LoadedSettings[AnySettings]:
    """Read and check a folder's settings.

    Raises:
        SettingsError: A setting is unknown, impossible, contradictory or given twice; the message names it, its value,
            its source and what is allowed.
    """
    declared: object = settings_class
    if not (isinstance(declared, type) and issubclass(declared, (ModelSettings, DoorSettings))):
        raise SettingsError("settings_class of 1/model.py must be a subclass of hf_triton.ModelSettings")
    fields = settings_class.model_fields
    names = _accepted_names(settings_class)
    _reject_unknown(parameters, environment, names, origin)
    variables = {key: name for key in environment if environment[key].strip() and (name := _field_of(key, names))}
    keys = {key: names[key] for key in parameters if key in names}
    _reject_duplicates("the environment", environment, variables)
    _reject_duplicates(origin, parameters, keys)
    sources = dict.fromkeys(fields, "default") | {name: key for key, name in variables.items()}
    sources |= {name: origin if key == name else f"{origin}: {key}" for key, name in keys.items()}
    texts = {name: environment[key] for key, name in variables.items()}
    texts |= {name: parameters[key] for key, name in keys.items()}
    if "huggingface_model" in fields and "huggingface_model" not in texts:
        for name, text in default_model(texts.get("task")).items():
            if name not in texts:
                texts[name], sources[name] = text, f"transformers' default for {texts['task']}"
    values = {name: _parse_setting(text, fields[name]) for name, text in texts.items()}
    try:
        settings = settings_class.model_validate(values)
        if isinstance(settings, ModelSettings):
            parse_parameters(settings.generation_defaults)
    except ValidationError as error:
        sentences = [
            _with_source(each.name, each.sentence + HINTS.get(each.name, ""), sources, is_missing=each.is_missing)
            for each in problems(settings_class, error)
        ]
        raise SettingsError("; ".join(sentences)) from None
    except RequestError as error:
        sentence = error.sentence
        if "; the nearest are" in sentence:
            sentence += "; parameters of a whole request have no default here"
        raise SettingsError(_with_source("generation_defaults", f"generation_defaults: {sentence}", sources)) from None
    return LoadedSettings(settings, sources)


def _with_source(name: str, sentence: str, sources: Mapping[str, str], *, is_missing: bool = False) -> str:
    source = sources.get(name, "default")
    if source != "default":
        return f"{sentence} (from {source})"
    if is_missing:
        return f'{sentence}: add parameters {{ key: "{name}" value {{ string_value: "..." }} }} to config.pbtxt'
    return sentence


def _field_of(variable: str, names: Mapping[str, str]) -> str | None:
    """The field that an environment variable sets."""
    if not variable.startswith(ENVIRONMENT_PREFIX):
        return None
    return names.get(variable.removeprefix(ENVIRONMENT_PREFIX).lower())


def _reject_duplicates(source: str, texts: Mapping[str, str], fields: Mapping[str, str]) -> None:
    """Refuse two keys of one source for one setting, unless they differ in capitals alone and hold the same text."""
    keys: dict[str, str] = {}
    for key, field in fields.items():
        first = keys.setdefault(field, key)
        if first.lower() != key.lower():
            raise SettingsError(
                f"{source} has both {first} and {key}, which are one setting: keep the new name {field}"
            )
        if texts[first] != texts[key]:
            raise SettingsError(f"{source} has both {first} and {key}, which differ: keep one of them")


def _reject_unknown(
    parameters: Mapping[str, str], environment: Mapping[str, str], names: Mapping[str, str], origin: str
) -> None:
    for key in parameters:
        if key in names or key in TRITON_SETTINGS:
            continue
        if key in GenerationParameters.model_fields or key in ALIASES:
            by_file = f'parameters {{ key: "generation_defaults" value {{ string_value: "{{\\"{key}\\": ...}}" }} }}'
            by_option = f"--set 'generation_defaults={{\"{key}\": ...}}'"
            raise SettingsError(
                f"'{key}' (from {origin}) is a request parameter, not a setting: set its default with "
                f"{by_file if origin == CONFIG else by_option}"
            )
        if any(word in key.lower() for word in SECRET_WORDS):
            raise SettingsError(
                f"'{key}' in config.pbtxt would be shown to every client by GET /v2/models/NAME/config: "
                "set the access token in the environment variable HF_TOKEN, or the path of its file in HF_TOKEN_PATH"
            )
        raise SettingsError(
            f"there is no setting '{key}' (from {origin}){suggest(key, set(names.values()), 'docs/settings.md')}"
        )
    names = {**SETTING_NAMES, **names}  # the environment is that of all folders
    for variable in environment:
        if variable == SERVER_VARIABLE or SERVICE_LINK.fullmatch(variable):
            continue
        if variable.startswith(ENVIRONMENT_PREFIX) and _field_of(variable, names) is None:
            hint = suggest(variable, [ENVIRONMENT_PREFIX + name.upper() for name in names])
            if "did you mean" in hint:  # otherwise it may be a setting that another folder declares itself
                raise SettingsError(f"no setting has the environment variable {variable}{hint}")


def _parse_setting(text: str, field: FieldInfo) -> Any:
    """Read a setting as its type; one that cannot be read is left for validation to refuse."""
    if field.annotation is bool or bool in typing.get_args(field.annotation):
        return parse_boolean(text)
    if typing.get_origin(field.annotation) in (dict, list):
        try:
            return json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, thousands of brackets
            return text
    former = {entry.old: entry.new for entry in field.metadata if isinstance(entry, FormerValue)}
    return former.get(text.strip(), text)
