# SPDX-License-Identifier: Apache-2.0
"""What is for a CPU alone: packed weights, attention kernels, threads and the heap."""
