# SPDX-License-Identifier: Apache-2.0
"""`list`, `status`, `load`, `unload`, `generate` and `chat` on a real server, and their wrong uses."""

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from hf_triton.server import free_ports, lock_flags
from hf_triton.testing import TritonServer
from tests.support.chat import build_chat_checkpoint
from tests.support.commands import Terminal, hf_triton, in_process
from tests.support.delay import DelayingProxy
from tests.support.gateway import add_demo, num_running, wait_until
from tests.support.serving import COMMAND
from tests.support.slow_model import DECOUPLED, SLOW_MODEL

pytestmark = pytest.mark.full

KEY = "triton-grpc-protocol-secret"
ENDLESS = ("--max-tokens=200", "--param=ignore_eos=true")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Iterator[TritonServer]:
    """A server in explicit mode with `demo`, the slow `slow`, `broken`, and `spare` and `garbled`, not loaded."""
    root = tmp_path_factory.mktemp("commands")
    repository, checkpoint = root / "repository", build_chat_checkpoint(root / "chat")
    add_demo(repository)
    slow = make_folder(repository, "slow", huggingface_model=checkpoint, config=DECOUPLED, max_output_length=400)
    (slow / "1" / "model.py").write_text(SLOW_MODEL)
    make_folder(repository, "spare", huggingface_model=checkpoint)
    make_folder(repository, "broken", huggingface_model="./nowhere")
    make_folder(repository, "garbled", huggingface_model="./nowhere", config="max_bach_size: 8")
    loaded = [f"--load-model={name}" for name in ("demo", "demo_stream", "slow", "broken")]
    with TritonServer(repository, arguments=["--model-control-mode=explicit", *loaded]) as running:
        yield running


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server without explicit mode that restricts three of its APIs."""
    repository = tmp_path_factory.mktemp("plain")
    add_demo(repository)
    restricted = "--grpc-restricted-protocol=inference,model-config:secret=open"
    with TritonServer(repository, arguments=[restricted]) as running:
        yield running


def run(server: TritonServer, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return hf_triton(*arguments, f"--triton={server.grpc_url}", stdin=stdin)


def refusal(done: subprocess.CompletedProcess[str] | Result) -> str:
    """The sentence of a command that failed: one line, no traceback."""
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    return line


def test_list_shows_states_reasons_and_doors(server: TritonServer) -> None:
    models = {model["model"]: model for model in json.loads(run(server, "list", "--json").stdout)}
    assert sorted(models) == ["broken", "demo", "garbled", "slow", "spare"]
    assert (models["demo"]["state"], models["demo"]["stream"]) == ("READY", "demo_stream")
    assert (models["slow"]["stream"], models["demo"]["task"]) == ("itself", "text-generation")
    assert (models["demo"]["engine"], models["demo"]["context"]) == ("continuous", 512)
    assert "path_not_found" in models["broken"]["reason"]
    assert models["spare"]["state"] != "READY"
    lines = run(server, "list").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["model", "broken", "demo", "garbled", "slow", "spare"]


def test_status_shows_server_and_figures(server: TritonServer) -> None:
    run(server, "generate", "demo", "The model", "--max-tokens=4")
    status = ("status", "demo", "--json", f"--metrics=127.0.0.1:{server.metrics_port}")
    wait_until(lambda: json.loads(run(server, *status).stdout)["models"][0]["requests"] > 0)
    answer = json.loads(run(server, *status).stdout)
    assert answer["server"]["live"]
    assert "model_repository" in answer["server"]["extensions"]
    [model] = answer["models"]
    assert (model["engine"], model["running"], model["waiting"]) == ("continuous", 0, 0)
    assert 0 <= model["kv_use"] <= 1
    assert model["generated_tokens"] >= 4
    assert (answer["server"]["release"], model["memory_bytes"] > 1e6) == ("24.10", True)


def test_status_on_a_terminal_has_reasons_below(server: TritonServer) -> None:
    with Terminal("status", f"--triton={server.grpc_url}") as terminal:
        assert terminal.wait() == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.output).splitlines()
    assert lines[0].startswith("Triton 24.10 (2.51.0) at ")
    assert all(len(line) <= 120 for line in lines)
    assert [line.split()[0] for line in lines[2:8]] == ["model", "broken", "demo", "garbled", "slow", "spare"]
    assert lines[8].startswith("broken: path_not_found: there is no folder ")


def test_a_distant_triton_is_reached(server: TritonServer) -> None:
    with DelayingProxy(server.grpc_port, delay_s=0.1) as address:
        done = hf_triton("list", "--json", f"--triton={address}")
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def test_status_without_metrics_says_so(server: TritonServer) -> None:
    done = run(server, "status", f"--metrics=127.0.0.1:{free_ports(1)[0]}")
    assert done.returncode == 0
    assert "name it with --metrics" in done.stdout


def test_load_and_unload(server: TritonServer) -> None:
    loaded = run(server, "load", "spare")
    assert (loaded.returncode, loaded.stdout[:14]) == (0, "spare is ready")
    assert server.is_model_ready("spare")
    unloaded = run(server, "unload", "spare")
    assert (unloaded.returncode, unloaded.stdout[:17]) == (0, "spare is unloaded")
    assert not server.is_model_ready("spare")
    for command, is_ready in (("unload", False), ("load", True)):
        assert run(server, command, "demo").returncode == 0
        assert [server.is_model_ready(name) for name in ("demo", "demo_stream")] == [is_ready] * 2


def test_a_model_answers_the_same_after_its_sleep(server: TritonServer) -> None:
    run(server, "load", "demo")
    text = run(server, "generate", "demo", "The model", "--max-tokens=8").stdout
    slept = run(server, "sleep", "demo")
    assert re.fullmatch(r"demo sleeps after \d+\.\d\d s; it gave [\d.]+ \w+ back\.\n", slept.stdout), slept.stderr
    assert "demo\t1\tASLEEP" in run(server, "list").stdout
    assert run(server, "generate", "demo", "The model", "--max-tokens=8").stdout == text
    assert run(server, "wake", "demo").stdout == "demo was awake already.\n"


def test_unload_waits_for_requests_in_flight(server: TritonServer) -> None:
    run(server, "load", "slow")
    command = [COMMAND, "generate", "slow", "Hello", "--max-tokens=20", "--param=ignore_eos=true"]
    with subprocess.Popen(
        [*command, f"--triton={server.grpc_url}"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as generating:
        wait_until(lambda: num_running(server) > 0)
        assert run(server, "unload", "slow").returncode == 0
        assert generating.wait(60) == 0
    assert run(server, "load", "slow").returncode == 0


def test_generate_streams_what_generate_returns(server: TritonServer) -> None:
    streamed = run(server, "generate", "demo", "The model", "--max-tokens=12")
    whole = run(server, "generate", "demo", "-", "--max-tokens=12", "--json", stdin="The model")
    assert streamed.returncode == whole.returncode == 0
    [completion] = json.loads(whole.stdout)["completions"]
    assert completion["text"]
    assert streamed.stdout == completion["text"] + "\n"
    assert completion["num_output_tokens"] <= 12
    for arguments in (("-m", "demo"), ("--model=demo", "-"), ("--model=demo", "The model")):
        piped = run(server, "generate", *arguments, "--max-tokens=12", stdin="The model")
        assert piped.stdout == streamed.stdout


def test_generate_takes_any_parameter(server: TritonServer) -> None:
    options = ("--temperature=0.9", "--seed=3", "--param=n=2", "--json")
    answer = json.loads(run(server, "generate", "demo", "Today", *options).stdout)
    assert len(answer["completions"]) == 2


def test_ctrl_c_cancels_the_request_on_the_server(server: TritonServer) -> None:
    wait_until(lambda: num_running(server) == 0)  # the gauge of an earlier request is as old as its last update
    with Terminal("generate", "slow", "Hello", *ENDLESS, f"--triton={server.grpc_url}") as terminal:
        wait_until(lambda: num_running(server) > 0)
        terminal.type("\x03")
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.output
    wait_until(lambda: num_running(server) == 0)


def test_chat_from_a_pipe_answers_line_by_line(server: TritonServer, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    lines = ["Hello \\", "there", "", "How are you?", f"/save {file}", "/clear", "/quit", "never"]
    done = run(server, "chat", "demo", "--system=Be brief.", "--max-tokens=8", stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[1]["content"] == "Hello \nthere"
    assert messages[2]["content"] in done.stdout


def test_chat_on_a_terminal(server: TritonServer) -> None:
    wait_until(lambda: num_running(server) == 0)
    with Terminal("chat", "slow", *ENDLESS, f"--triton={server.grpc_url}") as terminal:
        terminal.wait_for(">>> ")
        terminal.type("Hello\n")
        wait_until(lambda: num_running(server) > 0)
        terminal.type("\x03")
        terminal.wait_for("Cancelled")
        terminal.wait_for(">>> ")
        wait_until(lambda: num_running(server) == 0)
        terminal.type("/nonsense\n")
        terminal.wait_for("there is no command /nonsense")
        terminal.wait_for(">>> ")
        terminal.wait_for("Ctrl+C again, or /bye, ends.", typing="\x03")
        assert terminal.interrupt() == 0


@pytest.mark.parametrize("is_answering", [False, True])
def test_sigterm_ends_a_chat_at_once(server: TritonServer, is_answering: bool) -> None:
    wait_until(lambda: num_running(server) == 0)
    with Terminal("chat", "slow", *ENDLESS, f"--triton={server.grpc_url}") as terminal:
        terminal.wait_for(">>> ")
        if is_answering:
            terminal.type("Hello\n")
            wait_until(lambda: num_running(server) > 0)
        assert terminal.terminate() == 143
    wait_until(lambda: num_running(server) == 0)
    assert "Traceback" not in terminal.output
    assert "exception" not in terminal.output


def test_chat_on_a_terminal_has_commands(server: TritonServer) -> None:
    steps = {
        "/stats": "There is no answer yet.",
        "/set temprature 1": "did you mean 'temperature'?",
        "/set stream true": "stream is for the command to decide",
        "/set max-tokens 600": "max_tokens = 600",
        "Hello": "the conversation has ",
        "/set typo": "there is no parameter 'typo'",
        "/set max_new_tokens 8": "max_new_tokens = 8",
        '"""\nHow are you?\nToday?\n"""': "... ",
        "/model nobody": "there is no model 'nobody'",
        "/model slow": "slow",
    }
    with Terminal("chat", "demo", f"--triton={server.grpc_url}") as terminal:
        assert "(continuous engine, float32, context of 512 tokens)" in terminal.wait_for(">>> ")
        for typed, sentence in steps.items():
            terminal.type(f"{typed}\n")
            terminal.wait_for(sentence)
            terminal.wait_for(">>> ")
        terminal.type("/set\n/stats\n")
        terminal.wait_for("8 tokens in ")
        terminal.wait_for(" tokens/s; the first after ")
        terminal.type("/bye\n")
        assert terminal.wait() == 0


def test_a_shell_completes_models(server: TritonServer) -> None:
    words = {"COMP_WORDS": "hf-triton status s", "COMP_CWORD": "2", "_HF_TRITON_COMPLETE": "bash_complete"}
    assert hf_triton(HF_TRITON_SERVER=server.grpc_url, **words).stdout.split() == ["plain,slow", "plain,spare"]


WRONG: dict[str, tuple[list[str], int, str]] = {
    "unknown model": (["generate", "dem", "x"], 3, "there is no model 'dem', did you mean 'demo'?"),
    "unknown model of status": (["status", "dmo"], 3, "did you mean 'demo'?"),
    "unknown model of load": (["load", "spar"], 3, "did you mean 'spare'?"),
    "unknown model of unload": (["unload", "spar"], 3, "did you mean 'spare'?"),
    "model not ready": (["generate", "broken", "x"], 1, "the model 'broken' is not ready: path_not_found"),
    "chat with a model not ready": (["chat", "spare"], 1, "the model 'spare' is not ready"),
    "model that cannot be loaded": (["load", "broken"], 1, "broken: path_not_found"),
    "folder that cannot be read": (["load", "garbled"], 1, "garbled: its config.pbtxt or folder cannot be read: `"),
    "stream door": (["generate", "demo_stream", "x"], 1, "wrong_task: the model 'demo_stream' generates no text but"),
    "adapter": (["generate", "demo:sql", "x"], 3, "an adapter of demo is named by --param lora_name=sql"),
    "unknown command of chat": (["chat", "demo"], 2, "there is no command /foo: /help lists them"),
    "file that chat cannot write": (["chat", "demo"], 2, "nowhere/chat.json cannot be written"),
    "image that is missing": (["generate", "demo", "x", "--image=a.png"], 2, "a.png cannot be read: No such file"),
    "several models": (["generate", "-"], 2, "there are several models, name one: demo, slow"),
    "three words": (["generate", "demo", "The", "model"], 2, "more than a prompt: quote it"),
    "empty prompt": (["generate", "demo", "-"], 2, "the prompt is empty"),
    "too many tokens": (["generate", "demo", "x", "--max-tokens=1000"], 1, "leaves room for --max-tokens <= "),
    "temperature": (["generate", "demo", "x", "--temperature=-1"], 2, "-1"),
    "top_p": (["generate", "demo", "x", "--top-p=0"], 2, "0"),
    "unknown parameter": (["generate", "demo", "x", "--param=tempratur=1"], 1, "did you mean '--temperature'?"),
    "value of a parameter": (["generate", "demo", "x", "--param=top_k=many"], 1, "top_k must be an integer"),
    "parameter without value": (["generate", "demo", "x", "--param=top_k"], 2, "must be KEY=VALUE, got 'top_k'"),
    "parameter twice": (["generate", "demo", "x", "--seed=1", "--param=seed=2"], 2, "seed is given twice"),
    "parameter of the command": (["generate", "demo", "x", "--param=stream=true"], 2, "stream is for the command"),
    "header": (["list", "--header=secret"], 2, "must be NAME:VALUE"),
    "address": (["list", "--triton=http://localhost"], 2, "must be HOST:PORT"),
    "unknown host": (["list", "--triton=nohost.invalid:8001"], 4, "there is no such host"),
}

STDIN = {
    "empty prompt": "",
    "unknown command of chat": "/foo\nHello",
    "file that chat cannot write": "/save nowhere/chat.json\nHello",
}
"""By case, what is not a plain greeting."""


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_sentence(server: TritonServer, case: str) -> None:
    arguments, code, sentence = WRONG[case]
    address = [] if "--triton" in arguments[-1] else [f"--triton={server.grpc_url}"]
    stdin = STDIN.get(case, "Hello")
    done = in_process(*arguments, *address, stdin=stdin)
    assert done.exit_code == code, done.stderr
    assert sentence in refusal(done)
    assert done.stdout == ""


@pytest.mark.parametrize(
    "command", [["list"], ["status"], ["load", "demo"], ["unload", "demo"], ["generate", "demo", "x"], ["chat"]]
)
def test_no_server_is_named(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setenv("HF_TRITON_SERVER", address)
    done = in_process(*command)
    assert done.exit_code == 4, done.stderr
    assert f"no Triton answers gRPC at {address}" in refusal(done)


@pytest.mark.parametrize("command", [["list"], ["generate", "demo", "x"]])
def test_http_port_is_named(server: TritonServer, command: list[str]) -> None:
    done = in_process(*command, f"--triton=127.0.0.1:{server.http_port}")
    assert done.exit_code == 4, done.stderr
    assert "is it the HTTP port?" in refusal(done)


@pytest.mark.parametrize("command", ["load", "unload"])
def test_server_without_explicit_mode_is_explained(plain: TritonServer, command: str) -> None:
    done = run(plain, command, "demo")
    assert done.returncode == 1
    assert "--model-control-mode=explicit" in refusal(done)


@pytest.mark.parametrize("command", [["list"], ["generate", "demo", "Today"]])
def test_restricted_api_needs_its_header(plain: TritonServer, command: list[str]) -> None:
    done = run(plain, *command)
    assert done.returncode == 3, done.stderr
    assert f"give its key with --header {KEY}:KEY" in refusal(done)
    wrong = run(plain, *command, f"--header={KEY}:wrong-key")
    assert wrong.returncode == 3
    assert "wrong-key" not in wrong.stderr
    assert run(plain, *command, f"--header={KEY}:open").returncode == 0


def test_killed_server_ends_a_stream_with_a_sentence(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    checkpoint = build_chat_checkpoint(tmp_path / "chat")
    folder = make_folder(tmp_path / "repository", "slow", huggingface_model=checkpoint, config=DECOUPLED)
    (folder / "1" / "model.py").write_text(SLOW_MODEL)
    with TritonServer(tmp_path / "repository") as server:
        command = [COMMAND, "generate", "slow", "Hello", "--max-tokens=200", "--param=ignore_eos=true"]
        with subprocess.Popen(
            [*command, f"--triton={server.grpc_url}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as generating:
            wait_until(lambda: num_running(server) > 0)
            assert server.process is not None
            server.process.send_signal(signal.SIGKILL)
            _, errors = generating.communicate(timeout=60)
    assert generating.returncode == 4
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors


def test_prompts_are_not_in_the_servers_log(server: TritonServer) -> None:
    run(server, "generate", "demo", "zebra crossing", "--max-tokens=2")
    run(server, "generate", "demo", "zebra crossing", "--param=top_k=many")
    assert "zebra" not in server.read_log()


def test_a_named_model_generates_beside_an_admin_key(tmp_path: Path) -> None:
    add_demo(tmp_path)
    with TritonServer(tmp_path, arguments=lock_flags("0123456789abcdef")) as locked:
        for words in (("generate", "-m", "demo", "Hello", "--max-tokens=4"), ("chat", "demo", "--max-tokens=4")):
            done = run(locked, *words, stdin="Hello\n")
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
        assert refusal(run(locked, "generate", "Hello")).endswith("; or name the model")
