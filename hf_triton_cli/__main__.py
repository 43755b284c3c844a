# SPDX-License-Identifier: Apache-2.0
"""`python -m hf_triton_cli` is `hf-triton`."""

from hf_triton_cli.command import main

main()
