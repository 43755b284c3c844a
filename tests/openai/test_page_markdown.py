# SPDX-License-Identifier: Apache-2.0
"""How the page draws Markdown: in a headless Chromium, the page's own modules on texts as models write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.gateway import GatewayThread

pytestmark = pytest.mark.full  # `make test-page` runs it

DRAW = """async (text) => {
    const { Markdown } = await import("/page/markdown.js");
    const element = document.createElement("div");
    new Markdown(element).update(text);
    return element.innerHTML;
}"""
STREAM = """async ([text, step]) => {
    const { Markdown } = await import("/page/markdown.js");
    const [whole, streamed] = [document.createElement("div"), document.createElement("div")];
    new Markdown(whole).update(text);
    const markdown = new Markdown(streamed);
    for (let end = 1; end < text.length + step; end += step) markdown.update(text.slice(0, end));
    return streamed.isEqualNode(whole);
}"""
CHANGES = """async (text) => {
    const { Markdown } = await import("/page/markdown.js");
    const element = document.createElement("div");
    const markdown = new Markdown(element);
    const changed = [];
    const observer = new MutationObserver(() => {});
    observer.observe(element, { childList: true, characterData: true, subtree: true });
    let numRead = 0;
    const split = String.prototype.split;
    String.prototype.split = function (...rest) { numRead += this.length; return split.apply(this, rest); };
    for (let end = 1; end <= text.length; end += 1) {
        markdown.update(text.slice(0, end));
        const last = element.childNodes.length - 2;
        for (const { target } of observer.takeRecords()) {
            const block = [...element.childNodes].findIndex((node) => node.contains(target));
            if (block >= 0 && block < last) changed.push(block);
        }
    }
    String.prototype.split = split;
    return [changed, numRead / text.length];
}"""
LINK = ' rel="noopener noreferrer" target="_blank"'
EVERYTHING = """# Title **bold** #

Some *emphasis*, **strong _nested_**, `code *x*`, ~~gone~~, snake_case_name and 2 * 3 * 4.
A [link](https://example.com/a_(b) "title") and https://example.com/c.

- one
- two
  continued
  1. nested

     more of it
- [x] done

1. First:
```python
def f(x):
\treturn x

print("<b>")
```
2. Second

   ```sh
   ls
   ```

| a | b |
|:-:|--:|
| 1 | `x` |

not a table | yet
|---|

> quote
> > inner

---
$$
E = mc^2
$$
Ends **unclosed and `open"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """A page of a gateway whose Triton is not there: the modules are all that is needed."""
    with GatewayThread(GatewayConfig(triton="localhost:1", port=0)) as gateway:
        page = browser.new_page()
        page.goto(gateway.url)
        yield page
        page.close()


@pytest.mark.parametrize(
    ("text", "html"),
    {
        "heading below the turn's": ("## A *b* ##", '<h4 class="level-2">A <em>b</em></h4>'),
        "no heading": ("#hashtag", "<p>#hashtag</p>"),
        "emphasis": ("**a _b_** and *c*", "<p><strong>a <em>b</em></strong> and <em>c</em></p>"),
        "both": ("***a***", "<p><em><strong>a</strong></em></p>"),
        "no emphasis": ("2 * 3 * 4, snake_case_name, **open", "<p>2 * 3 * 4, snake_case_name, **open</p>"),
        "emphasis beside letters": ("**注意。**再", "<p><strong>注意。</strong>再</p>"),
        "escapes": (r"\*a\* \# \\", r"<p>*a* # \</p>"),
        "code": ("`a*b*` and `` x`y ``", "<p><code>a*b*</code> and <code>x`y</code></p>"),
        "struck": ("~~a~~ ~b~", "<p><del>a</del> ~b~</p>"),
        "link": ("[*a*](https://b.c/d)", f'<p><a href="https://b.c/d"{LINK}><em>a</em></a></p>'),
        "address": ("(see https://b.c/d).", f'<p>(see <a href="https://b.c/d"{LINK}>https://b.c/d</a>).</p>'),
        "mail": ("<mailto:a@b.c>", f'<p><a href="mailto:a@b.c"{LINK}>mailto:a@b.c</a></p>'),
        "image": ("![cat](https://b.c/d.png)", f'<p><a href="https://b.c/d.png"{LINK}>cat</a></p>'),
        "footnote": ("a [1] b", "<p>a [1] b</p>"),
        "rule": ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
        "quote": ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        "list": (
            "3. a\n   - b\n   - c\n4. d",
            '<ol start="3"><li><p>a</p><ul><li><p>b</p></li><li><p>c</p></li></ul></li><li><p>d</p></li></ol>',
        ),
        "list of two columns": ("1. a\n  - b", "<ol><li><p>a</p><ul><li><p>b</p></li></ul></li></ol>"),
        "year": ("It was\n1990. Then", "<p>It was\n1990. Then</p>"),
        "table": (
            "|a|b|\n|:-:|-:|\n|1|`x\\|y`|",
            '<div class="table" tabindex="0"><table><thead><tr><th class="center">a</th><th class="end">b</th></tr>'
            '</thead><tbody><tr><td class="center">1</td><td class="end"><code>x|y</code></td></tr></tbody></table>'
            "</div>",
        ),
        "maths": (
            r"$x_1*2*3$, \(a_b*c*\) and $$\frac{a}{b}*c*$$",
            r"<p>$x_1*2*3$, \(a_b*c*\) and $$\frac{a}{b}*c*$$</p>",
        ),
        "prices": ("$5 and *$10*, or $5-$6", "<p>$5 and <em>$10</em>, or $5-$6</p>"),
        "maths block": ("\\[\na*_b_* = b\n\\]\nc", "<p>\\[\na*_b_* = b\n\\]\nc</p>"),
    }.values(),
)
def test_markdown_becomes_nodes(page: Page, text: str, html: str) -> None:
    assert page.evaluate(DRAW, text).replace(' class=""', "") == html


def test_code_keeps_its_lines_and_names_its_language(page: Page) -> None:
    html = page.evaluate(DRAW, "- a\n  ```python title\n  if x:\n  \treturn '<b>'\n\n  ```\n- b")
    assert "<span>python</span>" in html
    assert "<code>if x:\n\treturn '&lt;b&gt;'\n</code>" in html
    assert html.endswith("<li><p>b</p></li></ul>")


@pytest.mark.parametrize("step", [1, 3, 40])
def test_a_stream_draws_what_the_whole_text_draws(page: Page, step: int) -> None:
    assert page.evaluate(STREAM, [EVERYTHING, step])


def test_finished_blocks_are_neither_read_nor_drawn_again(page: Page) -> None:
    text = "\n\n".join(f"Paragraph {number} has *some* words." for number in range(100))
    changed, num_read_per_character = page.evaluate(CHANGES, text)
    assert changed == []
    assert num_read_per_character < 200  # a whole text each time would be 1,750


HOSTILE: list[Any] = [
    "<script>window.run = 1</script>",
    "<img src=x onerror=window.run=1>",
    "<svg onload=window.run=1>",
    "`<img src=x onerror=window.run=1>`",
    "```<img src=x onerror=window.run=1>\n</code></pre><script>window.run = 1</script>",
    "|<script>window.run=1</script>|\n|-|\n|<img src=x onerror=window.run=1>|",
    "[a](javascript:window.run=1)",
    "[a](JaVaScRiPt:window.run=1) <javascript:window.run=1> [a](\x01javascript:window.run=1)",
    "[a](data:text/html,<script>window.run=1</script>)",
    '[a](https://b.c/"onmouseover="window.run=1) ![a](https://b.c/"onerror="window.run=1)',
    "[<img src=x onerror=window.run=1>](https://b.c) $<img src=x onerror=window.run=1>_$",
    "[a](//b.c) [a](/b) [a](vbscript:b) [a](file:///etc/passwd) [a](blob:b)",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_a_script_or_an_unsafe_link(page: Page, text: str) -> None:
    found = page.evaluate(
        """async (text) => {
            const { Markdown } = await import("/page/markdown.js");
            const element = document.body.appendChild(document.createElement("div"));
            new Markdown(element).update(text);
            await new Promise((done) => setTimeout(done, 20));
            const nodes = [...element.querySelectorAll("*")];
            const result = [
                nodes.map((node) => node.localName).filter((name) => /script|img|svg|iframe|style/.test(name)),
                nodes.flatMap((node) => node.getAttributeNames()).filter((name) => name.startsWith("on")),
                [...element.querySelectorAll("a")].map((link) => link.protocol).filter((name) => name !== "https:"),
                window.run,
            ];
            element.remove();
            return result;
        }""",
        text,
    )
    assert found == [[], [], [], None]


@pytest.mark.parametrize(
    "text",
    [
        "> ",
        "- ",
        "*a ",
        "a* ",
        "**",
        "[",
        "[a](",
        "](a",
        "`",
        "~~",
        "$a ",
        "\\(",
        "| a ",
        "|-",
        "<ab:",
        "1. a\n  - b\n",
    ],
)
def test_repeated_marks_end(page: Page, text: str) -> None:
    html = page.evaluate(DRAW, "x\n\n" + text * (50_000 // len(text)))
    assert html.startswith("<p>x</p>")
    assert "script" not in html
