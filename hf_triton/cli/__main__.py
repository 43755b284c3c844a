# SPDX-License-Identifier: Apache-2.0
"""`python -m hf_triton.cli` is `hf-triton`."""

from hf_triton.cli import main

main()
