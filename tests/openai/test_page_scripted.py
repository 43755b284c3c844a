# SPDX-License-Identifier: Apache-2.0
"""What a server may answer and a browser may hold, in a headless Chromium: the page before scripted answers."""

from __future__ import annotations

import base64
import io
import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Route, expect

from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.chat_page import Chat, delta
from tests.support.gateway import GatewayThread

pytestmark = pytest.mark.full  # `make test-page` runs it

TASKS = {
    "demo": "text-generation",
    "vectors": "embeddings",
    "sentiment": "text-classification",
    "entities": "token-classification",
    "reranker": "rerank",
}
MODELS: dict[str, Any] = {"data": [{"id": name, "task": task, "max_model_len": 100} for name, task in TASKS.items()]}
MODELS["data"].append({"id": "blind", "task": "text-generation", "images": "no", "sleeping": True})
GIVE = """([type, name, mimeType, text]) => {
    const data = new DataTransfer();
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    data.items.add(new File([bytes], name, { type: mimeType }));
    const options = { bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data };
    const event = new (type === "paste" ? ClipboardEvent : DragEvent)(type, options);
    document.getElementById("prompt").dispatchEvent(event);
    return event.defaultPrevented;
}"""
FORBIDDEN = "for (const name of ['localStorage', 'sessionStorage'])"
FORBIDDEN += " Object.defineProperty(window, name, { get() { throw new Error('forbidden'); } });"
SLOW_DRAWING = """async () => {
    const { TurnView } = await import("/page/view.js");
    const { newTurn } = await import("/page/conversation.js");
    const view = new TurnView(newTurn("a", { mode: "chat", model: "demo" }));
    let draws = 0;
    view.draw = () => { draws += 1; for (const start = performance.now(); performance.now() - start < 50; ); };
    for (const start = performance.now(); performance.now() - start < 1000; ) {
        view.updateSoon();
        await new Promise((done) => setTimeout(done, 5));
    }
    return draws;
}"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway whose Triton is not there: it gives the page, and tests give the answers."""
    with GatewayThread(GatewayConfig(triton="localhost:1", port=0)) as gateway:
        yield gateway.url


@pytest.fixture
def chat(open_page: Callable[..., Chat], url: str) -> Chat:
    chat = open_page(permissions=["clipboard-read", "clipboard-write"])
    answer(chat, "models", MODELS)
    return chat.open(url)


def answer(chat: Chat, path: str, body: object) -> None:
    chat.page.context.route(f"**/v1/{path}", lambda route: route.fulfill(json=body))


def run(chat: Chat, model: str, **texts: str) -> None:
    chat.page.get_by_label("Model").select_option(model)
    for name, text in texts.items():
        chat.page.locator(f"#task [name={name}]").fill(text)
    chat.page.get_by_role("button", name="Run").click()


def test_a_browser_that_keeps_nothing_takes_a_key(open_page: Callable[..., Chat], url: str) -> None:
    def guard(route: Route) -> None:
        is_known = route.request.headers.get("authorization") == "Bearer right-key"
        route.fulfill(json=MODELS) if is_known else route.fulfill(status=401, json={"error": {"message": "no key"}})

    chat = open_page()
    chat.page.add_init_script(FORBIDDEN)
    chat.page.route("**/v1/models", guard)
    chat.page.goto(url)
    field = chat.page.get_by_label("This gateway asks for an API key")
    field.fill("right-key")
    field.press("Enter")
    expect(chat.page.get_by_label("Model")).to_have_value("demo")
    chat.script(delta(content="Hello"))
    chat.ask("Hi")
    assert chat.requests[-1].headers["authorization"] == "Bearer right-key"


# --- forms ------------------------------------------------------------------------------------------------------------


def test_an_answer_that_comes_late_is_not_drawn_in_another_form(chat: Chat) -> None:
    held: list[Route] = []
    chat.page.route("**/v1/classify", lambda route: held.append(route))
    answer(chat, "rerank", {"results": [{"document": {"text": "a document"}, "relevance_score": 0.5}]})
    with chat.page.expect_request("**/v1/classify"):
        run(chat, "sentiment")
    run(chat, "reranker")
    expect(chat.page.locator(".result")).to_contain_text("a document")
    assert held[0].request.failure is not None  # the page gave it up
    expect(chat.page.locator(".result")).to_contain_text("a document")
    assert chat.errors == []


def test_many_vectors_are_compared_in_part(chat: Chat) -> None:
    vectors = [{"embedding": [1.0, float(number % 2)]} for number in range(500)]
    answer(chat, "embeddings", {"data": vectors})
    run(chat, "vectors", input="\n".join(f"text {number}" for number in range(500)))
    expect(chat.page.locator(".similarities caption")).to_have_text(
        "Cosine similarity of vectors of 2 dimensions, of the first 30 of 500 texts"
    )
    rows = chat.page.locator(".similarities tr")
    expect(rows).to_have_count(31)
    assert rows.nth(1).locator("td").all_text_contents() == ["1.00", "0.71"] * 15


@pytest.mark.parametrize(("model", "path"), {"sentiment": "classify", "vectors": "embeddings"}.items())
def test_an_answer_without_content_is_said_to_be_empty(chat: Chat, model: str, path: str) -> None:
    answer(chat, path, {"data": []})
    run(chat, model)
    expect(chat.page.locator(".result")).to_have_text("The server's answer is empty.")


def test_entities_that_overlap_repeat_no_text(chat: Chat) -> None:
    places = [("A", 0, 8), ("B", 5, 12), ("C", 6, 7), ("D", 13, 15)]
    entities = [{"entity_group": group, "start": start, "end": end, "score": 0.5} for group, start, end in places]
    answer(chat, "token-classification", {"data": [{"entities": entities}]})
    run(chat, "entities", input="Anna of Berlin, here")
    expect(chat.page.locator(".result .text")).to_have_text("Anna of ABerlBCin,D here")


# --- conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_in_two_tabs_loses_no_turn(chat: Chat, url: str) -> None:
    answer(chat, "models", MODELS)
    chat.script(delta(content="Yes"))
    chat.ask("First")
    opened = chat.page.evaluate("sessionStorage['hf_triton.open']")
    other = Chat(chat.page.context.new_page())
    other.page.add_init_script(f"sessionStorage['hf_triton.open'] ??= {json.dumps(opened)}")
    other.script(delta(content="Yes"))
    other.open(url)  # what duplicating the tab does
    expect(other.page.locator(".turn")).to_have_count(1)
    chat.ask("Here")
    other.ask("There")
    chat.ask("Here again")
    other.ask("There again")
    kept = other.page.evaluate(
        "Object.keys(localStorage).filter((key) => key.includes('.chat.')).map((key) =>"
        " JSON.parse(localStorage[key]).turns.map(({ prompt }) => prompt).join())"
    )
    assert sorted(kept) == ["First,Here,Here again", "First,There,There again"]
    other.page.reload()
    expect(other.page.locator(".turn .prompt")).to_have_text(["First", "There", "There again"])


def test_a_conversation_that_is_opened_again_while_it_runs_stays_one(chat: Chat) -> None:
    chat.page.route("**/v1/chat/completions", lambda route: None)
    chat.send("Hello")
    chat.page.get_by_role("button", name="History").click()
    chat.page.locator("#chats .open").click()
    chat.wait()
    chat.page.unroute_all()
    answer(chat, "models", MODELS)
    chat.script(delta(content="Yes"))
    chat.ask("Again")
    expect(chat.page.locator("#chats li")).to_have_count(1)


TURN = {"prompt": "a", "content": "", "reasoning": "", "toolCalls": [], "settings": {}}
BAD: list[Any] = [
    {"turns": [None]},
    {},
    {"turns": "ab"},
    {"turns": [TURN | {"toolCalls": [None]}]},
    {"turns": [TURN | {"settings": None}]},
    {"turns": [TURN | {"prompt": 1}]},
    {"turns": [TURN | {"images": [None]}]},
]


@pytest.mark.parametrize("kept", BAD)
def test_a_bad_conversation_is_passed_over(chat: Chat, kept: dict[str, Any]) -> None:
    good = {"format": 1, "turns": [TURN | {"prompt": "good", "usage": {"completion_tokens": None}}]}
    bad = {"format": 1, "id": "q", **kept}
    chat.page.evaluate("([name, value]) => localStorage.setItem(name, value)", ["hf_triton.chat.q", json.dumps(bad)])
    chat.page.evaluate("([name, value]) => localStorage.setItem(name, value)", ["hf_triton.chat.g", json.dumps(good)])
    chat.page.evaluate("sessionStorage['hf_triton.open'] = 'q'")
    chat.page.reload()
    expect(chat.page.get_by_label("Model")).to_have_value("demo")
    chat.page.get_by_role("button", name="History").click()
    expect(chat.page.locator("#chats .title")).to_have_text(["good"])
    chat.page.locator("#chats .open").click()
    expect(chat.turn.locator(".prompt")).to_have_text("good")
    assert chat.errors == []


# --- images -----------------------------------------------------------------------------------------------------------


def png(size: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), "teal").save(file, "PNG")
    return file.getvalue()


def choose(chat: Chat, name: str, data: bytes, kind: str = "image/png") -> None:
    with chat.page.expect_file_chooser() as chooser:
        chat.page.get_by_role("button", name="Add images").press("Enter")
    chooser.value.set_files([{"name": name, "mimeType": kind, "buffer": data}])


def give(chat: Chat, how: str, name: str, data: bytes) -> bool:
    """Paste or drop a file; whether the page takes it."""
    return bool(chat.page.evaluate(GIVE, [how, name, "image/png", base64.b64encode(data).decode()]))


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def test_images_are_chosen_pasted_dropped_and_removed(chat: Chat) -> None:
    drafts = chat.page.get_by_role("list", name="Images to send").get_by_role("img")
    choose(chat, "one.png", png(1))
    expect(chat.prompt).to_be_focused()
    assert give(chat, "paste", "two.png", png(2))
    expect(drafts).to_have_count(2)
    assert give(chat, "dragover", "three.png", b"")
    assert give(chat, "drop", "three.png", png(3))
    expect(drafts).to_have_count(3)
    chat.page.get_by_role("button", name="Remove two.png").press("Enter")
    expect(chat.prompt).to_be_focused()
    chat.script(delta(content="Teal."))
    chat.ask("Which colour?")
    expect(drafts).to_have_count(0)
    images = [part(png(1)), part(png(3))]
    first = {"role": "user", "content": [*images, {"type": "text", "text": "Which colour?"}]}
    assert chat.bodies()[0]["messages"] == [first]
    shown = chat.turn.get_by_role("img")
    assert [image.get_attribute("alt") for image in shown.all()] == ["one.png", "three.png"]
    assert shown.first.evaluate("image => image.naturalWidth") == 1  # the policy lets it be shown
    chat.ask("And why?")
    assert [message["content"] for message in chat.bodies()[1]["messages"]] == [first["content"], "Teal.", "And why?"]
    assert chat.errors == []


def test_images_go_with_their_turn(chat: Chat) -> None:
    chat.script(delta(content="Teal."))
    choose(chat, "one.png", png(1))
    chat.page.get_by_role("button", name="Remove one.png").wait_for()
    chat.prompt.press("Enter")  # an image alone is a message
    chat.wait()
    chat.do("Regenerate")
    chat.wait()
    chat.do("Edit")
    chat.ask("Why?")
    sent = [body["messages"][0]["content"] for body in chat.bodies()]
    assert sent == [[part(png(1))], [part(png(1))], [part(png(1)), {"type": "text", "text": "Why?"}]]
    chat.page.get_by_role("button", name="New chat").click()
    chat.page.get_by_role("button", name="History").click()
    chat.page.locator("#chats .open").click()
    expect(chat.turn.get_by_role("img")).to_have_count(1)
    assert "base64" not in chat.page.evaluate("JSON.stringify([{ ...localStorage }, { ...sessionStorage }])")
    chat.page.reload()
    expect(chat.turn.locator(".images")).to_have_text("one.png is not kept: the model does not see it any more.")
    chat.ask("And now?")
    assert [message["content"] for message in chat.bodies()[3]["messages"]] == ["Why?", "Teal.", "And now?"]


@pytest.mark.parametrize(
    ("name", "data", "kind", "sentence"),
    [
        ("a.txt", b"text", "text/plain", "a.txt is no image of PNG, JPEG, WebP or GIF."),
        ("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", "a.svg is no image of PNG, "),
        ("a.png", png(8)[:40], "image/png", "a.png cannot be read as an image."),
        ("a.gif", bytes(10_000_001), "image/gif", "a.gif is too large: a conversation has 10 MB of images at most."),
    ],
)
def test_other_files_are_refused_with_a_sentence(chat: Chat, name: str, data: bytes, kind: str, sentence: str) -> None:
    choose(chat, name, data, kind)
    expect(chat.page.locator("#note")).to_contain_text(sentence)
    expect(chat.page.locator("#images li")).to_have_count(0)


def test_who_takes_no_images_says_so(chat: Chat) -> None:
    choose(chat, "one.png", png(1))
    chat.page.get_by_label("Completion").check()
    chat.send("Hello")
    expect(chat.page.locator("#note")).to_have_text("Completion takes no images: choose Chat in the settings.")
    chat.page.get_by_label("Model").select_option("blind")
    chat.page.get_by_label("Chat", exact=True).check()
    expect(chat.page.get_by_role("button", name="Add images")).to_be_hidden()
    give(chat, "paste", "two.png", png(2))
    expect(chat.page.locator("#note")).to_have_text("The model blind takes no images.")
    assert chat.bodies() == []


def test_a_model_that_sleeps_says_so_until_it_is_asked(chat: Chat) -> None:
    chooser = chat.page.get_by_label("Model")
    expect(chooser).to_contain_text("blind (sleeps)")
    chooser.select_option("blind")
    chat.script(delta(content="Awake."))
    chat.ask("Hi")
    expect(chooser).not_to_contain_text("(sleeps)")


def test_a_long_request_is_copied_as_curl(chat: Chat) -> None:
    chat.script(delta(content="Teal."))
    choose(chat, "one.png", png(1) + bytes(200_000))
    chat.page.get_by_role("button", name="Remove one.png").wait_for()
    chat.ask("What's this?")
    chat.do("Copy as curl")
    expect(chat.turn.get_by_role("button", name="Copied")).to_be_visible()
    command = chat.page.evaluate("navigator.clipboard.readText()")
    script = f'curl() {{ echo "$@" >&2; cat; }}\n{command}'
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == chat.bodies()[0]
    assert done.stderr.endswith("/v1/chat/completions -H Content-Type: application/json -d @-\n")


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [4, 100_000_000, -1, None, "a"])
def test_tool_calls_of_any_index_are_shown(chat: Chat, index: object) -> None:
    calls: list[Any] = [
        {"index": index, "id": "one", "function": {"name": "weather", "arguments": '{"city"'}},
        {"index": 0, "id": "two", "function": {"name": "time", "arguments": "{}"}},
        {"index": index, "function": {"arguments": ': "Oslo"}'}},
    ]
    chat.script(*[delta(tool_calls=[call]) for call in calls])
    chat.ask("Oslo?")
    expect(chat.turn.locator(".tool-calls pre")).to_have_text(['weather({"city": "Oslo"})', "time({})"])
    chat.ask("And now?")
    sent = chat.bodies()[1]["messages"][1]["tool_calls"]
    assert [(call["id"], *sorted(call)) for call in sent] == [
        (name, "function", "id", "type") for name in ("one", "two")
    ]
    assert chat.errors == []


def test_many_tool_calls_are_cut(chat: Chat) -> None:
    calls = [{"index": index, "function": {"name": "f", "arguments": ""}} for index in range(2000)]
    chat.script(delta(tool_calls=calls))
    chat.ask("Hi")
    expect(chat.turn.locator(".tool-calls pre")).to_have_count(1000)


@pytest.mark.parametrize("tokens", ["x", None, [1]])
def test_usage_that_is_no_number_is_left_out(chat: Chat, tokens: object) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
    chat.script(delta(content="Yes"), usage)
    chat.ask("Hi")
    expect(chat.turn.locator(".figures")).not_to_contain_text("tokens")
    expect(chat.page.locator("#context-text")).to_have_text("5 of 100 tokens of context.")
    assert chat.errors == []


def test_a_button_that_is_clicked_twice_says_copy_again(chat: Chat) -> None:
    chat.script(delta(content="Yes"))
    chat.ask("Hi")
    button = chat.turn.locator("[data-action=copy]")
    button.click()
    expect(button).to_have_text("Copied")
    button.click()
    chat.page.wait_for_timeout(2000)
    expect(button).to_have_text("Copy")


def test_an_answer_that_is_slow_to_draw_is_drawn_less_often(chat: Chat) -> None:
    assert 1 < chat.page.evaluate(SLOW_DRAWING) < 9  # with each frame it would be 15 or more
