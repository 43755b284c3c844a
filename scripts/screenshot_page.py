# SPDX-License-Identifier: Apache-2.0
"""Take README's picture of the chat page, from a gateway that serves the demo model.

`python scripts/screenshot_page.py http://localhost:9000` writes docs/images/chat-page.png with Debian's chromium.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "chat-page.png"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PROMPTS = ("What is the weather like today?", "Is the train on time?", "Where do you drink your tea?")


def find_chromium() -> str | None:
    """The path of a Chromium of this machine, if there is one; playwright's own are not used."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def open_browser(executable: str) -> Iterator[Browser]:
    """Start Chromium without a window, and without what it asks of other hosts."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield browser
        browser.close()


def converse(page: Page, url: str) -> None:
    """Open the page, change two settings, and ask the prompts one after the other."""
    page.goto(url)
    page.get_by_label("temperature").fill("0.8")
    page.get_by_label("seed").fill("7")
    for number, prompt in enumerate(PROMPTS, 1):
        page.get_by_label("Message").fill(prompt)
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".actions:visible")).to_have_count(number)


def main() -> None:
    executable = find_chromium()
    if executable is None:
        sys.exit("there is no chromium: apt-get install chromium")
    PICTURE.parent.mkdir(exist_ok=True)
    with open_browser(executable) as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        converse(page, sys.argv[1])
        page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
