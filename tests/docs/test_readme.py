# SPDX-License-Identifier: Apache-2.0
"""README.md and docs/ are true: tables, file tree, links, commands and examples are checked or run."""

import json
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from hf_triton import __version__
from hf_triton.folders.doors import door_repository
from hf_triton.protocol.chat_request import MAX_MESSAGES, MAX_TOOLS
from hf_triton.server import free_ports
from hf_triton.settings import load_settings
from hf_triton.testing import ARCHITECTURES, TritonServer
from hf_triton_cli.serving.gateway_process import GatewayProcess
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.client import post
from tests.support.paths import PACKAGES, ROOT, load_script, sources

README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")))
GUIDES = (*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md")
DEMO = ROOT / "hf_triton" / "demo"
MAX_README_LINES = 250
MAX_CELL = 200
MAX_PAGE_LINES = 1660


def blocks(language: str, *documents: Path) -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in documents or DOCUMENTS]
    fences = [match for text in texts for match in re.findall(r"^```(\w*)\n(.*?)^```\n", text, flags=re.S | re.M)]
    return [block for kind, block in fences if kind == language]


def commands(*beginnings: str) -> list[str]:
    """The different lines of the bash blocks that begin so."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith(beginnings)))


def python_blocks(*, port: str) -> list[str]:
    """The different Python examples that connect to a port; with an empty port, those that need no server."""
    examples = dict.fromkeys(blocks("python"))
    return [block for block in examples if (f"localhost:{port}" in block if port else "localhost:" not in block)]


@pytest.fixture(scope="module")
def render_docs() -> ModuleType:
    return load_script("render_docs")


def test_tables_match_their_declarations(render_docs: ModuleType) -> None:
    assert render_docs.render(render_docs.read()) == render_docs.read(), "run `make docs`"


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


def test_the_page_is_small() -> None:
    page = ROOT / "hf_triton_gateway" / "http" / "page"
    files = [path for path in page.iterdir() if path.suffix in (".js", ".css")]
    assert sum(len(path.read_text().splitlines()) for path in files) <= MAX_PAGE_LINES


def test_make_tells_of_busy_ports_before_it_installs(tmp_path: Path) -> None:
    for name in ("Makefile", "hf_triton", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(["make", "serve", f"HTTP_PORT={port}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.match(rf"in use: \[{port}\b.*; try make serve HTTP_PORT=8010 ", done.stderr)
    assert not (tmp_path / ".venv").exists()


def test_first_screen_has_the_two_commands() -> None:
    first_screen = "\n".join(README.read_text().splitlines()[:40])
    assert "make serve" in first_screen
    assert "make test" in first_screen


def test_messages_name_documents_that_exist() -> None:
    text = "".join(path.read_text() for path in sources())
    named = set(re.findall(r"docs/[\w-]+\.md", text))
    assert len(named) >= 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, flags=re.MULTILINE))
    text = "\n".join(path.read_text() for path in GUIDES)
    named = {line.split()[1] for line in commands("make ")} | set(re.findall(r"`make ([a-z0-9-]+)", text))
    assert named <= targets


def test_ci_runs_the_documented_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    text = "\n".join(path.read_text() for path in GUIDES)
    for target in ("test-all", "check", "test-python312", "test-page", "test-container"):
        assert re.search(rf"^make (.* )?{target}\b", script, flags=re.MULTILINE)
        assert f"make {target}" in text


def _tree() -> list[tuple[str, str]]:
    [tree] = blocks("", CONTRIBUTING)
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


def test_the_file_tree_has_every_package() -> None:
    named = {path.rstrip("/") for path, _ in _tree()}
    present = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).iterdir()
        if path.name not in ("__init__.py", "__pycache__", "py.typed")
    }
    assert present <= named


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_links_and_paths_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)]*)\)", text):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), target
        assert not anchor or anchor in _anchors(linked), target
    for named in re.findall(r"`((?:hf_triton|benchmarks|scripts|tests)/[\w/.-]+)`", text):
        assert (ROOT / named).exists(), named


def _anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    titles = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", [*DOCUMENTS, *(ROOT / "docs" / "moving").glob("*.md")], ids=lambda path: path.name)
def test_tables_can_be_read_on_a_narrow_page(path: Path) -> None:
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert [row[:80] for row in rows if max(map(len, row.split(" | "))) > MAX_CELL + len("|  |")] == []


def test_every_document_is_linked_from_the_readme() -> None:
    text = README.read_text()
    assert [path.name for path in DOCUMENTS[1:] if f"(docs/{path.name}" not in text] == []


def test_versions_and_limits_in_words_are_current() -> None:
    text = README.read_text()
    [image] = re.findall(r"tritonserver:([\d.]+)-py3", (ROOT / "Dockerfile").read_text())
    assert f"the container uses {image}" in text
    assert f"{MAX_MESSAGES:,} messages and {MAX_TOOLS} tools" in text
    assert f"checkpoints of {len(ARCHITECTURES)} architectures" in (ROOT / "docs" / "testing.md").read_text()


@pytest.mark.parametrize("block", blocks("protobuf"))
def test_settings_blocks_can_be_loaded(block: str) -> None:
    pairs = re.findall(r'key: "(.*?)" value \{ string_value: "((?:[^"\\]|\\.)*)" \}', block)
    assert len(pairs) == block.count("parameters {") > 0
    settings = {key: text.replace('\\"', '"') for key, text in pairs}
    load_settings({"huggingface_model": "tiiuae/falcon-7b"} | settings, {})


def test_python_blocks_run() -> None:
    for block in python_blocks(port=""):
        exec(compile(block, "README.md", "exec"), {})


def test_another_model_is_one_changed_line(tmp_path: Path) -> None:
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
    """The demo model with its stream door, and the folder `mine` made by the documents' own commands."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("falcon7b", "hf_triton"):
        (root / name).symlink_to(ROOT / name)
    repository = root / "model_repository"
    make_folder(repository, "demo", huggingface_model=DEMO, max_output_length=64)
    for command in commands("cp ", "sed ", "echo "):
        if "/mine/" in command:
            subprocess.run(command, shell=True, cwd=root, check=True)
    with door_repository(repository, taken=()) as doors, TritonServer(repository, doors) as server:
        yield server


def curls(model: str, key: str) -> list[str]:
    return [line for line in commands("curl ") if f"/models/{model}/" in line and f'"{key}":' in line]


def run(server: TritonServer, script: str) -> str:
    """Run lines of the documents against a server of the tests."""
    local = script.replace("localhost:8000", server.http_url.removeprefix("http://")).replace("curl ", "curl --silent ")
    return subprocess.run(["bash", "-c", local + "\nwait"], capture_output=True, text=True, check=True).stdout


@pytest.mark.full
@pytest.mark.parametrize("line", [line for line in curls("demo", "text_input") if not line.endswith("&")])
def test_curl_lines_work(demo: TritonServer, line: str) -> None:
    text = json.loads(run(demo, line))["text_output"]
    body = json.loads(line.split("-d '")[1].removesuffix("'"))
    excludes_prompt = (body | body.get("parameters", {})).get("exclude_input_in_output", False)
    assert text.startswith(body["text_input"]) is not excludes_prompt
    assert text in json.loads(body["guided_choice"]) if "guided_choice" in body else len(text) > 10


def run_python(server: TritonServer, block: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a Python example prints against a server of the tests."""
    local = block.replace("localhost:8000", server.http_url.removeprefix("http://"))
    names: dict[str, Any] = {}
    exec(compile(local.replace("localhost:8001", server.grpc_url), "example", "exec"), names)
    if isinstance(client := names.get("client"), openai.OpenAI):
        client.close()  # an example ends with its process, and this one goes on
    return capsys.readouterr().out


@pytest.mark.full
def test_the_python_client_gets_its_outputs(demo: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in python_blocks(port="8000") if "finish_reason" in block]
    texts, reasons = run_python(demo, block, capsys).split("] [")
    assert "The model" in texts
    assert "Today" in texts
    assert reasons.count("length") == 2


@pytest.mark.full
def test_the_python_chat_answers(demo: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in python_blocks(port="8000") if "messages" in block]
    assert len(run_python(demo, block, capsys)) > 10


@pytest.mark.full
def test_the_python_schema_is_followed(demo: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in python_blocks(port="8000") if "guided_json" in block]
    assert re.fullmatch(r"\{'city': '(Rome|Oslo)', 'days': [1-9]\}\n", run_python(demo, block, capsys))


@pytest.mark.full
@pytest.mark.parametrize("line", curls("demo", "messages"))
def test_the_chat_works(demo: TritonServer, line: str) -> None:
    assert len(json.loads(run(demo, line))["text_output"]) > 10


def stream_pieces(server: TritonServer) -> list[str]:
    [line] = curls("mine", "text_input")
    events = [json.loads(event.removeprefix("data: ")) for event in run(server, line).split("\n\n") if event]
    return [event["text_output"] for event in events]


@pytest.fixture(scope="module")
def gateway(demo: TritonServer) -> Iterator[str]:
    """The address of a gateway before the demo model."""
    process = GatewayProcess(GatewayConfig(triton=demo.grpc_url, port=free_ports(1)[0]))
    process.start()
    try:
        process.wait_until_started()
        yield f"localhost:{process.config.port}"
    finally:
        process.stop()


OPENAI_LINES = [line for line in commands("curl ") if "localhost:9000/" in line and '"model":"demo"' in line]
"""Those for encoders run in tests/openai/test_encoders.py."""


@pytest.mark.full
@pytest.mark.parametrize("line", OPENAI_LINES)
def test_openai_curl_lines_work(demo: TritonServer, gateway: str, line: str) -> None:
    answer = json.loads(run(demo, line.replace("localhost:9000", gateway)))
    [entry] = answer[next(name for name in ("choices", "output", "content") if name in answer)]
    assert any(len(text) > 10 for text in texts_of(entry))


def texts_of(answer: object) -> list[str]:
    if isinstance(answer, str):
        return [answer]
    values = answer if isinstance(answer, list) else []
    if isinstance(answer, dict):
        values = [value for name, value in answer.items() if name in ("text", "message", "content")]
    return [text for value in values for text in texts_of(value)]


@pytest.mark.full
def test_openai_client_gets_an_answer(demo: TritonServer, gateway: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = python_blocks(port="9000")
    assert len(found) == 4
    for block in found:
        assert len(run_python(demo, block.replace("localhost:9000", gateway), capsys)) > 10


@pytest.mark.full
def test_the_stream_has_several_pieces(demo: TritonServer) -> None:
    assert len(stream_pieces(demo)) > 1


@pytest.mark.full
def test_the_stream_door_streams(demo: TritonServer) -> None:
    [line] = curls("demo_stream", "text_input")
    assert run(demo, line).count("data: ") > 1


@pytest.mark.full
def test_the_python_client_gets_the_pieces(demo: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = python_blocks(port="8001")
    assert run_python(demo, block, capsys) == "".join(stream_pieces(demo))


@pytest.mark.full
def test_a_request_cancels_another(demo: TritonServer) -> None:
    [block] = [block for block in blocks("bash") if '"cancel":true' in block]
    for _ in range(5):  # on a busy machine the second request may overtake the first
        responses = run(demo, block)
        assert '"text_output":""' in responses
        if "cancelled: " in responses:
            return
    pytest.fail(responses)


@pytest.mark.full
def test_the_answer_shown_is_the_answer_given(demo: TritonServer) -> None:
    shown = json.loads(blocks("json", README)[0])
    assert post(demo, "/v2/models/demo/generate", {"text_input": "How can you be"}).json() == shown


def test_the_version_is_stated_once() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{__version__}"\n' in project
    assert re.search(rf"^## (\[?)({re.escape(__version__)}|Unreleased)", changelog, flags=re.MULTILINE)
