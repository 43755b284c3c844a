# SPDX-License-Identifier: Apache-2.0
"""A model's outputs for sequences of any lengths: packed in one row, padded with others of similar length, or alone."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final, Literal

import torch

from hf_triton.encoder.jobs import EncoderInput
from hf_triton.encoder.packed_base import PackedBase
from hf_triton.encoder.packing import pack_row, pad_batch, split, wanted_positions
from hf_triton.encoder.probe import MAX_CONTEXT, Way, probe_inputs, probe_way
from hf_triton.engine.decoding import DecodingMode, capture_forwards
from hf_triton.errors import HfTritonError, RequestError
from hf_triton.runner.calling import begin_anew
from hf_triton.runner.cpu import accelerate_encoder
from hf_triton.runner.cuda import fuse
from hf_triton.runner.device_step import NUM_TOKENS
from hf_triton.runner.faults import described
from hf_triton.runner.graph_model import GraphModel
from hf_triton.runner.lora.model_adapters import Adapter, Adapters
from hf_triton.runner.positions import max_positions, shares_positions

logger = logging.getLogger(__name__)

Reduce = Callable[..., torch.Tensor]

MAX_PADDED_TOKENS: Final = {"cpu": 512, "cuda": 16384}
"""The most tokens of a padded batch, by torch's device type (others take CUDA's). A CPU only misses its cache more."""
MAX_PADDING: Final = {"cpu": 16}
"""Tokens of padding in a padded batch, by torch's device type; elsewhere padding costs less than another forward. On a
CPU a padded token costs as much as any, and a forward of a small model as much as 16 to 32."""
MAX_STATES_TOKENS: Final = {"cpu": 32768, "cuda": 131072}
"""The most tokens of the padded states that a head gets from a packed row."""
WARM_UP_TOKENS: Final = NUM_TOKENS[-1]
"""A GPU's rows of more tokens run eagerly; their kernels are compiled at load and not while texts wait."""
MAX_OUTPUTS: Final = 1 << 26
"""Numbers that a forward may give of tokens together, a quarter of a gibibyte: a vocabulary for each is a lot."""


def build_forward(
    model: Any,
    outputs: tuple[str, ...],
    *,
    per_token: bool,
    reduce: Reduce | None = None,
    merge: Reduce | None = None,
    takes_adapters: bool = False,
    pack_weights: Literal["auto"] | bool = False,
    way: Way | None = None,
    decoding: DecodingMode = "auto",
) -> EncoderForward:
    """Choose how the model's sequences share a forward.

    Args:
        model: A transformers model in eval mode, on its device.
        outputs: Names of the model's outputs, as `("start_logits", "end_logits")`.
        per_token: Whether an output has a row for each token.
        reduce: Applied on the device to each sequence's outputs in float32, for pooling.
        merge: Joins what `reduce` gives of two parts of a sequence's tokens: a row with too many numbers is then
            computed in parts.
        takes_adapters: Whether LoRA adapters may be loaded, into the forward's `adapters`.
        pack_weights: On a CPU, which linear layers get the layout that oneDNN computes with, in half the time; `auto`
            packs those that are faster so, by timing each shape. The model is changed.
        way: None: what a probe finds, and `padded` for a graph, which was measured so when it was made.
        decoding: Whether a GPU's small rows are captured as graphs; `cuda_graphs` requires it.

    Raises:
        CheckpointError: Graphs are required and cannot be had.
    """
    if isinstance(model, GraphModel):
        return EncoderForward(model, outputs, per_token=per_token, reduce=reduce, way="padded")

    inputs = probe_inputs(model, per_token=per_token)

    def build(way: Way) -> EncoderForward:
        return EncoderForward(model, outputs, per_token=per_token, reduce=None, way=way)

    def compute() -> torch.Tensor:
        return torch.cat([output.flatten() for output in build("alone")(inputs)])

    accelerate_encoder(model, compute, pack_weights=pack_weights)
    fuse(model)

    def build_base(way: Way) -> EncoderForward:
        return EncoderForward(model.base_model, ("last_hidden_state",), per_token=True, reduce=None, way=way)

    slower: list[str] = []
    way = way or probe_way(model, inputs, build, build_base, slower)
    adapters = Adapters(model, outputs[0], mixes=way == "packed") if takes_adapters else None
    forward = EncoderForward(
        model, outputs, per_token=per_token, reduce=reduce, way=way, merge=merge, adapters=adapters
    )
    if way == "packed" and forward.device.type == "cuda":
        forward(inputs * (1 + WARM_UP_TOKENS // sum(len(sequence.ids) for sequence in inputs)))
    forward.slower = slower + capture_forwards(decoding, forward.device, lambda: forward.capture(inputs))
    return forward


class EncoderForward:
    """Computes a model's outputs for each sequence as if it were alone. For one thread at a time.

    Its arguments are those of `build_forward`; `way` is how sequences share a forward, see `probe_way`.

    Raises:
        NotPackableError: `way` is `packed`, and the model takes no position ids.
    """

    def __init__(
        self,
        model: Any,
        outputs: tuple[str, ...],
        *,
        per_token: bool,
        reduce: Reduce | None,
        way: Way,
        merge: Reduce | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.model = model
        self._outputs = outputs
        self._per_token = per_token
        self._reduce = reduce
        self._merge = merge
        self.adapters = adapters
        self.way: Way = way
        self._captured: list[EncoderInput] = []  # by which captured forwards are tried
        self.slower: list[str] = []
        """Sentences on why it runs slower than it could, see `Worker`."""
        self.device: torch.device = model.get_input_embeddings().weight.device
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        _make_no_cache(model)
        self._begins_anew = way == "alone" and shares_positions(model, MAX_CONTEXT)
        self._base = PackedBase(model, per_token=per_token) if way == "packed" else None
        pad_id = getattr(model.config.get_text_config(), "pad_token_id", None)
        self._pad_id = max(pad_id, 0) if isinstance(pad_id, int) else 0
        kind = model.computes_on if isinstance(model, GraphModel) else self.device.type
        self._max_padded = MAX_PADDED_TOKENS.get(kind, MAX_PADDED_TOKENS["cuda"])
        self._max_padding = MAX_PADDING.get(kind, math.inf)
        self._max_states = MAX_STATES_TOKENS.get(self.device.type, MAX_STATES_TOKENS["cuda"])
        self._max_positions = max_positions(model)
        head = model.get_output_embeddings()
        width = 1024 if head is None else head.weight.shape[0]
        self._max_outputs: int = max(MAX_OUTPUTS // width, 1)
        """Tokens whose outputs are computed together."""
        self._num_types: int = getattr(model.config, "type_vocab_size", None) or 2**31
        self._num_ids: int = model.get_input_embeddings().weight.shape[0]

    @torch.inference_mode()
    def __call__(self, inputs: list[EncoderInput]) -> list[torch.Tensor]:
        """The outputs of each sequence, float32 on the device: `[tokens, ...]` if per token, else `[...]`.

        Several outputs are stacked on a new first axis. What `reduce` gives may have any shape.
        """
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index].ids))
        results: dict[int, torch.Tensor] = {}
        for batch in self._split(inputs, order):
            members = [inputs[index] for index in batch]
            if self._base and self._merge and sum(map(_num_wanted, members)) > self._max_outputs:
                results[batch[0]] = self._in_parts(self._base, *members)
                continue
            outputs = self._packed(self._base, members) if self._base else self._padded(members)
            results |= zip(batch, map(self._finish, outputs), strict=True)
        return [results[index] for index in range(len(inputs))]

    @torch.inference_mode()
    def capture(self, inputs: list[EncoderInput]) -> str | None:
        """Capture the model's forwards of small rows, which then take a GPU's time and not Python's; see `StepGraphs`.

        Returns:
            Why all rows run eagerly; None: small ones are captured.
        """
        if self._base is None:
            return "sequences do not share one row"
        if len({parameter.device for parameter in self.model.parameters()}) > 1:
            return "the model is on several devices"
        trial = inputs, [replace(inputs[0], type_ids=None)]
        try:
            self._base.capture(self.device)
            rows = [pack_row(batch, self._base.position_ids, self.device) for batch in trial]
            if all(map(self._base.replays_right, rows)):
                self._captured = inputs
                return None
            reason = "captured outputs differ from eager ones of the same numbers"
        except Exception as error:  # a model may do anything in its forward
            reason = described(error)
        self._base.drop_graphs()
        return reason

    def drop_graphs(self) -> None:
        """Free captured forwards, which hold addresses; `capture_again` captures them again."""
        if self._base is not None:
            self._base.drop_graphs()

    def capture_again(self) -> None:
        if self._captured and (reason := self.capture(self._captured)) is not None:
            logger.warning("the model runs eagerly since it slept: %s", reason)

    def input_error(self, sequence: EncoderInput) -> HfTritonError | None:
        """The error of a sequence that the model has no embeddings for, which would end a GPU's process."""
        if not sequence.ids:
            return RequestError("invalid_input", "the text has no tokens: send a text that is not empty")
        if self._max_positions is not None and len(sequence.ids) > self._max_positions:
            return RequestError(
                "context_exceeded",
                f"the text has {len(sequence.ids)} tokens, and the model takes {self._max_positions}: shorten it",
                sizes={"tokens": len(sequence.ids), "limit": self._max_positions},
            )
        if not 0 <= min(sequence.ids) <= max(sequence.ids) < self._num_ids:
            return RequestError("invalid_input", f"token ids must be in 0 to {self._num_ids - 1}")
        if sequence.type_ids and self._takes_types and max(sequence.type_ids) >= self._num_types:
            return RequestError("invalid_input", f"token types must be in 0 to {self._num_types - 1}")
        return None

    def _split(self, inputs: list[EncoderInput], order: list[int]) -> list[list[int]]:
        """What is computed together, of inputs whose `order` is by length, ascending."""
        lengths = [len(sequence.ids) for sequence in inputs]
        if self.way == "alone":
            return [[index] for index in order]
        if self.way == "padded":
            max_padded = min(self._max_padded, self._max_outputs) if self._per_token else self._max_padded
            return [
                batch
                for own in _by_adapter(inputs, order)
                for batch in split(own, lengths, max_padded=max_padded, max_padding=self._max_padding)
            ]
        if self._per_token:
            return list(split(order, list(map(_num_wanted, inputs)), max_total=self._max_outputs))
        return list(split(order, lengths, max_padded=self._max_states))

    def _packed(self, base: PackedBase, inputs: list[EncoderInput]) -> list[torch.Tensor]:
        row = pack_row(inputs, base.position_ids, self.device)
        with self._adapters_of(inputs), base.running(row):
            if self._per_token:
                outputs = self._run(row.ids, row.type_ids, None)[:, 0]
                parts = torch.split(outputs, list(map(_num_wanted, inputs)), dim=1)
            else:
                parts = self._run(*pad_batch(inputs, base.pad_id, self.device)).unbind(1)
        return [self._unstack(part) for part in parts]

    def _in_parts(self, base: PackedBase, sequence: EncoderInput) -> torch.Tensor:
        """What `reduce` gives of one sequence whose outputs are too many at once: the head computes parts of them."""
        row = pack_row([sequence], base.position_ids, self.device)
        kept = torch.arange(len(sequence.ids), device=self.device) if row.kept is None else row.kept
        merged: torch.Tensor | None = None
        with self._adapters_of([sequence]), base.running(row):
            for row.kept in torch.split(kept, self._max_outputs):
                part = self._finish(self._unstack(self._run(row.ids, row.type_ids, None)[:, 0]))
                merged = part if merged is None or self._merge is None else self._merge(merged, part)
        assert merged is not None
        return merged

    def _padded(self, inputs: list[EncoderInput]) -> list[torch.Tensor]:
        with self._adapters_of(inputs):
            if self._begins_anew:
                begin_anew(self.model, 1, self.device)
            rows = self._run(*pad_batch(inputs, self._pad_id, self.device)).unbind(1)
        if self._per_token:
            rows = tuple(_wanted(row, sequence) for row, sequence in zip(rows, inputs, strict=True))
        return [self._unstack(row) for row in rows]

    def _adapters_of(self, inputs: list[EncoderInput]) -> AbstractContextManager[None]:
        """Choose the adapters of sequences, sorted by length, for a forward; those of a padded batch have the same.

        It comes before all else that a forward does to the model: no adapter is tried meanwhile.
        """
        adapters, chosen = self.adapters, [sequence.adapter for sequence in inputs]
        if adapters is None:
            return nullcontext()
        if self._base is None or not any(chosen):
            return adapters.choose(chosen[:1])
        keys = [adapter.key if adapter else None for adapter in chosen]

        def repeated(counts: list[int]) -> list[str | None]:
            return [key for key, count in zip(keys, counts, strict=True) for _ in range(count)]

        tokens = repeated([len(sequence.ids) for sequence in inputs])
        if self._per_token:
            head = [repeated(list(map(_num_wanted, inputs)))]
        else:
            head = [keys, repeated([len(inputs[-1].ids)] * len(inputs))]
        return adapters.choose_tokens(tokens, tokens[:1], *head)  # a pooler sees the first token of the whole row

    def _run(self, ids: torch.Tensor, type_ids: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
        """The named outputs, stacked, `[outputs, rows, ...]`."""
        types = {"token_type_ids": type_ids} if type_ids is not None and self._takes_types else {}
        output = self.model(input_ids=ids, attention_mask=mask, **types)
        outputs = [output[name] for name in self._outputs]
        return torch.stack(outputs) if len(outputs) > 1 else outputs[0].unsqueeze(0)  # without a copy

    def _unstack(self, stacked: torch.Tensor) -> torch.Tensor:
        return stacked[0] if len(self._outputs) == 1 else stacked

    def _finish(self, output: torch.Tensor) -> torch.Tensor:
        output = output.float()
        return output if self._reduce is None else self._reduce(output).float()


def _by_adapter(inputs: list[EncoderInput], order: list[int]) -> list[list[int]]:
    """Sequences of each adapter: a layer of a padded batch may see what its rows share (DeBERTa's positions)."""
    groups: dict[Adapter | None, list[int]] = {}
    for index in order:
        groups.setdefault(inputs[index].adapter, []).append(index)
    return list(groups.values())


def _num_wanted(sequence: EncoderInput) -> int:
    return len(wanted_positions(sequence))


def _make_no_cache(model: Any) -> None:
    """Keep a decoder from making a KV cache."""
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _wanted(row: torch.Tensor, sequence: EncoderInput) -> torch.Tensor:
    """A padded row's outputs, `[outputs, longest, ...]`, of the tokens that are wanted."""
    if sequence.output_positions is None:
        return row[:, : len(sequence.ids)]
    return row[:, torch.tensor(sequence.output_positions, dtype=torch.long, device=row.device)]
