# SPDX-License-Identifier: Apache-2.0
"""The decode step alone: static shapes give what eager steps and `generate` give, as sequences come and go."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_triton.runner import decode
from hf_triton.runner import kv_cache as cache
from hf_triton.runner.decode import Decoder, DecodingMode
from hf_triton.runner.forward import Forward
from hf_triton.runner.kv_cache import KVCache
from hf_triton.testing import ARCHITECTURES, build_tiny_checkpoint
from tests.support.architectures import CONTINUOUS, NEO, WHOLE, build, some_in_make_test
from tests.support.engine import NOT_CONTINUOUS
from tests.support.reference import solo_ids
from tests.support.running_sequences import RunningSequences, prompts, schedule

NOT_STATIC = ("gpt-neo",)  # its local layers take the newest column to be the last one
ALL = [*CONTINUOUS, *WHOLE, *(name for name in ARCHITECTURES if name not in NOT_CONTINUOUS)]


def load(name: str, folder: Path) -> Any:
    if name in CONTINUOUS | WHOLE:
        return build(*(CONTINUOUS | WHOLE)[name])
    build_tiny_checkpoint(folder, name, eos_token_id=None)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buffers grow, shift and change their buckets often."""
    monkeypatch.setattr(cache, "COLUMN_STEP", 16)
    monkeypatch.setattr(decode, "COLUMN_STEP", 16)


@pytest.mark.usefixtures("_small_steps")
@pytest.mark.parametrize("name", some_in_make_test(ALL))
def test_static_decoding_equals_eager_and_generate(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    eager, static = RunningSequences(model, "eager"), RunningSequences(model, "static")
    contexts = prompts(12)
    shapes = set()
    for verb, number in schedule(len(contexts), max_num_seqs=5):
        for running in (eager, static):
            if verb == "add":
                running.add(number, contexts[number])
            elif verb == "remove":
                running.remove(number)
        if verb == "step":
            expected, logits = eager.step(), static.step()
            assert logits.shape == expected.shape
            assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
            shapes.add(static.memory.shape)
    assert static.decoder.is_static is (name not in NOT_STATIC)
    assert len(shapes) > 3  # they did grow
    assert static.tokens == eager.tokens
    for number, written in static.tokens.items():
        tokens = static.comparable(contexts[number], written)
        assert tokens == solo_ids(model, contexts[number], len(tokens), pad_token_id=0)


def test_windows_counted_from_a_buckets_end_are_noticed() -> None:
    model = build("GPTNeoConfig", NEO | {"window_size": 256, "max_position_embeddings": 1024})
    assert not Decoder(Forward(model), "static").is_static


def test_a_model_on_several_devices_runs_eagerly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load("llama", tmp_path)
    for places, is_static in (({"": "cpu"}, True), ({"model.layers.0": 0, "model.layers.1": "cpu"}, False)):
        model.hf_device_map = places
        assert Decoder(Forward(model), "static").is_static is is_static
    assert "it is on several devices" in caplog.text


@torch.inference_mode()
def test_unused_slots_do_not_touch_used_ones() -> None:
    static, alone = (
        RunningSequences(build(*CONTINUOUS["mixtral"]), "static"),
        RunningSequences(build(*CONTINUOUS["mixtral"]), "static"),
    )
    for running, count in ((static, 6), (alone, 1)):
        for number, prompt in enumerate(prompts(count)):
            running.add(number, prompt)
        running.step()
    for row in reversed(range(1, 6)):
        static.memory.layers()[0].value_rows[row] = torch.nan
        static.remove(row)
    static.add(9, [5, 6, 7])
    static.remove(1)
    for _ in range(3):
        torch.testing.assert_close(static.step(), alone.step())


@torch.inference_mode()
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_nan_of_a_sequence_does_not_leak_into_the_next(mode: DecodingMode, tmp_path: Path) -> None:
    running = RunningSequences(load("llama", tmp_path), mode)
    running.add(0, [5] * 40)
    running.add(1, [6] * 30)
    for layer in running.memory.layers():
        layer.key_rows[1] = layer.value_rows[1] = torch.nan
    running.remove(1)
    running.add(2, [7] * 3)
    assert running.step().isfinite().all()


class Stubborn(Forward):
    """A model whose static decoding fails, or gives other logits."""

    def __init__(self, model: Any, error: Exception | None) -> None:
        super().__init__(model)
        self._error = error

    def __call__(self, *arguments: Any, **others: Any) -> torch.Tensor:
        is_static = isinstance(arguments[2].get_seq_length(), torch.Tensor)
        if is_static and self._error:
            raise self._error
        return super().__call__(*arguments, **others) * (1.1 if is_static else 1)


@pytest.mark.parametrize("error", [None, RuntimeError("data-dependent"), torch.OutOfMemoryError()], ids=repr)
def test_a_model_without_static_shapes_falls_back_to_eager(
    error: Exception | None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING):
        decoder = Decoder(Stubborn(load("llama", tmp_path), error), "static")
    assert not decoder.is_static
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA graphs disabled for this model "
        f"({type(error).__name__ if error else 'the logits differ'}); falling back to eager decoding"
    ]


def test_cuda_graphs_need_a_cuda_device(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a GPU, and the model is on cpu"):
        Decoder(Forward(load("llama", tmp_path)), "cuda_graphs")


@pytest.mark.parametrize(
    ("num_rows", "clock", "bucket"),
    [
        (1, 5, (1, 128)),
        (3, 127, (4, 128)),
        (8, 128, (8, 256)),
        (9, 1023, (16, 1024)),
        (33, 1024, (40, 1280)),
        (64, 4000, (64, 4096)),
        (65, 4096, (70, 4224)),
    ],
)
def test_buckets(num_rows: int, clock: int, bucket: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = KVCache(torch.device("cpu"))
    memory.num_rows, memory.clock = num_rows, clock
    monkeypatch.setattr(KVCache, "shape", (70, 4224))
    assert decode.bucket_of(memory) == bucket
