# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in a model: in one forward, each row or each token may have another one.

peft puts a layer of its own around every linear layer that an adapter changes; hooks tell such a layer which adapter
to apply where (`adapter_names.py`). What an adapter's files say is checked first (`adapter_files.py`), and a layer that
no adapter changes any more is the model's own again.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from hf_triton.errors import CheckpointError, SettingsError
from hf_triton.runner.float32 import is_small
from hf_triton.runner.lora.adapter_files import PREFIX, AdapterConfig, read_adapter_config, read_tensors, refuse, short
from hf_triton.runner.lora.adapter_names import NO_ADAPTER, AdapterNames
from hf_triton.runner.lora.adapter_plan import TOKENS, AdapterPlan, plan_adapter, split_name
from hf_triton.runner.lora.adapter_slots import AdapterSlots
from hf_triton.runner.model_comparison import Comparison

NUM_TRIAL_TOKENS: Final = 5
SPARE_BYTES: Final = 64 << 20
"""What an adapter's file may have beside twice the bytes of the model."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter. It stays in the model while this object is referenced."""

    number: int
    """Counts from 1 and is never used again: KV that was computed with one adapter is not another's."""
    name: str = ""

    @property
    def key(self) -> str:
        return f"adapter_{self.number}"


AdapterRows = Sequence[Adapter | None] | None
"""The adapter of each row; None: no row has one."""


class Adapters:
    """The adapters of one model.

    A forward of the model and a change of its adapters exclude each other; rows are chosen in one thread at a time.

    Args:
        model: A transformers model in eval mode. An adapter that is active in it already belongs to rows without one.
        output: The name of the output by which an adapter is tried.
        mixes: Whether a forward may have rows of several adapters; an adapter that cannot be one of them is refused.
    """

    def __init__(self, model: Any, output: str = "logits", *, mixes: bool = True) -> None:
        self._model = model
        self._output = output
        self._mixes = mixes
        self._plain = _active_adapter(model)
        self._names = AdapterNames(model, self._plain)
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._numbers = itertools.count(1)
        self._loaded: dict[str, weakref.ref[Adapter]] = {}
        self._slots: AdapterSlots | None = None
        self.kept_awake: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered to change the adapters: an engine that sleeps may have the weights elsewhere, see `Worker`."""
        self._refusal = ""
        if self._plain != NO_ADAPTER:
            self._hook_layers()

    def refuse_all(self, reason: str) -> None:
        """Let no adapter be loaded: `reason` is the end of the sentence that says so."""
        self._refusal = reason

    def load(self, folder: Path, name: str = "") -> Adapter:
        """Load an adapter beside the others, and try it. Files are read side by side; adapters come in one by one.

        Raises:
            CheckpointError: It is not for this model, or rows cannot choose it; the message is the end of a sentence.
            SettingsError: peft is not installed.
        """
        if self._refusal:
            refuse(self._refusal)
        config = read_adapter_config(folder)
        with self._loading:
            max_bytes = 2 * self._num_bytes + SPARE_BYTES
        tensors = read_tensors(folder, max_bytes)
        with self._loading:
            return self._add(name, config, tensors)

    def _add(self, name: str, config: AdapterConfig, tensors: dict[str, torch.Tensor]) -> Adapter:
        plan = self._plan(config, tensors)
        adapter = Adapter(next(self._numbers), name)
        fault = None
        with self.kept_awake(), self._changing():
            self._sweep()
            try:
                self._inject(adapter, config, plan)
                self._loaded[adapter.key] = weakref.ref(adapter)
                self._try_out(adapter)
                self._admit(adapter.key, name)
            except CheckpointError as error:
                fault = error.sentence
            except Exception as error:
                fault = f"does not fit the model ({short(error)})"
            if fault is not None:
                self._delete(adapter.key)
        if fault is not None:  # without the exception behind it, whose frames hold tensors
            refuse(fault)
        return adapter

    @cached_property
    def _layers(self) -> dict[str, torch.nn.Module]:
        """The model's modules by name, without any adapter."""
        return dict(_own_modules(self._model, ""))

    @cached_property
    def _num_bytes(self) -> int:
        tensors = itertools.chain(self._model.parameters(), self._model.buffers())  # layers of few bits have buffers
        return sum(own.numel() * own.element_size() for own in tensors)

    def sweep(self) -> None:
        """Delete the adapters whose `Adapter` is no longer referenced."""
        if any(adapter() is None for adapter in list(self._loaded.values())):
            with self._changing():
                self._sweep()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change the model's adapters while no forward runs."""
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's: of several adapters, and of attributes that are to be removed
            yield

    def choose(self, rows: AdapterRows) -> AbstractContextManager[Any]:
        """For a forward, or for `generate`: the adapter of each row. One alone is that of all rows."""
        return self._choose_rows(rows) if rows and any(rows) else self._lock  # which leaves all rows plain

    @contextmanager
    def _choose_rows(self, rows: Sequence[Adapter | None]) -> Iterator[None]:
        with self._lock, self._names.of_rows([adapter.key if adapter else None for adapter in rows]):
            yield

    @contextmanager
    def choose_tokens(self, *lists: Sequence[str | None]) -> Iterator[None]:
        """Choose the adapter of each token of a packed forward, by `Adapter.key`; None: no adapter.

        A layer finds its tokens' adapters by their number: T, K, G, ... Lists of one length must be the same, and in a
        packed step they are: K logits of T = K tokens are those of all tokens, and as many cached tokens as new ones
        are the new ones. An input of any other number of tokens raises RuntimeError in the forward; layers that see a
        selection of the tokens, such as a mixture's experts, have no adapters, because `load` refuses them.

        Args:
            lists: Of the T tokens of the forward, in order, as `[1, T]` or `[T, 1]`; of the K positions whose logits
                are computed; of the G cached tokens that layers see beside the new ones: latent attention (DeepSeek-V3)
                expands what its cache returns, `[1, 1, G, rank]`; of what the head of an encoder sees.

        Raises:
            ValueError: Two lists of one length differ.
        """
        with self._lock, self._names.of_tokens(*lists):
            yield

    # --- slots: adapters that captured forwards compute with ---------------------------------------------------------

    @property
    def have_slots(self) -> bool:
        """Whether `build_slots` has built some."""
        return self._slots is not None

    def build_slots(self, device: torch.device, max_tokens: int) -> str | None:
        """Allocate slots for adapters like those that are loaded, whose steps can then be captured.

        Returns:
            Why there are none; None: there are, or no adapter is loaded.
        """
        with self._changing():
            if not self._loaded:
                return None
            if self._plain != NO_ADAPTER:
                return "an adapter is active for requests that name none"
            head = _own_module(self._model.get_output_embeddings())
            adapters = {key: dict(self._layers_of(key)) for key in self._loaded}
            try:
                self._slots = slots = AdapterSlots(self._names, adapters, head, device, max_tokens)
            except Exception as error:  # no memory; a layer may do anything in its forward
                return str(error) if type(error) is ValueError else short(error)
            for key, adapter in list(self._loaded.items()):
                loaded = adapter()
                self._admit(key, loaded.name if loaded else key)
            return None if slots.has_any else "none of the adapters can have a slot"

    def drop_slots(self) -> None:
        """Have no slots: nothing is captured that computes with them."""
        self._slots = None

    def slot_tensors(self) -> list[torch.Tensor]:
        """The weights in the slots; none if there are no slots."""
        return [] if self._slots is None else self._slots.tensors()

    def _admit(self, key: str, name: str) -> None:
        """Let a loaded adapter have a slot; the log says why not."""
        if self._slots is not None and (reason := self._slots.admit(key, dict(self._layers_of(key)))):
            logger.info("adapter %s: its steps run eagerly, without CUDA graphs: %s", name, reason)

    def _layers_of(self, key: str | None = None) -> Iterator[tuple[str, Any]]:
        """The layers of peft that an adapter changes, by name; None: all of them."""
        for name, layer in self._model.named_modules():
            if _is_adapted(layer) and (key is None or key in layer._get_available_adapters()):
                yield name, layer

    def bring(self, keys: set[str]) -> bool:
        """Have a step's adapters in slots, by `Adapter.key`; whether they are."""
        slots = self._slots
        if slots is None or not slots.have_room(keys):
            return False
        with self._lock if slots.lacks(keys) else nullcontext():
            slots.bring(keys)
        return True

    def load_tokens(self, keys: Sequence[str | None], num_tokens: int) -> None:
        assert self._slots is not None
        self._slots.load(keys, num_tokens)

    @contextmanager
    def choose_slots(self, num_tokens: int) -> Iterator[None]:
        """Let a packed forward of so many tokens have the slots that `load_tokens` has brought."""
        assert self._slots is not None
        with self.choose(None), self._slots.adding(dict(self._layers_of()), num_tokens):
            yield

    # --- what an adapter changes -------------------------------------------------------------------------------------

    def _plan(self, config: AdapterConfig, tensors: dict[str, torch.Tensor]) -> AdapterPlan:
        """Check an adapter's files, while forwards go on."""
        try:
            return plan_adapter(config, self._renamed(config, tensors), self._layers)
        except CheckpointError:
            raise
        except Exception as error:
            refuse(f"does not fit the model ({short(error)})")

    def _renamed(self, config: AdapterConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors as this transformers names them: an adapter may be older than a change of its model's layers."""
        try:
            from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
        except ImportError:  # an older peft
            return tensors
        renamed = convert_peft_adapter_state_dict_for_transformers(
            self._model, _peft_config(config, AdapterPlan({})), tensors
        )
        return {name.removeprefix(PREFIX): tensor for name, tensor in renamed.items()}

    def _inject(self, adapter: Adapter, config: AdapterConfig, plan: AdapterPlan) -> None:
        """Put an adapter's weights into the model.

        Raises:
            CheckpointError: The file lacks weights, or has more than the model takes.
        """
        from peft import inject_adapter_in_model
        from peft.tuners.lora import Linear

        self._check_company(plan)
        for name in plan.ranks:
            _compute_in(self._model.dtype, self._model.get_submodule(name))
        names: Any = dict.fromkeys(f"{layer}.lora_A" for layer in plan.ranks)
        peft_config = _peft_config(config, plan)
        few = [layer for layer in self._model.modules() if is_small(layer)]
        for layer in few:
            layer.qweight = layer.codes  # peft asks it for the device
        peft_config._register_custom_module(dict.fromkeys(map(type, few), Linear))
        inject_adapter_in_model(peft_config, self._model, adapter.key, state_dict=names)
        self._hook_layers()
        self._model.eval()
        tensors = {_peft_name(name, adapter.key): tensor for name, tensor in plan.tensors.items()}
        own = {name: own for name, own in self._model.named_parameters() if adapter.key in name.split(".")}
        if tensors.keys() != own.keys():
            listed = ", ".join(sorted(tensors.keys() ^ own.keys())[:3]).replace(f".{adapter.key}", "")
            refuse(f"does not fit the model (peft has no place for, or no tensor of, {listed})")
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)

    def _check_company(self, plan: AdapterPlan) -> None:
        """Refuse a second way to change a layer: peft has one for a layer at a time."""
        from peft.tuners.lora import LoraLayer
        from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

        ways: Any = (
            (plan.ranks, LoraLayer, "LoRA"),
            (plan.saved, ModulesToSaveWrapper, "modules_to_save"),
            (plan.tokens, TrainableTokensWrapper, "trainable_token_indices"),
        )
        for names, kind, way in ways:
            for name in names:
                layer = self._model.get_submodule(name)
                if _is_adapted(layer) and not isinstance(layer, kind):
                    refuse(
                        f"changes {name} by {way}, and another adapter of this model in another way: train them alike"
                    )

    def _hook_layers(self) -> None:
        for layer in _adapted_layers(self._model):
            self._names.hook(layer)

    @torch.inference_mode()
    def _try_out(self, adapter: Adapter) -> None:
        """Compare a row with this adapter and one without, side by side, with each of them alone, if they may meet.

        Raises:
            CheckpointError: They differ.
        """
        embedding = self._model.get_input_embeddings().weight
        token_ids = torch.arange(NUM_TRIAL_TOKENS, device=embedding.device)[None] % embedding.shape[0]
        rows = [None, adapter.key]
        tokens = [key for key in rows for _ in range(NUM_TRIAL_TOKENS)]

        def alone() -> torch.Tensor:
            with self._names.of_rows([adapter.key]):
                own = self._compute(token_ids)
            return torch.cat([self._compute(token_ids), own])

        def beside() -> torch.Tensor:
            with self._names.of_tokens(tokens, rows):  # as in a packed step, where attention keeps sequences apart
                return self._compute(token_ids.expand(2, -1))

        comparison = Comparison(self._model, alone)
        if not bool(comparison.expected[1].isfinite().all()):
            refuse("makes NaN or infinite numbers of the model's outputs")
        if self._mixes and not comparison.judge(beside).is_right:
            refuse("changes the outputs of other rows: merge it into its base model")

    def _compute(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The model's output for token ids `[rows, tokens]`, float32 `[rows, numbers]` on the CPU.

        A decoder that generates gets them for both.
        """
        model = self._model
        more: dict[str, Any] = {"use_cache": False} if model.can_generate() else {}
        if more and model.config.is_encoder_decoder:
            more["decoder_input_ids"] = token_ids
        output: torch.Tensor = model(input_ids=token_ids, **more)[self._output]
        return output.flatten(1).float().cpu()

    def _sweep(self) -> None:
        for key in [key for key, adapter in self._loaded.items() if adapter() is None]:
            self._delete(key)

    def _delete(self, key: str) -> None:
        """Take an adapter out of the model, one that is only half in it too."""
        from peft.functional import delete_adapter
        from peft.utils.other import ModulesToSaveWrapper

        self._loaded.pop(key, None)
        if self._slots is not None:
            self._slots.drop(key)
        for layer in _adapted_layers(self._model):
            if isinstance(layer, ModulesToSaveWrapper):  # peft 0.21 fails where another stays and none is active
                layer.delete_adapter(key, new_active_adapters=None)
        delete_adapter(self._model, key, "lora_")
        getattr(self._model, "peft_config", {}).pop(key, None)
        for name, layer in reversed(list(self._model.named_modules())):
            if _is_adapted(layer) and not layer._get_available_adapters():
                parent, _, child = name.rpartition(".")
                setattr(self._model.get_submodule(parent), child, _own_module(layer))


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
    """The name of the adapter that is active in a model; raises SettingsError if there are several."""
    if not getattr(model, "peft_config", None):
        return NO_ADAPTER
    active: list[str] = next((layer.active_adapters for layer in _adapted_layers(model)), [])
    if len(active) > 1:
        raise SettingsError(
            f"the hook load leaves {len(active)} adapters active ({', '.join(active)}), and requests choose one: "
            "activate one, or merge them"
        )
    return active[0] if active else NO_ADAPTER


def _peft_config(config: AdapterConfig, plan: AdapterPlan) -> Any:
    """What peft is told: names of layers, numbers and flags."""
    from peft import LoraConfig

    rank, ranks = _patterns(plan.ranks, config.rank)
    alpha, alphas = _patterns(plan.alphas, config.alpha)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        target_modules=list(plan.ranks),
        use_rslora=config.is_rank_stabilized,
        lora_bias=config.has_bias,
        modules_to_save=plan.saved or None,
        trainable_token_indices=plan.tokens or None,
        inference_mode=True,
    )


def _peft_name(name: str, key: str) -> str:
    """The name in the model of an adapter's tensor."""
    layer, part = split_name(name)
    if part in ("lora_embedding_A", "lora_embedding_B", TOKENS):
        return f"{name}.{key}"
    first, _, rest = part.rpartition(".")
    return f"{layer}.{first or 'modules_to_save'}.{key}.{rest}"


def _patterns(values: Mapping[str, Any], default: Any) -> tuple[Any, dict[str, Any]]:
    """The value of most layers, and patterns of peft for the others, by value: peft tries each with each layer."""
    if not values:
        return default, {}
    [(common, _)] = Counter(values.values()).most_common(1)
    others: dict[Any, list[str]] = {}
    for name, value in values.items():
        if value != common:
            others.setdefault(value, []).append(re.escape(name))
    return common, {f"^(?:{'|'.join(names)})": value for value, names in others.items()}


def _adapted_layers(model: Any) -> Iterator[Any]:
    return filter(_is_adapted, model.modules())


def _is_adapted(layer: Any) -> bool:
    """Whether a module is a layer of peft around one of the model's own."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(layer, LoraLayer | AuxiliaryTrainingWrapper)


def _compute_in(dtype: torch.dtype, layer: Any) -> None:
    """Have peft make LoRA's weights of an FP8 layer in the model's dtype: by itself it takes the layer's, 8 bits."""
    layer = getattr(layer, "base_layer", layer)
    weight = getattr(layer, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.dtype.itemsize == 1:
        layer.compute_dtype = dtype


def _own_module(layer: Any) -> Any:
    """The model's own module behind layers of peft."""
    while _is_adapted(layer):
        layer = layer.original_module if hasattr(layer, "original_module") else layer.base_layer
    return layer


def _own_modules(module: Any, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in module.named_children():
        own = _own_module(child)
        yield f"{prefix}{name}", own
        yield from _own_modules(own, f"{prefix}{name}.")
