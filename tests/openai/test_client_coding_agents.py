# SPDX-License-Identifier: Apache-2.0
"""Coding agents, as `make test-clients` installs them: they run commands, send back what was printed, and are answered.

Each has its own home folder, and what it asks of other servers is switched off, as far as it has a switch.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.support.clients import CLIENTS, has, run
from tests.support.gateway import GatewayThread
from tests.support.writing_model import call, write_script

pytestmark = pytest.mark.full

NOWHERE: Final = "http://127.0.0.1:9"
"""Nothing listens there."""
NUM_TURNS: Final = 30
NUM_CALLS: Final = 3
TIMEOUT_S: Final = 900
TEXT: Final = "a \"b\" 'c' ß $HOME \\n"
"""What is written, beside a number."""
CODEX: Final = """model = "writes"
model_provider = "triton"
check_for_update_on_startup = false
[model_providers.triton]
name = "Triton"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
"""
CONTINUE: Final = """name: test
version: 0.0.1
schema: v1
models:
  - {{name: writes, provider: openai, model: writes, apiBase: "{url}/v1", apiKey: none, roles: [chat],
     capabilities: [tool_use], contextLength: 131072}}
"""


def codex(url: str, home: Path, task: str) -> tuple[list[str], dict[str, str]]:
    (home / "config.toml").write_text(CODEX.format(url=url))
    options = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [_program("codex"), *options, task], {"CODEX_HOME": str(home)}


def claude_code(url: str, home: Path, task: str) -> tuple[list[str], dict[str, str]]:
    options = ["--model", "writes", "--tools", "Bash", "--allowedTools", "Bash"]
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    return [_program("claude"), "--print", task, *options], environment


def opencode(url: str, home: Path, task: str) -> tuple[list[str], dict[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"writes": {"limit": {"context": 131_072, "output": 4000}, "tool_call": True}},
    }
    config = {
        "provider": {"triton": provider},
        "model": "triton/writes",
        "small_model": "triton/writes",
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
    }
    (home / "opencode.json").write_text(json.dumps(config))
    environment = {
        "OPENCODE_CONFIG": str(home / "opencode.json"),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }
    return [_program("opencode"), "run", task], environment


def continue_(url: str, home: Path, task: str) -> tuple[list[str], dict[str, str]]:
    (home / "config.yaml").write_text(CONTINUE.format(url=url))
    options = ["--config", str(home / "config.yaml"), "--auto", "--print"]
    environment = {
        "CONTINUE_GLOBAL_DIR": str(home),
        "CONTINUE_METRICS_ENABLED": "0",
        "CONTINUE_CLI_AUTO_UPDATED": "1",
        "CONTINUE_API_BASE": NOWHERE,
    }
    return [_program("cn"), *options, task], environment


def _program(name: str) -> str:
    return str(has(CLIENTS / "coding_agents" / "node_modules" / ".bin" / name))


AGENTS: Final[dict[str, tuple[Callable[..., tuple[list[str], dict[str, str]]], Callable[[str], str]]]] = {
    "codex": (codex, lambda command: call("exec_command", cmd=command)),
    "claude_code": (claude_code, lambda command: call("Bash", command=command)),
    "opencode": (opencode, lambda command: call("bash", command=command, description="Write")),
    "continue": (continue_, lambda command: call("Bash", command=command)),
}
"""By client: its program's arguments and environment, and its call that runs a command."""


@pytest.mark.parametrize("client", AGENTS)
def test_agent_works_to_the_end(agents: GatewayThread, tmp_path: Path, client: str) -> None:
    begin, call_of = AGENTS[client]
    home, project = _folders(tmp_path)
    turns = [
        "\n".join(call_of(f"cat <<'END' > {name}\n{text}END") for name, text in files.items())
        for files in map(_files, range(NUM_TURNS))
    ]
    task = write_script(tmp_path / "script.json", [*turns, "All is done."], "Hm.")
    command, environment = begin(agents.url, home, task)
    printed = run(command, project, timeout_s=TIMEOUT_S, **_environment(home), **environment)
    assert printed.splitlines()[-1] == "All is done."
    _check(project, NUM_TURNS)


def test_aider_edits_until_its_test_passes(agents: GatewayThread, tmp_path: Path) -> None:
    """It has no tools: answers hold edits, and it asks again, at most three times, with what its test prints."""
    program, num_turns = has(CLIENTS / "aider" / "bin" / "aider"), 4
    home, project = _folders(tmp_path)
    tasks = [
        write_script(tmp_path / f"{turn}.json", ["\n\n".join(_edit(*file) for file in _files(turn).items())], "Hm.")
        for turn in range(num_turns)
    ]
    next_task = f"n=$(ls *-0.txt | wc -l); [ $n = {num_turns} ] || {{ echo say:@{tmp_path}/$n.json; exit 1; }}"
    where = ["--model=openai/writes", f"--openai-api-base={agents.url}/v1", "--openai-api-key=none"]
    work = ["--edit-format=diff", "--map-tokens=0", "--auto-test", f"--test-cmd={next_task}", f"--message={tasks[0]}"]
    switches = ["yes-always", "no-auto-commits", "analytics-disable", "no-check-update", "no-show-release-notes"]
    command = [str(program), *where, *work, *(f"--{switch}" for switch in (*switches, "no-show-model-warnings"))]
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    run(command, project, timeout_s=TIMEOUT_S, **_environment(home), **local)
    _check(project, num_turns)


def _edit(name: str, text: str) -> str:
    return f"{name}\n```\n<<<<<<< SEARCH\n=======\n{text}>>>>>>> REPLACE\n```"


def _folders(root: Path) -> tuple[Path, Path]:
    """A home, and a project with a repository: without one some agents take / for the project."""
    home, project = root / "home", root / "project"
    home.mkdir()
    subprocess.run(["git", "init", "--quiet", str(project)], check=True)
    return home, project


def _environment(home: Path) -> dict[str, str]:
    """Of a client that knows its home alone, and is refused what it asks of other servers."""
    homes = ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
    return {**dict.fromkeys(homes, str(home)), "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1,localhost"}


def _files(turn: int) -> dict[str, str]:
    return {f"{turn}-{number}.txt": f"{TEXT} {number}\n" for number in range(NUM_CALLS)}


def _check(project: Path, num_turns: int) -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in project.glob("*.txt")}
    assert written == {name: text for turn in range(num_turns) for name, text in _files(turn).items()}
