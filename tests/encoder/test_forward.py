# SPDX-License-Identifier: Apache-2.0
"""A sequence's outputs are those that it has alone, whatever the company, and nothing is padded."""

import itertools
from typing import Final

import pytest
import torch
import transformers
from transformers import BertConfig, BertModel, LongformerConfig, LongformerForQuestionAnswering

from hf_triton.encoder.forward import build_forward
from hf_triton.encoder.jobs import EncoderInput
from hf_triton.errors import CheckpointError
from hf_triton.runner.cpu.linear import PackedLinear
from tests.support.encoders import (
    ALONE,
    BASE,
    HEADS,
    LENGTH_DEPENDENT,
    PACKED,
    PADDED,
    build_model,
    expected_outputs,
    random_inputs,
)
from tests.support.marks import full

LENGTHS = [5, 60, 3, 60, 12, 12, 41]
HAVE_HEAD = [
    (family, head)
    for family, head in itertools.product(PACKED, HEADS)
    if getattr(transformers, PACKED[family][0]) in getattr(transformers, HEADS[head][0])._model_mapping
]
ROUNDING: Final = {"rtol": 1e-6, "atol": 3e-6}
"""Libraries order sums by the number of rows, each processor in its own way."""
WITH_TYPES = ("bert", "albert", "electra")


@pytest.mark.parametrize(("family", "head"), [*HAVE_HEAD[::3], *full(*HAVE_HEAD[1::3], *HAVE_HEAD[2::3])])
def test_packed_families_give_the_same_outputs_in_any_company(family: str, head: str) -> None:
    _, outputs, per_token = HEADS[head]
    model = build_model(family, head)
    inputs = random_inputs(LENGTHS, with_types=family in WITH_TYPES)
    expected = [expected_outputs(model, each, outputs, per_token=per_token) for each in inputs]
    forward = build_forward(model, outputs, per_token=per_token)
    assert forward.way == "packed"
    together, reversed_ = forward(inputs), forward(inputs[::-1])[::-1]
    for each, one, other, reference in zip(inputs, together, reversed_, expected, strict=True):
        torch.testing.assert_close(one, other, **ROUNDING)
        torch.testing.assert_close(one, forward([each])[0], **ROUNDING)
        torch.testing.assert_close(one, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ALONE)
def test_families_that_padding_changes_run_alone(family: str) -> None:
    model = build_model(family, "sequence")
    inputs = random_inputs(LENGTHS)
    expected = [expected_outputs(model, each, ("logits",), per_token=False) for each in inputs]
    forward = build_forward(model, ("logits",), per_token=False)
    assert forward.way == "alone"
    for one, reference in zip(forward(inputs), expected, strict=True):
        torch.testing.assert_close(one, reference, **ROUNDING)


@pytest.mark.parametrize("family", LENGTH_DEPENDENT)
def test_a_text_s_positions_do_not_depend_on_others_or_on_earlier_ones(family: str) -> None:
    inputs = random_inputs([5, 60, 41, 12])
    expected = [
        expected_outputs(build_model(family, "embeddings"), each, ("last_hidden_state",), per_token=True)
        for each in inputs
    ]
    forward = build_forward(build_model(family, "embeddings"), ("last_hidden_state",), per_token=True)
    for _ in range(2):
        for one, reference in zip(forward(inputs), expected, strict=True):
            torch.testing.assert_close(one, reference, rtol=1e-5, atol=1e-5)


def test_a_head_that_refuses_the_probe_is_served() -> None:
    config = LongformerConfig(**BASE | {"attention_window": 16, "num_labels": 2, "sep_token_id": 9})
    model = LongformerForQuestionAnswering(config).eval()
    forward = build_forward(model, ("start_logits", "end_logits"), per_token=True, pack_weights=True)
    assert forward.way == "alone"
    (output,) = forward([EncoderInput([0, 5, 9, 9, 7, 8, 9])])
    assert output.shape == (2, 7)


@pytest.mark.parametrize("family", ["modernbert", "mistral"])
def test_long_texts_are_attended_to_within_their_windows(family: str) -> None:
    model = build_model(family, "embeddings")
    inputs = random_inputs([700, 9, 513, 256])
    expected = [expected_outputs(model, each, ("last_hidden_state",), per_token=True) for each in inputs]
    forward = build_forward(model, ("last_hidden_state",), per_token=True)
    assert forward.way == "packed"
    for one, reference in zip(forward(inputs), expected, strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_a_head_gives_the_wanted_tokens_alone(family: str) -> None:
    model = build_model(family, "masks")
    inputs = random_inputs(LENGTHS)
    wanted = [EncoderInput(each.ids, output_positions=[1, len(each.ids) - 1]) for each in inputs]
    forward = build_forward(model, ("logits",), per_token=True)
    for each, whole, part in zip(inputs, forward(inputs), forward(wanted), strict=True):
        torch.testing.assert_close(part, whole[[1, len(each.ids) - 1]], rtol=1e-5, atol=1e-5)


def test_layers_in_onednn_s_layout_give_the_same_outputs_in_any_company() -> None:
    config = BertConfig(**BASE | {"hidden_size": 256, "intermediate_size": 1536, "num_hidden_layers": 1})
    model = BertModel(config).eval()
    inputs = random_inputs([5, 120, 3, 120, 9])  # 257 tokens: one more than oneDNN is given at a time
    expected = [expected_outputs(model, each, ("last_hidden_state",), per_token=True) for each in inputs]
    forward = build_forward(model, ("last_hidden_state",), per_token=True, pack_weights=True)
    is_packed = [isinstance(layer, PackedLinear) for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    assert all(is_packed) == torch.backends.mkldnn.is_available()
    for each, one, reference in zip(inputs, forward(inputs), expected, strict=True):
        torch.testing.assert_close(one, forward([each])[0], **ROUNDING)
        torch.testing.assert_close(one, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", ["embeddings", "sequence", "masks"])
@pytest.mark.parametrize("family", PADDED)
def test_other_families_run_padded_and_equal_alone(family: str, head: str) -> None:
    _, outputs, per_token = HEADS[head]
    model = build_model(family, head)
    inputs = random_inputs(LENGTHS)
    expected = [expected_outputs(model, each, outputs, per_token=per_token) for each in inputs]
    forward = build_forward(model, outputs, per_token=per_token)
    assert forward.way == "padded"
    for one, reference in zip(forward(inputs), expected, strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-5, atol=1e-5)


def test_a_padded_batch_on_a_cpu_has_little_padding() -> None:
    model = build_model("mpnet", "sequence")
    masks: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, __, given: masks.append(given["attention_mask"]), with_kwargs=True)
    build_forward(model, ("logits",), per_token=False, way="padded")(random_inputs([5, 60, 3, 60, 12, 12, 41]))
    assert [mask.sum(1).tolist() for mask in masks] == [[3, 5, 12, 12], [41], [60, 60]]


def test_cuda_graphs_without_a_gpu_are_refused() -> None:
    with pytest.raises(CheckpointError, match="decoding cuda_graphs needs a GPU"):
        build_forward(build_model("bert", "embeddings"), ("last_hidden_state",), per_token=True, decoding="cuda_graphs")
