# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API in front of Triton: knows HTTP and tritonclient, no tokenizer and no model."""
