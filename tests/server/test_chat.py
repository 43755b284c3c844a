# SPDX-License-Identifier: Apache-2.0
"""Chats on a real server: `messages` go through the chat template of the model, over every endpoint."""

import json
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from hf_triton.server import TritonServer
from tests.support.chat import CHAT
from tests.support.client import Reply, post
from tests.support.reference import Reference, load_reference, solo_ids
from tests.support.standard import StandardServer

NUM_TOKENS = 10


@pytest.fixture(scope="module")
def reference(standard: StandardServer) -> Reference:
    return load_reference(standard.checkpoint)


@pytest.fixture(scope="module")
def server(standard: StandardServer) -> TritonServer:
    return standard.serve("plain")


def ask(server: TritonServer, name: str = "plain", **fields: object) -> Reply:
    return post(server, f"/v2/models/{name}/generate", {"max_new_tokens": NUM_TOKENS, **fields})


def answer(reference: Reference, chat: list[dict[str, str]], **options: Any) -> str:
    """What transformers itself makes of a chat."""
    ids = reference.tokenizer.apply_chat_template(
        chat, tokenize=True, return_dict=False, **{"add_generation_prompt": True, **options}
    )
    written = solo_ids(reference.model, ids, NUM_TOKENS)
    before, whole = (reference.tokenizer.decode(each, skip_special_tokens=True) for each in (ids, ids + written))
    return str(whole)[len(before) :]


def test_chat_is_answered_without_its_prompt(server: TritonServer, reference: Reference) -> None:
    reply = ask(server, messages=json.dumps(CHAT))
    assert reply.status == 200, reply.body
    assert reply.json()["text_output"] == answer(reference, CHAT)


@pytest.mark.full
def test_folder_may_have_its_own_template(standard: StandardServer, reference: Reference) -> None:
    server = standard.serve("own_template")
    assert ask(server, "own_template", messages=json.dumps(CHAT)).json()["text_output"] == answer(reference, CHAT)


@pytest.mark.full
def test_messages_may_come_one_by_one(standard: StandardServer, reference: Reference) -> None:
    server = standard.serve("flat_typed")
    wanted = answer(reference, CHAT)
    assert ask(server, "flat_typed", messages=[json.dumps(turn) for turn in CHAT]).json()["text_output"] == wanted
    client = grpcclient.InferenceServerClient(server.grpc_url)
    tensor = grpcclient.InferInput("messages", [len(CHAT)], "BYTES")
    tensor.set_data_from_numpy(np.array([json.dumps(turn).encode() for turn in CHAT], dtype=np.object_))
    result = client.infer("flat_typed", [tensor], parameters={"max_new_tokens": NUM_TOKENS})
    client.close()
    assert result.as_numpy("text_output").tolist() == [wanted.encode()]


def test_last_message_can_be_continued(server: TritonServer, reference: Reference) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "To the"}]
    reply = ask(server, messages=json.dumps(chat), continue_final_message=True)
    wanted = answer(reference, chat, add_generation_prompt=False, continue_final_message=True)
    assert reply.json()["text_output"] == wanted


@pytest.mark.full
def test_a_model_without_a_template_says_so(standard: StandardServer) -> None:
    reply = ask(standard.serve("no_template"), "no_template", messages=json.dumps(CHAT))
    assert reply.status == 400
    assert "chat_template" in reply.error
