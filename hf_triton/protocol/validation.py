# SPDX-License-Identifier: Apache-2.0
"""Declared fields: pydantic's errors as our sentences, fields as documentation, JSON and booleans as values.

Settings and request parameters are pydantic models with attribute docstrings. This module alone words a field's type,
range and default, so that error messages and tables agree.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, from_json

from hf_triton.errors import RequestError, clip
from hf_triton.sentence import param as named
from hf_triton.sentence import text

Declared = TypeVar("Declared", bound=BaseModel)
MAX_NAME: Final = 60  # characters of an unknown name that are compared: megabytes would take seconds
MAX_LISTED: Final = 8
"""Known names that an error lists if none is close."""
NUM_NEAR: Final = 3
"""Names that an error lists of more."""
SLIP_LIKENESS: Final = 0.8
"""A name this like a known one is a slip of the pen."""
MIN_LIKENESS: Final = 0.6
"""A name at least this like another, from 0 to 1, is taken for it misspelt."""
NUMBERS: Final = re.compile(r"\d+", re.ASCII)
MAX_ENTRIES: Final = 1024  # of an array or object: pydantic words an error for each, which takes minutes for millions
MAX_LEVELS: Final = 200  # of nesting: pydantic's parser reads no more
MAX_TOKEN_IDS: Final = 2**18
MAX_JSON: Final = 2**21  # characters; other requests wait while JSON is parsed
TYPE_NAMES: Final[Mapping[type, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a JSON object",
    list: "a JSON array",
}
ELEMENT_TYPES: Final[Mapping[str, type]] = {"string_type": str, "int_type": int, "dict_type": dict, "list_type": list}
"""The type that an element should have, by pydantic's kind of error."""


@dataclass(frozen=True)
class Problem:
    name: str
    open_sentence: str
    """The sentence, with its names left open."""
    is_missing: bool = False

    @property
    def sentence(self) -> str:
        """The sentence in our own names."""
        return text(self.open_sentence)


def problems(model: type[BaseModel], error: ValidationError) -> list[Problem]:
    """The first problem of each field: its name, the allowed values and the value."""
    by_name: dict[str, Problem] = {}
    errors = error.errors(include_url=False)
    for details in errors:
        if details["loc"] and str(details["loc"][0]) in by_name:
            continue
        problem = _element_problem(model, details, errors) or _problem(model, details)
        by_name.setdefault(problem.name, problem)
    return list(by_name.values())


def validated(model: type[Declared], values: Mapping[str, object]) -> Declared:
    """An instance of a model of request parameters; a `RequestError` is about the first impossible value."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise RequestError("invalid_parameter", problems(model, error)[0].open_sentence) from None


def value_type(model: type[BaseModel], name: str) -> tuple[type, bool]:
    """The Python type of a field's values or of their elements, and whether it takes an array.

    A literal has the type of its values, a dictionary of any kind is a `dict`; `| None` says nothing.
    """
    plain = _plain(next(each for each in _members(model.model_fields[name].annotation) if each is not type(None)))
    is_array = typing.get_origin(plain) is tuple
    element = _plain(typing.get_args(plain)[0]) if is_array else plain
    if typing.get_origin(element) is Literal:
        return type(typing.get_args(element)[0]), is_array
    return typing.get_origin(element) or element, is_array


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _plain(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _problem(model: type[BaseModel], details: Any) -> Problem:
    name = str(details["loc"][0]) if details["loc"] else ""
    if details["type"] == "missing":
        return Problem(name, f"{named(name)} is required", is_missing=True)
    if details["type"] == "value_error":  # raised by a validator of ours, which words the sentence
        return Problem(name, details["msg"].removeprefix("Value error, "))
    got, wanted = details["input"], allowed(model.model_fields[name])
    if details["type"] == "too_short" and isinstance(got, list):
        return Problem(name, f"{named(name)} must have at least one {name.removesuffix('s')}")
    if details["type"] == "string_too_long":
        reason = f", which has {len(got)}"
    else:
        reason = json_error(got) if "JSON" in wanted else ""
    if (choices := _choices(model.model_fields[name].annotation)) and isinstance(got, str):
        return Problem(name, f"{named(name)} {_wrong_choice(got, choices, wanted)}")
    return Problem(name, f"{named(name)} must be {wanted}, got {clip(got)}{reason}")


def _choices(annotation: Any) -> list[str]:
    """The strings that a field takes, if it takes no others."""
    members = [_plain(each) for each in _members(annotation) if each is not type(None)]
    if any(typing.get_origin(each) is not Literal for each in members):
        return []
    return [choice for each in members for choice in typing.get_args(each) if isinstance(choice, str)]


def _wrong_choice(got: str, choices: Sequence[str], wanted: str) -> str:
    """`must be one of ..., got ..., did you mean ...?`; a near one stands in place of more than `MAX_LISTED`."""
    is_long = len(choices) > MAX_LISTED
    near = difflib.get_close_matches(got[:MAX_NAME], choices, n=1, cutoff=MIN_LIKENESS)
    if not near and (numbers := NUMBERS.findall(got[:MAX_NAME])):  # `4bit` for `int4`
        near = [choice for choice in choices if NUMBERS.findall(choice) == numbers]
    hint = f", did you mean '{near[0]}'?" if near else ""
    return f"has no value {clip(got)}{hint}" if near and is_long else f"must be {wanted}, got {clip(got)}{hint}"


def _element_problem(model: type[BaseModel], details: Any, errors: Sequence[Any]) -> Problem | None:
    """The wrong element of a list, by the declared alternatives that read the list farthest; None: it is no list."""
    name = str(details["loc"][0]) if details["loc"] else ""
    field = model.model_fields.get(name)
    if field is None or not any(typing.get_origin(_plain(each)) is list for each in _members(field.annotation)):
        return None
    inside = [each for each in errors if each["loc"][0] == name and (_position(each) or each["type"] == "too_long")]
    wrong = [each for each in inside if each["type"] == "too_long"][:1]
    if not wrong:
        position = max(map(_position, inside), default=())
        wrong = [each for each in inside if _position(each) == position]
    if not wrong:
        return None
    got, place = wrong[0]["input"], named(name + "".join(f"[{index}]" for index in _position(wrong[0])))
    if wrong[0]["type"] == "too_long":
        most = wrong[0]["ctx"]["max_length"]
        return Problem(name, f"{place} has {len(got)} items, more than the {most} that are accepted")
    return Problem(name, f"{place} must be {' or '.join(dict.fromkeys(map(_element_words, wrong)))}, got {clip(got)}")


def _element_words(details: Any) -> str:
    """What an element should be; pydantic's own words for what is no type."""
    kind = ELEMENT_TYPES.get(details["type"])
    return TYPE_NAMES[kind] if kind else details["msg"].removeprefix("Input should be ")


def _position(details: Any) -> tuple[int, ...]:
    """The position of an error's value in its list; empty: it is the whole field."""
    return tuple(part for part in details["loc"][1:] if isinstance(part, int))


def parse_json(text: str, most: int = MAX_JSON) -> Any:
    """Parse JSON of up to `most` characters.

    Raises:
        ValueError: Says what is wrong: syntax, NaN, half a surrogate pair, nesting, a number of thousands of digits.
    """
    if len(text) > most:
        raise ValueError(f"it has more than {most} characters")
    return from_json(text, allow_inf_nan=False)


def is_nested_deeply(text: str) -> bool:
    """Whether JSON is not read since it has more than `MAX_LEVELS` levels."""
    try:
        parse_json(text)
    except ValueError as error:
        return "recursion limit" in str(error)
    return False


def json_error(value: object) -> str:
    """Why a string that looks like JSON is none, to end a sentence with; otherwise empty."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            parse_json(value)
        except ValueError as error:
            deep = f", which has more than {MAX_LEVELS} levels of nesting"
            return deep if is_nested_deeply(value) else f", which is not JSON: {error}"
    return ""


def allowed(field: FieldInfo) -> str:
    """The values that a field takes, in words: `a number >= 0 and <= 100`."""
    return _type_words(field.annotation, tuple(field.metadata))


def _type_words(annotation: Any, constraints: tuple[object, ...] = ()) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_words(arguments[0], arguments[1:])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_words(member) for member in arguments if member is not type(None)))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:  # declared with `read_one_or_many` or `read_strings`
        return f"{_type_words(arguments[0])} or a JSON array of {_length_words(constraints)} of them"
    if origin is dict and arguments[1] is not Any:
        name, value = map(_type_words, arguments)
        return f"a JSON object of {_length_words(constraints)} entries, each name {name}, each value {value}"
    if words := [entry.documentation for entry in constraints if isinstance(entry, annotated_types.DocInfo)]:
        return words[0]
    if annotation is str and _length_bounds(constraints)[1] is not None:
        return f"a string of {_length_words(constraints)} characters"
    if annotation is str and _length_bounds(constraints)[0]:
        return "a non-empty string"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return TYPE_NAMES[dict]
    limits = [text for constraint in constraints if (text := _limit_words(constraint))]
    return " ".join([TYPE_NAMES[origin or annotation], " and ".join(limits)]).strip()


def _length_bounds(constraints: tuple[object, ...]) -> tuple[int, int | None]:
    """Minimum and maximum length of a string or an array; None: no maximum."""
    least = [limit.min_length for limit in constraints if isinstance(limit, annotated_types.MinLen)]
    most = [limit.max_length for limit in constraints if isinstance(limit, annotated_types.MaxLen)]
    return max(least, default=0), min(most, default=None)


def _length_words(constraints: tuple[object, ...]) -> str:
    least, most = _length_bounds(constraints)
    return f"{least} to {most}" if least else f"up to {most}"


def _limit_words(constraint: object) -> str:
    match constraint:
        case annotated_types.Ge(ge=bound):
            return f">= {bound}"
        case annotated_types.Gt(gt=bound):
            return f"> {bound}"
        case annotated_types.Le(le=bound):
            return f"<= {bound}"
    return ""


def is_slip(name: str, known: Iterable[str]) -> bool:
    """Whether a name was meant to be one that exists."""
    return bool(difflib.get_close_matches(name[:MAX_NAME], known, n=1, cutoff=SLIP_LIKENESS))


def suggest(name: str, known: Iterable[str], page: str = "", words: Callable[[str], str] = str) -> str:
    """`, did you mean 'top_p'?` if a known name is close, otherwise all names.

    Args:
        name: As given.
        known: The names that exist.
        page: The document that lists them; in place of more than `MAX_LISTED` names come the nearest, and this page.
        words: How a known name stands in the sentence: `param` leaves it open.
    """
    names = sorted(known)
    if close := difflib.get_close_matches(name[:MAX_NAME], names, n=1, cutoff=MIN_LIKENESS):
        return f", did you mean '{words(close[0])}'?"
    if not page or len(names) <= MAX_LISTED:
        return f"; known are {', '.join(map(words, names))}" if names else ""
    near = [words(each) for each in difflib.get_close_matches(name[:MAX_NAME], names, n=NUM_NEAR, cutoff=0.0)]
    return f"; the nearest are {', '.join(near[:-1])} and {near[-1]}, and {page} lists all"


# --- reading: a value that cannot be read is returned as it is, and the type check refuses it ------------------------


def parse_boolean(text: str) -> bool | str:
    spellings: Mapping[str, bool] = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    return spellings.get(text.strip().lower(), text)


def read_json(value: object) -> object:
    """Parse a string as JSON; other values are parsed already."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def read_one_or_many(value: object) -> object:
    """Read one value or an array, either possibly as JSON, as a tuple."""
    return _tuple(read_json(value))


def read_token_ids(value: object) -> object:
    """Read one token id or an array, up to the first element that is none: one error is enough of many."""
    ids = read_json(value)
    if not isinstance(ids, list | tuple):
        return (ids,)
    _check_num_entries(ids, MAX_TOKEN_IDS)
    wrong = (index for index, each in enumerate(ids) if type(each) is not int or not 0 <= each < 2**31)
    return tuple(ids[: next(wrong, len(ids)) + 1])


def read_strings(value: object) -> object:
    """Read one string or an array as a tuple. A string may be a JSON array; an empty one stands for no strings."""
    if value == "":
        return ()
    return _tuple(read_json(value) if isinstance(value, str) and value.lstrip().startswith("[") else value)


def read_words(value: object) -> object:
    """Read as `read_strings` does, without empty strings, which neither stop nor forbid anything."""
    words = read_strings(value)
    return tuple(word for word in words if word != "") if isinstance(words, tuple) else words


def read_integer_keys(value: object) -> object:
    """Read an object with integer keys, which JSON writes as strings."""
    value = read_json(value)
    if not isinstance(value, dict):
        return value
    _check_num_entries(value)
    return {_read_integer(key): entry for key, entry in value.items()}


def _read_integer(key: object) -> object:
    """Parse JSON's spelling of an integer only: "01" beside "1" would overwrite an entry."""
    return int(key) if isinstance(key, str) and re.fullmatch("0|[1-9][0-9]{0,18}", key) else key


def _tuple(value: object) -> tuple[object, ...]:
    if not isinstance(value, list | tuple):
        return (value,)
    _check_num_entries(value)
    return tuple(value)


def _check_num_entries(value: Sized, most: int = MAX_ENTRIES) -> None:
    if len(value) > most:
        raise PydanticCustomError("too_long", "too many entries")


def reject_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The `object_pairs_hook` of request parameters; without it, the last of two equal names would win."""
    values: dict[str, object] = {}
    for name, value in pairs:
        if name in values:
            raise RequestError("invalid_parameter", f"{clip(name)} is given twice: give it once")
        values[name] = value
    return values


def table(model: type[BaseModel], extra: Mapping[str, str] | None = None) -> str:
    """A model's fields as a Markdown table: name with `extra` words, values, default and meaning."""
    lines, found = ["| name | values | default | meaning |", "|---|---|---|---|"], meanings(model)
    for name, field in model.model_fields.items():
        meaning = found.get(name, "")
        values = allowed(field)
        lines.append(f"| `{name}`{(extra or {}).get(name, '')} | {values} | {default_words(field)} | {meaning} |")
    return "\n".join(lines)


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """What a model's fields mean, each in a line: their attribute docstrings.

    pydantic would read them where the class is made, in every process of a folder, which needs none of them.
    """
    found = {}
    for each in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        for field, after in itertools.pairwise(getattr(definition, "body", ())):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def default_words(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    default = field.get_default(call_default_factory=True)
    if default is None or default == {} or default == "":
        return "-"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
