# SPDX-License-Identifier: Apache-2.0
"""Record the first minute in a terminal as an animated SVG: `python scripts/record_terminal.py`.

Runs the commands below for real, the first one beside the others, and writes docs/images/first-minute.svg. Lines appear
one after the other, for a viewer that wants no motion at once.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
SERVE = "hf-triton serve"
READY = "Ctrl+C"
"""Words of the line that ends what `serve` prints at its start."""
COMMANDS = (
    """curl localhost:8000/v2/models/demo/generate -d '{"text_input":"How can you be"}'""",
    "hf-triton generate 'The model'",
)
WIDTH = 100
START_TIMEOUT_S = 120
LINE_S = 0.35
COMMAND_S = 1.5
"""The pause between two lines of output, and before a command's."""
REST_S = 6.0
"""The pause at the end, before it begins again."""
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "COLUMNS": str(WIDTH),
    "TERM": "xterm-256color",
}


def record_server() -> tuple[subprocess.Popen[bytes], str]:
    """Start `serve` on a terminal; the process, and what it has printed once it is ready."""
    ours, theirs = pty.openpty()
    server = subprocess.Popen(SERVE.split(), stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT)
    output, deadline = b"", time.monotonic() + START_TIMEOUT_S
    while READY.encode() not in output:
        if time.monotonic() > deadline or server.poll() is not None:
            server.kill()
            raise SystemExit(f"the server did not start:\n{output.decode(errors='replace')}")
        if select.select([ours], [], [], 0.5)[0]:
            output += os.read(ours, 65536)
    time.sleep(0.5)
    return server, output.decode()


def last_screen(output: str) -> list[str]:
    """The lines of a terminal's output in the end: a line that was written again is its last form."""
    lines: list[str] = []
    row = 0
    for part in re.split(r"(\x1b\[\d*A|\x1b\[2K|\r\n|\n|\r)", output):
        if up := re.fullmatch(r"\x1b\[(\d*)A", part):
            row = max(0, row - int(up[1] or 1))
        elif part in ("\n", "\r\n"):
            row += 1
        elif part not in ("", "\r", "\x1b[2K"):
            lines += [""] * (row + 1 - len(lines))
            lines[row] = part
    return [re.sub(r"\x1b\[\?\d+[hl]|\x1b\[\d*[JKGA]", "", line) for line in lines]


def record() -> list[tuple[float, Text]]:
    """The lines of the recording, each with the seconds at which it appears."""
    server, output = record_server()
    lines: list[tuple[float, Text]] = []
    now_s = 0.5

    def add(command: str, printed: list[str]) -> None:
        nonlocal now_s
        lines.append((now_s, Text(f"$ {command}", style="bold")))
        now_s += COMMAND_S
        for line in printed:
            lines.append((now_s, Text.from_ansi(line)))
            now_s += LINE_S

    try:
        add(SERVE, last_screen(output))
        for command in COMMANDS:
            quiet = command.replace("curl ", "curl --silent ")
            done = subprocess.run(["bash", "-c", quiet], env=ENVIRONMENT, capture_output=True, text=True, check=True)
            add(command, done.stdout.splitlines())
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    return lines


def animate(lines: list[tuple[float, Text]]) -> str:
    """The SVG of a terminal in which each line appears at its time."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    appearance: list[float] = []
    for at_s, text in lines:
        wrapped = text.wrap(console, WIDTH)
        appearance += [at_s] * len(wrapped)
        for row in wrapped:
            console.print(row, soft_wrap=True)
    svg = console.export_svg(title="hf_triton", unique_id="first-minute")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # a foreign host's
    whole_s = appearance[-1] + REST_S
    rules = [
        f".line-{row} {{ animation: line-{row} {whole_s:.1f}s steps(1) infinite }}"
        f"@keyframes line-{row} {{ 0% {{ opacity: 0 }} {100 * at_s / whole_s:.2f}% {{ opacity: 1 }} }}"
        for row, at_s in enumerate(appearance)
    ]
    style = "@media (prefers-reduced-motion: no-preference) {\n" + "\n".join(rules) + "\n}\n</style>"
    svg = svg.replace("</style>", style, 1)
    return re.sub(r'<text class="([^"]*)"([^>]*line-(\d+)\))', r'<text class="\1 line-\3"\2', svg)


if __name__ == "__main__":
    (ROOT / "docs" / "images" / "first-minute.svg").write_text(animate(record()), encoding="utf-8")
