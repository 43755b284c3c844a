# SPDX-License-Identifier: Apache-2.0
"""The chat page as its reader uses it, in a headless Chromium."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page, Request, expect

WIDE, NARROW = 1280, 390
"""Widths of a window in pixels."""


class Chat:
    """The page as its reader uses it, and what it asked of the network."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[Request] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.requests.append(request))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)

    def open(self, url: str, model: str = "demo") -> Chat:
        self.page.goto(url)
        expect(self.page.locator("#model option").first).to_be_attached()
        self.page.get_by_label("Model").select_option(model)
        return self

    def choose_slow(self) -> None:
        """Choose the model of 10 tokens/s, and ask it for 15 seconds."""
        self.page.get_by_label("Model").select_option("slow")
        self.page.get_by_label("max_tokens").fill("150")

    @property
    def prompt(self) -> Any:
        return self.page.get_by_label("Message", exact=True)

    @property
    def turn(self) -> Any:
        return self.page.locator(".turn").last

    @property
    def answer(self) -> Any:
        return self.turn.locator(".content")

    def send(self, text: str) -> None:
        self.prompt.fill(text)
        self.prompt.press("Enter")

    def ask(self, text: str) -> str:
        """Send, and wait for the whole answer."""
        self.send(text)
        self.wait()
        return str(self.answer.text_content())

    def wait(self) -> None:
        expect(self.turn.locator(".actions")).to_be_visible()

    def do(self, action: str) -> None:
        self.turn.get_by_role("button", name=action, exact=True).click()

    def bodies(self) -> list[dict[str, Any]]:
        """The bodies of the requests for answers, in order."""
        return [json.loads(request.post_data or "") for request in self.requests if request.method == "POST"]

    def script(self, *events: object, end: str = "data: [DONE]\n\n") -> None:
        """Answer requests for chats with these events instead of the gateway's."""
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end
        headers = {"Content-Type": "text/event-stream"}
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=text, headers=headers))


def delta(**fields: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}
