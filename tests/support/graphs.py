# SPDX-License-Identifier: Apache-2.0
"""Model folders with a graph, as `hf-triton optimize` writes them."""

import os
from contextlib import closing
from pathlib import Path

from hf_triton.folders.candidates import Child
from hf_triton.folders.graph_folder import GraphWriter


def write_graph_folder(folder: Path, target: Path) -> Path:
    """What `hf-triton optimize` would write for a folder if ONNX Runtime was the fastest."""
    with closing(Child(Path(os.devnull), GraphWriter, folder)) as writer:
        made = writer.call("write", target, "onnx")
    assert made == "transformers.exporters, fused"
    return target
