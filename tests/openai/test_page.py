# SPDX-License-Identifier: Apache-2.0
"""The chat page in a headless Chromium, before the real gateway, as a reader uses it with mouse and keys.

Skipped without Chromium, unless REQUIRE_CHROMIUM=1 is set: `apt-get install chromium`.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from hf_triton.testing import TritonServer
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.chat_page import NARROW, WIDE, Chat, delta
from tests.support.gateway import GatewayThread, num_running, wait_until

pytestmark = pytest.mark.full  # `make test-page` runs it

FIGURES = re.compile(r"[\d,]+ tokens · [\d,.]+ tokens/s · first token after [\d.]+ s")
HTML = "<img src=x onerror=document.title='run'><b>bold</b>"
IS_AT_END = "(e => e.scrollTop > 0 && e.scrollHeight - e.clientHeight - e.scrollTop < 2)(document.documentElement)"


@pytest.fixture
def url(gateway: GatewayThread) -> str:
    return gateway.url


@pytest.fixture
def chat(open_page: Callable[..., Chat], url: str) -> Chat:
    return open_page().open(url)


# --- looks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_an_answer_streams_at_each_width(open_page: Callable[..., Chat], url: str, width: int) -> None:
    chat = open_page(width).open(url)
    assert chat.ask("How can you be so calm?").strip()
    expect(chat.turn.locator(".figures")).to_have_text(FIGURES)
    assert chat.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for _ in range(4):
        chat.ask("And why?")
    assert chat.page.evaluate(IS_AT_END)
    assert {request.url.startswith(url) for request in chat.requests} == {True}
    assert chat.errors == []


def test_the_page_may_load_nothing_from_elsewhere(url: str) -> None:
    for path in ("/", "/page/page.js", "/page/page.css"):
        with urllib.request.urlopen(url + path) as response:
            policy, tag = response.headers["Content-Security-Policy"], response.headers["ETag"]
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert not re.search(rb"(src|href|url\(|from|fetch\()\s*=?\s*[\"']?(https?:)?//", response.read())
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        with pytest.raises(urllib.error.HTTPError, match="304"):
            urllib.request.urlopen(urllib.request.Request(url + path, headers={"If-None-Match": tag}))


CONTRASTS = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgb = (color, behind = [0, 0, 0]) => {
        canvas.fillStyle = `rgb(${behind})`;
        canvas.fillRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (color) => color.map((value) => value / 255)
        .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
        .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
    const background = (element) => {
        if (!element) return [255, 255, 255];
        return rgb(getComputedStyle(element).backgroundColor, background(element.parentElement));
    };
    const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    const shown = [...document.body.querySelectorAll("*")].filter((element) =>
        element.checkVisibility() && own(element) && !element.closest(".unseen, option"));
    return shown.map((element) => {
        const behind = background(element);
        const [one, other] = [light(behind), light(rgb(getComputedStyle(element).color, behind))];
        const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        return [Math.round(contrast * 100) / 100, element.outerHTML.slice(0, 80)];
    }).filter(([contrast]) => contrast < 4.5);
}"""
EVERYTHING = "# A\n\n**b** `c` [d](https://e.f)\n\n> g\n\n|h|i|\n|-|-|\n|j|k|\n\n```python\nl\n```"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_text_is_readable(open_page: Callable[..., Chat], url: str, width: int, scheme: str) -> None:
    chat = open_page(width, color_scheme="light").open(url)
    if width == NARROW:
        chat.page.get_by_role("button", name="Settings").click()
    chat.page.get_by_text(scheme.title(), exact=True).click()  # instead of the system's
    chat.page.get_by_label("Other fields, as JSON").fill("{")
    assert chat.page.evaluate(CONTRASTS) == []
    chat.page.get_by_label("Other fields, as JSON").fill("")
    if width == NARROW:
        chat.page.get_by_role("button", name="Close").click()
    chat.script(delta(reasoning_content="m"), delta(content=EVERYTHING), end="")
    chat.send("Hello")
    chat.wait()
    expect(chat.turn.locator(".error")).to_be_visible()
    chat.page.get_by_role("button", name="History").click()
    assert chat.page.evaluate(CONTRASTS) == []
    assert chat.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    chat.page.reload()
    expect(chat.page.locator("html")).to_have_css("color-scheme", scheme)


# --- asking -----------------------------------------------------------------------------------------------------------


def test_stop_keeps_what_has_come_and_frees_the_model(chat: Chat, triton: TritonServer) -> None:
    chat.choose_slow()
    chat.send("river")
    expect(chat.answer).not_to_be_empty()
    chat.page.get_by_role("button", name="Stop").click()
    chat.wait()
    kept = chat.answer.text_content()
    expect(chat.turn.locator(".figures")).to_have_text(re.compile(r"[\d,.]+ tokens/s .* stopped$"))
    expect(chat.page.get_by_role("button", name="Send")).to_be_visible()
    wait_until(lambda: num_running(triton) == 0, timeout_s=5)
    chat.page.get_by_label("max_tokens").fill("2")
    chat.ask("mountain")
    roles = [message["role"] for message in chat.bodies()[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert chat.bodies()[1]["messages"][1]["content"].strip() == kept.strip()


def test_each_turn_sends_the_conversation(chat: Chat) -> None:
    chat.page.get_by_label("System prompt").fill("Be brief.")
    first = chat.ask("How can you be so calm?")
    chat.ask("Why?")
    chat.do("Regenerate")
    chat.wait()
    chat.do("Edit")
    expect(chat.prompt).to_have_value("Why?")
    chat.ask("Where?")
    expect(chat.page.locator(".turn")).to_have_count(2)
    bodies = chat.bodies()
    assert [message["content"].strip() for message in bodies[1]["messages"]] == [
        "Be brief.",
        "How can you be so calm?",
        first.strip(),
        "Why?",
    ]
    assert bodies[2] == bodies[1]
    assert bodies[3]["messages"] == [*bodies[1]["messages"][:-1], {"role": "user", "content": "Where?"}]
    chat.page.get_by_role("button", name="New chat").click()
    expect(chat.page.locator(".turn")).to_have_count(0)
    chat.ask("Hello")
    assert [message["content"] for message in chat.bodies()[4]["messages"]] == ["Be brief.", "Hello"]


def test_parameters_reach_the_body_and_empty_ones_are_not_sent(chat: Chat) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    common = {"model": "demo", "messages": messages, "stream": True}
    common["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chat.ask("Hello")
    chat.page.get_by_role("button", name="New chat").click()
    for label, value in {"temperature": "0", "top_p": "0.9", "max_tokens": "12", "seed": "7"}.items():
        chat.page.get_by_label(label).fill(value)
    chat.page.get_by_label("stop, one string per line").fill("\\n\\n\nThe end")
    chat.page.get_by_label("Other fields, as JSON").fill('{"top_k": 5}')
    chat.ask("Hello")
    given = {"temperature": 0, "top_p": 0.9, "max_tokens": 12, "seed": 7, "stop": ["\n\n", "The end"], "top_k": 5}
    assert chat.bodies() == [common, common | given]


@pytest.mark.parametrize("fields", ['{"top_k": 5', "[1]", '{"n": 2}', '{"stream": false}'])
def test_other_fields_that_cannot_be_sent_are_refused(chat: Chat, fields: str) -> None:
    chat.page.get_by_label("Other fields, as JSON").fill(fields)
    problem = chat.page.locator("#extra-problem")
    expect(problem).to_have_text(re.compile("^(This is not JSON|Write an object|The page sends)"))
    chat.send("Hello")
    expect(chat.page.get_by_label("Other fields, as JSON")).to_be_focused()
    expect(chat.prompt).to_have_value("Hello")
    expect(problem).to_be_visible()
    assert chat.bodies() == []
    chat.page.get_by_label("Other fields, as JSON").fill("")
    expect(problem).to_be_hidden()


def test_an_error_is_the_gateways_sentence(chat: Chat) -> None:
    chat.page.get_by_label("temperature").fill("-1")
    chat.send("Hello")
    expect(chat.turn.locator(".error")).to_contain_text("temperature")
    chat.page.get_by_label("temperature").fill("")
    chat.do("Regenerate")
    chat.wait()
    expect(chat.answer).not_to_be_empty()
    expect(chat.turn.locator(".error")).to_be_hidden()


def test_a_model_without_chat_template_offers_completion(chat: Chat) -> None:
    chat.page.get_by_label("Model").select_option("bare")
    chat.send("The model")
    expect(chat.turn.locator(".error")).to_contain_text("chat template")
    chat.do("Use completion mode")
    chat.wait()
    expect(chat.answer).not_to_be_empty()
    assert chat.bodies()[1]["prompt"] == "The model"
    expect(chat.page.get_by_label("Completion")).to_be_checked()
    expect(chat.page.locator(".turn")).to_have_count(1)


# --- what a model or a server may send --------------------------------------------------------------------------------


def test_markup_stays_text(chat: Chat) -> None:
    chat.page.get_by_label("Other fields, as JSON").fill(json.dumps({"guided_choice": [HTML]}))
    assert chat.ask(HTML).strip() == HTML
    expect(chat.turn.locator(".prompt")).to_have_text(HTML)
    expect(chat.page.locator("#turns img, #turns b, #announcer img")).to_have_count(0)
    expect(chat.page).to_have_title("hf_triton")


def test_reasoning_is_folded_and_tool_calls_are_shown(chat: Chat) -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city"'}}
    rest = {"index": 0, "function": {"arguments": ': "Oslo"}'}}
    chat.script(
        delta(role="assistant"),
        delta(reasoning_content="First "),
        delta(reasoning_content="the weather."),
        delta(tool_calls=[call]),
        delta(tool_calls=[rest]),
        {"choices": [], "usage": {"completion_tokens": 9}},
    )
    chat.send("Oslo?")
    chat.wait()
    reasoning = chat.turn.get_by_text("First the weather.")
    expect(reasoning).to_be_hidden()
    chat.turn.get_by_text("Reasoning").click()
    expect(reasoning).to_be_visible()
    expect(chat.turn.locator(".tool-calls")).to_have_text('weather({"city": "Oslo"})')
    chat.send("And Bergen?")
    chat.wait()
    call["function"] = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    del call["index"]
    assert chat.bodies()[1]["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ('data: {"error": {"message": "the engine stopped"}}\n\n', "the engine stopped"),
        ("", "The connection ended before the answer did."),
    ],
)
def test_a_stream_that_breaks_says_so(chat: Chat, end: str, sentence: str) -> None:
    chat.script(delta(content="Half"), end=end)
    chat.send("Hello")
    expect(chat.turn.locator(".error")).to_have_text(sentence)
    expect(chat.answer).to_have_text("Half")


def test_a_gateway_that_is_gone_is_named(chat: Chat) -> None:
    chat.page.route("**/v1/**", lambda route: route.abort())
    chat.send("Hello")
    expect(chat.turn.locator(".error")).to_have_text("The gateway cannot be reached.")


# --- keyboard ---------------------------------------------------------------------------------------------------------


def tab_to(chat: Chat, name: str, key: str = "Tab") -> None:
    """Press Tab until the element with a name has the focus."""
    names = []
    for _ in range(30):
        chat.page.keyboard.press(key)
        focused = chat.page.locator(":focus")
        names.append(focused.evaluate("e => (e.labels?.[0] ?? e).textContent.trim() || e.id"))
        if names[-1].startswith(name):
            return
    raise AssertionError(f"{name} is not among {names}")


def test_keys_alone_suffice(chat: Chat) -> None:
    keyboard = chat.page.keyboard
    expect(chat.prompt).to_be_focused()
    keyboard.type("How can")
    keyboard.press("Shift+Enter")
    keyboard.type("you be")
    keyboard.press("Enter")
    chat.wait()
    expect(chat.prompt).to_be_focused()
    tab_to(chat, "Regenerate", "Shift+Tab")
    keyboard.press("Enter")
    chat.wait()
    tab_to(chat, "max_tokens")
    keyboard.type("3")
    tab_to(chat, "Model", "Shift+Tab")
    keyboard.type("decoupled")
    tab_to(chat, "Message")
    keyboard.type("river")
    keyboard.press("Enter")
    chat.wait()
    bodies = chat.bodies()
    assert bodies[0]["messages"][0]["content"] == "How can\nyou be"
    assert bodies[1] == bodies[0]
    assert (bodies[2]["model"], bodies[2]["max_tokens"]) == ("decoupled", 3)


def test_escape_stops_and_the_focus_returns(chat: Chat) -> None:
    chat.choose_slow()
    chat.send("river")
    chat.page.keyboard.type("mountain")
    chat.page.keyboard.press("Enter")
    expect(chat.page.locator("#note")).to_have_text(re.compile("^An answer is running"))
    expect(chat.prompt).to_have_value("mountain")
    chat.page.keyboard.press("Escape")
    expect(chat.turn.locator(".figures")).to_have_text(re.compile("stopped$"))
    expect(chat.prompt).to_be_focused()
    chat.do("Edit")
    chat.page.keyboard.press("Escape")
    expect(chat.prompt).to_have_value("")
    assert len(chat.bodies()) == 1


def test_settings_open_and_close_on_a_narrow_screen(open_page: Callable[..., Chat], url: str) -> None:
    chat = open_page(NARROW).open(url)
    expect(chat.page.get_by_label("temperature")).to_be_hidden()
    tab_to(chat, "Settings", "Shift+Tab")
    chat.page.keyboard.press("Enter")
    tab_to(chat, "temperature")
    chat.page.keyboard.type("0.5")
    chat.page.keyboard.press("Escape")
    toggle = chat.page.get_by_role("button", name="Settings")
    expect(toggle).to_be_focused()
    expect(toggle).to_have_attribute("aria-expanded", "false")
    tab_to(chat, "Message")
    chat.ask("Hello")
    assert chat.bodies()[0]["temperature"] == 0.5


def test_answers_are_announced(chat: Chat) -> None:
    answer = chat.ask("How can you be so calm?")
    expect(chat.page.get_by_role("status")).to_have_text(answer)


# --- copy as curl, keys -----------------------------------------------------------------------------------------------


def test_the_curl_command_sends_the_same_request(open_page: Callable[..., Chat], url: str) -> None:
    chat = open_page(permissions=["clipboard-read", "clipboard-write"]).open(url)
    prompt = "It's \"$HOME\" `id` \\n 'q' ümlaut"
    chat.page.get_by_label("temperature").fill("0")
    answer = chat.ask(prompt)
    chat.do("Copy as curl")
    expect(chat.turn.get_by_role("button", name="Copied")).to_be_visible()
    command = chat.page.evaluate("navigator.clipboard.readText()")
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    chunks = [json.loads(line[6:]) for line in result.stdout.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text.strip() == answer.strip()
    assert prompt.replace("'", "'\\''").replace("\\n", "\\\\n").replace('"', '\\"') in command
    chat.do("Copy")
    assert chat.page.evaluate("navigator.clipboard.readText()").strip() == answer.strip()


def test_text_is_shown_where_no_page_may_copy(chat: Chat) -> None:
    chat.page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error()); }")
    chat.ask("Hello")
    chat.do("Copy as curl")
    expect(chat.page.get_by_role("dialog").get_by_role("textbox")).to_have_value(re.compile("^curl -N 'http"))
    chat.page.keyboard.press("Escape")
    expect(chat.page.get_by_role("dialog")).to_be_hidden()


def test_the_page_asks_for_the_key_and_keeps_it_in_the_tab(
    open_page: Callable[..., Chat], triton: TritonServer, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("right-key\n")
    config = GatewayConfig(triton=triton.grpc_url, port=0, api_key_file=tmp_path / "keys")
    with GatewayThread(config) as guarded:
        chat = open_page(permissions=["clipboard-read", "clipboard-write"])
        chat.page.goto(guarded.url)
        field = chat.page.get_by_label("This gateway asks for an API key")
        expect(field).to_be_focused()
        for key in ("wrong-key", "right-key"):
            field.fill(key)
            field.press("Enter")
            refusal = chat.page.get_by_text("The gateway refuses this API key.")
            expect(refusal).to_be_visible() if key == "wrong-key" else expect(refusal).to_be_hidden()
        chat.page.get_by_label("Model").select_option("demo")
        chat.ask("Hello")
        expect(chat.answer).not_to_be_empty()
        chat.do("Copy as curl")
        expect(chat.turn.get_by_role("button", name="Copied")).to_be_visible()
        command = chat.page.evaluate("navigator.clipboard.readText()")
        assert '-H "Authorization: Bearer $OPENAI_API_KEY"' in command
        assert "right-key" not in command
        kept = chat.page.evaluate("[Object.entries(localStorage).join(), document.cookie]")
        assert "right-key" not in kept[0]
        assert kept[1] == ""
        (tmp_path / "keys").write_text("new-key\n")
        chat.page.wait_for_timeout(1_100)  # the gateway looks at the file once a second
        chat.send("Hello again")
        expect(field).to_be_focused()
        field.fill("new-key")
        field.press("Enter")
        chat.wait()
        expect(chat.turn.locator(".error")).to_be_hidden()
        expect(chat.answer).not_to_be_empty()
        expect(chat.page.locator(".turn")).to_have_count(2)
        chat.page.close()
