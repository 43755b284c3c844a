# SPDX-License-Identifier: Apache-2.0
"""Packed weights on the real server: `pack_weights` auto, true and false give the same completions."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_triton.testing import build_tiny_checkpoint
from tests.support.client import generate
from tests.support.reference import load_reference
from tests.support.standard import StandardServer


@pytest.mark.full
def test_pack_weights_auto_true_and_false(
    tmp_path: Path, make_folder: Callable[..., Path], standard: StandardServer
) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "checkpoint", "falcon")
    make_folder(tmp_path / "repository", "packed", huggingface_model=checkpoint, pack_weights="true")
    make_folder(tmp_path / "repository", "timed", huggingface_model=checkpoint)
    make_folder(tmp_path / "repository", "unpacked", huggingface_model=checkpoint, pack_weights="false")
    with standard.beside(tmp_path / "repository") as server:
        replies = [generate(server, name, "I am going", max_new_tokens=12) for name in ("packed", "timed", "unpacked")]
        log = server.read_log()
    wanted = load_reference(checkpoint).text("I am going", 12)
    assert [reply.json()["text_output"] for reply in replies] == [wanted] * 3
    assert [line for line in log.splitlines() if "packed: " in line and "linear layers packed for oneDNN" in line]
    assert [line for line in log.splitlines() if "timed: " in line and "chosen by timing" in line]
    assert not [line for line in log.splitlines() if "unpacked: " in line and "oneDNN" in line]
