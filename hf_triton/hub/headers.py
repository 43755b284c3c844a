# SPDX-License-Identifier: Apache-2.0
"""Fetches the headers of weight files from the Hub. Files of them are as long as the Hub's, with holes for tensors."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from hf_triton.hub.gguf import SUFFIX, require_package
from hf_triton.hub.gguf_header import is_whole_header

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of safetensors' format."""
GGUF_STEP_BYTES: Final = 4 << 20
"""A GGUF file does not say how long its header is: it is read in such steps."""


def write_header(repo: str, name: str, commit: str, size: int, folder: Path) -> None:
    """Write the header of a repository's file of weights of `size` bytes; of a pickle, which has none, nothing."""
    if name.endswith(".safetensors"):
        header = _read(repo, name, commit, 0, 8)
        length = struct.unpack("<Q", header)[0] if len(header) == 8 else 0
        if 0 < length <= MAX_HEADER_BYTES:  # else the file is found to be damaged
            header += _read(repo, name, commit, 8, 8 + length)
    elif name.endswith(SUFFIX):
        header = _read_gguf(repo, name, commit, size)
    else:
        return
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        stream.write(header)
        stream.truncate(size)


def _read_gguf(repo: str, name: str, commit: str, size: int) -> bytes:
    require_package(name, repo)
    header = b""
    while piece := _read(repo, name, commit, len(header), min(size, len(header) + GGUF_STEP_BYTES)):
        header += piece
        if is_whole_header(header, size):
            break
    return header


def _read(repo: str, name: str, commit: str, start: int, stop: int) -> bytes:
    """Bytes `[start:stop]` of a file, and no more where a mirror sends the whole file."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status, http_stream_backoff

    url = hf_hub_url(repo, name, revision=commit)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
    data, begin = bytearray(), start
    with http_stream_backoff("GET", url, headers=headers) as response:
        hf_raise_for_status(response)
        begin = start if response.status_code == 206 else 0
        for chunk in response.iter_bytes():
            data += chunk
            if begin + len(data) >= stop:
                break
    return bytes(data[start - begin : stop - begin])
