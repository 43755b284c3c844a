# SPDX-License-Identifier: Apache-2.0
"""Example requests that `hf-triton serve` prints, in a form that the named folder accepts."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from hf_triton.openai.config import GatewayConfig
from hf_triton.protocol.task_declaration import TaskDeclaration
from hf_triton.server import TritonServer, open_local

TRY = """
Try, in another terminal:

{requests}

Ctrl+C stops the server.
"""
GENERATE = """  curl -X POST {host}:{port}/v2/models/{name}/generate -d '{{{fields}}}'"""
INFER = """  curl -X POST {host}:{port}/v2/models/{name}/infer \\
    -d '{{"inputs":[{{"name":"text_input","datatype":"BYTES","shape":{shape},"data":["I am going"]}}]}}'"""
STREAM = """  curl -N -X POST {host}:{port}/v2/models/{name}/generate_stream \\
    -d '{{"text_input":"How can you be","stream":true}}'"""
OPENAI = """  curl {host}:{port}/v1/{path} -H 'Content-Type: application/json' {key}\\
    -d '{{"model":"{name}",{prompt}}}'"""
KEY = """-H "Authorization: Bearer $OPENAI_API_KEY" """
PAGE = "\n\nA page to chat on: http://{host}:{port}/"
MESSAGES = '[{"role":"user","content":"How can you be"}]'
PROMPT = '"text_input":"How can you be"'
ENCODERS: Final[Mapping[str, tuple[str, tuple[str, str] | None]]] = {
    "embedding": ('"text":"How far is the harbour?"', ("embeddings", '"input":"How far is the harbour?"')),
    "documents": (
        '"query":"How far is the harbour?","documents":["A mile.","The gulls are loud."]',
        ("rerank", '"query":"How far is the harbour?","documents":["A mile.","The gulls are loud."]'),
    ),
    "question": ('"question":"Who lives here?","context":"Anna lives here."', None),
    "candidate_labels": ('"text":"The harbour is far.","candidate_labels":["places","food"]', None),
    "label": ('"text":"The harbour is beautiful."', ("classify", '"input":"The harbour is beautiful."')),
    "output": ('"text":"Anna lives at the harbour."', None),
}
"""By an input or output that earlier entries lack: fields for a folder of an encoder, and the gateway's endpoint and
fields, if it has one for the task."""


def example_requests(configs: Iterable[Mapping[str, Any]], host: str, http_port: int) -> str:
    """The curl lines for one of the folders, given their configs."""
    config = choose_folder(configs)
    shape = "[1,1]" if config.get("max_batch_size", 0) > 0 else "[1]"
    encoder = _encoder(config)
    lines = [GENERATE] if encoder else [STREAM] if _is_decoupled(config) else [GENERATE, INFER]
    values = {"port": http_port, "name": config["name"], "shape": shape, "fields": encoder[0] if encoder else PROMPT}
    return "\n".join(line.format(host=_reachable(host), **values) for line in lines)


def _encoder(config: Mapping[str, Any]) -> tuple[str, tuple[str, str] | None] | None:
    """The example of a folder with a task of an encoder; None if it generates text."""
    names = {port["name"] for side in ("input", "output") for port in config.get(side, ())}
    return None if "finish_reason" in names else next((ENCODERS[name] for name in ENCODERS if name in names), None)


def config_of_task(name: str, task: TaskDeclaration | None) -> Mapping[str, Any]:
    """What the config of a folder that is not loaded will say of its inputs and outputs; nothing of text generation."""
    ports = {"input": task.input_types, "output": task.all_outputs} if task else {}
    return {"name": name, **{side: [{"name": port} for port in found] for side, found in ports.items()}}


def gateway_request(config: Mapping[str, Any], gateway: GatewayConfig, takes_chats: Callable[[], bool]) -> str:
    """The curl line for the gateway, with the address of its page for text; empty if it has no endpoint for the task.

    `takes_chats` is asked of a folder that generates text.
    """
    encoder = _encoder(config)
    if encoder is None:
        request = OPENAI + PAGE
        chat, plain = ("chat/completions", f'"messages":{MESSAGES}'), ("completions", '"prompt":"How can you be"')
        path, fields = chat if takes_chats() else plain
    elif encoder[1] is None:
        return ""
    else:
        request, (path, fields) = OPENAI, encoder[1]
    key = KEY if gateway.api_key_file is not None else ""
    host = _reachable(gateway.host)
    return request.format(host=host, port=gateway.port, path=path, key=key, name=config["name"], prompt=fields)


def choose_folder(configs: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The folder to show; folders that generate text and accept /infer are preferred."""
    return min(configs, key=lambda config: (_encoder(config) is not None, _is_decoupled(config)))


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
