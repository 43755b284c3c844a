# SPDX-License-Identifier: Apache-2.0
"""LangChain's ChatOpenAI: prints what came back as one line of JSON. Argument: the gateway's address."""

import json
import sys
from typing import Any

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

SCHEMA = {
    "title": "answer",
    "description": "An answer.",
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}


@tool
def look_up(yes: bool) -> str:
    """Look up a word."""
    return str(yes)


def model(name: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, **options)


demo, tiny = model("demo", temperature=0, max_tokens=8), model("tiny", max_tokens=200)
whole = demo.invoke("Hello!")
assert whole.usage_metadata is not None
found: dict[str, Any] = {
    "chat": whole.content,
    "usage": whole.usage_metadata["output_tokens"],
    "stream": "".join(str(chunk.content) for chunk in demo.stream("Hello!")),
    "structured": tiny.with_structured_output(SCHEMA, method="json_schema").invoke("Hello!"),
}
call = tiny.bind_tools([look_up], tool_choice="look_up").invoke("Hello!").tool_calls[0]
found["tool"] = {"name": call["name"], "arguments": call["args"]}
try:
    model("nobody").invoke("Hello!")
except openai.NotFoundError as error:
    found["error"] = {"type": "NotFoundError", "status": error.status_code, "code": error.code, "text": str(error)}
print(json.dumps(found))
