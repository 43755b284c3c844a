# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint is looked for, which access token is used, and what an error of the Hub's client is called."""

import ast
import contextlib
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.errors
import pytest

import hf_triton
from hf_triton.errors import CODES, CheckpointError, HfTritonError, HubError
from hf_triton.hub import download
from hf_triton.hub import process as download_process
from hf_triton.hub.download import Job, encode
from hf_triton.hub.failures import MEANINGS, explain
from hf_triton.hub.process import Patience
from hf_triton.hub.resolve import TOKEN_VARIABLES, Hub, is_offline
from hf_triton.settings import ModelSettings
from hf_triton.testing import LoopbackHub

MODEL, COMMIT = "org/model", "0123456789abcdef0123456789abcdef01234567"
CANARY = "hf_canaryTokenThatNobodyMaySee"


def write_snapshot(cache: Path, *, without: str = "", revision: str = "main") -> Path:
    """A complete checkpoint, by the names of its files, in the Hub client's cache layout."""
    repository = cache / "models--org--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(COMMIT)
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {without}:
        (snapshot / name).write_text("{}")
    return snapshot


def build_hub(tmp_path: Path, environment: dict[str, str] | None = None, **settings: Any) -> Hub:
    chosen = ModelSettings(**({"huggingface_model": MODEL} | settings))
    return Hub(tmp_path / "folder", chosen, {"HF_HOME": str(tmp_path / "home")} | (environment or {}))


# --- caches ----------------------------------------------------------------------------------------------------------


PLACES = ("cache_dir", "TRANSFORMERS_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "folder")


def hub_with_every_place(tmp_path: Path) -> tuple[Hub, dict[str, Path]]:
    variables = {name: str(tmp_path / name) for name in PLACES[1:5]}
    places = {name: tmp_path / name for name in PLACES[:4]}
    places |= {"HF_HOME": tmp_path / "HF_HOME" / "hub", "folder": tmp_path / "folder" / "hf_cache"}
    return build_hub(tmp_path, variables, cache_dir=str(places["cache_dir"])), places


def test_caches_are_searched_in_the_documented_order(tmp_path: Path) -> None:
    hub, places = hub_with_every_place(tmp_path)
    assert hub.caches() == [places[name] for name in PLACES]


@pytest.mark.parametrize("place", PLACES)
def test_a_model_is_found_in_every_place_and_the_place_is_logged(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub, places = hub_with_every_place(tmp_path)
    snapshot = write_snapshot(places[place])
    with caplog.at_level(logging.INFO, "hf_triton"):
        assert hub.model_folder() == snapshot
    assert f"{MODEL}: taken from the cache {places[place]}" in caplog.text


def test_the_first_complete_cache_wins_and_incomplete_ones_are_passed_over(tmp_path: Path) -> None:
    hub, places = hub_with_every_place(tmp_path)
    write_snapshot(places["cache_dir"], without="model.safetensors")
    wanted = write_snapshot(places["HF_HUB_CACHE"])
    write_snapshot(places["folder"])
    assert hub.model_folder() == wanted


@pytest.mark.parametrize(
    ("environment", "cache"),
    [
        ({"HF_HOME": "", "XDG_CACHE_HOME": "{tmp}/xdg"}, "{tmp}/xdg/huggingface/hub"),
        ({"HF_HOME": ""}, "{home}/.cache/huggingface/hub"),
        ({"HF_HOME": "", "TRANSFORMERS_CACHE": "~/mine"}, "{home}/mine"),
        ({"TRANSFORMERS_CACHE": "$HOME/mine"}, "{home}/mine"),
    ],
)
def test_standard_places_and_abbreviations(tmp_path: Path, environment: dict[str, str], cache: str) -> None:
    given = {name: value.format(tmp=tmp_path) for name, value in environment.items()}
    expected = Path(cache.format(tmp=tmp_path, home=Path.home()))
    assert build_hub(tmp_path, given).caches()[0] == expected


def test_a_relative_cache_dir_is_taken_from_the_model_folder(tmp_path: Path) -> None:
    assert build_hub(tmp_path, cache_dir="cache").caches()[0] == tmp_path / "folder" / "cache"


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({}, []),
        ({"revision": "v1", "cache_dir": "cache"}, []),
        ({"tokenizer_revision": "v1"}, ["tokenizer_revision"]),
        ({"tokenizer_revision": "v1", "tokenizer": "a/b"}, []),
        ({"revision": "v1", "cache_dir": "cache", "huggingface_model": "./x"}, ["revision", "cache_dir"]),
        ({"cache_dir": "cache", "huggingface_model": "./x", "tokenizer": "a/b"}, []),
    ],
)
def test_settings_of_the_hub_where_nothing_comes_from_there_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, str], idle: list[str]
) -> None:
    with contextlib.suppress(HfTritonError), caplog.at_level(logging.WARNING, "hf_triton"):
        build_hub(tmp_path, {"HF_HUB_OFFLINE": "1"}, **settings).model_folder()
    assert re.findall(r"the setting (\w+) does nothing", caplog.text) == idle


@pytest.mark.parametrize("revision", ["main", "v1", COMMIT])
def test_revisions_are_found_by_branch_tag_and_commit(tmp_path: Path, revision: str) -> None:
    snapshot = write_snapshot(tmp_path / "home" / "hub", revision="main" if revision == COMMIT else revision)
    assert build_hub(tmp_path, revision=revision).model_folder() == snapshot


UNREACHABLE = {"HF_ENDPOINT": "http://127.0.0.1:9"}


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
def test_a_download_goes_to_the_first_cache_asked_for_by_name(
    tmp_path: Path,
    environment: dict[str, str],
    settings: dict[str, str],
    cache: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs: list[Job] = []

    def record(job: Job, *_: object) -> Path:
        jobs.append(job)
        return write_snapshot(tmp_path / "downloaded")

    monkeypatch.setattr("hf_triton.hub.resolve.download", record)
    given = {name: value.format(tmp=tmp_path) for name, value in environment.items()}
    build_hub(tmp_path, given, **settings).model_folder()
    assert jobs[0].cache_dir == str(tmp_path / cache)


def refuse_writing(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """What a read-only mount looks like to `os.access`; permissions do not stop root."""
    real = os.access

    def access(path: Any, mode: int) -> bool:
        is_within = any(folder in (Path(path), *Path(path).parents) for folder in folders)
        return real(path, mode) and not (mode & os.W_OK and is_within)

    monkeypatch.setattr(os, "access", access)


def test_a_read_only_cache_is_read_and_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only = tmp_path / "read-only"
    snapshot = write_snapshot(read_only)
    refuse_writing(monkeypatch, read_only)
    hub = build_hub(tmp_path, {"TRANSFORMERS_CACHE": str(read_only)})
    assert hub.model_folder() == snapshot
    assert not hub.can_fetch_again(snapshot)


def test_only_a_writable_cache_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = write_snapshot(tmp_path / "home" / "hub")
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    assert build_hub(tmp_path).can_fetch_again(snapshot)
    assert not build_hub(tmp_path, {"HF_HUB_OFFLINE": "1"}).can_fetch_again(snapshot)
    assert not build_hub(tmp_path).can_fetch_again(tmp_path / "checkpoint")
    refuse_writing(monkeypatch, blobs)
    assert not build_hub(tmp_path).can_fetch_again(snapshot)


def forbid_looking(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What a folder of another user is to pathlib; permissions do not stop root."""
    real = Path.stat

    def stat(self: Path, **options: Any) -> os.stat_result:
        if folder in self.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, **options)

    monkeypatch.setattr(Path, "stat", stat)


def test_a_cache_that_may_not_be_looked_into_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_snapshot(tmp_path / "theirs")
    forbid_looking(monkeypatch, tmp_path / "theirs")
    environment = {"TRANSFORMERS_CACHE": str(tmp_path / "theirs"), "HF_HUB_OFFLINE": "1"}
    with pytest.raises(HubError, match=r"offline_and_not_cached.*/theirs \(which may not be read\)"):
        build_hub(tmp_path, environment).model_folder()
    snapshot = write_snapshot(tmp_path / "home" / "hub")
    assert build_hub(tmp_path, environment).model_folder() == snapshot
    assert f"the cache {tmp_path / 'theirs'} is left out" in caplog.text


def test_a_folder_that_may_not_be_looked_into_says_who_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = write_snapshot(tmp_path)
    forbid_looking(monkeypatch, snapshot)
    with pytest.raises(CheckpointError, match=rf"may not be read by the user of this process \({os.geteuid()}\)"):
        build_hub(tmp_path, huggingface_model=str(snapshot)).model_folder()


def test_where_no_cache_can_be_written_the_message_says_which_were_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_writing(monkeypatch, tmp_path)
    with pytest.raises(HubError, match="set TRANSFORMERS_CACHE to a folder") as raised:
        build_hub(tmp_path, {"TRANSFORMERS_CACHE": str(tmp_path / "cache")}).model_folder()
    assert raised.value.code == "cache_not_writable"
    assert MODEL in str(raised.value)
    assert str(tmp_path / "cache") in str(raised.value)


def test_a_cache_that_is_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    hub = build_hub(tmp_path, {"TRANSFORMERS_CACHE": str(tmp_path / "cache"), "HF_HOME": ""})
    with pytest.raises(HubError, match="cache_not_writable"):
        hub.model_folder()


# --- what a snapshot must have ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["config.json", "tokenizer.json", "model.safetensors"])
def test_offline_an_incomplete_cache_is_named_with_what_it_lacks(tmp_path: Path, without: str) -> None:
    cache = tmp_path / "home" / "hub"
    write_snapshot(cache, without=without)
    with pytest.raises(HubError) as raised:
        build_hub(tmp_path, {"HF_HUB_OFFLINE": "1"}).model_folder()
    assert raised.value.code == "offline_and_not_cached"
    assert f"{cache} (without {without})" in str(raised.value)
    assert str(raised.value).endswith("; a folder on disk begins with `/`, `./` or `../`")


def test_random_weights_need_the_config_and_no_weights(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "home" / "hub", without="model.safetensors")
    hub = build_hub(tmp_path, {"HF_HUB_OFFLINE": "1"}, load_format="dummy")
    assert hub.model_folder() == snapshot
    (snapshot / "config.json").unlink()
    with pytest.raises(HubError, match=r"without config\.json"):
        hub.model_folder()


def test_a_separate_tokenizer_needs_neither_config_nor_weights(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "home" / "hub", without="config.json")
    (snapshot / "model.safetensors").unlink()
    hub = build_hub(tmp_path, huggingface_model="other/model", tokenizer=MODEL)
    assert hub.tokenizer_folder() == snapshot
    assert build_hub(tmp_path).tokenizer_folder() is None


def test_trusted_code_that_an_earlier_start_left_out_is_missing(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "home" / "hub")
    auto_map = {"AutoConfig": "mine.Config", "AutoTokenizer": ["other/model--theirs.Tokenizer", None]}
    (snapshot / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    offline = {"HF_HUB_OFFLINE": "1"}
    assert build_hub(tmp_path, offline).model_folder() == snapshot
    with pytest.raises(HubError, match=r"without mine\.py\)"):
        build_hub(tmp_path, offline, trust_remote_code=True).model_folder()


def test_folders_are_absolute_or_relative_to_the_model_folder(tmp_path: Path) -> None:
    checkpoint = write_snapshot(tmp_path)
    relative = os.path.relpath(checkpoint, tmp_path / "folder")
    assert relative.startswith("../")
    (tmp_path / "folder").mkdir()
    for name in (str(checkpoint), relative):
        assert build_hub(tmp_path, huggingface_model=name).model_folder() == checkpoint


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (
            {"huggingface_model": "./absent"},
            "path_not_found",
            r"absent for './absent', taken from /.*: correct huggingface_model",
        ),
        (
            {"huggingface_model": "/absent"},
            "path_not_found",
            "no folder /absent for '/absent': correct huggingface_model",
        ),
        ({"huggingface_model": "{ok}", "tokenizer": "./absent"}, "path_not_found", "correct tokenizer"),
        ({"huggingface_model": "{empty}"}, "checkpoint_incomplete", "copy the whole checkpoint there"),
        ({"huggingface_model": "{pickle}"}, "weights_not_safe", "set allow_pickle to true"),
    ],
)
def test_unusable_folders(tmp_path: Path, settings: dict[str, str], code: str, words: str) -> None:
    folders = {"ok": write_snapshot(tmp_path), "empty": tmp_path / "empty", "pickle": tmp_path / "pickle"}
    folders["empty"].mkdir()
    shutil.copytree(folders["ok"], folders["pickle"])
    (folders["pickle"] / "model.safetensors").rename(folders["pickle"] / "pytorch_model.bin")
    hub = build_hub(tmp_path, **{name: value.format(**folders) for name, value in settings.items()})
    with pytest.raises((HubError, CheckpointError), match=words) as raised:
        assert hub.model_folder() is hub.tokenizer_folder()
    assert raised.value.code == code


# --- offline ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
@pytest.mark.parametrize(("value", "expected"), [("1", True), ("True", True), ("0", False), ("", False)])
def test_offline_is_read_as_the_client_reads_it(name: str, value: str, expected: bool) -> None:
    assert is_offline({name: value}) is expected


def test_offline_no_download_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(HubError, match="unset it once, or mount a cache") as raised:
        build_hub(tmp_path, {"HF_HUB_OFFLINE": "1"}).model_folder()
    assert raised.value.code == "offline_and_not_cached"
    assert str(tmp_path / "home" / "hub") in str(raised.value)


# --- access tokens ---------------------------------------------------------------------------------------------------


def token_environment(tmp_path: Path, name: str, token: str) -> dict[str, str]:
    if name != "HF_TOKEN_PATH":
        return {name: token}
    path = tmp_path / f"token-{token}"
    path.write_text(f"{token}\n")
    return {name: str(path)}


@pytest.mark.parametrize("name", TOKEN_VARIABLES)
def test_every_token_variable_is_read(tmp_path: Path, name: str) -> None:
    assert build_hub(tmp_path, token_environment(tmp_path, name, CANARY)).access_token() == CANARY


def test_token_variables_win_in_their_order_and_a_disagreement_shows_no_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for first, *later in (TOKEN_VARIABLES[place:] for place in range(len(TOKEN_VARIABLES) - 1)):
        environment = token_environment(tmp_path, first, CANARY)
        for number, name in enumerate(later):
            environment |= token_environment(tmp_path, name, f"{CANARY}{number}")
        caplog.clear()
        assert build_hub(tmp_path, environment).access_token() == CANARY
        assert f"{first} is used" in caplog.text
        assert all(name in caplog.text for name in later)
        assert CANARY not in caplog.text


def test_tokens_that_agree_give_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub = build_hub(tmp_path, {"HF_TOKEN": CANARY, "PRIVATE_REPO_TOKEN": f" {CANARY}\n"})
    assert hub.access_token() == CANARY
    assert not caplog.records


def test_without_a_variable_the_token_of_a_login_is_used(tmp_path: Path) -> None:
    hub = build_hub(tmp_path, {"HF_TOKEN": " "})
    assert hub.access_token() is None
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(CANARY)
    assert hub.access_token() == CANARY


def test_a_token_file_that_cannot_be_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub = build_hub(tmp_path, {"HF_TOKEN_PATH": str(tmp_path / "absent"), "PRIVATE_REPO_TOKEN": CANARY})
    assert hub.access_token() == CANARY
    assert f"HF_TOKEN_PATH names {tmp_path / 'absent'}" in caplog.text


def test_the_download_gets_one_token_in_its_environment_and_none_in_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, dict[str, str]]] = []
    real = subprocess.Popen

    def start(command: Any, **arguments: Any) -> Any:
        started.append((command, arguments["env"]))
        return real(["false"], **arguments)

    monkeypatch.setattr(subprocess, "Popen", start)
    environment = {name: CANARY for name in TOKEN_VARIABLES if name not in ("HF_TOKEN", "HF_TOKEN_PATH")}
    with pytest.raises(HubError):
        build_hub(tmp_path, environment | {"PATH": os.environ["PATH"]}).model_folder()
    command, given = started[0]
    assert CANARY not in " ".join(command)
    assert {name: value for name, value in given.items() if CANARY in value} == {"HF_TOKEN": CANARY}
    assert CANARY not in encode(Job(MODEL, "main", "/cache", True, False, False)).decode()


# --- the download process --------------------------------------------------------------------------------------------


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[LoopbackHub]:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (checkpoint / name).write_text("{}")
    (checkpoint / "model.safetensors").write_bytes(bytes(200_000))
    with LoopbackHub() as hub:
        hub.add(MODEL, checkpoint)
        yield hub


def test_a_slow_download_tells_its_progress(
    tmp_path: Path, loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(download_process, "LOG_INTERVAL_S", 0.1)
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "model.safetensors").write_bytes(bytes(20_000_000))
    loopback.add(MODEL, checkpoint)
    loopback.slow("cdn", bytes_per_s=8_000_000)
    with caplog.at_level(logging.INFO, "hf_triton"):
        build_hub(tmp_path, loopback.environment()).model_folder()
    assert f"{MODEL} (revision main): downloading to {tmp_path / 'home' / 'hub'}" in caplog.text
    assert f"{MODEL}: downloading, 0.01 of 0.02 GB" in caplog.text
    assert f"{MODEL}: downloaded in " in caplog.text


def test_retries_are_told(
    tmp_path: Path, loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(download_process, "LOG_INTERVAL_S", 0.0)
    loopback.fail(503, times=1, path="/api/")
    build_hub(tmp_path, loopback.environment()).model_folder()
    assert f"{MODEL}: the Hub's client says: HfHubHTTPError" in caplog.text
    assert "503" in caplog.text


def test_a_download_that_stalls_says_what_came_and_leaves_no_part_behind(tmp_path: Path, loopback: LoopbackHub) -> None:
    loopback.slow("cdn", bytes_per_s=100)
    hub = build_hub(tmp_path, loopback.environment(), download_stall_timeout_s=4)
    with pytest.raises(HubError, match=r"sent no byte for 4 s .*raise download_stall_timeout_s") as raised:
        hub.model_folder()
    assert raised.value.code == "hub_timeout"
    cache = tmp_path / "home" / "hub" / "models--org--model"
    assert (cache / "snapshots").is_dir()
    assert not list(cache.rglob("*.incomplete"))


def test_a_slow_download_is_not_taken_for_a_stalled_one(tmp_path: Path, loopback: LoopbackHub) -> None:
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "model.safetensors").write_bytes(bytes(2_400_000))
    loopback.add(MODEL, checkpoint)
    loopback.slow("cdn", bytes_per_s=400_000)  # the client by itself tells of every 10 MB
    build_hub(tmp_path, loopback.environment(), download_stall_timeout_s=4).model_folder()


def test_the_last_words_of_the_client_are_in_a_timeout(tmp_path: Path, loopback: LoopbackHub) -> None:
    loopback.fail(429, path="/resolve/", retry_after_s=300)
    hub = build_hub(tmp_path, loopback.environment(), download_timeout_s=4)
    with pytest.raises(HubError, match=r"was not done after 4 s .*(429|Rate limited).*raise download_timeout_s"):
        hub.model_folder()


def test_a_long_checksum_is_no_stall(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watch = download_process._Watch(Job(MODEL, "main", "/cache", True, False, False), Patience(1000, 100))
    so_far = {"num_bytes": 3_000_000_000, "total_bytes": 4_000_000_000}
    watch.take(so_far | {"is_checking": False})
    with caplog.at_level(logging.INFO, "hf_triton"):
        for clock[0] in (90.0, 180.0, 270.0):
            watch.take(so_far | {"is_checking": True})
            assert watch.remaining_s() == 100
    assert f"{MODEL}: checking, 3.00 of 4.00 GB" in caplog.text
    clock[0] = 360.0
    watch.take(so_far | {"is_checking": False})
    assert watch.remaining_s() == 10
    clock[0] = 370.0
    with pytest.raises(HubError, match=r"sent no byte for 100 s .*3\.00 GB had come"):
        watch.remaining_s()


def test_a_download_process_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    job = Job(MODEL, "main", str(tmp_path), True, False, False)
    with pytest.raises(HubError, match=rf"{MODEL} ended without a word \(exit code 1;") as raised:
        download_process.download(job, {}, Patience(30, 30))
    assert raised.value.code == "hub_unavailable"


def test_stale_parts_are_removed_and_fresh_ones_kept(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name, age_s in (("old.incomplete", 7200), ("fresh.incomplete", 0), ("old", 7200)):
        (blobs / name).write_text("")
        modified = (blobs / name).stat().st_mtime - age_s
        os.utime(blobs / name, (modified, modified))
    download.remove_stale(tmp_path)
    assert sorted(path.name for path in blobs.iterdir()) == ["fresh.incomplete", "old"]


def test_a_download_without_room_is_refused_before_it_begins(
    tmp_path: Path, loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    fetch = download._Fetch(Job(MODEL, "main", str(tmp_path / "cache"), True, False, False), lambda _: None)
    sizes: dict[str, int | None] = {"a.safetensors": 60_000, "b.safetensors": 60_000, "unknown": None}
    with pytest.raises(HubError, match="set TRANSFORMERS_CACHE to a folder on a larger disk") as raised:
        fetch.check_room(sizes, sizes, COMMIT)
    assert raised.value.code == "disk_full"
    assert MODEL in str(raised.value)
    snapshot = tmp_path / "cache" / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "a.safetensors").write_text("")  # an earlier start has fetched it
    fetch.check_room(sizes, sizes, COMMIT)


@pytest.mark.parametrize("name", TOKEN_VARIABLES)
def test_every_token_variable_opens_a_gated_model(tmp_path: Path, loopback: LoopbackHub, name: str) -> None:
    loopback.add(MODEL, tmp_path / "checkpoint", gated=True)
    token = token_environment(tmp_path, name, loopback.access_token)
    hub = build_hub(tmp_path, loopback.environment() | token)
    snapshot = hub.model_folder()
    loopback.requests.clear()
    assert build_hub(tmp_path, loopback.environment()).model_folder() == snapshot  # cached: no token is needed
    assert loopback.requests == []


def rejection(tmp_path: Path, environment: dict[str, str], **settings: Any) -> HubError:
    with pytest.raises(HubError) as raised:
        build_hub(tmp_path, environment, **settings).model_folder()
    assert MODEL in raised.value.sentence
    return raised.value


def test_gated_models_are_refused_with_what_to_do(tmp_path: Path, loopback: LoopbackHub) -> None:
    loopback.add(MODEL, tmp_path / "checkpoint", gated=True)
    environment = loopback.environment()
    assert "there is no access token: accept its terms at" in rejection(tmp_path, environment).sentence
    refused = rejection(tmp_path, environment | {"HF_TOKEN": loopback.stranger_token})
    assert refused.code == "hub_gated"
    assert "with the account that the token belongs to" in refused.sentence
    refused = rejection(tmp_path, environment | {"HF_TOKEN": CANARY})
    assert refused.code == "hub_auth"
    assert CANARY not in str(refused)


def test_an_unreachable_hub_is_given_up_soon(tmp_path: Path) -> None:
    started = time.monotonic()
    refused = rejection(tmp_path, UNREACHABLE | {"NO_PROXY": "*"})
    assert refused.code == "hub_unavailable"
    assert "the Hub at http://127.0.0.1:9 cannot be reached (ConnectError: " in refused.sentence
    assert refused.sentence.endswith("; a folder on disk begins with `/`, `./` or `../`")
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "arm",
    [
        lambda hub: hub.fail(503, times=2),
        lambda hub: hub.fail(503, times=2, path="/resolve/"),
        lambda hub: hub.fail(500, times=2, path="/cdn/"),
        lambda hub: hub.fail(429, times=1, retry_after_s=1),
        lambda hub: hub.drop(times=2),
        lambda hub: hub.drop(times=1, path="/resolve/"),
        lambda hub: hub.drop(times=1, path="/cdn/"),
        lambda hub: hub.truncate("/cdn/", after_bytes=1000, times=1),
        lambda hub: hub.corrupt("/cdn/", times=1),
        lambda hub: hub.corrupt("/resolve/main/config.json", times=1, offset_bytes=0),
    ],
    ids=["503", "503 file", "500 cdn", "429", "drop", "drop file", "drop cdn", "truncated", "corrupt", "corrupt small"],
)
def test_a_passing_trouble_is_survived(
    tmp_path: Path, loopback: LoopbackHub, arm: Callable[[LoopbackHub], None]
) -> None:
    arm(loopback)
    snapshot = build_hub(tmp_path, loopback.environment()).model_folder()
    for path in (tmp_path / "checkpoint").iterdir():
        assert (snapshot / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("revision", ["v1", "commit"])
def test_a_download_by_tag_and_by_commit(tmp_path: Path, loopback: LoopbackHub, revision: str) -> None:
    newer = shutil.copytree(tmp_path / "checkpoint", tmp_path / "newer")
    (newer / "config.json").write_text('{"newer": true}')
    commit = loopback.add(MODEL, tmp_path / "checkpoint")
    loopback.add(MODEL, newer, revisions={"v1": tmp_path / "checkpoint"})
    hub = build_hub(tmp_path, loopback.environment(), revision=commit if revision == "commit" else revision)
    snapshot = hub.model_folder()
    assert snapshot.name == commit
    loopback.requests.clear()
    assert hub.model_folder() == snapshot
    assert loopback.requests == []


def test_what_an_earlier_start_has_fetched_is_not_fetched_again(tmp_path: Path, loopback: LoopbackHub) -> None:
    environment = loopback.environment()
    build_hub(tmp_path, environment, load_format="dummy").model_folder()
    assert not [each for each in loopback.requests if "model.safetensors" in each.path]
    loopback.requests.clear()
    build_hub(tmp_path, environment).model_folder()
    assert [each.path.split("?")[0].rpartition("/")[2] for each in loopback.requests if each.method == "GET"][-1:] == [
        "model.safetensors"
    ]
    assert not [each for each in loopback.requests if each.method == "GET" and "/resolve/" in each.path]


def test_a_cached_small_file_that_was_damaged_is_fetched_again(tmp_path: Path, loopback: LoopbackHub) -> None:
    hub = build_hub(tmp_path, loopback.environment())
    snapshot = hub.model_folder()
    (snapshot / "config.json").write_text("damaged")
    (snapshot / "model.safetensors").unlink()
    assert hub.model_folder() == snapshot
    assert (snapshot / "config.json").read_text() == "{}"


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 77
exec "$2" -c '
import os, sys
from pathlib import Path
from hf_triton.errors import HubError
from hf_triton.hub.resolve import Hub
from hf_triton.settings import ModelSettings

folder = Path(sys.argv[1])
try:
    open(folder / "probe", "w")
except OSError:
    print(Hub(folder, ModelSettings(huggingface_model=sys.argv[2]), os.environ).model_folder())
    try:
        Hub(folder, ModelSettings(huggingface_model="org/other"), os.environ).model_folder()
    except HubError as error:
        print(error.code)
' "$1" org/model
"""


def test_a_cache_on_a_read_only_mount(tmp_path: Path, loopback: LoopbackHub) -> None:
    snapshot = write_snapshot(tmp_path / "cache")
    environment = os.environ | loopback.environment() | {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": ""}
    command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(tmp_path / "cache"), sys.executable]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this user may not mount a folder read-only")
    assert done.stdout.split() == [str(snapshot), "cache_not_writable"], done.stderr
    assert loopback.requests == []


# --- what errors are called ------------------------------------------------------------------------------------------


JOB = Job(MODEL, "v9", "/cache", wants_weights=True, allows_pickle=False, wants_code=False)


def client_error(kind: type[Exception], status: int | None = None) -> Exception:
    """An exception of the client as it is raised, without the constructor, which differs by class and version."""
    error = kind.__new__(kind, "the client's words")
    error.args = ("the client's words",)
    if status is not None:
        vars(error)["response"] = SimpleNamespace(status_code=status)
    return error


HTTP_CODES = {
    "HfHubHTTPError": (500, "hub_unavailable"),
    "BadRequestError": (400, "hub_unavailable"),
    "BucketBatchError": (400, "hub_unavailable"),
    "BucketNotFoundError": (404, "hub_not_found"),
    "DisabledRepoError": (403, "hub_not_found"),
    "GatedRepoError": (403, "hub_gated"),
    "InferenceTimeoutError": (503, "hub_unavailable"),
    "JobNotFoundError": (404, "hub_not_found"),
    "RemoteEntryNotFoundError": (404, "hub_not_found"),
    "RepositoryNotFoundError": (401, "hub_not_found"),
    "RevisionNotFoundError": (404, "hub_revision_not_found"),
}
"""Every class of the client for an answer of the Hub; a new one must be put here."""
OTHER_CODES = {"HFValidationError": "hub_not_found", "OfflineModeIsEnabled": "offline_and_not_cached"}


def client_classes() -> dict[str, type[Exception]]:
    everything = vars(huggingface_hub.errors).items()
    return {name: kind for name, kind in everything if isinstance(kind, type) and issubclass(kind, Exception)}


def test_every_error_of_the_client_has_a_code() -> None:
    http = {
        name
        for name, kind in client_classes().items()
        if issubclass(kind, huggingface_hub.errors.HfHubHTTPError | huggingface_hub.errors.InferenceTimeoutError)
    }
    assert http == set(HTTP_CODES)
    for name, kind in client_classes().items():
        status, code = HTTP_CODES.get(name, (None, OTHER_CODES.get(name, "hub_unavailable")))
        reason = explain(client_error(kind, status), JOB, {})
        assert (type(reason), reason.code) == (HubError, code), name
        assert MODEL in reason.sentence
        assert code in CODES


@pytest.mark.parametrize(
    ("status", "token", "code", "words"),
    [
        (401, "", "hub_not_found", "set HF_TOKEN to an access token"),
        (401, CANARY, "hub_auth", "make a new one"),
        (403, "", "hub_auth", "set HF_TOKEN"),
        (403, CANARY, "hub_auth", "make a new one"),
        (404, "", "hub_not_found", "correct huggingface_model"),
        (429, "", "hub_rate_limited", "wait some minutes"),
        (502, "", "hub_unavailable", "answers 502: try again later"),
    ],
)
def test_statuses(status: int, token: str, code: str, words: str) -> None:
    reason = explain(client_error(huggingface_hub.errors.HfHubHTTPError, status), JOB, {"HF_TOKEN": token})
    assert reason.code == code
    assert words in reason.sentence
    assert CANARY not in str(reason)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full", "/cache has no room left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full", "make room"),
        (OSError(errno.EROFS, "Read-only file system"), "cache_not_writable", "cannot be written to /cache"),
        (PermissionError(errno.EACCES, "Permission denied"), "cache_not_writable", "set TRANSFORMERS_CACHE"),
        (OSError("Consistency check failed: file should be of size 9"), "hub_incomplete", "broke off"),
        (json.JSONDecodeError("Expecting value", "<html>", 0), "hub_unavailable", "is not the Hub"),
        (KeyError("surprise"), "hub_unavailable", "KeyError: 'surprise'"),
        (CheckpointError("checkpoint_incomplete", "ours"), "checkpoint_incomplete", "ours"),
    ],
)
def test_causes_are_found_behind_other_errors(error: Exception, code: str, words: str) -> None:
    wrapped = RuntimeError("the client's own")
    wrapped.__cause__ = error
    for each in (error, wrapped) if not isinstance(error, KeyError) else (error,):
        reason = explain(each, JOB, {})
        assert reason.code == code
        assert words in reason.sentence


def test_messages_show_no_password_of_the_endpoint_and_no_signature() -> None:
    error = ValueError("cannot read https://cdn.example/x?Signature=secret now")
    sentence = explain(error, JOB, {"HF_ENDPOINT": "https://user:secret@mirror.example/"}).sentence
    assert "https://mirror.example " in sentence
    assert "cannot read https://cdn.example/x now" in sentence
    assert "secret" not in sentence


def test_every_row_of_the_table_can_be_written_and_names_the_model() -> None:
    known = dict.fromkeys(
        ("model", "revision", "cache_dir", "setting", "revision_setting", "endpoint", "page", "status", "cause"), "X"
    )
    for meaning in MEANINGS:
        assert meaning.code in CODES
        assert "{model}" in meaning.sentence
        assert ":" in meaning.sentence.format(**known)  # cause: remedy


def test_every_code_is_listed_and_every_listed_code_is_used() -> None:
    used: set[str] = set()
    for path in Path(hf_triton.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used |= {code for node in ast.walk(tree) if isinstance(node, ast.Call) for code in _codes_of(node)}
    assert used == set(CODES)


def _codes_of(call: ast.Call) -> Iterator[str]:
    """The code that a call of an error class gives; the parent's constructor and the table's rows count too."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    arguments = {"_Meaning": call.args[1:2], "__init__": call.args[:1]}.get(name)
    kind = getattr(hf_triton.errors, name, None)
    if isinstance(kind, type) and issubclass(kind, HfTritonError):
        arguments = call.args[:1]
    for argument in arguments or ():
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and argument.value.isidentifier():
            yield argument.value
