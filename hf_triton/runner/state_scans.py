# SPDX-License-Identifier: Apache-2.0
"""Lets the scan of Mamba's first kind begin with a state, so that contexts are computed in chunks.

transformers' scan, and the kernel of mamba_ssm that it takes on a GPU, begin with zeros: `h[t] = exp(A dt[t]) h[t-1] +
...` and `y[t] = C[t] h[t]`. Both are linear in the state, so what a state before the chunk adds is computed apart:
`C[t] exp(A (dt[1] + ... + dt[t])) h[0]`. The probe at load judges it, as all else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional

from hf_triton.runner.paged_cache import PagedCache
from hf_triton.runner.step_attention import cache_of_thread

SCAN: Final = "mamba_selective_scan"
"""Its name in transformers' modules."""
SLICE_TOKENS: Final = 64
"""What a state adds takes the memory of so many states."""


def continue_scans(model: Any) -> None:
    """Make scans of this model's module of transformers go on from the states of the cache's step.

    In a forward without a `PagedCache`, they are what they were.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules.get(name)
        scan = getattr(module, SCAN, None)
        if scan is not None and not hasattr(scan, "begins_with_state"):
            setattr(module, SCAN, _continued(scan))


def _continued(scan: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scan)
    def continued(*arguments: Any, **others: Any) -> Any:
        result = scan(*arguments, **others)
        cache = cache_of_thread()
        state = cache.continued if isinstance(cache, PagedCache) else None
        if state is None or not isinstance(result, tuple) or result[1].shape != state.shape:
            return result
        outputs, last = _behind(state, *arguments, **others)
        return result[0] + outputs.to(result[0].dtype), result[1] + last.to(result[1].dtype)

    continued.begins_with_state = True  # type: ignore[attr-defined]
    return continued


def _behind(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803  # transformers' names
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a state `[rows, size, states]` adds to the outputs `[rows, size, tokens]` and to the last state."""
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    times = (functional.softplus(dt) if delta_softplus else dt).float().cumsum(-1)
    state = state.float()
    outputs = torch.empty_like(times)
    for start in range(0, times.shape[-1], SLICE_TOKENS):
        part = slice(start, start + SLICE_TOKENS)
        decayed = torch.exp(A.float()[:, None] * times[..., part, None]) * state[:, :, None]
        outputs[..., part] = torch.einsum("rsto,rot->rst", decayed, C[..., part].float())
    if z is not None:
        outputs *= functional.silu(z.float())
    return outputs, decayed[:, :, -1]
