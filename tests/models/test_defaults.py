# SPDX-License-Identifier: Apache-2.0
"""The defaults of a request without parameters are validated when a model is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_triton.engine.protocols import Observer
from hf_triton.errors import CheckpointError, SettingsError
from hf_triton.hub.checkpoint import Placement, load_checkpoint
from hf_triton.hub.locate import Hub
from hf_triton.protocol.chat_request import parse_chat
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.runner.cpu import layer_packing
from hf_triton.settings import ModelSettings
from hf_triton.tasks.hooks import Hooks
from hf_triton.tasks.text_generation.prepare import Encoded
from hf_triton.tasks.text_generation.resolve import resolve_task_params
from hf_triton.tasks.text_generation.response_template import shipped_template
from hf_triton.tasks.text_generation.service import TextGenerationService, build_text_generation
from hf_triton.testing import build_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


def build(folder: Path, **defaults: Any) -> None:
    settings = ModelSettings(huggingface_model=str(folder), generation_defaults=defaults, max_num_seqs=4)
    start(folder, settings).close()


def start(folder: Path, settings: ModelSettings, **options: Any) -> TextGenerationService:
    hub = Hub(folder, settings, {})
    loaded = load_checkpoint(hub, settings, Placement("CPU", 0))
    return build_text_generation(
        loaded,
        settings,
        Hooks(),
        hub,
        chat_template=None,
        on_fatal=lambda: None,
        observer=Observer(),
        returns_timings=True,
        **options,
    )


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"eos_token_id": 999_999}, "eos_token_id"),
        ({"n": 2}, "num_return_sequences"),
        ({"n": 40, "temperature": 1.0}, "max_num_seqs"),
        ({"max_new_tokens": 257}, "max_new_tokens <= 255"),
    ],
)
def test_invalid_defaults_are_refused(checkpoint: Path, defaults: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=r"could not be answered .*: change generation_defaults") as raised:
        build(checkpoint, **defaults)
    assert words in raised.value.sentence


@pytest.mark.parametrize(
    ("pack_weights", "words"),
    [("auto", "(chosen by timing, "), (True, " linear layers packed for oneDNN"), (False, "")],
)
def test_pack_weights_is_followed(
    checkpoint: Path,
    pack_weights: Any,
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_packing, "MIN_BYTES", 0)
    caplog.set_level("INFO", "hf_triton")
    start(checkpoint, ModelSettings(huggingface_model=str(checkpoint), pack_weights=pack_weights)).close()
    assert words in caplog.text
    assert (" packed for oneDNN" in caplog.text) == bool(words)


@pytest.mark.parametrize("defaults", [{}, {"n": 4, "temperature": 1.0}, {"guided_choice": ["yes", "no"]}])
def test_valid_defaults_are_accepted(checkpoint: Path, defaults: Any) -> None:
    build(checkpoint, **defaults)


@pytest.mark.parametrize("engine", ["continuous", "batch"])
@pytest.mark.parametrize("given", ["sge", ["sge", "</call>"]])
def test_stop_strings_of_the_checkpoint_are_defaults(engine: Any, given: Any, tmp_path: Path) -> None:
    """`generate` itself refuses such a checkpoint, unless it is given the tokenizer."""
    build_tiny_checkpoint(tmp_path, "llama")
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "stop_strings": given}))
    task = start(tmp_path, ModelSettings(huggingface_model=str(tmp_path), engine=engine))
    try:
        assert task._preparer.prepare_default().asked.stop_strings == (("sge",) if given == "sge" else tuple(given))
    finally:
        task.close()


@pytest.mark.parametrize("given", [5, True, {"a": 1}, [5]])
def test_stop_strings_that_are_none_are_a_sentence(given: Any, tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, "llama")
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "stop_strings": given}))
    settings = ModelSettings(huggingface_model=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"generation_config\.json of .* cannot be loaded .*stop_strings"):
        load_checkpoint(Hub(tmp_path, settings, {}), settings, Placement("CPU", 0))


def test_cache_smaller_than_max_output_length_is_refused(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path, max_position_embeddings=512)
    settings = ModelSettings(huggingface_model=str(tmp_path), max_cache_tokens=256, max_output_length=256)
    with pytest.raises(SettingsError, match=r"could not be answered .*max_cache_tokens.* max_output_length"):
        start(tmp_path, settings)


def test_strict_tools_of_the_folder_are_those_that_do_not_say_otherwise(checkpoint: Path) -> None:
    settings = ModelSettings(huggingface_model=str(checkpoint), strict_tools=True, max_num_seqs=4)
    with pytest.raises(SettingsError, match="strict_tools cannot be kept"):
        start(checkpoint, settings)
    task = start(checkpoint, settings, response_template=shipped_template("hermes"))
    functions = [{"name": "plain"}, {"name": "loose", "strict": False}, {"name": "tight", "strict": True}]
    tools: list[Any] = [{"type": "function", "function": function} for function in functions]
    tools.append({"type": "custom", "custom": {"name": "text"}})
    chat = parse_chat('[{"role": "user", "content": "x"}]', {"tools": tools}, 1000)
    try:
        preparer = task._preparer
        encoded = Encoded(preparer.codec, [0], ("", ""))
        plan = preparer._call_plan(chat, resolve_task_params(), encoded)
        assert plan is not None
        assert ["plain" in grammar.text or "tight" in grammar.text for grammar in plan.tool_grammars()] == [True, True]
        constrained = resolve_task_params(GenerationParameters(guided_regex="a"))
        assert preparer._call_plan(chat, constrained, encoded) is None
    finally:
        task.close()
