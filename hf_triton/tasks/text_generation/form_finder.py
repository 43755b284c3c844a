# SPDX-License-Identifier: Apache-2.0
"""Finds the form of a conversation that a chat template writes in full.

A template writes what its model was trained on, and may drop the rest without a word. So, once for each shape of
conversation, its texts and calls are replaced by marks, and the first form is taken in which every mark is written. How
calls may be written at all, a short conversation tells, which has all that they may come with.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from hf_triton.errors import RequestError, clip
from hf_triton.protocol.chat_request import ASSISTANT, Chat
from hf_triton.protocol.names import MESSAGES
from hf_triton.sentence import param
from hf_triton.tasks.text_generation.conversation_form import (
    AS_IT_IS,
    AS_TEXT,
    CALL_FORMS,
    CALLS,
    CALLS_TOOL,
    DEVELOPER,
    Form,
    Message,
    Part,
    forms_of_roles,
    lacking_fields,
    lost_parts,
    marked,
    parts_of,
    shape,
)

MAX_SHAPES: Final = 256  # of conversations, whose forms are known
PROBE: Final = "probe"

logger = logging.getLogger(__name__)


class FormFinder:
    """Writes conversations in any form, and finds the form for a template. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._needs_parts = lru_cache(self._probe_parts)
        self._known: dict[Hashable, Sequence[Form]] = {}
        self._has_lost_texts = False

    def forms(self, chat: Chat, template: str, variables: Mapping[str, Any]) -> Sequence[Form]:
        """The form of a chat that a template writes in full; all that there are if it fails with each.

        Raises:
            RequestError: It writes a part of the chat in no form.
        """
        given = tuple((name, value if isinstance(value, bool) else bool(value)) for name, value in variables.items())
        setting = (template, given, chat.tools is not None, chat.add_generation_prompt)
        lacking = lacking_fields(chat.tools or ())
        key = (*setting, lacking, shape(chat.messages))
        forms = self._known.get(key)
        if forms is None:
            call_forms: Sequence[Form] = (AS_IT_IS,)
            if any("tool_calls" in message for message in chat.messages):
                call_forms = self._known.get(setting) or self._find_call_forms(chat, template, variables)
                self._keep(setting, call_forms)
            candidates = forms_of_roles(
                call_forms, names_developer=names_role(template, DEVELOPER), may_fill=bool(lacking)
            )
            forms = self._find(chat, template, variables, list(candidates))
            self._keep(key, forms)
        return forms

    def write(
        self, chat: Chat, template: str, variables: Mapping[str, Any], form: Form, *, continues: bool = False
    ) -> str:
        """The prompt of a chat in a form, in its last message if it `continues`; raises what the template does."""
        messages = form.messages(chat.messages)
        tools = None if chat.tools is None else form.tools(chat.tools)
        return self._write(chat, template, variables, messages, tools, continues=continues)

    def _write(
        self,
        chat: Chat,
        template: str,
        variables: Mapping[str, Any],
        messages: list[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        continues: bool = False,
    ) -> str:
        if self._needs_parts(template):
            messages = [_with_parts(message) for message in messages]
        begins = chat.add_generation_prompt
        return self._apply(
            template, messages, tools=tools, add_generation_prompt=begins, continue_final_message=continues, **variables
        )

    def _apply(self, template: str, messages: list[Message], **arguments: Any) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments)
        return text

    def _keep(self, key: Hashable, forms: Sequence[Form]) -> None:
        if len(self._known) >= MAX_SHAPES:
            self._known.clear()
        self._known[key] = forms

    def _find_call_forms(self, chat: Chat, template: str, variables: Mapping[str, Any]) -> Sequence[Form]:
        """Calls as they are, the form of which a template writes most, and text.

        A template may lose some of what it writes elsewhere, such as texts before an answer.
        """
        marks, tools = marked(CALLS), None if chat.tools is None else [CALLS_TOOL]
        num_lost: dict[Form, int] = {}
        for form in CALL_FORMS:
            with contextlib.suppress(Exception):  # a template is a program and may raise anything
                text = self._write(chat, template, variables, form.messages(marks), tools)
                num_lost[form] = len(lost_parts(marks, text))
                if num_lost[form] == 0:
                    break
        best = min(num_lost, key=num_lost.__getitem__, default=Form(json_arguments=True))
        return tuple(dict.fromkeys((AS_IT_IS, best, AS_TEXT)))  # what a model has called is never lost

    def _find(
        self, chat: Chat, template: str, variables: Mapping[str, Any], candidates: Sequence[Form]
    ) -> Sequence[Form]:
        marks = marked(chat.messages)
        tried: list[tuple[bool, list[Message]]] = []
        forms: list[Form] = []
        without_texts: list[Form] = []  # that lose what may be lost
        least: list[Part] | None = None
        for form in candidates:
            messages = form.messages(marks)
            if (form.fills_tools, messages) in tried:
                continue
            tried.append((form.fills_tools, messages))
            forms.append(form)
            tools = None if chat.tools is None else form.tools(chat.tools)
            try:
                text = self._write(chat, template, variables, messages, tools)
            except Exception:  # as above
                continue
            parts = lost_parts(marks, text)
            if not parts and not (form.calls_as_text and without_texts):
                return (form,)
            lost = [part for part in parts if not _is_beside_calls(part, marks, parts)]
            if not lost:
                without_texts.append(form)
            elif least is None or len(lost) < len(least):
                least = lost
        if without_texts:
            self._log_lost_text()
            return (without_texts[0],)
        if least is not None:
            raise _lost_error(least[0], chat.messages)
        return forms

    def _log_lost_text(self) -> None:
        if not self._has_lost_texts:
            self._has_lost_texts = True
            logger.warning("the chat template writes no text beside an assistant's tool calls: it is left out")

    def _probe_parts(self, template: str) -> bool:
        """Whether a template reads content only as an array of parts, and would drop a string."""
        message = {"role": "user", "content": PROBE}
        return not self._shows(template, message) and self._shows(template, _with_parts(message))

    def _shows(self, template: str, message: Message) -> bool:
        try:
            return PROBE in self._apply(template, [message])
        except Exception:  # as above
            return False


def names_role(template: str, role: str) -> bool:
    """Whether a role stands in a template as a string."""
    return f"'{role}'" in template or f'"{role}"' in template


def _with_parts(message: Message) -> Message:
    """A message with its content as OpenAI's array of parts."""
    return message | {"content": parts_of(message["content"])}


def _is_beside_calls(part: Part, messages: Sequence[Message], lost: Sequence[Part]) -> bool:
    """Whether a part is an assistant's text whose calls are written: what a model has said is no client's to mend."""
    message = messages[part.index]
    has_calls = message["role"] == ASSISTANT and "tool_calls" in message
    return has_calls and not part.is_call and Part(part.index, is_call=True) not in lost


def _lost_error(part: Part, messages: Sequence[Message]) -> RequestError:
    place = f"{MESSAGES}[{part.index}]{'.tool_calls' if part.is_call else ''}"
    role = messages[part.index]["role"]
    return RequestError(
        "invalid_input",
        f"{param(place)} of role {clip(role)} would be lost: the model's chat template does not write it there; "
        "leave it out, or send its text in a message of another role",
    )
