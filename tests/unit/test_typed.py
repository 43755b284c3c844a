# SPDX-License-Identifier: Apache-2.0
"""Messages name the command as it was typed."""

from pathlib import Path

import pytest

from hf_triton_cli.typed import as_typed


@pytest.mark.parametrize(("on_path", "shown"), [(True, "`hf-triton load NAME`"), (False, "`{} load NAME`")])
def test_a_command_in_a_message_can_be_copied(
    on_path: bool, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "hf-triton"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(program)])
    monkeypatch.setenv("PATH", str(tmp_path) if on_path else "/nowhere")
    assert as_typed("Ready: `hf-triton load NAME` loads one") == f"Ready: {shown.format(program)} loads one"
