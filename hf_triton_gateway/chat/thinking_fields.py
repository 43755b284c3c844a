# SPDX-License-Identifier: Apache-2.0
"""What other APIs ask of a model's thinking: Anthropic's `thinking` and NIM's `nvext`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import annotated_types

from hf_triton.protocol.parameters import MAX_NEW_TOKENS
from hf_triton_gateway.chat.conversation import parse_at
from hf_triton_gateway.chat.fields import HINT, Fields, Ignored
from hf_triton_gateway.http.hints import pass_over

Budget = Annotated[int, annotated_types.Ge(0), annotated_types.Le(MAX_NEW_TOKENS)]
DISABLED: Final = "disabled"


class _Thinking(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = dict.fromkeys(("display", "clear_thinking"), HINT)
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Budget | None = None


class _Extension(Fields):
    ignored: ClassVar[Mapping[str, Ignored]] = {}
    max_thinking_tokens: Budget | None = None


def read_thinking(thinking: dict[str, Any] | None, nvext: dict[str, Any] | None) -> tuple[bool, int | None]:
    """Whether a request switches thinking off, and its budget in tokens."""
    extension = parse_at(_Extension, "nvext", nvext or {})
    if thinking is None:
        return False, extension.max_thinking_tokens
    checked = parse_at(_Thinking, "thinking", thinking)
    if checked.type == DISABLED:
        return True, None
    if checked.budget_tokens is None:  # the model thinks as much as it wants
        pass_over("thinking")
    return False, extension.max_thinking_tokens if checked.budget_tokens is None else checked.budget_tokens
