# SPDX-License-Identifier: Apache-2.0
"""The lines of a file of API keys: a key and what it may ask for. No error quotes what may be a key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from hf_triton.errors import SettingsError, clip
from hf_triton.protocol.validation import problems, suggest
from hf_triton_gateway.triton.triton_messages import ADAPTER_MARK

COMMENT: Final = re.compile(rb"(^|\s)#.*", re.DOTALL)
EVERY_KEY: Final = b"*"
"""Stands in place of a key on a line with the limits of every key that has none of its own."""
UNLIMITED: Final = "none"
NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Limit = Annotated[int, annotated_types.Ge(1), annotated_types.Le(10**15)]


class KeyLineError(SettingsError):
    """A line of the file is wrong."""


class Quota(BaseModel):
    """What one API key may ask for; None: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = ""
    """What metrics and errors call the key: letters, digits, `_`, `.` and `-`. By default `key-N`, the Nth of the
    file."""

    requests_per_minute: Limit | None = None
    """Requests in a minute."""

    tokens_per_minute: Limit | None = None
    """Tokens of prompts and completions in a minute."""

    tokens_per_day: Limit | None = None
    """The same in 24 hours."""

    concurrent_requests: Limit | None = None
    """Requests in flight."""

    models: tuple[str, ...] | None = None
    """Models that it may use, `llama,bge`; each with its adapters."""

    private_cache: bool | None = None
    """`true`: its prompts share the KV cache of a prefix with its own alone, so that neither `cached_tokens` nor times
    tell what other keys have sent."""

    admin: bool | None = None
    """`true`: it may put models to sleep and wake them."""

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError("name must be 1 to 64 letters, digits, _, . and -")
        return name

    @field_validator("models", mode="before")
    @classmethod
    def _split(cls, models: str | None) -> list[str] | None:
        names = None if models is None else models.split(",")
        for name in names or ():
            if not name or ADAPTER_MARK in name:
                raise ValueError(f"models must be names of models, without adapters, got {clip(name)}")
        return names


def read_lines(lines: Iterable[bytes], file: str) -> dict[bytes, Quota]:
    """The keys of a file, each with what it may ask for."""
    own: dict[bytes, dict[str, str | None]] = {}
    numbers: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        key, *words = COMMENT.sub(b"", line).split() or [b""]
        if not key:
            continue
        limits = _read_limits(key, words, f"{file}, line {number}")
        if own.setdefault(key, limits) != limits:
            raise KeyLineError(f"{file}, line {number} gives the key of line {numbers[key]} other limits")
        numbers.setdefault(key, number)
    every = own.pop(EVERY_KEY, {})
    names: dict[str, int] = {}
    quotas: dict[bytes, Quota] = {}
    for index, (key, limits) in enumerate(own.items(), 1):
        quota = quotas[key] = _checked({"name": f"key-{index}", **every, **limits}, f"{file}, line {numbers[key]}")
        if names.setdefault(quota.name, numbers[key]) != numbers[key]:
            raise KeyLineError(f"{file}, line {numbers[key]}: line {names[quota.name]} has the name {quota.name} too")
    return quotas


def _read_limits(key: bytes, words: Sequence[bytes], place: str) -> dict[str, str | None]:
    """The limits behind a key, as text; None: no limit."""
    if key.partition(b"=")[0].decode(errors="replace") in Quota.model_fields:
        raise KeyLineError(f"{place} begins with a limit: write the key before it")
    values: dict[str, str | None] = {}
    for position, word in enumerate(words, 2):
        name, mark, value = word.decode(errors="replace").partition("=")
        if not mark or name not in Quota.model_fields:  # it may be a key
            hint = suggest(name if mark else "", Quota.model_fields)
            raise KeyLineError(f"{place}: word {position} must be a limit, NAME=VALUE{hint}")
        if name in values or (name == "name" and key == EVERY_KEY):
            reason = "twice" if name in values else "for all keys: it is that of one"
            raise KeyLineError(f"{place} has {name} {reason}")
        values[name] = None if value == UNLIMITED and name != "name" else value
    _checked(values, place)
    return values


def _checked(values: dict[str, str | None], place: str) -> Quota:
    try:
        return Quota.model_validate(values)
    except ValidationError as error:
        raise KeyLineError(f"{place}: {problems(Quota, error)[0].sentence}") from None
