# SPDX-License-Identifier: Apache-2.0
"""What a model does with a request. Tasks know text and engines, not Triton."""
