# SPDX-License-Identifier: Apache-2.0
"""Example requests that `hf-triton serve` prints, in a form that the named folder accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

GENERATE = """  curl -X POST {host}:{port}/v2/models/{name}/generate -d '{{"text_input":"How can you be"}}'"""
INFER = """  curl -X POST {host}:{port}/v2/models/{name}/infer \\
    -d '{{"inputs":[{{"name":"text_input","datatype":"BYTES","shape":{shape},"data":["I am going"]}}]}}'"""
STREAM = """  curl -N -X POST {host}:{port}/v2/models/{name}/generate_stream \\
    -d '{{"text_input":"How can you be","stream":true}}'"""


def example_requests(configs: Iterable[Mapping[str, Any]], host: str, http_port: int) -> str:
    """The curl lines for one of the folders, given their configs; folders that accept /infer are preferred."""
    host = "localhost" if host in ("127.0.0.1", "0.0.0.0") else host
    config = min(configs, key=_is_decoupled)
    shape = "[1,1]" if config.get("max_batch_size", 0) > 0 else "[1]"
    lines = [STREAM] if _is_decoupled(config) else [GENERATE, INFER]
    return "\n".join(line.format(host=host, port=http_port, name=config["name"], shape=shape) for line in lines)


def _is_decoupled(config: Mapping[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))
