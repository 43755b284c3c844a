# SPDX-License-Identifier: Apache-2.0
"""Which engine runs a model is tried at load; what no engine can run is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, WatermarkingConfig

from hf_triton.engine.batch_engine import BatchEngine
from hf_triton.engine.choose import UNSUPPORTED_SETTINGS, UNSUPPORTED_WARPERS
from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.errors import CheckpointError
from hf_triton.sampling.params import SamplingParams
from hf_triton.testing import build_tiny_checkpoint
from tests.support.architectures import BASE, CONTINUOUS, HEADS, WINDOWS, build
from tests.support.engine import Client, check, prompts, start_engine

LLAMA4 = CONTINUOUS["llama4"][1]


def is_continuous(model: Any, context_length: int = 256) -> bool:
    engine = start_engine(model, max_num_seqs=4, context_length=context_length)
    engine.close()
    return isinstance(engine, ContinuousBatchingEngine)


@pytest.mark.parametrize(
    ("name", "value", "engine"),
    [
        ("min_new_tokens", 5, ContinuousBatchingEngine),
        ("min_p", 0.1, ContinuousBatchingEngine),
        ("prompt_lookup_num_tokens", 3, ContinuousBatchingEngine),
        ("repetition_penalty", 0.01, ContinuousBatchingEngine),
        ("suppress_tokens", [9], BatchEngine),
        ("encoder_repetition_penalty", 2.0, BatchEngine),
        ("min_length", 50, BatchEngine),
        ("forced_eos_token_id", 0, BatchEngine),
        ("forced_eos_token_id", 1, BatchEngine),
        ("max_time", 1.0, BatchEngine),
        ("remove_invalid_values", True, BatchEngine),
    ],
)
def test_checkpoint_settings_that_only_generate_has_need_the_batch_engine(
    name: str, value: object, engine: type, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.generation_config, name, value)
    built = start_engine(llama, max_num_seqs=4, context_length=4096)
    built.close()
    assert isinstance(built, engine)


@pytest.mark.parametrize("name", UNSUPPORTED_SETTINGS + UNSUPPORTED_WARPERS)
def test_settings_that_no_engine_supports_are_refused_at_load(
    name: str, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = WatermarkingConfig() if name == "watermarking_config" else 0.1
    monkeypatch.setattr(llama.generation_config, name, value)
    if name in UNSUPPORTED_WARPERS:  # which change nothing of a checkpoint that does not sample
        start_engine(llama, engine="batch", max_num_seqs=4, context_length=4096).close()
        monkeypatch.setattr(llama.generation_config, "do_sample", True)
    for engine in ("auto", "batch"):
        with pytest.raises(CheckpointError, match=name):
            start_engine(llama, engine=engine, max_num_seqs=4, context_length=4096)


def test_cuda_graphs_without_a_gpu_are_refused_at_load(llama: Any) -> None:
    with pytest.raises(CheckpointError, match="decoding cuda_graphs needs a GPU"):
        start_engine(llama, engine="continuous", max_num_seqs=4, context_length=4096, decoding="cuda_graphs")


@pytest.mark.parametrize("settings", [{"stop_strings": ["."]}, {"penalty_alpha": 0.6, "top_k": 4}], ids=str)
def test_a_model_that_cannot_generate_is_refused_at_load(tmp_path: Path, settings: dict[str, object]) -> None:
    build_tiny_checkpoint(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    model.generation_config.update(**settings)
    with pytest.raises(CheckpointError, match=r"unsupported_model: transformers cannot generate with this model \("):
        start_engine(model, max_num_seqs=4, context_length=128)


def test_a_model_whose_positions_depend_on_its_batch_runs_alone(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    build_tiny_checkpoint(tmp_path, "llama", eos_token_id=None, rope_parameters=rope, max_position_embeddings=32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    engine = start_engine(model, max_num_seqs=8, context_length=128)
    check(model, Client(engine), [(prompt, SamplingParams(30)) for prompt in prompts(6, seed=11, longest=50)])
    engine.close()


MOSHI = BASE | HEADS | {"ffn_dim": 64, "audio_vocab_size": 300}


@pytest.mark.parametrize(
    ("name", "context_length", "expected"),
    [
        (("Gemma3TextConfig", BASE | HEADS | WINDOWS | {"use_bidirectional_attention": True}), 256, False),
        (("Llama4TextConfig", LLAMA4 | {"floor_scale": 32}), 256, False),
        (("Llama4TextConfig", LLAMA4 | {"floor_scale": 32}), 31, True),
        (("MoshiConfig", MOSHI | {"sliding_window": 32}), 33, False),
        (("MoshiConfig", MOSHI | {"sliding_window": 32}), 32, True),
    ],
    ids=[
        *("bidirectional", "llama4 beyond its floor_scale", "llama4 below it"),
        *("moshi beyond its window", "moshi within it"),
    ],
)
def test_models_whose_sequences_affect_each_other_are_not_continuous(
    name: Any, context_length: int, expected: bool
) -> None:
    assert is_continuous(build(*name), context_length) is expected


@pytest.mark.parametrize("engine", ["auto", "batch"])
def test_a_model_whose_logits_are_nan_is_refused(engine: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny_checkpoint(tmp_path, "llama")).eval()
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = float("nan")  # as of a config that says so
    with pytest.raises(CheckpointError, match="the model's logits are NaN for every prompt in float32: look for"):
        start_engine(model, engine, max_num_seqs=4, context_length=256)
