# SPDX-License-Identifier: Apache-2.0
"""Response templates: which one tells a model's tool calls and reasoning from its content, and how messages are read.

A response template is transformers' JSON form of what a chat template writes: regions of a message between delimiters.
It is the folder's (setting `response_template`), else the checkpoint's own, else one of `response_templates/`, which
are found by words in the chat template.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import regex  # type: ignore[import-untyped]

from hf_triton.errors import RequestError, SettingsError, clip, where
from hf_triton.grammar.free_calls import CallPlan, Calls
from hf_triton.protocol.call_forms import CallForm, call_grammar, last_letter, read_call_forms, typed_schema
from hf_triton.protocol.chat_request import Chat
from hf_triton.protocol.structured_output import Grammar
from hf_triton.protocol.thinking_switches import Thinking
from hf_triton.protocol.validation import suggest
from hf_triton.sentence import param
from hf_triton.tasks.text_generation.message import (
    MessagePlan,
    NamedCallReader,
    RequiredCallReader,
    ThinkingReader,
)
from hf_triton.tasks.text_generation.response_parser import (
    CALL_TAGS,
    MAX_SEARCH_S,
    REASONING,
    TOOL_CALLS,
    TemplateReader,
)
from hf_triton.tasks.text_generation.tag_calls import KEY, VALUE, CallTags

logger = logging.getLogger(__name__)

FOLDER: Final = Path(__file__).parent / "response_templates"
NONE: Final = "none"
"""The setting that switches parsing off."""
CALL_ID: Final = "call_id"
"""Our own key of a response template: the form of the ids of tool calls, where the chat template writes them."""
MAX_TEMPLATE_BYTES: Final = 1_000_000
MAX_TAGS: Final = 128
"""Characters of the tags around thinking, and of what comes behind them."""
TAGS: Final = "thinking"
"""Our own key of a response template: the tags around thinking, where those of its fields are no strings."""
CALLS: Final = "calls"
"""Our own key of a response template: the forms in which the model writes calls, as `call_forms` has them."""
WHOLE_CALL: Final = {"type": "function", "function": "{content}"}
"""The transform of calls that are objects of name and arguments."""
Spec = Mapping[str, Any]


class MessageFormat:
    """How a model's completions become messages.

    Args:
        spec: The response template; None: all is content.
        special_tokens: The tokens without text, by id, as the vocabulary spells them.
        has_short_ids: Whether the model's chat template demands short ids of tool calls.

    Raises:
        ValueError: It is not a response template.
    """

    def __init__(self, spec: Spec | None, special_tokens: Mapping[int, str], *, has_short_ids: bool = False) -> None:
        self._special_tokens = special_tokens
        self._has_short_ids = has_short_ids
        self._call_id = "" if spec is None else spec.get(CALL_ID, "")
        self._with_tools = self._without_tools = _Template(None)
        if spec is not None:
            if not isinstance(self._call_id, str):
                raise ValueError(f"{CALL_ID} must be a string")
            self._with_tools = _Template(spec, special_tokens)
            fields = {name: value for name, value in spec["fields"].items() if name != TOOL_CALLS}
            self._without_tools = _Template({**spec, "fields": fields} if fields else None, special_tokens)
        self.reasons = spec is not None and not REASONING.isdisjoint(spec["fields"])
        """Whether messages may have reasoning."""
        self._tags = None if spec is None else _tags_of(spec)
        if self.reasons and self._tags is None:
            logger.info("a constraint holds for thinking too: the response template does not name its tags")
        try:
            self._openings = [(form, _TimedPattern(regex.compile(form.opening))) for form in _forms_of(spec)]
        except regex.error as error:
            raise ValueError(f"{CALLS}: {error}") from None
        self.can_hold_calls = bool(self._openings)
        """Whether free text may have calls that a grammar holds."""

    def thinking(self, prompt: str) -> Thinking | None:
        """The tags of the thinking that completions of a prompt may begin with.

        Returns:
            None: the messages have none, its tags are patterns, or the prompt holds the whole block or the answer's
            beginning.
        """
        if self._tags is None:
            return None
        opening, closing, lead = self._tags
        message = self._with_tools.end_of(prompt)
        if message.rfind(opening) > message.rfind(closing):
            return Thinking(opening, closing, is_open=True, lead=lead)
        num_led = next(num for num in range(len(lead), -1, -1) if prompt.endswith(lead[:num]))
        if message.strip() or prompt.rstrip().endswith(closing) or 0 < len(lead) == num_led:
            return None
        return Thinking(opening, closing, is_open=False, lead=lead, num_led=num_led)

    def call_plan(self, chat: Chat, prompt: str, held: Collection[str]) -> CallPlan:
        """How calls in the free text of a prompt's completions are held; arguments are by the schemas of `held` tools.

        Raises:
            RequestError: The model writes calls in no form that can be held; or its form has no writing for a tool.
        """
        if not self._openings:
            raise RequestError(
                "invalid_parameter",
                f"{param('tools')}: {clip(min(held))} is strict, and the form in which this model writes calls cannot "
                f"be enforced in free text: say {param('tool_choice')} required or strict false, or set the folder's "
                "response_template to one with calls (docs/chat.md)",
            )
        template = self._with_tools
        fields = [] if template.compiled is None else template.compiled.fields.items()
        thinking = next(((field.open_re, field.close_re) for name, field in fields if name in REASONING), None)
        tools = chat.tools or ()
        calls = [
            Calls(
                pattern,
                last_letter(form.opening),
                call_grammar(form, tools, held, is_parallel=chat.is_parallel),
                form.is_free_behind,
            )
            for form, pattern in self._openings
        ]
        form = self._openings[0][0]

        def alone() -> Iterator[Grammar]:
            for tool in tools:
                if tool["function"]["name"] in held:
                    yield call_grammar(form, [tool], held, is_parallel=False)

        return CallPlan(calls, alone, thinking, frozenset(template.markers), template.end_of(prompt))

    def plan(
        self, chat: Chat | None, prompt: str, *, is_constrained: bool, thinking: Thinking | None = None
    ) -> MessagePlan:
        """How the completions of a prompt are read; output that the request or the folder constrains is content."""
        if is_constrained and thinking is not None:
            build_answer = self.plan(chat, prompt, is_constrained=True).build_reader
            words = "\n".join(thinking.spellings)
            markers = {token_id: text for token_id, text in self._special_tokens.items() if text in words}
            return MessagePlan(partial(ThinkingReader, build_answer, thinking), markers)
        options = {
            "has_short_ids": self._has_short_ids,
            "call_id": self._call_id,
            "num_past_calls": sum(len(past.get("tool_calls", ())) for past in chat.messages) if chat else 0,
            "custom_names": chat.custom_names if chat else frozenset(),
        }
        if chat is not None and (call := chat.forced_call) is not None:
            if call.name is not None:
                return MessagePlan(partial(NamedCallReader, call.name, is_input=call.is_input, **options))
            return MessagePlan(partial(RequiredCallReader, call.input_names, **options))
        template = self._with_tools if chat is not None and chat.tools else self._without_tools
        if is_constrained or template.compiled is None:
            return MessagePlan()
        build = partial(
            TemplateReader,
            template.compiled,
            template.end_of(prompt),
            [template.typed_tool(tool) for tool in chat.tools or ()] if chat is not None else [],
            is_parallel=chat is None or chat.is_parallel,
            **options,
        )
        return MessagePlan(build, template.markers)


class _Template:
    """A compiled response template, or none."""

    def __init__(self, spec: Spec | None, special_tokens: Mapping[int, str] | None = None) -> None:
        self.compiled = None if spec is None else _compile(spec)
        words = [re.sub(r"\\(.)", r"\1", text) for text in _strings({} if spec is None else spec["fields"])]
        self.markers = {
            token_id: text for token_id, text in (special_tokens or {}).items() if any(text in word for word in words)
        }

    def typed_tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        """A tool whose schemas tell what the texts of arguments are: in JSON, a text that may be one stays one."""
        from transformers.utils.chat_parsing.response_parser import _schema_types

        assert self.compiled is not None
        field, function = self.compiled.fields.get(TOOL_CALLS), tool["function"]
        root = {"type": "object", **function.get("parameters", {})}
        if field is None or not isinstance(properties := root.get("properties"), dict):
            return dict(tool)
        typed = {name: typed_schema(schema, root) for name, schema in properties.items()}
        if field.content == "json" and CALL_TAGS not in field.content_args:
            typed = {name: schema for name, schema in typed.items() if "string" not in _schema_types(schema)}
        return {**tool, "function": {**function, "parameters": {**root, "properties": typed}}}

    def end_of(self, prompt: str) -> str:
        """The part of a prompt that belongs to the message."""
        assert self.compiled is not None
        end = None
        try:
            for match in self.compiled.start_anchor_re.finditer(prompt):
                end = match.end()
        except TimeoutError as error:
            logger.warning("the response template fails for the end of a prompt, which it ignores: %s", where(error))
            return ""
        return "" if end is None else prompt[end:]


def _tags_of(spec: Spec) -> tuple[str, str, str] | None:
    """The tags around reasoning, and the lead behind; None: no reasoning, or patterns or several tags delimit it.

    Raises:
        ValueError: The template's own `thinking` does not name tags.
    """
    field: Mapping[str, Any] = next((field for name, field in spec["fields"].items() if name in REASONING), {})
    named = spec.get(TAGS, {name: field.get(name) for name in ("open", "close")})
    if isinstance(named, Mapping) and {"open", "close"} <= named.keys() <= {"open", "close", "lead"}:
        given = named["open"], named["close"], named.get("lead", "")
        tags = [text.strip() for text in given if isinstance(text, str)]
        if len(tags) == 3 and "" != tags[0] != tags[1] != "" and len("".join(tags)) <= MAX_TAGS:
            return tags[0], tags[1], tags[2]
    if TAGS in spec:
        raise ValueError(
            f"{TAGS} must be an object of open and close, two different strings, and perhaps lead, of up to {MAX_TAGS} "
            "characters together"
        )
    return None


def _forms_of(spec: Spec | None) -> tuple[CallForm, ...]:
    """The forms of calls that a template names; or the one of a JSON object between two tags, if calls are that."""
    if spec is None or TOOL_CALLS not in spec["fields"]:
        return ()
    if CALLS in spec:
        return read_call_forms(spec[CALLS])
    field = spec["fields"][TOOL_CALLS]
    opening, closing, is_whole = field.get("open"), field.get("close"), field.get("transform") == WHOLE_CALL
    if field.get("content") != "json" or not (isinstance(opening, str) and isinstance(closing, str) and is_whole):
        return ()
    return (CallForm(re.escape(opening), (f"{{space}}{{call}}{{space}}{closing}",)),)


class _TimedPattern:
    """A compiled pattern of a checkpoint, which may take exponential time: its searches raise `TimeoutError`."""

    def __init__(self, pattern: Any) -> None:
        self.finditer = partial(pattern.finditer, timeout=MAX_SEARCH_S)
        self.match = partial(pattern.match, timeout=MAX_SEARCH_S)
        self.search = partial(pattern.search, timeout=MAX_SEARCH_S)


def _compile(spec: Spec) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    own = (TAGS, CALL_ID, CALLS)
    template = load_response_template({name: value for name, value in spec.items() if name not in own})
    template.start_anchor_re = _TimedPattern(template.start_anchor_re)
    for field in template.fields.values():
        field.open_re = field.open_re and _TimedPattern(field.open_re)
        field.close_re = field.close_re and _TimedPattern(field.close_re)
        if "tag_pattern" in str(field.content_args.get("value_parser")):
            raise ValueError(f"{field.name}: a value_parser with a tag_pattern of its own is not supported")
        if field.name == TOOL_CALLS and field.close_re and (tags := _call_tags(field)) is not None:
            field.content, field.content_args = "json", {CALL_TAGS: tags}
    return template


def _call_tags(field: Any) -> CallTags | None:
    """The tags of a call whose values are any text between two patterns; None: it is of another form."""
    head, _, tail = field.content_args.get("tag_pattern", "").partition(VALUE)
    if field.content != "xml-inline" or field.content_args.keys() > {"tag_pattern"} or KEY not in head or not tail:
        return None
    patterns = (_TimedPattern(regex.compile(pattern, regex.DOTALL)) for pattern in (head, tail))
    return CallTags(field.open_re, field.close_re, *patterns)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(entry)


# --- which one -------------------------------------------------------------------------------------------------------


def shipped_names() -> list[str]:
    """The names of the response templates that come with this package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def shipped_markers() -> dict[str, list[str]]:
    """The words in a chat template that each of them is found by."""
    return {name: _read(FOLDER / f"{name}.json")["markers"] for name in shipped_names()}


def shipped_families() -> dict[str, str]:
    """The families of models that write by each of them; the files also name where their form is from."""
    return {name: _read(FOLDER / f"{name}.json")["families"] for name in shipped_names()}


def shipped_template(name: str) -> Spec:
    """One of the response templates that come with this package."""
    spec: Spec = _read(FOLDER / f"{name}.json")["response_template"]
    return spec


def load_response_template(setting: str | None, model_folder: Path) -> Spec | str | None:
    """Read the folder's response template: a shipped one's name, `none`, or a JSON file, relative to the folder.

    Returns:
        The response template; `NONE`; or None if the folder does not say.

    Raises:
        SettingsError: There is no such template, or it is not one.
    """
    if setting is None or setting == NONE:
        return setting
    if setting in shipped_names():
        return shipped_template(setting)
    path = model_folder / setting
    try:
        path = model_folder / Path(setting).expanduser()
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise SettingsError(f"response_template names {path}, which has more than {MAX_TEMPLATE_BYTES} bytes")
        spec: Spec = _read(path)
        MessageFormat(spec, {})
    except (OSError, RuntimeError) as error:  # there is none, or the home of an unknown user
        if "/" not in setting and not setting.endswith(".json"):
            hint = suggest(setting, [*shipped_names(), NONE], "docs/chat.md")
            raise SettingsError(f"there is no response_template '{setting}'{hint}; or name a JSON file") from None
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"response_template names {path}, which cannot be read ({reason})") from None
    except UnicodeDecodeError:
        raise SettingsError(f"response_template names {path}, which is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise SettingsError(f"response_template names {path}, which is not JSON: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise SettingsError(f"response_template names {path}, which is not a response template: {reason}") from None
    return spec


def build_message_format(
    folder_template: Spec | str | None,
    tokenizer: Any,
    chat_template: str | None,
    special_tokens: Mapping[int, str],
) -> MessageFormat:
    """How the completions of a loaded model become messages; the log says by which response template."""
    own = getattr(tokenizer, "chat_template", None) or ""
    text = chat_template or ("\n".join(own.values()) if isinstance(own, dict) else own)
    build = partial(MessageFormat, special_tokens=special_tokens, has_short_ids="length != 9" in text)
    if folder_template == NONE:
        return build(None)
    if isinstance(folder_template, Mapping):
        logger.info("messages are read by the response template that the folder names")
        return build(folder_template)
    if (spec := getattr(tokenizer, "response_template", None)) is not None:
        try:
            made = build(spec)
        except Exception as error:  # of a template that is not one, as the checkpoint has it
            logger.warning("the checkpoint's response template is ignored: %s", " ".join(str(error).split())[:300])
        else:
            logger.info("messages are read by the checkpoint's own response template")
            return made
    name = detect(text)
    if name is not None:
        logger.info("messages are read by the response template '%s', which fits the chat template", name)
    elif text:
        logger.info("no response template fits the chat template: messages have neither tool calls nor reasoning")
    return build(None if name is None else shipped_template(name))


def detect(chat_template: str) -> str | None:
    """The shipped response template with the most markers of all whose markers are in a chat template; None: none."""
    markers = shipped_markers()
    fitting = [name for name, words in markers.items() if all(word in chat_template for word in words)]
    return max(fitting, key=lambda name: (len(markers[name]), name), default=None)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
