# SPDX-License-Identifier: Apache-2.0
"""Tools of the Responses API: the names that the model knows, and those that answers have."""

from typing import Any

import pytest

from hf_triton_gateway.agents.response_tools import ResponseTools
from hf_triton_gateway.http.api_errors import ApiError


def function(name: str, **fields: object) -> dict[str, Any]:
    return {"type": "function", "name": name, **fields}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "", "tools": list(tools)}


def read(*tools: object) -> ResponseTools:
    made = ResponseTools()
    for index, tool in enumerate(tools):
        made.add(f"tools[{index}]", tool)
    return made


def names(tools: ResponseTools) -> list[str]:
    return [tool[tool["type"]]["name"] for tool in tools.tools]


def test_tools_of_namespaces_are_flat_and_named_back() -> None:
    tools = read(
        function("f"), namespace("a", function("f"), {"type": "custom", "name": "c"}), namespace("b__", function("g"))
    )
    assert names(tools) == ["f", "a__f", "a__c", "b__g"]
    assert tools.places == ["tools[0]", "tools[1].tools[0]", "tools[1].tools[1]", "tools[2].tools[0]"]
    called = {name: tools.name_of(name) for name in ("f", "a__f", "c", "g", "gone")}
    assert called == {"f": ("f", None), "a__f": ("f", "a"), "c": ("c", "a"), "g": ("g", "b__"), "gone": ("gone", None)}


def test_a_name_of_two_namespaces_is_not_guessed() -> None:
    tools = read(namespace("a", function("f")), namespace("b", function("f")))
    assert tools.name_of("f") == ("f", None)


def test_the_last_definition_of_a_tool_counts() -> None:
    tools = read(function("f", description="old"), {"type": "web_search"}, function("f", description="new"))
    assert [tool["function"]["description"] for tool in tools.tools] == ["new"]
    assert tools.places == ["tools[2]"]


def test_tools_are_counted_while_they_are_read() -> None:
    many = [namespace(f"n{index}", *(function(f"f{number}") for number in range(100))) for index in range(20)]
    with pytest.raises(ApiError, match=r"tools\[10\]\.tools\[\d+\] is one tool too many"):
        read(*many)


def test_two_tools_that_the_model_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(ApiError, match="another tool"):
        read(namespace("a", function("f")), function("a__f"))


@pytest.mark.parametrize("named", [{"name": "f", "namespace": "a"}, {"name": "f"}, {"name": "a__f"}])
def test_a_choice_is_of_the_flat_name(named: dict[str, str]) -> None:
    tools = read(namespace("a", function("f")))
    chosen = {"type": "function", "function": {"name": "a__f"}}
    assert tools.choice({"type": "function", **named}) == chosen
    allowed = tools.choice(
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}, {"type": "custom", **named}]}
    )
    assert allowed == {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [chosen]}}
