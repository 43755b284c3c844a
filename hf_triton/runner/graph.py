# SPDX-License-Identifier: Apache-2.0
"""An ONNX graph in the place of a transformers encoder: ONNX Runtime or OpenVINO computes it on the CPU."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.runner.faults import described

GraphRuntime = Literal["onnx", "openvino"]
Arrays = dict[str, npt.NDArray[Any]]

PACKAGES: Final[dict[GraphRuntime, str]] = {"onnx": "onnxruntime", "openvino": "openvino"}
INSTRUCTION_SETS: Final = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "asimddp", "i8mm")
"""As Linux names them: those that decide which kernels a runtime takes."""


class GraphError(RuntimeError):
    """A graph cannot be loaded; its message cannot quote a text."""


class Session(Protocol):
    """A graph that is loaded."""

    input_names: list[str]

    def run(self, inputs: Arrays) -> Arrays:
        """All outputs by name."""


class OnnxSession:
    """ONNX Runtime's; its threads sleep between two runs, so that other models have the cores."""

    def __init__(self, file: Path, num_threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.input_names = [each.name for each in self._session.get_inputs()]
        self._output_names = [each.name for each in self._session.get_outputs()]

    def run(self, inputs: Arrays) -> Arrays:
        """See `Session`."""
        return dict(zip(self._output_names, self._session.run(None, inputs), strict=True))


class OpenVinoSession:
    """OpenVINO's."""

    def __init__(self, file: Path, num_threads: int) -> None:
        import openvino

        options = {"INFERENCE_NUM_THREADS": num_threads, "INFERENCE_PRECISION_HINT": "f32"}
        self._compiled = openvino.Core().compile_model(str(file), "CPU", options)
        self.input_names = [each.get_any_name() for each in self._compiled.inputs]

    def run(self, inputs: Arrays) -> Arrays:
        """See `Session`."""
        results = self._compiled(inputs)
        return {output.get_any_name(): np.array(results[output]) for output in self._compiled.outputs}


SESSIONS: Final[dict[GraphRuntime, Any]] = {"onnx": OnnxSession, "openvino": OpenVinoSession}


class GraphModel(torch.nn.Module):
    """A graph with what an encoder's engine asks of a transformers model.

    Args:
        file: The graph; its inputs are named as transformers names them.
        runtime: Computes it.
        config: The checkpoint's.
        num_ids: Token ids that the model has embeddings for.
        num_positions: See `max_positions`.

    Raises:
        GraphError: The runtime cannot load the graph.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self, file: Path, runtime: GraphRuntime, config: Any, *, num_ids: int, num_positions: int | None
    ) -> None:
        super().__init__()
        self.config = config
        self._embeddings = torch.nn.Embedding(num_ids, 0)
        if num_positions is not None:
            self.position_embeddings = torch.nn.Embedding(num_positions, 0)
        try:
            self._session: Session = SESSIONS[runtime](file, torch.get_num_threads())
        except Exception as error:  # each runtime has its own
            raise GraphError(described(error)) from None

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """As many as the model has, without their values."""
        return self._embeddings

    def get_output_embeddings(self) -> None:
        """None: they are in the graph."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The model's outputs by name."""
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": types}
        try:
            outputs = self._session.run({name: given[name].numpy() for name in self._session.input_names})
        except Exception as error:
            if "bad_alloc" in str(error) or "Failed to allocate" in str(error):
                raise MemoryError from None
            raise
        return {name: torch.from_numpy(output) for name, output in outputs.items()}


def runtime_version(runtime: GraphRuntime) -> str | None:
    """The runtime's version; None if it is not installed."""
    try:
        return version(PACKAGES[runtime])
    except PackageNotFoundError:
        return None


def processor() -> str:
    """This machine's processor and its instruction sets, such as `AMD EPYC (avx2 avx512f)`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    sets = " ".join(name for name in INSTRUCTION_SETS if name in flags)
    return f"{facts.get('model name') or platform.machine()} ({sets or 'no known instruction sets'})"
