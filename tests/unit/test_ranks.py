# SPDX-License-Identifier: Apache-2.0
"""What cannot be in ranks is refused, with what to do in its place."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_triton.errors import CheckpointError, SettingsError
from hf_triton.settings import ModelSettings, load_settings


def settings(size: int = 2, **values: Any) -> ModelSettings:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    parameters = {"huggingface_model": "a/model", "tensor_parallel_size": str(size), **texts}
    return load_settings(parameters, {}, ModelSettings).settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adapters", {"sql": "someone/sql"}),
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("weights", "int4"),
        ("gguf_file", "Q4_K_M"),
        ("load_format", "dummy"),
        ("engine", "batch"),
        ("pack_weights", True),
        ("task", "embeddings"),
    ],
)
def test_settings_that_cannot_be_together_with_ranks(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"leave out {name}, or tensor_parallel_size"):
        settings(**{name: value})


@pytest.mark.parametrize(
    ("kind", "count", "found"), [("GPU", 1, "KIND_GPU"), ("CPU", 1, "KIND_CPU"), ("MODEL", 2, "count 2")]
)
def test_placement_is_one_instance_of_kind_model(kind: str, count: int, found: str) -> None:
    from hf_triton.hub.ranks import check_placement

    with pytest.raises(SettingsError, match=f"has {found}: write instance_group .*KIND_MODEL"):
        check_placement(settings(), kind, count)


def test_folder_with_a_hook_another_task_or_adapters_is_refused(tmp_path: Path) -> None:
    from hf_triton.hub.ranks import check_own_parts

    check_own_parts(settings(), tmp_path, has_own_load=False, task=None)
    with pytest.raises(SettingsError, match="hook load"):
        check_own_parts(settings(), tmp_path, has_own_load=True, task=None)
    with pytest.raises(SettingsError, match="task"):
        check_own_parts(settings(), tmp_path, has_own_load=False, task="AutoModel")
    (tmp_path / "adapters" / "sql").mkdir(parents=True)
    with pytest.raises(SettingsError, match="LoRA"):
        check_own_parts(settings(), tmp_path, has_own_load=False, task=None)


PLAN = {"layers.*.self_attn.q_proj": "colwise"}


@pytest.mark.parametrize(
    ("values", "size", "reason"),
    [
        ({"base_model_tp_plan": None}, 2, "no plan that divides a Tiny model"),
        ({"num_key_value_heads": 2}, 4, "2 heads of keys and values cannot be divided by 4"),
        ({"num_attention_heads": 9}, 3, "4 heads of keys"),
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "9 attention heads"),
        ({"quantization_config": {"quant_method": "gptq"}}, 2, "quantised"),
        ({"is_encoder_decoder": True}, 2, "no plan"),
    ],
)
def test_model_that_cannot_be_divided(values: dict[str, Any], size: int, reason: str, tmp_path: Path) -> None:
    from hf_triton.hub.ranks import check_ranks

    class TinyConfig(SimpleNamespace):
        def get_text_config(self) -> Any:
            return self

    plain: dict[str, Any] = {"base_model_tp_plan": PLAN, "num_attention_heads": 8, "num_key_value_heads": 4}
    plain |= {"is_encoder_decoder": False}
    check_ranks(tmp_path, TinyConfig(**plain), settings(), is_on_cpu=True)
    with pytest.raises(CheckpointError, match=f"{reason}.*or leave tensor_parallel_size out"):
        check_ranks(tmp_path, TinyConfig(**plain | values), settings(size), is_on_cpu=True)
