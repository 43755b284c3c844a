# SPDX-License-Identifier: Apache-2.0
"""Gives transformers' loader the weights of a GGUF file, or of its parts, one tensor at a time.

Names and orders of rows are transformers' own, of `modeling_gguf_pytorch_utils`, whose reader widens the whole file
first; those of architectures with a mapping of their own (`integrations/gguf`), its quantiser gives. Where a processor
has a kernel for a format, linear layers and embeddings keep their bits (`runner/cpu/grouped_linear.py`).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import nn
from transformers import GgufConfig
from transformers.integrations.gguf.dequant import GGML_BLOCK, row_bytes
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
from transformers.integrations.gguf.reader import LazyGgufTensor, TensorInfo
from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, get_gguf_plan
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

from hf_triton.hub.gguf_blocks import FORMATS, NAMES, take_apart
from hf_triton.hub.gguf_header import GgufHeader, GgufTensor
from hf_triton.runner.cpu import grouped_layers
from hf_triton.runner.direct_weights import read_directly

logger = logging.getLogger(__name__)

CHUNK: Final = 1 << 22
"""Weights that are taken apart together."""


@contextlib.contextmanager
def reading(header: GgufHeader, *, keeps_bits: bool) -> Iterator[Any]:
    """Have transformers load by the header while it is entered; yields its argument `quantization_config`."""

    class Quantizer(_Quantizer):
        reader = Reader(header, keeps_bits=keeps_bits)

    before = AUTO_QUANTIZER_MAPPING["gguf"]
    AUTO_QUANTIZER_MAPPING["gguf"] = Quantizer
    try:
        # transformers' own packed blocks would be computed by kernels that it fetches from the Hub
        yield GgufConfig(dequantize=True)
    finally:
        AUTO_QUANTIZER_MAPPING["gguf"] = before


def bytes_as_loaded(header: GgufHeader, model: Any) -> int:
    """Bytes of a model on torch's device `meta` once it is loaded from a file whose layers keep their bits."""
    own: Any = copy.deepcopy(model)
    with torch.device("meta"):
        placed = Reader(header, keeps_bits=True).prepare(own, own.dtype)
    blocks = {id(place.weight) for place in placed.values()}
    wide: int = sum(each.nbytes for each in own.parameters() if id(each) not in blocks)
    return wide + sum(place.kept_bytes for place in placed.values())


class _Quantizer(GgufHfQuantizer):
    """transformers' quantiser, with the tensors of all parts, and a reader of what it has no mapping for."""

    reader: Reader

    def read_header(self, gguf_file: str) -> None:
        super().read_header(gguf_file)
        if self.supported:
            tensors = self.reader.header.tensors.items()
            infos = (TensorInfo(name, own.shape[::-1], own.kind, own.start, own.num_bytes) for name, own in tensors)
            self.header = self.header._replace(tensors=tuple(infos))

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, **kwargs)  # type: ignore[no-untyped-call]
        self.packed_modules = self.reader.prepare(model, self.dtype or torch.float32)

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """The dtype of a tensor's place, without a look at the tensor, which is not read yet."""
        return super().get_new_dtype(converter, param, dtype) if self.supported else dtype  # type: ignore[no-untyped-call]

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Any]:
        return self.reader.lazy_blocks() if self.supported else self.reader.state_dict()

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        model = super()._process_model_after_weight_loading(model, **kwargs)  # type: ignore[no-untyped-call]
        self.reader.finish(model, self.dtype or torch.float32)
        return model


class _Blocks(nn.Module):
    """Holds the place of a layer while a model is loaded: its rows are blocks."""

    def __init__(self, layer: nn.Module, kind: int) -> None:
        super().__init__()
        own = FORMATS[NAMES[kind]]
        rows, columns = layer.weight.shape  # type: ignore[misc]
        shape = rows, columns // own.per_block * own.num_bytes
        self.is_embedding, self.kind = type(layer) is nn.Embedding, kind
        self.kept_bytes = own.kept_bytes(rows * columns)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)
        bias = getattr(layer, "bias", None)
        self.bias = None if bias is None else nn.Parameter(torch.empty_like(bias), requires_grad=False)


@dataclass(frozen=True)
class _Stored:
    """A tensor in the file, read when transformers' loader takes it, as `tensor[...]`."""

    reader: Reader
    name: str
    rows: npt.NDArray[np.int64] | None
    """The order of its rows, of one that stays in blocks."""

    def __getitem__(self, _: Any) -> torch.Tensor:
        data = self.reader.bytes_of(self.name)
        if self.rows is not None:  # which stay in the file until `finish` takes them apart
            is_moved = not np.array_equal(self.rows, np.arange(len(self.rows)))
            return torch.from_numpy(data[self.rows] if is_moved else data)
        weights = self.reader.processed(self.name)[0]
        is_in_file = np.may_share_memory(weights, data)
        return torch.from_numpy(np.array(weights) if is_in_file else np.ascontiguousarray(weights))


class Reader:
    """Reads the tensors of a header's files by the names of a model."""

    def __init__(self, header: GgufHeader, *, keeps_bits: bool) -> None:
        self.header = header
        self._layers: Any = grouped_layers() if keeps_bits else None
        self._processor_class: Any = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
        self._files = [np.memmap(file, mode="c") for file in header.files]
        self._dtype: torch.dtype = torch.float32
        self._names: dict[str, str] = {}
        """The model's names of the file's tensors."""
        self._rows: dict[str, npt.NDArray[np.int64]] = {}
        """The order of rows of those that stay in blocks."""
        self._places: dict[str, _Blocks] = {}

    def prepare(self, model: Any, dtype: torch.dtype) -> dict[str, _Blocks]:
        """Find what each tensor is in a model, and put `_Blocks` in place of layers that keep their bits."""
        tensors, self._dtype = self.header.tensors, dtype
        if self.header.architecture in GGUF_ARCHS:
            header: Any = SimpleNamespace(ggml_types={name: tensor.kind for name, tensor in tensors.items()})
            mapping = get_gguf_conversion_mapping(self.header.architecture, model.config)
            _, kinds, moved_inputs = get_gguf_plan(header, mapping)
            return self._place(model, kinds.keys() - moved_inputs.keys(), kinds)
        self._processor = self._processor_class(config=model.config.to_dict())
        self._names = get_gguf_hf_weights_map(model, self._processor)
        shapes = {name: tuple(own.shape) for name, own in model.state_dict().items()}
        own = {name: tensor for name, tensor in tensors.items() if name in self._names}
        orders = {name: self._order_of_rows(name, tensor) for name, tensor in own.items()}
        fitting = {name for name in own if shapes.get(self._names[name]) == own[name].shape[::-1]}
        movable = {self._names[name] for name in fitting if orders[name] is not None}
        placed = self._place(model, movable, {self._names[name]: tensor.kind for name, tensor in own.items()})
        self._rows = {name: rows for name, rows in orders.items() if rows is not None and self._names[name] in placed}
        return placed

    def _place(self, model: Any, movable: Set[str], kinds: Mapping[str, int]) -> dict[str, _Blocks]:
        """Put `_Blocks` in place of layers of a model that keep their bits.

        `movable` are the weights of which no more than the order of rows changes, and `kinds` the formats of the file's
        tensors, by the model's names.
        """
        if self._layers is None:
            return {}
        modules = {f"{name}.weight": module for name, module in model.named_modules()}
        read = {kind: read_directly(model, tables=kind is nn.Embedding) for kind in (nn.Linear, nn.Embedding)}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in read.get(type(module), ()):
                del modules[f"{name}.weight"]
        for target in movable & modules.keys():
            layer, kind = modules[target], kinds[target]
            if kind in NAMES and type(layer) in (nn.Linear, nn.Embedding):
                self._places[target] = _Blocks(layer, kind)
        for target, source in (model._tied_weights_keys or {}).items():
            if source not in self._places or target in kinds:
                continue
            if type(modules.get(target)) is not nn.Linear:  # which would be given blocks for its weight
                del self._places[source]
            else:
                self._places[target] = _Blocks(modules[target], kinds[source])
                self._places[target].kept_bytes = 0  # they are the embedding's
        for target, place in self._places.items():
            model.set_submodule(target.removesuffix(".weight"), place)
        return self._places

    def _order_of_rows(self, name: str, tensor: GgufTensor) -> npt.NDArray[np.int64] | None:
        """The order in which a model has a tensor's rows; None: more than their order changes.

        What is done to the tensor is done to a column of numbers of rows.
        """
        if len(tensor.shape) != 2 or tensor.kind not in NAMES or self._layers is None:
            return None
        column = np.arange(tensor.shape[1], dtype=np.float64)[:, None]
        try:
            moved = self._process(name, column.copy(), {})[0]
        except Exception:  # it needs whole rows
            return None
        if moved is None or moved.shape != column.shape or not np.array_equal(np.sort(moved, 0), column):
            return None
        order: npt.NDArray[np.int64] = moved[:, 0].astype(np.int64)
        return order

    def _process(self, name: str, weights: npt.NDArray[Any], tensors: dict[str, Any]) -> tuple[Any, str | None]:
        """What transformers makes of a tensor, and its name; what it names itself it puts into `tensors`."""
        parsed = {"tensors": tensors}
        result = self._processor.process(
            weights=weights, name=name, tensor_key_mapping=self._names, parsed_parameters=parsed
        )
        return (None if result.name is None else result.weights), result.name

    def processed(self, name: str, tensors: dict[str, Any] | None = None) -> tuple[Any, str | None]:
        kind = GGMLQuantizationType(self.header.tensors[name].kind)
        weights = dequantize(self.bytes_of(name), kind)
        return self._process(name, weights, {} if tensors is None else tensors)

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes in the file, `[..., bytes of a row]`."""
        tensor = self.header.tensors[name]
        shape = tensor.shape[::-1]
        data = self._files[tensor.part][tensor.start : tensor.start + tensor.num_bytes]
        return data.reshape(*shape[:-1], tensor.num_bytes // max(1, math.prod(shape[:-1])))

    def state_dict(self) -> dict[str, Any]:
        """The model's tensors, none of them read yet but what several of the file's make together."""
        tensors: dict[str, Any] = {}
        for name, tensor in self.header.tensors.items():
            if self._names_itself(name, tensor):
                self.processed(name, tensors)
                tensors |= {
                    own: value.to(self._dtype) for own, value in tensors.items() if isinstance(value, torch.Tensor)
                }
            elif name in self._names:
                tensors[self._names[name]] = _Stored(self, name, self._rows.get(name))
        return tensors

    def lazy_blocks(self) -> dict[str, Any]:
        """The tensors by their names in the file, as transformers' own reader gives them to its converters."""
        return {
            name: LazyGgufTensor(self.bytes_of(name).reshape(-1), tensor.kind, self._shape_in_blocks(tensor))
            for name, tensor in self.header.tensors.items()
        }

    @staticmethod
    def _shape_in_blocks(tensor: GgufTensor) -> tuple[int, ...]:
        shape = tensor.shape[::-1]
        return (*shape[:-1], row_bytes(tensor.kind, shape[-1])) if tensor.kind in GGML_BLOCK else shape

    def _names_itself(self, name: str, tensor: GgufTensor) -> bool:
        """Whether transformers gives a tensor its name beside `_names` (experts, the head of GPT-2)."""
        like = np.zeros((*tensor.shape[:0:-1], 1), dtype=np.float32)
        try:
            return self._process(name, like, {})[1] is None
        except Exception:
            return False

    def finish(self, model: Any, dtype: torch.dtype) -> None:
        """Put layers that keep their bits in place of the blocks, and say in the log what became of each format."""
        kept: dict[int, Any] = {}
        counts = Counter({id(place.weight): NAMES[place.kind] for place in self._places.values()}.values())
        while self._places:
            target, place = self._places.popitem()
            weight, name = place.weight, target.removesuffix(".weight")
            layer = kept.get(id(weight)) or self._grouped(weight, place)
            if place.is_embedding or target in (model._tied_weights_keys or {}):
                kept[id(weight)] = layer
            model.set_submodule(name, self._layers.GroupedEmbedding(layer, dtype) if place.is_embedding else layer)
        _log_formats(self.header, counts, dtype)

    def _grouped(self, blocks: Any, place: _Blocks) -> Any:
        own = FORMATS[NAMES[place.kind]]
        rows = max(1, CHUNK // (blocks.shape[1] // own.num_bytes * own.per_block))
        parts = [take_apart(each, place.kind) for each in blocks.split(rows)]
        codes, scales, minimums = (None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True))
        return self._layers.GroupedLinear(codes, scales, minimums, place.bias, bits=own.bits, zero=own.zero)


def _log_formats(header: GgufHeader, kept: Counter[str], dtype: torch.dtype) -> None:
    """Log how many layers keep their bits, and what other formats the file has, which were widened."""
    stored = Counter(GGMLQuantizationType(each.kind).name for each in header.tensors.values() if len(each.shape) > 1)
    wide = stored - kept
    del wide[GGMLQuantizationType.F32.name]
    sentences = []
    if kept:
        sentences.append(f"layers keep their bits: {_listed(kept)}")
    if wide:
        sentences.append(f"tensors became {str(dtype).removeprefix('torch.')}: {_listed(wide)}")
    if sentences:
        logger.info("%s: %s", header.files[0].name, "; ".join(sentences))


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} of {name}" for name, number in sorted(counts.items()))
