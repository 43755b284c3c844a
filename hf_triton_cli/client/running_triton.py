# SPDX-License-Identifier: Apache-2.0
"""What the commands against a running Triton share: its address, calls, errors as one sentence, the choice of a model.

Knows gRPC by tritonclient alone, which is imported when a command runs.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from hf_triton.errors import HfTritonError, ServerError, clip
from hf_triton.protocol.load_reasons import first_sentence
from hf_triton.protocol.names import SERVER_VARIABLE
from hf_triton_cli.serving.gateway_options import ALONE, gateway_options, read_config
from hf_triton_gateway.gateway_config import GatewayConfig, TritonAddress
from hf_triton_gateway.triton.endpoint import Endpoint

if TYPE_CHECKING:
    from tritonclient.grpc import InferenceServerClient

    from hf_triton_gateway.http.api_errors import ApiError
    from hf_triton_gateway.triton.triton_models import Model, TritonModels

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_ADDRESS: Final = "localhost:8001"
CALL_TIMEOUT_S: Final = 10.0
"""Limit of a call that neither loads nor generates."""
TRANSPORT: Final = (
    "failed to connect",
    "Socket closed",
    "Connection reset",
    "DNS",
    "errors resolving",
    "recvmsg",
    "GOAWAY",
)
"""What gRPC itself says, and not Triton, whose sentences are UNAVAILABLE as well."""
NUM_NAMED: Final = 8
"""Models that an error lists."""
READY: Final = "READY"
SERVER_OPTIONS: Final = {name: ALONE[name] for name in TritonAddress.model_fields}
"""The options of a command for a running server, by field."""
FILE_OPTIONS: Final = {name: option for name, option in SERVER_OPTIONS.items() if name != "triton"}
ADDRESS: Final = re.compile(r"(?:grpcs://)?(\[[0-9A-Fa-f:.]+\]|[^\s:/]+):(\d{1,5})")
HEADER: Final = re.compile(r"([a-z0-9_.-]+):\s*([\x20-\x7e]+)")


@dataclass(frozen=True)
class Triton:
    """A Triton that runs somewhere."""

    endpoint: Endpoint
    config: GatewayConfig = field(default_factory=GatewayConfig)
    """What the endpoint was read from, for a gateway of a command's own."""

    @property
    def address(self) -> str:
        """HOST:PORT of its gRPC."""
        return self.endpoint.address

    @property
    def headers(self) -> dict[str, str]:
        """Sent with each call."""
        return dict(self.endpoint.headers)

    @contextlib.contextmanager
    def connect(self) -> Iterator[InferenceServerClient]:
        """A client whose failures are errors of ours."""
        from tritonclient.grpc import InferenceServerClient
        from tritonclient.utils import InferenceServerException

        target, credentials, options = self.endpoint.address, self.endpoint.credentials, self.endpoint.options
        with InferenceServerClient(target, creds=credentials, channel_args=options) as client:
            try:
                yield client
            except InferenceServerException as error:
                raise self.error(error.status() or "", error.message() or "") from None

    def models(self, timeout_s: float = 3600.0) -> TritonModels:
        """A client that generates. Belongs to the running event loop."""
        from hf_triton_gateway.triton.triton_models import TritonModels

        return TritonModels(self.endpoint, timeout_s)

    @contextlib.asynccontextmanager
    async def asked(self, timeout_s: float = 3600.0) -> AsyncIterator[TritonModels]:
        """The client of `models`, closed at the end; its failures are errors of ours."""
        from hf_triton_gateway.http.api_errors import ApiError

        models = self.models(timeout_s)
        try:
            yield models
        except ApiError as error:
            raise self.api_error(error) from None
        finally:
            await models.close()

    def error(self, status: str, details: str) -> HfTritonError:
        """A failed call as an error of ours.

        Args:
            status: gRPC's: `StatusCode.UNAVAILABLE`.
            details: The message, gRPC's or Triton's.
        """
        from hf_triton_gateway.triton.triton_words import says

        if says(details, "restricted"):
            return ServerError("restricted", _restricted(details))
        if status.endswith("DEADLINE_EXCEEDED"):
            return self.unreachable("it did not answer in time")
        if status.endswith("UNIMPLEMENTED"):
            return self.unreachable("what listens there is no Triton")
        if status.endswith("UNAVAILABLE") and _is_transport(details):
            return self.unreachable(self.endpoint.problem(details))
        return ServerError("server_failed", first_sentence(details) or f"the call failed with {status}")

    def unreachable(self, reason: str) -> ServerError:
        """No Triton answers."""
        return ServerError(
            "server_unreachable",
            f"no Triton answers gRPC at {self.address} ({reason}): start one with `hf-triton serve`, or name its gRPC "
            "port, usually 8001, with --triton HOST:PORT",
        )

    def index(self) -> list[Any]:
        """Every folder and version with its state, as Triton's index has them."""
        with self.connect() as client:
            answer = client.get_model_repository_index(headers=self.headers, client_timeout=CALL_TIMEOUT_S)
        return sorted(answer.models, key=lambda entry: (entry.name, entry.version))

    def api_error(self, error: ApiError) -> HfTritonError:
        """A failed generation as an error of ours."""
        if error.code == "unavailable":
            return self.unreachable("the connection was refused, or broke off")
        if error.code == "restricted":
            return ServerError("restricted", _restricted(error.message))
        return ServerError(error.code or "server_failed", error.message)

    async def choose(self, models: TritonModels, name: str | None) -> Model:
        """The model of a name, or the only one that generates text.

        Raises:
            click.UsageError: No name is given, and there are several.
            HfTritonError: It does not exist, is not ready or generates no text; or Triton cannot be reached.
        """
        from hf_triton_gateway.http.api_errors import ApiError
        from hf_triton_gateway.triton.triton_messages import TEXT_GENERATION

        generating = (TEXT_GENERATION, None)
        try:
            if name is not None and (model := await models.named(name)) and model.folder.task in generating:
                return model
            ready = {model.name: model for model in await models.models()}
        except ApiError as error:
            if error.code == "unavailable":
                self.index()  # says more
            refusal = self.api_error(error)
            if error.code == "restricted" and name is None:
                raise ServerError("restricted", f"{refusal.sentence}; or name the model") from None
            raise refusal from None
        served = {each: model for each, model in ready.items() if model.folder.task in generating}
        if name in served:
            return served[name]
        if name is not None:
            raise self._not_served(name, served, ready.get(name))
        if len(served) > 1:
            some = ", ".join(list(served)[:NUM_NAMED])
            more = f" and {len(served) - NUM_NAMED} more" if len(served) > NUM_NAMED else ""
            raise click.UsageError(f"there are several models, name one: {some}{more}")
        if not served:
            raise ServerError("model_not_found", "no model that generates text is ready: `hf-triton list` shows all")
        return next(iter(served.values()))

    def _not_served(self, name: str, served: Mapping[str, Model], other: Model | None) -> ServerError:
        from hf_triton_gateway.triton.triton_messages import ADAPTER_MARK, ENDPOINTS

        generate = f"POST /v2/models/{name}/generate to Triton"
        task = other.folder.task if other else None
        if task is not None:
            where = f"{generate}, or {ENDPOINTS[task]} to the gateway"
            return ServerError("wrong_task", f"the model {clip(name)} is for {task}, and generates no text: {where}")
        entries = [entry for entry in self.index() if entry.name == name]
        if any(entry.state == READY for entry in entries):
            doors = [model.name for model in served.values() if model.door and model.door.name == name]
            more = f" but streams for {doors[0]}: name that" if doors else f": {generate}"
            return ServerError("wrong_task", f"the model {clip(name)} generates no text{more}")
        if entries:
            state, reason = entries[0].state or "not loaded", first_sentence(entries[0].reason)
            return ServerError("not_loaded", f"the model {clip(name)} is not ready: {reason or state.lower()}")
        base, mark, adapter = name.partition(ADAPTER_MARK)
        if mark and base in served:
            more = f"an adapter of {base} is named by --param lora_name={adapter}"
            return ServerError("model_not_found", f"there is no model {clip(name)}: {more}")
        return unknown_model(name, served)


def unknown_model(name: str, known: Mapping[str, object] | Sequence[str]) -> ServerError:
    """No model has this name; the message has near ones, or where all are listed."""
    close = difflib.get_close_matches(name[:60], list(known))
    hint = f", did you mean {' or '.join(map(repr, close))}?" if close else "; `hf-triton list` shows all"
    return ServerError("model_not_found", f"there is no model {clip(name)}{hint}")


def _restricted(details: str) -> str:
    header = re.search(r"expecting header '?([^'\s]+)", details)
    name = header[1] if header else "NAME"
    way = f"--header {name}:KEY, or in a file by --triton-headers-file"
    return f"this Triton restricts the API that the command needs: give its key with {way}"


def _is_transport(details: str) -> bool:
    return "TritonModelException" not in details and any(word in details for word in TRANSPORT)


def complete_models(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names of models for a shell's completion; none if no Triton answers."""
    given = {name: value for name, value in context.params.items() if name in SERVER_OPTIONS and value}
    address = {"triton": os.environ.get(SERVER_VARIABLE) or DEFAULT_ADDRESS} | given
    with contextlib.suppress(HfTritonError, ValueError):
        endpoint = Endpoint.read(TritonAddress.model_validate(address))
        return sorted({entry.name for entry in Triton(endpoint).index() if entry.name.startswith(incomplete)})
    return []


def triton_options(command: Command) -> Command:
    """Give a command the options of a server: its address, headers, TLS; it gets them as `triton`."""

    @functools.wraps(command)
    def with_server(*arguments: Any, triton: str, headers: dict[str, str], **values: Any) -> Any:
        given = {name: values.pop(name) for name in FILE_OPTIONS}
        config = read_config(SERVER_OPTIONS, {"triton": triton, **given})
        return command(*arguments, triton=Triton(Endpoint.read(config, headers), config), **values)

    header = click.option(
        "--header",
        "headers",
        multiple=True,
        metavar="NAME:VALUE",
        callback=_read_headers,
        help="Header to send, for restricted APIs: triton-grpc-protocol-KEY:VALUE. Repeatable.",
    )
    address = click.option(
        "--triton",
        metavar="HOST:PORT",
        envvar=SERVER_VARIABLE,
        default=DEFAULT_ADDRESS,
        show_default=True,
        show_envvar=True,
        callback=_read_address,
        help="Triton's gRPC address; grpcs://HOST:PORT for TLS.",
    )
    return cast(Command, address(header(gateway_options(FILE_OPTIONS)(with_server))))


def _read_address(context: click.Context, option: click.Parameter, value: str) -> str:
    matched = ADDRESS.fullmatch(value)
    if not matched or not 1 <= int(matched[2]) <= 65535:
        raise click.BadParameter(f"must be HOST:PORT, got {clip(value)}: the gRPC port is usually 8001")
    return value


def _read_headers(context: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    headers = {}
    for value in values:
        name, colon, key = value.partition(":")
        matched = HEADER.fullmatch(name.strip().lower() + colon + key)
        if not matched:
            raise click.BadParameter("must be NAME:VALUE in ASCII")  # without the value, which is a key
        headers[matched[1]] = matched[2]
    return headers
