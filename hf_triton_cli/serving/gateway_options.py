# SPDX-License-Identifier: Apache-2.0
"""Options of the gateway on the command line, made from the declarations of `GatewayConfig`, and back to arguments."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from pydantic import ValidationError

from hf_triton.errors import clip
from hf_triton.protocol.validation import problems
from hf_triton_gateway.gateway_config import GatewayConfig, TritonAddress

Command = TypeVar("Command", bound=Callable[..., Any])

_UNLIKE_FIELDS: Final = {"allowed_origins": "--allow-origin"}
_METAVARS: Final = {
    "triton": "HOST:PORT",
    "host": "ADDRESS",
    "allowed_origins": "ORIGIN",
    "triton_server_name": "NAME",
    "keep_alive": "DURATION",
    "triton_metrics": "HOST:PORT",
}
_SHORT: Final = (
    *TritonAddress.model_fields,
    *("api_key_file", "ssl_certfile", "ssl_keyfile", "allowed_origins"),
    *("on_demand", "keep_alive", "max_loaded", "sleep"),
)
"""Fields whose options are the same beside Triton."""

ALONE: Final[Mapping[str, str]] = {
    name: _UNLIKE_FIELDS.get(name, f"--{name.replace('_', '-')}") for name in GatewayConfig.model_fields
}
"""The options of `hf-triton openai`, by field."""
BESIDE_TRITON: Final[Mapping[str, str]] = {
    name: option if name in _SHORT else option.replace("--", "--openai-", 1)
    for name, option in ALONE.items()
    if name not in ("triton", "host", "port", "triton_metrics")
}
"""The options of `hf-triton serve`, by field; the others follow from the server's own."""


def gateway_options(options: Mapping[str, str]) -> Callable[[Command], Command]:
    """A decorator that gives a command these options; their values are named as the fields."""

    def decorate(command: Command) -> Command:
        for name, option in reversed(list(options.items())):
            command = _option(name, option)(command)
        return command

    return decorate


def _option(name: str, option: str) -> Callable[[Command], Command]:
    field = GatewayConfig.model_fields[name]
    text = " ".join((field.description or "").replace("`", "").split())
    if field.annotation is bool:
        return click.option(option, name, is_flag=True, help=text)
    is_file = Path in typing.get_args(field.annotation)
    return click.option(
        option,
        name,
        type=click.Path(exists=True, dir_okay=False) if is_file else str,
        multiple=typing.get_origin(field.annotation) is tuple,
        default=field.default,
        show_default=field.default not in (None, ()),
        metavar=_METAVARS.get(name, "FILE" if is_file else "NUMBER"),
        help=text,
    )


def read_config(options: Mapping[str, str], values: Mapping[str, Any], **fixed: object) -> GatewayConfig:
    """The gateway's settings of a command's options and values, by field, and of those that the command fixes."""
    try:
        return GatewayConfig.model_validate({**values, **fixed})
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        name = str(details["loc"][0])
        if details["type"] == "string_pattern_mismatch":
            raise click.UsageError(f"{options[name]} must be {_METAVARS[name]}, got {clip(values[name])}") from None
        sentence = problems(GatewayConfig, error)[0].sentence
        raise click.UsageError(options[name] + sentence.removeprefix(name)) from None


def as_arguments(config: GatewayConfig) -> list[str]:
    """The arguments of `hf-triton openai` that give this config."""
    changed = config.model_dump(mode="json", exclude_defaults=True)
    return [
        ALONE[name] if entry is True else f"{ALONE[name]}={entry}"
        for name, value in changed.items()
        for entry in (value if isinstance(value, list) else [value])
    ]
