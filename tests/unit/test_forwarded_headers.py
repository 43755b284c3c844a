# SPDX-License-Identifier: Apache-2.0
"""Headers among a request's parameters; tests/server/test_forwarded_headers.py has them on a real server."""

import pytest

from hf_triton.triton_backend.forwarded_headers import ForwardedHeaders

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PAIRS: list[tuple[str, object]] = [("seed", 7), ("Traceparent", TRACEPARENT), ("X-Tenant", "blue"), ("stop", "a")]
"""A parameter, and headers of which the last has a parameter's name."""


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        (".*", {"traceparent": TRACEPARENT, "seed": 7}),
        ("^(traceparent|x-)", {"traceparent": TRACEPARENT, "seed": 7, "stop": "a"}),
        ("TENANT", {"seed": 7, "Traceparent": TRACEPARENT, "stop": "a"}),
        ("(?-i)[A-Z]", {"traceparent": TRACEPARENT, "seed": 7, "stop": "a"}),
    ],
)
def test_what_a_pattern_finds_is_a_header(pattern: str, kept: dict[str, object]) -> None:
    assert ForwardedHeaders([pattern]).parameters(list(PAIRS)) == kept
