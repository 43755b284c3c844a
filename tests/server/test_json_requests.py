# SPDX-License-Identifier: Apache-2.0
"""JSON as people write it, in folders that declare nothing and through a stream door: arrays, token ids, tokenizing."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from hf_triton.testing import TritonServer
from tests.support.chat import CHAT
from tests.support.client import Reply, generate, generate_stream, infer, post
from tests.support.reference import Reference, load_reference
from tests.support.standard import StandardServer

pytestmark = pytest.mark.full

PLAIN, BATCHED, STREAM, DOOR, SLOW = "plain", "batched", "stream", "plain_stream", "slow"
MODELS = (PLAIN, BATCHED, STREAM, DOOR)
"""Without parameters as inputs: max_batch_size 0 and 8, decoupled, and a stream door to the first."""
PROMPT = "Where does the river go"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def server(standard: StandardServer) -> TritonServer:
    return standard.serve(*MODELS, SLOW, "no_template")


@pytest.fixture(scope="module")
def reference(standard: StandardServer) -> Reference:
    checkpoint: Path = standard.checkpoint
    return load_reference(checkpoint)


@pytest.fixture(scope="module")
def whole(server: TritonServer) -> str:
    return str(generate(server, PLAIN, PROMPT, max_tokens=NUM_TOKENS).json()["text_output"])


def ask(server: TritonServer, model: str, **fields: object) -> Reply:
    return post(server, f"/v2/models/{model}/generate", fields)


def answer(server: TritonServer, model: str, **fields: object) -> dict[str, Any]:
    reply = ask(server, model, **{"max_tokens": NUM_TOKENS, "stream": False, **fields})  # doors stream by default
    assert reply.status == 200, reply.body
    return dict(reply.json())


def before(text: str, stop: str) -> str:
    assert stop in text
    return text[: text.find(stop)]


@pytest.mark.parametrize(("name", "is_nested"), [("stop", False), ("stop_words", True)])
@pytest.mark.parametrize("model", MODELS)
def test_stop_strings_are_json_arrays(server: TritonServer, model: str, name: str, is_nested: bool, whole: str) -> None:
    stop = whole[5:7]
    for value in (["never", stop], [stop], stop, json.dumps(["never", stop])):
        fields: dict[str, object] = {"parameters": {name: value}} if is_nested else {name: value}
        assert answer(server, model, text_input=PROMPT, **fields)["text_output"] == before(whole, stop)


@pytest.mark.parametrize("model", MODELS)
def test_messages_are_an_input_or_a_parameter(server: TritonServer, model: str, reference: Reference) -> None:
    expected = answer(server, PLAIN, messages=json.dumps(CHAT))["text_output"]
    assert answer(server, model, messages=json.dumps(CHAT))["text_output"] == expected
    if model == PLAIN:
        assert ask(server, model, messages=CHAT).status == 400  # Triton has no arrays of objects
        body = {"inputs": [], "parameters": {"messages": json.dumps(CHAT), "max_tokens": NUM_TOKENS}}
        [output] = post(server, f"/v2/models/{model}/infer", body).json()["outputs"]
        assert output["data"] == [expected]


@pytest.mark.parametrize("model", MODELS)
def test_token_ids_are_a_prompt(server: TritonServer, model: str, reference: Reference, whole: str) -> None:
    ids = reference.tokenizer(PROMPT).input_ids
    assert answer(server, model, prompt_token_ids=ids)["text_output"] == whole
    told = answer(
        server,
        model,
        prompt_token_ids=ids,
        exclude_input_in_output=False,
        return_prompt_token_ids=True,
        return_token_ids=True,
        return_num_input_tokens=True,
    )
    assert told["text_output"] == PROMPT + whole
    assert json.loads(told["prompt_token_ids"]) == ids
    assert told["num_input_tokens"] == len(ids)
    token_ids = json.loads(told["token_ids"])
    assert len(token_ids) == NUM_TOKENS
    assert reference.tokenizer.decode(ids + token_ids, skip_special_tokens=True) == PROMPT + whole


@pytest.mark.parametrize("model", [PLAIN, STREAM, DOOR])
def test_token_ids_are_a_parameter_over_grpc(
    server: TritonServer, model: str, reference: Reference, whole: str
) -> None:
    ids = reference.tokenizer(PROMPT).input_ids
    asked = {"prompt_token_ids": json.dumps(ids), "sampling_parameters": json.dumps({"max_tokens": NUM_TOKENS})}
    outputs = [grpcclient.InferRequestedOutput(name) for name in ("text_output", "token_ids")]
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        results: list[Any] = []
        client.start_stream(lambda result, error: results.append(error or result))
        client.async_stream_infer(model, [], outputs=outputs, parameters=asked)
        client.stop_stream()
    assert [result for result in results if isinstance(result, Exception)] == []
    assert b"".join(result.as_numpy("text_output").item() for result in results).decode() == whole
    pieces = [json.loads(result.as_numpy("token_ids").item()) for result in results]
    assert sum(map(len, pieces)) == NUM_TOKENS


@pytest.mark.parametrize("model", MODELS)
def test_texts_and_chats_are_tokenized_and_token_ids_detokenized(
    server: TritonServer, model: str, reference: Reference
) -> None:
    asked = {"tokenize_only": True, "return_prompt_token_ids": True, "return_num_input_tokens": True}
    told = answer(server, model, text_input=PROMPT, **asked)
    ids = reference.tokenizer(PROMPT).input_ids
    assert (told["text_output"], told["prompt_token_ids"]) == (PROMPT, json.dumps(ids))
    told = answer(server, model, messages=json.dumps(CHAT), **asked)
    rendered = reference.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = reference.tokenizer(rendered, add_special_tokens=False).input_ids
    assert (told["text_output"], told["num_input_tokens"]) == (rendered, len(ids))
    assert json.loads(told["prompt_token_ids"]) == ids
    special = reference.tokenizer.all_special_ids[0]
    told = answer(server, model, prompt_token_ids=[special, *ids], **asked)
    assert told["text_output"] == reference.tokenizer.decode([special, *ids], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("adds", [None, True, False])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_told_as_vllm_tells_them(
    server: TritonServer, model: str, reference: Reference, adds: bool | None
) -> None:
    asked = {"tokenize_only": True, "return_output": True, "add_special_tokens": adds}
    asked = {name: value for name, value in asked.items() if value is not None}
    for prompt, text, default in (
        ({"text_input": PROMPT}, PROMPT, True),
        ({"messages": json.dumps(CHAT)}, reference.tokenizer.apply_chat_template(CHAT, tokenize=False), False),
    ):
        end = {} if "text_input" in prompt else {"add_generation_prompt": False}
        told = json.loads(answer(server, model, **prompt, **end, **asked)["output"])
        ids = reference.tokenizer(text, add_special_tokens=default if adds is None else adds).input_ids
        assert (told["count"], told["tokens"]) == (len(ids), ids)
        assert told["token_strs"] == reference.tokenizer.convert_ids_to_tokens(ids)
        assert told["max_model_len"] == reference.model.config.max_position_embeddings


def test_a_text_longer_than_the_context_is_tokenized(server: TritonServer) -> None:
    reply = infer(server, PLAIN, ["x " * 400], parameters={"tokenize_only": True, "return_num_input_tokens": True})
    outputs = {output["name"]: output["data"] for output in reply.json()["outputs"]}
    assert outputs["text_output"] == ["x " * 400]
    assert outputs["num_input_tokens"][0] > 400


@pytest.mark.parametrize("model", [STREAM, DOOR])
def test_tokenizing_is_one_event_of_a_stream(server: TritonServer, model: str) -> None:
    events = generate_stream(server, model, PROMPT, stream=True, tokenize_only=True).data
    assert [event["text_output"] for event in events] == [PROMPT]


@pytest.mark.parametrize(("model", "shape"), [(PLAIN, [2]), (BATCHED, [1, 2])])
def test_declared_arrays_are_tensors(server: TritonServer, model: str, shape: list[int], whole: str) -> None:
    texts = {"text_input": [PROMPT], "stop_words": ["never", whole[5:7]]}
    inputs = []
    for name, values in texts.items():
        array = np.array([value.encode() for value in values], dtype=object)
        array = array.reshape(shape) if len(values) == 2 else array.reshape([1] * len(shape))
        tensor = grpcclient.InferInput(name, list(array.shape), "BYTES")
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        found = client.infer(model, inputs, parameters={"max_tokens": NUM_TOKENS}).as_numpy("text_output")
    assert found.ravel().tolist() == [before(whole, whole[5:7]).encode()]


BLIND = "is an image, and this model reads text alone: leave it out"


@pytest.mark.parametrize("model", MODELS)
def test_images_reach_every_folder_and_a_model_that_reads_text_alone_says_so(server: TritonServer, model: str) -> None:
    file = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(3_000_000)).decode()
    reply = ask(server, model, text_input=PROMPT, image=[file, file], stream=False)
    assert (reply.status, BLIND.replace("an image", "given") in reply.body) == (400, True), reply.body[:500]
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}, {"type": "image"}]
    messages = json.dumps([{"role": "user", "content": parts}])
    reply = ask(server, model, messages=messages, stream=False)
    assert (reply.status, f"messages[0].content[0] {BLIND}" in reply.body) == (400, True), reply.body[:500]


def test_raw_files_over_grpc(server: TritonServer) -> None:
    text, image = grpcclient.InferInput("text_input", [1], "BYTES"), grpcclient.InferInput("image", [2], "BYTES")
    text.set_data_from_numpy(np.array([PROMPT.encode()], np.object_))
    image.set_data_from_numpy(np.array([b"\x89PNG\r\n\x1a\n\0\xff", b"\xff\xd8\xff\0"], np.object_))
    with (
        grpcclient.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="invalid_input: image is given, and this model reads text alone"),
    ):
        client.infer(PLAIN, [text, image])
