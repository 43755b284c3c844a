# SPDX-License-Identifier: Apache-2.0
"""What HTTP asks of the gateway beside its endpoints: bodies, limits, errors, streams, metrics, pages."""
