# SPDX-License-Identifier: Apache-2.0
"""Commands that start servers: `serve`, `run`, `openai`, and what they print meanwhile."""
