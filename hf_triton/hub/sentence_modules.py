# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of sentence-transformers says of its embeddings: modules.json and the files that it names.

Reads JSON; the weights of its dense layers are the task's. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, cast

from hf_triton.errors import CheckpointError, clip

MODULES: Final = "modules.json"
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
POOLING_FLAGS: Final[dict[str, PoolingMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""In the order in which sentence-transformers joins the vectors of several."""
POOLING_MODES: Final[dict[str, PoolingMode]] = {
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    **{mode: mode for mode in POOLING_FLAGS.values()},
}
"""By the names of `pooling_mode`, which newer versions write."""
SERVED: Final = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
"""Modules by the last part of their type; Dropout does nothing when a model is served."""
DENSE_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Dense:
    """A linear layer with an activation, applied to the pooled vector."""

    folder: Path
    num_inputs: int
    num_outputs: int
    has_bias: bool = True
    activation: str = "Tanh"
    """A class of `torch.nn`."""
    has_residual: bool = False
    """Whether its input is added to its output."""


@dataclass(frozen=True)
class SentenceModules:
    """How a vector is made of the vectors of a text's tokens."""

    pooling: tuple[PoolingMode, ...]
    """One, or several whose vectors are joined."""
    layers: tuple[Dense | Literal["normalize"], ...] = ()
    """What is applied to the pooled vector, in order."""
    normalizes: bool = True
    """Whether the vector has length 1 at last."""
    includes_prompt: bool = True
    """Whether the tokens of a prompt are pooled, too."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """By name, what stands before a text."""
    default_prompt: str | None = None
    """Name of the prompt for requests that name none."""
    dimensions: int | None = None
    """To how many dimensions a vector is cut if a request says nothing."""
    max_length: int | None = None
    """The most tokens of a text."""
    lowercases: bool = False
    """Whether texts become lower case before they are tokenized."""


def load_sentence_modules(folder: Path) -> SentenceModules | None:
    """Read modules.json and the configs that it names; None if the checkpoint has none.

    Args:
        folder: The checkpoint.

    Raises:
        CheckpointError: A file is missing or malformed, or a module is none that is served.
    """
    if not (folder / MODULES).exists():
        return None
    try:
        return _load(folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _invalid(f"modules.json and the configs that it names cannot be read ({type(error).__name__})") from None


def _load(folder: Path) -> SentenceModules:
    modules = [(_kind(entry), _path(entry)) for entry in _read(folder / MODULES, list)]
    kinds = [kind for kind, _ in modules]
    if kinds[:1] != ["Transformer"] or kinds.count("Transformer") > 1 or kinds.count("Pooling") != 1:
        raise _invalid(
            f"modules.json lists {', '.join(kinds) or 'nothing'}, and embeddings are made by one Transformer, then one "
            "Pooling, then Dense and Normalize"
        )
    (pooling,) = (_read(folder / path / "config.json", dict) for kind, path in modules if kind == "Pooling")
    layers: list[Dense | Literal["normalize"]] = []
    for kind, path in modules:
        if kind == "Dense":
            layers.append(_dense(folder / path))
        elif kind == "Normalize":
            layers.append("normalize")
    normalizes = layers[-1:] == ["normalize"]
    transformer = _transformer_config(folder, modules[0][1])
    general = _read_if_there(folder / "config_sentence_transformers.json")
    prompts = {str(name): str(text) for name, text in (general.get("prompts") or {}).items()}
    default_prompt = general.get("default_prompt_name")
    if default_prompt is not None and default_prompt not in prompts:
        raise _invalid(f"default_prompt_name of config_sentence_transformers.json names no prompt of {list(prompts)}")
    return SentenceModules(
        pooling=_pooling_modes(pooling),
        layers=tuple(layers[:-1] if normalizes else layers),
        normalizes=normalizes,
        includes_prompt=bool(pooling.get("include_prompt", True)),
        prompts=prompts,
        default_prompt=default_prompt,
        dimensions=_optional_int(general, "truncate_dim"),
        max_length=_optional_int(transformer, "max_seq_length"),
        lowercases=bool(transformer.get("do_lower_case", False)),
    )


def module_files(folder: Path, available: Collection[str], *, allow_pickle: bool, needs_weights: bool) -> list[str]:
    """Names of the files that modules.json needs beside the model's own; none if there is no modules.json.

    Args:
        folder: Holds modules.json.
        available: Names of the files that exist, here or on the Hub; of weights in two formats one is chosen.
        allow_pickle: Whether pickled weights are accepted if there are no safetensors.
        needs_weights: Whether the weights are needed at all.
    """
    try:
        modules = [(_kind(entry), _path(entry)) for entry in _read(folder / MODULES, list)]
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):  # which loading reports
        return []
    names = [f"{path}/config.json" for kind, path in modules if kind in ("Pooling", "Dense")]
    for path in [path for kind, path in modules if kind == "Dense" and needs_weights]:
        safe, pickled = (f"{path}/{name}" for name in DENSE_WEIGHTS)
        names.append(pickled if allow_pickle and safe not in available and pickled in available else safe)
    return names


def _kind(entry: Mapping[str, Any]) -> str:
    """The last part of a module's type; of one that is not sentence-transformers' own, the whole.

    Raises:
        CheckpointError: The module is not served.
    """
    name = str(entry["type"])
    kind = name.rpartition(".")[2]
    if not name.startswith("sentence_transformers.") or kind not in SERVED:
        raise CheckpointError(
            "unsupported_model",
            f"modules.json lists the module {clip(name)}, which is not served; served are {', '.join(SERVED)}: choose "
            "another model, or write a task_class in 1/model.py",
        )
    return kind


def _path(entry: Mapping[str, Any]) -> str:
    """A module's folder, which cannot lead out of the checkpoint."""
    path = PurePosixPath(str(entry.get("path", "")))
    if path.is_absolute() or ".." in path.parts:
        raise _invalid(f"modules.json names the folder {clip(str(path))}, which is outside of the checkpoint")
    return "" if path == PurePosixPath() else str(path)


def _transformer_config(folder: Path, path: str) -> dict[str, Any]:
    """sentence_bert_config.json, by that name or one with another architecture's."""
    if path:
        raise _invalid(f"modules.json keeps the model in the folder {clip(path)}: choose a checkpoint with it on top")
    files: Iterator[Path] = iter(sorted(folder.glob("sentence_*_config.json")))
    return _read_if_there(next(files, folder / "sentence_bert_config.json"))


def _pooling_modes(config: Mapping[str, Any]) -> tuple[PoolingMode, ...]:
    given = config.get("pooling_mode")
    if given is None:
        return tuple(mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)) or ("mean",)
    names = [given] if isinstance(given, str) else list(given)
    unknown = [name for name in names if name not in POOLING_MODES]
    if unknown or not names:
        raise _invalid(f"its pooling_mode is {clip(given)}; known are {', '.join(POOLING_MODES)}")
    return tuple(POOLING_MODES[name] for name in names)


def _dense(folder: Path) -> Dense:
    config = _read(folder / "config.json", dict)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if not activation.startswith("torch.nn."):
        raise CheckpointError(
            "unsupported_model",
            f"the Dense module in {folder.name} has the activation {clip(activation)}; served are those of torch.nn",
        )
    ports = [config.get("module_input_name"), config.get("module_output_name")]
    if any(port not in (None, "sentence_embedding") for port in ports):
        raise _invalid(f"the Dense module in {folder.name} does not change the sentence's vector: {ports}")
    return Dense(
        folder,
        int(config["in_features"]),
        int(config["out_features"]),
        bool(config.get("bias", True)),
        activation.rpartition(".")[2],
        bool(config.get("use_residual", False)),
    )


def _optional_int(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return None if value is None else int(value)


def _read_if_there(file: Path) -> dict[str, Any]:
    return cast(dict[str, Any], _read(file, dict)) if file.exists() else {}


def _read(file: Path, kind: type[Any]) -> Any:
    """A JSON file's object or array."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            "checkpoint_incomplete", f"modules.json needs {file.parent.name}/{file.name}: download the model again"
        ) from None
    if not isinstance(value, kind):
        raise _invalid(f"{file.name} holds no JSON {'array' if kind is list else 'object'}")
    return value


def _invalid(problem: str) -> CheckpointError:
    return CheckpointError("checkpoint_invalid", f"the files of sentence-transformers cannot be used: {problem}")
