# SPDX-License-Identifier: Apache-2.0
"""The tutorial's commands as a reader types them: folders copied unmodified, the real curl, the real perf_analyzer.

The Hub is a loopback one that serves tiny checkpoints under the tutorial's names.
"""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hf_triton.protocol.declared_ports import OUTPUTS
from hf_triton.protocol.names import TEXT_OUTPUTS
from hf_triton.testing import LoopbackHub, TritonServer, build_tiny_checkpoint
from tests.support.client import generate, get, infer
from tests.support.paths import ROOT
from tests.support.reference import Reference, load_reference
from tests.support.tasks import save_task_checkpoint

pytestmark = pytest.mark.full

FALCON, PERSIMMON, LLAMA = "tiiuae/falcon-7b", "adept/persimmon-8b-base", "meta-llama/Llama-2-7b-hf"
SENTIMENT = "philschmid/MiniLM-L6-H384-uncased-sst2"
ARCHITECTURES = {FALCON: "falcon", PERSIMMON: "persimmon", LLAMA: "llama"}
FOLDERS = {"falcon7b": FALCON, "persimmon8b": PERSIMMON, "llama7b": LLAMA}
"""Copied folders, and what each serves."""
MAX_OUTPUT_LENGTH = 128  # in the three folders
PROMPTS = ["I am going", "How can you be", "Where is the nearest", "x", "Der Zug fährt " * 4, "🙂", "3, 14, 159", "you"]

STATED = """
# A folder as the tutorial writes it: what goes in and out is stated.
backend: "python"
input [ {{ name: "text_input" data_type: TYPE_STRING dims: [ {dims} ] }} ]
output [ {{ name: "{output}" data_type: TYPE_STRING dims: [ -1 ] }} ]
parameters: {{
  key: "huggingface_model",
  value: {{string_value: "tiiuae/falcon-7b"}}
}}
parameters: {{
  key: "max_output_length",
  value: {{string_value: "15"}}
}}
"""
BATCHING = """
dynamic_batching { }
max_batch_size: 8
"""
STATED_FOLDERS = {
    "stated": STATED.format(dims=1, output="text_output"),
    "stated_old": STATED.format(dims=-1, output="text"),
    "stated_batched": STATED.format(dims=-1, output="text_output") + BATCHING,
}


TOLD = [name for name in OUTPUTS if name not in TEXT_OUTPUTS]
"""Outputs that every folder has beside those it states; they come where a request asks for them."""


def shell(command: str, folder: Path) -> str:
    direct = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(command, shell=True, cwd=folder, env=direct, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: build_tiny_checkpoint(tmp_path_factory.mktemp(architecture), architecture, seed=seed)
        for seed, (name, architecture) in enumerate(ARCHITECTURES.items())
    }


@pytest.fixture(scope="module")
def reference(checkpoints: dict[str, Path]) -> Callable[[str], Reference]:
    return cache(lambda name: load_reference(checkpoints[name]))


@pytest.fixture(scope="module")
def hub(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    sentiment = save_task_checkpoint(tmp_path_factory.mktemp("sentiment"), "distilbert", "sequence", num_labels=2)
    with LoopbackHub() as hub:
        for name, folder in checkpoints.items():
            hub.add(name, folder, gated=name == LLAMA)
        hub.add(SENTIMENT, sentiment)
        yield hub


@pytest.fixture(scope="module")
def model_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("work")
    for name in ("falcon7b", "persimmon8b", "llama7b"):
        shell(f"cp -r {shlex.quote(str(ROOT / name))} .", work)
    shell("mkdir -p model_repository", work)
    for name in ("falcon7b", "persimmon8b", "llama7b"):
        shell(f"cp -r {name}/ model_repository/", work)
    shell("cp -r falcon7b model_repository/one_input", work)
    shell("sed -i 's/^# input /input /' model_repository/one_input/config.pbtxt", work)
    shell("cp -r falcon7b model_repository/sts_tensorrt_inference", work)
    shell(f"sed -i 's|{FALCON}|{SENTIMENT}|' model_repository/sts_tensorrt_inference/config.pbtxt", work)
    page = (ROOT / "docs" / "moving" / "transformer-deploy.md").read_text(encoding="utf-8")
    [declaration] = re.findall(r"^echo '(input \[.*\])' >> \S+/config.pbtxt$", page, re.MULTILINE)
    with (work / "model_repository/sts_tensorrt_inference/config.pbtxt").open("a") as file:
        file.write('parameters { key: "task" value { string_value: "text-classification" } }\n' + declaration)
    shell("cp -r model_repository/sts_tensorrt_inference model_repository/sts_tensorrt_model", work)
    page = (ROOT / "docs" / "perf-analyzer.md").read_text(encoding="utf-8")
    [ids] = re.findall(r"^echo '(input \[.*\])' >> \S+/config.pbtxt$", page, re.MULTILINE)
    config = work / "model_repository/sts_tensorrt_model/config.pbtxt"
    config.write_text(config.read_text().replace(declaration, ids))
    shell("cp -r falcon7b model_repository/batched", work)
    with (work / "model_repository/batched/config.pbtxt").open("a") as file:
        file.write(BATCHING)
    for name, text in STATED_FOLDERS.items():
        shell(f"cp -r falcon7b model_repository/{name}", work)
        (work / "model_repository" / name / "config.pbtxt").write_text(text)
    return work / "model_repository"


@pytest.fixture(scope="module")
def server(
    model_repository: Path, hub: LoopbackHub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    home = {"HF_HOME": str(tmp_path_factory.mktemp("home")), "PRIVATE_REPO_TOKEN": hub.access_token}
    with TritonServer(model_repository, environment=hub.environment() | home, ready_timeout_s=280) as server:
        yield server


def curl(server: TritonServer, command: str) -> Any:
    """Run one of the tutorial's commands; only the port is ours."""
    return json.loads(shell(command.replace("localhost:8000", f"localhost:{server.http_port}"), Path("/")))


def output_of(reply: Any) -> Any:
    (output,) = reply["outputs"]
    return output


# --- steps 1 to 5 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["falcon7b", "persimmon8b", "llama7b"])
def test_a_copied_folder_is_served_as_it_is(name: str, server: TritonServer) -> None:
    for file in ("config.pbtxt", "1/model.py"):
        assert (server.model_repository / name / file).read_bytes() == (ROOT / name / file).read_bytes()
    assert server.is_model_ready(name), server.log_tail()


INFER = {
    "falcon7b": (
        "I am going",
        """curl -X POST localhost:8000/v2/models/falcon7b/infer -d '{"inputs": [{"name":"text_input","datatype":"BYTES","shape":[1],"data":["I am going"]}]}'""",  # noqa: E501
    ),
    "two folders, falcon7b": (
        "How can you be",
        """curl -X POST localhost:8000/v2/models/falcon7b/infer -d '{"inputs": [{"name":"text_input","datatype":"BYTES","shape":[1],"data":["How can you be"]}]}'""",  # noqa: E501
    ),
    "two folders, persimmon8b": (
        "Where is the nearest",
        """curl -X POST localhost:8000/v2/models/persimmon8b/infer -d '{"inputs": [{"name":"text_input","datatype":"BYTES","shape":[1],"data":["Where is the nearest"]}]}'""",  # noqa: E501
    ),
    "llama7b": (
        "I am going",
        """curl -X POST localhost:8000/v2/models/llama7b/infer -d '{"inputs": [{"name":"text_input","datatype":"BYTES","shape":[1],"data":["I am going"]}]}'""",  # noqa: E501
    ),
}


@pytest.mark.parametrize("case", INFER)
def test_curl_infer(case: str, server: TritonServer, reference: Callable[[str], Reference]) -> None:
    prompt, command = INFER[case]
    name = re.findall(r"models/(\w+)/", command)[0]
    reply = curl(server, command)
    assert (reply["model_name"], reply["model_version"]) == (name, "1")
    output = output_of(reply)
    assert (output["name"], output["datatype"], output["shape"]) == ("text_output", "BYTES", [1])
    assert output["data"] == [reference(FOLDERS[name]).text(prompt, MAX_OUTPUT_LENGTH)]
    assert output["data"][0].startswith(prompt)
    assert len(output["data"][0]) > len(prompt)


def test_curl_generate(server: TritonServer, reference: Callable[[str], Reference]) -> None:
    reply = curl(
        server, """curl -X POST localhost:8000/v2/models/falcon7b/generate -d '{"text_input":"How can you be"}'"""
    )
    wanted = reference(FALCON).text("How can you be", MAX_OUTPUT_LENGTH)
    assert reply == {"model_name": "falcon7b", "model_version": "1", "text_output": wanted}


def test_gated_model_is_downloaded_with_the_access_token_of_the_tutorial(
    server: TritonServer, hub: LoopbackHub
) -> None:
    files = [each for each in hub.requests if f"/{LLAMA}/resolve/" in each.path]
    assert files
    assert all(each.had_valid_token for each in files)
    assert hub.access_token not in server.read_log()
    assert hub.access_token not in get(server, "/v2/models/llama7b/config").body


# --- the tutorial's own style of config.pbtxt ------------------------------------------------------------------------


@pytest.mark.parametrize("name", STATED_FOLDERS)
def test_a_folder_that_states_its_tensors_is_taken_at_its_word(
    name: str, server: TritonServer, reference: Callable[[str], Reference]
) -> None:
    config = get(server, f"/v2/models/{name}/config").json()
    assert [port["name"] for port in config["input"]] == ["text_input"]
    stated = "text" if name == "stated_old" else "text_output"
    assert [port["name"] for port in config["output"]] == [stated, *TOLD]
    wanted = reference(FALCON).text("I am going", 15)
    shape = [1, 1] if name == "stated_batched" else [1]
    output = output_of(infer(server, name, ["I am going"], shape).json())
    assert (output["name"], output["shape"], output["data"]) == (stated, shape, [wanted])
    assert generate(server, name, "I am going").json()[stated] == wanted


# --- "Enabling batching in Triton is as simple as adding the following" ----------------------------------------------


@pytest.mark.parametrize("route", ["infer", "generate"])
@pytest.mark.parametrize("name", ["falcon7b", "batched", "stated_batched"])
def test_eight_at_once_get_their_own_answers(
    name: str, route: str, server: TritonServer, reference: Callable[[str], Reference]
) -> None:
    wanted = [reference(FALCON).text(prompt, 15) for prompt in PROMPTS]
    shape = [1] if name == "falcon7b" else [1, 1]

    def ask(prompt: str) -> str:
        if route == "generate":
            return str(generate(server, name, prompt, max_new_tokens=15).json()["text_output"])
        output = output_of(infer(server, name, [prompt], shape, {"max_new_tokens": 15}).json())
        assert output["shape"] == shape, "one row alone"
        return str(output["data"][0])

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, PROMPTS)) == wanted


# --- perf_analyzer ---------------------------------------------------------------------------------------------------

PERF = ROOT / ".venv" / "perf_analyzer" / "bin"
BRIEF = "--measurement-mode count_windows --measurement-request-count 5 --stability-percentage 999"
NO_SHAPE = "contains dynamic shape, provide shapes"


def perf_analyzer(server: TritonServer, arguments: str) -> subprocess.CompletedProcess[str]:
    url = server.grpc_url if "-i grpc" in arguments else f"127.0.0.1:{server.http_port}"
    command = f"perf_analyzer {arguments} -u {url} {BRIEF}"
    command = command.replace("--collect-metrics", f"--collect-metrics --metrics-url {server.metrics_url}")
    words = shlex.split(command)
    environment = os.environ | {"LD_LIBRARY_PATH": str(PERF)}
    return subprocess.run(
        [str(PERF / words[0]), *words[1:]], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def has_perf_analyzer() -> None:
    if not (PERF / "perf_analyzer").exists():
        pytest.skip("perf_analyzer is not installed: run `make test` once")


TRANSFORMER_DEPLOY = (
    '--percentile=95 --string-data "This live event is great. I will sign-up for Infinity." --shape TEXT:1 -i grpc -a'
)
"""Of its two printed commands; the second one adds a range and a file."""
MODEL_PART = "--input-data rows.json --shape input_ids:8,128 --shape attention_mask:8,128 -i grpc -a"
"""Of its command for the model alone, with data in place of zeros, and fewer tokens; it adds the same."""
RANGE = "--concurrency-range 1:2 -f perf.csv"
DATA = {"data": [{"text_input": {"content": [PROMPTS[0]], "shape": [1]}}]}
RUNS = {
    "falcon7b": ("-m falcon7b --collect-metrics --input-data data.json", [1]),
    "the folder's comment": ("-m one_input --collect-metrics", [1]),
    "transformer-deploy": (f"-m sts_tensorrt_inference {TRANSFORMER_DEPLOY} {RANGE}", [1, 2]),
    "transformer-deploy's model part": (f"-m sts_tensorrt_model {MODEL_PART} {RANGE}", [1, 2]),
    "as the tutorial states its tensors": ("-m stated --collect-metrics", [1]),
    "batched": ("-m batched --collect-metrics --concurrency-range=2:4:2 --input-data data.json", [2, 4]),
}


@pytest.mark.usefixtures("has_perf_analyzer")
@pytest.mark.parametrize("case", RUNS)
def test_perf_analyzer(case: str, server: TritonServer, tmp_path: Path) -> None:
    """With random data where a folder declares its one input, as the tutorial does and a comment in ours."""
    arguments, levels = RUNS[case]
    (tmp_path / "data.json").write_text(json.dumps(DATA))
    page = (ROOT / "docs" / "perf-analyzer.md").read_text(encoding="utf-8")
    [rows] = re.findall(r"^python3 -c .* > rows.json$", page, re.MULTILINE)
    shell(rows.replace("384", "128"), tmp_path)
    for name in ("data.json", "rows.json", "perf.csv"):
        arguments = arguments.replace(name, str(tmp_path / name))
    done = perf_analyzer(server, arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [int(level) for level in re.findall(r"Concurrency: (\d+), throughput", done.stdout)] == levels
    counts = [int(count) for count in re.findall(r"^ +Request count: (\d+)", done.stdout, re.MULTILINE)]
    assert len(counts) == len(levels)
    assert min(counts) > 0
    assert "Failed" not in done.stdout
    if "perf.csv" in arguments:
        rows = (tmp_path / "perf.csv").read_text().splitlines()
        assert rows[0].startswith("Concurrency,")
        assert sorted(row.split(",")[0] for row in rows[1:]) == [*map(str, levels)]  # the fastest comes first


def test_the_three_folders_have_the_same_comment() -> None:
    blocks = {
        (ROOT / name / "config.pbtxt").read_text().split("\n\n")[-1] for name in ("falcon7b", "persimmon8b", "llama7b")
    }
    assert len(blocks) == 1
    assert blocks.pop().splitlines()[-1] == '# input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]'


@pytest.mark.usefixtures("has_perf_analyzer")
def test_perf_analyzer_s_random_data_needs_declared_inputs(server: TritonServer) -> None:
    """It makes data of every input, optional or not, and knows no length for arrays."""
    done = perf_analyzer(server, "-m falcon7b --shape text_input:1")
    assert done.returncode != 0
    assert NO_SHAPE in done.stderr
