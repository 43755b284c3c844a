# SPDX-License-Identifier: Apache-2.0
"""Linear layers on a CPU whose weights stay codes of 4 or 8 bits, with a scale for each group of inputs."""

from __future__ import annotations

import ctypes
import threading
from array import array
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from hf_triton.runner.cpu.availability import is_usable
from hf_triton.runner.cpu.linear import MIN_PARALLEL_PRODUCTS

ROUNDING: Final = 2.0**-13
"""What rows of 16 bits may change of a result, for each unit of the largest one of a row."""


class GroupedLinear(nn.Module):
    """`x @ weight.T + bias` with weights of 4 or 8 bits: `minimum + code * scale`, or `(code - zero) * scale`.

    Scales and minimums are float16, kept as whole numbers, which no cast of a model changes. Rows are rounded to 16
    bits for each group of inputs, and the sums are float32.

    Args:
        codes: uint8 `[out_features, in_features]`, of 0 to `2**bits - 1`.
        scales: `[out_features, in_features / group]`, for groups of 16 or 32 inputs.
        minimums: The same shape, or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        minimums: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        bits: int,
        zero: int = 0,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.bits, self.zero, self.groups = bits, zero, scales.shape[1]
        self.group = self.in_features // self.groups
        self.register_buffer("codes", _pack(codes, bits), persistent=False)
        self.register_buffer("scales", _halves(scales), persistent=False)
        self.register_buffer("minimums", None if minimums is None else _halves(minimums), persistent=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        _functions(bits, self.group, minimums is not None)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (*self.buffers(), *self.parameters()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]` in the dtype of `x`; each row by itself.

        A decoding step calls it for every layer: all that does not depend on `x` is in the layer's `_Call`.
        """
        if has_torch_function_unary(x):
            return handle_torch_function(GroupedLinear.forward, (x,), self, x)
        call = self.__dict__.get("call")
        if call is None or call.codes is not self._buffers["codes"]:
            call = self.__dict__["call"] = _Call.of(self)
        is_plain = x.dtype is torch.float32 and x.is_contiguous()
        rows = x if is_plain else x.float().contiguous()
        num_rows = rows.numel() // self.in_features
        result = torch.empty(*x.shape[:-1], call.padded_outputs, dtype=torch.float32, device="cpu")
        call.run(rows, num_rows, result)
        if call.padded_outputs != self.out_features:
            result = result[..., : self.out_features]
        bias = self._parameters["bias"]
        if bias is not None:
            result = result + bias
        return result if x.dtype is torch.float32 else result.to(x.dtype)

    def widened(self) -> torch.Tensor:
        """The weights as float32 `[out_features, in_features]`."""
        codes, scales, minimums = (_of_rows(each) for each in (self.codes, self.scales, self.minimums))
        return self._widen(codes, scales, minimums)[: self.out_features]

    def widened_rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Some rows of the weights, as float32 `[len(numbers), in_features]`."""
        width, tensors = self.codes.shape[2], (self.codes, self.scales, self.minimums)
        if len(numbers) == 1:  # views take less time than places
            block, lane = divmod(int(numbers), width)
            return self._widen(*(None if each is None else each[block : block + 1, :, lane] for each in tensors))
        place = numbers // width, slice(None), numbers % width
        return self._widen(*(None if each is None else each[place] for each in tensors))

    def _widen(self, words: Any, scales: Any, minimums: Any) -> torch.Tensor:
        codes = _unpack(words, self.bits).float().view(len(words), self.groups, self.group)
        wide = scales.view(torch.float16).float()[:, :, None]
        if minimums is None:
            weight = (codes - self.zero).mul_(wide)
        else:
            weight = codes.mul_(wide).add_(minimums.view(torch.float16).float()[:, :, None])
        return weight.view(len(words), self.in_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, group={self.group}"


class GroupedEmbedding(nn.Module):
    """An embedding whose rows are those of a `GroupedLinear`, which may be the model's output head too."""

    def __init__(self, rows: GroupedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = rows.out_features, rows.in_features
        self.rows, self.dtype = rows, dtype

    @property
    def weight(self) -> torch.Tensor:
        """Stands for the table where its shape, dtype or device is asked for; without its numbers."""
        return torch.zeros(1, 1, dtype=self.dtype, device="cpu").expand(self.num_embeddings, self.embedding_dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if has_torch_function_unary(ids):  # recorded as one call, which may look at the ids
            return handle_torch_function(GroupedEmbedding.forward, (ids,), self, ids)
        return self.rows.widened_rows(ids.reshape(-1)).to(self.dtype).view(*ids.shape, self.embedding_dim)


@dataclass(frozen=True)
class _Call:
    """What calls of one layer share: its tensors' addresses and the compiled functions."""

    codes: torch.Tensor
    numbers: tuple[int, ...]
    """The task's fields from `codes` to `minimums`, and from `inputs` to `blocks`."""
    zero: int
    padded_outputs: int
    products: int
    """Of a row."""
    round_rows: Any
    multiply: Any
    entry: int
    parallel: Any

    @classmethod
    def of(cls, layer: GroupedLinear) -> _Call:
        codes, scales, minimums = layer.codes, layer.scales, layer.minimums
        addresses = (each.data_ptr() for each in (codes, scales, scales if minimums is None else minimums))
        blocks, _, width = codes.shape
        functions = _functions(layer.bits, layer.group, minimums is not None)
        numbers = (*addresses, layer.in_features, layer.groups, blocks)
        return cls(codes, numbers, layer.zero, blocks * width, layer.in_features * layer.out_features, *functions)

    def run(self, rows: torch.Tensor, num_rows: int, result: torch.Tensor) -> None:
        """Compute float32 rows, `[num_rows, in_features]` in memory."""
        codes, scales, minimums, inputs, groups, blocks = self.numbers
        is_parallel = self.parallel and num_rows * self.products >= MIN_PARALLEL_PRODUCTS
        num_threads = torch.get_num_threads() if is_parallel else 1
        blocks_per_task = blocks if num_threads == 1 else -(-blocks // (2 * num_threads))  # they are not equally fast
        rounded, size = _working_memory(num_rows * (2 * inputs + 12 * groups)), 2 * num_rows * inputs
        places = rows.data_ptr(), rounded, rounded + size, codes, scales, minimums, result.data_ptr()
        task = array("q", (0, *places, num_rows, inputs, groups, blocks, blocks_per_task, self.zero, 0))
        address, _ = task.buffer_info()  # see `grouped_kernel.TASK`
        task[0] = address
        self.round_rows(address)
        if num_threads == 1:
            self.multiply(address)
        else:
            self.parallel(self.entry, address, num_threads, 0)

    def __deepcopy__(self, memo: object) -> None:
        """A copied layer has tensors of its own."""


_LOCAL: Final = threading.local()


def _working_memory(num_bytes: int) -> int:
    """The address of memory for one product, which the thread keeps; inputs are even, so all of it is aligned."""
    kept: torch.Tensor | None = getattr(_LOCAL, "memory", None)
    if kept is None or kept.numel() < num_bytes:
        kept = _LOCAL.memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return kept.data_ptr()


@cache
def _functions(bits: int, group: int, has_minimums: bool) -> tuple[Any, Any, int, Any]:
    """What rounds rows, what multiplies them, its address, and OpenMP's function for several threads."""
    from hf_triton.runner.cpu.grouped_kernel import compile_product, compile_rounding
    from hf_triton.runner.cpu.llvm import openmp_parallel

    kind, product = ctypes.CFUNCTYPE(None, ctypes.c_void_p), compile_product(bits, group, has_minimums)
    return kind(compile_rounding(group).address), kind(product.address), product.address, openmp_parallel()


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    return _in_blocks(numbers.half().view(torch.int16))


def _in_blocks(numbers: torch.Tensor) -> torch.Tensor:
    """`[outputs, n]` as `[blocks, n, BLOCK]`; the last block is filled up with zeros."""
    from hf_triton.runner.cpu.grouped_kernel import BLOCK

    padded = nn.functional.pad(numbers, (0, 0, 0, -len(numbers) % BLOCK))
    return padded.reshape(-1, BLOCK, numbers.shape[1]).transpose(1, 2).contiguous()


def _of_rows(blocks: torch.Tensor | None) -> torch.Tensor | None:
    return None if blocks is None else blocks.transpose(1, 2).reshape(-1, blocks.shape[1])


@cache
def _shifts(bits: int) -> torch.Tensor:
    """Where a word's codes are: a pair of inputs is 16 bits apart, as if each had 16 bits."""
    pairs = bits * torch.arange(16 // bits, dtype=torch.int32, device="cpu")
    return pairs[:, None] + torch.tensor([0, 16], dtype=torch.int32, device="cpu")


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    shifts, words = _shifts(bits), torch.zeros(len(codes), codes.shape[1] * bits // 32, dtype=torch.int32)
    fields = codes.view(len(codes), -1, 16 // bits, 2)
    for pair in range(16 // bits):
        for half in range(2):
            words |= fields[:, :, pair, half].to(torch.int32) << shifts[pair, half]
    return _in_blocks(words)


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes `[n, inputs]` of words `[n, words]`."""
    fields = (words[:, :, None, None] >> _shifts(bits)) & ((1 << bits) - 1)
    return fields.reshape(len(words), -1)


@cache
def has_grouped_kernel() -> bool:
    """Whether this processor has the kernel, and it is right; logged if it should and is not."""

    def try_out() -> bool | None:
        from hf_triton.runner.cpu.grouped_kernel import can_run

        return is_right() if can_run() else None

    return is_usable("grouped linear", "wider weights", try_out)


@torch.inference_mode()
def is_right() -> bool:
    """Whether the kernel computes what torch computes with the widened weights, for tiles of every number of rows."""
    from hf_triton.runner.cpu.grouped_kernel import BLOCK, ROWS_PER_TILE

    source = torch.Generator(device="cpu").manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, device="cpu")

    for bits, group, has_minimums in ((4, 32, True), (8, 16, False)):
        codes = torch.randint(1 << bits, (2 * BLOCK - 1, 256), generator=source, dtype=torch.uint8, device="cpu")
        minimums = noise(len(codes), 256 // group) if has_minimums else None
        layer = GroupedLinear(
            codes, noise(len(codes), 256 // group), minimums, None, bits=bits, zero=0 if has_minimums else 32
        )
        x = noise(2 * ROWS_PER_TILE - 1, 256)
        expected = x @ layer.widened().T
        for num_rows in range(1, len(x) + 1):
            difference = (layer(x[:num_rows]) - expected[:num_rows]).abs().amax(-1)
            if not bool((difference <= ROUNDING * expected[:num_rows].abs().amax(-1)).all()):
                return False
    return True
