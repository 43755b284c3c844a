# SPDX-License-Identifier: Apache-2.0
"""Example requests that `hf-triton serve` prints, in a form that the named folder accepts."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from hf_triton.server import TritonServer, open_local

TRY = """
Try, in another terminal:

{requests}

Ctrl+C stops the server.
"""
GENERATE = """  curl -X POST {host}:{port}/v2/models/{name}/generate -d '{{"text_input":"How can you be"}}'"""
INFER = """  curl -X POST {host}:{port}/v2/models/{name}/infer \\
    -d '{{"inputs":[{{"name":"text_input","datatype":"BYTES","shape":{shape},"data":["I am going"]}}]}}'"""
STREAM = """  curl -N -X POST {host}:{port}/v2/models/{name}/generate_stream \\
    -d '{{"text_input":"How can you be","stream":true}}'"""
OPENAI = """  curl {host}:{port}/v1/{path} -H 'Content-Type: application/json' {key}\\
    -d '{{"model":"{name}",{prompt}}}'"""
KEY = """-H "Authorization: Bearer $OPENAI_API_KEY" """
PAGE = "\n\nA page to chat on: http://{host}:{port}/"
MESSAGES = '[{"role":"user","content":"How can you be"}]'


def example_requests(configs: Iterable[Mapping[str, Any]], host: str, http_port: int) -> str:
    """The curl lines for one of the folders, given their configs."""
    config = choose_folder(configs)
    shape = "[1,1]" if config.get("max_batch_size", 0) > 0 else "[1]"
    lines = [STREAM] if _is_decoupled(config) else [GENERATE, INFER]
    return "\n".join(
        line.format(host=_reachable(host), port=http_port, name=config["name"], shape=shape) for line in lines
    )


def openai_request(name: str, host: str, port: int, *, takes_chats: bool, needs_key: bool) -> str:
    """The curl line for the gateway, and the address of its page."""
    path, prompt = "completions", '"prompt":"How can you be"'
    if takes_chats:
        path, prompt = "chat/completions", f'"messages":{MESSAGES}'
    key = KEY if needs_key else ""
    request = OPENAI + PAGE
    return request.format(host=_reachable(host), port=port, path=path, key=key, name=name, prompt=prompt)


def choose_folder(configs: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The folder to show; folders that accept /infer are preferred."""
    return min(configs, key=_is_decoupled)


def takes_chats(server: TritonServer, name: str) -> bool:
    """Whether a model renders a chat, which it does if it has a chat template; generates nothing."""
    body = json.dumps({"messages": MESSAGES, "tokenize_only": True, "stream": False}).encode()
    request = urllib.request.Request(f"{server.http_url}/v2/models/{name}/generate", body)
    try:
        with open_local(request, 30) as response:
            return "error" not in json.load(response)
    except OSError:
        return False


def _reachable(host: str) -> str:
    return "localhost" if host in ("127.0.0.1", "0.0.0.0") else host


def _is_decoupled(config: Mapping[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))
