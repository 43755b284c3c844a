# SPDX-License-Identifier: Apache-2.0
"""Writes a model's forward as an ONNX graph, fused for ONNX Runtime where that works; and quantises one."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import torch

from hf_triton.runner.faults import described

logger = logging.getLogger(__name__)

OPSET: Final = 17


def export_graph(model: Any, outputs: tuple[str, ...], file: Path, fusions: Literal["cpu", "cuda"] | None) -> str:
    """Write a model's graph for any number of sequences of any length; how it was written.

    The model is in eval mode on the CPU, in float32; its attention becomes `eager`. With fusions, ONNX Runtime alone
    computes the graph: they are its own operations for attention and the like, as its CPU or its CUDA has them.

    Raises:
        Exception: No way works; transformers', torch's or onnx' own.
    """
    model.config.return_dict = True
    model.config.use_cache = False
    model.set_attn_implementation("eager")  # in whose graph alone attention is found and fused
    ids = torch.full((2, 7), 5)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][0, 5:] = 0
    if "token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    ways: dict[str, Callable[[], None]] = {
        "transformers.exporters, fused": lambda: _export(model, inputs, outputs, file, fusions),
        "transformers.exporters": lambda: _export(model, inputs, outputs, file, None),
        "torch.onnx.export": lambda: _export_plainly(model, inputs, outputs, file),
    }
    if fusions is None:
        del ways["transformers.exporters, fused"]
    for number, (name, export) in enumerate(ways.items(), 1):
        try:
            export()
        except Exception as error:  # exporters fail in ways of their own
            if number == len(ways):
                raise
            logger.warning("%s failed (%s); trying another way", name, described(error))
            continue
        return name
    raise AssertionError


def _export(model: Any, inputs: dict[str, torch.Tensor], outputs: tuple[str, ...], file: Path, fusions: Any) -> None:
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass
    from transformers.exporters.configs import OnnxConfig
    from transformers.exporters.exporter_onnx import OnnxExporter

    exporter: Any = OnnxExporter
    program = exporter().export(model, inputs, OnnxConfig(dynamic=True, ort_fusions=fusions)).program
    by_name = {each.name: each for each in program.graph.outputs}
    program.graph.outputs[:] = [by_name[name] for name in outputs]
    RemoveUnusedNodesPass()(program)
    onnx_ir.save(program, str(file), external_data=f"{file.name}.data")


def _export_plainly(model: Any, inputs: dict[str, torch.Tensor], outputs: tuple[str, ...], file: Path) -> None:
    class Named(torch.nn.Module):
        def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            output = model(**dict(zip(inputs, given, strict=True)))
            return tuple(output[name] for name in outputs)

    named = Named()
    named.model = model
    torch.onnx.export(
        named.eval(),
        tuple(inputs.values()),
        str(file),
        input_names=list(inputs),
        output_names=list(outputs),
        dynamic_axes={name: {0: "batch", 1: "tokens"} for name in (*inputs, *outputs)},
        opset_version=OPSET,
        dynamo=False,
    )


def quantize_graph(file: Path, target: Path, *, reduces_range: bool) -> None:
    """Write a graph with weights of 8 bits, one scale for each channel; activations get theirs when they are computed.

    `reduces_range` gives weights 7 bits: sums of 8 saturate on processors without VNNI.
    """
    import onnx_ir
    from transformers.exporters.configs import ExportFormat
    from transformers.exporters.quantizers.quantizer_onnxruntime import OnnxRuntimeDynamicConfig, OnnxRuntimeQuantizer

    quantizer = OnnxRuntimeQuantizer(OnnxRuntimeDynamicConfig(per_channel=True, reduce_range=reduces_range))
    program = quantizer.quantize(onnx_ir.load(str(file)), {}, ExportFormat.ONNX)
    onnx_ir.save(program, str(target), external_data=f"{target.name}.data")
