# SPDX-License-Identifier: Apache-2.0
"""The command line: `hf-triton`. Prints; what is known of folders is known by `hf_triton.folders`."""
