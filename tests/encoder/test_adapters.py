# SPDX-License-Identifier: Apache-2.0
"""LoRA on encoders: each sequence has the outputs of peft's model with its adapter alone, in any company."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_triton.encoder.engine import EncoderEngine
from hf_triton.encoder.forward import EncoderForward, build_forward
from hf_triton.encoder.jobs import EncoderInput
from hf_triton.encoder.probe import Way
from hf_triton.errors import CheckpointError
from tests.support.adapters import save_lora, wrap
from tests.support.encoders import HEADS, build_model, expected_outputs, random_inputs
from tests.support.marks import full

LENGTHS = [7, 30, 2, 7, 12, 30, 3, 7]
CHOSEN = (0, 1, 2, 0, 2, 1, None, None)
"""Of each sequence, the adapter."""
ATTENTION = {
    "distilbert": ["q_lin", "v_lin"],
    "deberta-v2": ["query_proj", "value_proj"],
    "modernbert": ["Wqkv"],
    "qwen3": ["q_proj", "v_proj"],
}
"""By family, the layers that recipes choose; the others have `query` and `value`."""
TOLERANCE = 1e-5
CASES = [
    *(
        ("bert", "embeddings"),
        ("qwen3", "embeddings"),
        ("deberta-v2", "embeddings"),
        ("bert", "tokens"),
        ("bert", "masks"),
    ),
    *(("modernbert", "sequence"), ("fnet", "sequence")),
]
MORE = [
    *((family, "embeddings") for family in ("distilbert", "modernbert", "xlm-roberta")),
    *((family, "sequence") for family in ("bert", "roberta", "distilbert", "electra", "qwen3")),
]
CASES += full(*MORE)


def targets_of(family: str) -> dict[str, Any]:
    return {"target_modules": ["dense"] if family == "fnet" else ATTENTION.get(family, ["query", "value"])}


def load_all(model: Any, head: str, folders: list[Path], way: Way | None = None) -> tuple[EncoderForward, list[Any]]:
    """A model's forward, and its adapters, loaded after it was built."""
    _, outputs, per_token = HEADS[head]
    forward = build_forward(model, outputs, per_token=per_token, way=way, takes_adapters=True)
    assert forward.adapters is not None
    return forward, [forward.adapters.load(folder) for folder in folders]


def check(family: str, head: str, folders: list[Path], way: Way | None = None) -> EncoderForward:
    """Compare sequences of several adapters, together and each alone, with peft's own model of each."""
    _, outputs, per_token = HEADS[head]
    forward, loaded = load_all(build_model(family, head), head, folders, way)
    plain = random_inputs(LENGTHS)
    if per_token:
        plain[1] = replace(plain[1], output_positions=[1, 5])
    inputs = [
        each if chosen is None else replace(each, adapter=loaded[chosen])
        for each, chosen in zip(plain, CHOSEN, strict=True)
    ]
    models = {None: build_model(family, head)} | {
        number: wrap(build_model(family, head), folder) for number, folder in enumerate(folders)
    }
    expected = [
        expected_outputs(models[chosen], each, outputs, per_token=per_token)
        for each, chosen in zip(plain, CHOSEN, strict=True)
    ]
    other = expected_outputs(models[None], plain[0], outputs, per_token=per_token)
    assert not torch.allclose(expected[0], other, atol=100 * TOLERANCE), "the adapter changes nothing"
    for found in (forward(inputs), [forward([each])[0] for each in inputs], forward(inputs[::-1])[::-1]):
        for one, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(one, wanted, atol=TOLERANCE * float(wanted.abs().max()), rtol=0)
    return forward


@pytest.mark.parametrize(("family", "head"), CASES)
def test_each_sequence_has_the_outputs_of_its_adapter(family: str, head: str, tmp_path: Path) -> None:
    folders = [
        save_lora(build_model(family, head), tmp_path / f"lora{seed}", seed, **targets_of(family)) for seed in range(3)
    ]
    forward = check(family, head, folders)
    assert forward.way == {"deberta-v2": "padded", "fnet": "alone"}.get(family, "packed")


@pytest.mark.parametrize(("family", "way"), [("albert", "packed"), ("deberta-v2", "padded")])
def test_layers_that_see_something_else_than_tokens(family: str, way: Way, tmp_path: Path) -> None:
    """ALBERT's pooler is a layer; DeBERTa's layers for positions see those of all rows at once."""
    folders = [
        save_lora(build_model(family, "sequence"), tmp_path / f"lora{seed}", seed, target_modules="all-linear")
        for seed in range(3)
    ]
    assert check(family, "sequence", folders).way == way


@pytest.mark.parametrize("way", ["packed", "padded", "alone"])
@pytest.mark.parametrize("head", ["embeddings", *full("sequence")])
def test_every_way_and_every_layer(head: str, way: Way, tmp_path: Path) -> None:
    config = {"target_modules": ["query", "key", "value", "dense", "word_embeddings"]}  # the pooler's dense layer too
    folders = [save_lora(build_model("bert", head), tmp_path / f"lora{seed}", seed, **config) for seed in range(3)]
    check("bert", head, folders, way)


@pytest.mark.parametrize("family", ["bert", "qwen3", *full("roberta", "distilbert", "electra")])
def test_a_head_of_the_adapter_s_own(family: str, tmp_path: Path) -> None:
    """peft names the head in `modules_to_save` for every sequence classifier; RoBERTa's has two layers."""
    folders = [
        save_lora(
            build_model(family, "sequence"), tmp_path / f"{seed}", seed, task_type="SEQ_CLS", **targets_of(family)
        )
        for seed in range(3)
    ]
    check(family, "sequence", folders)


def test_heads_come_and_go_beside_others(tmp_path: Path) -> None:
    config = {"task_type": "SEQ_CLS", **targets_of("bert")}
    folders = [save_lora(build_model("bert", "sequence"), tmp_path / f"{seed}", seed, **config) for seed in range(2)]
    forward, loaded = load_all(build_model("bert", "sequence"), "sequence", folders)
    assert forward.adapters is not None
    inputs = random_inputs(LENGTHS)
    for _ in range(2):
        both = [replace(each, adapter=loaded[row % 2]) for row, each in enumerate(inputs)]
        for row, (found, each) in enumerate(zip(forward(both), inputs, strict=True)):
            model = wrap(build_model("bert", "sequence"), folders[row % 2])
            wanted = expected_outputs(model, each, ("logits",), per_token=False)
            torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        del both, loaded[1]
        forward.adapters.sweep()
        forward([replace(inputs[0], adapter=loaded[0]), inputs[1]])
        loaded.append(forward.adapters.load(folders[1]))


def test_adapters_are_loaded_while_an_engine_computes(tmp_path: Path) -> None:
    folder = save_lora(build_model("bert", "sequence"), tmp_path / "lora", 0, task_type="SEQ_CLS", **targets_of("bert"))
    engine = EncoderEngine(
        build_forward(build_model("bert", "sequence"), ("logits",), per_token=False, takes_adapters=True)
    )
    inputs, ends = random_inputs(LENGTHS), threading.Event()

    def compute() -> list[Any]:
        found = [engine.run(inputs)]
        while not ends.is_set():
            found = [found[0], engine.run(inputs)]
        return found

    try:
        assert engine.adapters is not None
        with ThreadPoolExecutor(1) as pool:
            computing = pool.submit(compute)
            try:
                for _ in range(5):
                    engine.adapters.load(folder)
                    engine.adapters.sweep()
            finally:
                ends.set()
        first, last = computing.result()
    finally:
        engine.close()
    for one, other in zip(first, last, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), torch.from_numpy(other), atol=TOLERANCE, rtol=TOLERANCE)


def test_an_engine_mixes_adapters_with_packed_weights(tmp_path: Path) -> None:
    folders = [save_lora(build_model("bert", "embeddings"), tmp_path / "lora", 0, target_modules=["query", "dense"])]
    model = build_model("bert", "embeddings")
    forward = build_forward(model, ("last_hidden_state",), per_token=True, pack_weights=True, takes_adapters=True)
    engine = EncoderEngine(forward)
    try:
        assert engine.adapters is not None
        adapter = engine.adapters.load(folders[0])
        inputs = random_inputs(LENGTHS)
        found = engine.run([replace(each, adapter=adapter if row % 2 else None) for row, each in enumerate(inputs)])
    finally:
        engine.close()
    models = [build_model("bert", "embeddings"), wrap(build_model("bert", "embeddings"), folders[0])]
    for row, (one, each) in enumerate(zip(found, inputs, strict=True)):
        wanted = expected_outputs(models[row % 2], each, ("last_hidden_state",), per_token=True)
        torch.testing.assert_close(torch.from_numpy(one), wanted, atol=1e-4, rtol=0)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another model's layers": ({"target_modules": ["q_lin"]}, "has, and the model has not, "),
    "another method": ({"target_modules": ["query"], "use_dora": True}, "DoRA"),
    "a norm of its own": ({"target_modules": ["query"], "modules_to_save": ["LayerNorm"]}, "a LayerNorm, and may"),
    "trained biases": ({"target_modules": ["query"], "bias": "all"}, "bias"),
}


@pytest.mark.parametrize("case", WRONG)
def test_adapters_that_do_not_fit_are_refused_and_change_nothing(case: str, tmp_path: Path) -> None:
    config, sentence = WRONG[case]
    family = "distilbert" if config["target_modules"] == ["q_lin"] else "bert"
    folder = save_lora(build_model(family, "sequence"), tmp_path / "lora", 0, **config)
    forward, _ = load_all(build_model("bert", "sequence"), "sequence", [])
    assert forward.adapters is not None
    inputs: list[EncoderInput] = random_inputs(LENGTHS)
    before = forward(inputs)
    with pytest.raises(CheckpointError, match=sentence):
        forward.adapters.load(folder)
    for one, other in zip(before, forward(inputs), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
