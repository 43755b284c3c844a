# SPDX-License-Identifier: Apache-2.0
"""Loads a model in ranks: refuses what cannot be, starts ranks 1 to N-1, and is what each of them runs.

transformers gives each rank its share of a snapshot, by the model's own plan for tensor parallelism.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import CheckpointError, SettingsError
from hf_triton.hub.imports import import_transformers
from hf_triton.runner.cpu import accelerate
from hf_triton.runner.device import DeviceContext
from hf_triton.runner.ranks.following import Orders, run_rank
from hf_triton.runner.ranks.processes import Ranks, join_group
from hf_triton.settings import ModelSettings

MODULE: Final = "hf_triton.hub.ranks"
NOT_DIVIDED: Final = "replicated", "all_reduce", "mla", "sequence"
"""Beginnings of the styles of a plan that leave each rank all of a weight."""


def check_ranks(folder: Path, config: Any, settings: ModelSettings, *, is_on_cpu: bool) -> None:
    """Refuse a model that cannot be loaded in ranks.

    Raises:
        CheckpointError: The sentence says why, and what to do.
    """
    from hf_triton.hub.pretrained import gguf_of, is_quantized

    size, text = settings.tensor_parallel_size, config.get_text_config()
    heads = {
        "attention heads": getattr(text, "num_attention_heads", None),
        "heads of keys and values": getattr(text, "num_key_value_heads", None),
    }
    uneven = next((f"{num} {name}" for name, num in heads.items() if isinstance(num, int) and num % size), None)
    obstacle = None
    if gguf_of(folder, settings):
        obstacle = "a GGUF file is not divided: name the repository with the original safetensors"
    elif is_quantized(config):
        obstacle = "a quantised checkpoint is not divided: name the original"
    elif config.is_encoder_decoder or not getattr(text, "base_model_tp_plan", None):
        obstacle = f"transformers has no plan that divides a {type(config).__name__.removesuffix('Config')} model"
    elif uneven is not None:
        obstacle = f"its {uneven} cannot be divided by {size}"
    elif not is_on_cpu:
        import torch

        if torch.cuda.device_count() < size:
            obstacle = f"PyTorch {torch.__version__} sees {torch.cuda.device_count()} GPUs"
    if obstacle is not None:
        raise CheckpointError(
            "unsupported_model",
            f"tensor_parallel_size {size} cannot be for {settings.huggingface_model}: {obstacle}; or leave "
            "tensor_parallel_size out: KIND_MODEL then spreads the layers over all GPUs",
        )


def check_placement(settings: ModelSettings, kind: str, num_instances: int) -> None:
    """Refuse ranks on another placement than one of KIND_MODEL.

    Raises:
        SettingsError: The sentence says what to write.
    """
    if kind != "MODEL" or num_instances > 1:
        found = f"KIND_{kind}" if kind != "MODEL" else f"count {num_instances}"
        raise SettingsError(
            f"tensor_parallel_size {settings.tensor_parallel_size} needs one instance that chooses its own devices, "
            f"and the folder has {found}: write instance_group [{{ kind: KIND_MODEL, count: 1 }}] into config.pbtxt"
        )


def check_own_parts(settings: ModelSettings, model_folder: Path, *, has_own_load: bool, task: str | None) -> None:
    """Refuse what the other ranks would not have: a task without steps, a model that the folder's code changes.

    Raises:
        SettingsError: The folder has it.
    """
    obstacle = None
    if task is not None:
        obstacle = "divides models that generate text alone, and the folder's task is another"
    elif has_own_load:
        obstacle = "divides the checkpoint as it is, and the folder's hook load may change it"
    elif any(path.is_dir() for path in (model_folder / "adapters").glob("*")):
        obstacle = "cannot be together with LoRA adapters, and the folder has some in adapters/"
    if obstacle is not None:
        raise SettingsError(f"tensor_parallel_size {settings.tensor_parallel_size} {obstacle}: leave one of them out")


def start_ranks(folder: Path, model_folder: Path, settings: ModelSettings) -> Ranks:
    """Start ranks 1 to N-1; they load their parts while rank 0 loads its own.

    Raises:
        CheckpointError: The model cannot be divided, or they do not start.
    """
    import torch

    from hf_triton.hub.pretrained import load_config

    check_ranks(folder, load_config(folder, settings), settings, is_on_cpu=not torch.cuda.is_available())
    names = settings.model_fields_set & ModelSettings.model_fields.keys()
    values = {name: getattr(settings, name) for name in names}  # not those of a folder's own class

    def environment(rank: int) -> dict[str, str]:
        return {**os.environ, "LOCAL_RANK": str(rank)}

    return Ranks(settings.tensor_parallel_size, MODULE, environment, (values, folder, model_folder))


def _load(orders: Orders, store: str, size: int, values: dict[str, Any], folder: Path, model_folder: Path) -> Any:
    settings = ModelSettings(**values)
    import_transformers([model_folder, folder], settings)
    from hf_triton.hub.pretrained import load_config, load_model, silence_transformers

    silence_transformers()
    orders.tell("answer")
    join_group(store, int(os.environ["LOCAL_RANK"]), size)
    with DeviceContext():
        import torch

        device_map = "auto" if torch.cuda.is_available() else {"": "cpu"}
        model = load_model(folder, load_config(folder, settings), settings, device_map).eval()
    accelerate(model, pack_weights=False)
    orders.tell("answer", describe(model))
    return model


def rank_bytes(model: Any, size: int) -> int:
    """Bytes of a rank's part of a whole model's weights, by the plan for its division."""
    total = 0
    for name, tensor in model.named_parameters():
        rule = re.sub(r"\.\d+(?=\.)", ".*", name)
        style = model.tp_plan.get(rule) or model.tp_plan.get(rule.rpartition(".")[0]) or NOT_DIVIDED[0]
        total += tensor.nbytes if style.startswith(NOT_DIVIDED) else -(-tensor.nbytes // size)
    return total


def describe(model: Any) -> str:
    """What all ranks must have loaded alike."""
    return f"{type(model).__name__} in {model.dtype}, attention {model.config._attn_implementation}"


if __name__ == "__main__":
    run_rank(int(sys.argv[2]), _load)
