# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in captured forwards.

torch's grouped product, by which transformers computes experts, waits for the host in every dtype and on every GPU but
in bfloat16 on compute capability 9.0 and 10.x. Elsewhere steps of few tokens are captured with transformers' other way,
which gathers the weights of each token's experts: it moves them three times, and waits for nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from hf_triton.runner.numerics import agree

if TYPE_CHECKING:
    from hf_triton.runner.device_step import StepSize

WAITING: Final = "called a synchronizing CUDA operation"
"""Torch says so where the host would wait for the device and must not; it names no operation."""
GROUPED: Final = "grouped_mm_experts_forward"
"""The function of transformers that computes experts by the grouped product."""
GATHERING: Final = "batched_mm"
"""The way of transformers that gathers weights."""
GATHERED_BYTES: Final = 2**21
"""The most of a step's gathered weights for each expert of a layer: moving them three times takes a GPU of 300 GB/s as
long as launching an expert's two products takes the host, some 20 us. An estimate, not timed on a GPU yet."""


def why_experts_wait(error: BaseException, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a forward that waits for the host does so, if it is in its experts; None: its failure is another."""
    names = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
    if WAITING not in str(error) or GROUPED not in names:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return (
        f"the grouped product of its experts waits for the host in {str(dtype).removeprefix('torch.')} on a GPU of "
        f"compute capability {major}.{minor}, and does not in bfloat16 on 9.0 and 10.x"
    )


def gathering_sizes(model: Any, sizes: Sequence[StepSize]) -> list[StepSize]:
    """The sizes of steps, the smallest ones, for which the experts' weights may be gathered; empty: for none.

    Args:
        model: A mixture of experts on a GPU; a trial compares what an expert layer of it gives in both ways.
        sizes: Ascending.
    """
    experts = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    top_k = getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None)
    if not experts or top_k is None or not _gathers_right(model, experts[0], top_k):
        return []
    num_bytes = max(sum(own.nbytes for own in each.parameters()) / each.num_experts**2 for each in experts) * top_k
    return [size for size in sizes if size.num_tokens * num_bytes <= GATHERED_BYTES]


@contextmanager
def gathered_experts(model: Any) -> Iterator[None]:
    """Have a model gather its experts' weights."""
    before = model.get_experts_implementation()
    model.set_experts_implementation(GATHERING)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _gathers_right(model: Any, experts: Any, top_k: int) -> bool:
    """Whether a layer's experts give the same in both ways."""
    width, place = model.config.get_text_config(decoder=True).hidden_size, {"device": model.device}
    chosen = (torch.arange(2 * top_k, **place) % experts.num_experts).view(2, top_k)
    states = torch.linspace(-1, 1, 2 * width, dtype=model.dtype, **place).view(2, width)
    arguments = states, chosen, torch.full((2, top_k), 1 / top_k, dtype=model.dtype, **place)
    expected = experts(*arguments)
    with gathered_experts(model):
        return agree(expected.cpu(), experts(*arguments).cpu())
