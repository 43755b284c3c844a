# SPDX-License-Identifier: Apache-2.0
"""Structured output: the tokens that a JSON schema, regular expression, choice or Lark grammar allows next."""
