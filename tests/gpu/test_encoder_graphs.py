# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of encoders: small rows replay what was captured at load, with the outputs that the CPU has."""

import copy
import random
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_triton.encoder import packed_base
from hf_triton.encoder.engine import EncoderEngine
from hf_triton.encoder.forward import EncoderForward, build_forward
from hf_triton.encoder.jobs import EncoderInput
from hf_triton.errors import CheckpointError
from hf_triton.runner.device_step import NUM_TOKENS
from tests.gpu.conftest import Replays
from tests.support.adapters import save_lora, wrap
from tests.support.encoders import HEADS, build_model, expected_outputs, random_inputs

pytestmark = pytest.mark.full
SIZES = 8, 24, 48, 160
LENGTHS = [5, 60, 3, 60, 12, 7, 41]


@pytest.fixture(autouse=True)
def _few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_base, "NUM_TOKENS", SIZES)


def build(model: Any, head: str, decoding: Any = "cuda_graphs") -> EncoderForward:
    _, outputs, per_token = HEADS[head]
    return build_forward(copy.deepcopy(model).to("cuda"), outputs, per_token=per_token, decoding=decoding)


def check(forward: EncoderForward, model: Any, head: str, inputs: list[EncoderInput]) -> None:
    """An input's outputs are those of transformers for it alone."""
    _, outputs, per_token = HEADS[head]
    for one, each in zip(forward(inputs), inputs, strict=True):
        expected = expected_outputs(model, each, outputs, per_token=per_token)
        torch.testing.assert_close(one.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "head"),
    [
        *(("bert", head) for head in HEADS),
        *(("roberta", "sequence"), ("albert", "answers"), ("modernbert", "embeddings"), ("modernbert", "sequence")),
        *(("gemma3-bidirectional", "embeddings"), ("qwen3", "embeddings"), ("qwen3", "answers")),
    ],
)
def test_small_rows_replay_graphs_with_the_outputs_of_each_alone(
    family: str, head: str, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(family, head)
    forward = build(model, head)
    replays.sizes.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)  # none is captured after the load
    inputs = random_inputs(LENGTHS, with_types=family == "bert")
    for company in ([0], [2, 5], [3, 0, 4], [1, 3], [6]):
        check(forward, model, head, [inputs[index] for index in company])
    assert [size.num_tokens for size in replays.sizes] == [8, 24, 160, 160, 48]
    assert replays.num_eager == 0
    check(forward, model, head, inputs)
    assert replays.num_eager == 1, "the largest graph has 160 tokens"


def test_rows_with_an_adapter_run_eagerly_and_others_replay(replays: Replays, tmp_path: Path) -> None:
    model = build_model("bert", "sequence")
    folder = save_lora(build_model("bert", "sequence"), tmp_path / "lora", target_modules="all-linear")
    forward = build_forward(
        copy.deepcopy(model).to("cuda"), ("logits",), per_token=False, decoding="cuda_graphs", takes_adapters=True
    )
    assert forward.adapters is not None
    adapter = forward.adapters.load(folder)
    inputs = random_inputs(LENGTHS[:3])
    adapted = wrap(build_model("bert", "sequence"), folder)
    for chosen in (None, adapter, None):
        replays.sizes.clear()
        check(forward, model, "sequence", inputs[:1])
        assert len(replays.sizes) == 1
        [mixed, plain] = forward([replace(inputs[0], adapter=chosen), inputs[2]])
        assert len(replays.sizes) == (1 if chosen else 2)
        expected = expected_outputs(adapted if chosen else model, inputs[0], ("logits",), per_token=False)
        torch.testing.assert_close(mixed.cpu(), expected, rtol=1e-4, atol=1e-4)
        expected = expected_outputs(model, inputs[2], ("logits",), per_token=False)
        torch.testing.assert_close(plain.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_types_of_the_last_row_are_not_those_of_the_next() -> None:
    model = build_model("bert", "embeddings")
    forward = build(model, "embeddings")
    typed = random_inputs([12, 7], with_types=True)
    plain = [replace(each, type_ids=None) for each in typed]
    for inputs in (typed, plain, [typed[0], plain[1]], typed):
        check(forward, model, "embeddings", inputs)


def test_outputs_outlive_the_next_replay() -> None:
    forward = build(build_model("bert", "embeddings"), "embeddings")
    first, second = random_inputs([7, 7])
    [output] = forward([first])
    before = output.cpu()
    forward([second])
    assert torch.equal(output.cpu(), before)


def test_types_that_a_model_gives_a_meaning_of_its_own_run_eagerly(replays: Replays) -> None:
    model = build_model("bert", "embeddings")
    forward = build(model, "embeddings")
    assert forward._base is not None
    forward._base._has_types = False
    replays.sizes.clear()
    check(forward, model, "embeddings", random_inputs([12, 7], with_types=True))
    assert not replays.sizes


def test_wanted_tokens_of_a_masked_language_model() -> None:
    model = build_model("roberta", "masks")
    inputs = [replace(each, output_positions=[1, 3]) for each in random_inputs([5, 12])]
    check(build(model, "masks"), model, "masks", inputs)


def test_answers_of_an_engine_do_not_depend_on_the_company(replays: Replays) -> None:
    model, rng = build_model("modernbert", "embeddings"), random.Random(1)
    inputs = random_inputs([rng.randrange(3, 60) for _ in range(40)])
    forward = build_forward(copy.deepcopy(model).to("cuda"), ("last_hidden_state",), per_token=True)
    engine = EncoderEngine(forward, max_batch_tokens=100)
    try:
        together = engine.run(inputs)
        for each, output in zip(inputs, together, strict=True):
            np.testing.assert_allclose(engine.run([each])[0], output, rtol=1e-4, atol=1e-4)
    finally:
        engine.close()
    assert len(replays.sizes) > len(inputs)


def test_graphs_are_captured_at_load_the_largest_first_in_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []
    pools: set[int] = set()
    capture, forward_on_device = torch.cuda.graph, packed_base.PackedBase._forward_on_device

    @contextmanager
    def note(graph: Any, *, pool: Any, **options: Any) -> Any:
        pools.add(id(pool))
        with capture(graph, pool=pool, **options):
            captured.append(0)
            yield

    def forward(base: Any, numbers: Any) -> torch.Tensor:
        if captured:
            captured[-1] = captured[-1] or len(numbers.token_ids)
        return forward_on_device(base, numbers)

    monkeypatch.setattr(packed_base, "NUM_TOKENS", NUM_TOKENS)
    monkeypatch.setattr(torch.cuda, "graph", note)
    monkeypatch.setattr(packed_base.PackedBase, "_forward_on_device", forward)
    build(build_model("bert", "embeddings", num_hidden_layers=1), "embeddings")
    assert captured == sorted(NUM_TOKENS, reverse=True)
    assert len(captured) == 27
    assert len(pools) == 1


def test_a_model_that_waits_for_the_device_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    def wait(module: Any, arguments: Any, output: torch.Tensor) -> None:
        output.sum().item()

    plain = build_model("bert", "sequence")
    model = copy.deepcopy(plain)
    model.bert.embeddings.register_forward_hook(wait)
    check(build(model, "sequence", "auto"), plain, "sequence", random_inputs([5, 12]))
    assert "runs eagerly, up to four times slower while few sequences run, as there are no CUDA graphs: " in caplog.text
    assert "called a synchronizing CUDA operation" in caplog.text
    with pytest.raises(CheckpointError, match=r"decoding cuda_graphs cannot run this model .*synchronizing"):
        build(model, "sequence")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torch.cuda.CUDAGraph.replay", "captured outputs differ from eager ones"),
        (
            "hf_triton.runner.step_attention.packed_attention_for",
            "NotPackableError: its attention reads more of a step than the device has",
        ),
    ],
    ids=["wrong replay", "no kernel"],
)
def test_what_cannot_be_captured_runs_eagerly_and_says_why(
    name: str, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name, lambda *_: None)
    model = build_model("bert", "embeddings")
    check(build(model, "embeddings", "auto"), model, "embeddings", random_inputs([5, 12]))
    assert f"as there are no CUDA graphs: {reason}" in caplog.text


def test_a_model_that_does_not_pack_has_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model("mpnet", "embeddings")
    check(build(model, "embeddings", "auto"), model, "embeddings", random_inputs([5, 12]))
    assert "as there are no CUDA graphs: sequences do not share one row" in caplog.text


def test_eager_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)
    model = build_model("bert", "embeddings")
    check(build(model, "embeddings", "eager"), model, "embeddings", random_inputs([5, 12]))
