# SPDX-License-Identifier: Apache-2.0
"""Adapters whose files cannot be served: each is refused by its reason, and the model stays as it was."""

import gc
import json
import os
import pickle
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from peft import PeftType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.errors import CheckpointError
from hf_triton.runner.cpu import accelerate
from hf_triton.runner.lora.model_adapters import Adapters
from hf_triton.tasks.serving.adapters import AdapterStore
from hf_triton.testing import build_tiny_checkpoint
from tests.engine.test_adapters import NUM_TOKENS, Started, prompts
from tests.support.adapters import generate_with, save_adapter

Tensors = dict[str, torch.Tensor]
LAYER: Final = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING: Final = "base_model.model.model.embed_tokens"
SLOW: Final = "(?:[a-z._0-9]|[a-z._0-9]{2}|[a-z._0-9]{3})+[!-#]"
"""A pattern that takes exponential time."""


class Model(NamedTuple):
    """A model with an adapter, and a good adapter's files to spoil."""

    model: Any
    adapters: Adapters
    good: Any
    files: Path
    checkpoint: Path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return build_tiny_checkpoint(folder, "llama", eos_token_id=None, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def loaded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    accelerate(model, pack_weights="all")
    adapters = Adapters(model)
    good = adapters.load(save_adapter(checkpoint, root / "good", seed=1, target_modules=["q_proj", "down_proj"]))
    return Model(model, adapters, good, save_adapter(checkpoint, root / "files", seed=2), checkpoint)


def modules_of(model: Any) -> list[tuple[str, int]]:
    named = [*model.named_modules(), *model.named_parameters(), *model.named_buffers()]
    return [(name, id(part)) for name, part in named]


def logits_of(loaded: Model) -> torch.Tensor:
    """Of the base model and of its good adapter, side by side."""
    with torch.inference_mode(), loaded.adapters.choose([None, loaded.good]):
        logits: torch.Tensor = loaded.model(torch.arange(5, 20).expand(2, -1)).logits
        return logits


def spoil(
    loaded: Model, folder: Path, change: dict[str, Any], edit: Callable[[Tensors], object] = lambda tensors: None
) -> Path:
    """The good adapter's files with other settings, and with edited tensors."""
    shutil.copytree(loaded.files, folder)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def filled(number: float) -> Callable[[Tensors], object]:
    return lambda tensors: [tensor.fill_(number) for tensor in tensors.values()]


TOKENS: Final = f"{EMBEDDING}.token_adapter.trainable_tokens_delta"
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"r": 8}, r"other shapes than the model, as .*lora_A.weight: \[4, 64\] in place of \[8, 64\]"),
    ({"r": 0}, "r is 0, not a positive number"),
    ({"r": 10**9}, "other shapes"),
    ({"r": "4"}, "r is '4'"),
    ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
    ({"target_modules": ["nothing"]}, "has, and target_modules does not name, model.layers.0.self_attn.q_proj"),
    ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "lacks model.layers.0.self_attn.o_proj, .*target_modules"),
    ({"target_modules": ["q_proj", "v_proj", ".*"]}, "target_modules is .* not a list of layers' names"),
    ({"rank_pattern": {"q_proj": 8}}, "other shapes"),
    ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern is '8'"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern is not an object"),
    ({"alpha_pattern": {SLOW: 8}}, "take too long to match"),
    ({"alpha_pattern": {"(?R)": 8}}, "no pattern"),
    ({"alpha_pattern": {"(" * 5000: 8}}, "longer than 1000"),
    ({"rank_pattern": {"((a{1000}){1000}){1000}": 8}}, "repeats parts too often"),
    ({"modules_to_save": ["lm_head"]}, "lacks lm_head, which modules_to_save names"),
    ({"modules_to_save": [SLOW]}, "modules_to_save is .* not a list of layers' names"),
    ({"trainable_token_indices": [5]}, "lacks token_adapter.trainable_tokens_delta"),
    ({"trainable_token_indices": [-1]}, "other values than token ids"),
    ({"trainable_token_indices": [3, 3]}, "names a token twice"),
    ({"trainable_token_indices": {"lm_head": [3]}}, "lacks .* of 'lm_head'"),
    ({"lora_bias": True}, "lacks .*lora_B.bias"),
    ({"use_dora": True}, r"is a DoRA adapter \(use_dora\)"),
    ({"use_qalora": True}, "is a QALoRA adapter"),
    ({"alora_invocation_tokens": [3]}, "aLoRA"),
    ({"kasa_config": {}}, "is a KaSA adapter"),
    ({"layers_to_transform": [0, 1], "layers_pattern": "blocks"}, "has, and layers_to_transform does not name"),
    ({"layers_to_transform": True}, "layers_to_transform is true, not numbers of layers"),
    ({"layers_to_transform": [1], "layers_pattern": [SLOW]}, "layers_pattern is .* not a list of layers' names"),
    ({"target_parameters": ["mlp.gate"]}, "sets target_parameters"),
    ({"ensure_weight_tying": True}, "sets ensure_weight_tying"),
    ({"bias": "lora_only"}, "changes its base model"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes its base model"),
    ({"peft_type": None}, "cannot be read"),
    ({"peft_type": ["LORA"]}, "cannot be read"),
    *(({"peft_type": kind.name}, f"is a {kind.name} adapter") for kind in PeftType if kind.name != "LORA"),
]
FILES: list[tuple[str, dict[str, Any], Callable[[Tensors], object], str]] = [
    ("NaN", {}, filled(float("nan")), "has NaN or infinite numbers in model.layers.0"),
    ("too large", {}, filled(1e38), "makes NaN or infinite numbers of the model's outputs"),
    ("integers", {}, put(f"{LAYER}.lora_A.weight", torch.ones(4, 64, dtype=torch.int32)), "has tensors of torch.int32"),
    ("shape of A", {}, put(f"{LAYER}.lora_A.weight", torch.ones(4, 63)), "other shapes"),
    ("shape of B", {}, put(f"{LAYER}.lora_B.weight", torch.ones(64)), "other shapes"),
    ("nothing", {}, lambda tensors: tensors.clear(), "has no tensors of LoRA"),
    (
        "one more",
        {},
        put("base_model.model.model.layers.7.x.lora_A.weight", torch.ones(1)),
        "has, and the model has not",
    ),
    ("a base tensor", {}, put("base_model.model.lm_head.weight", torch.ones(3, 64)), "replaces .*lm_head.weight"),
    ("a norm", {}, put("base_model.model.model.norm.weight", torch.zeros(64)), "replaces .*norm.weight"),
    ("no tensor", {}, put("base_model.model.model.norm.forward", torch.zeros(64)), "has, and the model has not"),
    (
        "a norm to save",
        {"modules_to_save": ["norm"]},
        put("base_model.model.model.norm.weight", torch.zeros(64)),
        "replaces model.norm, a LlamaRMSNorm",
    ),
    (
        "a head of another vocabulary",
        {"modules_to_save": ["lm_head"]},
        put("base_model.model.lm_head.weight", torch.zeros(5, 64)),
        "other shapes than the model, as lm_head.weight",
    ),
    ("tokens", {}, put(TOKENS, torch.zeros(1, 64)), "trainable_token_indices does not name"),
    ("a wrong token", {"trainable_token_indices": [10**6]}, put(TOKENS, torch.zeros(1, 64)), "replaces row 1000000"),
    ("fewer tokens", {"trainable_token_indices": [3, 4]}, put(TOKENS, torch.zeros(1, 64)), "other shapes"),
    (
        "tokens of a norm",
        {"trainable_token_indices": {"norm": [0]}},
        put("base_model.model.model.norm.token_adapter.trainable_tokens_delta", torch.zeros(1, 64)),
        "a LlamaRMSNorm, which is no embedding",
    ),
    (
        "a long name",
        {},
        put("base_model.model." + "x" * 2000 + ".lora_A.weight", torch.zeros(1)),
        "name has more than 1000",
    ),
]
FILES.append(
    (
        "two spellings of a tensor",
        {},
        lambda tensors: tensors.update(
            {name.replace(".weight", ".default.weight"): tensor.clone() for name, tensor in tensors.items()}
        ),
        "has two tensors for",
    )
)
BYTES: list[tuple[str, bytes, str]] = [
    ("adapter_config.json", b"", "cannot be read"),
    ("adapter_config.json", b"[]", "is not an object"),
    ("adapter_config.json", b"[" * 200_000, "cannot be read"),
    ("adapter_config.json", b" " * 2_000_000, "more than 1000000 bytes"),
    ("adapter_config.json", b"\xff", "cannot be read"),
    ("adapter_model.safetensors", b"", "cannot be read"),
    ("adapter_model.safetensors", b"\xff" * 100, "cannot be read"),
    ("adapter_model.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00[[[[[[[[", "cannot be read"),
    ("adapter_model.safetensors", pickle.dumps({"weights": [1]}), "cannot be read"),
]


def check_refusal(loaded: Model, folder: Path, words: str) -> None:
    modules, logits = modules_of(loaded.model), logits_of(loaded)
    with pytest.raises(CheckpointError, match=words) as refused:
        loaded.adapters.load(folder)
    assert refused.value.code == "adapter_invalid"
    assert modules_of(loaded.model) == modules
    assert list(loaded.model.peft_config) == [loaded.good.key]
    assert torch.equal(logits_of(loaded), logits)


@pytest.mark.parametrize(("change", "words"), SETTINGS, ids=[str(change)[:40] for change, _ in SETTINGS])
def test_settings_are_refused(loaded: Model, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    check_refusal(loaded, spoil(loaded, tmp_path / "bad", change), words)


@pytest.mark.parametrize(("change", "edit", "words"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_tensors_are_refused(
    loaded: Model, tmp_path: Path, change: dict[str, Any], edit: Callable[[Tensors], object], words: str
) -> None:
    check_refusal(loaded, spoil(loaded, tmp_path / "bad", change, edit), words)


@pytest.mark.parametrize(("name", "content", "words"), BYTES)
def test_files_are_refused(loaded: Model, tmp_path: Path, name: str, content: bytes, words: str) -> None:
    folder = spoil(loaded, tmp_path / "bad", {})
    (folder / name).write_bytes(content)
    check_refusal(loaded, folder, words)


def test_a_file_larger_than_the_model_is_not_read(
    loaded: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = spoil(loaded, tmp_path / "bad", {})
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    check_refusal(loaded, folder, "cannot be read .*has more than [0-9]+ bytes")


def make_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, make_device])
def test_what_is_no_file_is_not_read(loaded: Model, tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    folder = spoil(loaded, tmp_path / "bad", {})
    (folder / name).unlink()
    make(folder / name)
    check_refusal(loaded, folder, "cannot be read .*not a regular file")


def test_a_pickle_is_refused_by_name(loaded: Model, tmp_path: Path) -> None:
    folder = spoil(loaded, tmp_path / "bad", {})
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    check_refusal(loaded, folder, r"as a pickle alone \(adapter_model.bin\).* convert it to safetensors")


def test_a_second_way_to_change_a_layer_is_refused(loaded: Model, tmp_path: Path) -> None:
    held = loaded.adapters.load(save_adapter(loaded.checkpoint, tmp_path / "tokens", trainable_token_indices=[7]))
    other = save_adapter(loaded.checkpoint, tmp_path / "other", target_modules=["embed_tokens"])
    modules = modules_of(loaded.model)
    with pytest.raises(CheckpointError, match=r"changes model\.embed_tokens by LoRA, and another adapter"):
        loaded.adapters.load(other)
    assert modules_of(loaded.model) == modules
    del held
    loaded.adapters.load(other)


def test_a_slow_pattern_of_the_layers_is_never_run(loaded: Model, tmp_path: Path) -> None:
    """The tensors say which layers there are."""
    adapter = loaded.adapters.load(spoil(loaded, tmp_path / "slow", {"target_modules": SLOW, "exclude_modules": SLOW}))
    plain = loaded.adapters.load(loaded.files)
    for choice in (adapter, plain):
        with torch.inference_mode(), loaded.adapters.choose([choice]):
            logits = loaded.model(torch.arange(5, 20)[None]).logits
        if choice is adapter:
            expected = logits
    assert torch.equal(logits, expected)


def test_a_refused_or_dropped_adapter_leaves_a_model_without_layers_of_peft(loaded: Model, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(loaded.checkpoint, dtype=torch.float32).eval()
    modules, adapters = modules_of(model), Adapters(model)
    with pytest.raises(CheckpointError, match="makes NaN"):
        adapters.load(spoil(loaded, tmp_path / "bad", {}, filled(1e38)))
    assert modules_of(model) == modules
    kinds: tuple[dict[str, Any], ...] = (
        {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [3]},
        {"target_modules": ["embed_tokens"]},
    )
    for number, kind in enumerate(kinds):
        adapters.load(save_adapter(loaded.checkpoint, tmp_path / str(number), **kind))
        adapters.sweep()
        assert modules_of(model) == modules


def test_refused_adapters_keep_no_memory(loaded: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapters").mkdir()
    for number in range(50):
        edit = (filled(1e38), filled(float("nan")), lambda tensors: tensors.pop(f"{LAYER}.lora_B.weight"))[number % 3]
        spoil(loaded, tmp_path / "adapters" / f"bad{number}", {}, edit)
    read: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(torch.Tensor, "isfinite", _watch(torch.Tensor.isfinite, read))
    store = AdapterStore(loaded.adapters, {}, tmp_path, Path)
    assert len(store.names()) == 50
    gc.collect()
    assert len(read) >= 50
    assert not [reference for reference in read if reference() is not None]


def _watch(function: Any, seen: list[weakref.ref[torch.Tensor]]) -> Any:
    def watched(tensor: torch.Tensor) -> Any:
        seen.append(weakref.ref(tensor))
        return function(tensor)

    return watched


def test_refusals_leave_running_sequences_alone(loaded: Model, tmp_path: Path) -> None:
    bad = [
        spoil(loaded, tmp_path / str(number), change, edit)
        for number, (_, change, edit, _) in enumerate(FILES[:4] + FILES[-6:])
    ]
    good = save_adapter(loaded.checkpoint, tmp_path / "good", seed=9, target_modules="all-linear")
    started = Started(
        AutoModelForCausalLM.from_pretrained(loaded.checkpoint, dtype=torch.float32).eval(), ContinuousBatchingEngine
    )
    try:
        adapter = started.adapters.load(good)
        jobs = [(prompt, adapter if index % 2 else None) for index, prompt in enumerate(prompts(8))]
        found: list[list[int]] = []
        thread = threading.Thread(target=lambda: found.extend(started.run(*jobs)))
        thread.start()
        for folder in bad:
            with pytest.raises(CheckpointError):
                started.adapters.load(folder)
        thread.join()
        found += started.run(*jobs)
        expected = [generate_with(loaded.checkpoint, good if chosen else None, ids, NUM_TOKENS) for ids, chosen in jobs]
        assert found == expected * 2
    finally:
        started.engine.close()
