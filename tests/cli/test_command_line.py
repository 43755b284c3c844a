# SPDX-License-Identifier: Apache-2.0
"""The commands together: their help, wrong uses that need no server, and what a terminal is shown."""

import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_triton.errors import HfTritonError
from hf_triton.settings import ModelSettings
from hf_triton_cli.client.markdown import markdown_stream, split_blocks
from hf_triton_cli.client.running_triton import unknown_model
from hf_triton_cli.client.status import read_metrics, triton_release
from hf_triton_cli.commands import SECTIONS, cli, main
from hf_triton_cli.lazy import HINTS
from hf_triton_cli.serving.board import Board
from hf_triton_cli.tables import printable, show_table
from tests.support.paths import ROOT

NAMES = [name for section in SECTIONS.values() for name in section]


def run(*arguments: str) -> int:
    """The exit code of a command in this process."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_help_has_sections_and_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert [title for title in SECTIONS if f"\n{title}:\n" in text] == list(SECTIONS)
    lines = [line.split(None, 1) for line in text.splitlines() if line.startswith("  ")]
    assert {line[0] for line in lines} >= set(NAMES)
    assert "..." not in text.partition("\n\n")[2]
    assert "Examples:" in text


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    assert re.search(rf"Examples?:\s+hf-triton {name}\b", capsys.readouterr().out)


def test_the_documents_name_each_command() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert [name for name in NAMES if f"hf-triton {name}" not in text] == []


def test_a_terminal_gets_colours_and_no_color_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    context = cli.make_context("hf-triton", [], resilient_parsing=True)
    assert "\033[" in context.get_help()
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.make_context("hf-triton", [], resilient_parsing=True).color is False


WRONG: dict[str, tuple[list[str], str]] = {
    "misspelt command": (["serv"], "there is no command 'serv', did you mean serve?"),
    "unknown command": (["zzz"], "there is no command 'zzz'; `hf-triton --help` lists all"),
    **{word: ([word], f"there is no command '{word}', did you mean {hint}?") for word, hint in HINTS.items()},
    "unknown option": (["list", "--jsn"], "no such option '--jsn'. Did you mean '--json'?; `hf-triton list --help`"),
    "option of tritonserver": (["serve", "--foo"], "Flags of tritonserver follow behind --"),
    "missing argument": (["new"], "missing argument 'NAME'; `hf-triton new --help` lists what there is"),
    "option without value": (["chat", "--top-p"], "option '--top-p' requires an argument"),
    "extra argument": (["list", "a"], "got unexpected extra argument (a)"),
    "wrong number": (["generate", "x", "--max-tokens=0"], "invalid value for '--max-tokens': 0 is not in the range"),
    "wrong numbers": (["bench", "--concurrency=1,x"], "must be integers >= 1, as in 1,4,16, got '1,x'"),
    "wrong address": (["list", "--triton=here"], "must be HOST:PORT, got 'here'"),
    "no such folder": (["check", "nowhere"], "Path 'nowhere' does not exist"),
    "setting of no name": (["settings", "zzz"], "there is no setting 'zzz'; the nearest are "),
    "setting of a stream door": (["settings", "stream_of"], "there is no setting 'stream_of'"),
    "misspelt setting": (["settings", "dtipe"], "there is no setting 'dtipe', did you mean 'dtype'?"),
    "setting of a folder": (["new", "x", "--model=a/b", "--set", "zzz=1"], "and docs/settings.md lists all"),
    "settings without a model": (["run", "--set", "dtype=auto"], "--set is for models: name one"),
    "a model repository": (["run", "."], ". is a model repository: name one of its folders"),
    "three words": (["generate", "The", "big", "model"], "quote it, and name the model with --model"),
    "a model twice": (["generate", "-m", "demo", "demo", "Hello"], "quote it, and name the model with --model"),
    "empty prompt": (["generate", ""], "the prompt is empty"),
    "empty prompt of run": (["run", "demo", " "], "the prompt is empty"),
    "a parameter by two names": (
        ["generate", "x", "--max-tokens=1", "--param=max_new_tokens=2"],
        "max_tokens is given twice",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_line(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, sentence = WRONG[case]
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    written = capsys.readouterr()
    assert written.out == ""
    [line] = written.err.splitlines()
    assert re.match("error: (wrong_usage|invalid_setting): ", line)
    assert sentence in line
    assert len(line) < 300


def test_an_unknown_model_is_answered_by_near_ones_alone() -> None:
    many = [f"model{number}" for number in range(50)]
    assert unknown_model("model1x", many).sentence.count("'model") == 4
    assert unknown_model("zzz", many).sentence == "there is no model 'zzz'; `hf-triton list` shows all"


def test_settings_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("settings") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["setting", *ModelSettings.model_fields]
    assert run("settings", "max_batch_rows") == 0  # a former name
    assert capsys.readouterr().out.startswith("max_num_seqs: an integer >= 1 and <= 4096; default -\n")


def test_a_terminal_has_reasons_below_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")
    reason = "path_not_found: there is no folder /a/long/path: correct huggingface_model, or mount the volume"
    rows = [
        {"model": "broken", "state": "UNAVAILABLE", "reason": reason},
        {"model": "demo", "state": "READY", "reason": ""},
    ]
    show_table(rows, below="reason")
    assert capsys.readouterr().out.splitlines()[1] == f"broken\tUNAVAILABLE\t{reason}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_table(rows, below="reason")
    head, broken, demo, *below = (line.strip() for line in capsys.readouterr().out.splitlines())
    assert (head.split(), broken.split(), demo.split()) == (
        ["model", "state"],
        ["broken", "UNAVAILABLE"],
        ["demo", "READY"],
    )
    assert " ".join(below) == f"broken: {reason}"


def test_a_table_of_a_hundred_columns_breaks_no_state_and_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    columns = ("engine", "running", "waiting", "kv_use", "requests", "tokens_in", "tokens_out")
    numbers = ("onnxruntime", 128, 1024, "50%", 1234567, 123456789, 23456789)
    name = "qwen2.5-0.5b-instruct-q4_k_m"
    show_table([{"model": name, "state": "UNAVAILABLE", "size": "15.2 GB", **dict(zip(columns, numbers, strict=True))}])
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert {"UNAVAILABLE", *map(str, numbers)} < set(lines[2].split())
    assert (lines[2].split()[0] + lines[3].strip(), max(map(len, lines))) == (name, 100)


CODE = "```python\na = 1\n\nb = 2\n```\n\n"


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        (f"One\nline.\n\n{CODE}The re", ["One\nline.\n\n", CODE, "The re"]),
        ("```\na\n\nb", ["```\na\n\nb"]),
        ("1. one\n\n    continued\n\nEnd", ["1. one\n\n    continued\n\n", "End"]),
        ("```x``` is code\n\nEnd", ["```x``` is code\n\n", "End"]),
        ("````\n```\n\n~~~\n````\n\nEnd", ["````\n```\n\n~~~\n````\n\n", "End"]),
        ("~~~\n~~~ a\n\n~~~\n\nEnd", ["~~~\n~~~ a\n\n~~~\n\n", "End"]),
        ("One\n\n", ["One\n\n"]),
    ],
)
def test_markdown_is_cut_where_a_block_ends(text: str, blocks: list[str]) -> None:
    assert split_blocks(text) == (blocks[:-1], blocks[-1])


@pytest.mark.parametrize(
    "text", ["<think>forty-two</think>", "<div>\nall\n</div>", "a <b>word</b>", "[ref]: http://x.y"]
)
def test_markdown_shows_tags_and_definitions_as_text(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with markdown_stream() as stream:
        stream.write(f"{text}\n\n**behind**\n")
    assert capsys.readouterr().out.split() == [*text.split(), "behind"]


def test_another_page_in_place_of_metrics_is_none() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request).start()
        assert read_metrics(f"127.0.0.1:{server.server_port}") is None


def test_triton_is_named_by_its_release() -> None:
    named = {"2.51.0": "24.10", "2.50.0": "24.09", "2.53.0": "24.12", "2.54.0": "25.01", "2.41.0": "23.12"}
    assert {version: triton_release(version) for version in named} == named
    assert triton_release("2.70.0") is None


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str) -> None:
    program, words = Path(sys.executable).with_name("hf-triton"), {"COMP_WORDS": "hf-triton s"}
    environment = words | {"_HF_TRITON_COMPLETE": f"{shell}_complete", "COMP_CWORD": "s" if shell == "fish" else "1"}
    done = subprocess.run([program], env=os.environ | environment, capture_output=True, text=True, check=True)
    assert {"serve", "settings", "status"} <= set(re.split(r"[,\t\n]", done.stdout))


def test_what_a_checkpoint_writes_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise HfTritonError("invalid_input", "it rejects \x1b]0;title\x07\u202ethis\nand é 🙂")

    assert printable("a\x1b[2J\u202e\u2066b\n🙂\u200d\u00a0") == "a[2Jb\n🙂\u200d\u00a0"
    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit):
        main([])
    Board().show("demo", "failed", "it rejects \x1b]0;title\x07\u202ethis")
    sentence, rest, failed = capsys.readouterr().err.splitlines()
    assert (sentence, rest) == ("error: invalid_input: it rejects ]0;titlethis", "and é 🙂")
    assert failed.endswith("it rejects ]0;titlethis")


@pytest.mark.parametrize(
    ("line", "code", "written"),
    [
        ("settings >&-", 0, ""),
        ("generate <&-", 2, "error: wrong_usage: the prompt is empty: standard input has no text\n"),
        ("settings zzz 2>&-", 2, ""),
    ],
)
def test_a_closed_stream_is_an_empty_one(line: str, code: int, written: str) -> None:
    command = f"{Path(sys.executable).with_name('hf-triton')} {line}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", written)
