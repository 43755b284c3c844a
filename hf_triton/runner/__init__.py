# SPDX-License-Identifier: Apache-2.0
"""A model's forward on its device, over a paged KV cache. Knows tensors, and no requests, texts or sampling."""
