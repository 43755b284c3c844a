# SPDX-License-Identifier: Apache-2.0
"""What the page keeps in the browser, and the model's context: in a headless Chromium, before the real gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from tests.support.chat_page import Chat, delta
from tests.support.gateway import GatewayThread

pytestmark = pytest.mark.full  # `make test-page` runs it

FORBIDDEN = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('forbidden'); } })"
FULL = "Storage.prototype.setItem = function () { throw new DOMException('full', 'QuotaExceededError'); }"


@pytest.fixture
def chat(open_page: Callable[..., Chat], gateway: GatewayThread) -> Chat:
    return open_page().open(gateway.url)


def test_conversation_and_settings_survive_a_reload(chat: Chat) -> None:
    chat.page.get_by_label("temperature").fill("0")
    chat.page.get_by_label("System prompt").fill("Be brief.")
    answer = chat.ask("How can you be so calm?")
    figures = chat.turn.locator(".figures").text_content()
    chat.page.reload()
    expect(chat.page.locator(".turn")).to_have_count(1)
    expect(chat.answer).to_have_text(answer)
    expect(chat.turn.locator(".figures")).to_have_text(str(figures))
    expect(chat.page.get_by_label("temperature")).to_have_value("0")
    expect(chat.page.get_by_label("Model")).to_have_value("demo")
    chat.ask("Why?")
    contents = [message["content"] for message in chat.bodies()[1]["messages"]]
    assert [*contents[:2], contents[3]] == ["Be brief.", "How can you be so calm?", "Why?"]
    chat.page.get_by_role("button", name="Reset to defaults").click()
    chat.page.reload()
    expect(chat.page.get_by_label("temperature")).to_have_value("")


def test_an_answer_that_a_reload_ends_is_kept(chat: Chat) -> None:
    chat.choose_slow()
    chat.send("river")
    expect(chat.answer).not_to_be_empty()
    chat.page.reload()
    expect(chat.turn.locator(".figures")).to_have_text(re.compile("stopped$"))
    expect(chat.answer).not_to_be_empty()
    expect(chat.page.get_by_role("button", name="Send")).to_be_visible()


def test_the_history_opens_exports_and_deletes(chat: Chat, tmp_path: Path) -> None:
    first = chat.ask("First question").strip()
    chat.page.get_by_role("button", name="New chat").click()
    chat.ask("Second question")
    chat.page.get_by_role("button", name="History").click()
    chats = chat.page.get_by_role("list", name="Conversations").get_by_role("listitem")
    expect(chats).to_have_count(2)
    expect(chats.first.locator(".title")).to_have_text("Second question")
    chat.page.get_by_role("button", name="First question").first.click()
    expect(chat.turn.locator(".prompt")).to_have_text("First question")
    texts = {}
    for form in ("Markdown", "JSON"):
        with chat.page.expect_download() as download:
            chat.page.get_by_role("button", name=f"Export as {form}").click()
        download.value.save_as(tmp_path / form)
        texts[form] = (tmp_path / form).read_text()
    assert texts["Markdown"] == f"## You\n\nFirst question\n\n## demo\n\n{first}\n"
    [turn] = json.loads(texts["JSON"])
    assert (turn["prompt"], turn["content"].strip(), turn["settings"]["model"]) == ("First question", first, "demo")
    chat.page.get_by_role("button", name="Delete “First question”").click()
    expect(chats).to_have_count(1)
    expect(chat.page.locator(".turn")).to_have_count(0)
    chat.page.on("dialog", lambda dialog: dialog.accept())
    chat.page.get_by_role("button", name="Delete all").click()
    expect(chats).to_have_count(0)
    assert chat.page.evaluate("Object.keys(localStorage).filter((key) => key.includes('chat'))") == []


def test_tool_calls_and_reasoning_are_kept(chat: Chat) -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    chat.script(delta(reasoning_content="Hm."), delta(tool_calls=[call]))
    chat.send("Oslo?")
    chat.wait()
    chat.page.reload()
    expect(chat.turn.locator(".tool-calls")).to_have_text("weather({})")
    expect(chat.turn.locator(".reasoning .text")).to_have_text("Hm.")


@pytest.mark.parametrize("script", [FORBIDDEN, FULL])
def test_a_browser_that_keeps_nothing_still_chats(
    open_page: Callable[..., Chat], gateway: GatewayThread, script: str
) -> None:
    chat = open_page()
    chat.page.add_init_script(script)
    chat.open(gateway.url)
    assert chat.ask("Hello").strip()
    expect(chat.page.get_by_text("This browser does not keep this conversation")).to_be_visible()
    assert chat.errors == []


def test_what_another_release_has_kept_is_passed_over(open_page: Callable[..., Chat], gateway: GatewayThread) -> None:
    chat = open_page()
    chat.page.add_init_script(
        "localStorage['hf_triton.chat.a'] = '{\"turns\":[{}]}'; localStorage['hf_triton.settings'] = '{broken';"
        "sessionStorage['hf_triton.open'] = 'a'; localStorage['hf_triton.chat.b'] = 'null'"
    )
    chat.open(gateway.url)
    chat.ask("Hello")
    assert chat.errors == []


def test_empty_fields_show_the_models_defaults(chat: Chat, gateway: GatewayThread) -> None:
    models = {model["id"]: model for model in httpx.get(f"{gateway.url}/v1/models").json()["data"]}
    assert models["slow"]["defaults"] == {"temperature": 0.0, "top_p": 1.0, "max_tokens": 8}
    assert models["demo"]["defaults"]["max_tokens"] == 64
    for model in ("demo", "slow"):
        chat.page.get_by_label("Model").select_option(model)
        field = chat.page.get_by_label("max_tokens")
        expect(field).to_have_attribute("placeholder", str(models[model]["defaults"]["max_tokens"]))


def test_a_full_context_says_what_to_do(chat: Chat, gateway: GatewayThread) -> None:
    models = {model["id"]: model for model in httpx.get(f"{gateway.url}/v1/models").json()["data"]}
    size = models["demo"]["max_model_len"]
    chat.ask("Hello")
    expect(chat.page.locator("#context-text")).to_have_text(re.compile(rf"^\d+ of {size:,} tokens of context\.$"))
    chat.page.get_by_label("max_tokens").fill(str(size))
    chat.send("And you?")
    chat.wait()
    chat.turn.get_by_role("button", name="Lower max_tokens to").click()
    chat.wait()
    expect(chat.turn.locator(".error")).to_be_hidden()
    lowered = chat.bodies()[2]
    assert lowered["max_tokens"] < size
    assert lowered["messages"] == chat.bodies()[1]["messages"]
    chat.page.get_by_label("max_tokens").fill("")
    chat.send("long " * size)
    expect(chat.turn.get_by_role("button", name="Lower max_tokens to")).to_be_hidden()
    expect(chat.turn.get_by_role("button", name="Ask in a new chat")).to_be_visible()


def test_a_new_chat_asks_without_what_was_before(chat: Chat) -> None:
    chat.ask("Hello")
    chat.page.get_by_label("max_tokens").fill("100000")
    chat.send("And you?")
    chat.page.get_by_label("max_tokens").fill("")
    chat.do("Ask in a new chat")
    chat.wait()
    expect(chat.page.locator(".turn")).to_have_count(1)
    assert [message["content"] for message in chat.bodies()[2]["messages"]] == ["And you?"]
