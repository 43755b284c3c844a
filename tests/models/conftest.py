# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of kernels."""

from tests.support.kernels import anew as anew
