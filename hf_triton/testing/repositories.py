# SPDX-License-Identifier: Apache-2.0
"""Local folders as Hub repositories: files with git and LFS hashes, commits, revisions. Knows no HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LFS_SUFFIXES = (".safetensors", ".bin", ".model", ".pt", ".gguf", ".h5", ".msgpack")
_NOT_SERVED = {".git", ".cache"}
_READ_BYTES = 1 << 20
_DATE = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class HubFile:
    """One file at one commit."""

    name: str
    """Path in the repository, with forward slashes."""
    path: Path
    """The file on disk."""
    size_bytes: int
    blob_id: str
    """Git's SHA-1 of the blob; for an LFS file, of the pointer that git stores instead."""
    sha256: str | None
    """SHA-256 of the content, for LFS files only."""
    pointer_size_bytes: int = 0

    @property
    def etag(self) -> str:
        """The Hub's ETag, which is also the name of the blob in the client's cache."""
        return self.sha256 or self.blob_id

    def lfs(self, hash_key: str) -> dict[str, Any]:
        """The `lfs` object of an API response; the Hub names the hash `sha256` in some and `oid` in others."""
        if self.sha256 is None:
            return {}
        return {"lfs": {hash_key: self.sha256, "size": self.size_bytes, "pointerSize": self.pointer_size_bytes}}


@dataclass(frozen=True)
class Commit:
    """The files of one commit."""

    sha: str
    """40 hexadecimal digits that depend on the names and contents of the files alone."""
    files: Mapping[str, HubFile]


@dataclass(frozen=True)
class Repository:
    """A model repository."""

    repo_id: str
    revisions: Mapping[str, Commit]
    """Commits by branch or tag; `main` is always there."""
    history: Mapping[str, Commit]
    """All commits by hash: the Hub still serves those without a branch or tag."""
    is_gated: bool

    def find_commit(self, revision: str) -> Commit | None:
        """The commit of a branch, a tag or a full commit hash, or None."""
        return self.revisions.get(revision) or self.history.get(revision)

    def describe(self, commit: Commit, with_blobs: bool) -> dict[str, Any]:
        """The body of `/api/models/{id}`; with sizes and hashes of the files if `with_blobs`."""
        return {
            "id": self.repo_id,
            "modelId": self.repo_id,
            "sha": commit.sha,
            "private": False,
            "gated": "manual" if self.is_gated else False,
            "disabled": False,
            "library_name": "transformers",
            "tags": ["transformers"],
            "downloads": 0,
            "likes": 0,
            "createdAt": _DATE,
            "lastModified": _DATE,
            "siblings": [_describe_sibling(file, with_blobs) for file in commit.files.values()],
        }

    def list_refs(self) -> dict[str, Any]:
        """The body of `/api/models/{id}/refs`: `main` is a branch, all other names are tags."""
        refs = [
            {"name": name, "ref": f"refs/{'heads' if name == 'main' else 'tags'}/{name}", "targetCommit": commit.sha}
            for name, commit in self.revisions.items()
        ]
        return {
            "branches": [ref for ref in refs if ref["name"] == "main"],
            "tags": [ref for ref in refs if ref["name"] != "main"],
            "converts": [],
        }


def load_commit(folder: Path) -> Commit:
    """Hash all files in a folder, following links, without `.git` and `.cache`.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder} to serve as a repository")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    served = [path for path in paths if not _NOT_SERVED & set(path.relative_to(folder).parts)]
    files = [_load_file(path, path.relative_to(folder).as_posix()) for path in served]
    listing = "".join(f"{file.name}\0{file.blob_id}\n" for file in files)
    return Commit(_sha1(listing.encode()), {file.name: file for file in files})


def list_tree(commit: Commit, under: str, is_recursive: bool) -> list[dict[str, Any]] | None:
    """The body of `/api/models/{id}/tree/{revision}/{under}`, or None if there is no such folder."""
    prefix = f"{under}/" if under else ""
    inside = [file for file in commit.files.values() if file.name.startswith(prefix)]
    if under and not inside:
        return None
    folders = dict.fromkeys(folder for file in inside for folder in _folders_below(file.name, prefix))
    entries: list[dict[str, Any]] = [
        {"type": "directory", "oid": _sha1(folder.encode()), "size": 0, "path": folder}
        for folder in folders
        if is_recursive or "/" not in folder.removeprefix(prefix)
    ]
    for file in inside:
        if is_recursive or "/" not in file.name.removeprefix(prefix):
            entry = {"type": "file", "oid": file.blob_id, "size": file.size_bytes, "path": file.name}
            entries.append(entry | file.lfs("oid"))
    return entries


def _load_file(path: Path, name: str) -> HubFile:
    size_bytes = path.stat().st_size
    if not name.endswith(LFS_SUFFIXES):
        return HubFile(name, path, size_bytes, _git_blob_id(path.read_bytes()), None)
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
    sha256 = digest.hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size_bytes}\n".encode()
    return HubFile(name, path, size_bytes, _git_blob_id(pointer), sha256, len(pointer))


def _describe_sibling(file: HubFile, with_blobs: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"rfilename": file.name}
    if with_blobs:
        described |= {"size": file.size_bytes, "blobId": file.blob_id} | file.lfs("sha256")
    return described


def _folders_below(name: str, prefix: str) -> Iterator[str]:
    parts = name.removeprefix(prefix).split("/")[:-1]
    for depth in range(1, len(parts) + 1):
        yield prefix + "/".join(parts[:depth])


def _git_blob_id(content: bytes) -> str:
    return _sha1(b"blob %d\0" % len(content) + content)


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
