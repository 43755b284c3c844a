# SPDX-License-Identifier: Apache-2.0
"""The continuous engine on a checkpoint in FP8, which the library's own loader reads from a disk.

    python benchmarks/gpu/fp8.py llama-3-8b --out FOLDER

The weights of engine.py's model, with a scale for each output, as `*-FP8-dynamic` checkpoints have them: beside its
figures, those of FP8 are under the name of the model with `-fp8`. `of_bound` counts the bytes that FP8 takes. Needs the
package `compressed-tensors`; a device that does not multiply FP8 matrices has the weights widened.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from engine import SMALL, Plan, Run, started
from figures import Figures, copy_bytes_per_s, matmul_flops, read_options, release
from models import CONFIGS, build_decoder, weight_bytes
from safetensors.torch import save_file

from hf_triton.hub.pretrained import load_config, load_model
from hf_triton.runner.cuda import fuse
from hf_triton.sampling.params import SamplingParams
from hf_triton.settings import ModelSettings

SHARED: dict[str, Any] = {"group_size": None, "num_bits": 8, "symmetric": True, "type": "float"}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": SHARED | {"dynamic": False, "strategy": "channel"},
            "input_activations": SHARED | {"dynamic": True, "strategy": "token"},
        }
    },
}


@torch.inference_mode()
def save(model: Any, folder: Path) -> None:
    """The model, the linear layers of its decoder in FP8."""
    states, largest = model.state_dict(), torch.finfo(torch.float8_e4m3fn).max
    for name, layer in model.model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            scale = layer.weight.abs().amax(1, keepdim=True) / largest
            states[f"model.{name}.weight"] = (layer.weight / scale).to(torch.float8_e4m3fn)
            states[f"model.{name}.weight_scale"] = scale
    if model.config.tie_word_embeddings:
        del states["lm_head.weight"]
    states = {name: each.contiguous() for name, each in states.items()}
    save_file(states, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | {"quantization_config": QUANTIZATION}))


def load(folder: Path, device: torch.device) -> Any:
    settings = ModelSettings(huggingface_model=str(folder), dtype="bfloat16")
    return load_model(folder, load_config(folder, settings), settings, {"": str(device)}).eval()


def main(options: Namespace) -> None:
    figures, device, plan = Figures("engine", options.out), options.device, SMALL if options.small else Plan()
    name = f"{options.model}-fp8"
    if find_spec("compressed_tensors") is None:
        figures.add(model=name, name="weights", skipped="compressed-tensors is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        save(build_decoder(options.model, device), Path(folder))
        release()
        model = load(Path(folder), device)
    layer = model.model.layers[0].mlp.up_proj
    figures.add(model=name, name="weights", gb=weight_bytes(model) / 1e9, computed_by=type(layer).__name__)
    fuse(model)
    bounds = copy_bytes_per_s(device), matmul_flops(device)
    with started(figures, model, name, plan, "start") as (engine, meter):
        run = Run(figures, model, name, engine, meter, plan, *bounds)
        for count, num_tokens in plan.decodes:
            run.decode(count, num_tokens, SamplingParams(plan.max_new_tokens))
        run.prompt(plan.prompt_tokens)


if __name__ == "__main__":
    main(read_options(__doc__, tuple(CONFIGS)))
