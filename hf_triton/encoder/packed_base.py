# SPDX-License-Identifier: Apache-2.0
"""Stands in for the forward of a model's base: its layers compute a packed row, the head above them sees no difference.

The head, of any kind, is the model's own. For outputs per sequence it is called with padded ids and gets padded states;
for outputs per token, which each token has from its own state, it gets the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.encoder.packing import EncoderRow, PositionIds
from hf_triton.runner.calling import CACHE_NAMES
from hf_triton.runner.cuda import capture_graphs
from hf_triton.runner.device_step import NUM_TOKENS, DeviceStep, StepSize
from hf_triton.runner.packed_row import PackedRow
from hf_triton.runner.step_attention import NotPackableError, attention_configs, attention_of, register
from hf_triton.runner.step_tensors import StepTensors

if TYPE_CHECKING:
    from hf_triton.runner.cuda.graphs import StepGraph, StepGraphs

OWN: Final = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids", *CACHE_NAMES})
"""Arguments of the base that the row has its own values for."""


class PackedBase:
    """The layers of a model, for rows.

    Args:
        per_token: Whether the head gets the row, or padded states.

    Raises:
        NotPackableError: The model takes no position ids.
    """

    def __init__(self, model: Any, *, per_token: bool) -> None:
        self._base = model.base_model
        self._forward = self._base.forward
        self._per_token = per_token
        names = inspect.signature(self._forward).parameters
        if "position_ids" not in names:
            raise NotPackableError("the model takes no position ids")
        self._takes_types = "token_type_ids" in names
        self._pools_first_state = isinstance(getattr(self._base, "pooler", None), torch.nn.Linear)  # ALBERT
        self._graphs: StepGraphs | None = None
        self._output_class: Any = None
        """The base's class of outputs, for states that a graph has computed."""
        self._cache_names = [name for name in CACHE_NAMES if name in names][:1]
        self.position_ids = position_rule(self._base)
        self._configs = attention_configs(model)
        # A decoder's head finds a sequence's last token by the padding id, and without one takes a single sequence. -1
        # is no token's, and does for padding that no embedding sees.
        self._config = model.config.get_text_config()
        self._has_types = self._takes_types and bool(getattr(self._config, "type_vocab_size", None))
        """Whether tokens without a type have type 0."""
        pad_id = getattr(self._config, "pad_token_id", None)
        self._lacks_pad_id = not per_token and pad_id is None
        self.pad_id: int = -1 if pad_id is None else pad_id
        """The padding of the ids that the head gets."""
        register()

    @contextmanager
    def running(self, row: EncoderRow) -> Iterator[None]:
        """Let the base compute `row` while entered; raises NotPackableError if the model attended by itself."""
        attributes = vars(self._base)
        own = attributes.get("forward")  # accelerate puts one there, of a model on several devices
        attributes["forward"] = lambda *args, **kwargs: self._compute(row, *args, **kwargs)
        if self._lacks_pad_id:
            self._config.pad_token_id = self.pad_id
        try:
            with attention_of(row.packed, self._configs):
                yield
        finally:
            if self._lacks_pad_id:
                self._config.pad_token_id = None
            del attributes["forward"]
            if own is not None:
                attributes["forward"] = own
        if not row.packed.num_attention_calls:
            raise NotPackableError("the model computes attention by itself")

    def _compute(self, row: EncoderRow, input_ids: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """The base's outputs: `last_hidden_state` `[1, tokens, size]` or `[sequences, longest, size]`."""
        if input_ids is None or args:
            raise NotPackableError("the head calls the base without ids, or with positional arguments")
        given = {name: value for name, value in kwargs.items() if value is not None and name not in OWN}
        if row.computed is None:
            output = self._replay(row) or self._run(row.packed, row.ids, row.position_ids, row.type_ids, **given)
            row.computed = output, output.last_hidden_state
        output, states = row.computed
        if self._per_token:
            output.last_hidden_state = states if row.kept is None else states[:, row.kept.to(states.device)]
            return output
        output.last_hidden_state = row.pad(states)
        if getattr(self._base, "pooler", None) is not None:
            output.pooler_output = self._pool(output.last_hidden_state)
        return output

    def _run(
        self,
        packed: PackedRow,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        type_ids: torch.Tensor | None,
        **given: Any,
    ) -> Any:
        """The base's own outputs for a row, `last_hidden_state` `[1, tokens, size]`."""
        given |= dict.fromkeys(self._cache_names, packed)
        if type_ids is not None and self._takes_types:
            given["token_type_ids"] = type_ids
        return self._forward(input_ids=ids, position_ids=position_ids, **given)

    def _pool(self, states: torch.Tensor) -> torch.Tensor:
        """The base's pooler on padded states `[sequences, longest, size]`."""
        pooler = self._base.pooler
        if not self._pools_first_state:
            pooled: torch.Tensor = pooler(states)
            return pooled
        activation = getattr(self._base, "pooler_activation", torch.nn.Identity())
        activated: torch.Tensor = activation(pooler(states[:, 0]))
        return activated

    # --- graphs ------------------------------------------------------------------------------------------------------

    def capture(self, device: torch.device) -> None:
        """Capture the forwards of small rows on a GPU, see `StepGraphs`; raises whatever the model does."""
        sizes = [StepSize(count, count, count) for count in NUM_TOKENS]
        self._graphs = capture_graphs(self._forward_on_device, device, sizes=sizes, num_tables=0)

    def drop_graphs(self) -> None:
        """Compute all rows eagerly."""
        self._graphs = None

    def replays_right(self, row: EncoderRow) -> bool:
        """Whether a small row's replay gives what an eager forward of the same numbers gives."""
        graph = self._load(row)
        return graph is None or (self._graphs is not None and self._graphs.replays_right(graph))

    @torch.inference_mode()
    def _forward_on_device(self, numbers: DeviceStep) -> torch.Tensor:
        """The states `[tokens, size]` of a row of which the host knows the size alone."""
        packed = PackedRow(StepTensors((), 1, numbers.token_ids.device, numbers))
        type_ids = numbers.rows[None] if self._has_types else None
        with attention_of(packed, self._configs):
            output = self._run(packed, numbers.token_ids[None], numbers.positions[None], type_ids)
        self._output_class = type(output)
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def _replay(self, row: EncoderRow) -> Any:
        """The same outputs by a graph; None: it has none for the row."""
        graph = self._load(row)
        if graph is None or self._graphs is None:
            return None
        graph.graph.replay()
        row.packed.num_attention_calls += 1
        return self._output_class(last_hidden_state=self._graphs.outputs[None, : row.packed.step.num_tokens].clone())

    def _load(self, row: EncoderRow) -> StepGraph | None:
        type_ids = row.type_ids if self._takes_types else None
        if self._graphs is None or row.has_adapters or (type_ids is not None and not self._has_types):
            return None
        step = row.packed.step
        graph = self._graphs.find(step.num_tokens, len(step.ranges), 0, 0)
        if graph is not None:
            self._graphs.load(step.numbers(graph.size))
            if type_ids is not None:
                graph.step.rows[: step.num_tokens].copy_(type_ids[0])
        return graph


def position_rule(base: Any) -> PositionIds | None:
    """How RoBERTa's kind counts positions: from behind the padding id, passing over padding ids; None: from 0."""
    embeddings = getattr(base, "embeddings", None)
    if embeddings is None or not hasattr(embeddings, "create_position_ids_from_input_ids"):
        return None
    padding_id = int(embeddings.padding_idx)

    def count(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        is_token = (ids != padding_id).astype(np.int64)
        positions: npt.NDArray[np.int64] = np.cumsum(is_token) * is_token + padding_id
        return positions

    return count
