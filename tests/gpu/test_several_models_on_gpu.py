# SPDX-License-Identifier: Apache-2.0
"""Several models on one CUDA device, loaded one after the other as Triton loads the folders of a repository."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_triton.errors import CheckpointError
from hf_triton.folders.folders import load_folder_settings, parse_config
from hf_triton.model import start_text_generation
from hf_triton.sampling.params import SamplingParams
from hf_triton.settings import ModelSettings
from hf_triton.tasks.hooks import Hooks
from hf_triton.tasks.serving.meter import Meter
from hf_triton.testing import build_tiny_checkpoint
from tests.support.engine import Client, check, greedy_ids, prompts
from tests.support.reference import load_reference
from tests.support.simulated_gpu import HAS_GPU, TOTAL_BYTES
from tests.support.triton_stand_in import Response, stand_in

pytestmark = [pytest.mark.full, pytest.mark.skipif(HAS_GPU, reason="a real device has room for all of these")]
GREEDY: dict[str, Any] = {"max_num_seqs": 4096, "decoding": "eager"}
"""Settings of a model that takes all it may of the simulated device."""
MODELS = {"falcon7b": "falcon", "persimmon8b": "persimmon"}

AddFolder = Callable[..., Path]
LoadFolder = Callable[[Path], Any]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: build_tiny_checkpoint(root / name, kind, eos_token_id=None) for name, kind in MODELS.items()}


@pytest.fixture
def add_folder(tmp_path: Path, checkpoints: dict[str, Path], make_folder: Callable[..., Path]) -> AddFolder:
    """Adds a model's folder to the repository, with further settings."""

    def add(name: str, **more: Any) -> Path:
        return make_folder(tmp_path, name, huggingface_model=checkpoints[name], **{**GREEDY, **more})

    return add


@pytest.fixture
def load_folder() -> Iterator[LoadFolder]:
    """Starts an instance of a folder on GPU 0, which stays until the test ends, and returns its engine."""
    with ExitStack() as stack:
        stack.enter_context(stand_in(Response))

        def load(folder: Path) -> Any:
            settings = load_folder_settings(parse_config(folder), ModelSettings).settings
            args = {"model_repository": str(folder), "model_instance_kind": "GPU", "model_instance_device_id": "0"}
            task: Any = stack.enter_context(closing(start_text_generation(Hooks(), settings, args, Meter())))
            return task._engine

        yield load


def check_answers(engines: list[Any], checkpoint: Path) -> None:
    reference = load_reference(checkpoint).model
    items = [(prompt, SamplingParams(8)) for prompt in prompts(6, seed=1)]
    expected = greedy_ids(reference, items)
    for engine in engines:
        check(reference, Client(engine), items, expected=expected)


def cache_bytes(engine: Any) -> int:
    return sum(blocks.keys.nbytes + blocks.values.nbytes for blocks in engine.runner.cache.blocks())


def test_two_models_share_a_gpu(add_folder: AddFolder, load_folder: LoadFolder, checkpoints: dict[str, Path]) -> None:
    folders = [add_folder(name) for name in MODELS]
    engines = [load_folder(folder) for folder in folders]
    for engine in engines:
        assert TOTAL_BYTES * 0.4 < cache_bytes(engine) < TOTAL_BYTES * 0.45
    for engine, checkpoint in zip(engines, checkpoints.values(), strict=True):
        check_answers([engine], checkpoint)


def test_three_instances_of_one_folder(
    add_folder: AddFolder, load_folder: LoadFolder, checkpoints: dict[str, Path]
) -> None:
    folder = add_folder("falcon7b", config="instance_group [ { kind: KIND_GPU count: 3 } ]")
    engines = [load_folder(folder) for _ in range(3)]
    for engine in engines:
        assert TOTAL_BYTES * 0.25 < cache_bytes(engine) < TOTAL_BYTES * 0.3
    check_answers(engines, checkpoints["falcon7b"])


def test_a_model_alone_takes_what_its_sequences_need(add_folder: AddFolder, load_folder: LoadFolder) -> None:
    engine = load_folder(add_folder("falcon7b", max_num_seqs=4))
    assert engine.memory.pool.num_blocks * engine.memory.block_size == 4 * 256
    free, total = torch.cuda.mem_get_info(0)
    assert free > 0.9 * total


def test_settings_say_more(add_folder: AddFolder, load_folder: LoadFolder) -> None:
    folders = [add_folder("falcon7b", gpu_memory_fraction=0.7), add_folder("persimmon8b", max_cache_tokens=1024)]
    first, second = map(load_folder, folders)
    assert TOTAL_BYTES * 0.6 < cache_bytes(first) < TOTAL_BYTES * 0.63
    assert second.memory.budget.most == 1024


def test_a_model_without_room_says_who_shares_the_gpu_and_what_to_set(
    add_folder: AddFolder, load_folder: LoadFolder
) -> None:
    first, second = add_folder("falcon7b", gpu_memory_fraction=1), add_folder("persimmon8b")
    load_folder(first)
    free, _ = torch.cuda.mem_get_info(0)
    taken = torch.empty(free - 500_000, dtype=torch.uint8, device="cuda:0")  # by another program
    with pytest.raises(CheckpointError) as raised:
        load_folder(second)
    del taken
    assert raised.value.code == "out_of_memory"
    for words in (
        "instances on this GPU: falcon7b 1 of gpu_memory_fraction 1, persimmon8b 1",
        "of 128.0 MiB free",
        "set gpu_memory_fraction, or fewer max_cache_tokens",
    ):
        assert words in raised.value.sentence
