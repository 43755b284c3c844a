# SPDX-License-Identifier: Apache-2.0
"""Makes one vector of those of a text's tokens: pooling, and the dense layers of modules.json. Knows no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import CheckpointError, HubError
from hf_triton.hub.sentence_modules import WEIGHTS, Dense, LayerNorm, PoolingMode, SentenceModules

if TYPE_CHECKING:
    import torch

    from hf_triton.settings import ModelSettings

Pool = Callable[["torch.Tensor"], "torch.Tensor"]
"""Makes `[size]` of `[tokens, size]`."""


def _weighted_mean(states: torch.Tensor) -> torch.Tensor:
    """Later tokens weigh more: 1, 2, 3, ..."""
    import torch

    weights = torch.arange(1, len(states) + 1, device=states.device, dtype=states.dtype)
    return weights @ states / weights.sum()


POOLS: Final[Mapping[PoolingMode, Pool]] = {
    "cls": lambda states: states[0],
    "max": lambda states: states.amax(0),
    "mean": lambda states: states.mean(0),
    "mean_sqrt_len": lambda states: states.sum(0) / len(states) ** 0.5,
    "weightedmean": _weighted_mean,
    "lasttoken": lambda states: states[-1],
}


class Head:
    """Makes a text's vector on the model's device: joined vectors of `pools`, then `layers` in order."""

    def __init__(self, pools: list[Pool], layers: list[Pool], num_outputs: int) -> None:
        self._pools = pools
        self._layers = layers
        self.num_outputs = num_outputs

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """A vector `[num_outputs]` of `[tokens, hidden size]`, float32."""
        import torch

        vectors = [pool(states) for pool in self._pools]
        vector = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
        for layer in self._layers:
            vector = layer(vector)
        return vector


def build_head(modules: SentenceModules, model: Any, settings: ModelSettings) -> Head:
    """The head that modules.json describes, with the weights of its dense layers.

    Raises:
        LoadError: A layer cannot be loaded, or does not fit those before it.
    """
    import torch

    if "weightedmean" in modules.pooling and not modules.includes_prompt:
        raise CheckpointError(
            "unsupported_model", "pooling by weightedmean without the prompt is not served: choose another model"
        )
    size = int(model.config.get_text_config().hidden_size) * len(modules.pooling)
    layers: list[Pool] = []
    for layer in modules.layers:
        if layer == "normalize":
            layers.append(lambda vector: torch.nn.functional.normalize(vector, dim=0))
            continue
        num_inputs = layer.num_inputs if isinstance(layer, Dense) else layer.size
        if num_inputs != size:
            raise _mismatch(layer.folder, f"takes {num_inputs} values, and what stands before it gives {size}")
        device = model.get_input_embeddings().weight.device
        if isinstance(layer, LayerNorm):
            layers.append(
                _load(torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(size)}), layer.folder, device, settings)["norm"]
            )
            continue
        layers.append(_load_dense(layer, device, settings))
        size = layer.num_outputs
    return Head([POOLS[mode] for mode in modules.pooling], layers, size)


def _load_dense(layer: Dense, device: torch.device, settings: ModelSettings) -> Pool:
    import torch

    activation = getattr(torch.nn, layer.activation, None)
    if not (isinstance(activation, type) and issubclass(activation, torch.nn.Module)):
        raise _mismatch(layer.folder, f"has the activation {layer.activation}, which torch.nn does not have")
    projects = layer.has_residual and layer.num_inputs != layer.num_outputs
    with torch.device("meta" if settings.load_format == "auto" else "cpu"):  # the file's sizes, not the config's
        linear = torch.nn.Linear(layer.num_inputs, layer.num_outputs, bias=layer.has_bias)
        parts = torch.nn.ModuleDict({"linear": linear})
        if projects:
            parts["residual"] = torch.nn.Linear(layer.num_inputs, layer.num_outputs, bias=False)
    _load(parts, layer.folder, device, settings)
    try:
        apply = activation().eval()
        keeps_shape = apply(torch.zeros(layer.num_outputs)).shape == (layer.num_outputs,)
    except Exception:  # a module that takes arguments, or is not for a vector
        keeps_shape = False
    if not keeps_shape:
        raise _mismatch(layer.folder, f"has the activation {layer.activation}, which makes no vector of a vector")

    def dense(vector: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = apply(parts["linear"](vector))
        if not layer.has_residual:
            return result
        return result + (parts["residual"](vector) if projects else vector)

    return dense


def _load(
    parts: torch.nn.ModuleDict, folder: Path, device: torch.device, settings: ModelSettings
) -> torch.nn.ModuleDict:
    """Give layers their weights, in float32 whatever the model's type: they are small."""
    import torch

    if settings.load_format == "auto":
        try:
            parts.load_state_dict(_read_weights(folder, settings), assign=True)
        except RuntimeError:
            raise _mismatch(folder, "has weights of other names or shapes than its config.json says") from None
        if not all(bool(tensor.isfinite().all()) for tensor in parts.state_dict().values()):
            raise _mismatch(folder, "has NaN or infinite numbers")
    return parts.to(device, torch.float32).eval()


def _read_weights(folder: Path, settings: ModelSettings) -> dict[str, torch.Tensor]:
    import torch
    from safetensors.torch import load_file

    safe, pickled = (folder / name for name in WEIGHTS)
    try:
        if safe.exists():
            return load_file(safe)
        if settings.allow_pickle and pickled.exists():
            weights: dict[str, torch.Tensor] = torch.load(pickled, map_location="cpu", weights_only=True)
            return weights
    except Exception as error:
        raise CheckpointError(
            "checkpoint_invalid", f"the weights in {folder.name} cannot be read ({type(error).__name__})"
        ) from None
    if pickled.exists():
        raise HubError(
            "weights_not_safe",
            f"{folder.name} has pickle weights only, which can run code when they are read: choose a revision with "
            "safetensors, or set allow_pickle to true if you trust the repository",
        )
    raise CheckpointError("checkpoint_incomplete", f"{folder.name} lacks {safe.name}: download the model again")


def _mismatch(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError("weights_mismatch", f"the module in {folder.name} {problem}")
