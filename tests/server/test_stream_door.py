# SPDX-License-Identifier: Apache-2.0
"""A stream door beside its model, in real servers: the same outputs and errors, and the death of either."""

import http.client
import json
import os
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import Reply, generate, infer, post
from tests.support.paths import ROOT
from tests.support.slow_model import slow_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.full

STEP_S = 0.05
NUM_ROWS = 4  # texts at a time; the others wait
NUM_LONG = 200  # tokens: ten seconds
SLOW_MODEL = slow_model(STEP_S)
DECOUPLED = "model_transaction_policy { decoupled: true }"
PROMPT = "The canary sings"
NUM_TOKENS = 40
SECRET = "a prompt that must not be logged"
SOON_S = 60.0


def add_door(repository: Path, name: str, config: str = "", **settings: str) -> Path:
    """Copy the ready folder, as the README says."""
    folder = repository / name
    shutil.copytree(ROOT / "stream_door", folder)
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in settings.items()]
    with (folder / "config.pbtxt").open("a") as file:
        file.write("\n".join([config, *lines]) + "\n")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", eos_token_id=None)


@pytest.fixture(scope="module")
def make_repository(
    checkpoint: Path, make_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Path]:
    """`plain` and `slow` (20 tokens a second) with a door each."""

    def make() -> Path:
        root = tmp_path_factory.mktemp("repository")
        make_folder(root, "plain", huggingface_model=checkpoint)
        slow = make_folder(root, "slow", huggingface_model=checkpoint, max_num_seqs=NUM_ROWS)
        (slow / "1" / "model.py").write_text(SLOW_MODEL)
        add_door(root, "plain_stream")
        add_door(root, "slow_stream")
        return root

    return make


@pytest.fixture(scope="module")
def server(
    make_repository: Callable[[], Path], checkpoint: Path, make_folder: Callable[..., Path]
) -> Iterator[TritonServer]:
    """Beside those, `direct` streams by itself, `typed` takes tensors, and `a_door` is loaded before its model."""
    root = make_repository()
    make_folder(root, "direct", config=DECOUPLED, huggingface_model=checkpoint, stream=True)
    make_folder(root, "typed", config="max_batch_size: 8", huggingface_model=checkpoint)
    add_door(root, "typed_stream", config="max_batch_size: 8", parameters_as_inputs="true")
    add_door(root, "a_door", stream_of="plain")
    add_door(root, "orphan_stream")
    with TritonServer(root, ready_timeout_s=280) as running:
        yield running


# --- clients ---------------------------------------------------------------------------------------------------------


def events_of(reply: Reply) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data:")) for line in reply.body.splitlines() if line.startswith("data:")]


def stream(server: TritonServer, model: str, text: object = PROMPT, **fields: object) -> list[dict[str, Any]]:
    """What /generate_stream sends, event by event."""
    return events_of(post(server, f"/v2/models/{model}/generate_stream", {"text_input": text, **fields}))


def joined(events: list[dict[str, Any]]) -> list[str]:
    """The texts, each put together from its pieces."""
    rows = [event["text_output"] for event in events]
    rows = [row if isinstance(row, list) else [row] for row in rows]
    return ["".join(pieces) for pieces in zip(*rows, strict=True)]


def rest(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("text_output", "model_name")}


class OpenStream:
    def __init__(self, server: TritonServer, model: str, text: str = PROMPT, **fields: object) -> None:
        self._connection = http.client.HTTPConnection(server.host, server.http_port, timeout=SOON_S)
        body = json.dumps({"text_input": text, "max_new_tokens": NUM_TOKENS, **fields})
        headers = {"Content-Type": "application/json", "Connection": "close"}
        self._connection.request("POST", f"/v2/models/{model}/generate_stream", body, headers)
        self._answer = self._connection.getresponse()

    def event(self) -> dict[str, Any] | None:
        for line in self._answer:
            if line.startswith(b"data:"):
                event: dict[str, Any] = json.loads(line.removeprefix(b"data:"))
                return event
        return None

    def events(self) -> list[dict[str, Any]]:
        return list(iter(self.event, None))

    def drop(self) -> None:
        self._answer.close()
        self._connection.close()


def prompt_tensor() -> Any:
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([PROMPT.encode()], np.object_))
    return tensor


def start_streams(server: TritonServer, model: str, count: int, **fields: object) -> list[OpenStream]:
    streams = [OpenStream(server, model, **fields) for _ in range(count)]
    for each in streams:
        assert "text_output" in (each.event() or {})
    return streams


def stub_of(server: TritonServer, model: str) -> int:
    """The process id of a model's Python stub."""
    assert server.process is not None
    folder = f"{server.model_repository}/{model}/"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server.process.pid and folder in (process / "cmdline").read_text():
                return int(process.name)
        except OSError:
            continue  # it has just ended
    raise AssertionError(f"no stub serves {model}")


def is_free(server: TritonServer, model: str) -> bool:
    """Whether the queue of the model is empty: it generates a few tokens at once."""
    started = time.monotonic()
    assert generate(server, model, PROMPT, max_new_tokens=2).status == 200
    return time.monotonic() - started < NUM_LONG * STEP_S / 5


# --- the same texts --------------------------------------------------------------------------------------------------

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unicode": {"text_input": "你好 🙂 größer\0"},
    "empty": {"text_input": ""},
    "many prompts": {"text_input": ["The sea", "", "Where does the river go", "你好"]},
    "drawn": {"temperature": 1.0, "seed": 5, "num_return_sequences": 3},
    "with the prompt": {"exclude_input_in_output": False},
    "stopped": {"stop": "e"},
    "by its own name": {"max_tokens": 7, "max_new_tokens": None},
    "all outputs": {
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_cumulative_logprob": True,
        "return_logprobs": True,
        "logprobs": 2,
        "text_input": ["The sea", "Where"],
    },
    "not streamed": {"stream": False},
    "one token": {"max_new_tokens": 1},
    "in parameters": {"parameters": {"temperature": 0.7, "seed": 3}},
}


def body_of(request: dict[str, Any]) -> dict[str, Any]:
    fields = {"text_input": PROMPT, "max_new_tokens": NUM_TOKENS} | request
    return {name: value for name, value in fields.items() if value is not None}


@pytest.mark.parametrize("door", ["plain_stream", "a_door"])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_stream_door_streams_what_a_decoupled_model_streams(server: TritonServer, request_name: str, door: str) -> None:
    fields = body_of(REQUESTS[request_name])
    text = fields.pop("text_input")
    direct, through = stream(server, "direct", text, **fields), stream(server, door, text, **fields)
    assert joined(through) == joined(direct)
    assert rest(through[-1]) == rest(direct[-1])
    if fields.get("stream") is False:
        assert len(through) == len(direct) == 1
    elif fields.get("max_new_tokens") == NUM_TOKENS and request_name != "stopped":
        assert len(through) > 5


def test_deltas_arrive_during_generation(server: TritonServer) -> None:
    [opened] = start_streams(server, "slow_stream", 1)
    started = time.monotonic()
    events = opened.events()
    assert len(events) > NUM_TOKENS / 2
    assert time.monotonic() - started > NUM_TOKENS * STEP_S / 2


def test_one_copy_of_the_weights_serves_all_doors(server: TritonServer) -> None:
    parameters: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "exclude_input_in_output": True}
    [output] = infer(server, "plain", [PROMPT], parameters=parameters).json()["outputs"]
    generated = generate(server, "plain", PROMPT, **parameters).json()["text_output"]
    assert output["data"] == [generated] == joined(stream(server, "plain_stream", max_new_tokens=NUM_TOKENS))
    assert generate(server, "plain_stream", PROMPT, stream=False, **parameters).json()["text_output"] == generated
    maps = Path(f"/proc/{stub_of(server, 'plain_stream')}/maps").read_text()
    assert "libtorch" not in maps, "the door has no weights, and nothing to load them with"


def test_tensors_pass_through_the_door(server: TritonServer) -> None:
    def tensor(name: str, kind: str, values: list[Any]) -> Any:
        array = np.array(values, np.object_ if kind == "BYTES" else np.float32 if kind == "FP32" else np.int64)
        made = grpcclient.InferInput(name, [len(values), 1], kind)
        made.set_data_from_numpy(array.reshape(-1, 1))
        return made

    prompts = [b"The sea", "größer".encode(), b"nul\0byte"]
    inputs = [
        tensor("text_input", "BYTES", prompts),
        tensor("max_new_tokens", "INT64", [5, 9, 13]),
        tensor("repetition_penalty", "FP32", [1.5, 1.25, 1.0]),
    ]
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("typed_stream", inputs, parameters={"return_num_output_tokens": True})
        client.stop_stream()
    parts = [answers.get() for _ in range(answers.qsize())]
    assert [error for _, error in parts if error] == []
    pieces = [result.as_numpy("text_output").reshape(-1) for result, _ in parts]
    assert parts[-1][0].as_numpy("num_output_tokens").reshape(-1).tolist() == [5, 9, 13]
    whole = [
        generate(server, "typed", prompt.decode(), max_new_tokens=count, repetition_penalty=penalty,
                 exclude_input_in_output=True).json()["text_output"]
        for prompt, count, penalty in zip(prompts, (5, 9, 13), (1.5, 1.25, 1.0), strict=True)
    ]  # fmt: skip
    assert [b"".join(row).decode() for row in zip(*pieces, strict=True)] == whole


def test_two_hundred_streams_at_once(server: TritonServer) -> None:
    prompts = [f"{PROMPT} {number % 20}" for number in range(200)]
    wanted = {prompt: joined(stream(server, "direct", prompt, max_new_tokens=12)) for prompt in set(prompts)}
    with ThreadPoolExecutor(200) as pool:
        found = list(
            pool.map(lambda prompt: joined(stream(server, "plain_stream", prompt, max_new_tokens=12)), prompts)
        )
    assert found == [wanted[prompt] for prompt in prompts]


# --- the same errors -------------------------------------------------------------------------------------------------

BAD: dict[str, dict[str, Any]] = {
    "a value": {"max_new_tokens": 0},
    "too long a prompt": {"text_input": "x" * 1_000_000},
    "best_of": {"best_of": 3, "temperature": 1.0},
    "a cancellation without an id": {"cancel": True},
}


@pytest.mark.parametrize("request_name", BAD)
def test_stream_door_gives_the_error_messages_of_the_model(server: TritonServer, request_name: str) -> None:
    fields = body_of(BAD[request_name])
    text = fields.pop("text_input")
    direct, through = stream(server, "direct", text, **fields), stream(server, "plain_stream", text, **fields)
    assert "error" in direct[0]
    assert through == direct


def test_no_prompt_reaches_the_log(server: TritonServer) -> None:
    for fields in ({}, {"max_new_tokens": 0}):
        for model in ("plain_stream", "orphan_stream"):
            stream(server, model, SECRET, **fields)
    assert SECRET not in server.read_log()


# --- giving up -------------------------------------------------------------------------------------------------------


def test_dropped_streams_free_the_engine(server: TritonServer) -> None:
    for each in start_streams(server, "slow_stream", NUM_ROWS, max_new_tokens=NUM_LONG):
        each.drop()
    wait_until(lambda: is_free(server, "slow"), NUM_LONG * STEP_S / 2)


@pytest.mark.parametrize("model", ["slow_stream", "slow"])
def test_a_request_to_stop_gives_up_the_one_of_its_id(model: str, server: TritonServer) -> None:
    [given_up] = start_streams(server, "slow_stream", 1, id="mine", max_new_tokens=NUM_LONG)
    [other] = start_streams(server, "slow_stream", 1, id="other")
    assert generate(server, model, "", id="mine", cancel=True).status == 200
    assert given_up.events()[-1]["error"].startswith("cancelled")
    assert "error" not in other.events()[-1]


# --- what may die ----------------------------------------------------------------------------------------------------


def start(repository: Path, *models: str) -> TritonServer:
    """A server that loads some models at its start, and others on request."""
    return TritonServer(repository, arguments=["--model-control-mode=explicit", *(f"--load-model={m}" for m in models)])


@pytest.fixture(scope="module")
def controlled(make_repository: Callable[[], Path]) -> Iterator[TritonServer]:
    """A second server, whose models are loaded and unloaded by the test; the doors are there already."""
    with start(make_repository(), "plain_stream", "slow_stream") as running:
        yield running


@pytest.fixture
def doomed(make_repository: Callable[[], Path]) -> Iterator[TritonServer]:
    with start(make_repository(), "slow", "slow_stream") as running:
        yield running


def load(server: TritonServer, model: str) -> None:
    assert post(server, f"/v2/repository/models/{model}/load", {}).status == 200


def unload(server: TritonServer, model: str) -> None:
    assert post(server, f"/v2/repository/models/{model}/unload", {}).status == 200


def test_model_may_load_after_its_door_and_be_reloaded(server: TritonServer, controlled: TritonServer) -> None:
    assert len(stream(server, "plain_stream", max_new_tokens=NUM_TOKENS)) > 5
    assert "not_loaded" in stream(controlled, "plain_stream")[0]["error"]  # the other server's is not found
    load(controlled, "plain")
    events = stream(controlled, "plain_stream", max_new_tokens=NUM_TOKENS)
    assert len(events) > 5
    unload(controlled, "plain")
    wait_until(lambda: "not_loaded" in stream(controlled, "plain_stream")[0].get("error", ""))
    load(controlled, "plain")
    assert joined(stream(controlled, "plain_stream", max_new_tokens=NUM_TOKENS)) == joined(events)


def test_a_model_is_loaded_anew_under_its_streams(controlled: TritonServer) -> None:
    load(controlled, "slow")
    old = stub_of(controlled, "slow")
    wanted = joined(stream(controlled, "slow_stream", max_new_tokens=NUM_TOKENS))
    stops = threading.Event()
    failures, num_texts = [], 0

    def ask() -> None:
        nonlocal num_texts
        while not stops.is_set():
            events = stream(controlled, "slow_stream", max_new_tokens=NUM_TOKENS)
            if "error" in events[-1] or joined(events) != wanted:
                failures.append(events[-1])
            num_texts += 1

    with ThreadPoolExecutor(3) as pool:
        askers = [pool.submit(ask) for _ in range(3)]
        time.sleep(0.5)
        os.utime(controlled.model_repository / "slow" / "1" / "model.py")
        load(controlled, "slow")
        wait_until(lambda: not Path(f"/proc/{old}").exists())
        time.sleep(0.5)
        stops.set()
        for asker in askers:
            asker.result()
    assert stub_of(controlled, "slow") != old
    assert failures == []
    assert num_texts >= 3


def test_streams_end_when_the_model_is_killed_and_the_server_with_them(doomed: TritonServer) -> None:
    streams = start_streams(doomed, "slow_stream", 4, max_new_tokens=NUM_LONG)
    os.kill(stub_of(doomed, "slow"), signal.SIGKILL)
    for each in streams:
        assert each.events()[-1]["error"].startswith("engine_failed: the process of the model slow")
    assert doomed.process is not None
    assert doomed.process.wait(timeout=60) is not None


def test_killed_stream_door_ends_the_server(doomed: TritonServer) -> None:
    arrived = threading.Event()
    client = grpcclient.InferenceServerClient(doomed.grpc_url)
    client.start_stream(lambda result, error: arrived.set())
    client.async_stream_infer("slow_stream", [prompt_tensor()], parameters={"max_new_tokens": NUM_LONG})
    assert arrived.wait(SOON_S)
    os.kill(stub_of(doomed, "slow_stream"), signal.SIGKILL)
    assert doomed.process is not None
    assert doomed.process.wait(timeout=60) is not None
    client.close()


def test_a_stopping_server_lets_streams_end(doomed: TritonServer) -> None:
    wanted = joined(stream(doomed, "slow_stream", max_new_tokens=NUM_TOKENS))
    opened = OpenStream(doomed, "slow_stream")
    first = opened.event()
    assert first is not None
    assert doomed.process is not None
    doomed.process.send_signal(signal.SIGTERM)
    assert joined([first, *opened.events()]) == wanted
    opened.drop()
    assert doomed.process.wait(SOON_S) == 0
    assert list(Path("/dev/shm").glob(f"hf_triton_door-*-{doomed.process.pid}-*")) == []


# --- folders that cannot be doors ------------------------------------------------------------------------------------


def test_stream_door_that_is_not_decoupled_is_refused(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    add_door(tmp_path, "nameless")
    add_door(tmp_path, "self", stream_of="self")
    add_door(tmp_path, "a_stream", huggingface_model="tiiuae/falcon-7b")
    for name, hook in (("c_stream", "postprocess(self, text)"), ("d_stream", "logits_processor(self)")):
        with (add_door(tmp_path, name) / "1" / "model.py").open("a") as file:
            file.write(f"\n    def {hook}:\n        return None\n")
    single = add_door(tmp_path, "b_stream")
    config = (single / "config.pbtxt").read_text()
    (single / "config.pbtxt").write_text(config.replace(DECOUPLED, ""))
    with TritonServer(tmp_path) as running:
        sentences = {each.name: each.sentence for each in running.models()}
    assert "nothing says which folder's model 'nameless' is to stream from: name this folder" in sentences["nameless"]
    assert "nothing says which folder's model 'self'" in sentences["self"]
    assert "there is no setting 'huggingface_model'" in sentences["a_stream"]
    assert "model_transaction_policy { decoupled: true }" in sentences["b_stream"]
    assert "postprocess changes nothing in a stream door: move it to 1/model.py of 'c'" in sentences["c_stream"]
    assert "logits_processor changes nothing in a stream door: move it to 1/model.py of 'd'" in sentences["d_stream"]
