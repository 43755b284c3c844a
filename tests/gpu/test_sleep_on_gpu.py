# SPDX-License-Identifier: Apache-2.0
"""A GPU's model that sleeps leaves its weights with the host, and captures its graphs again when it wakes."""

import copy
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_triton.encoder import packed_base
from hf_triton.encoder.engine import EncoderEngine
from hf_triton.encoder.forward import build_forward
from hf_triton.errors import HfTritonError
from hf_triton.runner import device_step, offload
from hf_triton.runner.budget import FreeMemory
from hf_triton.runner.cuda import fuse
from hf_triton.runner.lora.model_adapters import Adapters
from hf_triton.runner.model_runner import PACKED
from hf_triton.runner.ranks.following import _Follower
from hf_triton.runner.step import Step, TokenRange
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint
from tests.gpu.conftest import Replays
from tests.support.adapters import generate_with, save_adapter
from tests.support.architectures import load, requests
from tests.support.encoders import HEADS, build_model, random_inputs
from tests.support.engine import PROMPT, WAIT_S, Client, check, greedy_ids, start_engine, token_ids
from tests.support.simulated_gpu import Device

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def _few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_step, "NUM_TOKENS", (1, 4, 256))


def turn(engine: Any, is_sleeping: bool) -> Any:
    return engine.set_sleeping(is_sleeping).result(WAIT_S)


def num_weight_bytes(model: Any) -> int:
    storages = (tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers()))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_graphs_replay_right_after_a_wake(name: str, replays: Replays, tmp_path: Path) -> None:
    plain = load(name, tmp_path)
    model = copy.deepcopy(plain).to("cuda")
    fuse(model)
    items = requests(4, random.Random(5))
    expected = greedy_ids(plain, items)
    with closing(start_engine(model, max_num_seqs=4, context_length=256, decoding="cuda_graphs")) as engine:
        check(plain, Client(engine), items, expected=expected)
        held, num_bytes = torch.cuda.memory_allocated(), num_weight_bytes(model)
        num_eager = replays.num_eager
        for _ in range(2):
            nap = turn(engine, True)
            assert nap.given_back_bytes > num_bytes
            assert torch.cuda.memory_allocated() < 0.2 * held
            assert num_weight_bytes(model) == 0
            replays.sizes.clear()
            check(plain, Client(engine), items, expected=expected)
            assert replays.sizes
            assert engine.runner._graphs is not None
        assert torch.cuda.memory_allocated() < 1.01 * held
        if engine.runner.is_packed:
            assert replays.num_eager == num_eager
    assert num_weight_bytes(model) == num_bytes


def test_an_encoder_s_graphs_replay_right_after_a_wake(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_base, "NUM_TOKENS", (8, 24))
    plain = build_model("bert", "embeddings")
    model, inputs = copy.deepcopy(plain).to("cuda"), random_inputs([5, 3, 12])
    _, outputs, per_token = HEADS["embeddings"]
    forward = build_forward(model, outputs, per_token=per_token, decoding="cuda_graphs")
    with closing(EncoderEngine(forward)) as engine:
        before, num_bytes = engine.run(inputs), num_weight_bytes(model)
        assert turn(engine, True).given_back_bytes >= num_bytes
        assert num_weight_bytes(model) == 0
        replays.sizes.clear()
        for one, other in zip(engine.run(inputs), before, strict=True):
            assert one == pytest.approx(other, abs=1e-4)
        assert replays.sizes


def test_the_batch_engine_s_weights_leave_and_come_back(tmp_path: Path) -> None:
    model = load("bloom", tmp_path).to("cuda")
    num_bytes = num_weight_bytes(model)
    with closing(start_engine(model, "batch", max_num_seqs=4, context_length=128)) as engine:
        client = Client(engine)
        expected = token_ids(client.ask(PROMPT, SamplingParams(8)))
        assert turn(engine, True).given_back_bytes >= num_bytes
        assert token_ids(client.ask(PROMPT, SamplingParams(8))) == expected
    assert num_weight_bytes(model) == num_bytes


def test_adapters_of_the_load_replay_after_a_wake_and_one_that_comes_wakes(
    tmp_path: Path, replays: Replays, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "model", "llama", eos_token_id=None, tie_word_embeddings=False)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = model.eval().to("cuda")
    adapters = Adapters(model)

    def load_adapter(name: str, **config: Any) -> Any:
        return adapters.load(save_adapter(checkpoint, tmp_path / name, **config), name)

    def answers(*chosen: Any) -> None:
        client = Client(engine)
        for adapter in chosen:
            client.submit(PROMPT, SamplingParams(8), adapter=adapter)
        for adapter, outcome in zip(chosen, client.outcomes(), strict=True):
            folder = tmp_path / adapter.name if adapter else None
            assert token_ids(outcome) == [generate_with(checkpoint, folder, PROMPT, 8)]

    first = load_adapter("first", r=6)
    options: dict[str, Any] = {"max_num_seqs": 4, "context_length": 128, "decoding": "cuda_graphs"}
    with closing(start_engine(model, adapters=adapters, **options)) as engine:
        turn(engine, True)
        assert num_weight_bytes(model) == 0
        replays.num_eager = 0
        answers(first, None)
        turn(engine, True)
        late = load_adapter("late", r=3, seed=9)
        assert not engine.is_sleeping
        assert num_weight_bytes(model) > 0
        answers(late, first, None)
        turn(engine, True)
        answers(None, late)
        assert replays.num_eager == 0
    assert "eagerly" not in caplog.text


class NoMemory:
    """Memory that another process has: storages cannot grow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_taken = False
        restore = offload.OffloadedWeights.restore

        def try_to_restore(weights: offload.OffloadedWeights) -> None:
            if self.is_taken:
                raise torch.OutOfMemoryError("CUDA out of memory")
            restore(weights)

        monkeypatch.setattr(offload.OffloadedWeights, "restore", try_to_restore)


def test_a_wake_without_memory_refuses_what_waits_and_the_next_request_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, others = load("llama", tmp_path).to("cuda"), NoMemory(monkeypatch)
    with closing(start_engine(model, max_num_seqs=2, context_length=128, decoding="cuda_graphs")) as engine:
        client = Client(engine)
        expected = token_ids(client.ask(PROMPT, SamplingParams(8)))
        turn(engine, True)
        others.is_taken = True
        outcome = client.ask(PROMPT, SamplingParams(8))
        assert isinstance(outcome, HfTritonError)
        assert outcome.code == "out_of_memory"
        with pytest.raises(HfTritonError, match="too little memory"):
            turn(engine, False)
        assert engine.is_sleeping
        assert engine.is_healthy()
        others.is_taken = False
        assert token_ids(client.ask(PROMPT, SamplingParams(8))) == expected
        assert engine.runner._graphs is not None


def test_blocks_that_do_not_fit_any_more_leave_the_model_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("llama", tmp_path).to("cuda")
    with closing(start_engine(model, max_num_seqs=2, context_length=128)) as engine:
        expected = token_ids(Client(engine).ask(PROMPT, SamplingParams(8)))
        turn(engine, True)
        asleep = torch.cuda.memory_allocated()
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> None:
                raise torch.OutOfMemoryError("CUDA out of memory")

            patch.setattr(engine.runner, "run_token", fail)
            outcome = Client(engine).ask(PROMPT, SamplingParams(8))
        assert isinstance(outcome, HfTritonError)
        assert outcome.code == "out_of_memory"
        assert num_weight_bytes(model) == 0, "the weights leave again"
        assert torch.cuda.memory_allocated() <= asleep + 64
        assert token_ids(Client(engine).ask(PROMPT, SamplingParams(8))) == expected


@pytest.mark.parametrize("lacks", ["pins", "room"])
def test_weights_that_cannot_be_pinned_are_moved_and_without_room_they_stay(
    lacks: str, simulated: Device | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("llama", tmp_path).to("cuda")
    num_bytes, empty = num_weight_bytes(model), torch.empty

    def refuse_pins(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **options)

    with closing(start_engine(model, max_num_seqs=2, context_length=128)) as engine:
        expected = token_ids(Client(engine).ask(PROMPT, SamplingParams(8)))
        with monkeypatch.context() as patch:
            if lacks == "pins":
                patch.setattr(torch, "empty", refuse_pins)
            else:
                patch.setattr(FreeMemory, "of", lambda *_: 0)
            assert turn(engine, True).is_sleeping
        assert num_weight_bytes(model) == (0 if lacks == "pins" else num_bytes)
        assert token_ids(Client(engine).ask(PROMPT, SamplingParams(8))) == expected


class Script:
    """The orders of a rank, in turn; it notes the bytes of the model's weights at each."""

    def __init__(self, model: Any, *commands: tuple[Any, ...]) -> None:
        self._model, self._commands = model, list(commands)
        self.held: list[int] = []
        self.told: list[Any] = []

    def take(self, timeout_s: float | None = None) -> tuple[str, tuple[Any, ...]]:
        self.held.append(num_weight_bytes(self._model))
        name, *arguments = self._commands.pop(0)
        return name, tuple(arguments)

    def tell(self, kind: str, value: Any = None) -> None:
        self.told.append(value)


def test_another_rank_gives_back_weights_and_blocks(tmp_path: Path) -> None:
    model = load("llama", tmp_path).to("cuda")
    step = Step((TokenRange(0, 0, 3, [5, 6, 7], [0], 3, samples=(0,)),))
    begin = [("begin", PACKED, 16), ("memory_per_token",), ("allocate", 4, 1), ("run", step, None)]
    orders = Script(model, *begin, ("sleep",), ("restore",), ("run_token", 1), ("run", step, None))
    with pytest.raises(IndexError):  # the script's end
        _Follower(orders).follow(model)
    *awake, asleep, _, _, end = orders.held[1:]
    assert {*awake, end} == {num_weight_bytes(model)}
    assert asleep == 0
    assert orders.told[0]["weights_bytes"] == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
