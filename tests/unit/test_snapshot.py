# SPDX-License-Identifier: Apache-2.0
"""Completeness of checkpoint folders, and checksums of cached files."""

import hashlib
import json
from pathlib import Path

import pytest

from hf_triton.errors import CheckpointError
from hf_triton.hub import snapshot
from hf_triton.hub.snapshot import (
    check_weights_named,
    is_sound,
    missing_code,
    missing_files,
    missing_weights,
    purge_damaged,
    weight_files,
)
from hf_triton.hub.spec import CheckpointSpec

NEEDS = ("needs_config", "needs_tokenizer", "needs_weights")


def spec_that_needs(*needed: str, trust_remote_code: bool = False) -> CheckpointSpec:
    needs: dict[str, bool] = {name: name in needed for name in NEEDS}
    return CheckpointSpec("org/model", trust_remote_code=trust_remote_code, **needs)


def write(folder: Path, *names: str, **contents: object) -> Path:
    for name in names:
        (folder / name).write_text("{}")
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_index(folder: Path, name: str, weight_map: object) -> None:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("files", "allow_pickle", "expected"),
    [
        (["model.safetensors"], False, ["model.safetensors"]),
        (["model.safetensors", "pytorch_model.bin"], True, ["model.safetensors"]),
        (["pytorch_model.bin"], False, []),
        (["pytorch_model.bin"], True, ["pytorch_model.bin"]),
        (["adapter_model.safetensors", "tf_model.h5"], True, []),
        ([], True, []),
    ],
)
def test_weight_files_of_a_checkpoint_without_shards(
    tmp_path: Path, files: list[str], allow_pickle: bool, expected: list[str]
) -> None:
    assert weight_files(tmp_path, files, allow_pickle) == expected


@pytest.mark.parametrize("kind", [snapshot.SAFETENSORS, snapshot.PICKLE])
def test_weight_files_of_a_sharded_checkpoint(tmp_path: Path, kind: tuple[str, str]) -> None:
    index, _ = kind
    write_index(tmp_path, index, {"b": "2.part", "a": "1.part", "c": "2.part"})
    assert weight_files(tmp_path, [index], allow_pickle=True) == ["1.part", "2.part"]
    write(tmp_path, "2.part")
    assert missing_weights(tmp_path, allow_pickle=True) == ["1.part"]


@pytest.mark.parametrize(
    ("name", "allow_pickle", "words"),
    [
        ("../../etc/passwd", False, "no file of its folder"),
        ("../other/model.safetensors", True, "no file of its folder"),
        ("/etc/passwd", True, "no file of its folder"),
        ("..", True, "no file of its folder"),
        ("", True, "no file of its folder"),
        ("pytorch_model.bin", False, "set allow_pickle to true"),
        ("model.safetensors.pt", False, "set allow_pickle to true"),
    ],
)
def test_an_index_names_safetensors_of_its_folder(tmp_path: Path, name: str, allow_pickle: bool, words: str) -> None:
    index, _ = snapshot.SAFETENSORS
    write(tmp_path, "pytorch_model.bin", "1.safetensors")
    write_index(tmp_path, index, {"a": name, "b": "1.safetensors"})
    for look in (
        lambda: weight_files(tmp_path, [index], allow_pickle),
        lambda: missing_weights(tmp_path, allow_pickle),
    ):
        with pytest.raises(CheckpointError, match=words) as refused:
            look()
        assert refused.value.code == "weights_not_safe"


def test_a_pickle_index_is_read_if_pickles_are_allowed(tmp_path: Path) -> None:
    write_index(tmp_path, snapshot.PICKLE[0], {"a": "1.bin"})
    assert weight_files(tmp_path, [snapshot.PICKLE[0]], allow_pickle=True) == ["1.bin"]
    assert weight_files(tmp_path, [snapshot.PICKLE[0]], allow_pickle=False) == []


@pytest.mark.parametrize("named", ["adapter_model.bin", "other.safetensors", 5, ["x"]])
def test_a_config_does_not_name_other_weights(tmp_path: Path, named: object) -> None:
    with pytest.raises(CheckpointError, match="transformers_weights in config"):
        check_weights_named(write(tmp_path, config={"transformers_weights": named}))


def test_an_adapter_beside_a_model_is_not_applied_unseen(tmp_path: Path) -> None:
    check_weights_named(write(tmp_path, config={"transformers_weights": "model.safetensors"}))
    with pytest.raises(CheckpointError, match="name the adapter in the setting adapters"):
        check_weights_named(write(tmp_path, "adapter_config.json"))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}'])
def test_unreadable_index(tmp_path: Path, text: str) -> None:
    index, _ = snapshot.SAFETENSORS
    (tmp_path / index).write_text(text)
    with pytest.raises(CheckpointError, match=r"does not name the files .* download that file again") as raised:
        weight_files(tmp_path, [index], allow_pickle=False)
    assert raised.value.code == "checkpoint_invalid"
    assert missing_weights(tmp_path, allow_pickle=False) == [index]


@pytest.mark.parametrize(
    ("needed", "missing"),
    [
        ([], []),
        (["needs_config"], ["config.json"]),
        (["needs_tokenizer"], ["tokenizer.json"]),
        (["needs_weights"], ["model.safetensors"]),
        (NEEDS, ["config.json", "tokenizer.json", "model.safetensors"]),
    ],
)
def test_empty_folder_lacks_what_is_needed(tmp_path: Path, needed: list[str], missing: list[str]) -> None:
    assert missing_files(tmp_path, spec_that_needs(*needed)) == missing


@pytest.mark.parametrize("name", snapshot.TOKENIZER_FILES)
def test_any_tokenizer_file_is_a_tokenizer(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    assert not missing_files(tmp_path, spec_that_needs("needs_tokenizer"))


def test_code_is_named_by_both_configs(tmp_path: Path) -> None:
    write(
        tmp_path,
        "present.py",
        config={"auto_map": {"AutoConfig": "a.A", "AutoModel": "present.B", "Other": "org/repo--theirs.C"}},
        tokenizer_config={"auto_map": {"AutoTokenizer": ["b.Slow", None]}},
    )
    assert missing_code(tmp_path) == ["a.py", "b.py"]
    assert missing_files(tmp_path, spec_that_needs(trust_remote_code=True)) == ["a.py", "b.py"]
    assert not missing_files(tmp_path, spec_that_needs())


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"auto_map": 5}', '{"auto_map": {"AutoConfig": 5}}'])
def test_code_of_an_unreadable_config_is_not_missing(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert missing_code(tmp_path) == []


def write_blob(folder: Path, link: str, content: bytes, name: str) -> Path:
    """A cached file: a link in a snapshot to a blob that is named after its checksum."""
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "blobs" / name).write_bytes(content)
    path = folder / "snapshot" / link
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(folder / "blobs" / name)
    return path


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@pytest.mark.parametrize("content", [b"", b"small", bytes(range(256)) * 10_000])
def test_blob_is_sound_if_its_name_is_its_checksum(tmp_path: Path, content: bytes) -> None:
    for number, name in enumerate((git_sha1(content), hashlib.sha256(content).hexdigest())):
        path = write_blob(tmp_path, f"file{number}", content, name)
        assert is_sound(path)
        path.resolve().write_bytes(content + b"x")
        assert not is_sound(path)


def test_file_with_another_name_counts_as_sound(tmp_path: Path) -> None:
    assert is_sound(write_blob(tmp_path, "file", b"anything", "W-mirrors-own-etag"))


def test_long_check_reports_each_chunk(tmp_path: Path) -> None:
    content = bytes(3 * snapshot.HASH_CHUNK_BYTES)
    chunks: list[None] = []
    assert is_sound(write_blob(tmp_path, "file", content, git_sha1(content)), lambda: chunks.append(None))
    assert len(chunks) == 3


def test_purge_removes_damaged_blobs_and_all_links(tmp_path: Path) -> None:
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


def test_purge_keeps_a_sound_snapshot(tmp_path: Path) -> None:
    good = write_blob(tmp_path, "config.json", b"{}", git_sha1(b"{}"))
    assert purge_damaged(tmp_path / "snapshot") == []
    assert good.exists()
