# SPDX-License-Identifier: Apache-2.0
"""`prompt_logprobs` over every endpoint: equal to transformers' forward of the prompt."""

import json
from typing import Any

import pytest
import torch

from hf_triton.testing import TritonServer
from tests.support.chat import CHAT
from tests.support.client import generate, generate_stream, infer, post
from tests.support.reference import Reference, load_reference
from tests.support.standard import StandardServer

PROMPTS = ["The canary sings", "x", "Where does the river go after the bridge?", "größer 🙂"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def reference(standard: StandardServer) -> Reference:
    return load_reference(standard.checkpoint)


@pytest.fixture(scope="module")
def server(standard: StandardServer) -> TritonServer:
    return standard.serve("plain")


def check(told: str, prompt_ids: list[int], reference: Reference, count: int) -> None:
    """Whether an output is transformers' own log_softmax at every place of a prompt."""
    first, *places = json.loads(told)
    assert first is None
    assert len(places) == len(prompt_ids) - 1
    with torch.inference_mode():
        expected = reference.model(input_ids=torch.tensor([prompt_ids])).logits[0].log_softmax(-1)
    for found, logprobs, token_id in zip(places, expected, prompt_ids[1:], strict=False):
        for each, entry in found.items():
            assert entry.keys() - {"bytes"} == {"logprob", "rank", "decoded_token"}
            assert entry["logprob"] == pytest.approx(logprobs[int(each)].item(), abs=TOLERANCE)
            assert entry["decoded_token"] == reference.tokenizer.decode([int(each)], skip_special_tokens=True)
        by_rank = {entry["rank"]: entry["logprob"] for entry in found.values() if entry["rank"] is not None}
        assert list(range(1, count + 1)) == sorted(by_rank)
        likeliest = logprobs.topk(count).values.tolist()
        assert [by_rank[rank] for rank in sorted(by_rank)] == pytest.approx(likeliest, abs=TOLERANCE)
        assert str(token_id) in found
        assert len(found) in (count, count + 1)


def ids_of(reference: Reference, prompt: str) -> list[int]:
    ids: list[int] = reference.tokenizer(prompt).input_ids
    return ids


def outputs_of(reply: Any) -> dict[str, list[Any]]:
    assert reply.status == 200, reply.body
    return {output["name"]: output["data"] for output in reply.json()["outputs"]}


@pytest.mark.parametrize("count", [0, 1, 5])
def test_each_prompt_has_its_own_prompt_logprobs(server: TritonServer, reference: Reference, count: int) -> None:
    outputs = outputs_of(infer(server, "plain", PROMPTS, parameters={"prompt_logprobs": count}))
    assert outputs.keys() == {"text_output", "prompt_logprobs"}
    for prompt, told in zip(PROMPTS, outputs["prompt_logprobs"], strict=True):
        check(told, ids_of(reference, prompt), reference, count)
    plain = outputs_of(infer(server, "plain", PROMPTS))
    assert plain == {"text_output": outputs["text_output"]}, (
        "outputs stay the same, and prompt_logprobs come on request only"
    )


def test_prompt_logprobs_of_a_chat_are_of_the_templated_prompt(server: TritonServer, reference: Reference) -> None:
    reply = post(server, "/v2/models/plain/generate", {"messages": json.dumps(CHAT), "prompt_logprobs": 2})
    assert reply.status == 200, reply.body
    ids = reference.tokenizer.apply_chat_template(CHAT, return_dict=False, add_generation_prompt=True)
    check(reply.json()["prompt_logprobs"], ids, reference, 2)


@pytest.mark.full
@pytest.mark.parametrize("name", ["stream", "plain_stream"])
def test_stream_has_prompt_logprobs_in_its_first_and_last_response(
    standard: StandardServer, reference: Reference, name: str
) -> None:
    server = standard.serve("plain", name)
    found = generate_stream(server, name, PROMPTS[2], stream=True, prompt_logprobs=2).data
    assert len(found) > 1
    assert [number for number, data in enumerate(found) if "prompt_logprobs" in data] == [0, len(found) - 1]
    for data in (found[0], found[-1]):
        check(data["prompt_logprobs"], ids_of(reference, PROMPTS[2]), reference, 2)


@pytest.mark.full
def test_tensor_gives_each_prompt_its_own_count(standard: StandardServer, reference: Reference) -> None:
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": PROMPTS[:1] * 2},
        {"name": "prompt_logprobs", "datatype": "INT64", "shape": [2, 1], "data": [0, 4]},
    ]
    told = outputs_of(post(standard.serve("typed"), "/v2/models/typed/infer", {"inputs": inputs}))["prompt_logprobs"]
    for each, count in zip(told, (0, 4), strict=True):
        check(each, ids_of(reference, PROMPTS[0]), reference, count)


def test_cached_prompt_has_all_prompt_logprobs(server: TritonServer, reference: Reference) -> None:
    """What a prompt shares with another one is not computed again, as a rule, and would have no log probabilities."""
    long = "the river goes to the sea and the ship follows it " * 4
    assert generate(server, "plain", long).status == 200
    check(
        generate(server, "plain", long, prompt_logprobs=1).json()["prompt_logprobs"],
        ids_of(reference, long),
        reference,
        1,
    )
