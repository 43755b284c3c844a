# SPDX-License-Identifier: Apache-2.0
"""The operations `hf_triton::attend` and `attend_packed`: attention of a packed row of tokens, within each sequence.

The first one reads keys and values from the sequences' blocks, the second one from the row itself. A CUDA device
computes them by kernels in Triton's language (`attention_kernel.py`), a CPU by torch (`attention_reference.py`). What
depends on a step's sequences is read from tensors on the device, so that a captured graph depends on the number of
tokens alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import torch

from hf_triton.runner.cuda import attention_reference, why_no_kernel
from hf_triton.runner.cuda.kernel_cache import have_kernel_cache
from hf_triton.runner.device_step import NO_SEQUENCE, Places
from hf_triton.runner.mask_rules import Window
from hf_triton.runner.numerics import agree
from hf_triton.runner.torch_attention import Scoring

logger = logging.getLogger(__name__)

MAX_SIZE: Final = 256
"""Numbers of a head."""
MIN_CAPABILITY: Final = 8, 0
"""CUDA devices before it (a T4, sm_75) have no copies that overlap with products, and no bfloat16."""
TRIAL_TOKENS: Final = 20, 600
"""Rows so long are tried: many tokens have large tiles, for which not every device has room."""

LIBRARY: Any = torch.library.Library("hf_triton", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "attend(Tensor query, Tensor? keys, Tensor? values, Tensor(a!) key_blocks, Tensor(b!) value_blocks, "
    "Tensor sequences, Tensor bounds, Tensor lengths, Tensor starts, Tensor tables, "
    "float scale, float? softcap, Tensor? sinks, int window) -> Tensor"
)
LIBRARY.define(
    "attend_packed(Tensor query, Tensor keys, Tensor values, Tensor sequences, Tensor bounds, "
    "float scale, float? softcap, Tensor? sinks, int size, bool is_causal) -> Tensor"
)
"""The fields of `Places`, `Scoring` and `Window` one by one, as operations take no others."""


def attend(
    query: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    key_blocks: torch.Tensor,
    value_blocks: torch.Tensor,
    places: Places,
    scoring: Scoring,
    window: int,
) -> torch.Tensor:
    """Write the new tokens' keys and values to their blocks, and attend to each sequence's tokens, causally.

    All tensors are on one device.

    Args:
        query: `[tokens, heads, size]`, the new tokens of all sequences; any strides.
        keys: `[tokens, key_heads, size]`, any strides; None: they are in their blocks already.
        values: `[tokens, key_heads, value_size]`; None if the keys are.
        key_blocks: `[blocks, key_heads, block_size, size]`, contiguous.
        value_blocks: `[blocks, key_heads, block_size, value_size]`, contiguous.
        places: Of the row's tokens and of those before.
        scoring: What scores are made of; sums and softmax are in 32 bits.
        window: How many of the last tokens, itself included, a token attends to; 0: all.

    Returns:
        `[tokens, heads, value_size]`, contiguous, in the query's dtype; zeros for padding.
    """
    output: torch.Tensor = torch.ops.hf_triton.attend(
        query, keys, values, key_blocks, value_blocks, *places, *scoring, window
    )
    return output


def attend_packed(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: Places,
    scoring: Scoring,
    window: Window,
) -> torch.Tensor:
    """Attend to the tokens of each sequence, which are all in the row; arguments and result are those of `attend`.

    Queries, keys and values may have any strides. Of `places`, the sequences and their bounds are read.
    """
    output: torch.Tensor = torch.ops.hf_triton.attend_packed(query, keys, values, *places[:2], *scoring, *window)
    return output


def _to_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as `attend`, for the operation's arguments."""
    return lambda *given: function(*given[:5], Places(*given[5:10]), Scoring(*given[10:13]), given[13])


def _to_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as `attend_packed`, for the operation's arguments."""
    return lambda *given: function(*given[:3], Places(*given[3:5]), Scoring(*given[5:8]), Window(*given[8:]))


@cache
def _kernels() -> Any:
    """The module that needs Triton."""
    have_kernel_cache()
    from hf_triton.runner.cuda import attention_launch

    return attention_launch


def _attend_on_device(query: torch.Tensor, *others: Any) -> Any:
    with torch.cuda.device(query.device):  # Triton launches on the current one
        return _kernels().attend(query, *others)


def _attend_packed_on_device(query: torch.Tensor, *others: Any) -> Any:
    with torch.cuda.device(query.device):
        return _kernels().attend_packed(query, *others)


def _shape_on_meta(
    query: torch.Tensor, keys: Any, values: Any, key_blocks: Any, value_blocks: torch.Tensor, *others: Any
) -> torch.Tensor:
    """What torch.compile needs to know."""
    return query.new_empty(*query.shape[:2], value_blocks.shape[3])


LIBRARY.impl("attend", _to_blocks(attention_reference.attend), "CPU")
LIBRARY.impl("attend", _shape_on_meta, "Meta")
LIBRARY.impl("attend", _to_blocks(_attend_on_device), "CUDA")
LIBRARY.impl("attend_packed", _to_row(attention_reference.attend_packed), "CPU")
LIBRARY.impl("attend_packed", _to_row(_attend_packed_on_device), "CUDA")


@cache
def is_usable(name: str, device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether an operation is right for heads of a size on a device, which is tried once; if not, the log says why."""
    if size > MAX_SIZE:
        reason: str | None = f"it has {MAX_SIZE} numbers of a head at most"
    elif device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        reason = "its CUDA capability is {}.{}, below {}.{}".format(*capability, *MIN_CAPABILITY)
    else:
        reason = why_no_kernel(partial(_is_right, name, device, dtype, size))
    if reason is None:
        return True
    logger.warning("no attention kernel on %s (%s): attention of heads of %d is torch's, slower", device, reason, size)
    return False


def _is_right(name: str, device: torch.device, dtype: torch.dtype, size: int) -> bool:
    operation, trial = (attend, _paged_trial) if name == "attend" else (attend_packed, _packed_trial)
    for num_tokens in TRIAL_TOKENS:
        on_host = trial(dtype, size, num_tokens)
        arguments = [_copied(each, device) for each in on_host]
        expected = getattr(attention_reference, name)(*on_host)
        if not agree(expected, operation(*arguments).cpu()):
            return False
    return True


def _paged_trial(dtype: torch.dtype, size: int, num_tokens: int) -> tuple[Any, ...]:
    """Arguments of `attend`: a long sequence that decodes and a chunk, whose blocks are out of order, and padding."""
    chunk = num_tokens - 2
    num_blocks = 13 + -(-(15 + chunk) // 16)
    blocks = num_blocks, 2, 16, size
    rows = (num_tokens, 4, size), (num_tokens, 2, size), (num_tokens, 2, size)
    numbers = [0, *[1] * chunk, NO_SEQUENCE], [0, 1, 1 + chunk], [200, 15 + chunk], [0, 13], range(num_blocks)[::-1]
    places = Places(*(torch.tensor(each) for each in numbers))
    return *_random_states((*rows, blocks, blocks), dtype), places, Scoring(0.125, None, None), 0


def _packed_trial(dtype: torch.dtype, size: int, num_tokens: int) -> tuple[Any, ...]:
    """Arguments of `attend_packed`: two sequences with windows."""
    rows = (num_tokens, 4, size), (num_tokens, 2, size), (num_tokens, 2, size)
    places = Places(torch.tensor([0] * 3 + [1] * (num_tokens - 3)), torch.tensor([0, 3, num_tokens]))
    return *_random_states(rows, dtype), places, Scoring(0.125, None, None), Window(9, is_causal=False)


def _random_states(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _copied(argument: Any, device: torch.device) -> Any:
    """A copy on a device, as the trial's keys are written to its blocks."""
    if isinstance(argument, Places):
        return Places(*(_copied(each, device) for each in argument))
    return argument.clone().to(device) if isinstance(argument, torch.Tensor) else argument
