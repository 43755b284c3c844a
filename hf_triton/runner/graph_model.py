# SPDX-License-Identifier: Apache-2.0
"""An ONNX graph in the place of a transformers encoder: ONNX Runtime computes it, or OpenVINO on the CPU."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hf_triton.runner.faults import described

GraphRuntime = Literal["onnx", "onnx-cuda", "onnx-tensorrt", "openvino"]
Arrays = dict[str, npt.NDArray[Any]]

PACKAGES: Final[dict[GraphRuntime, str]] = {
    "onnx": "onnxruntime",
    "onnx-cuda": "onnxruntime-gpu",
    "onnx-tensorrt": "onnxruntime-gpu",
    "openvino": "openvino",
}
GPU_PROVIDERS: Final[dict[str, str]] = {
    "onnx-cuda": "CUDAExecutionProvider",
    "onnx-tensorrt": "TensorrtExecutionProvider",
}
"""ONNX Runtime's, by the runtimes that compute on a GPU."""
INSTRUCTION_SETS: Final = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "asimddp", "i8mm")
"""Linux's names of those that decide which kernels a runtime takes."""


class GraphError(RuntimeError):
    """A graph cannot be loaded; its message cannot quote a text."""


Providers = Sequence[tuple[str, dict[str, Any]]]
CPU_PROVIDER: Final[Providers] = (("CPUExecutionProvider", {}),)


class Session(Protocol):
    """A graph that is loaded."""

    input_names: list[str]

    def run(self, inputs: Arrays) -> Arrays:
        """All outputs by name."""


class OnnxSession:
    """ONNX Runtime's; its threads sleep between two runs, so that other models have the cores.

    Args:
        providers: ONNX Runtime's, with options; the first one must take the graph.

    Raises:
        GraphError: The first provider cannot be loaded.
    """

    def __init__(self, file: Path, num_threads: int, providers: Providers = CPU_PROVIDER) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(str(file), options, providers=list(providers))
        if self._session.get_providers()[0] != providers[0][0]:  # ONNX Runtime goes on without it
            raise GraphError(f"ONNX Runtime cannot load its {providers[0][0]}: see its warning above")
        self.input_names = [each.name for each in self._session.get_inputs()]
        self._output_names = [each.name for each in self._session.get_outputs()]

    def run(self, inputs: Arrays) -> Arrays:
        return dict(zip(self._output_names, self._session.run(None, inputs), strict=True))


class OpenVinoSession:
    """OpenVINO's."""

    def __init__(self, file: Path, num_threads: int) -> None:
        import openvino

        options = {"INFERENCE_NUM_THREADS": num_threads, "INFERENCE_PRECISION_HINT": "f32"}
        self._compiled = openvino.Core().compile_model(str(file), "CPU", options)
        self.input_names = [each.get_any_name() for each in self._compiled.inputs]

    def run(self, inputs: Arrays) -> Arrays:
        results = self._compiled(inputs)
        return {output.get_any_name(): np.array(results[output]) for output in self._compiled.outputs}


def gpu_providers(runtime: GraphRuntime, file: Path, device_id: int) -> Providers:
    """What ONNX Runtime computes a graph with on a GPU: what one provider does not know, the next one computes."""
    cuda = ("CUDAExecutionProvider", {"device_id": device_id})
    if runtime == "onnx-cuda":
        return (cuda, *CPU_PROVIDER)
    cache = {"trt_engine_cache_enable": True, "trt_engine_cache_path": str(file.parent / "tensorrt")}
    return (("TensorrtExecutionProvider", {"device_id": device_id, **cache}), cuda, *CPU_PROVIDER)


class GraphModel(torch.nn.Module):
    """A graph with what an encoder's engine asks of a transformers model.

    Args:
        file: The graph; its inputs are named as transformers names them.
        num_ids: Token ids that the model has embeddings for.
        device_id: The GPU, of a runtime that computes on one.

    Raises:
        GraphError: The runtime cannot load the graph.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self,
        file: Path,
        runtime: GraphRuntime,
        config: Any,
        *,
        num_ids: int,
        num_positions: int | None,
        device_id: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.computes_on = "cuda" if runtime in GPU_PROVIDERS else "cpu"
        """The type of the device behind `device`, where inputs and outputs are."""
        self._embeddings = torch.nn.Embedding(num_ids, 0)
        if num_positions is not None:
            self.position_embeddings = torch.nn.Embedding(num_positions, 0)
        try:
            self._session: Session = self._load(file, runtime, device_id)
        except Exception as error:  # each runtime has its own
            raise GraphError(described(error)) from None

    @staticmethod
    def _load(file: Path, runtime: GraphRuntime, device_id: int) -> Session:
        if runtime == "openvino":
            return OpenVinoSession(file, torch.get_num_threads())
        providers = gpu_providers(runtime, file, device_id) if runtime in GPU_PROVIDERS else CPU_PROVIDER
        return OnnxSession(file, torch.get_num_threads(), providers)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """Return as many as the model has, without their values."""
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
    """The runtime's version; None if it is not installed, or without the provider for a GPU."""
    if runtime in GPU_PROVIDERS and GPU_PROVIDERS[runtime] not in available_providers():
        return None
    package = PACKAGES[runtime].removesuffix("-gpu")
    for name in (package, f"{package}-gpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return None


def available_providers() -> list[str]:
    """List what ONNX Runtime is built with; nothing if it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return []
    return list(onnxruntime.get_available_providers())


def processor_of(runtime: GraphRuntime) -> str:
    """What a runtime computes on: this machine's processor, or the name of its GPU."""
    if runtime not in GPU_PROVIDERS:
        return processor()
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a machine without a GPU"


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
