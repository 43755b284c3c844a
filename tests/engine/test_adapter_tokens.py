# SPDX-License-Identifier: Apache-2.0
"""Each token of a packed forward has its own adapter: as that adapter alone computes the token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from transformers import AutoModelForCausalLM

from hf_triton.errors import CheckpointError
from hf_triton.runner.calling import cache_name
from hf_triton.runner.lora.model_adapters import Adapter, Adapters
from hf_triton.testing import build_tiny_checkpoint
from tests.support.adapters import save_adapter
from tests.support.architectures import CONTINUOUS, build
from tests.support.sentence_checkpoints import quietly

Keys = list[str | None]
Shape = Callable[[torch.Tensor], torch.Tensor]

SHAPES: Final[dict[str, Shape]] = {
    "packed": lambda tokens: tokens[None],
    "rows of one token": lambda tokens: tokens[:, None],
    "two-dimensional": lambda tokens: tokens,
    "latents": lambda tokens: tokens[None, None],
}
"""The shapes in which layers see tokens `[n, size]`, or ids `[n]`."""
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "linear": ("llama", {"target_modules": "all-linear"}),
    "bias": ("llama", {"target_modules": "all-linear", "lora_bias": True}),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "trained embedding and head": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "trained tokens": ("llama", {"trainable_token_indices": [0, 1, 4, 9]}),
    "trained tokens of a tied head": ("gpt2", {"target_modules": ["c_attn"], "trainable_token_indices": [0, 1, 4, 9]}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return build_tiny_checkpoint(folder, "llama", eos_token_id=None, tie_word_embeddings=False)


def load(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def save_model(name: str, folder: Path) -> Path:
    """A tiny checkpoint of another architecture."""
    build(*CONTINUOUS[name]).save_pretrained(folder)
    return folder


def load_two(model: Any, checkpoint: Path, folder: Path, **config: Any) -> tuple[Adapters, list[Adapter | None]]:
    """A model's adapters: none, and two random ones."""
    adapters = Adapters(model)
    two = [
        adapters.load(save_adapter(checkpoint, folder / str(seed), seed=seed, r=seed + 2, **config)) for seed in (1, 2)
    ]
    return adapters, [None, *two]


def keys_of(chosen: list[Adapter | None]) -> Keys:
    return [adapter.key if adapter else None for adapter in chosen]


def adapted_layers(model: Any) -> dict[str, Any]:
    return {
        name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer | AuxiliaryTrainingWrapper)
    }


def input_of(layer: Any, num_tokens: int) -> torch.Tensor:
    """Ids `[n]` for an embedding, numbers `[n, size]` for a linear layer."""
    own: Any = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer.original_module
    if isinstance(own, torch.nn.Embedding):
        return torch.arange(num_tokens) % own.num_embeddings
    size = own.in_features if isinstance(own, torch.nn.Linear) else own.weight.shape[0]
    return torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(num_tokens))


def one_by_one(adapters: Adapters, layer: Any, tokens: torch.Tensor, chosen: list[Adapter | None]) -> torch.Tensor:
    """What a layer computes of each token by itself, `[n, size]`."""
    outputs = []
    for token, adapter in zip(tokens, chosen, strict=True):
        with adapters.choose([adapter]):
            outputs.append(layer(token[None])[0])
    return torch.stack(outputs)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_each_layer_applies_each_tokens_adapter(kind: str, tmp_path: Path) -> None:
    architecture, config = KINDS[kind]
    checkpoint = build_tiny_checkpoint(
        tmp_path / "base", architecture, eos_token_id=None, tie_word_embeddings="tied" in kind
    )
    model = load(checkpoint)
    adapters, three = load_two(model, checkpoint, tmp_path, **config)
    layers = adapted_layers(model)
    assert layers
    tokens = [three[at] for at in (0, 1, 1, 2, 0, 0, 2, 1, 1, 1, 2)]
    logits = [three[at] for at in (2, 0, 1)]
    gathered = [three[at] for at in (1, 1, 0, 2, 2)]
    for name, layer in layers.items():
        for chosen in (tokens, logits, gathered):
            x = input_of(layer, len(chosen))
            expected = one_by_one(adapters, layer, x, chosen)
            assert not torch.allclose(expected, one_by_one(adapters, layer, x, [None] * len(x)), atol=1e-3), name
            for shape in SHAPES.values():
                with adapters.choose_tokens(keys_of(tokens), keys_of(logits), keys_of(gathered)):
                    output = layer(shape(x))
                assert output.shape == shape(expected).shape
                assert_equal(output, shape(expected))


@torch.inference_mode()
def test_sequences_of_a_forward_have_their_adapters(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    config = {"target_modules": "all-linear", "modules_to_save": ["embed_tokens", "lm_head"]}
    adapters, three = load_two(model, llama, tmp_path, **config)
    keys = keys_of(three)
    token_ids = torch.arange(3, 24).view(3, 7)  # rows, which attention keeps apart without an engine
    with adapters.choose_tokens([key for key in keys for _ in range(7)], [key for key in keys for _ in range(2)]):
        logits = model(token_ids, logits_to_keep=2).logits
    with adapters.choose_tokens(keys, keys):
        first = model(token_ids[:, :1]).logits
    for row, adapter in enumerate(three):
        with adapters.choose([adapter]):
            expected = model(token_ids[row : row + 1]).logits[0]
        assert_equal(logits[row], expected[-2:])
        assert_equal(first[row], expected[:1])


@torch.inference_mode()
def test_one_adapter_of_all_tokens_is_chosen_at_once(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    adapters, (_, adapter, _) = load_two(model, llama, tmp_path, target_modules="all-linear")
    token_ids = torch.arange(3, 12)[None]
    for chosen in (adapter, None):
        with adapters.choose([chosen]):
            expected = model(token_ids).logits
        with adapters.choose_tokens(keys_of([chosen]), keys_of([chosen]), []):  # names of no layer's length
            assert torch.equal(model(token_ids).logits, expected)


@torch.inference_mode()
def test_a_step_may_compute_no_logits(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    adapters, three = load_two(model, llama, tmp_path, modules_to_save=["lm_head"])
    with adapters.choose_tokens(keys_of(three), []):
        assert model(torch.arange(3, 6)[None], logits_to_keep=torch.tensor([], dtype=torch.int64)).logits.shape[1] == 0


@torch.inference_mode()
def test_tokens_without_names_are_an_error(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    adapters, three = load_two(model, llama, tmp_path)
    keys = keys_of(three)
    token_ids = torch.arange(3, 10)[None]
    before = model(token_ids).logits
    with (
        pytest.raises(RuntimeError, match=r"\[1, 7, 64\] of model\.layers\.0\.self_attn\.q_proj: there are 6 or 3"),
        adapters.choose_tokens(keys * 2, keys),
    ):
        model(token_ids)
    with pytest.raises(ValueError, match="two lists of 3 adapters differ"), adapters.choose_tokens(keys, keys[::-1]):
        pass
    assert torch.equal(model(token_ids).logits, before)


@pytest.mark.parametrize("architecture", ["qwen3-next", "opt"])
@torch.inference_mode()
def test_layers_that_see_flattened_rows_apply_each_tokens_adapter(architecture: str, tmp_path: Path) -> None:
    if architecture == "opt":
        checkpoint = build_tiny_checkpoint(tmp_path / "base", architecture, eos_token_id=None)
        config = {"target_modules": ["fc1", "fc2"]}
    else:
        checkpoint = save_model(architecture, tmp_path / "base")
        config = {"target_modules": ["shared_expert_gate", "in_proj_qkvz", "q_proj"]}
    model = load(checkpoint)
    adapters, three = load_two(model, checkpoint, tmp_path, **config)
    token_ids = torch.arange(3, 24).view(3, 7)
    keys = [key for key in keys_of(three) for _ in range(7)]
    with adapters.choose_tokens(keys, keys):
        by_token = model(token_ids, use_cache=False).logits
    with adapters.choose(three):
        by_row = model(token_ids, use_cache=False).logits
    for row, adapter in enumerate(three):
        with adapters.choose([adapter]):
            expected = model(token_ids[row : row + 1], use_cache=False).logits[0]
        assert_equal(by_token[row], expected)
        assert_equal(by_row[row], expected)


@torch.inference_mode()
def test_cached_latents_have_the_adapters_of_their_sequences(tmp_path: Path) -> None:
    checkpoint = save_model("deepseek-v3", tmp_path / "base")
    model = load(checkpoint)
    config = {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "lm_head"]}
    adapters, three = load_two(model, checkpoint, tmp_path, **config)
    keys = keys_of(three)
    token_ids = torch.arange(3, 27).view(3, 8)
    prompt = [key for key in keys for _ in range(7)]
    with adapters.choose_tokens(prompt, keys):
        output = model(token_ids[:, :7], use_cache=True, logits_to_keep=1)
    with adapters.choose_tokens(keys, keys, [key for key in keys for _ in range(8)]):
        logits = model(token_ids[:, 7:], **{cache_name(model): output[cache_name(model)]}).logits
    for row, adapter in enumerate(three):
        with adapters.choose([adapter]):
            assert_equal(logits[row], model(token_ids[row : row + 1]).logits[0, -1:])


class Mixture(torch.nn.Module):
    """Experts that are layers of their own: each sees the tokens that choose it."""

    def __init__(self, size: int, name: str) -> None:
        super().__init__()
        self._name = name
        experts = torch.nn.ModuleList(torch.nn.Linear(size, size, bias=False) for _ in range(3))
        self.add_module(name, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(x)
        choices = x[..., :3].argmax(-1)
        for number, expert in enumerate(self.get_submodule(self._name).children()):
            output[choices == number] = expert(x[choices == number])
        return output


def load_mixture(checkpoint: Path, name: str) -> Any:
    model = load(checkpoint)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.model.layers[0].mlp = Mixture(model.config.hidden_size, name)
    return model


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("experts", r"changes model\.layers\.0\.mlp\.experts\.\d: experts of a mixture are not served"),
        ("branches", r"no adapter names for the input \[\d, 64\] of model\.layers\.0\.mlp\.branches\.\d: there are 10"),
    ],
)
def test_adapters_of_layers_that_see_some_tokens_are_refused(
    name: str, words: str, llama: Path, tmp_path: Path
) -> None:
    targets = [f"model.layers.0.mlp.{name}.{number}" for number in range(3)]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    with quietly():
        get_peft_model(load_mixture(llama, name), config).save_pretrained(str(tmp_path))
    with pytest.raises(CheckpointError, match=words):
        Adapters(load_mixture(llama, name)).load(tmp_path)
