# SPDX-License-Identifier: Apache-2.0
"""The graph that `hf-triton optimize` writes beside a checkpoint's config and tokenizer, and the machine it is for."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import CheckpointError, SettingsError
from hf_triton.files import read_json
from hf_triton.settings import ModelSettings

if TYPE_CHECKING:
    from hf_triton.runner.graph_model import GraphModel

FACTS: Final = "graph.json"
GRAPHS: Final = {"float32": "model.onnx", "int8": "model_int8.onnx"}
"""Files by the setting `precision`, named as in repositories of the Hub."""
AGAIN: Final = "run `hf-triton optimize` on this machine"


@dataclass(frozen=True)
class GraphFacts:
    """What a graph's file does not say."""

    num_ids: int
    """Token ids that the model has embeddings for."""
    num_positions: int | None
    """Tokens that it has position embeddings for; None: it computes positions."""
    processor: str
    """What it was measured on, as `runner.graph.processor_of` names it."""
    version: str
    """The runtime's that it was measured with."""

    def write(self, folder: Path) -> None:
        (folder / FACTS).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")


def load_graph(folder: Path, config: Any, settings: ModelSettings, device_id: int) -> GraphModel:
    """Load the graph that the settings name.

    Raises:
        LoadError: It is broken, or made for another machine; or its runtime is not installed.
    """
    from hf_triton.runner.graph_model import GraphError, GraphModel

    facts, file = check_graph(folder, settings)
    assert settings.runtime != "torch"
    try:
        return GraphModel(
            file,
            settings.runtime,
            config,
            num_ids=facts.num_ids,
            num_positions=facts.num_positions,
            device_id=device_id,
        )
    except GraphError as error:
        raise CheckpointError("checkpoint_invalid", f"{file} cannot be loaded ({error}): {AGAIN}") from None


def check_graph(folder: Path, settings: ModelSettings) -> tuple[GraphFacts, Path]:
    """The facts and the file of a graph, without loading it. Arguments and errors as in `load_graph`."""
    from hf_triton.runner.graph_model import GPU_PROVIDERS, PACKAGES, processor_of, runtime_version

    assert settings.runtime != "torch"
    package, version = PACKAGES[settings.runtime], runtime_version(settings.runtime)
    if version is None:
        provider = GPU_PROVIDERS.get(settings.runtime)
        needed = f"the {provider} of {package}" if provider else package
        wanted = package if provider else f"'hf-triton[{settings.runtime}]'"
        raise SettingsError(
            f"runtime {settings.runtime} needs {needed}, which is not installed: `pip install {wanted}`, or set "
            "runtime to torch"
        )
    file = folder / GRAPHS[settings.precision]
    missing = next((path.name for path in (folder / FACTS, file) if not path.exists()), None)
    if missing:
        raise CheckpointError(
            "checkpoint_incomplete",
            f"{folder} has no {missing}, which `hf-triton optimize` writes: run it on the folder, or set runtime to "
            "torch",
        )
    try:
        facts = GraphFacts(**read_json(folder / FACTS))
    except (OSError, ValueError, TypeError):
        raise CheckpointError("checkpoint_invalid", f"{folder / FACTS} is not what was written: {AGAIN}") from None
    for made_for, here in (
        (facts.processor, processor_of(settings.runtime)),
        (f"{package} {facts.version}", f"{package} {version}"),
    ):
        if made_for != here:
            raise CheckpointError(
                "optimized_elsewhere", f"{folder} was optimized for {made_for}, and this is {here}: {AGAIN}"
            )
    return facts, file
