# SPDX-License-Identifier: Apache-2.0
"""Text generation: prompts to tokens, tokens back to text and responses."""
