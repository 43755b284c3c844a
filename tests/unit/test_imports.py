# SPDX-License-Identifier: Apache-2.0
"""`import hf_triton` is light: what takes seconds or exists in one place only comes when a model is loaded."""

import subprocess
import sys

import pytest

LISTS_MODULES = "import sys, {module}; print('\\n'.join(sys.modules))"
HEAVY = {"torch", "transformers", "accelerate", "safetensors", "triton_python_backend_utils", "tritonclient", "triton"}


@pytest.mark.parametrize(
    "module", ["hf_triton", "hf_triton_cli", "hf_triton.testing", "hf_triton.protocol.response_outputs"]
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    command = [sys.executable, "-c", LISTS_MODULES.format(module=module)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert module in listed
    assert HEAVY & set(listed) == set()


@pytest.mark.parametrize("module", ["hf_triton", "hf_triton_cli"])
def test_a_command_starts_without_what_others_need(module: str) -> None:
    command = [sys.executable, "-c", LISTS_MODULES.format(module=module)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"fastapi", "grpc", "numpy", "pydantic", "rich"} & set(listed) == set()


def test_a_command_for_a_running_server_starts_without_settings_and_metrics() -> None:
    modules = "hf_triton_cli.client.listing, hf_triton_gateway.triton.triton_models"
    command = [sys.executable, "-c", LISTS_MODULES.format(module=modules)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"hf_triton.settings", "hf_triton.protocol.parameters", "prometheus_client", "rich"} & set(listed) == set()
