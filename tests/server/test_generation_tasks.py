# SPDX-License-Identifier: Apache-2.0
"""Beam search, summarization, translation and MLServer's requests on the real server, compared with transformers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_triton.testing import TritonServer, build_tiny_checkpoint
from tests.support.client import Reply, generate_stream, post
from tests.support.reference import Reference, beam_ids, load_reference
from tests.support.standard import StandardServer
from tests.support.translation import build_nllb, build_opus, build_t5, pipeline_text, translation

pytestmark = pytest.mark.full

PROMPTS = ["The old harbour has two boats.", "Where does the river go?", "In the morning the baker carries bread."]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "t5": build_t5(root / "t5"),
        "nllb": build_nllb(root / "nllb"),
        "opus": build_opus(root / "opus"),
        "llama": build_tiny_checkpoint(root / "llama", "llama", eos_token_id=[1, *range(100, 160)]),
    }


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path],
    make_folder: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    standard: StandardServer,
) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    make_folder(repository, "summaries", huggingface_model=checkpoints["t5"], task="summarization")
    make_folder(
        repository,
        "translations",
        huggingface_model=checkpoints["t5"],
        task="translation",
        config="max_batch_size: 8 model_transaction_policy { decoupled: true }",
    )
    make_folder(
        repository,
        "nllb",
        huggingface_model=checkpoints["nllb"],
        task="translation",
        max_output_length=12,
        config="max_batch_size: 8",
    )
    make_folder(repository, "opus", huggingface_model=checkpoints["opus"], task="translation")
    make_folder(repository, "transformer", huggingface_model=checkpoints["llama"], engine="batch", max_output_length=10)
    with standard.beside(repository) as running:
        yield running


@pytest.fixture(scope="module")
def llama(checkpoints: dict[str, Path]) -> Reference:
    return load_reference(checkpoints["llama"])


def tensor(name: str, *texts: str, shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": shape or [len(texts)], "data": list(texts)}


def infer(server: TritonServer, model: str, *inputs: dict[str, Any], **body: Any) -> dict[str, Any]:
    reply = post(server, f"/v2/models/{model}/infer", {"inputs": list(inputs), **body})
    assert reply.status == 200, reply.body
    return {output["name"]: output for output in reply.json()["outputs"]}


def ask(server: TritonServer, model: str, **fields: Any) -> Reply:
    return post(server, f"/v2/models/{model}/generate", fields)


def beams(llama: Reference, prompt: str, max_new_tokens: int = 10, **arguments: Any) -> list[str]:
    ids = llama.tokenizer(prompt).input_ids
    found = beam_ids(llama.model, ids, max_new_tokens, **arguments)
    return [llama.tokenizer.decode(each, skip_special_tokens=True) for each in found]


def test_the_best_hypotheses_of_each_prompt(server: TritonServer, llama: Reference) -> None:
    parameters = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "exclude_input_in_output": True}
    answer = infer(server, "transformer", tensor("text_input", *PROMPTS), parameters=parameters)
    expected = [
        text
        for prompt in PROMPTS
        for text in beams(llama, prompt, num_beams=4, num_return_sequences=2, length_penalty=0.5)
    ]
    assert answer["text_output"]["data"] == expected


@pytest.mark.parametrize(
    "fields",
    [{"beam_width": 3, "early_stopping": True}, {"use_beam_search": True, "best_of": 3, "early_stopping": True}],
)
def test_the_names_of_other_servers(fields: dict[str, Any], server: TritonServer, llama: Reference) -> None:
    answer = ask(server, "transformer", text_input=PROMPTS[0], exclude_input_in_output=True, **fields)
    [expected] = beams(llama, PROMPTS[0], num_beams=3, early_stopping=True)
    assert answer.json()["text_output"] == expected


def test_a_stop_string_ends_hypotheses_as_in_generate(server: TritonServer, llama: Reference) -> None:
    [whole] = beams(llama, PROMPTS[1], 16, num_beams=3, eos_token_id=None)
    stop = whole[len(whole) // 2 :][:2]
    fields = {"num_beams": 3, "max_new_tokens": 16, "stop": [stop], "ignore_eos": True, "exclude_input_in_output": True}
    answer = ask(server, "transformer", text_input=PROMPTS[1], include_stop_str_in_output=True, **fields).json()
    own = {"stop_strings": [stop], "tokenizer": llama.tokenizer, "num_beams": 3, "eos_token_id": None}
    [expected] = beams(llama, PROMPTS[1], 16, **own)
    assert answer["text_output"] == expected[: expected.index(stop) + len(stop)]


def test_a_summary_is_that_of_the_pipeline(server: TritonServer, checkpoints: dict[str, Path]) -> None:
    expected = [pipeline_text(checkpoints["t5"], prompt, "summarization") for prompt in PROMPTS]
    answer = infer(server, "summaries", tensor("text_input", *PROMPTS))
    assert answer["text_output"]["data"] == expected
    assert [json.loads(each) for each in answer["output"]["data"]] == [{"summary_text": text} for text in expected]


def test_a_request_may_choose_otherwise(server: TritonServer, checkpoints: dict[str, Path]) -> None:
    chosen = {"num_beams": 1, "max_new_tokens": 12}
    answer = ask(server, "summaries", text_input=PROMPTS[0], **chosen).json()
    assert answer["text_output"] == pipeline_text(checkpoints["t5"], PROMPTS[0], "summarization", **chosen)
    sampled = ask(server, "summaries", text_input=PROMPTS[0], temperature=0.8, return_logprobs=True)
    assert sampled.status == 200, sampled.body  # the checkpoint's beams give way
    named = infer(server, "summaries", tensor("text_input", PROMPTS[0]), outputs=[{"name": "text_output"}])
    assert named.keys() == {"text_output"}


def test_a_translation_by_its_prefix(server: TritonServer, checkpoints: dict[str, Path]) -> None:
    for language in ("de", "fr"):
        answer = post(
            server,
            "/v2/models/translations/generate_stream",
            {"text_input": [PROMPTS[0]], "src_lang": "en", "tgt_lang": language, "stream": False},
        )
        expected = pipeline_text(checkpoints["t5"], PROMPTS[0], f"translation_en_to_{language}")
        event = json.loads(answer.body.removeprefix("data: "))
        assert json.loads(event["output"]) == {"translation_text": expected}


def test_beams_of_the_checkpoint_give_way_to_a_stream(server: TritonServer, checkpoints: dict[str, Path]) -> None:
    languages = {"src_lang": "en", "tgt_lang": "de"}
    events = generate_stream(server, "translations", [PROMPTS[0]], stream=True, **languages)
    assert len(events.events) > 2
    assert events.text() == pipeline_text(checkpoints["t5"], PROMPTS[0], "translation_en_to_de", num_beams=1)


def test_a_translation_by_tokens_for_languages(server: TritonServer, checkpoints: dict[str, Path]) -> None:
    prompt, answers = "where does the river go", set()
    for source, target in (("eng_Latn", "deu_Latn"), ("fra_Latn", "deu_Latn"), ("eng_Latn", "fra_Latn")):
        answer = ask(server, "nllb", text_input=prompt, src_lang=source, tgt_lang=target, min_new_tokens=8).json()
        expected = translation(checkpoints["nllb"], prompt, source, target, max_new_tokens=12, min_new_tokens=8)
        assert answer["text_output"] == expected
        answers.add(expected)
    assert len(answers) == 3


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_a_model_of_one_pair_of_languages(server: TritonServer, checkpoints: dict[str, Path]) -> None:
    expected = [pipeline_text(checkpoints["opus"], prompt) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    answer = infer(server, "opus", tensor("text_input", *PROMPTS))
    assert answer["text_output"]["data"] == expected
    assert [json.loads(each) for each in answer["output"]["data"]] == [{"translation_text": text} for text in expected]


def test_mlserver_generates(server: TritonServer, llama: Reference) -> None:
    request = {
        "parameters": {"content_type": "hf"},
        "inputs": [{"name": "args", "shape": [1], "datatype": "BYTES", "data": ["this is a test"]}],
    }
    reply = post(server, "/v2/models/transformer/infer", request)
    assert reply.status == 200, reply.body
    [output] = reply.json()["outputs"]
    assert (output["name"], output["shape"]) == ("output", [1, 1])
    assert json.loads(output["data"][0]) == {"generated_text": llama.text("this is a test", 10)}


def test_mlserver_benchmarks(server: TritonServer) -> None:
    prompt = "This is a generation for the work"
    answer = infer(server, "transformer", tensor("text_inputs", *[prompt] * 12), outputs=[{"name": "text_output"}])
    assert answer.keys() == {"text_output"}
    assert len(answer["text_output"]["data"]) == 12


def test_mlserver_asks_for_other_tasks(server: TritonServer) -> None:
    """Its own library sends `[n, 1]`, which a folder that batches takes."""
    [output] = infer(server, "summaries", tensor("args", "the", "old harbour")).values()
    assert [list(json.loads(each)) for each in output["data"]] == [["summary_text"]] * 2
    languages = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}
    [output] = infer(server, "nllb", tensor("args", "the", "old", shape=[2, 1]), parameters=languages).values()
    assert [list(json.loads(each)) for each in output["data"]] == [["translation_text"]] * 2
    assert output["shape"] == [2, 1]


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "beams and a temperature": (
        "transformer",
        {"num_beams": 2, "temperature": 0.7},
        "temperature cannot be combined with num_beams 2: leave one of them out",
    ),
    "beams and sampling": ("transformer", {"num_beams": 2, "do_sample": True}, "do_sample cannot be combined with"),
    "beams and best_of": ("transformer", {"num_beams": 2, "best_of": 3}, "best_of cannot be combined with num_beams 2"),
    "beams and logprobs": (
        "transformer",
        {"num_beams": 2, "return_logprobs": True},
        "return_logprobs cannot be combined with num_beams 2",
    ),
    "beams and a schema": (
        "transformer",
        {"num_beams": 2, "guided_regex": "a+"},
        "guided_regex cannot be combined with num_beams 2",
    ),
    "beams and a stream": (
        "translations",
        {"num_beams": 2, "stream": True, "src_lang": "en", "tgt_lang": "de"},
        "stream cannot be combined with num_beams 2",
    ),
    "more completions than beams": (
        "transformer",
        {"num_beams": 2, "n": 3},
        "n 3 is more than num_beams 2: lower one or raise the other",
    ),
    "a penalty without beams": (
        "transformer",
        {"length_penalty": 2.0},
        "length_penalty has no effect without num_beams above 1: leave it out",
    ),
    "vLLM's search of no width": ("transformer", {"use_beam_search": True}, "use_beam_search needs n, the number"),
    "a language for text generation": ("transformer", {"src_lang": "en"}, "src_lang is for the task translation"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused(case: str, server: TritonServer) -> None:
    model, fields, sentence = BAD[case]
    path = "generate_stream" if model == "translations" else "generate"
    text = ["x"] if model == "translations" else "x"
    reply = post(server, f"/v2/models/{model}/{path}", {"text_input": text, **fields})
    assert sentence in reply.body
