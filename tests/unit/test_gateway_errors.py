# SPDX-License-Identifier: Apache-2.0
"""What the gateway tells of a model that is not loaded, our remedy word for word, and in which names it tells it."""

import json
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from hf_triton.hub.failures import FOLDER_HINT
from hf_triton.protocol.model_info import ModelInfo
from hf_triton.sentence import param, text
from hf_triton_gateway.http.api_errors import ApiError, load_reason, logged_reason, triton_error
from hf_triton_gateway.http.client_names import ELSEWHERE, OWN_NAMES, ClientNames
from hf_triton_gateway.triton.triton_messages import Folder, Generation, TextRequest, infer_request

TRITON = "failed to load 'm' version 1: Internal: TritonModelException: path_not_found: {}\n\nAt:\n  /srv/models/m/1"


@pytest.mark.parametrize(
    "remedy",
    [
        FOLDER_HINT,
        "begins with '/' or './'",
        "every client reads it by GET /v2/models/NAME/config",
        "and/or 1/model.py",
    ],
)
def test_a_remedy_reaches_the_client_word_for_word(remedy: str) -> None:
    assert (
        load_reason(TRITON.format(f"the Hub has no model 'a/b': {remedy}")) == f"the Hub has no model 'a/b': {remedy}"
    )


@pytest.mark.parametrize("path", ["/srv/models", "'/srv/my models/m'", "~/models", "./m", "../m", "`/srv/m`", "/srv"])
def test_a_path_of_the_host_does_not(path: str) -> None:
    assert load_reason(TRITON.format(f"there is no {path}: {FOLDER_HINT}")) in (
        f"there is no [path]: {FOLDER_HINT}",
        f"there is no `[path]`: {FOLDER_HINT}",
    )


def test_the_log_names_it() -> None:
    assert logged_reason(TRITON.format("there is no /srv/m: x")) == "there is no /srv/m: x"


@pytest.mark.parametrize("before", ["", "Failed to process the request(s) for model 'text_0', message: "])
def test_a_process_that_has_died_is_for_another_time(before: str) -> None:
    error = triton_error(f"{before}Stub process 'text_0' is not healthy.", OWN_NAMES)
    assert (error.status_code, error.code) == (503, "engine_failed")


@pytest.mark.parametrize("name", ["messages", "input"])
def test_a_model_without_a_template_takes_a_prompt_whatever_the_client_calls_it(name: str) -> None:
    names = ClientNames({"messages": name, "text_input": ELSEWHERE}, ["messages", "input"])
    sentence = text(f"it cannot take {param('messages')}: send {param('text_input')}", names)
    assert sentence == f"it cannot take {name}: send a prompt to /v1/completions"


@pytest.mark.parametrize(
    ("given", "what"),
    [({"messages": [{"role": "user", "content": "x"}]}, "chats"), ({"prompt_token_ids": [5]}, "prompts of token ids")],
)
def test_a_folder_that_requires_a_text_is_named_before_triton_refuses(given: dict[str, Any], what: str) -> None:
    config = ModelConfig(input=[{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}])
    folder = Folder.from_config("falcon7b", config)
    with pytest.raises(ApiError) as caught:
        infer_request(folder, Generation("falcon7b", "1", {}, {}, **given), is_stream=False)
    message = "the folder falcon7b requires the input text_input: take `input` out of its config.pbtxt for "
    assert caught.value.message == message + what


def texts_folder(name: str, dims: int, *, optional: bool = False) -> Folder:
    ports = [{"name": name, "data_type": "TYPE_STRING", "dims": [dims], "optional": optional}]
    return Folder.from_config("mine", ModelConfig(input=ports))


@pytest.mark.parametrize("name", ["text", "TEXT", "args", "text_inputs", "input_text", "sequences"])
def test_texts_go_by_the_name_that_the_folder_declares(name: str) -> None:
    request = TextRequest("mine", "1", "text-classification", {"text": ["a", "b"]}, ["label"])
    message = infer_request(texts_folder(name, -1), request, is_stream=False)
    assert [(each.name, list(each.shape)) for each in message.inputs] == [(name, [2])]


def test_prompts_go_by_the_declared_name_and_name_their_outputs() -> None:
    ports = [
        {"name": "args", "data_type": "TYPE_STRING", "dims": [-1]},
        {"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1], "optional": True},
    ]
    outputs = [{"name": name, "data_type": "TYPE_STRING", "dims": [-1]} for name in ("text_output", "output")]
    folder = Folder.from_config("mine", ModelConfig(input=ports, output=outputs))
    message = infer_request(folder, Generation("mine", "1", {}, {}, prompts=["a"]), is_stream=False)
    assert [each.name for each in message.inputs] == ["args"]
    assert [each.name for each in message.outputs] == ["text_output"]


def test_a_folder_of_one_prompt_says_which_line_makes_it_so() -> None:
    generation = Generation("mine", "1", {}, {}, prompts=["a", "b"])
    with pytest.raises(ApiError, match=r"the folder mine has 1 of text_input, got 2: .* dims \[ -1 \] in config.pbtxt"):
        infer_request(texts_folder("text_input", 1), generation, is_stream=False)
    assert texts_folder("text_input", 1, optional=True).fixed_sizes == {}


def test_an_input_that_a_folder_has_not_is_named_in_the_clients_words() -> None:
    config = ModelConfig(
        input=[{"name": name, "data_type": "TYPE_STRING", "dims": [1]} for name in ("token_ids", "text")]
    )
    request = TextRequest(
        "minilm", "1", "embeddings", {"image": ["x"]}, ["embedding"], names=ClientNames({"image": "input"})
    )
    with pytest.raises(ApiError) as caught:
        infer_request(Folder.from_config("minilm", config), request, is_stream=False)
    assert caught.value.message == "the model 'minilm' takes no images"
    assert (caught.value.status_code, caught.value.param) == (400, "input")


def test_a_request_that_does_not_fit_shared_memory_is_503() -> None:
    words = (
        "Failed to increase the shared memory pool size for key 'a' to 3145728 bytes. Error: No space left on device"
    )
    error = triton_error(words, OWN_NAMES, 500)
    assert (error.status_code, error.code) == (503, "out_of_memory")
    assert "--shm-size" in error.message


def test_a_variable_of_a_parameters_name_is_passed_over_by_its_own() -> None:
    names = ClientNames({"stop_strings": "stop", "enable_thinking": "thinking"})
    variables = json.dumps({"stop_strings": 1, "enable_thinking": True})
    asked = Generation("m", "1", {}, {"chat_template_kwargs": variables}, messages=[], names=names)
    info = ModelInfo("text-generation", "m", 8, "batch", "float32", "cpu", 0, 1, 1, template_variables=())
    assert asked.unread_variables(info) == ["chat_template_kwargs.stop_strings", "thinking"]
