# SPDX-License-Identifier: Apache-2.0
"""`hf-triton run`: one model served and talked to in one terminal."""

import json
import re
from pathlib import Path

import pytest

from hf_triton.folders.model_folder import write_model_folder
from hf_triton.server import TritonServer
from hf_triton.testing import build_tiny_checkpoint
from hf_triton_cli.serving.examples import model_on_demand, ready_text
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.commands import Terminal, hf_triton
from tests.support.serving import curl_lines, descendants, serve_until_exit, wait_until_gone
from tests.support.tasks import save_task_checkpoint


@pytest.mark.full
def test_a_prompt_is_answered_and_nothing_is_left(tmp_path: Path) -> None:
    done = hf_triton("run", "demo", "How can you be", "--max-tokens=8", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr == "Loading demo ...\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("end", ["/bye\n", "\x03"])
def test_a_terminal_talks_and_the_end_stops_the_server(end: str) -> None:
    with Terminal("run") as terminal:
        terminal.wait_for("/help lists commands.")
        terminal.wait_for(">>> ")
        family = descendants(terminal.process.pid)
        terminal.type("Hello\n/stats\n")
        terminal.wait_for(" tokens/s")
        terminal.wait_for(">>> ")
        if end == "\x03":
            terminal.wait_for("Ctrl+C again, or /bye, ends.", typing=end)
            assert terminal.interrupt() == 0
        else:
            terminal.type(end)
        assert terminal.wait() == 0
    wait_until_gone(family)
    assert "I1" not in terminal.output  # of Triton's log


@pytest.mark.full
def test_sigterm_ends_the_server_too() -> None:
    with Terminal("run") as terminal:
        terminal.wait_for(">>> ")
        family = descendants(terminal.process.pid)
        assert terminal.terminate() == 143
    wait_until_gone(family)


@pytest.mark.full
def test_a_prompt_on_a_terminal_is_no_command_and_its_failure_a_status() -> None:
    with Terminal("run", "demo", "/etc is what?", "--max-tokens=100000") as terminal:
        assert terminal.wait() == 1
    assert "leaves room for " in terminal.output
    assert "there is no command" not in terminal.output


def test_an_encoder_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    checkpoint = str(save_task_checkpoint(tmp_path / "masks", "bert", "masks"))
    done = hf_triton("run", checkpoint)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: wrong_task: {checkpoint} is for fill-mask, and generates no text: `")
    assert line.endswith(f"hf-triton serve {checkpoint}` serves it, and POST /v1/fill-mask asks it")


@pytest.mark.parametrize(
    ("head", "text"), [("masks", "Anna lives at the <mask>."), ("tokens", "Anna lives at the harbour.")]
)
def test_the_example_of_an_encoder_is_one_that_it_takes(tmp_path: Path, head: str, text: str) -> None:
    folder = tmp_path / "repository" / "mine"
    checkpoint = save_task_checkpoint(tmp_path / "checkpoint", "roberta", head)
    write_model_folder(folder, {"huggingface_model": str(checkpoint)})
    shown = ready_text(TritonServer(folder.parent), GatewayConfig(), [model_on_demand(folder)])
    [line] = curl_lines(shown)
    assert json.loads(line[-1]) == {"model": "mine", "input": text}
    assert re.search(r"/v1/(fill-mask|token-classification)$", line[1])


@pytest.mark.parametrize("body", ["task_class = object", "pass"])
def test_a_folder_that_is_not_loaded_has_an_example_if_its_task_is_known(tmp_path: Path, body: str) -> None:
    folder = tmp_path / "repository" / "mine"
    write_model_folder(folder, {"huggingface_model": "a/b", "task": "fill-mask"})
    own = "class TritonPythonModel(hf_triton.TritonPythonModel):\n"
    (folder / "1" / "model.py").write_text(f"import hf_triton\n{own}    {body}\n")
    shown = ready_text(TritonServer(folder.parent), GatewayConfig(), [model_on_demand(folder)])
    assert ("curl" in shown) is (body == "pass")


@pytest.mark.parametrize("token", ["[X]", {"content": "[X]", "lstrip": True}, None])
def test_the_mask_is_the_tokenizer_s_own(tmp_path: Path, token: object) -> None:
    folder = tmp_path / "repository" / "mine"
    checkpoint = save_task_checkpoint(tmp_path / "checkpoint", "bert", "masks")
    config = json.loads((checkpoint / "tokenizer_config.json").read_text()) | {"mask_token": token}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    (checkpoint / "special_tokens_map.json").unlink(missing_ok=True)
    write_model_folder(folder, {"huggingface_model": str(checkpoint)})
    shown = ready_text(TritonServer(folder.parent), GatewayConfig(), [model_on_demand(folder)])
    [line] = curl_lines(shown)
    assert json.loads(line[-1])["input"] == f"Anna lives at the {'[X]' if token else '[MASK]'}."


def test_a_model_without_a_chat_template_is_known_before_it_is_loaded(tmp_path: Path) -> None:
    base = str(build_tiny_checkpoint(tmp_path / "base", "llama"))
    for more, what in (((), "a conversation needs"), (("Hello", "--system=Be brief."), "--system needs")):
        done = hf_triton("run", base, *more)
        assert (done.returncode, done.stdout) == (1, "")
        [line] = done.stderr.splitlines()
        assert line.startswith(f"error: wrong_task: {base} has no chat template, which {what}: `")
        assert line.split("`")[1].endswith(f"hf-triton run {base} PROMPT")


@pytest.mark.full
def test_a_model_without_a_chat_template_completes_a_prompt(tmp_path: Path) -> None:
    base = str(build_tiny_checkpoint(tmp_path / "base", "llama"))
    done = hf_triton("run", base, "How can", "--max-tokens=4", "--param=return_num_output_tokens=true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "code", "sentence"),
    [
        ({"huggingface_model": "/nowhere/at/all"}, 3, "path_not_found: there is no folder "),
        ({"huggingface_model": "acme/tiny"}, 4, "hub_unavailable: acme/tiny is not cached, and the Hub at "),
        ({"huggingface_model": "acme/tiny"}, 2, "it has no 1/model.py: "),
    ],
)
def test_a_folder_that_fails_is_one_sentence_and_its_causes_exit_code(
    settings: dict[str, str], code: int, sentence: str, tmp_path: Path
) -> None:
    folder = tmp_path / "repository" / "broken"
    write_model_folder(folder, settings)
    if code == 2:
        (folder / "1" / "model.py").unlink()
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    done = hf_triton("run", str(folder), **environment)
    assert done.returncode == code
    assert f"error: server_failed: broken cannot be served: {sentence}" in done.stderr
    served = serve_until_exit(folder.parent, **environment)
    assert served.returncode == code
    assert "error: server_failed: no model is served" in served.stderr
