# SPDX-License-Identifier: Apache-2.0
"""Fixtures: small models, engines that are closed after the test, and kernels that are tried again."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.engine.options import EngineOptions
from hf_triton.testing import build_tiny_checkpoint
from tests.support.engine import LoadModel, StartEngine
from tests.support.kernels import anew as anew
from tests.support.reference import load_reference


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> LoadModel:
    """Loads a tiny model by its architecture and the checkpoint's options, each once."""

    @cache
    def load(architecture: str, **options: Any) -> Any:
        folder = build_tiny_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **options)
        return load_reference(folder).model

    return load


@pytest.fixture(scope="module")
def llama(model_of: LoadModel) -> Any:
    return model_of("llama")


@pytest.fixture(scope="module")
def model(model_of: LoadModel) -> Any:
    """A model without an end-of-sequence token."""
    return model_of("llama", eos_token_id=None)


@pytest.fixture
def start(model: Any) -> Iterator[StartEngine]:
    """Starts a continuous engine, of `model` unless told otherwise."""
    engines: list[ContinuousBatchingEngine] = []

    def start(model: Any = model, **options: Any) -> ContinuousBatchingEngine:
        engines.append(ContinuousBatchingEngine(model, EngineOptions(**{"max_num_seqs": 6, **options})))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
