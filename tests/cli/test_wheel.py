# SPDX-License-Identifier: Apache-2.0
"""The wheel by itself: its contents, its metadata, and `hf-triton serve` from an empty folder."""

import email.message
import email.parser
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_triton import __version__
from hf_triton.testing import build_tiny_checkpoint
from tests.support.paths import PACKAGES, ROOT
from tests.support.serving import Serving, curl_lines, running, send
from tests.support.wheel import build_wheel, clean_environment, install_wheel

pytestmark = pytest.mark.full

ADDRESS = "https://git.example/team/hf_triton"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), PROJECT_URL=ADDRESS)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    return read_metadata(wheel)


def read_metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.parser.BytesParser().parsebytes(archive.read(name))


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    assert packed >= {str(path) for path in files if path.suffix != ".pyc"}
    assert {"hf_triton/py.typed", "hf_triton/demo/model.safetensors"} <= packed
    assert "hf_triton_gateway/http/page/index.html" in packed
    assert "hf_triton/stream_door/folder/config.pbtxt" in packed  # by a link


def test_the_metadata_says_who_what_and_where(metadata: email.message.Message) -> None:
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Author"]
    assert {"Source", "Documentation", "Changelog", "Issues"} == {
        line.partition(",")[0] for line in metadata.get_all("Project-URL", [])
    }
    classifiers = metadata.get_all("Classifier", [])
    for minor in (11, 12):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers


def test_the_descriptions_links_work_elsewhere(metadata: email.message.Message) -> None:
    text = str(metadata.get_payload())
    targets = re.findall(r"\]\((?!#)([^)]*)\)", text) + re.findall(r'\bsrc="([^"]*)"', text)
    assert f"{ADDRESS}/raw/v{__version__}/docs/images/chat-page.png" in targets
    for target in targets:
        name = re.sub(rf"^{ADDRESS}/(blob|raw)/v{re.escape(__version__)}/", "", target).partition("#")[0]
        assert name != target or target.startswith("http"), target
        assert name.startswith(("https://", "http://localhost:")) or (ROOT / name).exists(), target


def test_without_an_address_no_link_is_broken(tmp_path: Path) -> None:
    plain = read_metadata(build_wheel(tmp_path))
    assert "Project-URL" not in plain
    assert re.findall(r"\]\((?!#|https?:)[^)]*\)", str(plain.get_payload())) == []


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hf-triton` in an environment that has the wheel."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    install_wheel(environment, wheel)
    return environment / "bin" / "hf-triton"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty")


@pytest.fixture(scope="module")
def serving(command: Path, empty: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    output = tmp_path_factory.mktemp("output") / "log"
    with running(output=output, command=command, folder=empty, environment=clean_environment()) as serving:
        serving.wait_for("Ctrl+C stops the server")
        yield serving


def test_the_wheels_own_code_runs(command: Path, empty: Path) -> None:
    shows = [command.with_name("python"), "-c", "import hf_triton; print(hf_triton.__file__)"]
    path = subprocess.run(shows, cwd=empty, env=clean_environment(), capture_output=True, text=True, check=True).stdout
    assert Path(path).is_relative_to(command.parents[1])


def test_the_demo_answers(serving: Serving) -> None:
    for line in curl_lines(serving.output()):
        assert len(send(line)) > 10


def test_the_page_is_served(serving: Serving) -> None:
    page = f"http://localhost:{serving.openai_port}/"
    assert "<html" in send(["curl", page])
    script = ROOT / "hf_triton_gateway" / "http" / "page" / "page.js"
    assert send(["curl", f"{page}page/page.js"]) == script.read_text()


def test_a_checkpoint_is_served(command: Path, empty: Path, tmp_path: Path) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "mine", "llama")
    with running(
        str(checkpoint), output=tmp_path / "log", command=command, folder=empty, environment=clean_environment()
    ) as serving:
        output = serving.wait_for("Ctrl+C stops the server")
        assert all(len(send(line)) > 10 for line in curl_lines(output))
