# SPDX-License-Identifier: Apache-2.0
"""JSON as people write it, in folders that declare nothing and through a stream door: arrays, token ids, tokenizing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from hf_triton.testing import TritonServer
from tests.support.chat import CHAT
from tests.support.client import Reply, generate, generate_stream, infer, post
from tests.support.reference import Reference, load_reference
from tests.support.standard import StandardServer

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


# --- arrays of strings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "is_nested"), [("stop", False), ("stop_words", True)])
@pytest.mark.parametrize("model", MODELS)
def test_stop_strings_are_json_arrays(server: TritonServer, model: str, name: str, is_nested: bool, whole: str) -> None:
    stop = whole[5:7]
    for value in (["never", stop], [stop], stop, json.dumps(["never", stop])):
        fields: dict[str, object] = {"parameters": {name: value}} if is_nested else {name: value}
        assert answer(server, model, text_input=PROMPT, **fields)["text_output"] == before(whole, stop)


@pytest.mark.parametrize("is_nested", [False, True], ids=["beside the text", "in parameters"])
@pytest.mark.parametrize("model", MODELS)
def test_bad_words_are_json_arrays(server: TritonServer, model: str, is_nested: bool, whole: str) -> None:
    bad = next(letter for letter in whole if letter.isascii() and letter.isalpha())
    fields = {"bad_words": ["never", bad]}
    sent: dict[str, Any] = {"parameters": fields} if is_nested else fields
    assert answer(server, model, text_input=PROMPT, **sent)["text_output"] != whole


@pytest.mark.parametrize("model", MODELS)
def test_arrays_of_nothing_ask_for_nothing(server: TritonServer, model: str, whole: str) -> None:
    nothing = [""]
    """TensorRT-LLM's and LiteLLM's bodies."""
    fields = {"stop_words": nothing, "bad_words": nothing}
    assert answer(server, model, text_input=PROMPT, **fields)["text_output"] == whole
    assert answer(server, model, text_input=PROMPT, parameters=fields)["text_output"] == whole


@pytest.mark.parametrize("model", MODELS)
def test_outputs_come_only_if_asked_for(server: TritonServer, model: str) -> None:
    assert answer(server, model, text_input=PROMPT).keys() == {"model_name", "model_version", "text_output"}
    told = answer(server, model, text_input=PROMPT, return_token_ids=True)
    assert told.keys() == {"model_name", "model_version", "text_output", "token_ids"}


@pytest.mark.parametrize("model", [PLAIN, DOOR])
def test_null_is_not_given_in_sampling_parameters(server: TritonServer, model: str, whole: str) -> None:
    said = json.dumps({"stop": None, "bad_words": None, "temperature": None, "guided_decoding": None})
    assert answer(server, model, text_input=PROMPT, sampling_parameters=said)["text_output"] == whole


@pytest.mark.parametrize("name", ["stop", "temperature"])
def test_triton_itself_refuses_null(server: TritonServer, name: str) -> None:
    """Where this begins to pass, docs/requests.md can leave it out."""
    assert ask(server, PLAIN, text_input=PROMPT, **{name: None}).status in (400, 500)


# --- chats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_messages_are_an_input_or_a_parameter(server: TritonServer, model: str, reference: Reference) -> None:
    expected = answer(server, PLAIN, messages=json.dumps(CHAT))["text_output"]
    assert answer(server, model, messages=json.dumps(CHAT))["text_output"] == expected
    if model == PLAIN:
        assert ask(server, model, messages=CHAT).status == 400  # Triton has no arrays of objects
        body = {"inputs": [], "parameters": {"messages": json.dumps(CHAT), "max_tokens": NUM_TOKENS}}
        [output] = post(server, f"/v2/models/{model}/infer", body).json()["outputs"]
        assert output["data"] == [expected]


# --- token ids -------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"prompt_token_ids": [1, 2_000_000]},
            "invalid_input: prompt_token_ids[1] is 2000000, and the model's token ids are below",
        ),
        ({"prompt_token_ids": [3, -1]}, "invalid_input: prompt_token_ids[1] must be an integer >= 0"),
        ({"prompt_token_ids": [5] * 300}, "context_exceeded: prompt_token_ids has 300 tokens, and the context of"),
        ({"prompt_token_ids": [5] * 10_000}, "context_exceeded: prompt_token_ids has 80000 bytes, more than"),
        ({"prompt_token_ids": [5], "text_input": "x"}, "invalid_input: give one of text_input, messages, prompt_tok"),
        ({"prompt_token_ids": []}, "invalid_input: prompt_token_ids must be a JSON array of 1 or more"),
        (
            {"text_input": "x", "truncate_prompt_tokens": 0},
            "invalid_parameter: truncate_prompt_tokens must be -1 or an integer >= 1, got 0",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [PLAIN, DOOR])
def test_impossible_token_ids_are_refused(
    server: TritonServer, model: str, fields: dict[str, object], sentence: str
) -> None:
    reply = ask(server, model, **fields)
    assert reply.error.startswith(sentence)


@pytest.mark.parametrize("model", MODELS)
def test_a_long_prompt_is_truncated_on_request(server: TritonServer, model: str, reference: Reference) -> None:
    text = f"{PROMPT}, " * 60
    assert ask(server, model, text_input=text, max_tokens=4).error.startswith("context_exceeded")
    told = answer(server, model, text_input=text, max_tokens=4, truncate_prompt_tokens=7, return_prompt_token_ids=True)
    assert json.loads(told["prompt_token_ids"]) == reference.tokenizer(text).input_ids[-7:]
    fields = {"max_tokens": 4, "truncate_prompt_tokens": -1, "return_num_input_tokens": True}
    longest = answer(server, model, text_input=text, **fields)["num_input_tokens"]
    assert answer(server, model, text_input=text, **{**fields, "max_tokens": 9})["num_input_tokens"] == longest - 5


# --- tokenizing ------------------------------------------------------------------------------------------------------


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


# --- stops and guides of other servers -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_the_stop_string_may_stay(server: TritonServer, model: str, whole: str) -> None:
    stop = whole[5:7]
    fields = {"stop": [stop], "include_stop_str_in_output": True, "return_finish_reason": True}
    told = answer(server, model, text_input=PROMPT, **fields)
    assert (told["text_output"], told["finish_reason"]) == (before(whole, stop) + stop, "stop")


@pytest.mark.parametrize("model", [PLAIN, DOOR])
def test_stop_tokens_end_a_completion(server: TritonServer, model: str) -> None:
    token_ids = json.loads(answer(server, model, text_input=PROMPT, return_token_ids=True)["token_ids"])
    stop = next(token_id for token_id in token_ids[1:] if token_id != token_ids[0])
    fields: dict[str, Any] = {"return_token_ids": True, "return_finish_reason": True}
    for said in (
        {"stop_token_ids": json.dumps([stop])},
        {"sampling_parameters": json.dumps({"stop_token_ids": [stop]})},
    ):
        told = answer(server, model, text_input=PROMPT, **fields, **said)
        assert json.loads(told["token_ids"]) == token_ids[: token_ids.index(stop)]
        assert told["finish_reason"] == "stop"


GUIDES: dict[str, dict[str, object]] = {
    "vLLM": {"structured_outputs": '{"choice": ["north", "south"]}'},
    "vLLM, formerly": {"guided_decoding": '{"regex": "north|south"}'},
    "vLLM, packed": {"sampling_parameters": '{"structured_outputs": {"choice": ["north", "south"]}}'},
    "TensorRT-LLM": {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "north|south"},
}


@pytest.mark.parametrize("case", GUIDES)
def test_the_guides_of_other_servers_are_followed(server: TritonServer, case: str) -> None:
    model = PLAIN
    told = answer(server, model, text_input=PROMPT, end_id=2, **GUIDES[case])
    assert told["text_output"] in ("north", "south")


@pytest.mark.parametrize("model", [PLAIN, DOOR])
def test_a_variable_that_the_template_does_not_read_changes_nothing(server: TritonServer, model: str) -> None:
    chat = json.dumps(CHAT)
    hints = {"reasoning_effort": "low", "chat_template_kwargs": '{"enable_thinking": false}'}
    hinted = answer(server, model, messages=chat, **hints)
    assert hinted["text_output"] == answer(server, model, messages=chat)["text_output"]


@pytest.mark.parametrize("model", [PLAIN, DOOR])
def test_an_answer_of_another_server_is_taken_back(server: TritonServer, model: str) -> None:
    call = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": "{bad"}}
    past = {"role": "assistant", "content": "Hello", "annotations": [], "refusal": None, "reasoning": "hm"}
    turns = [*CHAT, past, *CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}, *CHAT]
    assert answer(server, model, messages=json.dumps(turns))["text_output"]


def test_allowed_token_ids_are_refused_by_name(server: TritonServer) -> None:
    reply = ask(server, PLAIN, text_input=PROMPT, sampling_parameters='{"allowed_token_ids": [1]}')
    assert reply.error.startswith("unknown_parameter: there is no parameter 'allowed_token_ids' (constrain the text")


# --- tensors ---------------------------------------------------------------------------------------------------------


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
