# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of kernels."""

from tests.support.kernels import anew as anew
from tests.support.triton_language import compiled as compiled
from tests.support.triton_language import interpreted as interpreted
