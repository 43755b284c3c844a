# SPDX-License-Identifier: Apache-2.0
"""LiteLLM's provider `openai/`: prints what came back as one line of JSON. Argument: the gateway's address."""

import json
import sys
from typing import Any

import litellm

SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look up a word.", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
CHOICE = {"type": "function", "function": {"name": "look_up"}}


def ask(model: str, **options: Any) -> Any:
    where = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "num_retries": 0, "timeout": 60}
    return litellm.completion(f"openai/{model}", [{"role": "user", "content": "Hello!"}], **where, **options)


whole = ask("demo", max_tokens=8, temperature=0)
stream = ask("demo", max_tokens=8, temperature=0, stream=True)
found: dict[str, Any] = {
    "chat": whole.choices[0].message.content,
    "usage": whole.usage.completion_tokens,
    "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
    "structured": json.loads(ask("tiny", max_tokens=200, response_format=FORM).choices[0].message.content),
}
function = ask("tiny", max_tokens=200, tools=[TOOL], tool_choice=CHOICE).choices[0].message.tool_calls[0].function
found["tool"] = {"name": function.name, "arguments": json.loads(function.arguments)}
try:
    ask("nobody")
except litellm.NotFoundError as error:
    found["error"] = {"type": "NotFoundError", "status": error.status_code, "code": "model_not_found"}
    found["error"]["text"] = str(error)
print(json.dumps(found))
