# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in a model that runs: their files, what of them is on which layer, and their slots in graphs."""
