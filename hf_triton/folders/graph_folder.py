# SPDX-License-Identifier: Apache-2.0
"""Writes a model folder whose model is a graph, with all that serving needs: no Hub and no weights of the original."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_triton.folders.candidates import Candidate
from hf_triton.folders.folders import CONFIG, newest_version, parse_message
from hf_triton.hub.graph_facts import GRAPHS, GraphFacts
from hf_triton.hub.locate import Hub
from hf_triton.hub.sentence_names import SPARSE_LINEAR, files_of_modules

if TYPE_CHECKING:
    from hf_triton.runner.graph_model import GraphRuntime

PLACE: Final = "1/onnx"
"""The path in the folder that `huggingface_model` names."""
HALF: Final = "1/float16"
"""The same of weights in half precision."""
FUSIONS: Final[dict[str, Any]] = {"onnx": "cpu", "onnx-cuda": "cuda"}
"""The fusions of `export_graph`, by runtime; TensorRT and OpenVINO know none."""
COPIED: Final = (".json", ".txt", ".model", ".jinja", ".py")
"""Files of a checkpoint beside its weights."""
DROPPED: Final = (
    *("huggingface_model", "revision", "tokenizer", "tokenizer_revision", "cache_dir"),
    *("runtime", "precision", "dtype", "attn_implementation", "quantization_config", "load_format", "pack_weights"),
)
"""Settings of where the checkpoint came from and of how PyTorch computes it."""


class GraphWriter:
    """Exports a folder's model; in a process of its own, since exporters take memory and leave patches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, target: Path, runtime: GraphRuntime) -> str:
        """Write a folder with the model in float32; returns how its graph was made.

        Raises:
            Exception: It cannot be exported; transformers', torch's or onnx' own.
        """
        from hf_triton.runner.graph_export import export_graph
        from hf_triton.runner.graph_model import GPU_PROVIDERS, processor_of, runtime_version
        from hf_triton.runner.positions import max_positions

        task, checkpoint, settings = Candidate(self._folder, {"dtype": "float32"}).load()
        checkpoint_folder = target / PLACE
        checkpoint_folder.mkdir(parents=True)
        made = export_graph(
            checkpoint.model, task.model_outputs, checkpoint_folder / GRAPHS["float32"], FUSIONS.get(runtime)
        )
        num_ids, num_positions = checkpoint.vocabulary_size, max_positions(checkpoint.model)
        version = runtime_version(runtime) or ""
        GraphFacts(num_ids, num_positions, processor_of(runtime), version).write(checkpoint_folder)
        changed = {"task": task.declaration.name, "runtime": runtime, "precision": "float32"}
        self._write_rest(target, PLACE, checkpoint, settings, changed, on_gpu=runtime in GPU_PROVIDERS)
        return made

    def save(self, target: Path) -> str:
        """Write a folder with the weights in float16, for PyTorch on a GPU; returns how."""
        task, checkpoint, settings = Candidate(self._folder, {"dtype": "float16"}).load()
        checkpoint.model.save_pretrained(target / HALF)
        changed = {"task": task.declaration.name, "dtype": "float16"}
        self._write_rest(target, HALF, checkpoint, settings, changed, on_gpu=True)
        return "save_pretrained"

    def _write_rest(
        self, target: Path, place: str, checkpoint: Any, settings: Any, changed: dict[str, str], *, on_gpu: bool
    ) -> None:
        """Write what is beside the model."""
        tokenizer = Hub(self._folder, settings, os.environ).resolve_tokenizer()
        for source in (checkpoint.folder, tokenizer or checkpoint.folder):
            _copy_small_files(source, target / place)
        for file in newest_version(self._folder).glob("*.py"):
            shutil.copyfile(file, target / "1" / file.name)
        _write_config(self._folder, target, {"huggingface_model": f"./{place}", **changed}, on_gpu=on_gpu)

    def quantize(self, target: Path, source: Path) -> str:
        """Write a folder of `write` again, with weights of 8 bits; returns how."""
        from hf_triton.runner.graph_export import quantize_graph
        from hf_triton.runner.graph_model import processor

        shutil.copytree(source, target, ignore=shutil.ignore_patterns(f"{GRAPHS['float32']}*"))
        reduces_range = "vnni" not in processor()
        file = GRAPHS["float32"]
        quantize_graph(source / PLACE / file, target / PLACE / GRAPHS["int8"], reduces_range=reduces_range)
        _write_config(source, target, {"precision": "int8"})
        return f"dynamic, by channel, weights of {7 if reduces_range else 8} bits"


def _copy_small_files(source: Path, target: Path) -> None:
    names = [path.name for path in source.iterdir() if path.suffix in COPIED or path.name in SPARSE_LINEAR]
    names = [name for name in names if not name.endswith("index.json")]
    there = [str(path.relative_to(source)) for path in source.glob("*/*")]
    for name in (*names, *files_of_modules(source, there, allow_pickle=True, needs_weights=True)):
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _write_config(source: Path, target: Path, settings: Mapping[str, str], *, on_gpu: bool = False) -> None:
    """Write a folder's config.pbtxt with other settings, for the CPU or as it was placed on a GPU."""
    config = parse_message(source)
    for name in DROPPED if "huggingface_model" in settings else ():
        if name in config.parameters:
            del config.parameters[name]
    for name, value in settings.items():
        config.parameters[name].string_value = value
    config.ClearField("name")
    for group in () if on_gpu else config.instance_group or [config.instance_group.add()]:
        group.kind = group.KIND_CPU
        del group.gpus[:]
    text = importlib.import_module("google.protobuf.text_format").MessageToString(config)
    (target / CONFIG).write_text(text, encoding="utf-8")
