# SPDX-License-Identifier: Apache-2.0
"""A model's forward on its device, over rows of key/value memory. Knows tensors, and no requests, texts or sampling."""
