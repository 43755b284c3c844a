# SPDX-License-Identifier: Apache-2.0
"""Tells the headers that Triton forwards as request parameters from the parameters. Knows no request.

Triton (24.10) appends the headers whose names its patterns find, in capitals or not, after the parameters of the body:
each as a string, over HTTP named as the client writes it, over gRPC in lower case, and repeated as it is repeated.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from hf_triton.protocol.otlp import TRACE_CONTEXT
from hf_triton.protocol.requests import is_parameter_name, resembles_parameter
from hf_triton.protocol.validation import reject_duplicates
from hf_triton.settings import compile_header_pattern

logger = logging.getLogger(__name__)

FLAGS: Final = ("--http-header-forward-pattern", "--grpc-header-forward-pattern")


class ForwardedHeaders:
    """The headers of one server, by regular expressions that are searched in their names."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [compile_header_pattern(pattern) for pattern in patterns]

    def parameters(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        """The parameters among a request's parameters and headers, in the server's order.

        A header's name is no parameter's, nor close to one; behind the first such header all strings are headers, if a
        pattern finds their names. `traceparent` and `tracestate` are kept, in lower case.

        Raises:
            RequestError: A parameter is given twice.
        """
        parameters: list[tuple[str, object]] = []
        trace_context: dict[str, object] = {}
        has_header = False
        for name, value in pairs:
            if not (isinstance(value, str) and self._finds(name)):
                parameters.append((name, value))
            elif name.lower() in TRACE_CONTEXT:
                trace_context.setdefault(name.lower(), value)
            elif has_header or not (is_parameter_name(name) or resembles_parameter(name)):
                has_header = True
            else:
                parameters.append((name, value))
        return {**trace_context, **reject_duplicates(parameters)}

    def _finds(self, name: str) -> bool:
        return any(pattern.search(name) for pattern in self._patterns)


def find_forwarded_headers(setting: str | None) -> ForwardedHeaders | None:
    """The headers that this process's server forwards, by the folder's pattern or its command line; None: none."""
    if setting is not None:
        return ForwardedHeaders([setting])
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return None
    patterns = []
    for pattern in _flag_values(command):
        try:
            compile_header_pattern(pattern)
        except ValueError:
            logger.warning(
                "the server's header pattern %r is not one that Python reads: set forwarded_headers to one that is",
                pattern,
            )
        else:
            patterns.append(pattern)
    return ForwardedHeaders(patterns) if patterns else None


def _flag_values(command: Sequence[str]) -> Iterable[str]:
    """The patterns of a command line; tritonserver takes `--flag=VALUE` and `--flag VALUE`, of several the last."""
    values: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            values[flag] = value if equals else following
    return filter(None, values.values())
