# SPDX-License-Identifier: Apache-2.0
"""The prompts of a checkpoint of sentence-transformers, chosen by a request's `prompt_name`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.task_declaration import TaskOptions
from hf_triton.protocol.validation import suggest
from hf_triton.sentence import param


class PromptOptions(TaskOptions):
    """Request parameters of models whose texts may get a prompt."""

    prompt_name: str | None = None
    """Name of the prompt that stands before each text, of those in config_sentence_transformers.json. By default its
    `default_prompt_name`; an empty name stands for no prompt."""


@dataclass(frozen=True)
class SentencePrompts:
    """What may stand before a text."""

    texts: Mapping[str, str]
    default: str | None
    """Name of the prompt for requests that name none."""

    def check(self, name: str | None) -> None:
        """Check a request's `prompt_name`, empty for no prompt; raises RequestError if there is no such prompt."""
        if name and name not in self.texts:
            known = suggest(name, self.texts) if self.texts else "; it has none"
            raise RequestError(
                "invalid_parameter", f"{param('prompt_name')} must be a prompt of the model, got {clip(name)}{known}"
            )

    def name(self, given: str | None) -> str:
        """The name of the prompt for a request's `prompt_name`; empty for none."""
        return (self.default if given is None else given) or ""

    def text(self, given: str | None) -> str:
        """The prompt for a request's `prompt_name`; empty for none."""
        return self.texts.get(self.name(given), "")
