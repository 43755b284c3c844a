# SPDX-License-Identifier: Apache-2.0
"""Tensors and JSON to checked requests, and answers back to tensors. Knows no model, no torch and no Triton."""
