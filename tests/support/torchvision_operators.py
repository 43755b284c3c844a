# SPDX-License-Identifier: Apache-2.0
# Stands before torchvision/__init__.py in .venv/torchvision (see the Makefile): where its operators cannot be loaded,
# as those for CUDA beside torch for a CPU, the import wants declarations. Image processors call none of them.
from pathlib import Path

import torch

try:
    torch.ops.load_library(Path(__file__).parent / "_C.so")
except OSError:
    _declarations = torch.library.Library("torchvision", "DEF")
    for _name in (
        *("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"),
        *("_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward"),
        "_deform_conv2d_backward",
    ):
        _declarations.define(f"{_name}(Tensor any) -> Tensor")
