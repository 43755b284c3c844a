# SPDX-License-Identifier: Apache-2.0
"""`hf-triton serve NAME:QUANTISATION` and the requests in docs/quantisation.md: one file of a Hub's three is served."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_triton.testing import LoopbackHub
from tests.support.adapters import save_adapter, wrap
from tests.support.gguf import write_gguf
from tests.support.paths import ROOT
from tests.support.serving import Serving, running

pytestmark = pytest.mark.full

DOCUMENT = (ROOT / "docs" / "quantisation.md").read_text()
[COMMAND] = re.findall(r"^hf-triton serve (.*:Q4_K_M.*)$", DOCUMENT, re.MULTILINE)
[CURL] = re.findall(r"^curl localhost:9000/v1/chat.*$", DOCUMENT, re.MULTILINE)
REPOSITORY, _, QUANT = COMMAND.split()[0].partition(":")
MODEL = "qwen3-0.6b-gguf-q4_k_m"
PROMPT = "Where does the river go?"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files with other weights each."""
    root = tmp_path_factory.mktemp("gguf")
    for seed, quant in enumerate((QUANT, "Q8_0", "F16")):
        file = write_gguf(root / quant / f"Qwen3-0.6B-{quant}.gguf", "qwen3", "Q8_0", seed=seed, eos_token_id=None)
        (root / "repository").mkdir(exist_ok=True)
        file.rename(root / "repository" / file.name)
        save_adapter(Path(f"{file}.original"), root / quant / "tone", target_modules="all-linear")
    return root / "repository"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def serving(repository: Path, home: Path) -> Iterator[Serving]:
    adapters = json.dumps({"tone": str(repository.parent / QUANT / "tone")})
    options = ["--set", f"adapters={adapters}", "--set", "exclude_input_in_output=true"]
    with LoopbackHub() as hub:
        hub.add(REPOSITORY, repository)
        words = [word.replace("bfloat16", "float32") for word in shlex.split(COMMAND)]
        environment = {**hub.environment(), "HF_HOME": str(home), "HF_HUB_CACHE": ""}
        with running(*words, *options, output=home / "output", **environment) as process:
            process.wait_for(f"{MODEL}: ready in ")
            process.wait_for("Ctrl+C stops the server")
            yield process


@pytest.fixture(scope="module")
def client(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{serving.openai_port}/v1", api_key="-", max_retries=0)


def expected(repository: Path, adapter: Path | None = None, chat: str | None = None) -> str:
    """What transformers generates from the same file."""
    name = f"Qwen3-0.6B-{QUANT}.gguf"
    model: Any = AutoModelForCausalLM.from_pretrained(repository, gguf_file=name)
    tokenizer: Any = AutoTokenizer.from_pretrained(repository, gguf_file=name)
    if adapter is not None:
        model = wrap(model, adapter)
    prompt = PROMPT
    if chat is not None:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": chat}], tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=NUM_TOKENS, do_sample=False)[0][ids["input_ids"].shape[1] :]
    text: str = tokenizer.decode(output, skip_special_tokens=True)
    return text


def test_the_text_is_that_of_transformers(serving: Serving, client: openai.OpenAI, repository: Path) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=NUM_TOKENS)
    assert answer.choices[0].text == expected(repository)


def test_the_chat_in_the_document_is_answered_by_the_file_s_template(serving: Serving, repository: Path) -> None:
    local = CURL.replace("localhost:9000", f"127.0.0.1:{serving.openai_port}").replace(
        '"max_tokens":16', '"max_tokens":12'
    )
    done = subprocess.run([*shlex.split(local), "--silent"], capture_output=True, text=True, check=True)
    content = json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert content == expected(repository, chat="Where does the river go?")


def test_what_follows_a_colon_is_an_adapter(client: openai.OpenAI, repository: Path) -> None:
    tone = repository.parent / QUANT / "tone"
    answer = client.completions.create(model=f"{MODEL}:tone", prompt=PROMPT, max_tokens=NUM_TOKENS)
    assert answer.choices[0].text == expected(repository, tone) != expected(repository)
    with pytest.raises(openai.NotFoundError, match="Q4_K_M"):
        client.completions.create(model=f"{MODEL}:Q4_K_M", prompt=PROMPT)


def test_one_file_was_fetched(serving: Serving, home: Path) -> None:
    assert [path.name for path in home.glob("hub/*/snapshots/*/*")] == [f"Qwen3-0.6B-{QUANT}.gguf"]
