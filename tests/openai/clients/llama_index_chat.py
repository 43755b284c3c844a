# SPDX-License-Identifier: Apache-2.0
"""LlamaIndex's OpenAILike: prints what came back as one line of JSON. Argument: the gateway's address."""

import json
import sys
from typing import Any

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

HELLO = [ChatMessage(role="user", content="Hello!")]
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


def model(name: str, **options: Any) -> OpenAILike:
    where = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "max_retries": 0}
    kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 256}
    return OpenAILike(model=name, **where, **kind, **options)


def look_up(yes: bool) -> str:
    """Look up a word."""
    return str(yes)


demo, tiny = model("demo", temperature=0, max_tokens=8), model("tiny", max_tokens=200)
found: dict[str, Any] = {
    "chat": demo.chat(HELLO).message.content,
    "stream": "".join(chunk.delta or "" for chunk in demo.stream_chat(HELLO)),
    "structured": json.loads(tiny.chat(HELLO, response_format=FORM).message.content or ""),
}
tool = FunctionTool.from_defaults(look_up)
answer = tiny.chat_with_tools([tool], "Hello!", tool_required=True)
call = tiny.get_tool_calls_from_response(answer)[0]
found["tool"] = {"name": call.tool_name, "arguments": call.tool_kwargs}
try:
    model("nobody").chat(HELLO)
except openai.NotFoundError as error:
    found["error"] = {"type": "NotFoundError", "status": error.status_code, "code": error.code, "text": str(error)}
print(json.dumps(found))
