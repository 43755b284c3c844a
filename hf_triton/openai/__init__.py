# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API in front of Triton: knows HTTP and tritonclient, no tokenizer and no model."""

PACKAGES = ("fastapi", "grpc", "prometheus_client", "tritonclient", "uvicorn")
"""What the gateway and the clients import beside what every installation has."""
