# SPDX-License-Identifier: Apache-2.0
"""How a request of any task is served: admitted, counted, traced, answered, and with which adapter."""
