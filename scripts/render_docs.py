# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of README.md from the code: `make docs`. Tests compare the two."""

from __future__ import annotations

import re
from pathlib import Path

from hf_triton.errors import CODES
from hf_triton.hub.resolve import CACHE_VARIABLES, TOKEN_VARIABLES
from hf_triton.protocol.dialects import ALIASES
from hf_triton.protocol.options import RequestOptions
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.protocol.validation import table
from hf_triton.settings import ModelSettings
from hf_triton.tasks.metrics import METRICS

README = Path(__file__).resolve().parents[1] / "README.md"


def parameters_table() -> str:
    """Every request parameter, with its aliases behind its name."""
    aliases: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        aliases.setdefault(name, []).append(f"`{alias}`")
    extra = {name: ", also " + ", ".join(others) for name, others in aliases.items()}
    options = table(RequestOptions).splitlines()[2:]
    return "\n".join([table(GenerationParameters, extra), *options])


def codes_table() -> str:
    """Every error code."""
    return "\n".join(["| code | meaning |", "|---|---|", *(f"| `{code}` | {text} |" for code, text in CODES.items())])


def metrics_table() -> str:
    """Every metric, with its own label in its name."""
    head = ["| name | kind | meaning |", "|---|---|---|"]
    names = [f"{metric.name}{{{metric.label}}}" if metric.label else metric.name for metric in METRICS]
    return "\n".join(
        [*head, *(f"| `{name}` | {each.kind} | {each.help} |" for name, each in zip(names, METRICS, strict=True))]
    )


def variables(names: tuple[str, ...]) -> str:
    """Variables in the order they are looked at."""
    return ", ".join(f"`{name}`" for name in names)


def parts() -> dict[str, str]:
    """The generated parts by the name in README.md's markers."""
    return {
        "settings": table(ModelSettings),
        "parameters": parameters_table(),
        "codes": codes_table(),
        "metrics": metrics_table(),
        "cache variables": variables(CACHE_VARIABLES),
        "token variables": variables(TOKEN_VARIABLES),
    }


def render(text: str) -> str:
    """README text with its generated parts made anew."""
    for name, part in parts().items():
        pattern = rf"(<!-- made by `make docs`: {re.escape(name)} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"README.md has {count} places for '{name}'")
    return text


if __name__ == "__main__":
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")
