# SPDX-License-Identifier: Apache-2.0
"""Tensors and parameters in, a checked request out, and texts back into tensors."""

import json
from typing import Any

import numpy as np
import pytest

from hf_triton.errors import RequestError, SettingsError
from hf_triton.protocol.declared_ports import OUTPUTS, PROMPT_LOGPROBS, STRING_ARRAYS, check_config, missing_ports
from hf_triton.protocol.dialects import ALIASES, DIALECT_INPUTS
from hf_triton.protocol.names import (
    IMAGE,
    JSON_OUTPUT,
    LEGACY_TEXT,
    MESSAGES,
    PROMPT,
    PROMPT_ALIASES,
    PROMPT_TOKEN_IDS,
    TEXT,
)
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.protocol.prompts import SOURCES, Limits, decode_texts
from hf_triton.protocol.request_options import BEFORE_INPUTS, PARAMETERS, RequestOptions
from hf_triton.protocol.requests import GenerationRequest, is_cancel_request, parse_request, with_default_outputs
from hf_triton.protocol.response_outputs import encode_output, encode_timings, outputs_to_fill
from hf_triton.protocol.tensor_values import encode_strings

MAX_BYTES = 100
LIMITS = Limits(max_prompts=600, max_prompt_bytes=MAX_BYTES)


def texts(*elements: bytes, shape: tuple[int, ...] | None = None) -> Any:
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array if shape is None else array.reshape(shape)


def parse(*elements: bytes, shape: tuple[int, ...] | None = None, **parameters: object) -> GenerationRequest:
    return parse_request({PROMPT: texts(*elements, shape=shape)}, parameters, LIMITS)


def parse_tensors(num_prompts: int, parameters: dict[str, object] | None = None, **arrays: Any) -> GenerationRequest:
    return parse_request({PROMPT: texts(*[b"x"] * num_prompts), **arrays}, parameters or {}, LIMITS)


def port(name: str, data_type: str = "TYPE_STRING") -> dict[str, object]:
    return {"name": name, "data_type": data_type, "dims": [-1]}


def config(*inputs: dict[str, object], outputs: Any = (), max_batch_size: int = 0, **more: object) -> dict[str, Any]:
    return {"input": list(inputs), "output": list(outputs), "max_batch_size": max_batch_size, **more}


# --- the configuration -----------------------------------------------------------------------------------------------


TOLD = [name for name in OUTPUTS if name not in (TEXT, LEGACY_TEXT, PROMPT_LOGPROBS)]
"""The outputs that a request asks for by `return_...`."""


def test_an_empty_config_gets_prompts_arrays_and_all_but_the_legacy_output() -> None:
    inputs, outputs = missing_ports(config(), parameters_as_inputs=False)
    assert [each["name"] for each in inputs] == [PROMPT, *PROMPT_ALIASES, PROMPT_TOKEN_IDS, IMAGE, *STRING_ARRAYS]
    assert {(each["data_type"], *each["dims"], each["optional"]) for each in inputs if "ids" not in each["name"]} == {
        ("TYPE_STRING", -1, True)
    }
    assert inputs[3] == {"name": PROMPT_TOKEN_IDS, "data_type": "TYPE_INT64", "dims": [-1], "optional": True}
    assert [each["name"] for each in outputs] == [TEXT, *TOLD, PROMPT_LOGPROBS]
    assert all(each["dims"] == [-1] for each in outputs)
    types = {"cumulative_logprob": "TYPE_FP32", **{name: "TYPE_UINT32" for name in TOLD if name.startswith("num_")}}
    assert [each["data_type"] for each in outputs] == [types.get(each["name"], "TYPE_STRING") for each in outputs]


@pytest.mark.parametrize("name", PROMPT_ALIASES)
def test_prompts_may_have_mlservers_names(name: str) -> None:
    request = parse_request({name: texts(b"x", b"y", shape=(2, 1))}, {"top_k": 3}, LIMITS)
    assert (list(request.prompts), request.shape, request.is_from_mlserver) == (["x", "y"], (2, 1), True)
    with pytest.raises(RequestError, match=f"{PROMPT} and {name} are the same input: give one of them"):
        parse_request({PROMPT: texts(b"x"), name: texts(b"x")}, {}, LIMITS)


@pytest.mark.parametrize(
    ("name", "asked", "names_outputs", "fills_json", "expected"),
    [
        (PROMPT, None, False, False, {TEXT}),
        (PROMPT, None, False, True, {TEXT, JSON_OUTPUT}),
        (PROMPT, True, True, False, {TEXT, JSON_OUTPUT}),
        (PROMPT, False, False, True, {TEXT}),
        ("args", None, False, False, {JSON_OUTPUT}),
        ("args", None, True, False, {TEXT, JSON_OUTPUT}),
        ("args", False, False, False, {TEXT}),
    ],
)
def test_who_gets_the_text_as_json(
    name: str, asked: bool | None, names_outputs: bool, fills_json: bool, expected: set[str]
) -> None:
    request = parse_request({name: texts(b"x")}, {} if asked is None else {"return_output": asked}, LIMITS)
    chosen = with_default_outputs(request, names_outputs=names_outputs, has_json=True, fills_json=fills_json)
    assert set(outputs_to_fill(chosen, [TEXT, JSON_OUTPUT])) == expected


def test_a_stream_has_no_text_as_json() -> None:
    options = {"names_outputs": False, "has_json": False, "fills_json": True}
    request = parse_request({"args": texts(b"x")}, {}, LIMITS)
    assert with_default_outputs(request, **options) == request
    with pytest.raises(RequestError, match="return_output cannot be streamed"):
        with_default_outputs(parse(b"x", return_output=True), **options)


def test_every_optional_output_has_its_option() -> None:
    asked = {name.removeprefix("return_") for name in RequestOptions.model_fields if name.startswith("return_")}
    assert asked == {"timings", *TOLD}


def test_a_batched_prompt_is_one_string_per_row() -> None:
    inputs, _ = missing_ports(config(max_batch_size=8), parameters_as_inputs=False)
    assert {each["name"]: each["dims"] for each in inputs} == {
        **{name: [1] for name in (PROMPT, *PROMPT_ALIASES)},
        **{name: [-1] for name in (MESSAGES, PROMPT_TOKEN_IDS, IMAGE, *STRING_ARRAYS)},
    }


def test_a_folder_that_declares_inputs_gets_the_prompt_only() -> None:
    inputs, _ = missing_ports(config(port("seed", "TYPE_INT64")), parameters_as_inputs=False)
    assert [each["name"] for each in inputs] == [PROMPT]


def test_declared_ports_are_not_added_again() -> None:
    declared = config(port(PROMPT), port("seed", "TYPE_INT32"), outputs=[port(TEXT)])
    inputs, outputs = missing_ports(declared, parameters_as_inputs=True)
    expected = {MESSAGES, PROMPT_TOKEN_IDS, IMAGE, *PROMPT_ALIASES, *PARAMETERS, *ALIASES, *DIALECT_INPUTS} - {
        "seed",
        *BEFORE_INPUTS,
    }
    assert {each["name"] for each in inputs} == expected
    assert [each["name"] for each in outputs] == [*TOLD, PROMPT_LOGPROBS]


def test_an_input_and_an_output_may_have_one_name() -> None:
    declared = config(port("logprobs", "TYPE_INT32"), outputs=[port("num_input_tokens", "TYPE_UINT32")])
    inputs, outputs = missing_ports(declared, parameters_as_inputs=True)
    assert "logprobs" not in [each["name"] for each in inputs]
    assert "logprobs" in [each["name"] for each in outputs]


def test_the_legacy_output_replaces_text_output() -> None:
    outputs = missing_ports(config(outputs=[port(LEGACY_TEXT)]), parameters_as_inputs=False)[1]
    assert [each["name"] for each in outputs] == [*TOLD, PROMPT_LOGPROBS]


INPUT_TYPES = {
    **dict.fromkeys(("stream", "do_sample", "return_logprobs", "return_log_probs", "early_stopping"), "TYPE_BOOL"),
    **dict.fromkeys(
        ("max_new_tokens", "n", "logprobs", "prompt_token_ids", "eos_token_id", "stop_token_ids"), "TYPE_INT64"
    ),
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "end_id", "pad_id", "beam_width"), "TYPE_INT32"),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty", "length_penalty", "max_time"), "TYPE_FP32"),
    **dict.fromkeys(("seed", "random_seed"), "TYPE_UINT64"),
    **dict.fromkeys(("stop", "stop_words", "bad_words", "logit_bias", "sampling_parameters"), "TYPE_STRING"),
}
"""Those that TensorRT-LLM's clients, LiteLLM and the vLLM backend's clients send are theirs."""
LISTS = {*STRING_ARRAYS, "eos_token_id", "end_id", "stop_token_ids", "allowed_token_ids", "prompt_token_ids"}


def test_parameters_as_inputs_are_optional_and_typed() -> None:
    added = missing_ports(config(), parameters_as_inputs=True)[0]
    inputs = {each["name"]: each for each in added}
    assert inputs.keys() == {*SOURCES, IMAGE, *PROMPT_ALIASES, *PARAMETERS, *ALIASES, *DIALECT_INPUTS} - {
        *BEFORE_INPUTS
    }
    assert len(inputs) == len(added)
    assert {name: inputs[name]["data_type"] for name in INPUT_TYPES} == INPUT_TYPES
    assert {name: inputs[name]["dims"] for name in INPUT_TYPES} == {
        name: [-1 if name in LISTS else 1] for name in INPUT_TYPES
    }
    assert all(each["optional"] for each in inputs.values())


@pytest.mark.parametrize("parameters_as_inputs", [True, False])
@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_added_ports_pass_the_check(max_batch_size: int, parameters_as_inputs: bool) -> None:
    inputs, outputs = missing_ports(config(max_batch_size=max_batch_size), parameters_as_inputs)
    check_config(config(*inputs, outputs=outputs))


@pytest.mark.parametrize("name", ALIASES)
def test_an_input_may_have_an_aliases_name(name: str) -> None:
    inputs, _ = missing_ports(config(), parameters_as_inputs=True)
    [types] = [each["data_type"] for each in inputs if each["name"] == name]
    check_config(config(port(PROMPT), port(name, types), outputs=[port(TEXT), port(LEGACY_TEXT)]))


REFUSED_CONFIGS = {
    "an unknown input": (
        config(port("prompt")),
        "config.pbtxt declares the input 'prompt', but there is no such request parameter, did you mean 'text_input'?",
    ),
    "a typo": (config(port("temprature", "TYPE_FP32")), "did you mean 'temperature'?"),
    "a request to cancel": (config(port("cancel", "TYPE_BOOL")), "declares the input 'cancel', but there is no such"),
    "token ids as fractions": (
        config(port(PROMPT_TOKEN_IDS, "TYPE_FP32")),
        "declares prompt_token_ids as TYPE_FP32; it must be TYPE_INT64 or TYPE_INT32 or ",
    ),
    "a prompt of numbers": (
        config(port(PROMPT, "TYPE_INT32")),
        "declares text_input as TYPE_INT32; it must be TYPE_ST",
    ),
    "a bias of numbers": (
        config(port("logit_bias", "TYPE_FP32")),
        "config.pbtxt declares logit_bias as TYPE_FP32; it must be TYPE_STRING",
    ),
    "a temperature as text": (
        config(port("temperature")),
        "config.pbtxt declares temperature as TYPE_STRING; it must be TYPE_FP32 or TYPE_FP64 or ",
    ),
    "a number of tokens as a fraction": (
        config(port("max_tokens", "TYPE_FP32")),
        "it must be TYPE_INT32 or TYPE_INT64 or ",
    ),
    "do_sample as a number": (config(port("do_sample", "TYPE_INT32")), "it must be TYPE_BOOL"),
    "an unknown output": (
        config(outputs=[port("logits")]),
        "config.pbtxt declares the output 'logits', but there is no such output; the nearest are logprobs, ",
    ),
    "an output as numbers of another kind": (
        config(outputs=[port("num_input_tokens", "TYPE_INT32")]),
        "num_input_tokens as TYPE_INT32; it must be TYPE_UINT32",
    ),
    "end tokens as fractions": (
        config(port("eos_token_id", "TYPE_FP32")),
        "it must be TYPE_INT64 or TYPE_INT32 or TYPE_INT16 or TYPE_INT8 or TYPE_UINT64 or TYPE_UINT32 or TYPE_UINT16 "
        "or TYPE_UINT8 or TYPE_STRING",
    ),
    "an output of numbers": (config(outputs=[port(TEXT, "TYPE_FP32")]), "text_output as TYPE_FP32"),
    "a shape of its own": (
        config(port(PROMPT) | {"reshape": {"shape": []}}),
        "config.pbtxt reshapes text_input: take reshape out, the last dimension counts the prompts",
    ),
    "a shape of its own for an output": (
        config(outputs=[port(TEXT) | {"reshape": {"shape": []}}]),
        "reshapes text_output",
    ),
    "inputs of a sequence batcher": (
        config(sequence_batching={"control_input": [{"name": "START"}]}),
        "sequence_batching has control_input, but requests are independent of each other: take it out of config.pbtxt",
    ),
    "states of a sequence batcher": (config(sequence_batching={"state": [{}]}), "sequence_batching has state"),
    "the response cache": (config(response_cache={"enable": True}), "response_cache is on, but Triton's cache ignores"),
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_an_unservable_config_is_rejected(case: str) -> None:
    refused, words = REFUSED_CONFIGS[case]
    with pytest.raises(SettingsError) as caught:
        check_config(refused)
    assert words in str(caught.value)


def test_a_disabled_response_cache_is_accepted() -> None:
    check_config(config(response_cache={"enable": False}))


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)], ids=str)
def test_prompts_are_read_in_row_order_and_the_shape_is_kept(shape: tuple[int, ...]) -> None:
    request = parse(b"one", "zwei ☕".encode(), shape=shape)
    assert request.prompts == ["one", "zwei ☕"]
    assert request.shape == shape
    assert request.parameters == [GenerationParameters()] * 2
    assert request.options.exclude_input_in_output is None


def test_parameters_hold_for_all_prompts() -> None:
    request = parse(b"a", b"b", max_tokens=3, temperature=0.5, exclude_input_in_output=True)
    assert request.parameters == [GenerationParameters(max_new_tokens=3, temperature=0.5)] * 2
    assert request.options.exclude_input_in_output is True


@pytest.mark.parametrize("name", ["id", "sequence_id", "sequence_start", "sequence_end", "triton_final_response"])
def test_triton_parameters_are_ignored(name: str) -> None:
    assert parse(b"a", **{name: "x"}).parameters == [GenerationParameters()]


@pytest.mark.parametrize("name", ["identity", "ids", "sequence_length", "triton", "text_input", "custom_generate"])
def test_near_misses_of_triton_parameters_are_rejected(name: str) -> None:
    with pytest.raises(RequestError, match="unknown_parameter: there is no parameter"):
        parse(b"a", **{name: 1})


def test_a_tensor_holds_one_value_for_all() -> None:
    request = parse_tensors(3, max_new_tokens=np.array([5]))
    assert [each.max_new_tokens for each in request.parameters] == [5, 5, 5]


@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
def test_a_tensor_holds_one_value_for_each_prompt(shape: tuple[int, ...]) -> None:
    request = parse_tensors(2, max_new_tokens=np.array([5, 6]).reshape(shape), seed=np.array([1]))
    assert [(each.max_new_tokens, each.seed) for each in request.parameters] == [(5, 1), (6, 1)]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_tensor_number_equals_its_json_number(kind: Any) -> None:
    request = parse_tensors(1, temperature=np.array([0.7], kind), top_p=np.array([0.1], kind))
    assert request.parameters == parse(b"x", temperature=0.7, top_p=0.1).parameters


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32, np.uint64, np.int8])
def test_whole_numbers_come_in_any_width(kind: Any) -> None:
    assert parse_tensors(1, max_new_tokens=np.array([7], kind)).parameters[0].max_new_tokens == 7


def test_a_flat_string_tensor_is_one_array_for_all_prompts() -> None:
    request = parse_tensors(2, stop=texts("☕".encode(), b"b"), bad_words=texts(b"x"))
    assert [each.stop_strings for each in request.parameters] == [("☕", "b")] * 2
    assert [each.bad_words for each in request.parameters] == [("x",)] * 2


def test_a_string_matrix_is_one_array_per_prompt() -> None:
    request = parse_tensors(2, stop=texts(b"a", b"b", b"c", b"d", shape=(2, 2)), bad_words=texts(b"x", shape=(1, 1)))
    assert [each.stop_strings for each in request.parameters] == [("a", "b"), ("c", "d")]
    assert [each.bad_words for each in request.parameters] == [("x",)] * 2


def test_empty_strings_pad_a_row() -> None:
    """TensorRT-LLM's clients send them, also where they want no stop string at all."""
    request = parse_tensors(3, stop=texts(b"a", b"b", b"c", b"", b"", b"", shape=(3, 2)), bad_words=texts(b""))
    assert [each.stop_strings for each in request.parameters] == [("a", "b"), ("c",), ()]
    assert [each.bad_words for each in request.parameters] == [()] * 3
    assert parse(b"x", stop_words="", bad_words="").parameters == parse(b"x", stop_words=[], bad_words=[]).parameters


def test_one_string_may_hold_an_array_or_object_as_json() -> None:
    request = parse_tensors(
        2,
        stop=texts(b'["a", "b"]'),
        logit_bias=texts(b'{"50256": -100}'),
        eos_token_id=texts(b"[5, 6]", b"7", shape=(2, 1)),
    )
    first, second = request.parameters
    assert first.stop_strings == second.stop_strings == ("a", "b")
    assert first.logit_bias == second.logit_bias == {50256: -100.0}
    assert (first.eos_token_id, second.eos_token_id) == ((5, 6), (7,))


def test_a_tensor_of_numbers_is_a_list_too() -> None:
    request = parse_tensors(2, eos_token_id=np.array([5, 6]))
    assert [each.eos_token_id for each in request.parameters] == [(5, 6)] * 2
    request = parse_tensors(2, eos_token_id=np.array([[5, 6], [7, 8]], np.uint32))
    assert [each.eos_token_id for each in request.parameters] == [(5, 6), (7, 8)]


# --- what a request wants beside the text ----------------------------------------------------------------------------


def test_options_of_the_whole_request_are_kept_apart() -> None:
    options = parse(b"x", stream=True, return_finish_reason=False).options
    assert (options.stream, options.return_finish_reason, options.return_logprobs) == (True, False, None)
    tensors = parse_tensors(2, stream=np.array([True]), return_num_input_tokens=np.array([[True], [True]])).options
    assert (tensors.stream, tensors.return_num_input_tokens) == (True, True)


@pytest.mark.parametrize("text", ['{"temperature": 0.5, "max_tokens": 20, "stop": ["a", "b"]}'])
def test_sampling_parameters_are_generation_parameters(text: str) -> None:
    expected = parse(b"x", temperature=0.5, max_tokens=20, stop=["a", "b"]).parameters
    assert parse(b"x", sampling_parameters=text).parameters == expected
    assert parse_tensors(1, sampling_parameters=texts(text.encode())).parameters == expected


def test_sampling_parameters_may_differ_by_row() -> None:
    rows = texts(b'{"max_tokens": 3}', b'{"max_tokens": 4}')
    assert [each.max_new_tokens for each in parse_tensors(2, sampling_parameters=rows).parameters] == [3, 4]


def test_numbers_in_sampling_parameters_may_be_strings() -> None:
    """genai-perf writes them so."""
    text = '{"max_tokens": "20", "temperature": "0.5", "do_sample": "true", "stop": "5", "eos_token_id": "7"}'
    expected = parse(b"x", max_tokens=20, temperature=0.5, do_sample=True, stop="5", eos_token_id=[7])
    assert parse(b"x", sampling_parameters=text).parameters == expected.parameters


def test_equal_duplicates_are_accepted_as_the_vllm_client_sends_them() -> None:
    said: dict[str, Any] = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}
    expected = parse(b"x", temperature=0.1, top_p=0.95, max_tokens=100).parameters
    assert parse(b"x", sampling_parameters=json.dumps(said), **said).parameters == expected


@pytest.mark.parametrize("text", ["", " ", "{}", '{"logprobs": false}'])
def test_empty_sampling_parameters_are_accepted(text: str) -> None:
    assert parse(b"x", sampling_parameters=text).parameters == [GenerationParameters()]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"cancel": True}, True),
        ({"stop": True}, True),
        ({"stop": "true"}, False),
        ({"cancel": "true"}, False),
        ({"cancel": False}, False),
        ({}, False),
    ],
)
def test_only_true_asks_to_cancel(parameters: dict[str, object], expected: bool) -> None:
    assert is_cancel_request(parameters) is expected


def test_arrays_and_objects_are_parameters_as_they_are_or_as_json() -> None:
    declared = parse(b"x", stop=["a", "b"], logit_bias={"5": 1}, eos_token_id=[5])
    assert declared == parse(b"x", stop='["a", "b"]', logit_bias='{"5": 1}', eos_token_id="5")


@pytest.mark.parametrize(
    ("inputs", "parameters", "shape"),
    [
        ({}, {PROMPT_TOKEN_IDS: "[5, 0, 7]"}, (1,)),
        ({PROMPT_TOKEN_IDS: np.array([5, 0, 7])}, {}, (1,)),
        ({PROMPT_TOKEN_IDS: np.array([[5, 0, 7]], np.int32)}, {}, (1, 1)),
        ({PROMPT_TOKEN_IDS: texts(b"[5, 0, 7]")}, {}, (1,)),
    ],
    ids=["a parameter", "a tensor", "a batched tensor", "JSON in a tensor"],
)
def test_token_ids_are_one_prompt(
    inputs: dict[str, Any], parameters: dict[str, object], shape: tuple[int, ...]
) -> None:
    request = parse_request(inputs, {**parameters, "max_tokens": 3}, LIMITS)
    assert (request.prompts, request.shape) == ([(5, 0, 7)], shape)
    assert request.parameters == [GenerationParameters(max_new_tokens=3)]


def test_a_request_to_tokenize_is_no_stream() -> None:
    assert parse(b"x", tokenize_only=True, stream=True).options == RequestOptions(tokenize_only=True, stream=False)


def test_null_in_sampling_parameters_is_not_given() -> None:
    text = json.dumps({"stop": None, "stop_words": ["a"], "max_tokens": None, "structured_outputs": None, "seed": None})
    assert parse(b"x", sampling_parameters=text).parameters == [GenerationParameters(stop_strings=("a",))]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, object], str]] = {
    "no prompt": ({}, {}, "invalid_input: give one of text_input, messages, prompt_token_ids"),
    "two prompts": (
        {PROMPT: texts(b"x")},
        {PROMPT_TOKEN_IDS: "[1]"},
        "invalid_input: give one of text_input, messages, prompt_token_ids, got text_input and prompt_token_ids",
    ),
    "cancel in quotes": (
        {},
        {"cancel": "true"},
        "invalid_input: give one of text_input, messages, prompt_token_ids; to cancel a request, send its id and "
        "cancel true without quotes",
    ),
    "stop as the other backend cancels": (
        {"stop": texts(b"true")},
        {},
        "invalid_input: give one of text_input, messages, prompt_token_ids; to cancel a request, send its id and "
        "cancel true without quotes",
    ),
    "token ids that are none": (
        {},
        {PROMPT_TOKEN_IDS: "1, 2"},
        "invalid_input: prompt_token_ids must be a JSON array of 1 or more token ids, got '1, 2'",
    ),
    "no token ids": (
        {PROMPT_TOKEN_IDS: np.array([], np.int64)},
        {},
        "invalid_input: prompt_token_ids must be a JSON array of 1 or more token ids, got []",
    ),
    "a token id of another type": (
        {},
        {PROMPT_TOKEN_IDS: "[1, true]"},
        "invalid_input: prompt_token_ids[1] must be an integer >= 0 and <= 2147483647, got true",
    ),
    "a token id below zero": (
        {PROMPT_TOKEN_IDS: np.array([[1, -2]])},
        {},
        "invalid_input: prompt_token_ids[1] must be an integer >= 0 and <= 2147483647, got -2",
    ),
    "two rows of token ids": (
        {PROMPT_TOKEN_IDS: np.array([[1], [2]])},
        {},
        "invalid_input: prompt_token_ids holds one prompt: send 2 requests",
    ),
    "too many token ids": (
        {PROMPT_TOKEN_IDS: np.arange(MAX_BYTES // 8 + 1)},
        {},
        "context_exceeded: prompt_token_ids has 104 bytes, more than the 100 that are accepted (setting "
        "max_prompt_bytes)",
    ),
    "a chat's option for token ids": (
        {},
        {PROMPT_TOKEN_IDS: "[1]", "reasoning_effort": "low"},
        "invalid_parameter: reasoning_effort has no effect without messages: leave it out",
    ),
    "a typo in the prompt's name": (
        {},
        {"text_inptu": "x"},
        "unknown_parameter: there is no parameter 'text_inptu', did you mean 'text_input'?",
    ),
    "an empty prompt tensor": (
        {PROMPT: texts(shape=(0,))},
        {},
        "invalid_input: text_input holds no prompt, its shape is [0]",
    ),
    "too many values": (
        {PROMPT: texts(b"x"), "seed": np.array([1, 2])},
        {},
        "invalid_parameter: seed has 2 values for 1 prompts: give one, or one for each prompt",
    ),
    "one bad row": (
        {PROMPT: texts(b"x", b"y"), "top_k": np.array([5, -7])},
        {},
        "invalid_parameter: top_k must be an integer >= -1 and <= 2147483647, got -7 (row 1)",
    ),
    "all rows bad alike": (
        {PROMPT: texts(b"x", b"y"), "top_k": np.array([-7])},
        {},
        "invalid_parameter: top_k must be an integer >= -1 and <= 2147483647, got -7",
    ),
    "a tensor and a parameter": (
        {PROMPT: texts(b"x"), "seed": np.array([1])},
        {"seed": 1},
        "invalid_parameter: seed is given twice, as an input and as a parameter: leave one out",
    ),
    "a text that is not UTF-8": (
        {PROMPT: texts(b"x"), "stop": texts(b"a\xff")},
        {},
        "invalid_parameter: stop is not valid UTF-8: byte 0xff at offset 1",
    ),
    "an array in which one does not fit": (
        {PROMPT: texts(b"x", b"y"), "eos_token_id": texts(b"[1]", b"[1, -2]", shape=(2, 1))},
        {},
        "invalid_parameter: eos_token_id must be an integer >= 0 and <= 2147483647 or a JSON array of 1 to 64 of them, "
        "got -2 (row 1)",
    ),
    "an option of a wrong type": (
        {PROMPT: texts(b"x")},
        {"exclude_input_in_output": "yes"},
        "invalid_parameter: exclude_input_in_output must be true or false, got 'yes'",
    ),
    "options that differ": (
        {PROMPT: texts(b"x", b"y"), "exclude_input_in_output": np.array([True, False])},
        {},
        "invalid_parameter: exclude_input_in_output must be the same for all rows of a request",
    ),
    "fewer lists than prompts": (
        {PROMPT: texts(b"x", b"y", b"z"), "stop": texts(b"a", b"b", shape=(2, 1))},
        {},
        "invalid_parameter: stop has 2 rows for 3 prompts: give one, or one for each prompt",
    ),
    "embeddings": (
        {PROMPT: texts(b"x")},
        {"embedding_request": "{}"},
        "unknown_parameter: there is no parameter 'embedding_request' (this model generates text): leave it out",
    ),
    "sampling parameters that are no object": (
        {PROMPT: texts(b"x")},
        {"sampling_parameters": "[1]"},
        "invalid_parameter: sampling_parameters must be a JSON object, got '[1]'",
    ),
    "a typo in the sampling parameters": (
        {PROMPT: texts(b"x")},
        {"sampling_parameters": '{"temprature": 1}'},
        "unknown_parameter: there is no parameter 'temprature', did you mean 'temperature'?",
    ),
    "a parameter in both places": (
        {PROMPT: texts(b"x")},
        {"sampling_parameters": '{"seed": 1}', "seed": 2},
        "invalid_parameter: seed is given twice, in sampling_parameters and beside it, with two values: leave one out",
    ),
    "a parameter twice in one place": (
        {PROMPT: texts(b"x")},
        {"sampling_parameters": '{"seed": 1, "seed": 2}'},
        "invalid_parameter: 'seed' is given twice: give it once",
    ),
    "log probabilities without an output": (
        {PROMPT: texts(b"x")},
        {"logprobs": 5},
        "invalid_parameter: logprobs has no effect without return_logprobs true: add it",
    ),
    "numbers of texts that differ": (
        {PROMPT: texts(b"x", b"y"), "num_return_sequences": np.array([1, 2])},
        {},
        "invalid_parameter: num_return_sequences must be the same for all rows of a request",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_malformed_request_is_rejected(case: str) -> None:
    inputs, parameters, message = REFUSED[case]
    with pytest.raises(RequestError) as caught:
        parse_request(inputs, parameters, LIMITS)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("element", "found"),
    [
        (b"a\xff", "byte 0xff at offset 1"),
        (b"\xc0\x80", "byte 0xc0 at offset 0"),
        (b"\xed\xa0\x80", "byte 0xed at offset 0"),
        ("☕".encode()[:2], "byte 0xe2 at offset 0"),
        (b"\xf4\x90\x80\x80", "byte 0xf4 at offset 0"),
    ],
    ids=["stray byte", "overlong", "surrogate", "cut off", "beyond Unicode"],
)
def test_invalid_utf8_is_rejected_with_row_and_offset(element: bytes, found: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode_texts(PROMPT, texts(b"good", element), LIMITS)
    assert str(caught.value) == f"invalid_input: text_input row 1 is not valid UTF-8: {found}"


def test_a_prompt_may_have_just_as_many_bytes_as_are_accepted() -> None:
    assert decode_texts(PROMPT, texts(b"a" * MAX_BYTES), LIMITS) == ["a" * MAX_BYTES]
    with pytest.raises(RequestError, match="context_exceeded: text_input row 0 has 101 bytes, more than the 100"):
        decode_texts(PROMPT, texts(b"a" * (MAX_BYTES + 1)), LIMITS)


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "per_prompt", "expected"),
    [
        ((2,), 1, (2,)),
        ((2, 1), 1, (2, 1)),
        ((2, 1), 3, (2, 3)),
        ((2, 2), 3, (2, 6)),
        ((2,), 3, (6,)),
        ((1, 1), 1, (1, 1)),
    ],
    ids=str,
)
def test_an_answer_follows_the_prompts_shape(
    shape: tuple[int, ...], per_prompt: int, expected: tuple[int, ...]
) -> None:
    num_texts = int(np.prod(shape)) * per_prompt
    array = encode_strings([f"text {number}" for number in range(num_texts)], shape)
    assert array.shape == expected
    assert array.dtype == np.object_
    assert array.ravel().tolist() == [f"text {number}".encode() for number in range(num_texts)]


def test_a_response_is_always_utf8() -> None:
    assert encode_strings(["a\ud800b", "☕"], (2,)).tolist() == [b"a?b", "☕".encode()]


def asking(shape: tuple[int, ...], **options: bool) -> GenerationRequest:
    return GenerationRequest([], [], RequestOptions(**options), shape)


def test_a_response_holds_the_text_and_requested_outputs() -> None:
    assert outputs_to_fill(asking((2, 1)), OUTPUTS) == [TEXT, LEGACY_TEXT]
    assert outputs_to_fill(asking((2, 1)), [TEXT]) == [TEXT]
    everything = asking((2, 1), **{f"return_{name}": True for name in TOLD})
    assert set(outputs_to_fill(everything, OUTPUTS)) == {TEXT, LEGACY_TEXT, *TOLD}
    assert outputs_to_fill(asking((2, 1)), OUTPUTS, has_prompt_logprobs=True) == [TEXT, LEGACY_TEXT, PROMPT_LOGPROBS]
    assert outputs_to_fill(asking((2, 1)), [TEXT], has_prompt_logprobs=True) == [TEXT]


@pytest.mark.parametrize("name", TOLD)
def test_each_output_is_asked_for_alone(name: str) -> None:
    assert set(outputs_to_fill(asking((1,), **{f"return_{name}": True}), OUTPUTS)) == {TEXT, LEGACY_TEXT, name}


@pytest.mark.parametrize(
    ("name", "dtype"), [("num_output_tokens", np.uint32), ("cumulative_logprob", np.float32), ("logprobs", np.object_)]
)
def test_an_output_has_its_type_and_the_request_s_shape(name: str, dtype: type) -> None:
    values = [f"[{number}]" for number in range(4)] if name == "logprobs" else [0, 2, 4, 6]
    array = encode_output(name, values, (2, 1))
    assert (array.dtype, array.shape) == (dtype, (2, 2))
    assert array.ravel().tolist() == [value.encode() if isinstance(value, str) else value for value in values]


def test_times_are_whole_microseconds_since_the_arrival() -> None:
    told = encode_timings(1e6, admitted_s=1e6 + 2e-6, first_token_s=1e6 + 0.5, answered_s=1e6 + 86_400)
    assert told == {"queue_time_us": 2, "time_to_first_token_us": 500_000, "e2e_request_latency_us": 86_400_000_000}
    assert all(type(value) is int for value in told.values())
    assert not told.keys() & OUTPUTS.keys(), "in the JSON of /generate, a parameter hides the output of its name"
    assert encode_timings(0.0, admitted_s=None, first_token_s=None, answered_s=1.0).keys() == {"e2e_request_latency_us"}


def test_every_parameter_is_declared_once_and_reaches_its_model() -> None:
    declared = [name for model in set(PARAMETERS.values()) for name in model.model_fields]
    assert sorted(declared) == sorted(PARAMETERS)
    assert {GenerationParameters, RequestOptions} <= set(PARAMETERS.values())
    assert set(ALIASES.values()) <= set(PARAMETERS)
    assert set(ALIASES) & set(PARAMETERS) == set()


def test_the_number_of_prompts_is_bounded() -> None:
    limits = Limits(max_prompts=3, max_prompt_bytes=MAX_BYTES)
    assert decode_texts(PROMPT, texts(b"a", b"b", b"c"), limits) == ["a", "b", "c"]
    with pytest.raises(RequestError, match="invalid_input: text_input holds 4 prompts, more than the 3 that are acc"):
        decode_texts(PROMPT, texts(b"a", b"b", b"c", b"d"), limits, "prompt")


def test_extra_parameters_of_tensorrt_llm_clients_are_accepted() -> None:
    plain = parse(b"x", max_tokens=20, bad_words=[], stop_strings=[], eos_token_id=2)
    dialect = parse(b"x", max_tokens=20, bad_words="", stop_words="", pad_id=0, end_id=2, stop=False)
    assert dialect.parameters == plain.parameters
    tensors = parse_tensors(1, end_id=np.array([[2]], np.int32), pad_id=np.array([[0]], np.int32))
    assert [each.eos_token_id for each in tensors.parameters] == [(2,)]
