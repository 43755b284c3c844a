# SPDX-License-Identifier: Apache-2.0
"""The page before encoders alone: a form for each task, and what it draws of the answer."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.chat_page import NARROW, WIDE, Chat
from tests.support.gateway import GatewayThread
from tests.support.tasks import reference, save_task_checkpoint

pytestmark = pytest.mark.full  # `make test-page` runs it

ENTITIES = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}
HEADS = {
    "vectors": ("bert", "embeddings", {}),
    "reranker": ("bert", "sequence", {"num_labels": 1}),
    "sentiment": ("distilbert", "sequence", {"num_labels": 3, "id2label": {0: "bad", 1: "fair", 2: "good"}}),
    "entities": ("distilbert", "tokens", {"num_labels": 5, "id2label": ENTITIES}),
    "masks": ("bert", "masks", {}),
}
TEXT = "Anna lives in Berlin 🙂 and Bob in the old harbour."


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: save_task_checkpoint(root / name, *head[:2], **head[2]) for name, head in HEADS.items()}


@pytest.fixture(scope="module")
def url(
    checkpoints: dict[str, Path], make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    repository = tmp_path_factory.mktemp("repository")
    for name, checkpoint in checkpoints.items():
        pooling = {"pooling": "mean"} if name == "vectors" else {}
        make_folder(repository, name, huggingface_model=checkpoint, **pooling)
    with (
        TritonServer(repository, ready_timeout_s=300) as server,
        GatewayThread(GatewayConfig(triton=server.grpc_url, port=0)) as gateway,
    ):
        yield gateway.url


def fill(chat: Chat, **texts: str) -> None:
    """Fill the fields of the form whose labels begin so, and run it."""
    for label, text in texts.items():
        chat.page.locator("#task").get_by_label(re.compile(f"^{label}")).fill(text)
    chat.page.get_by_role("button", name="Run").click()
    expect(chat.page.locator(".result .figures")).to_contain_text(" ms")


def rows(chat: Chat) -> list[list[str]]:
    return [row.locator("th, .number").all_text_contents() for row in chat.page.locator(".bars tr").all()]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_each_task_has_a_form(open_page: Callable[..., Chat], url: str, width: int) -> None:
    chat = open_page(width).open(url, "vectors")
    for model in HEADS:
        chat.page.get_by_label("Model").select_option(model)
        expect(chat.page.get_by_role("heading", name=model)).to_be_visible()
        expect(chat.page.get_by_label("Message", exact=True)).to_be_hidden()
        if model == "masks":
            chat.page.locator("#task textarea").fill("The harbour is <mask>.")
        fill(chat)
        assert chat.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), model
    assert chat.errors == []


def test_labels_are_those_of_the_model(open_page: Callable[..., Chat], url: str, checkpoints: dict[str, Path]) -> None:
    chat = open_page().open(url, "sentiment")
    fill(chat, Text=TEXT)
    [expected] = reference(checkpoints["sentiment"], "text-classification", [TEXT], top_k=3)
    assert rows(chat) == [[label["label"], f"{100 * label['score']:.1f} %"] for label in expected]


def test_documents_stand_by_their_scores(open_page: Callable[..., Chat], url: str) -> None:
    chat = open_page().open(url, "reranker")
    documents = ["Anna lives in Berlin.", "bad", "two boats and one lighthouse"]
    fill(chat, Query="Where does Anna live?", Documents="\n".join([*documents, "", " "]))
    body = chat.bodies()[-1]
    assert body == {"model": "reranker", "query": "Where does Anna live?", "documents": documents}
    results = httpx.post(f"{url}/v1/rerank", json=body, timeout=60).json()["results"]
    assert [row[0] for row in rows(chat)] == [result["document"]["text"] for result in results]


def test_entities_are_marked_in_the_text(
    open_page: Callable[..., Chat], url: str, checkpoints: dict[str, Path]
) -> None:
    chat = open_page().open(url, "entities")
    fill(chat, Text=TEXT)
    options = {"build": {"aggregation_strategy": "simple"}}
    [expected] = reference(checkpoints["entities"], "token-classification", [TEXT], **options)
    assert expected
    marks = chat.page.locator(".result mark").all_text_contents()
    assert marks == [TEXT[each["start"] : each["end"]] + each["entity_group"] for each in expected]
    without_labels = "() => { const p = document.querySelector('.result p').cloneNode(true);"
    without_labels += " p.querySelectorAll('small').forEach((label) => label.remove()); return p.textContent; }"
    assert chat.page.evaluate(without_labels) == TEXT


def test_masks_are_filled(open_page: Callable[..., Chat], url: str, checkpoints: dict[str, Path]) -> None:
    chat = open_page().open(url, "masks")
    text = "The harbour is <mask>."
    fill(chat, Text=text)
    [expected] = reference(checkpoints["masks"], "fill-mask", [text])
    assert rows(chat) == [[each["token_str"], f"{100 * each['score']:.1f} %"] for each in expected]
    chat.page.locator("#task textarea").fill("no mask")
    chat.page.locator("#task textarea").press("Control+Enter")
    expect(chat.page.get_by_role("alert").filter(has_text="<mask>")).to_be_visible()


def test_similarities_are_a_table(open_page: Callable[..., Chat], url: str) -> None:
    chat = open_page(permissions=["clipboard-read", "clipboard-write"]).open(url, "vectors")
    fill(chat, Texts="bad\nAnna lives in Berlin.\nbad")
    cells = [row.locator("td").all_text_contents() for row in chat.page.locator(".similarities tr").all()[1:]]
    assert [cells[0][2], cells[2][0], *(cells[row][row] for row in range(3))] == ["1.00"] * 5
    assert cells[0][1] == cells[1][0] == cells[1][2]
    chat.page.get_by_role("button", name="Copy as curl").click()
    expect(chat.page.get_by_role("button", name="Copied")).to_be_visible()
    command = chat.page.evaluate("navigator.clipboard.readText()")
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert len(json.loads(result.stdout)["data"]) == 3


@pytest.mark.usefixtures("browser")  # without one, no server is started for this test alone
def test_token_tasks_have_the_form_of_their_neighbours(url: str, checkpoints: dict[str, Path]) -> None:
    def ask(path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{url}/v1/{path}", json=body, timeout=60)

    texts = ["Anna <mask>", "<mask> and <mask>"]
    answer = ask("fill-mask", model="masks", input=texts, top_k=2).json()
    assert [each["index"] for each in answer["data"]] == [0, 1]
    one, two = (each["fills"] for each in answer["data"])
    assert (len(one), [len(mask) for mask in two]) == (2, [2, 2])
    tokens = ask("token-classification", model="entities", input=TEXT).json()["data"][0]["entities"]
    assert [each["entity"] for each in tokens] == [
        each["entity"] for each in reference(checkpoints["entities"], "token-classification", [TEXT])[0]
    ]
    wrong = ask("fill-mask", model="entities", input="a").json()["error"]
    assert (wrong["code"], wrong["message"].endswith("POST /v1/token-classification")) == ("wrong_task", True)
    assert ask("fill-mask", model="masks", input=[]).json()["error"]["param"] == "input"
    strategy = ask("token-classification", model="entities", input="a", aggregation_strategy="all").json()["error"]
    assert strategy["param"] == "aggregation_strategy"
