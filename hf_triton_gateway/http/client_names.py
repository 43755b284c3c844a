# SPDX-License-Identifier: Apache-2.0
"""What a client of an API calls the fields, places and rows of a request to Triton: errors are worded with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

ELSEWHERE: Final = "a prompt to /v1/completions"
"""What chats call the text of a request that has no conversation."""
_PATH: Final = re.compile(r"(\w+)(?:\[(\d+)\])?(.*)", re.DOTALL)
_INNER: Final = re.compile(r"^\.(function|custom)\b")
"""The object in which the chat's API alone has a tool's fields."""


@dataclass(frozen=True)
class ClientNames:
    """A client's names of ours; see `hf_triton.sentence.Names`."""

    names: Mapping[str, str | None] = field(default_factory=dict)
    """The client's name by ours, of a field or a place in it; None: it has no such field. Others have our names."""
    fields: Collection[str] | None = None
    """The fields that the client can send; None: any."""
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The places of a field's elements in the client's request: `{"messages": ["system", "input[0]"]}`."""
    rows: Sequence[int | str] = range(1 << 31)
    """The client's numbers of rows, or their places; empty: it sent one."""
    subject: str | None = None
    """The field that errors about a text are about, if they name none."""

    def of(self, path: str) -> str:
        """The client's name of a field, or of a place in it."""
        if (name := self.names.get(path)) is not None:
            return name
        match = _PATH.fullmatch(path)
        if match is None:
            return path
        head, index, rest = match.groups()
        name = self.names.get(head) or head
        if index is None or head not in self.places:
            return path.replace(head, name, 1)
        places = self.places[head]
        if int(index) < len(places):
            return places[int(index)] + _INNER.sub("", rest)
        return f"{name}[{index}]{_INNER.sub('', rest)}" if not places else name + rest

    def knows(self, path: str) -> bool:
        """Whether the client can send the field."""
        is_named = self.names.get(path, path) is not None
        return is_named and (self.fields is None or head_of(self.of(path)) in self.fields)

    def words(self, path: str) -> str:
        """The client's name of a field or a place in it. What it cannot send is the folder's."""
        return self.of(path) if self.knows(path) or self.names.get(path) is not None else f"the folder's {path}"

    def param(self, path: str | None) -> str | None:
        """The client's name of a field that is at fault; None: it has none."""
        return self.of(path).partition(" ")[0] if path is not None and self.knows(path) else None

    def row(self, number: int) -> int | str | None:
        """The client's number of a row, or its place; None: it sent one."""
        return self.rows[number] if number < len(self.rows) else None

    def under(self, outer: ClientNames) -> ClientNames:
        """The names of a client whose request became one of another API, which has these names."""
        names = {own: outer.of(name) for own, name in self.names.items() if name is not None}
        return ClientNames({**names, **outer.names}, outer.fields, outer.places, self.rows)


def head_of(path: str) -> str:
    """The field that a place is in."""
    return re.split(r"[.\[ ]", path, maxsplit=1)[0]


OWN_NAMES: Final = ClientNames()
"""The names of a client that has ours."""
