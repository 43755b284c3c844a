# SPDX-License-Identifier: Apache-2.0
"""The probe at load: only right ways pass, by logits, and the model is afterwards as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama import modeling_llama

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.runner import way_probe
from hf_triton.runner.model_runner import Way
from hf_triton.runner.way_probe import find_way
from hf_triton.sampling.params import SamplingParams
from tests.support.architectures import BASE, CONTINUOUS, build, load
from tests.support.engine import Client, check, prompts, start_engine
from tests.support.marks import full
from tests.support.reference import solo_ids

PACKED, TORCH, GATHERED = Way(), Way(calls_torch=True), Way(gathers=True)
ITEMS = [([token % 300 for token in prompt], SamplingParams(8)) for prompt in prompts(5, seed=1)]


def llama(**changes: Any) -> Any:
    return build("LlamaConfig", BASE | changes)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("falcon", TORCH),
        ("deepseek-v3", GATHERED),
        ("jamba", PACKED),
        ("gemma4", PACKED),
        ("gpt-neo", None),
        ("bloom", None),
        ("mpt", None),
        ("falcon-rw", None),
    ],
)
def test_the_first_right_way_is_taken(name: str, way: Way | None, tmp_path: Path) -> None:
    assert find_way(load(name, tmp_path)).way == way


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, PACKED) for name in ("falcon", "falcon-40b", "falcon-rw", "gpt-neo", "bloom", "mpt", "deepseek-v3")]
    + [(name, TORCH) for name in ("llama", "deepseek-v3")],
)
def test_a_wrong_way_is_refused(name: str, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way_probe, "WAYS", (way,))
    assert find_way(load(name, tmp_path)).way is None


class OwnAttention(modeling_llama.LlamaAttention):
    """As code that comes with a checkpoint may be: it calls torch, with heads as the batch."""

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None, **others: Any
    ) -> Any:
        cache = others.get("cache", others.get("past_key_values"))
        shape = *hidden_states.shape[:-1], -1, self.head_dim
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        key, value = (modeling_llama.repeat_kv(each, self.num_key_value_groups) for each in (key, value))
        columns = torch.arange(key.shape[2])
        seen = columns[None] <= columns[-query.shape[2] :, None]
        if attention_mask is not None and attention_mask.shape[-1] == key.shape[2]:
            seen = seen & attention_mask[0, 0].bool()
        output = scaled_dot_product_attention(query[0], key[0], value[0], attn_mask=seen)
        return self.o_proj(output.transpose(0, 1).reshape(*hidden_states.shape[:-1], -1)), None


def test_code_of_a_checkpoint_that_attends_in_its_own_way_runs_in_the_batch_engine() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnAttention
    assert find_way(model).way is None
    engine = start_engine(model, max_num_seqs=3, context_length=256)
    try:
        assert isinstance(engine, BatchEngine)
        check(model, Client(engine), ITEMS)
    finally:
        engine.close()


@pytest.mark.parametrize("implementation", ["sdpa", *full("eager")])
@pytest.mark.parametrize("name", ["gemma", "mistral-window", "deepseek-v3", "lfm2", "gpt-neo"])
def test_the_model_is_as_it_was(name: str, implementation: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    model.set_attn_implementation(implementation)
    before = observed(model)
    assert (find_way(model).way is None) == (name == "gpt-neo")
    assert observed(model) == before


def observed(model: Any) -> tuple[set[str], list[list[int]]]:
    implementations = {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}
    return implementations, [solo_ids(model, prompt, 12) for prompt, _ in ITEMS[:2]]


def test_a_model_that_fails_in_a_step_is_as_it_was() -> None:
    model = llama()
    failing = model.model.layers[1].register_forward_pre_hook(fail_in_a_step)
    assert find_way(model).way is None
    failing.remove()
    assert model.config._attn_implementation == "sdpa"
    assert find_way(model).way == PACKED


def fail_in_a_step(layer: Any, _: object) -> None:
    if layer.self_attn.config._attn_implementation != "sdpa":
        raise ValueError("not my attention")


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3.5"])
def test_layers_on_the_disk_run_continuously(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path) if name == "llama" else build(*CONTINUOUS[name])
    expected = [solo_ids(model, prompt, params.max_new_tokens) for prompt, params in ITEMS]
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model = dispatch_model(
        model,
        device_map=places | {"model.layers.0": "cpu", "model.layers.1": "disk"},
        main_device="cpu",
        offload_dir=str(tmp_path / "offload"),
        force_hooks=True,
    )
    engine = start_engine(model, max_num_seqs=3, context_length=256)
    try:
        assert isinstance(engine, ContinuousBatchingEngine)
        check(model, Client(engine), ITEMS, expected=expected)
    finally:
        engine.close()
