# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Codex, as `make test-clients` installs it: it calls tools, sends back their outputs, and is answered."""

import json
from pathlib import Path

import pytest

from tests.support.clients import CLIENTS, has, run
from tests.support.gateway import GatewayThread

CONFIG = """model = "writes"
model_provider = "triton"
[model_providers.triton]
name = "Triton"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


@pytest.mark.parametrize("times", [1, 2])
def test_codex_runs_a_command_and_answers(agents: GatewayThread, tmp_path: Path, times: int) -> None:
    """The model writes what it is told to: a call of the tool whose output tells it what to write next."""
    program = has(CLIENTS / "codex" / "node_modules" / ".bin" / "codex")
    home, project = tmp_path / "home", tmp_path / "project"
    for folder in (home, project):
        folder.mkdir()
    (home / "config.toml").write_text(CONFIG.format(url=agents.url))
    told = "say:</think>Done."
    for number in range(times):
        (project / f"{number}.txt").write_text(told)
        call = json.dumps({"name": "exec_command", "arguments": {"cmd": f"cat {number}.txt"}})
        told = f"say:I look.</think><tool_call>\n{call}\n</tool_call>"
    command = [str(program), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", told]
    printed = run(command, project, HOME=str(home), CODEX_HOME=str(home))
    assert printed.splitlines()[-1] == "Done."
