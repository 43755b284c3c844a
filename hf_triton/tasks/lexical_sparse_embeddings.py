# SPDX-License-Identifier: Apache-2.0
"""Sparse embeddings of models such as bge-m3, which weigh the text's own tokens: FlagEmbedding's lexical weights.

The layer that weighs stands in a file beside the model, `sparse_linear.safetensors` or `sparse_linear.pt`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from hf_triton.errors import CheckpointError
from hf_triton.hub.sentence_names import SPARSE_LINEAR, sparse_linear_file
from hf_triton.tasks.encoder_task import EncodedRow
from hf_triton.tasks.sparse_embeddings import SparseEmbeddings

if TYPE_CHECKING:
    import torch

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings


class LexicalSparseEmbeddings(SparseEmbeddings):
    auto_class: ClassVar[str] = "AutoModel"
    model_outputs: ClassVar[tuple[str, ...]] = ("last_hidden_state",)

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        import torch

        super().__init__(checkpoint, settings)
        self.merge = None
        self._linear = torch.nn.Linear(int(self.config.get_text_config().hidden_size), 1)
        if settings.load_format == "auto":
            _load(self._linear, sparse_linear_file(checkpoint.folder) or checkpoint.folder / SPARSE_LINEAR[-1])
        self._linear.to(checkpoint.model.get_input_embeddings().weight.device).requires_grad_(False)
        tokenizer = self.tokenizer
        special = (tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        self._unused = [token for token in special if token is not None]
        self._num_tokens = checkpoint.vocabulary_size

    def reduce(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weight of each token of the text, of float32 `[tokens, hidden size]`; see `EncoderTask`."""
        weights: torch.Tensor = self._linear(outputs).relu()[:, 0]
        return weights

    def weights(self, encoded: EncodedRow, output: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A token that comes several times has its largest weight."""
        weights = np.zeros(self._num_tokens, np.float32)
        np.maximum.at(weights, encoded.inputs[0].ids, output)
        weights[self._unused] = 0
        return weights


def _load(linear: torch.nn.Linear, file: Path) -> None:
    """Give the layer its weights; a torch file may hold tensors alone, and no code.

    Raises:
        CheckpointError: They cannot be read, or do not fit.
    """
    import torch
    from safetensors.torch import load_file

    try:
        is_safe = file.suffix == ".safetensors"
        weights = load_file(file) if is_safe else torch.load(file, map_location="cpu", weights_only=True)
        linear.load_state_dict(weights)
        if not all(bool(tensor.isfinite().all()) for tensor in linear.state_dict().values()):
            raise ValueError("NaN or infinite numbers")
    except Exception as error:
        raise CheckpointError(
            "weights_mismatch",
            f"{file.name} holds no layer that makes a weight of {linear.in_features} numbers, which sparse-embeddings "
            f"needs ({type(error).__name__}): download the model again, or set task to embeddings",
        ) from None
