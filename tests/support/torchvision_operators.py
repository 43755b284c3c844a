# SPDX-License-Identifier: Apache-2.0
# Stands before torchvision/__init__.py in .venv/torchvision (see the Makefile): the operators of a build for CUDA
# cannot be loaded beside torch for a CPU, and the import wants their declarations. Image processors call none of them.
import torch

_declarations = torch.library.Library("torchvision", "DEF")
for _name in (
    *("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d", "_roi_align_backward"),
    *("_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward", "_deform_conv2d_backward"),
):
    _declarations.define(f"{_name}(Tensor any) -> Tensor")
