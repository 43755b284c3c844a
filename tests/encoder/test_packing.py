# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of packed rows."""

import pytest
import torch

from hf_triton.encoder.jobs import EncoderInput
from hf_triton.encoder.packed_base import position_rule
from hf_triton.encoder.packing import pack_row, split
from hf_triton.encoder.probe import probe_inputs
from hf_triton.runner.dtypes import has_instructions, serving_dtype
from tests.support.encoders import build_model

CPU = torch.device("cpu")
INPUTS = [EncoderInput([7, 8]), EncoderInput([5, 6]), EncoderInput([1, 2, 3], output_positions=[2])]


def test_a_row_knows_its_sequences() -> None:
    row = pack_row(INPUTS, None, CPU)
    assert row.ids.tolist() == [[7, 8, 5, 6, 1, 2, 3]]
    assert row.position_ids.tolist() == [[0, 1, 0, 1, 0, 1, 2]]
    assert row.type_ids is None
    assert row.packed.groups == [(0, 2, 2), (4, 1, 3)]
    numbers = row.packed.step.device_step(CPU)
    assert numbers.sequences.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert numbers.bounds.tolist() == [0, 2, 4, 7]
    assert row.kept is not None
    assert row.kept.tolist() == [0, 1, 2, 3, 6]


def test_padded_states_hold_each_sequence_at_the_left() -> None:
    row = pack_row(INPUTS, None, CPU)
    padded = row.pad(torch.arange(1.0, 8).view(1, 7, 1))
    assert padded[..., 0].tolist() == [[1, 2, 0], [3, 4, 0], [5, 6, 7]]


def test_types_are_packed_if_any_sequence_has_them() -> None:
    inputs = [EncoderInput([4]), EncoderInput([5, 6], type_ids=[0, 1])]
    row = pack_row(inputs, None, CPU)
    assert row.type_ids is not None
    assert row.type_ids.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_positions_are_those_that_the_model_counts(family: str) -> None:
    base = build_model(family, "embeddings")
    ids = torch.tensor([[0, 9, 1, 8, 2]])  # 1 is the padding token
    seen: list[torch.Tensor] = []
    hook = base.embeddings.position_embeddings.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    base(input_ids=ids)
    hook.remove()
    row = pack_row([EncoderInput(ids[0].tolist())], position_rule(base), CPU)
    assert row.position_ids.tolist() == seen[0].tolist()


def test_padded_batches_keep_their_bound() -> None:
    lengths = [3, 3, 4, 9, 50]
    assert list(split(list(range(5)), lengths, max_padded=12)) == [[0, 1, 2], [3], [4]]


def test_padding_keeps_its_bound() -> None:
    lengths = [20, 3, 4, 3, 5, 10, 10, 11]
    order = [1, 3, 2, 4, 5, 6, 7, 0]
    assert list(split(order, lengths, max_padding=2)) == [[1, 3, 2], [4], [5, 6, 7], [0]]
    assert list(split(order, lengths, max_padding=5)) == [[1, 3, 2, 4], [5, 6, 7], [0]]
    assert list(split(order, lengths, max_padding=0)) == [[1, 3], [2], [4], [5, 6], [7], [0]]


def test_batches_keep_their_total() -> None:
    assert list(split([2, 0, 1, 3], [5, 9, 3, 1], max_total=8)) == [[2, 0], [1], [3]]


def test_the_probe_s_sequences_end_as_the_model_s_do() -> None:
    model = build_model("qwen3", "embeddings")
    model.config.eos_token_id = [2, 9]
    inputs = probe_inputs(model, per_token=True)
    assert all(each.ids[-1] == 2 and not {0, 2, 9} & set(each.ids[:-1]) for each in inputs)
    assert inputs[0].output_positions is not None


def test_16_bits_are_served_where_the_processor_has_them() -> None:
    assert serving_dtype(torch.float32, CPU) == torch.float32
    assert serving_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float16):
        assert serving_dtype(dtype, CPU) == (dtype if has_instructions(dtype) else torch.float32)
