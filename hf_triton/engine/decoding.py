# SPDX-License-Identifier: Apache-2.0
"""The setting `decoding`: whether the small forwards of a GPU are captured as CUDA graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from hf_triton.errors import CheckpointError

if TYPE_CHECKING:
    import torch

DecodingMode = Literal["auto", "eager", "cuda_graphs"]

logger = logging.getLogger(__name__)


def decoding_error(mode: DecodingMode, device: torch.device) -> str | None:
    """The error of a mode that cannot run on a device; None: it can."""
    if mode == "cuda_graphs" and device.type != "cuda":
        return f"decoding cuda_graphs needs a GPU, and the model is on {device}: set decoding to auto"
    return None


def capture_forwards(mode: DecodingMode, device: torch.device, capture: Callable[[], str | None]) -> list[str]:
    """Capture what a mode asks for; the log says so, or why not.

    `capture` returns why all forwards run eagerly; None: small ones are captured.

    Returns:
        Why forwards run slower than they could; see `Worker.slower`.

    Raises:
        CheckpointError: Graphs are required and cannot be had.
    """
    if error := decoding_error(mode, device):
        raise CheckpointError("device_unavailable", error)
    if device.type != "cuda" or mode == "eager":
        return []
    started_s = time.monotonic()
    reason = capture()
    if reason is None:
        logger.info("CUDA graphs captured for small steps in %.1f s", time.monotonic() - started_s)
        return []
    if mode == "cuda_graphs":
        raise CheckpointError(
            "unsupported_model", f"decoding cuda_graphs cannot run this model ({reason}): set decoding to auto"
        )
    slower = f"runs eagerly, up to four times slower while few sequences run, as there are no CUDA graphs: {reason}"
    logger.warning("the model %s", slower)
    return [slower]
