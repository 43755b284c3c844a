# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in a model: in one forward, each row may have another one. The only importer of peft.

peft puts a layer of its own around every linear layer that an adapter changes. Such a layer takes the name of an
adapter for each row; hooks here give it the names of the rows that are computed.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from hf_triton.errors import CheckpointError, SettingsError
from hf_triton.runner.numerics import agree

NO_ADAPTER: Final = "__base__"
"""peft's name for rows without an adapter."""
NUM_TRIAL_TOKENS: Final = 5
PREFIX: Final = "base_model.model."
"""Of the names in an adapter's file."""
KEEPING_INITS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""The values of `init_lora_weights` with which peft leaves the base model's weights as they are."""
KEY_BITS: Final = 33
"""Bits of a key in the prefix cache without an adapter."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter. It stays in the model while this object is referenced."""

    number: int
    """From 1, never used again: KV that was computed with one adapter is not another's."""

    @property
    def key(self) -> str:
        """Its name in the model."""
        return f"adapter_{self.number}"

    def cache_key(self, key: list[int]) -> list[int]:
        """A sequence's key in the prefix cache, of what it is without an adapter."""
        return [(self.number << KEY_BITS) + part for part in key]


AdapterRows = Sequence[Adapter | None] | None
"""The adapter of each row; None: no row has one."""


class Adapters:
    """The adapters of one model.

    A forward of the model and a change of its adapters exclude each other; rows are chosen in one thread at a time.

    Args:
        model: A transformers model in eval mode. An adapter that is active in it already belongs to rows without one.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._plain = _active_adapter(model)
        self._rows: str | list[str] = self._plain
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._loaded: dict[str, weakref.ref[Adapter]] = {}
        self._hooked = weakref.WeakSet[torch.nn.Module]()
        if self._plain != NO_ADAPTER:
            self._hook_layers()

    def load(self, folder: Path) -> Adapter:
        """Load an adapter beside the others, and try it.

        Args:
            folder: With adapter_config.json and adapter_model.safetensors.

        Raises:
            CheckpointError: It is not for this model, or rows cannot choose it; the message is the end of a sentence.
            SettingsError: peft is not installed.
        """
        config, weights = _read(folder)
        adapter = Adapter(next(self._numbers))
        with self._changing():
            self._sweep()
            try:
                self._inject(adapter, config, weights)
                self._loaded[adapter.key] = weakref.ref(adapter)
                self._try_out(adapter)
            except Exception as error:
                self._delete(adapter.key)
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError("adapter_invalid", f"does not fit the model ({_short(error)})") from None
        return adapter

    def sweep(self) -> None:
        """Delete the adapters whose `Adapter` is no longer referenced."""
        if any(adapter() is None for adapter in list(self._loaded.values())):
            with self._changing():
                self._sweep()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """For a change of the model's adapters."""
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's: of several adapters, and of attributes that are to be removed
            yield

    @contextmanager
    def choose(self, rows: AdapterRows) -> Iterator[None]:
        """For a forward, or for `generate`: the adapter of each row. One alone is that of all rows."""
        with self._lock:
            keys = [self._plain if adapter is None else adapter.key for adapter in rows or ()]
            self._rows = keys if len(set(keys)) > 1 else keys[0] if keys else self._plain
            try:
                yield
            finally:
                self._rows = self._plain

    def _inject(self, adapter: Adapter, config: Any, weights: dict[str, torch.Tensor]) -> None:
        """Put an adapter's weights into the model.

        Raises:
            CheckpointError: The file lacks weights, has more than the model takes, or some of other shapes.
        """
        from peft import inject_adapter_in_model, set_peft_model_state_dict

        own = {name.removeprefix(PREFIX): weight for name, weight in weights.items()}
        try:
            inject_adapter_in_model(config, self._model, adapter.key)
        finally:
            self._hook_layers()
        self._check_base_is_kept(own)
        self._check_shapes(adapter, own)
        info: Any = set_peft_model_state_dict(self._model, own, adapter.key)
        self._model.eval()
        missing = [name for name in info.missing_keys if adapter.key in name.split(".")]
        for names, fault in ((missing, "lacks"), (info.unexpected_keys, "has, and the model has not,")):
            if names:
                listed = ", ".join(sorted(names)[:3]).replace(f".{adapter.key}.", ".")
                raise CheckpointError("adapter_invalid", f"{fault} {len(names)} tensors: {listed}")

    def _check_base_is_kept(self, weights: dict[str, torch.Tensor]) -> None:
        """Refuse tensors that peft would load over the base model's own, which all rows share.

        Raises:
            CheckpointError: A tensor of the adapter would replace another of the model.
        """
        own = dict(self._model.named_parameters())
        for name in sorted(weights.keys() & own.keys()):
            if not torch.equal(weights[name].to(own[name]), own[name]):
                raise CheckpointError("adapter_invalid", f"replaces {name} of the model: merge it into its base model")

    def _check_shapes(self, adapter: Adapter, weights: dict[str, torch.Tensor]) -> None:
        """Refuse tensors of other shapes than the layers that peft has made for them.

        Raises:
            CheckpointError: Names the first one.
        """
        layers = {name.replace(f".{adapter.key}", ""): weight for name, weight in self._model.named_parameters()}
        for name in sorted(weights.keys() & layers.keys()):
            own, expected = list(weights[name].shape), list(layers[name].shape)
            if own != expected:
                raise CheckpointError(
                    "adapter_invalid",
                    f"has tensors of other shapes than the model, as {name}: {own} in place of {expected}: it was made "
                    "for another base model",
                )

    def _hook_layers(self) -> None:
        for layer in _adapted_layers(self._model):
            if layer not in self._hooked:
                layer.register_forward_pre_hook(self._name_rows, with_kwargs=True)
                self._hooked.add(layer)

    def _name_rows(self, layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Give a layer of peft the adapter of each row of its input."""
        rows = self._rows
        names = [rows] * len(arguments[0]) if isinstance(rows, str) else rows
        copies = getattr(layer, "modules_to_save", None)  # a layer that some adapters have whole
        if copies is not None:
            names = [name if name in copies else NO_ADAPTER for name in names]
        return arguments, {**named, "adapter_names": names}

    @torch.inference_mode()
    def _try_out(self, adapter: Adapter) -> None:
        """Compare a row with this adapter and one without, side by side, with each of them alone.

        Raises:
            CheckpointError: They differ.
        """
        embedding = self._model.get_input_embeddings().weight
        token_ids = torch.arange(NUM_TRIAL_TOKENS, device=embedding.device)[None] % embedding.shape[0]
        try:
            self._rows = adapter.key
            alone = self._logits(token_ids)
            self._rows = [self._plain, adapter.key]
            beside = self._logits(token_ids.expand(2, -1))
        finally:
            self._rows = self._plain
        alone = torch.cat([self._logits(token_ids), alone])
        if not bool(alone.isfinite().all()):
            raise CheckpointError("adapter_invalid", "makes NaN or infinite numbers of the model's outputs")
        if not agree(alone, beside, alone.dtype):
            raise CheckpointError("adapter_invalid", "changes the outputs of other rows: merge it into its base model")

    def _logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The model's logits for token ids `[rows, tokens]`; with a decoder beside its encoder, for both."""
        more = {"decoder_input_ids": token_ids} if self._model.config.is_encoder_decoder else {}
        logits: torch.Tensor = self._model(input_ids=token_ids, use_cache=False, **more).logits
        return logits

    def _sweep(self) -> None:
        for key in [key for key, adapter in self._loaded.items() if adapter() is None]:
            self._delete(key)

    def _delete(self, key: str) -> None:
        self._loaded.pop(key, None)
        if key not in getattr(self._model, "peft_config", {}):
            return
        from peft.functional import delete_adapter

        delete_adapter(self._model, key, "lora_")
        del self._model.peft_config[key]


def without_peft_wrapper(model: Any) -> Any:
    """The transformers model in a `PeftModel`, with its adapter active; other models as they are.

    The wrapper hides the arguments of `forward`, which continuous batching needs. Prompt learning works in the wrapper
    alone, so a model with it stays wrapped.
    """
    is_wrapped = type(model).__module__.partition(".")[0] == "peft" and hasattr(model, "get_base_model")
    if not is_wrapped or model.active_peft_config.is_prompt_learning:
        return model
    base = model.get_base_model()
    base.peft_config = model.peft_config
    return base


def _active_adapter(model: Any) -> str:
    """The name of the adapter that is active in a model.

    Raises:
        SettingsError: There are several.
    """
    if not getattr(model, "peft_config", None):
        return NO_ADAPTER
    active: list[str] = next((layer.active_adapters for layer in _adapted_layers(model)), [])
    if len(active) > 1:
        raise SettingsError(
            f"the hook load leaves {len(active)} adapters active ({', '.join(active)}), and requests choose one: "
            "activate one, or merge them"
        )
    return active[0] if active else NO_ADAPTER


def _read(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """An adapter's config and weights, on the CPU; raises what `read_adapter_config` raises."""
    from safetensors.torch import load

    config = read_adapter_config(folder)
    try:  # a map of a file that shrinks kills the process
        return config, load((folder / "adapter_model.safetensors").read_bytes())
    except Exception as error:
        raise CheckpointError("adapter_invalid", f"cannot be read ({_short(error)})") from None


def read_adapter_config(folder: Path) -> Any:
    """An adapter's config.

    Raises:
        CheckpointError: It cannot be read, or is of another method.
        SettingsError: peft is not installed.
    """
    try:
        from peft import LoraConfig, PeftConfig
    except ImportError:
        raise SettingsError("adapters need the package peft: pip install 'hf-triton[lora]'") from None
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise CheckpointError("adapter_invalid", f"cannot be read ({_short(error)})") from None
    if not isinstance(config, LoraConfig):
        raise CheckpointError(
            "adapter_invalid", f"is a {config.peft_type.value} adapter, and LoRA adapters can be chosen alone"
        )
    if config.alora_invocation_tokens:
        raise CheckpointError("adapter_invalid", "is an aLoRA adapter, which begins within a prompt: train it as LoRA")
    if change := _change_of_base(config):
        raise CheckpointError("adapter_invalid", f"changes its base model ({change}): merge it into its base model")
    return config


def _change_of_base(config: Any) -> str | None:
    """The option of an adapter that changes the model itself, and so the rows without the adapter; None: none does."""
    if config.bias != "none":
        return f"bias: {config.bias}"
    if config.layer_replication:
        return "layer_replication"
    if config.init_lora_weights not in KEEPING_INITS:  # PiSSA, OLoRA and others subtract from the base's weights
        return f"init_lora_weights: {config.init_lora_weights}"
    return None


def _adapted_layers(model: Any) -> Iterator[Any]:
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return (layer for layer in model.modules() if isinstance(layer, LoraLayer | AuxiliaryTrainingWrapper))


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 200 else text[:197] + '...'}"
