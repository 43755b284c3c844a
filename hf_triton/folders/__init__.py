# SPDX-License-Identifier: Apache-2.0
"""What is known of a model folder before it is served: its files, its defects, its sizes; and writing one."""
