# SPDX-License-Identifier: Apache-2.0
"""Summarization, translation and text2text-generation: what they add to text generation by an encoder-decoder.

That is what transformers 4's pipelines of these names did: the settings and the prefix that the checkpoint's config has
for the task (`task_specific_params`), and the languages of multilingual models. Knows no request and no engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import CheckpointError, RequestError, clip
from hf_triton.hub.kind import read_object
from hf_triton.protocol.names import TEXT_TO_TEXT
from hf_triton.sentence import param, param_list

if TYPE_CHECKING:
    from hf_triton.hub.checkpoint import Checkpoint

TEXT_FIELDS: Final[Mapping[str, str]] = {
    "text-generation": "generated_text",
    "text2text-generation": "generated_text",
    "summarization": "summary_text",
    "translation": "translation_text",
}
"""Tasks that generate text, and the field of the text in the output `output`."""
PAIR: Final = re.compile(r"translation_(\w+?)_to_(\w+)")
"""A pair of languages as `task_specific_params` has it."""


@dataclass(frozen=True)
class Direction:
    """How a prompt is given to the model."""

    prefix: str = ""
    """Text that stands before the prompt's."""
    special_ids: tuple[list[int], list[int]] | None = None
    """Tokens before and after the text's own; None: those that the tokenizer adds."""
    first_id: int | None = None
    """The token that the completion begins with; None: as the checkpoint says."""


@dataclass(frozen=True)
class Languages:
    """The languages of a multilingual model's tokenizer (NLLB, M2M100, mBART)."""

    special_ids: Mapping[str, tuple[list[int], list[int]]]
    """The tokens before and after a source text, by its language."""
    first_ids: Mapping[str, int]
    """The token that a translation begins with, by its language."""
    source: str | None
    """The default of `src_lang`."""
    has_target: bool
    """Whether the checkpoint's generation_config says which language to begin with."""

    def direction(self, src_lang: str | None, tgt_lang: str | None) -> Direction:
        source = src_lang or self.source
        for name, language, is_needed in (("src_lang", source, True), ("tgt_lang", tgt_lang, not self.has_target)):
            if language is None and is_needed:
                raise RequestError(
                    "invalid_parameter", f"{param(name)} is missing: name one of the model's languages, {self._names()}"
                )
            if language is not None and language not in self.first_ids:
                raise RequestError(
                    "invalid_parameter", f"{param(name)} must be one of {self._names()}, got {clip(language)}"
                )
        first_id = None if tgt_lang is None else self.first_ids[tgt_lang]
        return Direction(special_ids=self.special_ids[str(source)], first_id=first_id)

    def _names(self) -> str:
        return ", ".join(sorted(self.first_ids))


@dataclass(frozen=True)
class TextToText:
    name: str
    prefix: str = ""
    pairs: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """The prefix for a source and a target language, of models that read the languages as words (T5)."""
    languages: Languages | None = None

    def direction(self, text: str, src_lang: str | None, tgt_lang: str | None) -> Direction:
        """How a prompt is given to the model; raises RequestError if a language is missing, unknown or not taken."""
        if self.languages is not None:
            return self.languages.direction(src_lang, tgt_lang)
        given = next((name for name, value in (("src_lang", src_lang), ("tgt_lang", tgt_lang)) if value), None)
        if not self.pairs:
            if given:
                raise RequestError("invalid_parameter", f"{param(given)} has no effect: this model takes no languages")
            return Direction(self.prefix)
        if not given and text.startswith(tuple(self.pairs.values())):
            return Direction()
        prefix = self.pairs.get((src_lang or "", tgt_lang or ""))
        if prefix is None:
            known = ", ".join(f"{source} and {target}" for source, target in self.pairs)
            got = f"{clip(src_lang)} and {clip(tgt_lang)}" if given else "none"
            raise RequestError(
                "invalid_parameter",
                f"{param_list(('src_lang', 'tgt_lang'), ' and ')} must be one of the pairs {known}, got {got}",
            )
        return Direction(prefix)


def build_text_to_text(name: str | None, checkpoint: Checkpoint) -> TextToText | None:
    """The task of a setting `task`, with its settings in the checkpoint's generation_config; None for text generation.

    Raises:
        CheckpointError: The checkpoint's settings for the task cannot be used.
    """
    if name not in TEXT_TO_TEXT:
        return None
    config = read_object(checkpoint.folder / "config.json")  # transformers 5 keeps no `task_specific_params`
    by_task = config.get("task_specific_params")
    settings = _settings(name, by_task if isinstance(by_task, dict) else {})
    pairs = {}
    if name == "translation" and isinstance(by_task, dict):
        found = {PAIR.fullmatch(key): own for key, own in by_task.items() if isinstance(own, dict)}
        pairs = {(pair[1], pair[2]): str(own.get("prefix", "")) for pair, own in found.items() if pair}
    try:
        own = {key: value for key, value in settings.items() if hasattr(checkpoint.model.generation_config, key)}
        checkpoint.model.generation_config.update(**own)
        checkpoint.generation_defaults(with_beams=True)
    except (RequestError, ValueError, TypeError) as error:
        reason = error.sentence if isinstance(error, RequestError) else error
        raise CheckpointError(
            "unsupported_model", f"config.json has settings for {name} that cannot be used ({reason}): correct them"
        ) from error
    prefix = settings.get("prefix", config.get("prefix"))
    return TextToText(name, prefix if isinstance(prefix, str) else "", pairs, find_languages(checkpoint, name))


def max_new_tokens(checkpoint: Checkpoint) -> int | None:
    """New tokens by the checkpoint's generation_config; None: it says nothing. The first token of a decoder counts."""
    config = checkpoint.model.generation_config
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    return None if config.max_length is None else max(int(config.max_length) - 1, 1)


def find_languages(checkpoint: Checkpoint, task: str) -> Languages | None:
    """The languages of a tokenizer; None if it has none, or if the task needs none."""
    tokenizer = checkpoint.tokenizer
    if task != "translation" or not hasattr(tokenizer, "set_src_lang_special_tokens"):
        return None
    codes = next(
        (found for name in ("lang_code_to_token", "lang_code_to_id") if (found := getattr(tokenizer, name, None))),
        tokenizer.extra_special_tokens,
    )
    before = tokenizer.src_lang
    special_ids, first_ids = {}, {}
    for code in codes:
        tokenizer.src_lang = code
        special_ids[code] = (list(tokenizer.prefix_tokens), list(tokenizer.suffix_tokens))
        first_ids[code] = _first_id(tokenizer, code)
    tokenizer.src_lang = before
    return Languages(
        special_ids,
        first_ids,
        source=tokenizer.init_kwargs.get("src_lang"),
        has_target=checkpoint.model.generation_config.forced_bos_token_id is not None,
    )


def _first_id(tokenizer: Any, code: str) -> int:
    find = getattr(tokenizer, "get_lang_id", tokenizer.convert_tokens_to_ids)  # M2M100's tokens are not its codes
    return int(find(code))


def _settings(name: str, by_task: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for a task; for translation those on which all pairs of languages agree, without prefixes."""
    own = by_task.get(name)
    if name != "translation" or isinstance(own, dict):
        return own if isinstance(own, dict) else {}
    pairs = [settings for key, settings in by_task.items() if PAIR.fullmatch(key) and isinstance(settings, dict)]
    first = pairs[0] if pairs else {}
    return {
        key: value
        for key, value in first.items()
        if key != "prefix" and all(other.get(key) == value for other in pairs)
    }
