# SPDX-License-Identifier: Apache-2.0
"""What is for a CUDA device alone."""
