# SPDX-License-Identifier: Apache-2.0
"""BYTES tensors in and out: every shape, any UTF-8, and output i belongs to prompt i."""

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import Reply, generate, infer, post
from tests.support.reference import Reference, load_reference, solo_ids
from tests.support.standard import StandardServer

pytestmark = pytest.mark.full

BATCHED = "max_batch_size: 8 dynamic_batching { }"
ONE_ROW = 'max_batch_size: 1 input [{ name: "text_input" data_type: TYPE_STRING dims: [ -1 ] }]'
VALUE_FOR_EACH = 'input [{ name: "max_new_tokens" data_type: TYPE_INT64 dims: [ -1 ] optional: true }]'
SHAPES: dict[str, Callable[[int], list[int]]] = {
    "flat": lambda count: [count],
    "one": lambda count: [1, count],
    "eight": lambda count: [count, 1],
}
"""How each folder (`max_batch_size` 0, 1 and 8) takes a number of prompts."""
TEXTS = {
    "words": "Where does the river go",
    "emoji": "🙂 🧑\u200d🚀",
    "chinese": "你好世界",
    "accents": "Zoë fährt über e\u0301",
    "nul": "nul\0byte\0",
    "whitespace": " \t\r\n ",
    "json": '{"text_input": ["\\"]}',
    "empty": "",
    "length prefix": "\x04\0\0\0abcd",
    "long": "the sea " * 20,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("falcon", "llama", "no_beginning")}
    build_tiny_checkpoint(folders["falcon"], "falcon", eos_token_id=None)  # two drawn texts cannot both end at once
    build_tiny_checkpoint(folders["llama"], "llama")
    build_tiny_checkpoint(folders["no_beginning"], "falcon")
    config = folders["no_beginning"] / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({key: value for key, value in settings.items() if not key.endswith("os_token")}))
    return folders


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path],
    make_folder: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    standard: StandardServer,
) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("repository")
    falcon, llama = checkpoints["falcon"], checkpoints["llama"]
    make_folder(root, "flat", huggingface_model=falcon, max_output_length=8)
    make_folder(root, "one", huggingface_model=falcon, max_output_length=8, config=ONE_ROW)
    make_folder(root, "eight", huggingface_model=llama, max_output_length=8, config=BATCHED)
    make_folder(
        root,
        "inputs",
        huggingface_model=falcon,
        max_output_length=8,
        parameters_as_inputs="true",
        config=VALUE_FOR_EACH,
    )
    make_folder(root, "no_beginning", huggingface_model=checkpoints["no_beginning"], max_output_length=8)
    with standard.beside(root) as server:
        yield server


@pytest.fixture(scope="module")
def falcon(checkpoints: dict[str, Path]) -> Reference:
    return load_reference(checkpoints["falcon"])


@pytest.fixture(scope="module")
def llama(checkpoints: dict[str, Path]) -> Reference:
    return load_reference(checkpoints["llama"])


def texts_of(reply: Reply) -> list[str]:
    assert reply.status == 200, reply.body
    (output,) = reply.json()["outputs"]
    return list(output["data"])


def ask(server: TritonServer, model: str, texts: list[str], **parameters: object) -> list[str]:
    return texts_of(infer(server, model, texts, SHAPES[model](len(texts)), parameters, timeout_s=120))


@pytest.mark.parametrize(
    ("model", "shape"),
    [("flat", [1]), ("flat", [3]), ("one", [1, 1]), ("one", [1, 3]), ("eight", [1, 1]), ("eight", [8, 1])],
    ids=str,
)
def test_the_answer_has_the_shape_of_the_prompts(model: str, shape: list[int], server: TritonServer) -> None:
    texts = [f"prompt {number}" for number in range(max(shape))]
    (output,) = infer(server, model, texts, shape).json()["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("text_output", "BYTES", shape)
    assert len(output["data"]) == len(texts)


def test_512_prompts_in_one_request_come_back_in_order(server: TritonServer, falcon: Reference) -> None:
    texts = [f"{number} boats" for number in range(512)]
    answers = ask(server, "flat", texts, max_new_tokens=2)
    assert len(answers) == 512
    assert all(answer.startswith(text) for answer, text in zip(answers, texts, strict=True))
    assert [answers[place] for place in range(0, 512, 50)] == [falcon.text(each, 2) for each in texts[::50]]


@pytest.mark.parametrize(
    ("model", "count"), [("flat", 23), ("one", 23), ("eight", 7)], ids=["max_batch_size 0", "1", "8"]
)
def test_n_prompts_give_n_answers_in_order(
    model: str, count: int, server: TritonServer, falcon: Reference, llama: Reference
) -> None:
    texts = [f"{'the river ' * (number % 5)}{number}" for number in range(count)]
    reference = llama if model == "eight" else falcon
    assert ask(server, model, texts) == [reference.text(text, 8) for text in texts]


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("model", ["flat", "eight"])
def test_prompt_is_returned_unchanged_before_the_continuation(
    model: str, kind: str, server: TritonServer, falcon: Reference, llama: Reference
) -> None:
    text, reference = TEXTS[kind], llama if model == "eight" else falcon
    ids = reference.tokenizer(text).input_ids or [0]  # an empty prompt begins with the model's first token
    new = reference.tokenizer.decode(solo_ids(reference.model, ids, 8), skip_special_tokens=True)
    assert ask(server, model, [text]) == [text + new]
    assert generate(server, model, text).json()["text_output"] == text + new
    assert ask(server, model, [text], exclude_input_in_output=True) == [new]


def test_empty_prompt_is_refused_if_the_model_has_no_bos_token(server: TritonServer) -> None:
    refused = infer(server, "no_beginning", ["fine", ""])
    assert refused.status == 400
    assert "text_input row 1 is empty" in refused.error
    assert infer(server, "no_beginning", ["fine"]).status == 200


NUM_THREADS = 16


def draw_requests(num_prompts: int, most_prompts: int) -> list[tuple[list[str], dict[str, object]]]:
    """Requests of one or more prompts, no prompt twice, with parameters of all kinds."""
    source = random.Random(num_prompts)
    words = ["the river", "a boat", "3, 14", "über", "你好", "🙂", "def area", "bread", "\0", "goes to"]
    requests, number = [], 0
    while number < num_prompts:
        count = source.randint(1, most_prompts)
        texts = [
            f"{number + place} {' '.join(source.choices(words, k=source.randint(0, 8)))}" for place in range(count)
        ]
        number += count
        parameters: dict[str, object] = {"max_new_tokens": source.randint(1, 16)}
        kind = source.choice(["greedy", "greedy", "penalty", "sampled", "sampled with penalty"])
        if "penalty" in kind:
            parameters["repetition_penalty"] = source.choice([0.8, 1.3])
        if "sampled" in kind:
            parameters |= {"temperature": source.choice([0.7, 1.5]), "top_p": 0.95, "seed": source.randrange(2**40)}
        requests.append((texts, parameters))
    return requests


@pytest.mark.parametrize(
    ("model", "num_prompts", "most_prompts"), [("flat", 200, 6), ("eight", 60, 4)], ids=["flat", "eight"]
)
def test_an_answer_depends_on_its_prompt_alone(
    model: str, num_prompts: int, most_prompts: int, server: TritonServer
) -> None:
    requests = draw_requests(num_prompts, most_prompts)
    alone = [[ask(server, model, [text], **parameters)[0] for text in texts] for texts, parameters in requests]
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        answers = list(pool.map(lambda place: ask(server, model, requests[place][0], **requests[place][1]), order))
    assert answers == [alone[place] for place in order]


SAMPLED = {"temperature": 1.5, "max_new_tokens": 12}


def test_output_varies_without_a_seed(server: TritonServer) -> None:
    """Twelve tokens at temperature 1.5: two equal texts among eight are less likely than 1e-6."""
    answers = ask(server, "flat", ["The river"] * 8, **SAMPLED)
    assert len(set(answers)) == 8
    assert not set(answers) & set(ask(server, "flat", ["The river"] * 8, **SAMPLED))


@pytest.mark.parametrize(
    ("model", "shape", "wanted"),
    [("flat", [1], [3]), ("flat", [2], [6]), ("one", [1, 2], [1, 6]), ("eight", [2, 1], [2, 3])],
    ids=str,
)
def test_sequences_of_a_prompt_are_adjacent(
    model: str, shape: list[int], wanted: list[int], server: TritonServer
) -> None:
    texts = ["The river", "bread"][: max(shape)]
    asked = {"num_return_sequences": 3, "seed": 4, **SAMPLED}
    (output,) = infer(server, model, texts, shape, asked).json()["outputs"]
    assert output["shape"] == wanted
    for place, text in enumerate(texts):
        own = output["data"][3 * place : 3 * place + 3]
        assert all(answer.startswith(text) for answer in own)
        assert len(set(own)) == 3
        assert own == ask(server, model, [text], **asked)


PARAMETERS: dict[str, Any] = {
    "max_new_tokens": 24,
    "temperature": 1.3,
    "top_p": 0.9,
    "top_k": 40,
    "seed": 7,
    "repetition_penalty": 3.0,
    "num_return_sequences": 2,
    "exclude_input_in_output": True,
}
OTHER_NAMES = {"max_new_tokens": "max_tokens", "num_return_sequences": "n", "seed": "random_seed"}
ALIASED = {OTHER_NAMES.get(name, name): value for name, value in PARAMETERS.items()}
TYPES = {bool: "BOOL", int: "INT64", float: "FP32"}
TENSORS = [
    {
        "name": name,
        "datatype": {"top_k": "INT32", "seed": "UINT64"}.get(name, TYPES[type(value)]),
        "shape": [1],
        "data": [value],
    }
    for name, value in PARAMETERS.items()
]


def _prompt() -> dict[str, Any]:
    return {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["The river"]}


WAYS: dict[str, Callable[[TritonServer], Reply]] = {
    "infer parameters": lambda server: infer(server, "flat", ["The river"], parameters=PARAMETERS),
    "generate keys": lambda server: generate(server, "flat", "The river", **PARAMETERS),
    "generate parameters": lambda server: generate(server, "flat", "The river", parameters=PARAMETERS),
    "aliases, infer": lambda server: infer(server, "flat", ["The river"], parameters=ALIASED),
    "request id": lambda server: generate(server, "flat", "The river", id="42", **PARAMETERS),
    "input tensors": lambda server: post(server, "/v2/models/inputs/infer", {"inputs": [_prompt(), *TENSORS]}),
    "inputs, generate keys": lambda server: generate(server, "inputs", "The river", **PARAMETERS),
    "half and half": lambda server: post(
        server,
        "/v2/models/inputs/infer",
        {"inputs": [_prompt(), *TENSORS[:4]], "parameters": dict(list(PARAMETERS.items())[4:])},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_form_of_parameters_gives_the_same_output(way: str, server: TritonServer, falcon: Reference) -> None:
    reply = WAYS[way](server)
    assert reply.status == 200, reply.body
    body = reply.json()
    answers = body["outputs"][0]["data"] if "outputs" in body else body["text_output"]
    assert answers == texts_of(infer(server, "flat", ["The river"], parameters=PARAMETERS))
    assert len(set(answers)) == 2


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "exclude_input_in_output"])
def test_every_parameter_makes_a_difference(name: str, server: TritonServer) -> None:
    """So that the ways above cannot agree by all dropping the same one."""
    without = {key: value for key, value in PARAMETERS.items() if key != name}
    if name == "seed":
        without["seed"] = 8
    assert ask(server, "flat", ["The river"], **without) != ask(server, "flat", ["The river"], **PARAMETERS)


def test_a_tensor_may_hold_one_value_for_each_prompt(server: TritonServer, falcon: Reference) -> None:
    texts, lengths = ["The river", "bread", "3, 14"], [1, 5, 9]
    prompt = {"name": "text_input", "datatype": "BYTES", "shape": [3], "data": texts}
    values = {"name": "max_new_tokens", "datatype": "INT64", "shape": [3], "data": lengths}
    reply = post(server, "/v2/models/inputs/infer", {"inputs": [prompt, values]})
    assert texts_of(reply) == [falcon.text(*each) for each in zip(texts, lengths, strict=True)]
