# SPDX-License-Identifier: Apache-2.0
"""API keys: who is served, and what each key has used."""
