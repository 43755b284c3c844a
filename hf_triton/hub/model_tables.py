# SPDX-License-Identifier: Apache-2.0
"""transformers' own tables of its models, by name. Imports neither transformers, which takes a second, nor torch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

SOURCE: Final = "models/auto/modeling_auto.py"
PREFIXES: Final = ("MODEL_FOR_", "MODEL_")
SUFFIX: Final = "_MAPPING_NAMES"

Table = Mapping[str, tuple[str, ...]]
"""The classes of each model type."""


@cache
def model_tables() -> Mapping[str, Table]:
    """The tables by their names, `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES` as `CAUSAL_LM`; that of bare models is `BASE`.

    They are literals in transformers' source, which is read in place of importing it: that would load torch. Empty if a
    version of transformers keeps them elsewhere.
    """
    spec = importlib.util.find_spec("transformers")  # finds it, and does not import it
    places = [Path(folder) / SOURCE for folder in (spec and spec.submodule_search_locations) or ()]
    source = next((place.read_text(encoding="utf-8") for place in places if place.exists()), "")
    tables: dict[str, Table] = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[ast.List(elts=rows)])):
                if name.startswith("MODEL_") and name.endswith(SUFFIX):
                    tables[_short(name)] = dict(_rows(rows, tables))
    return tables


@cache
def tables_of_class(name: str) -> frozenset[str]:
    """The tables that have a class; none if transformers has no such model."""
    return frozenset(table for table, rows in model_tables().items() if any(name in names for names in rows.values()))


@cache
def tables_of_family(name: str) -> frozenset[str]:
    """The tables that have any class of the model types which a class is for."""
    tables = model_tables()
    types = {model_type for rows in tables.values() for model_type, names in rows.items() if name in names}
    return frozenset(table for table, rows in tables.items() if not types.isdisjoint(rows))


def _short(name: str) -> str:
    bare = name.removesuffix(SUFFIX)
    return next((bare.removeprefix(prefix) for prefix in PREFIXES if bare.startswith(prefix)), "BASE")


def _rows(entries: list[ast.expr], tables: Mapping[str, Table]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The rows `("bert", "BertModel")` of a table, and those of another one, `*list(NAME.items())`."""
    for entry in entries:
        match entry:
            case ast.Starred(value=ast.Call(args=[ast.Call(func=ast.Attribute(value=ast.Name(id=other)))])):
                yield from tables[_short(other)].items()
            case _:
                model_type, names = ast.literal_eval(entry)
                yield model_type, (names,) if isinstance(names, str) else tuple(names)
