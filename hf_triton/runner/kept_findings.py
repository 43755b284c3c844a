# SPDX-License-Identifier: Apache-2.0
"""Keeps what the trial at load found of text, and believes it if one run of its schedule gives the same logits again.

They were right beside `generate`, so a way that still computes them is right. What may change `generate` and not them
is in the file's name: the checkpoint's files, configs, packages, our own modules, the device. If anything else comes
out, the whole trial runs and writes the file anew. Files lie beside the Hub's cache where the Hub's folder exists: it
is not created, as where downloads go depends on that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load, save

import hf_triton
from hf_triton.files import read_bytes
from hf_triton.runner.faults import described, is_fatal, is_memory
from hf_triton.runner.float32 import HALF
from hf_triton.runner.model_comparison import LIMIT, NEAR, distance
from hf_triton.runner.model_runner import Way
from hf_triton.runner.way_probe import CANDIDATES, Finding, Schedule, find_way, short_windows

logger = logging.getLogger(__name__)

FOLDER: Final = Path("hf_triton", "trials")
MAX_FILES: Final = 64
MAX_BYTES: Final = 64 << 20
"""Of a file: six rows of logits."""
SAME: Final = LIMIT / 10
"""Part of a row's largest output by which float32 may differ; with what the trial allows, it is less than faults."""


def find_way_again(model: Any, context_length: int) -> Finding:
    """What `find_way` finds of text, or has found if the model still computes it."""
    file = _file_of(model, context_length)
    finding = file and _recall(file, model, context_length)
    if not finding:
        finding = find_way(model, context_length)
        if file and finding.way and finding.logits is not None:
            logits = finding.logits.half() if model.dtype in HALF else finding.logits
            _keep(file, finding.way, finding.obstacle, logits)
    return finding


def _file_of(model: Any, context_length: int) -> Path | None:
    """The file of all that the result depends on; None: it is not kept."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    try:
        checkpoint, folder = model.config._name_or_path, Path(home).expanduser()
        if not checkpoint or not Path(checkpoint).is_dir() or not folder.is_dir():
            return None
        places = [Path(place) for place in sys.path if os.path.isdir(place)]
        key = [
            _files(Path(checkpoint), "*"),
            _files(Path(__file__).parent, "*.py"),
            sorted({each.name for place in places for each in place.glob("*-info")}),
            [torch.__version__, transformers.__version__, hf_triton.__version__, context_length],
            [
                str(model.device),
                *_processor(model.device),
                model.config.get_text_config(decoder=True)._attn_implementation,
            ],
            sorted({str(each.dtype) for each in (model, *model.parameters(), *model.buffers())}),
            sorted(
                {f"{type(each).__module__}.{type(each).__qualname__}({each.extra_repr()})" for each in model.modules()}
            ),
            [model.config.to_dict(), model.generation_config.to_dict()],
        ]
        text = json.dumps(key, sort_keys=True, default=str)
    except Exception as error:  # a config may hold anything
        logger.debug("the trial's result is not kept (%s)", described(error))
        return None
    return folder / FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()}.safetensors"


def _files(folder: Path, pattern: str) -> list[tuple[str, str | tuple[int, int]]]:
    """Each file's name within a folder and its digest, as the Hub's cache names it, or its size and time."""
    found: list[tuple[str, str | tuple[int, int]]] = []
    for path in sorted(each for each in folder.rglob(pattern) if each.is_file()):
        target, status = path.resolve(), path.stat()
        is_named = path.is_symlink() and target.parent.name == "blobs"
        digest = target.name if is_named else (status.st_size, status.st_mtime_ns)
        found.append((str(path.relative_to(folder)), digest))
    return found


def _processor(device: torch.device) -> list[Any]:
    if device.type != "cuda":
        return [torch.backends.cpu.get_cpu_capability()]
    return [torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)]


def _recall(file: Path, model: Any, context_length: int) -> Finding | None:
    """The kept finding; None: there is none that the model confirms."""
    try:
        kept = load(read_bytes(file, MAX_BYTES))
        told, logits = json.loads(bytes(kept["finding"].tolist())), kept["logits"].float()
        way = next(each for each in CANDIDATES if asdict(each) == told["way"])
        with short_windows(model, context_length):
            found = Schedule(model).compute(way)
        limit = NEAR if model.dtype in HALF else SAME
        apart = distance(logits, found) if logits.shape == found.shape else float("inf")
        if not apart <= limit:
            raise ValueError(f"its logits differ by {apart:.1e} of the largest output, where {limit:.1e} is allowed")
    except Exception as error:  # a file of another program, a model that may do anything in its forward
        if is_memory(error) or is_fatal(error):
            raise
        logger.debug("no kept result of the trial is taken (%s)", described(error))
        return None
    logger.debug("the model runs as %s, as an earlier trial found: %.1e of the largest output apart", way, apart)
    return Finding(way, str(told["obstacle"]))


def _keep(file: Path, way: Way, obstacle: str, logits: torch.Tensor) -> None:
    text = json.dumps({"way": asdict(way), "obstacle": obstacle})
    data = save({"finding": torch.tensor([*text.encode()], dtype=torch.uint8), "logits": logits})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".new", dir=file.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            os.replace(name, file)
        except BaseException:
            os.unlink(name)
            raise
        files = (each for each in file.parent.iterdir() if each.is_file())  # others may be there
        for old in sorted(files, key=lambda each: each.stat().st_mtime_ns)[:-MAX_FILES]:
            old.unlink()
    except OSError as error:  # a read-only folder, a full disk, another process that removes the same
        logger.debug("the trial's result is not kept (%s)", described(error))
