# SPDX-License-Identifier: Apache-2.0
"""Example requests that `hf-triton serve` prints, in a form that the named folder accepts."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hf_triton.cli.doors import encoder_declaration, mask_token
from hf_triton.openai.config import GatewayConfig
from hf_triton.protocol.task_declaration import AUDIO, TaskDeclaration
from hf_triton.server import TritonServer, open_local

READY: Final = """
Triton        http://{host}:{http_port} (gRPC {grpc_port}, metrics {metrics_port}){gateway}
{requests}
Ctrl+C stops the server."""
REQUESTS: Final = """
Try, in another terminal:

{requests}
"""
GATEWAY: Final = """
OpenAI's API  {url}/v1
Page          {url}/"""
GENERATE = """  curl -X POST {host}:{port}/v2/models/{name}/generate -d '{{{fields}}}'"""
STREAM = """  curl -N -X POST {host}:{port}/v2/models/{name}/generate_stream \\
    -d '{{"text_input":"How can you be","stream":true}}'"""
OPENAI = """  curl {address}/v1/{path} -H 'Content-Type: application/json' {key}\\
    -d '{{"model":"{name}",{fields}}}'"""
SPEECH = """  curl {address}/v1/audio/transcriptions {key}-F model={name} -F file=@speech.wav"""
KEY = """-H "Authorization: Bearer $OPENAI_API_KEY" """
MESSAGES = '[{"role":"user","content":"How can you be"}]'
PROMPT = '"text_input":"How can you be"'
CHAT: Final = ("chat/completions", f'"messages":{MESSAGES}')
COMPLETION: Final = ("completions", '"prompt":"How can you be"')
PIXEL: Final = "R0lGODlhAQABAIAAAP///wAAACH5BAEAAAAALAAAAAABAAEAAAICRAEAOw=="
"""An image of one pixel."""
TakesChats = Callable[[str], bool]
ENCODERS: Final[Mapping[str, tuple[str, tuple[str, str] | None]]] = {
    "embedding": ('"text":"How far is the harbour?"', ("embeddings", '"input":"How far is the harbour?"')),
    "documents": (
        '"query":"How far is the harbour?","documents":["A mile.","The gulls are loud."]',
        ("rerank", '"query":"How far is the harbour?","documents":["A mile.","The gulls are loud."]'),
    ),
    "question": ('"question":"Who lives here?","context":"Anna lives here."', None),
    "candidate_labels": ('"text":"The harbour is far.","candidate_labels":["places","food"]', None),
    "num_values": ('"text":"How far is the harbour?"', None),
    "image": (f'"image":"{PIXEL}"', ("classify", f'"input":"data:image/gif;base64,{PIXEL}"')),
    "label": ('"text":"The harbour is beautiful."', ("classify", '"input":"The harbour is beautiful."')),
    "output": ('"text":"Anna lives at the harbour."', None),
}
"""By an input or output that earlier entries lack: fields for a folder of an encoder, and the gateway's endpoint and
fields, if it has one for the task."""
OF_TASKS: Final[Mapping[str, tuple[str, str]]] = {
    "token-classification": ("token-classification", "Anna lives at the harbour."),
    "fill-mask": ("fill-mask", "Anna lives at the {mask}."),
}
"""Endpoint and text of tasks that have no output but `output`."""


def ready_text(
    server: TritonServer, gateway: GatewayConfig | None, configs: Iterable[Mapping[str, Any]], takes_chats: TakesChats
) -> str:
    """The addresses, and a request for each kind of model.

    Args:
        server: Triton.
        gateway: The gateway's config, if there is one.
        configs: The folders' configs, by Triton or of `config_of_task`.
        takes_chats: Whether a folder that generates text renders chats.
    """
    requests: dict[str, str] = {}
    for config in sorted(configs, key=lambda config: (not _generates(config), _is_decoupled(config))):
        for kind, request in _requests(config, server, gateway, takes_chats):
            requests.setdefault(kind, request)
    url = f"{gateway.scheme}://{_reachable(gateway.host)}:{gateway.port}" if gateway else ""
    return READY.format(
        host=_reachable(server.host),
        http_port=server.http_port,
        grpc_port=server.grpc_port,
        metrics_port=server.metrics_port,
        gateway=GATEWAY.format(url=url) if gateway else "",
        requests=REQUESTS.format(requests="\n".join(requests.values())) if requests else "",
    )


def _requests(
    config: Mapping[str, Any], server: TritonServer, gateway: GatewayConfig | None, takes_chats: TakesChats
) -> Iterator[tuple[str, str]]:
    """Requests to a folder, each with the kind of model that it is for."""
    is_loaded, names = "backend" in config, _ports(config)
    if AUDIO in names:
        if gateway is not None:
            key = KEY if gateway.api_key_file is not None else ""
            yield AUDIO, SPEECH.format(address=_address(gateway), key=key, name=config["name"])
        return
    encoder = None if _generates(config) else _encoder(config, server.model_repository / config["name"])
    if encoder is None and names and "text_input" not in names:  # a task of the folder's own
        return
    fields = PROMPT if encoder is None else encoder[0]
    if is_loaded and (gateway is None or encoder is None or encoder[1] is None):
        line = STREAM if _is_decoupled(config) else GENERATE
        yield (
            fields,
            line.format(host=_reachable(server.host), port=server.http_port, name=config["name"], fields=fields),
        )
    if encoder is None:
        asked: tuple[str, str] | None = CHAT if gateway and takes_chats(config["name"]) else COMPLETION
    else:
        asked = encoder[1]
    if gateway is not None and asked is not None:
        path, fields = asked
        key = KEY if gateway.api_key_file is not None else ""
        address = _address(gateway)
        yield path, OPENAI.format(address=address, path=path, key=key, name=config["name"], fields=fields)


def _generates(config: Mapping[str, Any]) -> bool:
    """Whether a folder generates text, or has a task of its own."""
    names = _ports(config)
    return "finish_reason" in names or names.isdisjoint(ENCODERS)


def _encoder(config: Mapping[str, Any], folder: Path) -> tuple[str, tuple[str, str] | None]:
    """The example of a folder with a task of an encoder."""
    names = _ports(config)
    port = next(name for name in ENCODERS if name in names)
    task = encoder_declaration(folder) if port == "output" and "text" in names else None
    if task is None or task.name not in OF_TASKS:
        return ENCODERS[port]
    path, text = OF_TASKS[task.name]
    text = json.dumps(text.replace("{mask}", mask_token(folder)), ensure_ascii=False)
    return f'"text":{text}', (path, f'"input":{text}')


def _ports(config: Mapping[str, Any]) -> set[str]:
    """The names of a folder's inputs and outputs."""
    return {port["name"] for side in ("input", "output") for port in config.get(side, ())}


def config_of_task(name: str, task: TaskDeclaration | None) -> Mapping[str, Any]:
    """What the config of a folder that is not loaded will say of its inputs and outputs; nothing of text generation."""
    ports = {"input": task.input_types, "output": task.all_outputs} if task else {}
    return {"name": name, **{side: [{"name": port} for port in found] for side, found in ports.items()}}


def takes_chats(server: TritonServer, name: str) -> bool:
    """Whether a model renders a chat, which it does if it has a chat template; generates nothing."""
    body = json.dumps({"messages": MESSAGES, "tokenize_only": True, "stream": False}).encode()
    request = urllib.request.Request(f"{server.http_url}/v2/models/{name}/generate", body)
    try:
        with open_local(request, 30) as response:
            return "error" not in json.load(response)
    except OSError:
        return False


def _address(gateway: GatewayConfig) -> str:
    """As curl takes it."""
    return f"{'https://' if gateway.scheme == 'https' else ''}{_reachable(gateway.host)}:{gateway.port}"


def _reachable(host: str) -> str:
    return "localhost" if host in ("127.0.0.1", "0.0.0.0") else host


def _is_decoupled(config: Mapping[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))
