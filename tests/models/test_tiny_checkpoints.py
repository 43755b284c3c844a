# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints load without warnings, their completions vary, and batching does not change them."""

import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open

import hf_triton.testing
from hf_triton.hub.checkpoint import Placement, load_checkpoint
from hf_triton.hub.kind import find_task
from hf_triton.hub.locate import Hub
from hf_triton.settings import ModelSettings
from hf_triton.tasks.encoder_service import build_encoder_service
from hf_triton.tasks.registry import folder_task
from hf_triton.tasks.serving.meter import Meter
from hf_triton.testing import (
    ARCHITECTURES,
    ENCODER_TASKS,
    LoopbackHub,
    add_tensor,
    build_tiny_checkpoint,
    build_tiny_encoder,
    drop_tensor,
    flip_bit,
    reshape_tensor,
    truncate,
)
from tests.support.marks import full

ENCODER_DECODERS = {"t5", "bart"}
PROMPTS = ["The river", "Where does the baker carry warm bread in the morning?", "3, 14"]
NUM_NEW_TOKENS = 16
STRINGS = ["plain", "Zoë fährt\n\t  weiter ", "日本語 🧑‍🚀 ﷽", "\x00\x7f", "e\u0301"]


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(folder: Path, architecture: str = "llama") -> tuple[Any, dict[str, Any]]:
    auto = "AutoModelForSeq2SeqLM" if architecture in ENCODER_DECODERS else "AutoModelForCausalLM"
    return getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)


def generate(model: Any, tokenizer: Any, prompts: list[str], architecture: str = "llama") -> list[list[int]]:
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    # An encoder's positions count from the left edge, so padding there would move the prompt.
    tokenizer.padding_side = "right" if architecture in ENCODER_DECODERS else "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    ids = model.generate(
        **batch, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id, eos_token_id=None
    )
    return ids[:, -NUM_NEW_TOKENS:].tolist()


@pytest.mark.parametrize("task", ENCODER_TASKS)
def test_an_encoder_does_its_task(task: str, tmp_path: Path) -> None:
    folder = build_tiny_encoder(tmp_path / "model", task)
    settings = ModelSettings(huggingface_model=str(folder), task=task)
    kind = folder_task(None, settings, tmp_path)
    assert kind is not None
    assert kind.declaration.name == task
    checkpoint = load_checkpoint(Hub(tmp_path, settings, {}), settings, Placement("CPU", 0), kind.auto_class)
    service = build_encoder_service(kind, checkpoint, settings, on_fatal=lambda: None, meter=Meter())
    service.close()
    assert find_task(folder) == ("embeddings" if task == "feature-extraction" else task)


@pytest.mark.parametrize(
    "architecture", ["llama", "t5", *full(*(name for name in ARCHITECTURES if name not in ("llama", "t5")))]
)
def test_architecture(architecture: str, tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path / "checkpoint", architecture)
    model, info = load(folder, architecture)
    assert not any(info.values()), f"not a clean load: {info}"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1 << 20

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) <= model.config.get_text_config().vocab_size
    solo = [generate(model, tokenizer, [prompt], architecture)[0] for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in solo}) == len(PROMPTS), "the prompt makes no difference"
    assert sum(len(set(tokens)) for tokens in solo) >= 4 * len(PROMPTS), f"degenerate completions: {solo}"
    together = generate(model, tokenizer, PROMPTS, architecture)
    if architecture == "rwkv":  # has no attention mask, so padding changes its tokens
        assert together != solo
    else:
        assert together == solo


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokenizer_round_trips_any_string(architecture: str, tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path, architecture)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # transformers loads Qwen2's own tokenizer class over the saved one, which composes accents (NFC).
    strings = STRINGS[:-1] if architecture == "qwen2" else STRINGS
    decoded = [tokenizer.decode(tokenizer(string).input_ids, skip_special_tokens=True) for string in strings]
    assert decoded == strings


def test_seed_decides_the_weights_and_global_state_is_unchanged(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    first, second, third = (
        build_tiny_checkpoint(tmp_path / str(index), seed=seed) / "model.safetensors"
        for index, seed in enumerate((1, 1, 2))
    )
    assert first.read_bytes() == second.read_bytes() != third.read_bytes()
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("architecture", "add_bos", "expected"), [("llama", None, True), ("llama", False, False), ("falcon", None, False)]
)
def test_bos(architecture: str, add_bos: bool | None, expected: bool, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        build_tiny_checkpoint(tmp_path, architecture, add_bos=add_bos)
    )
    assert (tokenizer("a").input_ids[0] == tokenizer.bos_token_id) == expected


def test_options(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    folder = build_tiny_checkpoint(
        tmp_path / "new", chat_template=template, dtype="bfloat16", max_shard_size="50KB", num_hidden_layers=1
    )
    model, info = load(folder)
    assert not any(info.values())
    assert (model.dtype, model.config.num_hidden_layers) == (torch.bfloat16, 1)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[user] hi"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_pickled_weights_are_equal(architecture: str, tmp_path: Path) -> None:
    pickled = build_tiny_checkpoint(tmp_path / "pickled", architecture, safe_serialization=False)
    assert not list(pickled.glob("*.safetensors"))
    model, info = load(pickled, architecture)
    assert not any(info.values())
    same, _ = load(build_tiny_checkpoint(tmp_path / "same", architecture), architecture)
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in model.state_dict().items())


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"architecture must be one of falcon, .*got 'falcno'"):
        build_tiny_checkpoint(tmp_path, "falcno")
    with pytest.raises(ValueError, match="max_shard_size needs safe_serialization=True"):
        build_tiny_checkpoint(tmp_path, safe_serialization=False, max_shard_size="1MB")


@pytest.mark.parametrize("max_shard_size", [None, "50KB"])
def test_damaged_tensors(max_shard_size: str | None, tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path, max_shard_size=max_shard_size)
    name = "model.layers.1.mlp.up_proj.weight"
    add_tensor(folder, "model.layers.9.extra")
    assert load(folder)[1]["unexpected_keys"] == {"model.layers.9.extra"}
    drop_tensor(folder, name)
    assert load(folder)[1]["missing_keys"] == {name}
    with pytest.raises(KeyError, match="up_proj"):
        drop_tensor(folder, name)
    reshape_tensor(folder, "lm_head.weight")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(folder)


def test_damaged_bytes(tmp_path: Path) -> None:
    weights = build_tiny_checkpoint(tmp_path) / "model.safetensors"
    before = weights.read_bytes()
    flip_bit(weights)
    assert sum(old != new for old, new in zip(before, weights.read_bytes(), strict=True)) == 1
    load(tmp_path)  # the format has no checksum: only a hash from outside can tell
    truncate(weights)
    assert len(weights.read_bytes()) == len(before) // 2
    with pytest.raises(SafetensorError), safe_open(weights, framework="pt"):
        pass


@pytest.mark.full
def test_from_pretrained_through_the_loopback_hub(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path / "checkpoint", "falcon", max_shard_size="100KB")
    code = (
        "import json, transformers as t\n"
        "t.AutoTokenizer.from_pretrained('tiiuae/falcon-7b')\n"
        "_, info = t.AutoModelForCausalLM.from_pretrained('tiiuae/falcon-7b', output_loading_info=True)\n"
        "print(json.dumps({key: list(value) for key, value in info.items() if value}))\n"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    with LoopbackHub() as hub:
        hub.add("tiiuae/falcon-7b", folder)
        environment = clean | hub.environment() | {"HF_HOME": str(tmp_path / "hf")}
        child = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert child.returncode == 0, child.stderr
        assert json.loads(child.stdout) == {}
        assert any("/cdn/" in request.path for request in hub.requests)


def test_example_in_the_package_docstring(tmp_path: Path) -> None:
    lines = (hf_triton.testing.__doc__ or "").splitlines()
    example = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))
    names: dict[str, Any] = {}
    exec(example, names)
    names["test_first_download_survives_a_busy_hub"](tmp_path)
