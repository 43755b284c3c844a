# SPDX-License-Identifier: Apache-2.0
"""Reads what sentence-transformers writes beside a checkpoint: its own config, modules.json, and the modules' configs.

Every option is followed, has no effect on what is served, or is refused by its name: each `load_*` raises a
CheckpointError for that, and for a file that is malformed or missing. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, cast

from hf_triton.errors import CheckpointError, clip
from hf_triton.files import read_json
from hf_triton.hub.sentence_names import GENERAL, MODULES

OTHER_KINDS: Final = ("MultiVectorEncoder",)
"""Kinds of models, in `model_type` of GENERAL, that are not served."""
CHECKPOINT: Final = "the checkpoint "
VECTOR: Final = "sentence_embedding"
FORMER_KINDS: Final = {"MLMTransformer": "Transformer"}
FORMER_NAMES: Final = {
    "model_kwargs": "model_args",
    "processor_kwargs": "tokenizer_args",
    "config_kwargs": "config_args",
}
HARMLESS: Final = frozenset({"trust_remote_code", "attn_implementation", "torch_dtype", "dtype"})
"""Arguments of loading that settings of the folder have the say about."""


OPTIONS: Final[Mapping[str, Mapping[str, tuple[object, ...]]]] = {
    GENERAL: {"keep_in_fp32_modules": ([],)},
    "Transformer": {
        "processing_kwargs": ({},),
        "query_length": (),
        "document_length": (),
        "query_expansion": (),
        "tokenizer_name_or_path": (),
        **{name: ({},) for names in FORMER_NAMES.items() for name in names},
    },
    "Pooling": {},
    "Dense": {"module_input_name": (VECTOR,)},
    "Normalize": {"module_input_name": (VECTOR,), "module_output_name": (VECTOR,)},
    "LayerNorm": {},
    "Dropout": {},
    "SpladePooling": {},
    "LogitScore": {"module_input_name": ("causal_logits",)},
}
"""What is refused of GENERAL and of each module that is served: an option, and its values that ask for nothing."""
SERVED: Final = tuple(name for name in OPTIONS if name != GENERAL)
TASKS: Final[Mapping[str, tuple[str, str]]] = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
    "fill-mask": ("logits", "token_embeddings"),
}
"""The output of the model that a `transformer_task` uses, and what sentence-transformers calls it."""


@dataclass(frozen=True)
class GeneralConfig:
    """What config_sentence_transformers.json says."""

    kind: str | None = None
    """`SentenceTransformer`, `CrossEncoder`, ...; None in older files, of SentenceTransformer alone."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """What stands before a text, by name."""
    default_prompt: str | None = None
    """Name of the prompt for requests that name none."""
    dimensions: int | None = None
    """How many dimensions a vector is cut to if a request says nothing."""
    activation: str | None = None
    """The class by which a cross-encoder makes scores of logits."""
    max_active_dims: int | None = None
    """How many numbers of a sparse vector are kept at most if a request says nothing."""


@dataclass(frozen=True)
class TransformerConfig:
    """What sentence_bert_config.json says."""

    task: str = "feature-extraction"
    """One of TASKS."""
    max_length: int | None = None
    """The most tokens of a text."""
    lowercases: bool = False
    """Whether texts become lower case before they are tokenized."""
    message_format: str | None = None
    """How texts become messages for the tokenizer's chat template, `flat` or `structured`; None: they do not."""


@contextmanager
def reading(files: str = f"{MODULES} and the configs that it names") -> Iterator[None]:
    """Turn the exceptions of values of other types than sentence-transformers writes into a `CheckpointError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise invalid(f"{files} cannot be read ({type(error).__name__})") from None


@reading(GENERAL)
def load_general_config(folder: Path) -> GeneralConfig:
    """Read config_sentence_transformers.json."""
    config = read_if_there(folder / GENERAL)
    kind = config.get("model_type")
    if kind in OTHER_KINDS:
        raise unsupported(f"is a {kind} according to {GENERAL}, which is not served: choose another model")
    check_options(GENERAL, config)
    prompts = {str(name): str(text) for name, text in (config.get("prompts") or {}).items() if text is not None}
    default_prompt = config.get("default_prompt_name")
    if default_prompt is not None and default_prompt not in prompts:
        raise invalid(f"default_prompt_name of {GENERAL} names no prompt of {list(prompts)}")
    activation = config.get("activation_fn")
    return GeneralConfig(
        kind,
        prompts,
        default_prompt,
        optional_int(config, "truncate_dim"),
        None if activation is None else str(activation),
        optional_int(config, "max_active_dims"),
    )


def load_module_list(folder: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module of modules.json; `SERVED` has the kinds."""
    modules = [(_kind(entry), _path(entry)) for entry in read(folder / MODULES, list)]
    kinds = [kind for kind, _ in modules]
    if kinds[:1] != ["Transformer"] or kinds.count("Transformer") > 1:
        raise invalid(f"modules.json lists {', '.join(kinds) or 'nothing'}, and one Transformer must come first")
    if path := modules[0][1]:
        raise unsupported(f"keeps the model in the folder {clip(path)}, by modules.json: choose one with it on top")
    return modules


def load_transformer_config(folder: Path, default_task: str = "feature-extraction") -> TransformerConfig:
    """Read sentence_bert_config.json, by that name or one with another architecture's."""
    file = next(iter(sorted(folder.glob("sentence_*_config.json"))), folder / "sentence_bert_config.json")
    config = read_if_there(file)
    for name in (*FORMER_NAMES, *FORMER_NAMES.values()):
        if isinstance(given := config.get(name), dict):
            config[name] = {key: value for key, value in given.items() if key not in HARMLESS}
    check_options("Transformer", config, file.name)
    task = str(config.get("transformer_task", default_task))
    if task not in TASKS:
        raise unsupported(f"has transformer_task {clip(task)} in {file.name}; served are {', '.join(TASKS)}")
    output, name = TASKS[task]
    if config.get("module_output_name", name) != name:
        raise unsupported(
            f"has module_output_name {clip(config['module_output_name'])} in {file.name}: {name} is served"
        )
    usual = {"text": {"method": "forward", "method_output_name": output}}
    ways = config.get("modality_config", usual)
    message = ways.get("message")
    if (message or ways.get("text", {})) | {"format": None} != usual["text"] | {"format": None}:
        raise unsupported(f"reads texts by {clip(ways)}, in modality_config of {file.name}: {usual} is served")
    return TransformerConfig(
        task,
        optional_int(config, "max_seq_length"),
        bool(config.get("do_lower_case", False)),
        None if message is None else str(message.get("format", "structured")),
    )


def load_cross_encoder(folder: Path, task: str) -> TransformerConfig | None:
    """Read the Transformer's config of a cross-encoder for a task; None if there is no modules.json."""
    if not (folder / MODULES).exists():
        return None
    with reading():
        load_module_list(folder)
        transformer = load_transformer_config(folder)
    if transformer.task != task:
        raise unsupported(f"has transformer_task {transformer.task} in its sentence_bert_config.json, not {task}")
    if transformer.message_format is not None and task != "text-generation":
        raise unsupported("reads pairs by its chat template, by modality_config of its sentence_bert_config.json")
    return transformer


def check_options(kind: str, config: Mapping[str, Any], where: str | None = None) -> None:
    """Refuse what a config asks for and is not served; options that are not known are sentence-transformers' to ignore.

    `kind` is a key of OPTIONS; the message says `where` the config stands, by default the kind.
    """
    for name, neutral in OPTIONS[kind].items():
        value = config.get(name)
        if value is not None and value not in neutral:
            raise unsupported(f"has {name} {clip(value)} in {where or kind}, which is not served: choose another model")


def _kind(entry: Mapping[str, Any]) -> str:
    """The last part of a module's type; of one that is not sentence-transformers' own, the whole. It must be served."""
    name = str(entry["type"])
    kind = name.rpartition(".")[2] if name.startswith("sentence_transformers.") else name
    kind = FORMER_KINDS.get(kind, kind)
    if kind not in SERVED:
        raise unsupported(
            f"has the module {clip(kind)} in its modules.json, which is not served; served are {', '.join(SERVED)}: "
            "choose another model, or write a task_class in 1/model.py"
        )
    return kind


def _path(entry: Mapping[str, Any]) -> str:
    """A module's folder, which cannot lead out of the checkpoint."""
    path = PurePosixPath(str(entry.get("path", "")))
    if path.is_absolute() or ".." in path.parts:
        raise invalid(f"modules.json names the folder {clip(str(path))}, which is outside of the checkpoint")
    return "" if path == PurePosixPath() else str(path)


def optional_int(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return None if value is None else int(value)


def read_if_there(file: Path) -> dict[str, Any]:
    """A JSON file's object; empty if there is no file."""
    return cast(dict[str, Any], read(file, dict)) if file.exists() else {}


def read(file: Path, kind: type[Any]) -> Any:
    """A JSON file's object or array, which must be there."""
    try:
        value = read_json(file)
    except FileNotFoundError:
        raise CheckpointError(
            "checkpoint_incomplete", f"modules.json needs {file.parent.name}/{file.name}: download the model again"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(f"{file.name} cannot be read ({type(error).__name__})") from None
    if not isinstance(value, kind):
        raise invalid(f"{file.name} holds no JSON {'array' if kind is list else 'object'}")
    return value


def invalid(problem: str) -> CheckpointError:
    """The error of files that cannot be used."""
    return CheckpointError("checkpoint_invalid", f"the files of sentence-transformers cannot be used: {problem}")


def refusal(folder: Path) -> str | None:
    """Why the modules of modules.json are not served, as the end of a sentence; None if there are none, or they are."""
    try:
        load_module_list(folder)
    except CheckpointError as error:
        return error.sentence.removeprefix(CHECKPOINT) if error.code == "unsupported_model" else None
    except (OSError, KeyError, TypeError, ValueError, AttributeError):  # which loading reports
        return None
    return None


def unsupported(problem: str) -> CheckpointError:
    """The error of files that ask for what is not served."""
    return CheckpointError("unsupported_model", f"{CHECKPOINT}{problem}")
