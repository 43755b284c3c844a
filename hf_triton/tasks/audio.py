# SPDX-License-Identifier: Apache-2.0
"""Reads audio files: WAV, FLAC, OGG, MP3 or AIFF as samples of one channel at the model's rate. Knows no model.

Files are read in blocks, so that a small file of many hours takes no more memory than what is accepted.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from hf_triton.errors import CheckpointError, RequestError

Samples = npt.NDArray[np.float32]
FORMATS: Final = "WAV, FLAC, OGG, MP3 or AIFF"
CONTAINERS: Final = re.compile(rb"RIFF|RIFX|RF64|fLaC|OggS|FORM|ID3|\xff[\xe2-\xff]")
"""How the files begin that are read; base64 of them begins otherwise."""
OTHERS: Final = ((re.compile(rb"\x1a\x45\xdf\xa3"), "WebM"), (re.compile(rb"....ftyp", re.DOTALL), "MP4 or M4A"))
"""Containers that libsndfile does not read."""
MAX_CHUNKS: Final = 100
"""Parts of a WAV that are passed over to find its sound."""
CHUNK: Final = re.compile(rb"LIST|id3 |fact|cue |bext|smpl|JUNK|PAD ", re.IGNORECASE)
"""Parts of a WAV that may stand behind its sound."""
DATA_URI: Final = re.compile(rb"data:[^,]{0,200};base64,", re.IGNORECASE)
MIN_RATE, MAX_RATE = 1000, 384_000
MAX_SAMPLE: Final = 1 << 16
"""Floats are often 16-bit integers that nobody has divided; the powers of much larger ones are infinite."""
BLOCK_VALUES: Final = 1 << 20
"""Values of all channels that are read at a time."""
NUM_ZEROS: Final = 16
"""Zeros of the resampler's filter on each side of its middle."""
MAX_WEIGHTS: Final = 1 << 21
"""The resampler's weights. A rate without a simple ratio to the new one would take hundreds of megabytes: its ratio
is rounded, by 10 ms an hour at most."""
ROLLOFF: Final = 0.95
"""The filter ends here, as a part of the lower of both rates' bandwidths."""


def import_soundfile() -> Any:
    """The module soundfile; raises CheckpointError if it is not installed, or has no libsndfile."""
    try:
        import soundfile
    except (ImportError, OSError):
        raise CheckpointError(
            "unsupported_model", "audio files are read by the package soundfile: pip install 'hf-triton[audio]'"
        ) from None
    return soundfile


def read_audio(
    data: bytes, rate: int, max_seconds: float, name: str, check: Callable[[], None] = lambda: None
) -> Samples:
    """Read a file, or base64 of it, with a data URI's head or without.

    Args:
        data: The file.
        rate: The result's rate, in Hz.
        max_seconds: Longer audio is refused, before it is read.
        name: What messages call it.
        check: Called for each block that is read: a small file may take minutes. What it raises ends the reading.

    Returns:
        `[samples]`, one or more, all finite; the mean of the channels.

    Raises:
        RequestError: It cannot be read, is empty or too long.
    """
    soundfile = import_soundfile()
    data = _with_length(_plain(data, name))
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_head(file, max_seconds, name)
            blocks = list(resample(_mono_blocks(file, max_seconds, name, check), file.samplerate, rate))
    except soundfile.LibsndfileError as error:
        reason = error.error_string.rstrip(".")
        raise _refusal(f"{name} cannot be read as {FORMATS} ({reason}): encode it anew") from None
    samples = np.concatenate(blocks) if blocks else np.empty(0, np.float32)
    if not len(samples):
        raise _refusal(f"{name} holds no sound, its length is 0")
    if not np.isfinite(samples).all():
        raise _refusal(f"{name} holds samples that are NaN or infinite: encode it anew")
    if np.abs(samples).max() > MAX_SAMPLE:
        raise _refusal(f"{name} holds samples beyond {MAX_SAMPLE}, and full scale is 1: encode it anew")
    return samples


def _plain(data: bytes, name: str) -> bytes:
    if CONTAINERS.match(data):
        return data
    if not data:
        raise _refusal(f"{name} is empty: give a file of {FORMATS}")
    head = DATA_URI.match(data)
    encoded = data[head.end() if head else 0 :]
    try:
        decoded = base64.b64decode(encoded.translate(None, b" \r\n"), validate=True)
    except binascii.Error:
        decoded = b"" if head else data
    if CONTAINERS.match(decoded):
        return decoded
    other = next((kind for pattern, kind in OTHERS if pattern.match(decoded)), None)
    if other is not None:
        raise _refusal(f"{name} is {other}, which is not read: convert it to {FORMATS}")
    raise _refusal(f"{name} is not {FORMATS}, nor base64 of it")


def _with_length(data: bytes) -> bytes:
    """The file; a WAV that was streamed says that its sound has no bytes, and gets the length that it has."""
    if data[:4] not in (b"RIFF", b"RIFX"):
        return data
    order: Literal["little", "big"] = "little" if data[:4] == b"RIFF" else "big"
    start = 12
    for _ in range(MAX_CHUNKS):
        size, end = int.from_bytes(data[start + 4 : start + 8], order), len(data) - start - 8
        if data[start : start + 4] == b"data":
            if size or end <= 0 or CHUNK.match(data, start + 8):
                return data
            return data[: start + 4] + min(end, 0xFFFFFFFF).to_bytes(4, order) + data[start + 8 :]
        start += 8 + size + size % 2
    return data


def _refusal(sentence: str) -> RequestError:
    return RequestError("invalid_input", sentence)


def _check_head(file: Any, max_seconds: float, name: str) -> None:
    if not MIN_RATE <= file.samplerate <= MAX_RATE:
        raise _refusal(f"{name} has a sample rate of {file.samplerate} Hz: it must be >= {MIN_RATE} and <= {MAX_RATE}")
    if file.frames > max_seconds * file.samplerate and file.frames < 1 << 62:  # as a stream of unknown length has it
        raise _too_long(name, f"has {round(file.frames / file.samplerate, 2):g} s", max_seconds)


def _too_long(name: str, length: str, max_seconds: float) -> RequestError:
    return RequestError(
        "context_exceeded",
        f"{name} {length}, more than the {max_seconds:g} s that are accepted (setting max_audio_seconds)",
    )


def _mono_blocks(file: Any, max_seconds: float, name: str, check: Callable[[], None]) -> Iterator[Samples]:
    """The means of the channels, block by block; what the file's head says of its length is not relied on."""
    num_left = math.floor(max_seconds * file.samplerate)
    size = max(1, BLOCK_VALUES // file.channels)
    while len(block := file.read(size, dtype="float32", always_2d=True)):
        check()
        num_left -= len(block)
        if num_left < 0:
            raise _too_long(name, "is longer", max_seconds)
        yield block.mean(axis=1, dtype=np.float32) if block.shape[1] > 1 else block[:, 0]


def resample(blocks: Iterator[Samples], rate: int, new_rate: int) -> Iterator[Samples]:
    """The samples at another rate, in blocks, by a sinc filter with a Hann window.

    Each new sample lies between two old ones, at one of a fixed number of fractions of their distance; each fraction
    has its own weights for the old samples around it (a polyphase filter).
    """
    if rate == new_rate:
        yield from blocks
        return
    ratio = Fraction(rate, new_rate)
    filter_ = _Polyphase(ratio.limit_denominator(MAX_WEIGHTS // (2 * _Polyphase(ratio).reach)))
    kept, first, num_read, num_given = np.zeros(filter_.reach, np.float32), -filter_.reach, 0, 0
    for block in _with_end(blocks):
        if block is None:
            block, end = np.zeros(filter_.reach + 1, np.float32), -(-num_read * filter_.up // filter_.down)
        else:
            num_read += len(block)
            end = (num_read - filter_.reach) * filter_.up // filter_.down
        kept = np.concatenate([kept, block])
        for start in range(num_given, end, filter_.step):
            yield filter_.apply(kept, first, np.arange(start, min(start + filter_.step, end)))
        num_given = max(num_given, end)
        num_unused = max(0, num_given * filter_.down // filter_.up - filter_.reach - first)
        kept, first = kept[num_unused:], first + num_unused


def _with_end(blocks: Iterator[Samples]) -> Iterator[Samples | None]:
    yield from blocks
    yield None


@dataclass(frozen=True)
class _Polyphase:
    """A resampler's filter; new sample n lies at n * ratio of the old ones."""

    ratio: Fraction

    @property
    def down(self) -> int:
        """The ratio's numerator."""
        return self.ratio.numerator

    @property
    def up(self) -> int:
        """The ratio's denominator."""
        return self.ratio.denominator

    @property
    def _scale(self) -> float:
        """The filter's bandwidth, as a part of the old rate's."""
        return min(1.0, float(1 / self.ratio)) * ROLLOFF

    @property
    def reach(self) -> int:
        """Old samples on each side of a new one that it depends on."""
        return math.ceil(NUM_ZEROS / self._scale)

    @property
    def step(self) -> int:
        """New samples that are computed at a time: a few megabytes."""
        return max(1, BLOCK_VALUES // (2 * self.reach))

    @cached_property
    def _weights(self) -> Samples:
        """`[fractions, old samples]`."""
        fractions = np.arange(self.up, dtype=np.float64)[:, None] / self.up
        times = (np.arange(-self.reach + 1, self.reach + 1) - fractions) * self._scale
        window = np.cos(np.pi / 2 * np.clip(times / NUM_ZEROS, -1, 1)) ** 2
        weights: Samples = (np.sinc(times) * window * self._scale).astype(np.float32)
        return weights

    def apply(self, samples: Samples, first: int, positions: npt.NDArray[np.int64]) -> Samples:
        """New samples at positions, of old ones of which the first in the array has the number `first`."""
        places = positions * self.down
        windows = np.lib.stride_tricks.sliding_window_view(samples, 2 * self.reach)
        starts = places // self.up - self.reach + 1 - first
        result: Samples = np.einsum("ij,ij->i", windows[starts], self._weights[places % self.up])
        return result
