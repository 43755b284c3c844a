# SPDX-License-Identifier: Apache-2.0
"""Example requests that `hf-triton serve` prints, in a form that the named folder accepts."""

from __future__ import annotations

import json
import shlex
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_triton.folders.doors import (
    MASK,
    TASK_CLASS,
    encoder_declaration,
    generates_text,
    has_chat_template,
    mask_token,
    own_names,
    streamed_folder,
)
from hf_triton.protocol.model_info import MODEL_INFO, ModelInfo
from hf_triton.protocol.names import JSON_OUTPUT, PROMPT, TEXT_TO_TEXT, declared_input
from hf_triton.protocol.task_declaration import NUM_TOKENS
from hf_triton.server import TritonServer, open_local
from hf_triton_gateway.gateway_config import GatewayConfig

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
GENERATE = """  curl -X POST {host}:{port}/v2/models/{name}/generate -d {body}"""
STREAM = """  curl -N -X POST {host}:{port}/v2/models/{name}/generate_stream \\
    -d {body}"""
OPENAI = """  curl {options}{address}/v1/{path} -H 'Content-Type: application/json' {key}\\
    -d {body}"""
SPEECH = """  curl {options}{address}/v1/audio/transcriptions {key}-F model={name} -F file=@speech.wav"""
KEY = """-H "Authorization: Bearer $OPENAI_API_KEY" """
Fields = Mapping[str, object]
TEXT_GENERATION: Final = "text-generation"
SPEECH_RECOGNITION: Final = "automatic-speech-recognition"
START: Final = "How can you be"
PROMPT_FIELDS: Final[Fields] = {PROMPT: START}
CHAT: Final[tuple[str, Fields]] = ("chat/completions", {"messages": [{"role": "user", "content": START}]})
COMPLETION: Final[tuple[str, Fields]] = ("completions", {"prompt": START})
PIXEL: Final = "R0lGODlhAQABAIAAAP///wAAACH5BAEAAAAALAAAAAABAAEAAAICRAEAOw=="
"""An image of one pixel."""
QUESTION: Final = "How far is the harbour?"
PEOPLE: Final = "Anna lives at the harbour."
HARBOUR: Final = "The harbour is beautiful."
RANKED: Final = {"query": QUESTION, "documents": ["A mile.", "The gulls are loud."]}
ENCODERS: Final[Mapping[str, tuple[Fields, tuple[str, Fields] | None]]] = {
    "embeddings": ({"text": QUESTION}, ("embeddings", {"input": QUESTION})),
    "rerank": (RANKED, ("rerank", RANKED)),
    "text-classification": ({"text": HARBOUR}, ("classify", {"input": HARBOUR})),
    "token-classification": ({"text": PEOPLE}, ("token-classification", {"input": PEOPLE})),
    "fill-mask": ({"text": "Anna lives at the {mask}."}, ("fill-mask", {"input": "Anna lives at the {mask}."})),
    "image-classification": ({"image": PIXEL}, ("classify", {"input": f"data:image/gif;base64,{PIXEL}"})),
    "question-answering": ({"question": "Who lives here?", "context": "Anna lives here."}, None),
    "zero-shot-classification": ({"text": "The harbour is far.", "candidate_labels": ["places", "food"]}, None),
    "feature-extraction": ({"text": QUESTION}, None),
    "sparse-embeddings": ({"text": QUESTION}, None),
    "tokenization": ({"text": QUESTION}, None),
}
"""Fields for a task's folder, and the gateway's endpoint and fields, if it has one."""


@dataclass(frozen=True)
class Served:
    """A folder that is served, or will be, as far as is known."""

    name: str
    task: str | None
    """Its task as its process or its files say; None: it is of another library."""
    inputs: Mapping[str, bool] | None = None
    """Its inputs that take one string, and whether a request must have them; None: they are not known yet."""
    texts: tuple[str, ...] = ()
    """The inputs that a request to a task of its own gives."""
    other_required: bool = False
    """Whether a request must have inputs that do not take one string."""
    is_decoupled: bool = False
    takes_chats: bool = False
    mask_token: str = MASK
    is_door: bool = False
    """Whether the gateway has it as a part of another."""

    def fields(self, example: Fields) -> Fields | None:
        """An example in the names that the folder declares; None: it does not take it."""
        if self.inputs is None:
            return example
        names = {name: declared_input(name, self.inputs, self._required) for name in example}
        given = {names[name] or name: value for name, value in example.items()}
        is_taken = all(names[name] for name in example if name != "candidate_labels")
        return given if is_taken and not self.lacks(given) else None

    def lacks(self, given: Fields) -> bool:
        """Whether a request with these inputs lacks one that it must have."""
        return self.other_required or not self._required <= given.keys()

    @property
    def _required(self) -> set[str]:
        return {name for name, is_required in (self.inputs or {}).items() if is_required}


def ready_text(server: TritonServer, gateway: GatewayConfig | None, models: Iterable[Served]) -> str:
    """The addresses, and a request for each kind of model."""
    requests: dict[str, str] = {}
    for model in sorted(models, key=lambda model: (not _generates(model), model.is_decoupled)):
        for kind, request in _requests(model, server, gateway):
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


def _requests(model: Served, server: TritonServer, gateway: GatewayConfig | None) -> Iterator[tuple[str, str]]:
    """Requests to a folder, each with the kind of model that it is for."""
    if model.task == SPEECH_RECOGNITION:
        if gateway is not None:
            yield SPEECH_RECOGNITION, SPEECH.format(**_way(gateway), name=model.name)
        return
    example: Fields
    asked: tuple[str, Fields] | None
    if _generates(model):
        example, asked = PROMPT_FIELDS, CHAT if gateway and model.takes_chats and not model.lacks({}) else COMPLETION
    elif model.task is not None and model.task in ENCODERS:
        example, asked = ENCODERS[model.task]
    else:
        texts = model.texts or tuple(name for name, is_required in (model.inputs or {}).items() if is_required)
        example, asked = dict.fromkeys(texts, PEOPLE), None
    fields = model.fields(example)
    if not fields:
        return
    if model.inputs is not None and (gateway is None or asked is None or _generates(model)):
        kind = TEXT_GENERATION if _generates(model) else model.task or " ".join(fields)
        line, more = (STREAM, {"stream": True}) if model.is_decoupled and _generates(model) else (GENERATE, {})
        body = _body({**fields, **more}, model)
        yield kind, line.format(host=_reachable(server.host), port=server.http_port, name=model.name, body=body)
    if gateway is not None and asked is not None and not model.is_door:
        path, fields = asked
        yield path, OPENAI.format(**_way(gateway), path=path, body=_body({"model": model.name, **fields}, model))


def _generates(model: Served) -> bool:
    return model.task in (TEXT_GENERATION, *TEXT_TO_TEXT)


def _body(fields: Fields, model: Served) -> str:
    """A request's body, as a shell takes it."""
    fields = {
        name: value.replace("{mask}", model.mask_token) if isinstance(value, str) else value
        for name, value in fields.items()
    }
    body = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return "'" + body.replace("'", "'\\''") + "'"


def _way(gateway: GatewayConfig) -> dict[str, str]:
    """The words by which curl reaches the gateway, trusts its certificate and gives its API key."""
    certificate = gateway.ssl_certfile
    return {
        "options": "" if certificate is None else f"--cacert {shlex.quote(str(certificate))} ",
        "address": f"{'https://' if certificate else ''}{_reachable(gateway.host)}:{gateway.port}",
        "key": KEY if gateway.api_key_file is not None else "",
    }


def loaded_model(server: TritonServer, config: Mapping[str, Any]) -> Served:
    """A folder that is loaded, by its config, as Triton completed it, and what its process says."""
    is_door = streamed_folder(config) is not None
    info = None if is_door else _ask_info(server, config)
    ports = config.get("input", [])
    strings = {port["name"]: not port.get("optional", False) for port in ports if _takes_one_string(port)}
    return Served(
        config["name"],
        TEXT_GENERATION if is_door else info.task if info else None,
        {**{port["name"]: False for port in ports if info}, **strings},
        info.inputs if info else (),
        any(not port.get("optional", False) and port["name"] not in strings for port in ports),
        bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        info is not None and info.template_variables is not None,
        (info and info.mask_token) or MASK,
        is_door,
    )


def model_on_demand(folder: Path) -> Served:
    """A folder that is not loaded, by its files."""
    own = own_names(folder)
    if own is None or TASK_CLASS in own:
        return Served(folder.name, None)
    if generates_text(folder):
        return Served(folder.name, TEXT_GENERATION, takes_chats=has_chat_template(folder))
    declaration = encoder_declaration(folder)
    return Served(folder.name, declaration.name if declaration else None, mask_token=mask_token(folder))


def _takes_one_string(port: Mapping[str, Any]) -> bool:
    return port["data_type"] == "TYPE_STRING" and list(map(int, port["dims"])) in ([1], [-1])


def _ask_info(server: TritonServer, config: Mapping[str, Any]) -> ModelInfo | None:
    """What the process of a folder says of its model; None: it is of another library, or does not answer."""
    if config.get("backend") != "python" or not {JSON_OUTPUT, NUM_TOKENS} <= {
        port["name"] for port in config.get("output", [])
    }:
        return None
    ports = config.get("input", [])
    required = [port for port in ports if not port.get("optional", False)]
    asked = required or (ports[:1] if config.get("max_batch_size") else [])
    body = {port["name"]: "" if port["data_type"] == "TYPE_STRING" else 0 for port in asked} | {MODEL_INFO: True}
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/{config['name']}/generate", json.dumps(body).encode()
    )
    try:
        with open_local(request, 30) as response:
            return ModelInfo.from_json(json.load(response)[JSON_OUTPUT])
    except (OSError, LookupError, TypeError, ValueError):
        return None


def _reachable(host: str) -> str:
    return "localhost" if host in ("127.0.0.1", "0.0.0.0") else host
