# SPDX-License-Identifier: Apache-2.0
"""Stands in for the forward of a model's base: its layers compute a packed row, the head above them sees no difference.

The head, of any kind, is the model's own. For outputs per sequence it is called with padded ids and gets padded states;
for outputs per token, which each token has from its own state, it gets the row.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.encoder.attention import NAME, NotPackableError, current_row, register
from hf_triton.encoder.packing import PackedRow, PositionIds

PASSED: Final = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""Arguments of the base that the row has its own values for."""


class PackedBase:
    """Replaces `model.base_model.forward` until `restore`; outside of `running` it changes nothing.

    Args:
        model: A transformers model in eval mode.
        per_token: Whether the head gets the row, or padded states.

    Raises:
        NotPackableError: The model cannot be told how to compute attention, or takes no position ids.
    """

    def __init__(self, model: Any, *, per_token: bool) -> None:
        self._model = model
        self._base = model.base_model
        self._forward = self._base.forward
        self._own = vars(self._base).get("forward")  # accelerate puts one there, of a model on several devices
        self._per_token = per_token
        self._attention = model.config._attn_implementation
        names = inspect.signature(self._forward).parameters
        if "position_ids" not in names or not model._can_set_attn_implementation():
            raise NotPackableError("the model takes no position ids, or computes attention by itself")
        self._takes_types = "token_type_ids" in names
        self.position_ids = position_rule(self._base)
        register()
        model.set_attn_implementation(NAME)
        config = model.config.get_text_config()
        # A decoder's head finds a sequence's last token by the padding id, and without one takes a single sequence. -1
        # is no token's, and does for padding that no embedding sees.
        self._needs_pad_id = not per_token and getattr(config, "pad_token_id", None) is None
        if self._needs_pad_id:
            config.pad_token_id = -1
        self._base.forward = self

    def restore(self) -> None:
        """Give the model its own forward and attention back."""
        del self._base.forward
        if self._own is not None:
            self._base.forward = self._own
        if self._needs_pad_id:
            self._model.config.get_text_config().pad_token_id = None
        self._model.set_attn_implementation(self._attention)

    def __call__(self, input_ids: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """The base's outputs: `last_hidden_state` `[1, tokens, size]` or `[sequences, longest, size]`."""
        row = current_row()
        if row is None:
            return self._forward(input_ids, *args, **kwargs)
        if input_ids is None or args:
            raise NotPackableError("the head calls the base without ids, or with positional arguments")
        given = {name: value for name, value in kwargs.items() if value is not None and name not in PASSED}
        if row.type_ids is not None and self._takes_types:
            given["token_type_ids"] = row.type_ids
        output = self._forward(input_ids=row.ids, position_ids=row.position_ids, **given)
        self._unpack(row, output)
        return output

    def _unpack(self, row: PackedRow, output: Any) -> None:
        states = output.last_hidden_state
        if self._per_token:
            output.last_hidden_state = states if row.kept is None else states[:, row.kept.to(states.device)]
            return
        output.last_hidden_state = row.pad(states)
        if getattr(output, "pooler_output", None) is not None:
            output.pooler_output = self._pool(output.last_hidden_state)

    def _pool(self, states: torch.Tensor) -> torch.Tensor:
        """The base's pooler on padded states `[sequences, longest, size]`."""
        pooler = self._base.pooler
        if not isinstance(pooler, torch.nn.Linear):
            pooled: torch.Tensor = pooler(states)
            return pooled
        activation = getattr(self._base, "pooler_activation", torch.nn.Identity())  # ALBERT
        activated: torch.Tensor = activation(pooler(states[:, 0]))
        return activated


def position_rule(base: Any) -> PositionIds:
    """How the model counts positions: from 0, or as RoBERTa from behind the padding id, passing over padding ids."""
    embeddings = getattr(base, "embeddings", None)
    if embeddings is None or not hasattr(embeddings, "create_position_ids_from_input_ids"):
        return lambda ids: np.arange(len(ids), dtype=np.int64)
    padding_id = int(embeddings.padding_idx)

    def count(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        is_token = (ids != padding_id).astype(np.int64)
        positions: npt.NDArray[np.int64] = np.cumsum(is_token) * is_token + padding_id
        return positions

    return count
