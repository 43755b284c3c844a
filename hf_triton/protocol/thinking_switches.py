# SPDX-License-Identifier: Apache-2.0
"""Thinking: what stands between two tags in front of a model's answer, and what a request asks of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables with which chat templates switch thinking on and off."""
NO_EFFORT: Final = "none"
"""The `reasoning_effort` that asks for no thinking."""


@dataclass(frozen=True)
class Thinking:
    """The thinking of a prompt's completions."""

    opening: str
    """The tag in front, `<think>`."""
    closing: str
    """The tag behind."""
    is_open: bool
    """Whether the prompt ends in the block; if not, a completion may open it at its start."""
    budget: int | None = None
    """Tokens after which the block is closed; None: no limit."""
    lead: str = ""
    """What the model writes between the closing tag and its answer, if anything."""
    num_led: int = 0
    """Characters of the lead that the prompt ends with: an answer without thinking begins with the others."""

    @property
    def spellings(self) -> tuple[str, str, str]:
        """What has to be told from text: the tags and the lead."""
        return self.opening, self.closing, self.lead


def switched(variables: Mapping[str, Any]) -> bool | None:
    """Whether a chat's template variables ask for thinking, a switch before the effort; None: they do not say."""
    for name in SWITCHES:
        if isinstance(variables.get(name), bool):
            return bool(variables[name])
    return False if variables.get("reasoning_effort") == NO_EFFORT else None


def unread(variables: Mapping[str, Any], settable: Collection[str]) -> list[str]:
    """The variables of a chat that change no prompt of a template, which reads the `settable` ones."""
    switches = {*SWITCHES, *(["reasoning_effort"] if variables.get("reasoning_effort") == NO_EFFORT else [])}
    read = {*settable, *(switches if not switches.isdisjoint(settable) else ())}
    return [name for name in variables if name not in read]
