# SPDX-License-Identifier: Apache-2.0
"""Structured output: which tokens a JSON schema, an expression, a choice or a grammar allows next."""
