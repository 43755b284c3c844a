# SPDX-License-Identifier: Apache-2.0
"""Audio files of every kind, wrong ones too, and the resampler beside a sine's own values."""

import base64
import io
import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import soundfile

from hf_triton.errors import RequestError
from hf_triton.tasks.audio import read_audio, resample
from tests.support.speech import RATE, encode, sound

MAX_S = 60.0
SECOND = sound(1.0)
WAV = encode(SECOND)
FLAC = encode(SECOND, format="FLAC")


def read(data: bytes) -> np.ndarray:
    return read_audio(data, RATE, MAX_S, "audio")


def with_bytes(data: bytes, offset: int, new: bytes) -> bytes:
    return data[:offset] + new + data[offset + len(new) :]


@pytest.mark.parametrize(
    ("format", "subtype", "tolerance"),
    [
        *(("WAV", subtype, 1e-4) for subtype in ("PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")),
        *(("WAV", subtype, 0.05) for subtype in ("PCM_U8", "ALAW", "ULAW")),
        *((format, None, 1e-4) for format in ("FLAC", "AIFF")),
        *((format, None, 0.5) for format in ("OGG", "MP3")),
    ],
)
def test_formats(format: str, subtype: str | None, tolerance: float) -> None:
    samples = read(encode(SECOND, format=format, subtype=subtype))
    assert samples.dtype == np.float32
    assert len(samples) == RATE
    np.testing.assert_allclose(samples, SECOND, atol=tolerance)


@pytest.mark.parametrize("rate", [1000, 8000, 11_025, 22_050, 44_100, 44_101, 48_000, 96_000, 383_983, 384_000])
def test_other_rates_sound_the_same(rate: int) -> None:
    def tone(at: int) -> np.ndarray:
        return np.sin(2 * np.pi * 300 * np.arange(int(1.1 * at)) / at).astype(np.float32)

    blocks = np.array_split(tone(rate), 5)
    samples = np.concatenate(list(resample(iter(blocks), rate, RATE)))
    expected = np.sin(2 * np.pi * 300 * np.arange(len(samples)) / RATE)
    assert len(samples) == -(-int(1.1 * rate) * RATE // rate)
    np.testing.assert_allclose(samples[500:-500], expected[500:-500], atol=1e-3)
    np.testing.assert_allclose(samples, np.concatenate(list(resample(iter([tone(rate)]), rate, RATE))), atol=1e-6)


def test_what_the_new_rate_cannot_hold_is_silent() -> None:
    high = np.sin(2 * np.pi * 12_000 * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(np.concatenate(list(resample(iter([high]), 48_000, RATE))))[500:-500].max() < 1e-3


def test_short_audio_of_another_rate() -> None:
    for num in (1, 2, 5, 100):
        assert len(read(encode(SECOND[:num], 48_000))) == -(-num // 3)


def test_channels_are_averaged() -> None:
    both = np.stack([SECOND, np.zeros_like(SECOND)], axis=1)
    np.testing.assert_allclose(read(encode(both, subtype="FLOAT")), SECOND / 2, atol=1e-6)
    many = np.tile(SECOND[:100, None], (1, 1000))
    np.testing.assert_allclose(read(encode(many, subtype="FLOAT")), SECOND[:100], atol=1e-5)


@pytest.mark.parametrize("endian", ["LITTLE", "BIG"])
@pytest.mark.parametrize("has_size", [True, False])
def test_a_streamed_wav_without_a_length_is_read_to_its_end(endian: str, has_size: bool) -> None:
    file = io.BytesIO()
    soundfile.write(file, SECOND, RATE, format="WAV", subtype="PCM_16", endian=endian)
    data = file.getvalue()
    whole = read(data)
    data = with_bytes(data, data.index(b"data") + 4, bytes(4))
    np.testing.assert_array_equal(read(data if has_size else with_bytes(data, 4, bytes(4))), whole)
    np.testing.assert_array_equal(read(base64.b64encode(data)), whole)


@pytest.mark.parametrize("end", [b"", b"LIST" + struct.pack("<I", 4) + b"INFO"])
def test_a_wav_without_sound_is_refused(end: bytes) -> None:
    empty = encode(SECOND[:0], subtype="PCM_16")
    with pytest.raises(RequestError, match="holds no sound"):
        read(empty[: empty.index(b"data") + 8] + end)


@pytest.mark.parametrize("head", [b"", b"data:audio/wav;base64,", b"DATA:;charset=utf-8;base64,"])
@pytest.mark.parametrize("data", [WAV, FLAC, encode(SECOND, format="OGG"), encode(SECOND, format="MP3")])
def test_base64(data: bytes, head: bytes) -> None:
    np.testing.assert_array_equal(read(head + base64.encodebytes(data)), read(data))


def test_a_file_that_broke_off_is_read_as_far_as_it_goes() -> None:
    samples = read(WAV[: len(WAV) // 2])
    np.testing.assert_array_equal(samples, read(WAV)[: len(samples)])
    assert len(samples) == RATE // 2 - 11


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "audio is empty: give a file of WAV, FLAC, OGG, MP3 or AIFF"),
        (b"nonsense", "audio is not WAV, FLAC, OGG, MP3 or AIFF, nor base64 of it"),
        (base64.b64encode(b"nonsense"), "audio is not WAV"),
        (b"data:audio/wav," + WAV, "audio is not WAV"),
        (b"https://example.com/a.wav", "audio is not WAV"),
        (b"/etc/passwd", "audio is not WAV"),
        (b"\x1a\x45\xdf\xa3" + b"\x00" * 60, "audio is WebM, which is not read: convert it to WAV, FLAC"),
        (b"\x00\x00\x00\x20ftypM4A ", "audio is MP4 or M4A, which is not read"),
        (b"RIFF", "audio cannot be read as WAV, FLAC, OGG, MP3 or AIFF ("),
        (WAV[:40], "audio cannot be read as"),
        (b"\xff\xfb" + b"\x00" * 200, "audio cannot be read as"),
        (encode(SECOND[:0]), "audio holds no sound, its length is 0"),
        (with_bytes(WAV, 24, struct.pack("<I", 0)), "audio cannot be read as"),
        (encode(SECOND, 999), "audio has a sample rate of 999 Hz: it must be >= 1000 and <= 384000"),
        (encode(np.full(10, np.nan, np.float32), subtype="FLOAT"), "audio holds samples that are NaN or infinite"),
        (encode(np.full(100, 1e30, np.float32), subtype="FLOAT"), "audio holds samples beyond"),
        (encode(sound(61.0)), "audio has 61 s, more than the 60 s that are accepted (setting max_audio_seconds)"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_wrong_files(data: bytes, sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(data)
    assert refused.value.sentence.startswith(sentence)


@pytest.mark.parametrize("cut", [50, 200, 1000, -100])
@pytest.mark.parametrize("format", ["FLAC", "OGG", "MP3"])
def test_compressed_files_that_broke_off(format: str, cut: int) -> None:
    data, sentence = encode(SECOND, format=format)[:cut], "audio cannot be read as"
    try:
        samples = read(data)
    except RequestError as error:
        sentence = error.sentence
    else:
        assert np.isfinite(samples).all()
    assert sentence.startswith(("audio cannot be read as", "audio holds no sound"))


def silence(hours: float, rate: int) -> bytes:
    return encode(np.zeros(int(hours * 3600 * rate), np.int16), rate, format="FLAC")


@pytest.mark.parametrize("hide", [lambda data: data, lambda data: with_bytes(data, 21, b"\x70\x00\x00\x00\x00")])
def test_hours_of_silence_are_refused_before_they_are_read(hide: Callable[[bytes], bytes]) -> None:
    bomb = hide(silence(1, 8000))
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="more than the 60 s that are accepted"):
            read(bomb)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_rate_without_a_simple_ratio_takes_little_memory() -> None:
    tracemalloc.start()
    try:
        assert len(read(encode(SECOND, 383_983))) == 667
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


def test_reading_ends_between_two_blocks() -> None:
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        read_audio(silence(0.25, 8000), RATE, 3600, "audio", check)
    assert len(calls) == 2
