# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 (DeepSeek's own vertical lines)
"""Prompts whose middle is filled in, as each family's own code writes them."""

import copy
from typing import Any

import pytest

from hf_triton.tasks.text_generation.fill_in import FORMS, find_form
from hf_triton.tasks.text_generation.text_codec import TextCodec
from tests.support.tokenizers import BOS, tokenizer_of

PREFIX, SUFFIX = "The river goes", "  to the sea"


def tokenizer_with(kind: str, *names: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer_of(kind))
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    return tokenizer


def encode(tokenizer: Any) -> list[int]:
    codec = TextCodec(tokenizer, len(tokenizer))
    return codec.encode_around(PREFIX, SUFFIX, "the prompt", adds_special_tokens=True)


@pytest.mark.parametrize(
    "written",
    [
        "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>",
        "<fim_prefix>{}<fim_suffix>{}<fim_middle>",
        "<fim-prefix>{}<fim-suffix>{}<fim-middle>",
        "<｜fim▁begin｜>{}<｜fim▁hole｜>{}<｜fim▁end｜>",
    ],
)
def test_byte_level_models_read_the_text_of_their_readme(written: str) -> None:
    names = written.replace("{}", " ").split()
    tokenizer = tokenizer_with("byte_level", *names)
    assert encode(tokenizer) == tokenizer(written.format(PREFIX, SUFFIX))["input_ids"]


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), (0, "prefix", 1, "suffix", 2)),
        (("[PREFIX]", "[SUFFIX]"), (1, "suffix", 0, "prefix")),
    ],
    ids=["CodeLlama", "Codestral"],
)
def test_sentencepiece_puts_a_space_before_the_prefix_alone(names: tuple[str, ...], order: tuple[Any, ...]) -> None:
    """As `encode_infilling` of Meta's and Mistral's own code: the suffix behind a mark, without the mark's tokens."""
    tokenizer = tokenizer_with("byte_fallback", *names)
    mark = tokenizer("☺", add_special_tokens=False)["input_ids"]
    ids = {
        "prefix": tokenizer(PREFIX, add_special_tokens=False)["input_ids"],
        "suffix": tokenizer("☺" + SUFFIX, add_special_tokens=False)["input_ids"][len(mark) :],
    }
    parts = [ids[part] if isinstance(part, str) else [tokenizer.convert_tokens_to_ids(names[part])] for part in order]
    found = encode(tokenizer)
    assert found == [tokenizer.convert_tokens_to_ids(BOS), *(token_id for part in parts for token_id in part)]
    spelled = {part: "".join(tokenizer.convert_ids_to_tokens(ids[part])).replace("▁", " ") for part in ids}
    assert spelled == {"prefix": f" {PREFIX}", "suffix": SUFFIX}


def test_the_middle_ends_with_any_of_its_family_s_tokens() -> None:
    names = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", "<|file_sep|>")
    tokenizer = tokenizer_with("byte_fallback", *names)
    codec = TextCodec(tokenizer, len(tokenizer))
    ids = tokenizer.convert_tokens_to_ids(names)
    assert codec.fill_in_ends == set(ids[:4])
    assert TextCodec(tokenizer, ids[3]).fill_in_ends == set(ids[:3]), "the model has no fourth"


def test_tokens_are_one_family_s() -> None:
    for form in FORMS:
        names = {form.prefix, form.suffix, form.middle} - {""}
        assert find_form(dict.fromkeys(names, 1)) is form
        assert find_form(dict.fromkeys(names - {form.suffix}, 1)) is None
