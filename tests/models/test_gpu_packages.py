# SPDX-License-Identifier: Apache-2.0
"""Packages with kernels that transformers takes wherever it can import them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.architectures import CONTINUOUS, build
from tests.support.paths import ROOT

LOAD = """
import sys
from pathlib import Path
import torch
from hf_triton.hub.pretrained import load_config, load_model
from hf_triton.settings import ModelSettings
folder = Path(sys.argv[1])
settings = ModelSettings(huggingface_model=str(folder))
model = load_model(folder, load_config(folder, settings), settings, {"": "cpu"})
print(model(torch.arange(9)[None]).logits.sum().item())
"""
PACKAGE = """
def refuse(*arguments, **options):
    raise RuntimeError("this kernel needs a GPU")

chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = causal_conv1d_fn = causal_conv1d_update = refuse
"""


@pytest.mark.full
def test_a_model_on_a_cpu_is_computed_without_them(tmp_path: Path) -> None:
    build(*CONTINUOUS["qwen3-next"]).save_pretrained(tmp_path / "model")
    for name in ("fla", "causal_conv1d"):
        (tmp_path / f"{name}.py").write_text(PACKAGE)
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path / "model")],
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert float(found.stdout)
