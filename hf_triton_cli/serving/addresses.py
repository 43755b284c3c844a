# SPDX-License-Identifier: Apache-2.0
"""Host and ports on the command line: their type, and refusals before a server would fail on them."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import click

from hf_triton.errors import clip
from hf_triton.server import busy_ports

PORT = click.IntRange(1, 65535)


def check_host(host: str) -> None:
    """Refuse a `--host` that is no address of this machine."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except (OSError, UnicodeError):  # a name with a part of more than 63 letters
        raise click.UsageError(
            f"--host must be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all, got {clip(host)}"
        ) from None


def check_ports(ports: Mapping[str, int]) -> None:
    """Refuse ports, by option, that are equal or in use."""
    options = _listed(list(ports))
    if len(set(ports.values())) < len(ports):
        numbers = ", ".join(map(str, ports.values()))
        raise click.UsageError(f"{options} must be different ports, got {numbers}")
    busy = [str(port) for port in busy_ports(list(ports.values()))]
    if busy:
        nouns = "port" if len(busy) == 1 else "ports"
        raise click.UsageError(
            f"{nouns} {_listed(busy)} in use: stop the program that listens there, or choose others with {options}"
        )


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
