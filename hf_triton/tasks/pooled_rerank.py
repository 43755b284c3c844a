# SPDX-License-Identifier: Apache-2.0
"""Rerank by a cross-encoder whose modules.json makes the score of a pair's pooled vector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hf_triton.errors import CheckpointError
from hf_triton.hub.sentence_files import load_general_config
from hf_triton.hub.sentence_modules import load_sentence_modules
from hf_triton.hub.sentence_names import CROSS_ENCODER
from hf_triton.tasks.encoder_task import EncoderTask
from hf_triton.tasks.pooling import build_head
from hf_triton.tasks.rerank import Rerank, activation_of
from hf_triton.tasks.sentence_prompts import SentencePrompts

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings


class PooledRerank(Rerank):
    auto_class: ClassVar[str] = "AutoModel"
    model_outputs: ClassVar[tuple[str, ...]] = ("last_hidden_state",)
    per_token: ClassVar[bool] = True

    @classmethod
    def check_config(cls, config: Any, settings: Any) -> None:
        """The score is not the model's own."""

    @classmethod
    def check_files(cls, folder: Path, settings: Any) -> None:
        load_sentence_modules(folder, CROSS_ENCODER)

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        EncoderTask.__init__(self, checkpoint, settings)
        general = load_general_config(checkpoint.folder)
        modules = load_sentence_modules(checkpoint.folder, CROSS_ENCODER)
        if modules is None or not modules.includes_prompt:
            raise CheckpointError(
                "unsupported_model",
                f"{settings.huggingface_model} leaves its prompt out of a pair's vector: choose another model",
            )
        self.follow(modules)
        self._activation = activation_of(self.config, general.activation, settings)
        self._prompts = SentencePrompts(general.prompts, general.default_prompt)
        self._head = build_head(modules, checkpoint.model, settings)
        if modules.normalizes or self._head.num_outputs != 1:
            raise CheckpointError(
                "unsupported_model",
                f"{settings.huggingface_model} makes {self._head.num_outputs} scores of a pair, and rerank needs one: "
                "choose another model",
            )

    def reduce(self, outputs: torch.Tensor) -> torch.Tensor:
        """The logit of a pair, `[1]`; see `EncoderTask`."""
        return self._head(outputs)
