# SPDX-License-Identifier: Apache-2.0
"""Which token comes next in each row. Knows no model, no cache and no queue."""
