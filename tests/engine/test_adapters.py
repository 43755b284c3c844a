# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in both engines: each sequence has its own, in any company, as peft alone generates."""

import gc
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.choose import build_engine
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.engine_config import EngineConfig
from hf_triton.engine.options import EngineOptions
from hf_triton.engine.sequence import Completion, Outcome
from hf_triton.errors import CheckpointError
from hf_triton.runner.cpu import accelerate
from hf_triton.runner.lora.model_adapters import Adapter, Adapters, without_peft_wrapper
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint
from tests.support.adapters import generate_with, save_adapter, wrap
from tests.support.architectures import STATES, WHOLE, build
from tests.support.engine import Client, only
from tests.support.listener import group_of
from tests.support.marks import full

CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"seed": 1},
    "mlp": {"seed": 2, "r": 8, "target_modules": ["down_proj", "k_proj"]},
    "all": {"seed": 3, "r": 2, "target_modules": "all-linear"},
    "embedding": {"seed": 4, "target_modules": ["embed_tokens", "o_proj"]},
    "trained head": {"seed": 5, "modules_to_save": ["lm_head"]},
    "rank-stabilized": {"seed": 6, "use_rslora": True, "lora_alpha": 3},
    "patterns": {
        "seed": 7,
        "target_modules": "all-linear",
        "rank_pattern": {"^model.layers.1.self_attn.q_proj": 6, r"layers\.\d\.mlp\.(up|down)_proj": 2, "k_proj": 3},
        "alpha_pattern": {"model.layers.0.self_attn.q_proj": 16, ".*mlp.*": 3, "o_pro.": 40},
    },
    "regular expression": {"seed": 8, "target_modules": r".*\.1\.(self_attn|mlp)\.(q|up)_proj"},
    "some layers": {"seed": 9, "layers_to_transform": [1], "layers_pattern": "layers"},
    "all but": {"seed": 10, "target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "bias": {"seed": 11, "lora_bias": True},
}
ENGINES = {"continuous": ContinuousBatchingEngine, "batch": BatchEngine}
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return build_tiny_checkpoint(folder, "llama", eos_token_id=None, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(checkpoint, root / name, **config) for name, config in CONFIGS.items()}


def load_model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


class Started:
    def __init__(self, model: Any, engine: Any = "auto", **options: Any) -> None:
        accelerate(model, pack_weights="all")
        self.adapters = Adapters(model)
        self.engine = build_engine(
            model, engine, EngineOptions(max_num_seqs=8, context_length=256, adapters=self.adapters, **options)
        )

    def run(self, *requests: tuple[list[int], Adapter | None]) -> list[list[int]]:
        """The tokens of prompts that are submitted together."""
        outcomes: dict[int, Outcome] = {}
        left = threading.Semaphore(0)

        def finish(number: int, outcome: Outcome) -> None:
            outcomes[number] = outcome
            left.release()

        for number, (prompt, adapter) in enumerate(requests):
            params = SamplingParams(NUM_TOKENS)
            group = group_of(prompt, params, on_finish=partial(finish, number), adapter=adapter)
            self.engine.submit([group])
        for _ in requests:
            assert left.acquire(timeout=60)
        return [tokens_of(outcomes[number]) for number in range(len(requests))]


def tokens_of(outcome: Outcome) -> list[int]:
    assert isinstance(outcome, list), outcome
    [completion] = outcome
    assert isinstance(completion, Completion)
    return completion.token_ids


@pytest.fixture(params=["continuous", *full("batch")])
def started(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Started]:
    running = Started(load_model(checkpoint), request.param)
    assert isinstance(running.engine, ENGINES[request.param])
    yield running
    running.engine.close()


def prompts(number: int) -> list[list[int]]:
    """Prompts of unequal length that begin alike."""
    return [[*range(5, 30), *range(40, 41 + index)] for index in range(number)]


def test_each_sequence_of_a_mixed_batch_equals_peft_alone(
    started: Started, checkpoint: Path, folders: dict[str, Path]
) -> None:
    names = [None, *CONFIGS, None, *CONFIGS]
    adapters = {name: started.adapters.load(folder) for name, folder in folders.items()}
    jobs = list(zip(prompts(len(names)), names, strict=True))
    tokens = started.run(*((prompt, adapters[name] if name else None) for prompt, name in jobs))
    for (prompt, name), found in zip(jobs, tokens, strict=True):
        assert found == generate_with(checkpoint, folders[name] if name else None, prompt, NUM_TOKENS), name


def test_tokens_of_their_own_leave_other_rows_alone(started: Started, checkpoint: Path, tmp_path: Path) -> None:
    tokens: dict[str, Any] = {"first": [7, 40, 5], "second": {"embed_tokens": [41]}, "third": None}
    folders = {
        name: save_adapter(checkpoint, tmp_path / name, seed=20 + len(name), trainable_token_indices=ids)
        for name, ids in tokens.items()
    }
    adapters = {name: started.adapters.load(folder) for name, folder in folders.items()}
    jobs = list(zip(prompts(8), [None, *tokens] * 2, strict=True))
    found = started.run(*((prompt, adapters[name] if name else None) for prompt, name in jobs))
    for (prompt, name), answer in zip(jobs, found, strict=True):
        assert answer == generate_with(checkpoint, folders[name] if name else None, prompt, NUM_TOKENS), name


@pytest.mark.full
def test_prefixes_of_one_adapter_are_not_reused_for_another(
    started: Started, checkpoint: Path, folders: dict[str, Path]
) -> None:
    adapters = [started.adapters.load(folder) for folder in folders.values()]
    prompt = list(range(5, 60))
    expected = [generate_with(checkpoint, folder, prompt, NUM_TOKENS) for folder in (None, *folders.values())]
    for _ in range(2):  # the second time, each finds its own prefix
        assert [started.run((prompt, adapter))[0] for adapter in (None, *adapters)] == expected


HYBRIDS = {"qwen3-next": ["in_proj_qkvz", "out_proj", "q_proj"], "falcon-mamba": ["in_proj", "x_proj"]}
"""Models with states, and layers that write them."""


@pytest.mark.parametrize("architecture", ["qwen3-next", *full("falcon-mamba")])
def test_states_of_one_adapter_are_not_reused_for_another(architecture: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    build(*(STATES | WHOLE)[architecture]).save_pretrained(base)
    targets = HYBRIDS[architecture]
    folders = [None, *(save_adapter(base, tmp_path / str(n), seed=n, target_modules=targets) for n in (1, 2))]
    started = Started(load_model(base), "continuous", config=EngineConfig(block_size=8))
    adapters = [folder and started.adapters.load(folder) for folder in folders]
    client, answered = Client(started.engine), 0
    conversations = [list(range(10, 90)) for _ in folders]
    for turn in range(3):  # all three at once, each behind a past of its own from the second on
        for prompt, adapter in zip(conversations, adapters, strict=True):
            client.submit(prompt, SamplingParams(NUM_TOKENS), adapter=adapter)
        completions = [only(outcome) for outcome in client.outcomes()[answered:]]
        answered = client.num_submitted
        for prompt, folder, completion in zip(conversations, folders, completions, strict=True):
            assert completion.token_ids == generate_with(base, folder, prompt, NUM_TOKENS)
            assert (completion.num_cached > 0) is (turn > 0)
        if turn:
            conversations = [
                [*prompt, *completion.token_ids, 200, 201]
                for prompt, completion in zip(conversations, completions, strict=True)
            ]
    started.engine.close()
    assert len({tuple(prompt) for prompt in conversations}) == len(folders)


def test_steps_ahead_of_the_host_with_adapters_equal_peft(checkpoint: Path, folders: dict[str, Path]) -> None:
    started = Started(load_model(checkpoint), "continuous", config=EngineConfig(runs_ahead=True))
    try:
        adapter = started.adapters.load(folders["all"])
        jobs = [(prompt, adapter if index % 2 else None) for index, prompt in enumerate(prompts(4))]
        for (prompt, chosen), tokens in zip(jobs, started.run(*jobs), strict=True):
            folder = folders["all"] if chosen else None
            assert tokens == generate_with(checkpoint, folder, prompt, NUM_TOKENS)
    finally:
        started.engine.close()


def test_adapters_come_and_go_while_sequences_run(started: Started, checkpoint: Path, folders: dict[str, Path]) -> None:
    first = started.adapters.load(folders["all"])
    jobs = [(prompt, first) for prompt in prompts(6)]
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.extend(started.run(*jobs)))
    thread.start()
    for _ in range(3):  # each is dropped at once
        for name in ("attention", "mlp"):
            started.adapters.load(folders[name])
    thread.join()
    expected = [generate_with(checkpoint, folders["all"], prompt, NUM_TOKENS) for prompt, _ in jobs]
    assert found == expected


def test_an_adapter_that_is_not_held_leaves_the_model(checkpoint: Path, folders: dict[str, Path]) -> None:
    model = load_model(checkpoint)
    adapters = Adapters(model)
    held = adapters.load(folders["all"])
    adapters.load(folders["attention"])
    gc.collect()
    last = adapters.load(folders["mlp"])
    assert set(model.peft_config) == {held.key, last.key}
    names = {name for name, _ in model.named_parameters() if "lora" in name}
    assert {name.split(".")[-2] for name in names} == {held.key, last.key}


class EightBits(nn.Linear):
    """A linear layer with weights in FP8."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(states, self.weight.to(states.dtype))


def test_lora_of_layers_in_fp8_is_computed_in_the_models_dtype(checkpoint: Path, folders: dict[str, Path]) -> None:
    logits = []
    for is_narrow in (False, True):
        model = load_model(checkpoint)
        for layer in [layer for name, layer in model.named_modules() if "self_attn." in name]:
            narrow = layer.weight.detach().to(torch.float8_e4m3fn)
            layer.weight = nn.Parameter(narrow if is_narrow else narrow.to(model.dtype), requires_grad=False)
            layer.__class__ = EightBits if is_narrow else type(layer)
        adapters = Adapters(model)
        adapter = adapters.load(folders["attention"])
        with torch.inference_mode(), adapters.choose([adapter]):
            logits.append(model(torch.tensor([[5, 60, 7]])).logits)
    torch.testing.assert_close(*logits)


def test_a_peft_model_keeps_continuous_batching(checkpoint: Path, folders: dict[str, Path]) -> None:
    wrapped = wrap(load_model(checkpoint), folders["all"])
    started = Started(without_peft_wrapper(wrapped), "continuous")
    try:
        other = started.adapters.load(folders["mlp"])
        jobs = [(prompt, other if index % 2 else None) for index, prompt in enumerate(prompts(4))]
        for (prompt, chosen), tokens in zip(jobs, started.run(*jobs), strict=True):
            folder = folders["mlp" if chosen else "all"]
            assert tokens == generate_with(checkpoint, folder, prompt, NUM_TOKENS)
    finally:
        started.engine.close()


def test_adapters_of_another_model_are_refused(checkpoint: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    other = build_tiny_checkpoint(tmp_path / "wide", "llama", hidden_size=128)
    wide = save_adapter(other, tmp_path / "adapter")
    model = load_model(checkpoint)
    with pytest.raises(CheckpointError, match="it was made for another base model"):
        Adapters(model).load(wide)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        Adapters(model).load(tmp_path / "empty")
    tokens = generate_with(checkpoint, None, [5, 6, 7], NUM_TOKENS)
    started = Started(model)
    try:
        assert started.run(([5, 6, 7], None)) == [tokens]
    finally:
        started.engine.close()


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
        (
            "gpt2",
            {"target_modules": "all-linear", "trainable_token_indices": [3, 9]},
        ),  # the head has the embedding's rows
    ],
)
def test_other_layers_and_ties_equal_peft(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "base", architecture, eos_token_id=None)
    folder = save_adapter(checkpoint, tmp_path / "adapter", **config)
    model = load_model(checkpoint)
    adapters = Adapters(model)
    adapter = adapters.load(folder)
    token_ids = torch.arange(3, 20).expand(2, -1)
    with torch.inference_mode(), adapters.choose([None, adapter]):
        base, changed = model(token_ids).logits
    with torch.inference_mode():
        torch.testing.assert_close(base, load_model(checkpoint)(token_ids[:1]).logits[0], rtol=0, atol=1e-5)
        expected = wrap(load_model(checkpoint), folder)(token_ids[:1]).logits[0]
    torch.testing.assert_close(changed, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(changed, base, atol=1e-3)


@pytest.mark.parametrize("config", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}])
def test_tensors_of_a_state_dict_are_those_of_peft(config: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "base", "llama", eos_token_id=None, tie_word_embeddings=False)
    folder = save_adapter(checkpoint, tmp_path / "adapter", **config)
    file = folder / "adapter_model.safetensors"
    saved = load_file(file)
    renamed = {name_in_model(name): tensor for name, tensor in saved.items()}
    assert renamed.keys() != saved.keys()
    save_file({**renamed, "base_model.model.model.rotary_emb.inv_freq": torch.ones(8)}, file)
    model = load_model(checkpoint)
    adapters = Adapters(model)
    adapter = adapters.load(folder)
    save_file(saved, file)
    token_ids = torch.arange(3, 20)[None]
    with torch.inference_mode(), adapters.choose([adapter]):
        logits = model(token_ids).logits
    with torch.inference_mode():
        torch.testing.assert_close(logits, wrap(load_model(checkpoint), folder)(token_ids).logits, rtol=0, atol=1e-5)


def name_in_model(name: str) -> str:
    """A tensor's name in a model with the adapter `default`."""
    if name.endswith(("lora_embedding_A", "lora_embedding_B")):
        return f"{name}.default"
    first, _, last = name.rpartition(".")
    return f"{first}.default.{last}" if ".lora_" in name else f"{first}.modules_to_save.default.{last}"
