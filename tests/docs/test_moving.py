# SPDX-License-Identifier: Apache-2.0
"""Every command in docs/moving/ that is ours works: folders are written, served from a Hub, and answer the requests."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from hf_triton.settings import DEFAULT_MODELS
from hf_triton.testing import LoopbackHub, TritonServer, build_tiny_checkpoint
from tests.support.paths import ROOT
from tests.support.sentence_checkpoints import save_sentence_model
from tests.support.serving import COMMAND
from tests.support.tasks import save_task_checkpoint

pytestmark = pytest.mark.full

PAGES = sorted((ROOT / "docs" / "moving").glob("*.md"))


def commands(program: str) -> list[str]:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    blocks = [block for text in texts for block in re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    return [line for block in blocks for line in block.splitlines() if line.startswith(f"{program} ")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("moving")
    (root / "model_repository").mkdir()
    shutil.copytree(ROOT / "falcon7b", root / "falcon7b")
    for line in (*commands("hf-triton"), *commands("cp")):
        program, *arguments = shlex.split(line)
        done = subprocess.run([COMMAND if program == "hf-triton" else program, *arguments], cwd=root, check=False)
        assert done.returncode == 0, line
    sequence = save_task_checkpoint(root / "sequence", "distilbert", "sequence", num_labels=2)
    answers = save_task_checkpoint(root / "answers", "distilbert", "answers")
    with LoopbackHub() as hub:
        for task, folder in {"text-classification": sequence, "question-answering": answers}.items():
            name, revision = DEFAULT_MODELS[task]
            hub.add(name, folder, revisions={revision: folder})
        hub.add("philschmid/MiniLM-L6-H384-uncased-sst2", sequence)
        hub.add("BAAI/bge-large-zh-v1.5", save_sentence_model(root / "bge"))
        hub.add("tiiuae/falcon-7b", build_tiny_checkpoint(root / "falcon", "falcon"))
        hub.add("distilbert/distilgpt2", build_tiny_checkpoint(root / "gpt2", "gpt2"))
        environment = {**hub.environment(), "HF_HOME": str(root / "home")}
        with TritonServer(root / "model_repository", environment=environment, ready_timeout_s=280) as running:
            yield running


@pytest.mark.parametrize("line", [line for line in commands("curl") if "localhost:8000" in line])
def test_requests_are_answered(server: TritonServer, line: str) -> None:
    words = shlex.split(line.replace("localhost:8000", server.http_url.removeprefix("http://")))
    done = subprocess.run([*words, "--silent"], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert "error" not in answer, answer
    assert "model_name" in answer


def test_there_is_a_page_for_each_system() -> None:
    assert {page.stem for page in PAGES} == {
        "clearml-serving",
        "mlserver",
        "text-embeddings-inference",
        "torchserve",
        "transformer-deploy",
        "triton-tutorial",
    }
    assert len(commands("curl")) == 12
    assert len(commands("hf-triton")) == 6
