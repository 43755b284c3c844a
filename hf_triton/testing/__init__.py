# SPDX-License-Identifier: Apache-2.0
"""Helps to test served models: a real server, tiny checkpoints, a loopback Hub, and ways to damage checkpoints.

Nothing here accesses the network or needs a GPU:

    import os, subprocess, sys
    from pathlib import Path

    from hf_triton.testing import LoopbackHub, build_tiny_checkpoint

    def test_first_download_survives_a_busy_hub(tmp_path: Path) -> None:
        checkpoint = build_tiny_checkpoint(tmp_path / "checkpoint", "falcon")
        with LoopbackHub() as hub:
            hub.add("tiiuae/falcon-7b", checkpoint)
            hub.fail(status=503, times=2, path="config.json")
            environment = os.environ | hub.environment() | {"HF_HOME": str(tmp_path / "hf")}
            download = "import huggingface_hub as h; h.snapshot_download('tiiuae/falcon-7b')"
            subprocess.run([sys.executable, "-c", download], env=environment, check=True)

torch and transformers are imported when a checkpoint is built.
"""

from hf_triton.server import TritonServer
from hf_triton.testing.checkpoints import (
    ARCHITECTURES,
    ENCODER_TASKS,
    build_tiny_checkpoint,
    build_tiny_encoder,
)
from hf_triton.testing.damage import add_tensor, drop_tensor, flip_bit, reshape_tensor, truncate
from hf_triton.testing.hub import HubRequest, LoopbackHub

__all__ = [
    "ARCHITECTURES",
    "ENCODER_TASKS",
    "HubRequest",
    "LoopbackHub",
    "TritonServer",
    "add_tensor",
    "build_tiny_checkpoint",
    "build_tiny_encoder",
    "drop_tensor",
    "flip_bit",
    "reshape_tensor",
    "truncate",
]
