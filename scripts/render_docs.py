# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of README.md and docs/ from the declarations: `make docs`. Tests compare the two."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.tables import document
from hf_triton.errors import CODES
from hf_triton.folders.cards import CARDS
from hf_triton.hub.gguf_header import MAX_HEADER_BYTES
from hf_triton.hub.locate import CACHE_VARIABLES, TOKEN_VARIABLES
from hf_triton.protocol.chat_request import MAX_MESSAGES, MAX_TOOLS, ChatOptions
from hf_triton.protocol.declared_ports import missing_ports
from hf_triton.protocol.dialects import ALIASES
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.protocol.request_options import RequestOptions
from hf_triton.protocol.structured_output import GRAMMARS, MAX_GRAMMAR
from hf_triton.protocol.task_declaration import TaskOptions
from hf_triton.protocol.validation import allowed, meanings, table
from hf_triton.settings import DoorSettings, FormerName, ModelSettings
from hf_triton.tasks.registry import DECLARED_TASKS, ENCODER_TASKS, task_class
from hf_triton.tasks.serving.metrics import METRICS
from hf_triton.tasks.text_generation.response_parser import MAX_SEARCH_S
from hf_triton.tasks.text_generation.response_template import shipped_families, shipped_markers
from hf_triton_cli.serving.gateway_options import ALONE
from hf_triton_gateway.chat.chat_completions import ChatRequest
from hf_triton_gateway.chat.completions import CompletionRequest
from hf_triton_gateway.chat.fields import IGNORED, SAMPLING
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http.bodies import MAX_CONTAINERS, MAX_JSON_BYTES, MAX_VALUES
from hf_triton_gateway.http.gateway_metrics import Metrics
from hf_triton_gateway.http.http_rules import LINGER_S
from hf_triton_gateway.http.limits import MAX_BYTES_IN_FLIGHT
from hf_triton_gateway.keys.key_lines import Quota

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"(<!-- made by `make docs`: (.*?) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


MAX_CELL = 200
"""Characters of a table's cell: more cannot be read on a narrow page."""


def narrow(text: str) -> str:
    """A table without long cells: what does not fit follows in a list, by the row's name."""
    lines, notes = [], []
    for line in text.splitlines():
        if not line.startswith("|"):
            return text
        name, *cells = line.strip("| ").split(" | ")
        kept = [_first_words(cell) for cell in cells]
        lines.append(line if kept == cells else f"| {' | '.join([name, *kept])} |")
        rests = [_rest(cell, first) for cell, first in zip(cells, kept, strict=True) if cell != first]
        notes += [f"* {name}: {' '.join(rests)}"] if rests else []
    return "\n".join([*lines, *(["", "The rest of some:", "", *notes] if notes else [])])


def _first_words(cell: str) -> str:
    """The first sentences of a cell, or of a long first sentence the first words."""
    if len(cell) <= MAX_CELL:
        return cell
    ends = [match.start() + 1 for match in re.finditer(r"\. (?=[A-Z`])", cell[:MAX_CELL])]
    return cell[: ends[-1]] if ends else cell[: cell.rfind(", ", 0, MAX_CELL - 5) + 1] + " ..."


def _rest(cell: str, first: str) -> str:
    return "... " + cell[len(first) - 4 :].strip() if first.endswith(" ...") else cell[len(first) :].strip()


def parameters_table(*, guided: bool) -> str:
    """The sampling parameters with their aliases, or those of structured output."""
    aliases: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        aliases.setdefault(name, []).append(f"`{alias}`")
    extra = {name: ", also " + ", ".join(others) for name, others in aliases.items()}
    head, rule, *rows = table(GenerationParameters, extra).splitlines()
    return "\n".join([head, rule, *(row for row in rows if (row.split("`")[1] in GRAMMARS) is guided)])


def settings_table() -> str:
    """The settings, each with the name that it had before."""
    former = {
        name: f", formerly `{entry.name}`"
        for name, field in ModelSettings.model_fields.items()
        for entry in field.metadata
        if isinstance(entry, FormerName)
    }
    return table(ModelSettings, former)


def ports_tables() -> Mapping[str, str]:
    """The tensors that a folder declares by itself, and those that `parameters_as_inputs` adds."""
    config: dict[str, Any] = {"input": [], "output": [], "max_batch_size": 0}
    always, outputs = missing_ports(config, parameters_as_inputs=False)
    inputs, _ = missing_ports(config, parameters_as_inputs=True)
    known = {port["name"] for port in always}
    return {
        "inputs": _ports(always),
        "outputs": _ports(outputs),
        "input tensors": _ports([port for port in inputs if port["name"] not in known]),
    }


def _ports(ports: Collection[Mapping[str, Any]]) -> str:
    names: dict[str, list[str]] = {}
    for port in ports:
        data_type = port["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
        shape = ", ".join("n" if size == -1 else str(size) for size in port["dims"])
        names.setdefault(f"{data_type} `[{shape}]`", []).append(f"`{port['name']}`")
    return "\n".join(f"* {kind}: {', '.join(group)}" for kind, group in names.items())


def tasks_list(names: Iterable[str]) -> str:
    """What each task takes and gives, and the names that its clients know from other servers."""
    lines = []
    for name in names:
        if find_spec(f"hf_triton.tasks.{name.replace('-', '_')}") is None:
            continue
        task = task_class(name)
        assert task is not None
        lines += [f"**`{name}`**", "", "* Inputs"]
        for text in task.declaration.texts:
            also = f" (also {', '.join(f'`{alias}`' for alias in text.aliases)})" if text.aliases else ""
            lines.append(f"  * `{text.name}`: {text.meaning}{also}")
        lines.append("* Outputs")
        for output, port in task.declaration.all_outputs.items():
            kind = port.data_type.removeprefix("TYPE_").replace("STRING", "BYTES")
            lines.append(
                f"  * `{output}`, {kind}: {port.meaning}{'' if port.by_default else ' (if asked for by name)'}"
            )
        lines += [f"* Parameters: {', '.join(f'`{each}`' for each in task.declaration.options.model_fields)}", ""]
    return "\n".join(lines).rstrip()


def task_parameters_tables() -> dict[str, str]:
    """The request parameters of each task that has some of its own."""
    options = {name: task.declaration.options for name in DECLARED_TASKS if (task := task_class(name))}
    return {f"{name} parameters": table(own) for name, own in options.items() if own is not TaskOptions}


def servers_table() -> str:
    """The figures of hf_triton beside other servers."""
    figures = json.loads((ROOT / "benchmarks" / "results" / "servers.json").read_text(encoding="utf-8"))

    def cell(values: list[float] | None) -> str:
        return "refused" if values is None else f"{values[1]:.2f} ({values[0]:.2f} to {values[2]:.2f})"

    rows = (f"| {load} | {' | '.join(map(cell, row))} |" for load, row in figures["rows"].items())
    return "\n".join([f"| load | {' | '.join(figures['ways'])} |", f"|---{'|---' * len(figures['ways'])}|", *rows])


def cards_table() -> str:
    """The GPUs of `hf-triton size`."""
    rows = (f"| `{name}` | {card.memory_gb} | {card.source} |" for name, card in CARDS.items())
    return "\n".join(["| `--gpu` | memory, GB | source |", "|---|---|---|", *rows])


def codes_table() -> str:
    """Every error code."""
    return "\n".join(["| code | meaning |", "|---|---|", *(f"| `{code}` | {text} |" for code, text in CODES.items())])


def metrics_table() -> str:
    """Every metric, with its own labels in its name."""
    rows = (
        f"| `{metric.name}{_labels(metric.label, 'adapter' if metric.by_adapter else '')}` | {metric.kind} "
        f"| {metric.help} |"
        for metric in METRICS
    )
    return "\n".join(["| name | kind | meaning |", "|---|---|---|", *rows])


def _labels(*names: str) -> str:
    listed = ",".join(filter(None, names))
    return f"{{{listed}}}" if listed else ""


def openai_fields_table() -> str:
    """The fields of `/v1/chat/completions` and `/v1/completions`; one that differs has a row for each."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    of_parameters = meanings(GenerationParameters)
    for endpoint, model in {"chat": ChatRequest, "completions": CompletionRequest}.items():
        for name, field in model.model_fields.items():
            own = _one_line(field.description) if field.description else of_parameters[SAMPLING[name]]
            meaning = re.split(r"(?<=\.) (?=[A-Z])", own)[0]
            rows.setdefault((name, allowed(field), meaning), []).append(endpoint)
    lines = (
        f"| `{name}` | {', '.join(endpoints)} | {values} | {meaning} |"
        for (name, values, meaning), endpoints in rows.items()
    )
    return "\n".join(["| field | endpoint | values | meaning |", "|---|---|---|---|", *lines])


def passed_over_list() -> str:
    """The fields of OpenAI's API and of other servers that the gateway has no use for."""
    rows: dict[str, list[str]] = {}
    for name, ignored in IGNORED.items():
        values = " or ".join(["`null`", *(f"`{json.dumps(value)}`" for value in ignored.values or ())])
        rows.setdefault("any value, as hints" if ignored.is_hint else values, []).append(f"`{name}`")
    return "\n".join(f"* {', '.join(names)}: {values}" for values, names in rows.items())


def gateway_options_table() -> str:
    """The options of `hf-triton openai`."""
    fields = {option: GatewayConfig.model_fields[name] for name, option in ALONE.items()}
    defaults = {
        option: "-" if field.default in (None, ()) else f"`{field.default}`" for option, field in fields.items()
    }
    lines = (
        f"| `{option}` | {defaults[option]} | {_one_line(field.description)} |" for option, field in fields.items()
    )
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *lines])


def bounds_table() -> str:
    """What bounds a request by default, and what changes that."""
    gateway, folder = GatewayConfig(), ModelSettings.model_fields
    rows = {
        "a request's head": (_size(gateway.max_header_bytes), "max_header_bytes"),
        "a request's body; one of JSON that holds no images": (
            f"{_size(gateway.max_body_bytes)}; {_size(MAX_JSON_BYTES)}",
            "max_body_bytes",
        ),
        "values of a JSON body; arrays, objects and names": (f"{MAX_VALUES:,}; {MAX_CONTAINERS:,}", ""),
        "all bodies in a worker": (_size(MAX_BYTES_IN_FLIGHT), ""),
        "requests in flight in a worker": (f"{gateway.max_concurrent_requests:,}", "max_concurrent_requests"),
        "time for a request to arrive": (f"{gateway.read_timeout_s:g} s", "read_timeout_s"),
        "time for the rest of one that is refused meanwhile": (f"{LINGER_S:g} s", ""),
        "time for its answer": (f"{gateway.timeout_s:g} s", "timeout_s"),
        "time without a byte taken by the client": (f"{gateway.write_timeout_s:g} s", "write_timeout_s"),
        "stored responses; their bytes; their time": (
            f"{gateway.max_stored_responses:,}; {_size(gateway.max_stored_bytes)}; {gateway.store_for_s / 3600:g} h",
            "max_stored_responses",
        ),
        "those of them that run in the background": (
            f"{gateway.max_stored_responses // 2:,}; {_size(gateway.max_stored_bytes // 2)}",
            "max_stored_responses",
        ),
        "messages; tools": (f"{MAX_MESSAGES:,}; {MAX_TOOLS}", ""),
        "a schema, regular expression or grammar": (f"{MAX_GRAMMAR:,} characters", ""),
        "a pattern of a checkpoint": (f"{MAX_SEARCH_S} s", ""),
        "a GGUF file's header": (_size(MAX_HEADER_BYTES), ""),
    }
    lines = [
        f"| {name} | {bound} | {f'`{ALONE[field]}`' if field else 'fixed'} |" for name, (bound, field) in rows.items()
    ]
    for name, field in FOLDER_BOUNDS.items():
        lines.append(f"| {name} | {int(folder[field].default):,} | setting `{field}` |")
    return "\n".join(["| bound | default | by |", "|---|---|---|", *lines])


FOLDER_BOUNDS = {
    "prompts of a request": "max_prompts",
    "prompts that wait for a model": "max_waiting_prompts",
    "tokens of a completion, if the request has no limit": "max_output_length",
    "seconds of an audio": "max_audio_seconds",
    "pixels of an image": "max_image_pixels",
    "images of a prompt": "max_images",
    "bytes of one of them": "max_image_bytes",
    "seconds of a download": "download_timeout_s",
}


def _size(num_bytes: int) -> str:
    for unit, step in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes % step == 0:
            return f"{num_bytes // step} {unit}"
    return f"{num_bytes} bytes"


def key_limits_table() -> str:
    """What a line of the file of API keys may say of a key."""
    lines = (f"| `{name}` | {_one_line(field.description)} |" for name, field in Quota.model_fields.items())
    return "\n".join(["| name | meaning |", "|---|---|", *lines])


def gateway_metrics_table() -> str:
    """The gateway's metrics; a counter's name ends in `_total`."""
    lines = (
        f"| `{metric.name}{'_total' if metric.type == 'counter' else ''}` | {metric.type} | {metric.documentation} |"
        for metric in Metrics().registry.collect()
    )
    return "\n".join(["| name | kind | meaning |", "|---|---|---|", *lines])


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def response_templates_table() -> str:
    """The shipped response templates, whose they are, and the words in a chat template that each is found by."""
    families = shipped_families()
    cells = {name: ", ".join(f"`{word}`" for word in words) for name, words in shipped_markers().items()}
    rows = (f"| `{name}` | {families[name]} | {cell.replace('|', chr(92) + '|')} |" for name, cell in cells.items())
    return "\n".join(["| name | families | words in the chat template |", "|---|---|---|", *rows])


def variables(names: Collection[str]) -> str:
    """Environment variables in the order of their precedence."""
    return ", ".join(f"`{name}`" for name in names)


def parts() -> Mapping[str, str]:
    """The generated parts by the name in their markers."""
    return {
        "settings": settings_table(),
        "stream door settings": table(DoorSettings),
        "parameters": parameters_table(guided=False),
        "structured output parameters": parameters_table(guided=True),
        "request options": table(RequestOptions),
        "chat parameters": table(ChatOptions),
        **ports_tables(),
        "response templates": response_templates_table(),
        "encoder tasks": tasks_list(ENCODER_TASKS),
        "speech task": tasks_list(DECLARED_TASKS.keys() - ENCODER_TASKS.keys()),
        **task_parameters_tables(),
        "cards": cards_table(),
        "codes": codes_table(),
        "metrics": metrics_table(),
        "openai fields": openai_fields_table(),
        "openai passed over": passed_over_list(),
        "gateway options": gateway_options_table(),
        "key limits": key_limits_table(),
        "gateway metrics": gateway_metrics_table(),
        "bounds": bounds_table(),
        "cache variables": variables(CACHE_VARIABLES),
        "token variables": variables(TOKEN_VARIABLES),
        "figures of a GPU": document(),
        "servers": servers_table(),
    }


def render(documents: Mapping[Path, str]) -> dict[Path, str]:
    """The documents with their generated parts rewritten.

    Raises:
        SystemExit: A part is in no document, or in more than one place.
    """
    made = parts()
    places = Counter(name for text in documents.values() for _, name, _ in MARKED.findall(text))
    wrong = [name for name in (*made, *places) if places[name] != 1 or name not in made]
    if wrong:
        raise SystemExit(f"not in exactly one place of README.md and docs/: {', '.join(dict.fromkeys(wrong))}")
    return {
        path: MARKED.sub(lambda match: f"{match[1]}{narrow(made[match[2]])}\n{match[3]}", text)
        for path, text in documents.items()
    }


def read() -> dict[Path, str]:
    """The documents as they are."""
    return {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}


if __name__ == "__main__":
    for path, text in render(read()).items():
        path.write_text(text, encoding="utf-8")
