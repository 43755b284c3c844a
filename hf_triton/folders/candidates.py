# SPDX-License-Identifier: Apache-2.0
"""What `hf-triton optimize` compares: model folders, each run in a process of its own, so that a crash is one's own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from hf_triton.errors import HfTritonError, ServerError
from hf_triton.folders.folders import load_folder_settings, parse_config
from hf_triton.folders.own_code import own_class
from hf_triton.server import describe_status

if TYPE_CHECKING:
    from hf_triton.encoder.jobs import EncoderInput
    from hf_triton.encoder.probe import Way

WEIGHTS: Final = (".safetensors", ".bin", ".onnx", ".data")
TEXTS: Final = "texts"
"""The case of all texts at once; the others are pairs of a number of texts and of their tokens."""
Case = tuple[int, int] | str


@dataclass(frozen=True)
class Candidate:
    """A model folder as it would be served."""

    folder: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings in place of the folder's."""
    way: Way | None = None
    """How sequences share a forward; None: as the probe finds."""
    on_gpu: bool = False
    """Whether Triton would place it on the first GPU, and not on the CPU."""

    def load(self) -> tuple[Any, Any, Any]:
        """The folder's task, checkpoint and settings."""
        from hf_triton.hub.checkpoint import Placement, load_checkpoint
        from hf_triton.hub.locate import Hub
        from hf_triton.tasks.registry import folder_task

        own = own_class(self.folder)
        loaded = load_folder_settings(parse_config(self.folder), own.settings_class)
        settings = loaded.settings.model_copy(update=dict(self.overrides))
        task: Any = folder_task(own.task_class, settings, self.folder)
        hub = Hub(self.folder, settings, os.environ)
        checkpoint = load_checkpoint(hub, settings, Placement("GPU" if self.on_gpu else "CPU", 0), task.auto_class)
        return task(checkpoint, settings), checkpoint, settings


class Measured:
    """A candidate in its own process: its engine, as Triton's process would have it."""

    def __init__(self, candidate: Candidate, texts: Sequence[str]) -> None:
        from hf_triton.tasks.encoder_service import build_task_engine

        began_s = time.perf_counter()
        task, checkpoint, settings = candidate.load()
        self._engine = build_task_engine(task, checkpoint, settings, way=candidate.way)
        self._load_s = time.perf_counter() - began_s
        self._folder = checkpoint.folder
        self._max_length: int = task.max_length
        encoded = [task.to_input(task.tokenize(text, truncate=True)) for text in texts]
        # A masked-language head is asked for the masks alone.
        name = task.declaration.name
        self._positions = [1] if name == "fill-mask" else None
        self._kind = "vectors" if task.auto_class == "AutoModel" and name != "sparse-embeddings" else "logits"
        self._has_types = encoded[0].type_ids is not None
        self._inputs = [self._input(each.ids) for each in encoded]
        self._ids = [token_id for each in encoded for token_id in each.ids]

    def _input(self, ids: list[int]) -> EncoderInput:
        from hf_triton.encoder.jobs import EncoderInput

        return EncoderInput(ids, [0] * len(ids) if self._has_types else None, self._positions)

    def facts(self) -> dict[str, Any]:
        """What the table says of it beside times."""
        import torch

        files = [path for path in self._folder.glob("*") if path.suffix in WEIGHTS]
        return {
            "load_s": self._load_s,
            "num_bytes": sum(path.stat().st_size for path in files),
            "max_length": self._max_length,
            "kind": self._kind,
            "way": self._engine.way,
            "num_threads": torch.get_num_threads(),
        }

    def outputs(self) -> list[npt.NDArray[np.float32]]:
        """What the model gives for each text."""
        return self._engine.run(self._inputs)

    def times_s(self, case: Case, num_runs: int) -> list[float]:
        """Seconds of each of some runs, which end when the outputs are on the host, also those of a GPU."""
        inputs = self._inputs
        if not isinstance(case, str):
            num_texts, num_tokens = case
            ids = self._ids * (num_tokens // len(self._ids) + 1)
            inputs = [self._input(ids[:num_tokens])] * num_texts
        times_s = []
        for _ in range(num_runs):
            began_s = time.perf_counter()
            self._engine.run(inputs)
            times_s.append(time.perf_counter() - began_s)
        return times_s


class Child:
    """An object in a process of its own.

    Args:
        log: Gets what libraries print there.
        kind: Its class.
        *args: What it is built of, before the first call.
    """

    def __init__(self, log: Path, kind: type[Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, log, kind, args), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        """What a method of the object returns; a ServerError if it failed, or the process ended."""
        try:
            self._connection.send((method, args))
            sentence, result = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            status = describe_status(self._process.exitcode or 0)
            raise ServerError("server_failed", f"its process ended {status}") from None
        if sentence is not None:
            raise ServerError("server_failed", sentence)
        return result

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        self._process.kill()


def _serve(connection: Connection, log: Path, kind: type[Any], args: tuple[Any, ...]) -> None:
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())
        os.dup2(stream.fileno(), sys.stderr.fileno())
    built = None
    while True:
        try:
            method, call_args = connection.recv()
        except EOFError:
            return
        answer: tuple[str | None, Any]
        try:
            built = built or kind(*args)
            answer = None, getattr(built, method)(*call_args)
        except Exception as error:  # exporters and runtimes have types of their own; the texts are the user's
            sentence = error.sentence if isinstance(error, HfTritonError) else f"{type(error).__name__}: {error}"
            answer = " ".join(sentence.split())[:300], None
        connection.send(answer)
