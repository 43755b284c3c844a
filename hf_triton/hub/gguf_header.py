# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file, read within bounds, before a reader gets the file. Reads no weights.

Readers believe the counts of a header, keep an object for each entry, and take an array of one number for the number.
So the header is walked here first: what it says of tensors is compared with the file's size, and what it says of the
model with its types and bounds.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from hf_triton.errors import CheckpointError, clip
from hf_triton.files import open_regular
from hf_triton.hub.gguf import part_names, require_package

BLOCK: Final = re.compile(r"blk\.(\d{1,9})\.")
ARCHITECTURE: Final = "general.architecture"
CHAT_TEMPLATE: Final = "tokenizer.chat_template"
MAX_HEADER_BYTES: Final = 64 << 20
MAX_TENSORS: Final = 100_000
"""The limit of tensors, and of keys."""
MAX_ELEMENTS: Final = 1_500_000
"""The limit for all arrays together; a vocabulary of 262,144 tokens has 800,000."""
MAX_DIMENSIONS: Final = 4
MAX_KEPT: Final = 4096
"""Numbers of an array that are kept: one for each layer, or for each section of positions."""
MAX_COUNT: Final = (1 << 31) - 1
NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
"""Types of a header's values; the others are in `NUMBERS`, as `struct` has them."""
COUNTS: Final = (
    "context_length",
    "block_count",
    "embedding_length",
    "attention.head_count",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "vocab_size",
)
"""Keys of an architecture that are whole numbers above 0."""
MAYBE_COUNTS: Final = (
    "feed_forward_length",
    "attention.head_count_kv",
    "attention.sliding_window",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "rope.scaling.original_context_length",
)
"""Whole numbers that may be 0."""
SIZES: Final = (
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scale_linear",
)
"""Numbers that may be broken."""
PER_LAYER: Final = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Numbers that may be lists, of one for each block."""
UNUSED_BY: Final = {"mamba": ("attention.head_count", "attention.head_count_kv", "feed_forward_length")}
"""Keys that llama.cpp's converter writes as 0, for readers that ask for them."""
TEXTS: Final = (CHAT_TEMPLATE, "general.name", "tokenizer.ggml.model", "tokenizer.ggml.pre")
TOKEN_IDS: Final = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown", "padding"))
FLAGS: Final = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix")
TOKENS: Final = "tokenizer.ggml.tokens"
TYPES: Final = "tokenizer.ggml.token_type"
SCORES: Final = "tokenizer.ggml.scores"
LISTS: Final = {TOKENS: (STRING,), "tokenizer.ggml.merges": (STRING,), SCORES: (6, 12), TYPES: (4, 5)}
"""Keys that are arrays, and the types of their elements."""


class GgufArray(NamedTuple):
    kind: int
    """The type of its elements."""
    length: int
    numbers: tuple[float, ...] = ()
    """Its elements, if they are not more than `MAX_KEPT` numbers, or types of tokens."""
    texts: tuple[str, ...] = ()
    """Its elements, if they are tokens."""


class GgufTensor(NamedTuple):
    """A tensor's place in the file."""

    shape: tuple[int, ...]
    """Its sizes as in the file, the fastest dimension first."""
    kind: int
    start: int
    """The byte of the file at which its data begin."""
    num_bytes: int
    part: int = 0
    """Which of a model's files it is in."""


@dataclass
class GgufHeader:
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, GgufTensor] = field(default_factory=dict)
    """The tensors of all parts."""
    files: list[Path] = field(default_factory=list)
    """The file, or its parts."""

    @property
    def architecture(self) -> str:
        """The model's family, as llama.cpp calls it."""
        return str(self.values[ARCHITECTURE])

    @property
    def own(self) -> dict[str, Any]:
        """The values of the architecture's keys, by their names without it."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}

    @property
    def num_elements(self) -> int:
        """Numbers of all tensors together."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def check_gguf(file: Path, name: str) -> GgufHeader:
    """Read a header within bounds; of a file in parts, of which the first one is given, the headers of all.

    Raises:
        CheckpointError: The package gguf is missing, or a file is another one, damaged, cut off or hostile.
    """
    require_package(file.name, name)
    header = GgufHeader()
    for part in (file.with_name(each) for each in part_names(file.name)):
        _read_part(header, part, name)
    with _reported(file, name):
        _check_blocks(header)
        _check_numbers(header)
        _check_tokenizer(header)
    return header


def _read_part(header: GgufHeader, file: Path, name: str) -> None:
    with _reported(file, name), open_regular(file) as stream:
        own = _walk(stream.read(MAX_HEADER_BYTES), file.stat().st_size, is_later=bool(header.files))
        if both := own.tensors.keys() & header.tensors.keys():
            raise ValueError(f"has the tensor {clip(min(both))}, which an earlier part has")
        header.values = header.values or own.values
        number = len(header.files)
        header.tensors |= {each: tensor._replace(part=number) for each, tensor in own.tensors.items()}
        header.files.append(file)


@contextmanager
def _reported(file: Path, name: str) -> Iterator[None]:
    """Report what is wrong with a file."""
    try:
        yield
        return
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


def _walk(blob: bytes, file_size: int, *, is_later: bool = False) -> GgufHeader:
    """Read the header of one file; `is_later` says that it is not the first part, which describes the model."""
    cursor = _Cursor(blob)
    if cursor.blob[:4] != b"GGUF":
        raise ValueError("is no GGUF file, which begins with GGUF")
    _, version, num_tensors, num_keys = cursor.take("IIQQ")
    if version not in (2, 3):
        is_big = version & 0xFFFF == 0
        kind = "the other order of bytes (big-endian)" if is_big else f"version {version} of the format"
        raise ValueError(f"has {kind}; versions 2 and 3 are read, little-endian")
    if max(num_tensors, num_keys) > MAX_TENSORS:
        raise ValueError(f"has {num_tensors} tensors and {num_keys} keys by its header; {MAX_TENSORS} of each are read")
    header = GgufHeader()
    for _ in range(num_keys):
        key, kind = cursor.text(), *cursor.take("I")
        header.values[key] = cursor.value(kind, keeps=key in (TOKENS, TYPES))
    if not is_later and not isinstance(header.values.get(ARCHITECTURE), str):
        raise ValueError(f"has no {ARCHITECTURE} in its header")
    for _ in range(num_tensors):
        name, tensor = cursor.tensor()
        header.tensors[name] = tensor
    alignment = header.values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"has general.alignment {clip(alignment)}, which is no power of two")
    start = -(-cursor.offset // alignment) * alignment
    header.tensors = {name: each._replace(start=start + each.start) for name, each in header.tensors.items()}
    end = max((each.start + each.num_bytes for each in header.tensors.values()), default=0)
    if end > file_size:
        raise ValueError(f"has {file_size} bytes, and its tensors end at byte {end}")
    return header


def _check_blocks(header: GgufHeader) -> None:
    """Refuse a number of blocks that is not that of the tensors: a reader builds each, or passes over tensors."""
    claimed = header.own.get("block_count")
    num_blocks = 1 + max((int(block[1]) for name in header.tensors if (block := BLOCK.match(name))), default=-1)
    if type(claimed) is int and (claimed > len(header.tensors) or claimed != (num_blocks or claimed)):
        raise ValueError(f"has {len(header.tensors)} tensors of {num_blocks} blocks, and {claimed} by its header")


def _check_numbers(header: GgufHeader) -> None:
    """Refuse values of the architecture's keys that are of other types than readers take them for, or out of bounds."""
    own = header.own
    maybe_counts = {*MAYBE_COUNTS, *UNUSED_BY.get(header.architecture, ())}
    for name, value in own.items():
        is_list = isinstance(value, GgufArray)
        may_be_list = name in PER_LAYER and is_list and value.length == own.get("block_count")
        if is_list and not may_be_list and (name in {*COUNTS, *MAYBE_COUNTS, *SIZES} or value.length == 1):
            raise ValueError(f"has a list of {value.length} for {name} in its header, which must be a number")
        for number in value.numbers if is_list else (value,):
            fault = None
            if name in COUNTS or name in maybe_counts:
                lowest = 1 if name in COUNTS and name not in maybe_counts and not is_list else 0
                if type(number) is not int or not lowest <= number <= MAX_COUNT:
                    fault = f"a whole number >= {lowest}"
            elif isinstance(number, float) and not math.isfinite(number):
                fault = "a finite number"
            elif name in SIZES and (isinstance(number, str | bool) or number < 0):
                fault = "a number >= 0"
            if fault:
                raise ValueError(f"has {name} {clip(number)} in its header, which must be {fault}")


def _check_tokenizer(header: GgufHeader) -> None:
    """Refuse values of a tokenizer's keys that are of other types, and ids that are no token's."""
    values = header.values
    for key in TEXTS:
        if not isinstance(values.get(key, ""), str):
            raise ValueError(f"has a {key} that is no text in its header")
    for key in FLAGS:
        if not isinstance(values.get(key, True), bool):
            raise ValueError(f"has a {key} that is neither true nor false in its header")
    for key, kinds in LISTS.items():
        value = values.get(key)
        if value is not None and not (isinstance(value, GgufArray) and value.kind in kinds):
            raise ValueError(f"has a {key} that is no list of {'texts' if STRING in kinds else 'numbers'}")
    num_tokens = values[TOKENS].length if TOKENS in values else 0
    for key in (TYPES, SCORES):
        if key in values and values[key].length != num_tokens:
            raise ValueError(f"has {num_tokens} tokens in its header, and {values[key].length} of {key}")
    for key in TOKEN_IDS:
        value = values.get(key, 0)
        if type(value) is not int or not 0 <= value < max(1, num_tokens):
            raise ValueError(f"has {key} {clip(value)} in its header, and {num_tokens} tokens")


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

    def value(self, kind: int, *, keeps: bool = False) -> Any:
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
        if element in NUMBERS and (length <= MAX_KEPT or keeps):
            return GgufArray(element, length, self.take(f"{length}{NUMBERS[element]}"))
        if element == STRING and keeps:
            return GgufArray(element, length, texts=tuple(self.text() for _ in range(length)))
        for _ in range(length):
            self.value(element)
        return GgufArray(element, length)

    def tensor(self) -> tuple[str, GgufTensor]:
        """Read a tensor's entry: its name and place, counted from where all data begin."""
        name, num_dimensions = self.text(), *self.take("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"has a tensor of {num_dimensions} dimensions, {clip(name)}")
        *shape, kind, offset = self.take(f"{num_dimensions}QIQ")
        if kind not in self._block_sizes:
            raise ValueError(f"has the tensor {clip(name)} of type {kind}, which the package gguf does not know")
        block, num_bytes = self._block_sizes[kind]
        if shape and shape[0] % block:
            raise ValueError(f"has the tensor {clip(name)} of rows of {shape[0]} values, in blocks of {block}")
        return name, GgufTensor(tuple(shape), kind, offset, math.prod(shape) // block * num_bytes)
