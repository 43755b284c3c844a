# SPDX-License-Identifier: Apache-2.0
"""Renders a checked chat as a prompt, by the tokenizer's chat template or the folder's.

A template is code by the author of the model or the folder. It runs in transformers' sandbox, without access to files,
processes and Python's internals; nothing stops it from looping forever or filling the memory. Messages are data to the
template and never parsed as Jinja.

Messages are tokenized as they are, as in transformers, vLLM and TGI: a user who writes `<|im_end|>` writes that token
and can end the message. Applications that insert untrusted content must remove such strings.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import RequestError, SettingsError, clip
from hf_triton.protocol.chat_request import RESERVED, Chat
from hf_triton.protocol.names import MESSAGES, PROMPT
from hf_triton.protocol.thinking_switches import SWITCHES, switched, unread
from hf_triton.sentence import param, plain
from hf_triton.tasks.text_generation.conversation_form import text_of
from hf_triton.tasks.text_generation.form_finder import FormFinder, names_role

MAX_TEMPLATE_ERROR: Final = 300  # characters of a template's own error message
MAX_LOGGED: Final = 100  # names of variables
ROLES: Final = "system", "developer", "user", "assistant", "tool", "function"
"""The roles of OpenAI's API."""

logger = logging.getLogger(__name__)


class ChatTemplate:
    """Renders chats as prompts. Thread-safe.

    Args:
        text: A Jinja template to use instead of the tokenizer's own, which may be several, one of them for tools.
        max_bytes: Limit of a rendered chat, as UTF-8.
        of_images: The template of chats with images, unless there is `text`; None: the tokenizer's.
    """

    def __init__(self, tokenizer: Any, text: str | None, max_bytes: int, of_images: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._of_images = of_images
        self._max_bytes = max_bytes
        self._finder = FormFinder(tokenizer)
        self._unread: set[str] = set()

    def render_images(self, chat: Chat, placeholder: str) -> str:
        """The prompt of a chat with images, with a placeholder for each; a template without parts gets them as text.

        Args:
            chat: The chat.
            placeholder: What stands for an image; empty: it is not known, and not looked for.

        Raises:
            RequestError: As `render`, or the template loses images, or a text of the chat has placeholders.
        """
        if not placeholder:  # the processor says what it misses
            return self.render(chat)
        as_text = [message | {"content": text_of(message["content"], placeholder)} for message in chat.messages]
        texts = "\n".join(text_of(message["content"]) for message in chat.messages)
        if placeholder in texts:
            raise RequestError(
                "invalid_input",
                f"{param(MESSAGES)} must not have the text {placeholder}, which stands for an image of this model",
            )
        refusal: RequestError | None = None
        for form in (chat, replace(chat, messages=tuple(as_text))):
            try:
                text = self.render(form)
            except RequestError as error:
                refusal = refusal or error
                continue
            if text.count(placeholder) == len(chat.images):
                return text
        raise refusal or RequestError(
            "invalid_input",
            f"the model's chat template does not write the {len(chat.images)} images of {param(MESSAGES)} there: put "
            "them into messages of the user",
        )

    def render(self, chat: Chat) -> str:
        """The prompt, to be tokenized without adding special tokens: the template writes them all.

        Raises:
            RequestError: The model has no template, or the template rejects the chat, ignores its tools, drops a part
                of the conversation or renders too much.
        """
        template = self._choose(chat)
        _check_roles(chat.messages, template)
        variables = self._read_variables(chat, template)
        forms = self._finder.forms(chat, template, variables)
        for form in forms:
            try:
                text = self._finder.write(chat, template, variables, form, continues=chat.continue_final_message)
                break
            except Exception as error:  # a template is a program and may raise anything
                if form is forms[-1]:
                    raise _render_error(error) from None
        self._check_text(text)
        return text

    def _choose(self, chat: Chat) -> str:
        if self._text is not None:
            return self._text
        if chat.images and self._of_images is not None:
            return self._of_images
        if not self._tokenizer.chat_template:
            raise RequestError(
                "invalid_input",
                f"this model has no chat template, so it cannot take {param(MESSAGES)}: send {param(PROMPT)}, or "
                "name a Jinja file in the folder's setting chat_template",
            )
        try:
            template: str = self._tokenizer.get_chat_template(tools=chat.tools)
        except ValueError:
            names = ", ".join(sorted(self._tokenizer.chat_template))
            raise RequestError(
                "invalid_input",
                f"this model has the chat templates {names} but no default one: name a Jinja file in the folder's "
                "setting chat_template",
            ) from None
        return template

    def info(self) -> dict[str, Any]:
        """What `ModelInfo` says of the chat template; of several, what any of them reads."""
        own = self._text or self._tokenizer.chat_template
        if not own:
            return {}
        names: set[str] = set()
        for template in own.values() if isinstance(own, dict) else [own]:
            with contextlib.suppress(Exception):  # it is not Jinja, and refuses its requests
                names |= variables_of(template)
        return {"template_variables": tuple(sorted(self._settable(names))), "reads_tools": "tools" in names}

    def _settable(self, names: Set[str]) -> Set[str]:
        """The variables of a template that a request may set."""
        return names - RESERVED - set(self._tokenizer.special_tokens_map)

    def _read_variables(self, chat: Chat, template: str) -> dict[str, Any]:
        """The variables that the template reads; others are hints, which change no prompt.

        Raises:
            RequestError: The template would silently ignore the tools.
        """
        try:
            names = variables_of(template)
        except Exception as error:
            raise _render_error(error) from None
        if chat.tools is not None and chat.forced_call is None and "tools" not in names:
            sentence = f"this model's chat template does not support {param('tools')}: leave them out"
            raise RequestError("invalid_parameter", sentence)
        settable = self._settable(names)
        self._log_unread(unread(chat.template_kwargs, settable))
        thinks = switched(chat.template_kwargs)
        given = chat.template_kwargs if thinks is None else {**dict.fromkeys(SWITCHES, thinks), **chat.template_kwargs}
        return {name: value for name, value in given.items() if name in settable}

    def _log_unread(self, names: Iterable[str]) -> None:
        """Log the first request of each variable that the template does not read; clients choose the names."""
        for name in names:
            if name not in self._unread and len(self._unread) < MAX_LOGGED and re.fullmatch(r"\w{1,64}", name):
                self._unread.add(name)
                logger.info("passed over: %s, which the chat template does not read", name)

    def _check_text(self, text: str) -> None:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise RequestError("invalid_input", "the chat template renders a prompt that is not UTF-8") from None
        if num_bytes > self._max_bytes:
            raise RequestError(
                "context_exceeded",
                f"the chat template renders {param(MESSAGES)} as {num_bytes} bytes, more than the {self._max_bytes} "
                "that are accepted (setting max_prompt_bytes)",
                sizes={"bytes": num_bytes, "limit": self._max_bytes},
            )


def _check_roles(messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """Refuse a role that neither OpenAI's API nor the template knows: many templates would write any word."""
    for index, role in enumerate(message["role"] for message in messages):
        if role not in ROLES and not names_role(template, role):
            raise RequestError(
                "invalid_input",
                f"{param(f'{MESSAGES}[{index}].role')} must be {', '.join(ROLES)} or one that the model's chat "
                f"template names, got {clip(role)}",
            )


def _render_error(error: Exception) -> RequestError:
    """The error that a template raised itself, or the failure in it."""
    from jinja2 import TemplateError

    reason = plain(" ".join(str(error)[:MAX_TEMPLATE_ERROR].split()))
    if type(error) is TemplateError:  # of `raise_exception` in the template
        return RequestError("invalid_input", f"the model's chat template rejects this: {reason}")
    kind = type(error).__name__
    return RequestError("invalid_input", f"the model's chat template cannot render this ({kind}: {reason})")


@lru_cache
def variables_of(template: str) -> frozenset[str]:
    """The variables that a template reads and does not set; raises jinja2.TemplateSyntaxError if it is not Jinja."""
    from jinja2 import Environment, meta, nodes, parser
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """transformers' `{% generation %}`, which marks the assistant's content."""

        tags = {"generation"}

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return frozenset(meta.find_undeclared_variables(Environment(extensions=[loopcontrols, Generation]).parse(template)))


def load_chat_template(setting: str | None, model_folder: Path) -> str | None:
    """Read the file that the setting `chat_template` names, relative to the model folder; None if it names none.

    Raises:
        SettingsError: The file cannot be read, or is not Jinja.
    """
    if setting is None:
        return None
    from jinja2 import TemplateSyntaxError

    path = model_folder / setting
    try:
        path = model_folder / Path(setting).expanduser()
        template = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SettingsError(f"chat_template names {path}, which is not UTF-8") from None
    except (OSError, ValueError, RuntimeError) as error:  # an impossible path, or the home of an unknown user
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"chat_template names {path}, which cannot be read ({reason})") from None
    try:
        variables_of(template)
    except RecursionError:
        raise SettingsError(f"chat_template names {path}, which is nested too deeply") from None
    except TemplateSyntaxError as error:
        raise SettingsError(f"chat_template names {path}, which is not Jinja: line {error.lineno}: {error}") from None
    return template
