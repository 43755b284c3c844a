# SPDX-License-Identifier: Apache-2.0
"""Whatever the README shows is true: its tables, its file tree, its commands, its links to names in the code."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hf_triton import __version__
from hf_triton.settings import load_settings
from hf_triton.testing import TritonServer
from tests.support.client import post

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEMO = ROOT / "hf_triton" / "demo"


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```\n", README, flags=re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def commands(*beginnings: str) -> list[str]:
    """The lines of the README's bash blocks that begin so."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith(beginnings)]


@pytest.fixture(scope="module")
def render_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_docs", ROOT / "scripts" / "render_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_declarations(render_docs: ModuleType) -> None:
    assert render_docs.render(README) == README, "run `make docs`"


def test_the_first_screen_has_the_two_commands() -> None:
    first_screen = "\n".join(README.splitlines()[:40])
    assert "make serve" in first_screen
    assert "make test" in first_screen


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = {line.split()[1] for line in commands("make ")} | set(re.findall(r"`make ([a-z-]+)`", README))
    assert named <= targets


def test_ci_runs_the_readmes_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    for command in ("make test-all", "make check", "make test-container"):
        assert f"\n{command}\n" in script
        assert command in README or command in (ROOT / "CONTRIBUTING.md").read_text()


def _tree() -> list[tuple[str, str]]:
    [tree] = blocks("")
    entries, folder = [], ""
    for line in tree.splitlines():
        names, purpose = re.fullmatch(r"( *(?:\S+ ?)+?)(?:  +(.*))?", line).groups()  # type: ignore[union-attr]
        if not names.startswith(" "):
            folder = names.strip() if purpose is None else ""
        for name in names.split():
            entries.append((folder + name if names.startswith(" ") else name, purpose or ""))
    return entries


@pytest.mark.parametrize("path", [path for path, _ in _tree()])
def test_the_file_tree_names_what_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_file_tree_has_every_module() -> None:
    named = {path.rstrip("/") for path, _ in _tree()}
    present = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "hf_triton").iterdir()
        if path.name not in ("__init__.py", "__pycache__", "py.typed")
    }
    assert present <= named


def test_settings_blocks_can_be_loaded() -> None:
    [block] = [block for block in blocks("protobuf") if "parameters {" in block]
    pairs = re.findall(r'key: "(.*?)" value \{ string_value: "((?:[^"\\]|\\.)*)" \}', block)
    assert len(pairs) == block.count("parameters {")
    load_settings({key: text.replace('\\"', '"') for key, text in pairs}, {})


def test_python_blocks_run() -> None:
    for block in blocks("python"):
        if "localhost:" not in block:
            exec(compile(block, "README.md", "exec"), {})


def test_a_fourth_model_is_one_line(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "falcon7b", tmp_path / "falcon7b")
    (tmp_path / "model_repository").mkdir()
    for command in commands("cp ", "sed "):
        if "/qwen3/" in command:
            subprocess.run(shlex.split(command), cwd=tmp_path, check=True)
    before = (ROOT / "falcon7b" / "config.pbtxt").read_text().splitlines()
    after = (tmp_path / "model_repository" / "qwen3" / "config.pbtxt").read_text().splitlines()
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert changed == ['parameters { key: "huggingface_model" value { string_value: "Qwen/Qwen3-0.6B" } }']


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Iterator[TritonServer]:
    """The demo model, and the folder `mine` by the README's own commands."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("falcon7b", "hf_triton"):
        (root / name).symlink_to(ROOT / name)
    repository = root / "model_repository"
    make_folder(repository, "demo", huggingface_model=DEMO, max_output_length=64)
    for command in commands("cp ", "sed ", "echo "):
        if "/mine/" in command:
            subprocess.run(command, shell=True, cwd=root, check=True)
    with TritonServer(repository) as server:
        yield server


def curls(model: str, key: str) -> list[str]:
    """The lines that send `key` to a model."""
    return [line for line in commands("curl ") if f"/models/{model}/" in line and f'"{key}":' in line]


def run(server: TritonServer, script: str) -> str:
    """Run lines of the README against a server of the tests."""
    local = script.replace("localhost:8000", server.http_url.removeprefix("http://")).replace("curl ", "curl --silent ")
    return subprocess.run(["bash", "-c", local + "\nwait"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("line", [line for line in curls("demo", "text_input") if not line.endswith("&")])
def test_curl_lines_work(demo: TritonServer, line: str) -> None:
    text = json.loads(run(demo, line))["text_output"]
    body = json.loads(line.split("-d '")[1].removesuffix("'"))
    excludes_prompt = (body | body.get("parameters", {})).get("exclude_input_in_output", False)
    assert text.startswith(body["text_input"]) is not excludes_prompt
    assert text in json.loads(body["guided_choice"]) if "guided_choice" in body else len(text) > 10


def test_the_python_client_gets_its_outputs(demo: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in blocks("python") if "localhost:8000" in block]
    exec(compile(block.replace("localhost:8000", demo.http_url.removeprefix("http://")), "README.md", "exec"), {})
    texts, reasons = capsys.readouterr().out.split("] [")
    assert "The model" in texts
    assert "Today" in texts
    assert reasons.count("length") == 2


def test_the_chat_works(demo: TritonServer) -> None:
    [line] = curls("demo", "messages")
    assert len(json.loads(run(demo, line))["text_output"]) > 10


def test_the_stream_has_several_pieces(demo: TritonServer) -> None:
    [line] = curls("mine", "text_input")
    events = [json.loads(event.removeprefix("data: ")) for event in run(demo, line).split("\n\n") if event]
    assert len(events) > 1
    assert all("text_output" in event for event in events)


def test_the_python_client_gets_the_pieces(demo: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    [line] = curls("mine", "text_input")
    events = [json.loads(event.removeprefix("data: ")) for event in run(demo, line).split("\n\n") if event]
    [block] = [block for block in blocks("python") if "localhost:8001" in block]
    exec(compile(block.replace("localhost:8001", demo.grpc_url), "README.md", "exec"), {})
    assert capsys.readouterr().out == "".join(event["text_output"] for event in events)


def test_a_request_gives_up_another(demo: TritonServer) -> None:
    [block] = [block for block in blocks("bash") if '"stop":true' in block]
    for _ in range(5):  # on a busy machine the second request may overtake the first
        answers = run(demo, block)
        assert '"text_output":""' in answers
        if "cancelled: " in answers:
            return
    pytest.fail(answers)


def test_the_answer_shown_is_the_answer_given(demo: TritonServer) -> None:
    shown = json.loads(blocks("json")[0])
    assert post(demo, "/v2/models/demo/generate", {"text_input": "How can you be"}).json() == shown


def test_the_version_is_told_once() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{__version__}"\n' in project
    assert re.search(rf"^## (\[?)({re.escape(__version__)}|Unreleased)", changelog, flags=re.MULTILINE)
