# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/runbooks."""

import os
import re
import subprocess
import textwrap
from collections.abc import Mapping

from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT
from tests.support.serving import COMMAND

RUNBOOKS = ROOT / "docs" / "runbooks"


def blocks(name: str) -> list[str]:
    text = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
    return [textwrap.dedent(block) for block in re.findall(r"^ *```bash\n(.*?)^ *```$", text, flags=re.S | re.M)]


def run_block(block: str, words: Mapping[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a block in the checkout, with other words in place of those that stand for a user's own."""
    for word, own in words.items():
        block = block.replace(word, own)
    path = os.pathsep.join([str(COMMAND.parent), ENVIRONMENT["PATH"]])
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**ENVIRONMENT, "PATH": path, **environment},
    )
