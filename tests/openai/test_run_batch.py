# SPDX-License-Identifier: Apache-2.0
"""`hf-triton run-batch` against a real gateway: every request has one result, in order, whatever stops the run."""

import fcntl
import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hf_triton.server import free_ports
from hf_triton.testing import TritonServer
from hf_triton_cli.commands import main
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.commands import hf_triton, in_process
from tests.support.gateway import GatewayThread
from tests.support.paths import ROOT
from tests.support.serving import COMMAND

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> str:
    content = {"model": "demo", "prompt": "The model", "max_tokens": 1, **body}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": content})


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def results_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def test_each_request_has_its_answer_or_its_error(gateway: GatewayThread, client: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hällo 😀"}]
    chat = {"model": "demo", "messages": messages, "max_tokens": 6}
    lines = [
        json.dumps({"custom_id": "é", "method": "POST", "url": CHAT, "body": chat}, ensure_ascii=False),
        "",
        line("2", max_tokens=8),
        line("3", max_tokens=-2),
        line("4", model="nothing"),
        line("5", url="/v1/embeddings"),
    ]
    requests = tmp_path / "in.jsonl"
    requests.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    done = in_process("run-batch", requests, "-o", tmp_path / "out.jsonl", "--url", f"{gateway.url}/v1")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "3 of 5 requests failed: their results say why."
    first, second, *failed = results_of(tmp_path / "out.jsonl")
    expected = client.chat.completions.create(**chat).choices[0].message.content
    assert (first["custom_id"], first["error"]) == ("é", None)
    assert first["response"]["body"]["choices"][0]["message"]["content"] == expected
    assert second["response"]["body"]["usage"]["completion_tokens"] == 8
    assert second["response"]["request_id"]
    statuses = [(each["custom_id"], each["response"]["status_code"]) for each in failed]
    assert statuses == [("3", 400), ("4", 404), ("5", 400)]
    assert "max_tokens" in failed[0]["response"]["body"]["error"]["message"]
    again = in_process("run-batch", requests, "-o", tmp_path / "out.jsonl")  # asks nobody
    assert again.exit_code == 1
    assert again.stderr.splitlines()[0] == "5 of 5 have their results already."


def test_the_documented_lines_answer(gateway: GatewayThread, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    script = text[text.index("### run-batch") :].split("```bash\n", 1)[1].split("```", 1)[0]
    script = script.replace("hf-triton", f"{COMMAND} ", 1).replace("-o out.jsonl", f"-o out.jsonl --url {gateway.url}")
    subprocess.run(["sh", "-ec", script], cwd=tmp_path, check=True, timeout=60)
    assert results_of(tmp_path / "out.jsonl")[0]["response"]["body"]["choices"]


def test_pipes_are_files_too(gateway: GatewayThread) -> None:
    done = hf_triton("run-batch", "-", "-o", "-", "--url", gateway.url, stdin="\n".join(map(line, "abc")))
    assert done.returncode == 0
    assert [json.loads(each)["custom_id"] for each in done.stdout.splitlines()] == ["a", "b", "c"]


@pytest.mark.full
def test_stopped_three_times_nothing_is_lost_or_twice(gateway: GatewayThread, tmp_path: Path) -> None:
    num_requests, out = 2000, tmp_path / "out.jsonl"
    lines = [line(f"request {number}", max_tokens=1 + number % 4) for number in range(num_requests)]
    requests = write(tmp_path / "in.jsonl", lines)
    command = [COMMAND, "run-batch", str(requests), "-o", str(out), "--url", gateway.url, "--concurrency", "8"]
    ends = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 143}
    for part, (number, status) in enumerate(ends.items(), 1):
        with subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=_take_interrupts) as process:
            while not out.exists() or out.read_bytes().count(b"\n") < part * 400:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait(30) == status
        before = out.read_bytes()
        with out.open("ab") as file:
            file.write(b'{"id": "batch_req_')
    subprocess.run(command, check=True, timeout=200)
    assert out.read_bytes().startswith(before)
    results = results_of(out)
    assert [each["custom_id"] for each in results] == [f"request {number}" for number in range(num_requests)]
    counts = Counter(each["response"]["body"]["usage"]["completion_tokens"] for each in results)
    assert counts == dict.fromkeys((1, 2, 3, 4), num_requests // 4)


def _take_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's `&` ignores


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], "there is no request: each line is one"),
        (["{"], "line 1 is not JSON in UTF-8"),
        (["[1]"], "line 1 must be an object"),
        ([line("a"), line("")], "line 2 must have a custom_id, a string that is not empty, got ''"),
        ([line("a"), line("a")], "line 2 has the custom_id 'a' of line 1"),
        ([line("a", method="GET")], "line 1 must have the method POST, got 'GET'"),
        ([line("a", url="/v1/files")], "line 1 must have a url of /v1/chat/completions, "),
        (['{"custom_id":"a","method":"POST","url":"/v1/completions","body":[]}'], "line 1 must have a body, an object"),
        ([line("a", stream=True)], "line 1 has stream true"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_asked(
    lines: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = write(tmp_path / "in.jsonl", lines)
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", str(requests), "-o", str(tmp_path / "out.jsonl")])
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert told.err.startswith(f"error: wrong_usage: {sentence}")
    assert not (tmp_path / "out.jsonl").exists()


def test_results_of_another_batch_are_kept(tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a")])
    for content in (
        requests.read_bytes(),
        b'{"custom_id": "b", "response": null}\n',
        b'{"custom_id": "a", "response": "x"}\n',
        b"notes of mine\n",
        b'{"notes": "without an end of line"}',
    ):
        (tmp_path / "out.jsonl").write_bytes(content)
        done = in_process("run-batch", requests, "-o", tmp_path / "out.jsonl")
        assert done.exit_code == 2
        assert "line 1 of " in done.stderr
        assert (tmp_path / "out.jsonl").read_bytes() == content


def test_a_changed_request_and_a_second_run_are_refused(gateway: GatewayThread, tmp_path: Path) -> None:
    requests, out = write(tmp_path / "in.jsonl", [line("a"), line("b")]), tmp_path / "out.jsonl"
    arguments = ["run-batch", str(requests), "-o", str(out), "--url", gateway.url]
    assert in_process(*arguments).exit_code == 0
    with out.open("r+b") as file:
        first = file.readline()
        file.truncate(len(first) + 60)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run writes " in in_process(*arguments).stderr
    before = out.read_bytes()
    write(requests, [line("a", max_tokens=2), line("b")])
    assert "line 1 of " in in_process(*arguments).stderr
    write(requests, [line("a"), line("b", max_tokens=2)])  # half a result of it is there
    assert "line 2 of " in in_process(*arguments).stderr
    assert out.read_bytes() == before
    write(requests, [line("a"), line("b")])
    assert in_process(*arguments).exit_code == 0
    assert out.read_bytes().startswith(first)
    assert [each["custom_id"] for each in results_of(out)] == ["a", "b"]


def test_a_full_disk_is_one_sentence(gateway: GatewayThread, tmp_path: Path) -> None:
    done = hf_triton("run-batch", "-", "-o", "/dev/full", "--url", gateway.url, stdin=line("a"))
    assert done.returncode == 1
    assert done.stderr == "error: disk_full: the results cannot be written: No space left on device\n"


def test_no_proxy_stands_before_this_machine(gateway: GatewayThread) -> None:
    proxy = f"http://127.0.0.1:{free_ports(1)[0]}"
    done = hf_triton("run-batch", "-", "-o", "-", "--url", gateway.url, stdin=line("a"), http_proxy=proxy)
    assert done.returncode == 0, done.stderr


def test_a_gateway_without_its_server_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_triton_cli.client.batch_client.WAITS_S", (0.1, 0.2, 0.4))
    config = GatewayConfig(triton=f"127.0.0.1:{free_ports(1)[0]}", port=0)
    requests = write(tmp_path / "in.jsonl", [line(str(number)) for number in range(100)])
    with GatewayThread(config) as alone:
        done = in_process("run-batch", requests, "-o", tmp_path / "out.jsonl", "--url", alone.url)
    assert done.exit_code == 4
    assert "reaches no server: when it does, the same command goes on" in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_without_a_gateway_nothing_is_written(tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a")])
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    done = in_process("run-batch", requests, "-o", tmp_path / "out.jsonl", "--url", url)
    assert done.exit_code == 4
    assert done.stderr.startswith(f"error: server_unreachable: no gateway answers at {url}: start one")
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_the_key_is_sent_and_a_wrong_one_ends_the_run(
    triton: TritonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("right\n")
    requests = write(tmp_path / "in.jsonl", [line("a")])
    arguments = ["run-batch", str(requests), "-o", str(tmp_path / "out.jsonl")]
    config = GatewayConfig(triton=triton.grpc_url, port=0, api_key_file=tmp_path / "keys")
    with GatewayThread(config) as guarded:
        arguments += ["--url", guarded.url]
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        refused = in_process(*arguments)
        assert refused.exit_code == 3
        assert refused.stderr == (
            f"error: restricted: the gateway at {guarded.url} refuses the key: set OPENAI_API_KEY\n"
        )
        monkeypatch.setenv("OPENAI_API_KEY", "right")
        assert in_process(*arguments).exit_code == 0
    assert len(results_of(tmp_path / "out.jsonl")) == 1


def test_what_is_busy_is_asked_again(triton: TritonServer, tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", [line(str(number), max_tokens=20) for number in range(12)])
    with GatewayThread(GatewayConfig(triton=triton.grpc_url, port=0, max_concurrent_requests=2)) as small:
        arguments = ["run-batch", str(requests), "-o", str(tmp_path / "out.jsonl"), "--url", small.url]
        assert in_process(*arguments, "--concurrency", "6").exit_code == 0
    assert {each["response"]["status_code"] for each in results_of(tmp_path / "out.jsonl")} == {200}


@pytest.mark.full
def test_a_model_is_served_for_the_run(tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a", model="whatever")])
    done = hf_triton("run-batch", str(requests), "-o", str(tmp_path / "out.jsonl"), "--model", "demo")
    assert done.returncode == 0, done.stderr
    [result] = results_of(tmp_path / "out.jsonl")
    assert result["response"]["body"]["model"] == "demo"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--url", "http://x", "--model", "demo"], "--url is of a server that runs, and --model serves one"),
        (["--set", "dtype=float32"], "--set is for --model"),
        (["--url", "localhost:9000"], "it must be as http://localhost:9000, got 'localhost:9000'"),
        (["--url", "http://127.0.0.1:999999"], "it must be as http://localhost:9000, got "),
        (["-o", "/nowhere/out.jsonl"], "/nowhere/out.jsonl cannot be written: No such file or directory"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a")])
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", str(requests), "-o", os.devnull, *arguments])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_key_that_is_no_header_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = write(tmp_path / "in.jsonl", [line("a")])
    monkeypatch.setenv("OPENAI_API_KEY", "schlüssel")
    done = in_process("run-batch", requests, "-o", os.devnull)
    assert done.exit_code == 2
    assert done.stderr == "error: wrong_usage: OPENAI_API_KEY must be letters, digits and signs of ASCII\n"
