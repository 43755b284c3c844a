# SPDX-License-Identifier: Apache-2.0
"""How an engine runs its model: what settings and device decide, made once and handed on as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_triton.engine.decoding import DecodingMode
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.protocols import Observer
from hf_triton.runner.gpu_memory import SEQUENCE_TOKENS, WHOLE_GPU, GpuPart

if TYPE_CHECKING:
    from hf_triton.runner.image_inputs import ImageSample
    from hf_triton.runner.lora.model_adapters import Adapters
    from hf_triton.runner.ranks.processes import Ranks


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an engine that generates; the batch engine ignores those of the KV cache and of decoding."""

    max_num_seqs: int
    """The most sequences that run at a time."""
    context_length: int = SEQUENCE_TOKENS
    """The most tokens of a sequence; in the batch engine, of a batch's longest prompt and completion together."""
    max_cache_tokens: int | None = None
    """Tokens of KV cache memory; None: a part of the device's, see `LoadMemory.cache_tokens`."""
    gpu_part: GpuPart = WHOLE_GPU
    """What the model may take of a GPU."""
    enable_prefix_caching: bool = True
    """Whether a prompt reuses the blocks of an earlier one that begins like it."""
    prefix_state_fraction: float = 0.25
    """States of prefixes take so much of what the KV cache and the states of `max_num_seqs` sequences take."""
    prompt_lookup: int = 0
    """The most tokens that a decoding sequence proposes in a step; 0: none, see `PromptLookup`."""
    decoding: DecodingMode = "auto"
    """Whether a GPU's small steps are captured as graphs; `cuda_graphs` requires it."""
    adapters: Adapters | None = None
    """The model's LoRA adapters."""
    has_own_code: bool = False
    """Whether the checkpoint's or the folder's own code is in the model: what was learnt of it is not relied on."""
    ranks: Ranks | None = None
    """The other processes that the model is divided among; None: it is whole."""
    image_sample: ImageSample | None = None
    """A prompt with images that the model is tried with; None: it takes text alone."""
    on_fatal: Callable[[], None] = lambda: None
    """Called once, in the engine's thread, after the engine has failed for good and answered every group."""
    observer: Observer = field(default_factory=Observer)
    config: EngineConfig = field(default_factory=EngineConfig)
    """The engine's constants."""
