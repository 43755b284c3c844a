# SPDX-License-Identifier: Apache-2.0
"""A folder's config.pbtxt: its parameters, the ports that Triton completes, and load failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from hf_triton.errors import HfTritonError


def add_missing_ports(
    config: pb_utils.ModelConfig, ports: tuple[list[dict[str, Any]], list[dict[str, Any]]]
) -> pb_utils.ModelConfig:
    """Add inputs and outputs to a configuration that is being completed."""
    inputs, outputs = ports
    for port in inputs:
        config.add_input(port)
    for port in outputs:
        config.add_output(port)
    return config


def parameter_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """config.pbtxt's `parameters` as plain text by key."""
    return {key: value["string_value"] for key, value in config["parameters"].items()}


def load_failure(error: HfTritonError) -> Exception:
    """The exception that Triton reports as the reason why a folder is not served."""
    return pb_utils.TritonModelException(str(error))
