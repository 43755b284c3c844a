# SPDX-License-Identifier: Apache-2.0
"""Packed weights on the real server: the default, what `pack_weights` false does, and the same texts by both."""

from collections.abc import Callable
from pathlib import Path

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import generate
from tests.support.reference import load_reference


def test_weights_are_packed_unless_the_folder_says_no(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "checkpoint", "falcon")
    make_folder(tmp_path / "repository", "packed", huggingface_model=checkpoint)
    make_folder(tmp_path / "repository", "plain", huggingface_model=checkpoint, pack_weights="false")
    with TritonServer(tmp_path / "repository", exit_on_error=True) as server:
        replies = [generate(server, name, "I am going", max_new_tokens=12) for name in ("packed", "plain")]
        log = server.read_log()
    wanted = load_reference(checkpoint).text("I am going", 12)
    assert [reply.json()["text_output"] for reply in replies] == [wanted, wanted]
    assert [line for line in log.splitlines() if "packed: " in line and "linear layers packed for oneDNN" in line]
    assert not [line for line in log.splitlines() if "plain: " in line and "oneDNN" in line]
