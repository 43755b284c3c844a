# SPDX-License-Identifier: Apache-2.0
"""How modules of sentence-transformers make a vector of the vectors of a text's tokens; the weights are the task's.

Each `load_*` raises a CheckpointError for a file that is missing or malformed, or asks for what is not served. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from hf_triton.errors import CheckpointError, clip
from hf_triton.hub.sentence_files import (
    VECTOR,
    GeneralConfig,
    TransformerConfig,
    check_options,
    invalid,
    load_cross_encoder,
    load_general_config,
    load_module_list,
    load_transformer_config,
    optional_int,
    read,
    read_if_there,
    reading,
    unsupported,
)
from hf_triton.hub.sentence_names import CROSS_ENCODER, MODULES, SPARSE_ENCODER, SPARSE_LINEAR, sparse_linear_file

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
POOLING_FLAGS: Final[dict[str, PoolingMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The order is that in which sentence-transformers joins the vectors of several."""
POOLING_MODES: Final[dict[str, PoolingMode]] = {
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    **{mode: mode for mode in POOLING_FLAGS.values()},
}
"""Names of `pooling_mode`, which newer versions write."""
WITH_WEIGHTS: Final = ("Dense", "LayerNorm")
MAX_SIZE: Final = 1_000_000
"""The limit of a vector: a layer gets its memory before its weights are read."""
WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")
"""A module's files of weights; the first that is there is read."""
SPLADE_OPTIONS: Final = {"pooling_strategy": ("max", "sum"), "activation_function": ("relu", "log1p_relu")}
"""Values of SpladePooling's options, the default first."""


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
class LayerNorm:
    """Layer normalization of the pooled vector."""

    folder: Path
    size: int


@dataclass(frozen=True)
class SentenceModules:
    """How a vector is made of the vectors of a text's tokens."""

    pooling: tuple[PoolingMode, ...]
    """One, or several whose vectors are joined."""
    layers: tuple[Dense | LayerNorm | Literal["normalize"], ...] = ()
    """What is applied to the pooled vector, in order."""
    normalizes: bool = True
    """Whether the vector has length 1 at last."""
    includes_prompt: bool = True
    """Whether the tokens of a prompt are pooled, too."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """What stands before a text, by name."""
    default_prompt: str | None = None
    """Name of the prompt for requests that name none."""
    dimensions: int | None = None
    """How many dimensions a vector is cut to if a request says nothing."""
    max_length: int | None = None
    """The most tokens of a text."""
    lowercases: bool = False
    """Whether texts become lower case before they are tokenized."""


def load_sentence_modules(folder: Path, kind: str | None = None) -> SentenceModules | None:
    """Read modules.json and the configs that it names; None if the checkpoint has none.

    Args:
        folder: The checkpoint.
        kind: `CrossEncoder` for modules whose last Dense makes a score; None for those that make a vector.
    """
    if not (folder / MODULES).exists():
        return None
    with reading():
        return _load(folder, kind)


def _load(folder: Path, kind: str | None) -> SentenceModules:
    general = load_general_config(folder)
    modules = load_module_list(folder)
    kinds = [module for module, _ in modules]
    if (general.kind if general.kind in (CROSS_ENCODER, SPARSE_ENCODER) else None) != kind:
        raise unsupported(f"is a {general.kind or 'SentenceTransformer'} by its files: set task to what it does")
    if kinds.count("Pooling") != 1 or "LogitScore" in kinds:
        raise invalid(
            f"modules.json lists {', '.join(kinds)}, and vectors are made by one Transformer, then one Pooling"
        )
    transformer = load_transformer_config(folder)
    if transformer.task != "feature-extraction" or transformer.message_format is not None:
        way = "the chat template" if transformer.message_format else transformer.task
        raise unsupported(f"makes vectors by {way}, according to its sentence_bert_config.json, which is not served")
    (pooling,) = (read(folder / path / "config.json", dict) for module, path in modules if module == "Pooling")
    check_options("Pooling", pooling)
    layers: list[Dense | LayerNorm | Literal["normalize"]] = []
    for place, (module, path) in enumerate(modules):
        if module == "Dense":
            makes_score = kind == CROSS_ENCODER and place == len(modules) - 1
            layers.append(_dense(folder / path, "scores" if makes_score else VECTOR))
        elif module == "LayerNorm":
            layers.append(LayerNorm(folder / path, _size(read(folder / path / "config.json", dict), "dimension")))
        elif module == "Normalize":
            check_options("Normalize", read_if_there(folder / path / "config.json"))
            layers.append("normalize")
    normalizes = layers[-1:] == ["normalize"]
    return SentenceModules(
        pooling=_pooling_modes(pooling),
        layers=tuple(layers[:-1] if normalizes else layers),
        normalizes=normalizes,
        includes_prompt=bool(pooling.get("include_prompt", True)),
        prompts=general.prompts,
        default_prompt=general.default_prompt,
        dimensions=general.dimensions,
        max_length=transformer.max_length,
        lowercases=transformer.lowercases,
    )


@dataclass(frozen=True)
class LogitScore:
    """How the logits of a model that generates make a score."""

    true_token: int
    false_token: int | None
    """Its logit is subtracted; None: no other token's."""
    transformer: TransformerConfig | None = None
    """What sentence_bert_config.json says; None if the checkpoint has no modules.json."""


def load_logit_score(folder: Path) -> LogitScore | None:
    """Read the modules of a reranker that generates; None if the checkpoint has no modules.json."""
    transformer = load_cross_encoder(folder, "text-generation")
    if transformer is None:
        return None
    modules = load_module_list(folder)
    if [kind for kind, _ in modules[1:]] != ["LogitScore"]:
        raise unsupported(f"has the modules {', '.join(kind for kind, _ in modules)}, and LogitScore must end them")
    config = read(folder / modules[1][1] / "config.json", dict)
    check_options("LogitScore", config)
    with reading():
        true_token, false_token = (optional_int(config, name) for name in ("true_token_id", "false_token_id"))
    if true_token is None:
        raise invalid("the module LogitScore has no true_token_id")
    return LogitScore(true_token, false_token, transformer)


@dataclass(frozen=True)
class SparseModules:
    """How sparse vectors are made; by default of a plain checkpoint."""

    general: GeneralConfig = field(default_factory=GeneralConfig)
    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    pooling: Literal["max", "sum"] = "max"
    """How the numbers of a text's tokens become one."""
    activation: Literal["relu", "log1p_relu"] = "relu"
    """What stands before the logarithm of 1 and the number."""


def load_sparse_modules(folder: Path) -> SparseModules:
    """Read what sentence-transformers says of a checkpoint that makes sparse vectors, if it says anything."""
    if not (folder / MODULES).exists():
        return SparseModules()
    with reading():
        general = load_general_config(folder)
        if general.max_active_dims is not None and general.max_active_dims < 1:
            raise invalid(f"max_active_dims is {general.max_active_dims}, which keeps nothing")
        modules = load_module_list(folder)
        kinds = [kind for kind, _ in modules]
        if sparse_linear_file(folder) is not None:
            return SparseModules(general, load_transformer_config(folder))
        if kinds != ["Transformer", "SpladePooling"]:
            raise unsupported(
                f"has the modules {', '.join(kinds)} and no {SPARSE_LINEAR[-1]}; sparse vectors are made by "
                "Transformer and SpladePooling, or with that file: set task to embeddings, or choose another model"
            )
        transformer = load_transformer_config(folder, "fill-mask")
        if transformer.task != "fill-mask" or transformer.message_format is not None:
            raise unsupported("makes sparse vectors by another task than fill-mask, by its sentence_bert_config.json")
        config = read(folder / modules[1][1] / "config.json", dict)
        for name, values in SPLADE_OPTIONS.items():
            if config.setdefault(name, values[0]) not in values:
                raise unsupported(
                    f"has {name} {clip(config[name])} in SpladePooling; served are {' and '.join(values)}"
                )
    return SparseModules(general, transformer, *(config[name] for name in SPLADE_OPTIONS))


def module_files(folder: Path, available: Collection[str], *, allow_pickle: bool, needs_weights: bool) -> list[str]:
    """Names of the files that modules.json needs beside the model's own; none if there is no modules.json.

    Args:
        folder: Holds modules.json.
        available: Names of the files that exist, here or on the Hub; of weights in two formats one is chosen.
        allow_pickle: Whether pickled weights are accepted if there are no safetensors.
        needs_weights: Whether the weights are needed at all.
    """
    try:
        modules = load_module_list(folder)
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):  # which loading reports
        return []
    configs = [(kind, f"{path}/config.json") for kind, path in modules if path]
    names = [name for kind, name in configs if kind not in ("Normalize", "Dropout") or name in available]
    for path in [path for kind, path in modules if kind in WITH_WEIGHTS and needs_weights]:
        safe, pickled = (f"{path}/{name}" for name in WEIGHTS)
        names.append(pickled if allow_pickle and safe not in available and pickled in available else safe)
    return names


def _pooling_modes(config: Mapping[str, Any]) -> tuple[PoolingMode, ...]:
    given = config.get("pooling_mode")
    if given is None:
        return tuple(mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)) or ("mean",)
    names = [given] if isinstance(given, str) else list(given)
    unknown = [name for name in names if name not in POOLING_MODES]
    if unknown or not names:
        raise invalid(f"its pooling_mode is {clip(given)}; known are {', '.join(POOLING_MODES)}")
    return tuple(POOLING_MODES[name] for name in names)


def _dense(folder: Path, output: str) -> Dense:
    config = read(folder / "config.json", dict)
    check_options("Dense", config, folder.name)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if not activation.startswith("torch.nn."):
        raise unsupported(f"has the activation {clip(activation)} in {folder.name}; served are those of torch.nn")
    if (config.get("module_output_name") or VECTOR) != output:
        raise unsupported(
            f"has module_output_name {clip(config.get('module_output_name'))} in {folder.name}, not {output}"
        )
    return Dense(
        folder,
        _size(config, "in_features"),
        _size(config, "out_features"),
        bool(config.get("bias", True)),
        activation.rpartition(".")[2],
        bool(config.get("use_residual", False)),
    )


def _size(config: Mapping[str, Any], name: str) -> int:
    size = int(config[name])
    if not 0 < size <= MAX_SIZE:
        raise invalid(f"{name} is {clip(config[name])}, which is no size of a vector")
    return size
