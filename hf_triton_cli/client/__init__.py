# SPDX-License-Identifier: Apache-2.0
"""Commands that ask a running server: `list`, `status`, `generate`, `chat`, `run-batch`, `bench`, ..."""
