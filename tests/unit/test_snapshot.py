# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint folder must hold, and which cached files are what their names say."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hf_triton.errors import CheckpointError
from hf_triton.hub import snapshot
from hf_triton.hub.snapshot import is_sound, missing_code, missing_files, missing_weights, purge_damaged, weight_files

NOTHING = {"wants_model": False, "wants_weights": False, "wants_tokenizer": False}


def write(folder: Path, *names: str, **contents: object) -> Path:
    for name in names:
        (folder / name).write_text("{}")
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_index(folder: Path, name: str, weight_map: object) -> None:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("files", "allows_pickle", "expected"),
    [
        (["model.safetensors"], False, ["model.safetensors"]),
        (["model.safetensors", "pytorch_model.bin"], True, ["model.safetensors"]),
        (["pytorch_model.bin"], False, []),
        (["pytorch_model.bin"], True, ["pytorch_model.bin"]),
        (["adapter_model.safetensors", "tf_model.h5"], True, []),
        ([], True, []),
    ],
)
def test_weight_files_of_a_checkpoint_in_one_piece(
    tmp_path: Path, files: list[str], allows_pickle: bool, expected: list[str]
) -> None:
    assert weight_files(tmp_path, files, allows_pickle) == expected


@pytest.mark.parametrize("kind", [snapshot.SAFETENSORS, snapshot.PICKLE])
def test_weight_files_of_a_checkpoint_in_pieces(tmp_path: Path, kind: tuple[str, str]) -> None:
    index, _ = kind
    write_index(tmp_path, index, {"b": "2.part", "a": "1.part", "c": "2.part"})
    assert weight_files(tmp_path, [index], allows_pickle=True) == ["1.part", "2.part"]
    write(tmp_path, "2.part")
    assert missing_weights(tmp_path, allows_pickle=True) == ["1.part"]


def test_an_index_cannot_name_files_outside(tmp_path: Path) -> None:
    index, _ = snapshot.SAFETENSORS
    write_index(tmp_path, index, {"a": "../../etc/passwd"})
    assert weight_files(tmp_path, [index], allows_pickle=False) == ["passwd"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}'])
def test_an_index_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    index, _ = snapshot.SAFETENSORS
    (tmp_path / index).write_text(text)
    with pytest.raises(CheckpointError, match=r"does not say which files .* fetch that file again") as raised:
        weight_files(tmp_path, [index], allows_pickle=False)
    assert raised.value.code == "checkpoint_invalid"
    assert missing_weights(tmp_path, allows_pickle=False) == [index]


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [
        ({}, []),
        ({"wants_model": True}, ["config.json"]),
        ({"wants_tokenizer": True}, ["tokenizer.json"]),
        ({"wants_weights": True}, ["model.safetensors"]),
        (dict.fromkeys(NOTHING, True), ["config.json", "tokenizer.json", "model.safetensors"]),
    ],
)
def test_an_empty_folder_lacks_what_is_wanted(tmp_path: Path, wanted: dict[str, Any], missing: list[str]) -> None:
    assert missing_files(tmp_path, **(NOTHING | wanted), allows_pickle=False, wants_code=False) == missing


@pytest.mark.parametrize("name", snapshot.TOKENIZER_FILES)
def test_any_tokenizer_file_is_a_tokenizer(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    wanted = NOTHING | {"wants_tokenizer": True}
    assert not missing_files(tmp_path, **wanted, allows_pickle=False, wants_code=False)


def test_code_is_named_by_both_configs(tmp_path: Path) -> None:
    write(
        tmp_path,
        "present.py",
        config={"auto_map": {"AutoConfig": "a.A", "AutoModel": "present.B", "Other": "org/repo--theirs.C"}},
        tokenizer_config={"auto_map": {"AutoTokenizer": ["b.Slow", None]}},
    )
    assert missing_code(tmp_path) == ["a.py", "b.py"]
    assert missing_files(tmp_path, **NOTHING, allows_pickle=False, wants_code=True) == ["a.py", "b.py"]
    assert not missing_files(tmp_path, **NOTHING, allows_pickle=False, wants_code=False)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"auto_map": 5}', '{"auto_map": {"AutoConfig": 5}}'])
def test_code_of_a_config_that_cannot_be_read_is_not_missed(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert missing_code(tmp_path) == []


# --- checksums -------------------------------------------------------------------------------------------------------


def write_blob(folder: Path, link: str, content: bytes, name: str) -> Path:
    """A file as the Hub's cache has it: a link in a snapshot to a blob that is named after its checksum."""
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "blobs" / name).write_bytes(content)
    path = folder / "snapshot" / link
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(folder / "blobs" / name)
    return path


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@pytest.mark.parametrize("content", [b"", b"small", bytes(range(256)) * 10_000])
def test_a_blob_is_sound_when_its_content_has_its_name(tmp_path: Path, content: bytes) -> None:
    for number, name in enumerate((git_sha1(content), hashlib.sha256(content).hexdigest())):
        path = write_blob(tmp_path, f"file{number}", content, name)
        assert is_sound(path)
        path.resolve().write_bytes(content + b"x")
        assert not is_sound(path)


def test_a_file_that_is_named_otherwise_cannot_be_checked(tmp_path: Path) -> None:
    assert is_sound(write_blob(tmp_path, "file", b"anything", "W-mirrors-own-etag"))


def test_a_long_check_shows_that_it_goes_on(tmp_path: Path) -> None:
    content = bytes(3 * snapshot.CHUNK_BYTES)
    chunks: list[None] = []
    assert is_sound(write_blob(tmp_path, "file", content, git_sha1(content)), lambda: chunks.append(None))
    assert len(chunks) == 3


def test_damaged_blobs_are_purged_with_all_links_and_sound_blobs_are_kept(tmp_path: Path) -> None:
    good = write_blob(tmp_path, "config.json", b"{}", git_sha1(b"{}"))
    bad = write_blob(tmp_path, "model.safetensors", b"flipped", "0" * 64)
    deep = write_blob(tmp_path, "chat/template.jinja", b"flipped too", "0" * 40)
    own = tmp_path / "snapshot" / "notes.txt"
    own.write_text("a file of the user's own")
    (tmp_path / "snapshot" / "dangling").symlink_to(tmp_path / "absent")
    kept, gone = good.resolve(), [bad.resolve(), deep.resolve()]
    assert sorted(purge_damaged(tmp_path / "snapshot")) == ["model.safetensors", "template.jinja"]
    assert not any(path.is_symlink() for path in (good, bad, deep))
    assert not any(path.exists() for path in gone)
    assert kept.exists()
    assert own.exists()


def test_a_sound_snapshot_is_left_alone(tmp_path: Path) -> None:
    good = write_blob(tmp_path, "config.json", b"{}", git_sha1(b"{}"))
    assert purge_damaged(tmp_path / "snapshot") == []
    assert good.exists()
