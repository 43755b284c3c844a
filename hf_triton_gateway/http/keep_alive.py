# SPDX-License-Identifier: Apache-2.0
"""The field `keep_alive` of requests, as Ollama has it: how long the model is wanted behind the request."""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import Any, Final

from hf_triton.protocol.durations import FOR_EVER, read_duration
from hf_triton_gateway.http.api_errors import ApiError

FIELD: Final = "keep_alive"
KEEP_ALIVE_S: Final[ContextVar[float]] = ContextVar("hf_triton_keep_alive_s", default=math.inf)
"""That of the request that is served, in seconds; infinite: it does not say, or for ever."""


def take_keep_alive(body: dict[str, Any]) -> None:
    """Take the field out of a request's body, for the calls that serve the request."""
    try:
        keep_alive_s = read_duration(body.pop(FIELD, None))
    except ValueError as error:
        raise ApiError(400, str(error), param=FIELD, code="invalid_parameter") from None
    KEEP_ALIVE_S.set(math.inf if keep_alive_s in (None, FOR_EVER) else keep_alive_s)
