# SPDX-License-Identifier: Apache-2.0
"""One model in several processes, each with its share of every layer: rank 0 leads, the others follow its steps."""
