# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a small model, engines that are closed after the test, and kernels that are tried again."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.testing import build_tiny_checkpoint
from tests.support.kernels import anew as anew
from tests.support.reference import load_reference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    build_tiny_checkpoint(folder, "llama", eos_token_id=None)
    return load_reference(folder).model


@pytest.fixture(params=["eager", "static"])
def start(model: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., ContinuousBatchingEngine]]:
    engines: list[ContinuousBatchingEngine] = []

    def start(**options: Any) -> ContinuousBatchingEngine:
        engines.append(ContinuousBatchingEngine(model, **{"max_num_seqs": 6, "decoding": request.param, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
