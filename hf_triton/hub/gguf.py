# SPDX-License-Identifier: Apache-2.0
"""GGUF files: which one of a checkpoint is loaded, and whether its header may be given to a reader.

Readers believe the counts of a header, and keep an object for each entry. So the header is walked here first, within
bounds, and what it says of tensors is compared with the file's size. Reads no weights.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hf_triton.errors import CheckpointError, clip
from hf_triton.files import open_regular

SUFFIX: Final = ".gguf"
BESIDE_MODELS: Final = re.compile("mmproj|imatrix", re.IGNORECASE)
"""Files of a vision tower, and statistics of a quantiser."""
PART: Final = re.compile(r"-\d+-of-(\d+)\.gguf$", re.IGNORECASE)
SAFETENSORS: Final = {"model.safetensors", "model.safetensors.index.json"}
PICKLES: Final = {"pytorch_model.bin", "pytorch_model.bin.index.json"}
BLOCK: Final = re.compile(r"blk\.(\d{1,9})\.")
ARCHITECTURE: Final = "general.architecture"
CHAT_TEMPLATE: Final = "tokenizer.chat_template"
MAX_HEADER_BYTES: Final = 64 << 20
MAX_TENSORS: Final = 100_000
"""And as many keys."""
MAX_ELEMENTS: Final = 1_500_000
"""Of all arrays together; a vocabulary of 262,144 tokens has 800,000."""
MAX_DIMENSIONS: Final = 4
MAX_SHOWN: Final = 12
NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
"""Types of a header's values; the others are in `NUMBERS`, as `struct` has them."""


def find_gguf(folder: Path, wanted: str | None, *, allow_pickle: bool = False) -> str | None:
    """The GGUF file that a folder is loaded from, see `choose_gguf`."""
    names = [str(path.relative_to(folder)) for pattern in ("*", f"*/*{SUFFIX}") for path in folder.glob(pattern)]
    return choose_gguf(names, wanted, allow_pickle=allow_pickle)


def choose_gguf(names: Iterable[str], wanted: str | None, *, allow_pickle: bool = False) -> str | None:
    """The GGUF file that a checkpoint is loaded from; None: it is loaded from other weights.

    Args:
        names: The checkpoint's files, here or on the Hub.
        wanted: The setting `gguf_file`: a file, or the end of its name. Without it, a file that is alone is taken if
            there are no other weights.
        allow_pickle: Whether pickles are such weights.

    Raises:
        CheckpointError: No file or more than one is meant, or one in parts.
    """
    names = {name for name in names if name.count("/") <= 1}
    files = sorted(name for name in names if name.endswith(SUFFIX) and not BESIDE_MODELS.search(name))
    if wanted is None:
        others = SAFETENSORS | (PICKLES if allow_pickle else set())
        chosen = [] if others & names or len(files) != 1 else files
    elif wanted.endswith(SUFFIX) and wanted in names:
        chosen = [wanted]
    else:
        ending = re.compile(rf"(^|[-._/]){re.escape(wanted)}(-\d+-of-\d+)?\.gguf$", re.IGNORECASE)
        chosen = [name for name in files if ending.search(name)]
    if part := next(filter(None, map(PART.search, chosen)), None):
        raise CheckpointError(
            "unsupported_model",
            f"{chosen[0]} is one of {int(part[1])} parts, and transformers reads one file: choose a smaller "
            "quantisation, or join them with `llama-gguf-split --merge`",
        )
    if wanted is not None and len(chosen) != 1:
        fault = f"{len(chosen)} GGUF files have" if chosen else "no GGUF file has"
        remedy = f"to one of {list_files(chosen or files)}" if files else "only for a repository or folder of them"
        raise CheckpointError(
            "checkpoint_incomplete", f"{fault} the name or quantisation {clip(wanted)}: set gguf_file {remedy}"
        )
    return next(iter(chosen), None)


def list_files(files: Iterable[str]) -> str:
    """Names for a sentence."""
    names = sorted(files)
    return f"{', '.join(names[:MAX_SHOWN])}{', ...' if len(names) > MAX_SHOWN else ''}"


@dataclass
class GgufHeader:
    """What is used of a header."""

    values: dict[str, Any] = field(default_factory=dict)
    """Keys and their values; those of arrays are None."""
    tensors: list[str] = field(default_factory=list)
    """Their names."""


def check_gguf(file: Path, name: str) -> GgufHeader:
    """Read a header within bounds.

    Args:
        file: The GGUF file.
        name: The model's, for messages.

    Raises:
        CheckpointError: The package gguf is missing, or the file is another one, damaged, cut off or hostile.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise CheckpointError(
            "checkpoint_invalid",
            f"{file.name} of {name} cannot be read without the package gguf: `pip install 'hf-triton[gguf]'`",
        ) from None
    try:
        return _read_header(file)
    except struct.error:
        fault = f"ends within its header, or has one of more than {MAX_HEADER_BYTES >> 20} MiB"
    except (OSError, ValueError) as error:
        fault = str(error)
    raise CheckpointError(
        "checkpoint_invalid", f"{file.name} of {name} {fault}: fetch the file again, or choose another one"
    )


def is_whole_header(blob: bytes, file_size: int) -> bool:
    """Whether the first bytes of a file have its whole header, or show that it is none that is read."""
    try:
        _walk(blob, file_size)
    except struct.error:
        return len(blob) >= min(MAX_HEADER_BYTES, file_size)
    except ValueError:  # which `check_gguf` reports
        pass
    return True


def _read_header(file: Path) -> GgufHeader:
    with open_regular(file) as stream:
        return _walk(stream.read(MAX_HEADER_BYTES), file.stat().st_size)


def _walk(blob: bytes, file_size: int) -> GgufHeader:
    cursor = _Cursor(blob)
    if cursor.blob[:4] != b"GGUF":
        raise ValueError("is no GGUF file, which begins with GGUF")
    _, version, num_tensors, num_keys = cursor.take("IIQQ")
    if version not in (2, 3):
        raise ValueError(f"has version {version} of the format; versions 2 and 3 are read")
    if max(num_tensors, num_keys) > MAX_TENSORS:
        raise ValueError(f"has {num_tensors} tensors and {num_keys} keys by its header; {MAX_TENSORS} of each are read")
    header = GgufHeader()
    for _ in range(num_keys):
        key, kind = cursor.text(), *cursor.take("I")
        header.values[key] = cursor.value(kind)
    if not isinstance(header.values.get(ARCHITECTURE), str):
        raise ValueError(f"has no {ARCHITECTURE} in its header")
    if not isinstance(header.values.get(CHAT_TEMPLATE, ""), str):
        raise ValueError(f"has a {CHAT_TEMPLATE} that is no text in its header")
    ends = []
    for _ in range(num_tensors):
        name, end = cursor.tensor()
        header.tensors.append(name)
        ends.append(end)
    _check_blocks(header)
    alignment = header.values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"has general.alignment {clip(alignment)}, which is no power of two")
    end = -(-cursor.offset // alignment) * alignment + max(ends, default=0)
    if end > file_size:
        raise ValueError(f"has {file_size} bytes, and its tensors end at byte {end}")
    return header


def _check_blocks(header: GgufHeader) -> None:
    """Refuse a number of blocks that is not that of the tensors: a reader builds each, or passes over tensors."""
    claimed = header.values.get(f"{header.values[ARCHITECTURE]}.block_count")
    num_blocks = 1 + max((int(block[1]) for name in header.tensors if (block := BLOCK.match(name))), default=-1)
    if isinstance(claimed, int) and (claimed > len(header.tensors) or claimed != (num_blocks or claimed)):
        raise ValueError(f"has {len(header.tensors)} tensors of {num_blocks} blocks, and {claimed} by its header")


class _Cursor:
    """A place in a header; `struct.error` means that the header goes beyond what there is."""

    def __init__(self, blob: bytes) -> None:
        from gguf import GGML_QUANT_SIZES

        self.blob = blob
        self._block_sizes = {kind.value: size for kind, size in GGML_QUANT_SIZES.items()}
        self.offset = 0
        self._num_elements = 0

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.blob, self.offset)
        self.offset += struct.calcsize(f"<{form}")
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        if length > len(self.blob) - self.offset:
            raise struct.error
        self.offset += length
        try:
            return self.blob[self.offset - length : self.offset].decode()
        except UnicodeDecodeError:
            raise ValueError("has a text in its header that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in NUMBERS:
            return self.take(NUMBERS[kind])[0]
        if kind != ARRAY:
            raise ValueError(f"has a value of the unknown type {kind} in its header")
        element, length = self.take("IQ")
        self._num_elements += length
        if self._num_elements > MAX_ELEMENTS or element == ARRAY:
            raise ValueError(f"has arrays of more than {MAX_ELEMENTS} elements in its header, or one of arrays")
        for _ in range(length):
            self.value(element)
        return None

    def tensor(self) -> tuple[str, int]:
        """Read a tensor's entry: its name, and the byte behind its data, counted from where all data begin."""
        name, num_dimensions = self.text(), *self.take("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"has a tensor of {num_dimensions} dimensions, {clip(name)}")
        *shape, kind, offset = self.take(f"{num_dimensions}QIQ")
        if kind not in self._block_sizes:
            raise ValueError(f"has the tensor {clip(name)} of type {kind}, which the package gguf does not know")
        block, num_bytes = self._block_sizes[kind]
        if shape and shape[0] % block:
            raise ValueError(f"has the tensor {clip(name)} of rows of {shape[0]} values, in blocks of {block}")
        return name, offset + math.prod(shape) // block * num_bytes
