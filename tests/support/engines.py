# SPDX-License-Identifier: Apache-2.0
"""The engines that a test runs on, as parameters."""

import pytest

ENGINES = ["continuous", pytest.param("batch", marks=pytest.mark.full)]
"""The value of the setting `engine`; `make test` runs the first alone."""
