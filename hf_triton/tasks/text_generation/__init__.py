# SPDX-License-Identifier: Apache-2.0
"""Text generation: prompts to tokens, tokens to responses."""
