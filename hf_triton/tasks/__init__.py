# SPDX-License-Identifier: Apache-2.0
"""Tasks: what a model does with a request; services, which answer requests by a task and an engine. No Triton."""
