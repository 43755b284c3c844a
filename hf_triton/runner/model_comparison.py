# SPDX-License-Identifier: Apache-2.0
"""Compares what a whole model computes in two ways by its meaning, whatever the dtype that it is served in.

In half precision two right ways of a deep model differ by up to a fifth of the largest logit, and wrong ones by less
than a hundredth, so no tolerance tells them apart. In float32 right ways differ by less than 1e-4, and the smallest
fault known by 2e-3. A single operation is compared in its own dtype, see `numerics.agree`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

from hf_triton.runner.faults import described, is_fatal, is_memory
from hf_triton.runner.float32 import HALF, in_float32

logger = logging.getLogger(__name__)

LIMIT: Final = 1e-3
"""Part of a row's largest output by which float32 may differ."""
NEAR: Final = 2e-3
"""The same in half precision: outputs as near as that are the same, and need no second look."""
MAX_ROUNDING: Final = 4.0
"""How many times as far from float32 as the reference the outputs of another way may be; right ones reach 1.6."""
HALF_LIMIT: Final = 5e-2
"""Part of a row's largest output for a model that does not run in float32."""


@dataclass(frozen=True)
class Verdict:
    is_right: bool
    text: str
    """What was measured and what is allowed: `1.7e-02 of the largest output in float32, where 1.0e-03 is allowed`."""
    times: float = 1.0
    """How many times as far from float32 as the reference it is."""


class Comparison:
    """Judges ways of computing a model's outputs by one of them.

    Args:
        model: A transformers model in eval mode, which nothing else runs meanwhile.
        reference: Computes the right outputs, `[rows, numbers]` float32 on the CPU; called here, and once more in
            float32 if a comparison needs it.
        quick: Computes the same by fewer forwards; in float32 it is asked first, and `reference` if that does not
            confirm a way, or if the reference seems to compute something else.
        limit: Part of a row's largest output by which float32 may differ.
    """

    def __init__(
        self,
        model: Any,
        reference: Callable[[], torch.Tensor],
        *,
        quick: Callable[[], torch.Tensor] | None = None,
        limit: float = LIMIT,
    ) -> None:
        self._model = model
        self.reference = reference
        """Also what computes the outputs of a model that was changed since."""
        self._quick = quick
        self._limit = limit
        self._dtype: torch.dtype = model.dtype
        self.expected = reference()
        self._exact: dict[Callable[[], torch.Tensor], torch.Tensor] = {}
        """What the reference, or the quick one, computes in float32."""
        self._obstacle = ""
        """Why the model does not run in float32; empty: it does, or was not asked to."""

    def judge(
        self, compute: Callable[[], torch.Tensor], without_kernels: Callable[[], torch.Tensor] | None = None
    ) -> Verdict:
        """Compare outputs of the same shape; raises whatever `compute` does in the served dtype.

        Args:
            compute: Computes what is compared.
            without_kernels: Computes the same by the operations of the reference, which may have its very bits. If it
                does, what `compute` differs by is the rounding of kernels, which are tried by themselves.
        """
        found = compute()
        apart = distance(self.expected, found)
        if self._dtype not in HALF:
            return _verdict(apart, self._limit, self._dtype)
        if apart <= NEAR:
            return _verdict(apart, NEAR, self._dtype)
        if without_kernels is not None and apart <= HALF_LIMIT:
            plainly_apart = distance(self.expected, without_kernels())
            if plainly_apart <= NEAR:
                return _verdict(plainly_apart, NEAR, self._dtype)
        exact = self._judge_exactly(compute, found)
        if exact is not None:
            return exact
        verdict = _verdict(apart, HALF_LIMIT, self._dtype)
        logger.warning(
            "the probe at load compares in %s, as the model does not run in float32 (%s): it differs by %s for "
            "rounding, and a right way that rounds more is refused, which costs speed",
            _name(self._dtype),
            self._obstacle,
            verdict.text,
        )
        return verdict

    def _judge_exactly(self, compute: Callable[[], torch.Tensor], found: torch.Tensor) -> Verdict | None:
        """The verdict of float32; None: the model does not run so."""
        if self._obstacle:
            return None
        try:
            with in_float32(self._model):
                actual = None if compute is self.reference else compute()
                if self._quick is not None and actual is not None:
                    with suppress(Exception):  # `reference` decides then
                        verdict = self._verdict(self._compute_once(self._quick), actual, found)
                        if verdict.is_right and verdict.times >= 1 / MAX_ROUNDING:
                            return verdict
                exact = self._compute_once(self.reference)
                return self._verdict(exact, exact if actual is None else actual, found)
        except Exception as error:  # a model may insist on its dtype, or be too large
            if is_fatal(error):
                raise
            if is_memory(error) and torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._obstacle = described(error)
            return None

    def _compute_once(self, reference: Callable[[], torch.Tensor]) -> torch.Tensor:
        if reference not in self._exact:
            self._exact[reference] = reference()
        return self._exact[reference]

    def _verdict(self, exact: torch.Tensor, actual: torch.Tensor, found: torch.Tensor) -> Verdict:
        """Judge what both ways compute in float32, and how far both are from there in the served dtype."""
        apart = distance(exact, actual)
        if not apart <= self._limit:
            return _verdict(apart, self._limit, torch.float32)
        times = self._times(exact, found)
        name = _name(self._dtype)
        text = f"{times:.1f} times as far from float32 as the reference in {name}, where {MAX_ROUNDING:g} is allowed"
        return Verdict(times <= MAX_ROUNDING, text, times)

    def _times(self, exact: torch.Tensor, found: torch.Tensor) -> float:
        """How many times as far from float32 as the reference an output is.

        Of a mixture it is the lower median of the rows: where two experts weigh almost the same, rounding chooses the
        other one for a token, in either way, which changes all of its sequence's rows more than any rounding.
        """
        own, other = ((each - exact).norm(dim=-1) for each in (self.expected, found))
        if not _has_experts(self._model):
            own, other = own.norm(), other.norm()
        return float(torch.where(own > 0, other / own, torch.inf).median())


def distance(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference of `[rows, numbers]`, as a part of a row's largest number; infinite if any is NaN."""
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    apart = float(((expected - found).abs() / scale).max())
    return apart if apart >= 0 else float("inf")


def _has_experts(model: Any) -> bool:
    """Whether tokens are routed to some of a model's layers."""
    return any("expert" in f"{name} {type(module).__name__}".lower() for name, module in model.named_modules())


def _verdict(apart: float, limit: float, dtype: torch.dtype) -> Verdict:
    text = f"{apart:.1e} of the largest output in {_name(dtype)}, where {limit:.1e} is allowed"
    return Verdict(apart <= limit, text)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
