# SPDX-License-Identifier: Apache-2.0
"""Structured output over Triton's endpoints: whole outputs, cut ones, and refusals that affect no other request."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import generate, generate_stream, infer
from tests.support.standard import StandardServer

pytestmark = pytest.mark.full

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = json.dumps({"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}})
PROMPT = "The old harbour has"
DECOUPLED = "model_transaction_policy { decoupled: true }"


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path], standard: StandardServer
) -> Iterator[TritonServer]:
    root = tmp_path_factory.mktemp("repository")
    checkpoint = build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")
    shared = {"huggingface_model": checkpoint, "max_output_length": 200}
    make_folder(root, "guided", parameters_as_inputs=True, exclude_input_in_output=True, **shared)
    make_folder(root, "guided_stream", config=DECOUPLED, **shared)
    make_folder(root, "strict", generation_defaults=json.dumps({"guided_choice": ["yes", "no"]}), **shared)
    with standard.beside(root) as running:
        yield running


@pytest.fixture(autouse=True)
def _unharmed(server: TritonServer) -> Iterator[None]:
    yield
    assert generate(server, "guided", PROMPT, max_new_tokens=4).status == 200


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("max_tokens", [3, 24, 200])
def test_json_schema_over_generate(server: TritonServer, sampling: dict[str, object], max_tokens: int) -> None:
    fields = {"max_tokens": max_tokens, "return_finish_reason": True, **sampling}
    flat = generate(server, "guided", PROMPT, response_format=RESPONSE_FORMAT, **fields)
    nested = generate(server, "guided", PROMPT, parameters={"response_format": RESPONSE_FORMAT, **fields})
    assert flat.status == nested.status == 200, (flat.body, nested.body)
    assert nested.json()["text_output"] == flat.json()["text_output"]
    if flat.json()["finish_reason"] == "stop":
        check(flat.json()["text_output"])
    else:
        assert flat.json()["finish_reason"] == "length"
        assert max_tokens < 200


def test_json_schema_over_infer_for_every_sequence_of_every_prompt(server: TritonServer) -> None:
    parameters = {"guided_json": json.dumps(SCHEMA), "n": 2, "temperature": 1.0}
    reply = infer(server, "guided", [PROMPT, "Where does"], parameters=parameters)
    assert reply.status == 200, reply.body
    texts = reply.json()["outputs"][0]["data"]
    assert len(texts) == 4
    for text in texts:
        check(text)


def test_forms_by_other_names(server: TritonServer) -> None:
    def written(**fields: object) -> str:
        reply = generate(server, "guided", PROMPT, **fields)
        assert reply.status == 200, reply.body
        return str(reply.json()["text_output"])

    assert isinstance(json.loads(written(response_format='{"type": "json_object"}')), dict)
    assert written(guided_choice='["north", "south"]') in ("north", "south")
    assert written(guided_regex="[0-9]{3}-[0-9]{4}", temperature=1.0)[3] == "-"
    assert written(guided_grammar='start: "(" start ")" | "x"').strip("()") == "x"
    assert written(response_format='{"type": "text"}') == written()


def test_a_declared_input_is_as_good_as_a_parameter(server: TritonServer) -> None:
    reply = generate(server, "guided", PROMPT, guided_choice=["north", "south"])
    assert reply.status == 200, reply.body
    assert reply.json()["text_output"] in ("north", "south")


def test_stream_equals_the_whole_output(server: TritonServer) -> None:
    reply = generate(server, "guided", PROMPT, response_format=RESPONSE_FORMAT)
    streamed = generate_stream(server, "guided_stream", PROMPT, stream=True, response_format=RESPONSE_FORMAT)
    assert streamed.text() == reply.json()["text_output"]
    check(streamed.text())


def test_a_folder_can_have_a_form_and_a_request_another(server: TritonServer) -> None:
    answer = {"exclude_input_in_output": True}
    assert generate(server, "strict", PROMPT, **answer).json()["text_output"] in ("yes", "no")
    assert generate(server, "strict", PROMPT, guided_regex="ab+c", **answer).json()["text_output"].startswith("ab")
    assert "the folder's guided_choice" in generate(server, "strict", PROMPT, ignore_eos=True).error


def test_schema_that_takes_minutes_to_compile_is_refused(server: TritonServer) -> None:
    hostile = json.dumps({"allOf": [{"pattern": f".*{number:x}"} for number in range(50)]})
    answer = generate(server, "guided", PROMPT, guided_json=hostile, max_tokens=200)
    assert answer.status == 400
    assert "guided_json takes more than 3 s of a processor" in answer.json()["error"]
    check(generate(server, "guided", PROMPT, guided_json=json.dumps(SCHEMA), max_tokens=200).json()["text_output"])
