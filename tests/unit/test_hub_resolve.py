# SPDX-License-Identifier: Apache-2.0
"""Which cache, folder and access token are used, and when a checkpoint counts as complete."""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_triton.errors import CheckpointError, HfTritonError, HubError
from hf_triton.hub.locate import TOKEN_VARIABLES, Hub, is_offline
from hf_triton.hub.spec import CheckpointSpec
from tests.support.hub import CANARY, COMMIT, MODEL, build_hub, write_snapshot

CACHES = ("cache_dir", "TRANSFORMERS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "folder")


def hub_with_all_caches(tmp_path: Path) -> tuple[Hub, dict[str, Path]]:
    variables = {name: str(tmp_path / name) for name in CACHES[1:5]}
    caches = {name: tmp_path / name for name in CACHES[:4]}
    caches |= {"HF_HOME": tmp_path / "HF_HOME" / "hub", "folder": tmp_path / "folder" / "hf_cache"}
    return build_hub(tmp_path, variables, cache_dir=str(caches["cache_dir"])), caches


def test_caches_are_searched_in_the_documented_order(tmp_path: Path) -> None:
    hub, caches = hub_with_all_caches(tmp_path)
    assert hub.caches() == [caches[name] for name in CACHES]


@pytest.mark.parametrize("cache", CACHES)
def test_each_cache_is_searched_and_the_hit_is_logged(
    tmp_path: Path, cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub, caches = hub_with_all_caches(tmp_path)
    snapshot = write_snapshot(caches[cache])
    with caplog.at_level(logging.INFO, "hf_triton"):
        assert hub.resolve_model() == snapshot
    assert f"{MODEL}: found in the cache {caches[cache]}" in caplog.text


def test_incomplete_caches_are_skipped(tmp_path: Path) -> None:
    hub, caches = hub_with_all_caches(tmp_path)
    write_snapshot(caches["cache_dir"], without="model.safetensors")
    complete = write_snapshot(caches["HF_HUB_CACHE"])
    write_snapshot(caches["folder"])
    assert hub.resolve_model() == complete


@pytest.mark.parametrize(
    ("environment", "cache"),
    [
        ({"HF_HOME": "", "XDG_CACHE_HOME": "{tmp}/xdg"}, "{tmp}/xdg/huggingface/hub"),
        ({"HF_HOME": ""}, "{home}/.cache/huggingface/hub"),
        ({"HF_HOME": "", "TRANSFORMERS_CACHE": "~/mine"}, "{home}/mine"),
        ({"TRANSFORMERS_CACHE": "$HOME/mine"}, "{home}/mine"),
    ],
)
def test_standard_cache_and_expanded_paths(tmp_path: Path, environment: dict[str, str], cache: str) -> None:
    given = {name: value.format(tmp=tmp_path) for name, value in environment.items()}
    expected = Path(cache.format(tmp=tmp_path, home=Path.home()))
    assert build_hub(tmp_path, given).caches()[0] == expected


def test_relative_cache_dir_starts_at_the_model_folder(tmp_path: Path) -> None:
    assert build_hub(tmp_path, cache_dir="cache").caches()[0] == tmp_path / "folder" / "cache"


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ({}, []),
        ({"revision": "v1", "cache_dir": "cache"}, []),
        ({"tokenizer_revision": "v1"}, ["tokenizer_revision"]),
        ({"tokenizer_revision": "v1", "tokenizer": "a/b"}, []),
        ({"revision": "v1", "cache_dir": "cache", "huggingface_model": "./x"}, ["revision", "cache_dir"]),
        ({"cache_dir": "cache", "huggingface_model": "./x", "tokenizer": "a/b"}, []),
    ],
)
def test_unused_hub_settings_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, str], unused: list[str]
) -> None:
    with contextlib.suppress(HfTritonError), caplog.at_level(logging.WARNING, "hf_triton"):
        build_hub(tmp_path, {"HF_HUB_OFFLINE": "1"}, **settings).resolve_model()
    assert re.findall(r"the setting (\w+) has no effect", caplog.text) == unused


@pytest.mark.parametrize("revision", ["main", "v1", COMMIT])
def test_revision_is_a_branch_tag_or_commit(tmp_path: Path, revision: str) -> None:
    snapshot = write_snapshot(tmp_path / "home" / "hub", revision="main" if revision == COMMIT else revision)
    assert build_hub(tmp_path, revision=revision).resolve_model() == snapshot


@pytest.mark.parametrize(
    ("environment", "settings", "cache"),
    [
        ({"TRANSFORMERS_CACHE": "{tmp}/a", "HF_HUB_CACHE": "{tmp}/b"}, {}, "a"),
        ({"HF_HUB_CACHE": "{tmp}/b"}, {}, "b"),
        ({"HF_HUB_CACHE": "{tmp}/b"}, {"cache_dir": "../c"}, "folder/../c"),
        ({"HF_HOME": "{tmp}/home"}, {}, "home/hub"),
        ({"HF_HOME": "", "XDG_CACHE_HOME": "{tmp}/xdg"}, {}, "folder/hf_cache"),
    ],
)
def test_download_goes_to_the_first_named_cache(
    tmp_path: Path, environment: dict[str, str], settings: dict[str, str], cache: str
) -> None:
    chosen: list[Path] = []

    def download(spec: CheckpointSpec, cache_dir: Path, *_: object) -> Path:
        chosen.append(cache_dir)
        return write_snapshot(tmp_path / "downloaded")

    given = {name: value.format(tmp=tmp_path) for name, value in environment.items()}
    build_hub(tmp_path, given, download=download, **settings).resolve_model()
    assert chosen == [tmp_path / cache]


def make_read_only(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Make `os.access` answer as for a read-only mount; permissions do not stop root."""
    real = os.access

    def access(path: Any, mode: int) -> bool:
        is_within = any(folder in (Path(path), *Path(path).parents) for folder in folders)
        return real(path, mode) and not (mode & os.W_OK and is_within)

    monkeypatch.setattr(os, "access", access)


def test_read_only_cache_is_read_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only = tmp_path / "read-only"
    snapshot = write_snapshot(read_only)
    make_read_only(monkeypatch, read_only)
    hub = build_hub(tmp_path, {"TRANSFORMERS_CACHE": str(read_only)})
    assert hub.resolve_model() == snapshot
    assert not hub.can_download_again(snapshot)


def test_only_a_writable_cache_is_downloaded_to_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = write_snapshot(tmp_path / "home" / "hub")
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    assert build_hub(tmp_path).can_download_again(snapshot)
    assert not build_hub(tmp_path, {"HF_HUB_OFFLINE": "1"}).can_download_again(snapshot)
    assert not build_hub(tmp_path).can_download_again(tmp_path / "checkpoint")
    make_read_only(monkeypatch, blobs)
    assert not build_hub(tmp_path).can_download_again(snapshot)


def make_unreadable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make pathlib raise as for another user's folder; permissions do not stop root."""
    real = Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        if folder in self.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat)


def test_unreadable_cache_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_snapshot(tmp_path / "theirs")
    make_unreadable(monkeypatch, tmp_path / "theirs")
    environment = {"TRANSFORMERS_CACHE": str(tmp_path / "theirs"), "HF_HUB_OFFLINE": "1"}
    with pytest.raises(HubError, match=r"offline_and_not_cached.*/theirs \(no permission\)"):
        build_hub(tmp_path, environment).resolve_model()
    snapshot = write_snapshot(tmp_path / "home" / "hub")
    assert build_hub(tmp_path, environment).resolve_model() == snapshot
    assert f"skipping the cache {tmp_path / 'theirs'}" in caplog.text


def test_unreadable_folder_names_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = write_snapshot(tmp_path)
    make_unreadable(monkeypatch, snapshot)
    with pytest.raises(CheckpointError, match=rf"the user of this process \({os.geteuid()}\) may not read"):
        build_hub(tmp_path, huggingface_model=str(snapshot)).resolve_model()


def test_without_a_writable_cache_the_error_names_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_read_only(monkeypatch, tmp_path)
    with pytest.raises(HubError, match="set TRANSFORMERS_CACHE to a writable folder") as raised:
        build_hub(tmp_path, {"TRANSFORMERS_CACHE": str(tmp_path / "cache")}).resolve_model()
    assert raised.value.code == "cache_not_writable"
    assert MODEL in str(raised.value)
    assert str(tmp_path / "cache") in str(raised.value)


def test_cache_that_is_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    hub = build_hub(tmp_path, {"TRANSFORMERS_CACHE": str(tmp_path / "cache"), "HF_HOME": ""})
    with pytest.raises(HubError, match="cache_not_writable"):
        hub.resolve_model()


# --- complete checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["config.json", "tokenizer.json", "model.safetensors"])
def test_offline_error_names_the_missing_file(tmp_path: Path, without: str) -> None:
    cache = tmp_path / "home" / "hub"
    write_snapshot(cache, without=without)
    with pytest.raises(HubError) as raised:
        build_hub(tmp_path, {"HF_HUB_OFFLINE": "1"}).resolve_model()
    assert raised.value.code == "offline_and_not_cached"
    assert f"{cache} (without {without})" in str(raised.value)
    assert str(raised.value).endswith("; a folder on disk begins with `/`, `./` or `../`")


def test_dummy_weights_need_the_config_and_no_weights(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "home" / "hub", without="model.safetensors")
    hub = build_hub(tmp_path, {"HF_HUB_OFFLINE": "1"}, load_format="dummy")
    assert hub.resolve_model() == snapshot
    (snapshot / "config.json").unlink()
    with pytest.raises(HubError, match=r"without config\.json"):
        hub.resolve_model()


def test_separate_tokenizer_needs_neither_config_nor_weights(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "home" / "hub", without="config.json")
    (snapshot / "model.safetensors").unlink()
    hub = build_hub(tmp_path, huggingface_model="other/model", tokenizer=MODEL)
    assert hub.resolve_tokenizer() == snapshot
    assert build_hub(tmp_path).resolve_tokenizer() is None


def test_trusted_code_missing_in_the_cache_is_named(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "home" / "hub")
    auto_map = {"AutoConfig": "mine.Config", "AutoTokenizer": ["other/model--theirs.Tokenizer", None]}
    (snapshot / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    offline = {"HF_HUB_OFFLINE": "1"}
    assert build_hub(tmp_path, offline).resolve_model() == snapshot
    with pytest.raises(HubError, match=r"without mine\.py\)"):
        build_hub(tmp_path, offline, trust_remote_code=True).resolve_model()


def test_folder_is_absolute_or_relative_to_the_model_folder(tmp_path: Path) -> None:
    checkpoint = write_snapshot(tmp_path)
    relative = os.path.relpath(checkpoint, tmp_path / "folder")
    assert relative.startswith("../")
    (tmp_path / "folder").mkdir()
    for name in (str(checkpoint), relative):
        assert build_hub(tmp_path, huggingface_model=name).resolve_model() == checkpoint


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (
            {"huggingface_model": "./absent"},
            "path_not_found",
            r"absent for './absent', relative to /.*: correct huggingface_model",
        ),
        ({"huggingface_model": "/absent"}, "path_not_found", "no folder /absent: correct huggingface_model"),
        ({"huggingface_model": "{ok}", "tokenizer": "./absent"}, "path_not_found", "correct tokenizer"),
        ({"huggingface_model": "{empty}"}, "checkpoint_incomplete", "copy the whole checkpoint there"),
        ({"huggingface_model": "{pickle}"}, "weights_not_safe", "set allow_pickle to true"),
        ({"huggingface_model": "{index}"}, "weights_not_safe", "'pytorch_model.bin', which is no safetensors file"),
        ({"huggingface_model": "{adapter}"}, "unsupported_model", "has an adapter beside a model"),
    ],
)
def test_unusable_folder(tmp_path: Path, settings: dict[str, str], code: str, words: str) -> None:
    folders = {"ok": write_snapshot(tmp_path), "empty": tmp_path / "empty", "pickle": tmp_path / "pickle"}
    folders["empty"].mkdir()
    shutil.copytree(folders["ok"], folders["pickle"])
    (folders["pickle"] / "model.safetensors").rename(folders["pickle"] / "pytorch_model.bin")
    folders |= {"index": tmp_path / "index", "adapter": tmp_path / "adapter"}
    shutil.copytree(folders["pickle"], folders["index"])
    index = '{"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}'
    (folders["index"] / "model.safetensors.index.json").write_text(index)
    shutil.copytree(folders["ok"], folders["adapter"])
    (folders["adapter"] / "adapter_config.json").write_text("{}")
    hub = build_hub(tmp_path, **{name: value.format(**folders) for name, value in settings.items()})
    with pytest.raises((HubError, CheckpointError), match=words) as raised:
        assert hub.resolve_model() is hub.resolve_tokenizer()
    assert raised.value.code == code


# --- offline ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize(("value", "expected"), [("1", True), ("True", True), ("0", False), ("", False)])
def test_offline_variables(name: str, value: str, expected: bool) -> None:
    assert is_offline({name: value}) is expected


def test_offline_nothing_is_downloaded(tmp_path: Path) -> None:
    downloads: list[object] = []
    with pytest.raises(HubError, match="unset it once, or mount a cache") as raised:
        build_hub(tmp_path, {"HF_HUB_OFFLINE": "1"}, download=downloads.append).resolve_model()
    assert raised.value.code == "offline_and_not_cached"
    assert str(tmp_path / "home" / "hub") in str(raised.value)
    assert downloads == []


# --- access tokens ----------------------------------------------------------------------------------------------------


def token_environment(tmp_path: Path, name: str, token: str) -> dict[str, str]:
    if name != "HF_TOKEN_PATH":
        return {name: token}
    path = tmp_path / f"token-{token}"
    path.write_text(f"{token}\n")
    return {name: str(path)}


@pytest.mark.parametrize("name", TOKEN_VARIABLES)
def test_each_token_variable_is_read(tmp_path: Path, name: str) -> None:
    assert build_hub(tmp_path, token_environment(tmp_path, name, CANARY)).access_token() == CANARY


def test_first_token_variable_wins_and_the_warning_shows_no_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for first, *later in (TOKEN_VARIABLES[start:] for start in range(len(TOKEN_VARIABLES) - 1)):
        environment = token_environment(tmp_path, first, CANARY)
        for number, name in enumerate(later):
            environment |= token_environment(tmp_path, name, f"{CANARY}{number}")
        caplog.clear()
        assert build_hub(tmp_path, environment).access_token() == CANARY
        assert f"using {first}" in caplog.text
        assert all(name in caplog.text for name in later)
        assert CANARY not in caplog.text


def test_equal_tokens_cause_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub = build_hub(tmp_path, {"HF_TOKEN": CANARY, "PRIVATE_REPO_TOKEN": f" {CANARY}\n"})
    assert hub.access_token() == CANARY
    assert not caplog.records


def test_token_of_a_login_is_the_fallback(tmp_path: Path) -> None:
    hub = build_hub(tmp_path, {"HF_TOKEN": " "})
    assert hub.access_token() is None
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(CANARY)
    assert hub.access_token() == CANARY


def test_unreadable_token_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub = build_hub(tmp_path, {"HF_TOKEN_PATH": str(tmp_path / "absent"), "PRIVATE_REPO_TOKEN": CANARY})
    assert hub.access_token() == CANARY
    assert f"HF_TOKEN_PATH names {tmp_path / 'absent'}" in caplog.text


def test_download_gets_one_token_in_its_environment(tmp_path: Path) -> None:
    given: list[dict[str, str]] = []

    def download(spec: CheckpointSpec, cache_dir: Path, environment: dict[str, str], _: object) -> Path:
        given.append(environment)
        assert CANARY not in repr(spec)
        return write_snapshot(tmp_path / "downloaded")

    environment = {name: CANARY for name in TOKEN_VARIABLES if name not in ("HF_TOKEN", "HF_TOKEN_PATH")}
    build_hub(tmp_path, environment, download=download).resolve_model()
    assert {name: value for name, value in given[0].items() if CANARY in value} == {"HF_TOKEN": CANARY}
