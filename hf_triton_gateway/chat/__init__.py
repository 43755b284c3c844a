# SPDX-License-Identifier: Apache-2.0
"""Chats and completions of OpenAI's API and what their fields mean, the list of models, and tokenizing."""
