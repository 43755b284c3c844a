# SPDX-License-Identifier: Apache-2.0
"""Triton as the gateway calls it: its models, its gRPC messages, its words."""
