# SPDX-License-Identifier: Apache-2.0
"""What blocks of GGUF files hold is what the package gguf makes of them."""

import gguf
import numpy as np
import pytest
import torch

from hf_triton.hub.gguf_blocks import FORMATS, take_apart
from tests.support.gguf import random_blocks


@pytest.mark.parametrize("name", FORMATS)
def test_groups_are_the_weights_of_blocks(name: str) -> None:
    kind, own = gguf.GGMLQuantizationType[name], FORMATS[name]
    assert (own.per_block, own.num_bytes) == gguf.GGML_QUANT_SIZES[kind]
    blocks = random_blocks((6, 1024), kind)
    groups = take_apart(torch.from_numpy(blocks), own.kind)
    assert groups.scales.shape == (6, 1024 // own.group)
    assert (groups.minimums is not None) is own.has_minimums
    assert int(groups.codes.max()) < 1 << own.bits
    weights = (groups.codes.float() - own.zero).view(6, -1, own.group) * groups.scales[..., None]
    if groups.minimums is not None:
        weights += groups.minimums[..., None]
    assert np.array_equal(weights.view(6, 1024).numpy(), gguf.dequantize(blocks, kind))
    assert own.kept_bytes(1024) == 1024 * own.bits // 8 + 1024 // own.group * (4 if own.has_minimums else 2)
