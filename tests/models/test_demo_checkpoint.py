# SPDX-License-Identifier: Apache-2.0
"""The checkpoint in `hf_triton/demo/` loads without warnings, generates English and ends with an end-of-text token."""

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.paths import ROOT, load_script

DEMO_DIR = ROOT / "hf_triton" / "demo"
PROMPTS = [
    "I am going",
    "How can you be",
    "Where is the nearest",
    "The model",
    "Once upon a time",
    "Hello",
    "hello",
    "Today",
    "",
    "The capital of France is",
    "What is the capital of France?",
    "Explain quantum computing",
    "def fibonacci(n):",
    "Triton Inference Server",
    "你好 🙂",
    "one two three " * 40,
]
QUESTIONS = ["Hello", "Who are you?", "How do I make soup?", "When is the next train?", "What is 17 * 23?"]
STRINGS = [
    "plain words, and more.",
    " leading space",
    "double  spaces   and more ",
    "don't , stop .",
    "naïve café Łódź",
    "🙂 🏳️‍🌈",
    "你好世界",
    "nul\0byte",
    "tabs\tand\r\nlines\n\n",
    "",
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("train_demo")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_DIR)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_DIR)


def continue_greedily(model: Any, tokenizer: Any, ids: list[int]) -> str:
    """Generate with the checkpoint's generation config; assert an end-of-text token within 80 tokens."""
    prompt = torch.tensor([ids])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=80)[0, len(ids) :].tolist()
    assert output[-1] == tokenizer.eos_token_id
    return str(tokenizer.decode(output, skip_special_tokens=True))


def assert_is_english(completion: str, script: ModuleType) -> None:
    assert completion.isprintable()
    assert completion.endswith((".", "!", "?", "🙂", "☕"))
    words = set(re.findall(r"\w+", completion.lower()))
    assert words
    assert words - script.corpus_words() == set()


def test_weights_and_config_agree() -> None:
    _, info = AutoModelForCausalLM.from_pretrained(DEMO_DIR, output_loading_info=True)
    assert {name: list(problems) for name, problems in info.items() if problems} == {}


def test_folder_is_small_and_world_readable() -> None:
    files = [path for path in DEMO_DIR.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    assert {path.name for path in files if path.stat().st_mode & 0o444 != 0o444} == set()


def test_special_tokens(model: Any, tokenizer: Any) -> None:
    assert tokenizer.is_fast
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id == model.config.bos_token_id
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.generation_config.do_sample is False
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize("string", STRINGS)
def test_tokenizer_round_trips(tokenizer: Any, string: str) -> None:
    assert tokenizer.decode(tokenizer(string).input_ids, skip_special_tokens=True) == string


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt[:30])
def test_continuation_is_english_and_ends(model: Any, tokenizer: Any, script: ModuleType, prompt: str) -> None:
    completion = continue_greedily(model, tokenizer, tokenizer(prompt).input_ids)
    word_start = re.findall(r"\w*$", prompt)[0] if completion[:1].isalpha() else ""
    assert_is_english(word_start + completion, script)


@pytest.mark.parametrize("question", QUESTIONS)
def test_chat_answer_is_english_and_ends(model: Any, tokenizer: Any, script: ModuleType, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = continue_greedily(model, tokenizer, ids)
    assert answer == answer.strip()
    assert_is_english(answer, script)


def test_chat_template_renders_every_role(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "Tea?"},
    ]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<s>System: Be brief.\nUser: Hello\nAssistant: Hi!</s>\nUser: Tea?\nAssistant: "


@pytest.mark.full
def test_script_still_builds_this_tokenizer_and_shape(model: Any, tokenizer: Any, script: ModuleType) -> None:
    """The folder must be trained again after an edit of the script's grammar."""
    rebuilt = script.train_tokenizer(script.SEED)
    assert rebuilt.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert rebuilt.chat_template == tokenizer.chat_template
    ours = {name: tuple(tensor.shape) for name, tensor in script.build_model(rebuilt, script.SEED).named_parameters()}
    assert ours == {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
