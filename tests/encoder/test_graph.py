# SPDX-License-Identifier: Apache-2.0
"""A graph gives the outputs of the model that it was exported from, for sequences of any lengths in any company."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_triton.encoder.engine import EncoderEngine
from hf_triton.encoder.forward import EncoderForward, build_forward
from hf_triton.encoder.jobs import EncoderInput
from hf_triton.errors import RequestError
from hf_triton.runner import graph_export
from hf_triton.runner.graph_export import export_graph, quantize_graph
from hf_triton.runner.graph_model import GraphError, GraphModel
from hf_triton.runner.positions import max_positions
from tests.support.encoders import HEADS, build_model, expected_outputs, random_inputs
from tests.support.sentence_checkpoints import quietly

LENGTHS = [5, 60, 3, 60, 12, 12, 41]
WITH_TYPES = ("bert", "electra")
FAMILIES = [
    *(("bert", "embeddings"), ("distilbert", "answers"), ("modernbert", "masks"), ("deberta-v2", "sequence")),
    ("qwen3", "embeddings"),
]


def export(family: str, head: str, file: Path) -> tuple[Any, EncoderForward, str]:
    """The model, the forward of its graph, and how that was written."""
    with quietly():
        made = export_graph(build_model(family, head), HEADS[head][1], file, "cpu")
    model = build_model(family, head)
    return model, forward_of(model, head, file), made


def forward_of(model: Any, head: str, file: Path) -> EncoderForward:
    num_ids, num_positions = model.get_input_embeddings().weight.shape[0], max_positions(model)
    graph = GraphModel(file, "onnx", model.config, num_ids=num_ids, num_positions=num_positions)
    return build_forward(graph, HEADS[head][1], per_token=HEADS[head][2])


def check_outputs(model: Any, forward: EncoderForward, family: str, head: str) -> None:
    inputs = random_inputs(LENGTHS, with_types=family in WITH_TYPES)
    for each, output in zip(inputs, forward(inputs), strict=True):
        expected = expected_outputs(model, each, HEADS[head][1], per_token=HEADS[head][2])
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("family", "head"), FAMILIES)
def test_a_fused_graph_gives_the_model_s_outputs(family: str, head: str, tmp_path: Path) -> None:
    model, forward, made = export(family, head, tmp_path / "model.onnx")
    assert made == "transformers.exporters, fused"
    check_outputs(model, forward, family, head)
    if family == "bert":
        check_engine(model, forward)
        check_int8(model, tmp_path)


def check_engine(model: Any, forward: EncoderForward) -> None:
    """The engine refuses what the graph has no embeddings for, and goes on."""
    engine = EncoderEngine(forward)
    try:
        for ids, code in (([5, 200], "invalid_input"), ([5] * 131, "context_exceeded")):
            with pytest.raises(RequestError, match=code):
                engine.run([EncoderInput(ids)])
        [output] = engine.run([EncoderInput([5, 6, 7])])
        expected = expected_outputs(model, EncoderInput([5, 6, 7]), ("last_hidden_state",), per_token=True)
        np.testing.assert_allclose(output, expected.numpy(), atol=1e-5)
    finally:
        engine.close()


def check_int8(model: Any, folder: Path) -> None:
    """Weights of 8 bits are fewer bytes, and not quite the same outputs."""
    file = folder / "model_int8.onnx"
    with quietly():
        quantize_graph(folder / "model.onnx", file, reduces_range=True)
    [each] = random_inputs([12])
    [output] = forward_of(model, "embeddings", file)([each])
    expected = expected_outputs(model, each, ("last_hidden_state",), per_token=True)
    assert 1e-6 < float((output - expected).abs().max()) < 1


def test_what_transformers_cannot_export_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("not this model")

    monkeypatch.setattr(graph_export, "_export", fail)
    model, forward, made = export("bert", "sequence", tmp_path / "model.onnx")
    assert made == "torch.onnx.export"
    check_outputs(model, forward, "bert", "sequence")


def test_a_broken_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(GraphError, match="InvalidProtobuf"):
        forward_of(build_model("bert", "sequence"), "sequence", tmp_path / "model.onnx")
