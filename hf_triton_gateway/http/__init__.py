# SPDX-License-Identifier: Apache-2.0
"""What is of HTTP and of no model: bodies, limits, errors, streams, TLS; endpoints for health, metrics and pages."""
