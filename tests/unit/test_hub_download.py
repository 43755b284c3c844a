# SPDX-License-Identifier: Apache-2.0
"""Downloads by the real client in its process, from a loopback Hub: retries, deadlines, checksums, access."""

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_triton.errors import CheckpointError, HubError
from hf_triton.hub.download import Downloader, remove_stale
from hf_triton.hub.download_parent import DownloadLimits, DownloadWatch, download
from hf_triton.hub.locate import TOKEN_VARIABLES, Hub
from hf_triton.hub.snapshot import unchecked_mark
from hf_triton.hub.spec import CheckpointSpec
from hf_triton.testing import LoopbackHub, flip_bit
from tests.support.folders import shadow_modules
from tests.support.hub import CANARY, COMMIT, MODEL, build_hub, write_snapshot
from tests.support.marks import full
from tests.support.waiting import wait_until

SPEC = CheckpointSpec(MODEL)


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


def download_with_frequent_logs(*arguments: Any) -> Path:
    *others, limits = arguments
    return download(*others, replace(limits, log_interval_s=0.0))


@pytest.mark.full
def test_progress_is_logged(tmp_path: Path, loopback: LoopbackHub, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(bytes(20_000_000))
    loopback.add(MODEL, tmp_path / "checkpoint")
    loopback.slow("cdn", bytes_per_s=8_000_000)
    hub = build_hub(tmp_path, loopback.environment(), download=download_with_frequent_logs)
    with caplog.at_level(logging.INFO, "hf_triton"):
        hub.resolve_model()
    assert f"{MODEL} (revision main): downloading to {tmp_path / 'home' / 'hub'}" in caplog.text
    assert f"{MODEL}: downloading, 0.01 of 0.02 GB" in caplog.text
    assert f"{MODEL}: downloaded in " in caplog.text


def test_the_process_imports_nothing_from_the_current_folder(
    tmp_path: Path, loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow_modules(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert build_hub(tmp_path, loopback.environment()).resolve_model()


UNTRUSTED = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "training_args.bin",
    "optimizer.pt",
    "modeling_mine.py",
    "custom_generate/generate.py",
    "1_Dense/pytorch_model.bin",
    "adapter_model.bin",
    "model.onnx",
    "vocab.pkl",
)


def test_nothing_that_can_run_is_downloaded(tmp_path: Path, loopback: LoopbackHub) -> None:
    checkpoint = tmp_path / "checkpoint"
    for name in UNTRUSTED:
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text("{}")
    loopback.add(MODEL, checkpoint)
    folder = build_hub(tmp_path, loopback.environment()).resolve_model()
    fetched = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert fetched == {"config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin.index.json"}
    (checkpoint / "model.safetensors").unlink()
    index = '{"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}'
    (checkpoint / "model.safetensors.index.json").write_text(index)
    loopback.add(MODEL, checkpoint)
    shutil.rmtree(tmp_path / "home" / "hub")
    with pytest.raises((HubError, CheckpointError), match=r"'pytorch_model\.bin', which is no safetensors file"):
        build_hub(tmp_path, loopback.environment()).resolve_model()
    assert not [path for path in (tmp_path / "home" / "hub").rglob("*") if path.suffix in (".bin", ".py", ".pt")]


@pytest.mark.parametrize("is_local", [False, True])
def test_an_adapter_that_is_a_pickle_is_named(tmp_path: Path, loopback: LoopbackHub, is_local: bool) -> None:
    for name in ("adapter_config.json", "adapter_model.bin"):
        (tmp_path / "checkpoint" / name).write_text("{}")
    loopback.add(MODEL, tmp_path / "checkpoint")
    hub = build_hub(tmp_path, loopback.environment())
    with pytest.raises(
        (HubError, CheckpointError), match=r"as a pickle alone \(adapter_model\.bin\).*convert it"
    ) as raised:
        hub.resolve_adapter(str(tmp_path / "checkpoint") if is_local else MODEL)
    assert raised.value.code == "weights_not_safe"
    assert not list((tmp_path / "home").rglob("*.bin"))


def test_retries_are_logged(tmp_path: Path, loopback: LoopbackHub, caplog: pytest.LogCaptureFixture) -> None:
    loopback.fail(503, times=1, path="/api/")
    build_hub(tmp_path, loopback.environment(), download=download_with_frequent_logs).resolve_model()
    assert f"{MODEL}: warning of the Hub's client: HfHubHTTPError" in caplog.text
    assert "503" in caplog.text


@pytest.mark.full
def test_stalled_download_fails_and_leaves_no_partial_file(tmp_path: Path, loopback: LoopbackHub) -> None:
    loopback.slow("cdn", bytes_per_s=100)
    hub = build_hub(tmp_path, loopback.environment(), download_stall_timeout_s=4)
    with pytest.raises(HubError, match=r"received no byte for 4 s .*raise download_stall_timeout_s") as raised:
        hub.resolve_model()
    assert raised.value.code == "hub_timeout"
    cache = tmp_path / "home" / "hub" / "models--org--model"
    assert (cache / "snapshots").is_dir()
    assert not list(cache.rglob("*.incomplete"))


@pytest.mark.full
def test_slow_download_is_not_stalled(tmp_path: Path, loopback: LoopbackHub) -> None:
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "model.safetensors").write_bytes(bytes(1_700_000))
    loopback.add(MODEL, checkpoint)
    loopback.slow("cdn", bytes_per_s=400_000)  # by default, the client reports every 10 MB
    build_hub(tmp_path, loopback.environment(), download_stall_timeout_s=4).resolve_model()


@pytest.mark.full
def test_timeout_quotes_the_last_warning_of_the_client(tmp_path: Path, loopback: LoopbackHub) -> None:
    loopback.fail(429, path="/resolve/", retry_after_s=300)
    hub = build_hub(tmp_path, loopback.environment(), download_timeout_s=4)
    with pytest.raises(HubError, match=r"did not finish within 4 s .*(429|Rate limited).*raise download_timeout_s"):
        hub.resolve_model()


def test_long_checksum_is_not_a_stall(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    watch = DownloadWatch(MODEL, DownloadLimits(1000, 100), lambda: clock[0])
    counts = {"num_bytes": 3_000_000_000, "total_bytes": 4_000_000_000}
    watch.update(counts | {"is_checking": False})
    with caplog.at_level(logging.INFO, "hf_triton"):
        for clock[0] in (90.0, 180.0, 270.0):
            watch.update(counts | {"is_checking": True})
            assert watch.remaining_s() == 100
    assert f"{MODEL}: verifying, 3.00 of 4.00 GB" in caplog.text
    clock[0] = 360.0
    watch.update(counts | {"is_checking": False})
    assert watch.remaining_s() == 10
    clock[0] = 370.0
    with pytest.raises(HubError, match=r"received no byte for 100 s \(3\.00 GB received"):
        watch.remaining_s()


def use_as_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Run a shell script in place of the download process."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_process_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_as_process(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(HubError, match=rf"{MODEL} ended without a result \(exit code 1;") as raised:
        download(SPEC, tmp_path, {}, DownloadLimits(30, 30))
    assert raised.value.code == "hub_unavailable"


def test_token_is_in_the_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_as_process(tmp_path, monkeypatch, f'echo "$@" "$(head -n 1)" > {tmp_path}/seen; env > {tmp_path}/environment')
    with pytest.raises(HubError):
        build_hub(tmp_path, {"PATH": os.environ["PATH"], "PRIVATE_REPO_TOKEN": CANARY}).resolve_model()
    assert f"HF_TOKEN={CANARY}\n" in (tmp_path / "environment").read_text()
    seen = (tmp_path / "seen").read_text()
    assert seen.startswith("-P -m hf_triton.hub.download {")
    assert CANARY not in seen


@pytest.mark.full
def test_process_ends_with_its_parent(tmp_path: Path, loopback: LoopbackHub) -> None:
    loopback.hang()
    code = (
        "import os, pathlib, sys\n"
        "from hf_triton.hub.locate import Hub\n"
        "from hf_triton.settings import ModelSettings\n"
        f"Hub(pathlib.Path(sys.argv[1]), ModelSettings(huggingface_model={MODEL!r}), os.environ).resolve_model()"
    )
    environment = os.environ | loopback.environment() | {"HF_HOME": str(tmp_path / "home")}
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], env=environment) as parent:
        wait_until(lambda: loopback.requests)
        [child] = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
    wait_until(lambda: not Path(f"/proc/{child}").exists())


def test_stale_partial_files_are_removed(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name, age_s in (("old.incomplete", 7200), ("fresh.incomplete", 0), ("old", 7200)):
        (blobs / name).write_text("")
        modified = (blobs / name).stat().st_mtime - age_s
        os.utime(blobs / name, (modified, modified))
    remove_stale(tmp_path)
    assert sorted(path.name for path in blobs.iterdir()) == ["fresh.incomplete", "old"]


def test_download_without_disk_space_is_refused_before_it_begins(
    tmp_path: Path, loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    downloader = Downloader(SPEC, str(tmp_path / "cache"), lambda _: None)
    sizes = {"a.safetensors": 60_000, "b.safetensors": 60_000}
    with pytest.raises(HubError, match="set TRANSFORMERS_CACHE to a folder on a larger disk") as raised:
        downloader.check_disk_space(sizes, COMMIT)
    assert raised.value.code == "disk_full"
    assert MODEL in str(raised.value)
    snapshot = tmp_path / "cache" / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "a.safetensors").write_text("")  # already downloaded
    downloader.check_disk_space(sizes, COMMIT)


@pytest.mark.parametrize("name", [TOKEN_VARIABLES[0], *full(*TOKEN_VARIABLES[1:])])
def test_each_token_variable_opens_a_gated_model(tmp_path: Path, loopback: LoopbackHub, name: str) -> None:
    loopback.add(MODEL, tmp_path / "checkpoint", gated=True)
    token = {name: loopback.access_token}
    if name == "HF_TOKEN_PATH":
        token = {name: str(tmp_path / "token")}
        (tmp_path / "token").write_text(f"{loopback.access_token}\n")
    hub = build_hub(tmp_path, loopback.environment() | token)
    snapshot = hub.resolve_model()
    loopback.requests.clear()
    assert build_hub(tmp_path, loopback.environment()).resolve_model() == snapshot  # a cached model needs no token
    assert loopback.requests == []


def rejection(tmp_path: Path, environment: dict[str, str], **settings: Any) -> HubError:
    with pytest.raises(HubError) as raised:
        build_hub(tmp_path, environment, **settings).resolve_model()
    assert MODEL in raised.value.sentence
    return raised.value


def test_gated_model_error_has_a_remedy(tmp_path: Path, loopback: LoopbackHub) -> None:
    loopback.add(MODEL, tmp_path / "checkpoint", gated=True)
    environment = loopback.environment()
    assert "there is no access token: accept its terms at" in rejection(tmp_path, environment).sentence
    refused = rejection(tmp_path, environment | {"HF_TOKEN": loopback.stranger_token})
    assert refused.code == "hub_gated"
    assert "with the account that the token belongs to" in refused.sentence
    refused = rejection(tmp_path, environment | {"HF_TOKEN": CANARY})
    assert refused.code == "hub_auth"
    assert CANARY not in str(refused)


@pytest.mark.full
def test_unreachable_hub_fails_within_seconds(tmp_path: Path) -> None:
    started = time.monotonic()
    refused = rejection(tmp_path, {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*"})
    assert refused.code == "hub_unavailable"
    assert "the Hub at http://127.0.0.1:9 cannot be reached (ConnectError: " in refused.sentence
    assert refused.sentence.endswith("; a folder on disk begins with `/`, `./` or `../`")
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(lambda hub: hub.fail(503, times=2), id="503"),
        pytest.param(lambda hub: hub.fail(503, times=2, path="/resolve/"), id="503 file", marks=pytest.mark.full),
        pytest.param(lambda hub: hub.fail(500, times=2, path="/cdn/"), id="500 cdn", marks=pytest.mark.full),
        pytest.param(lambda hub: hub.fail(429, times=1, retry_after_s=1), id="429", marks=pytest.mark.full),
        pytest.param(lambda hub: hub.drop(times=2), id="drop", marks=pytest.mark.full),
        pytest.param(lambda hub: hub.drop(times=1, path="/resolve/"), id="drop file", marks=pytest.mark.full),
        pytest.param(lambda hub: hub.drop(times=1, path="/cdn/"), id="drop cdn"),
        pytest.param(lambda hub: hub.truncate("/cdn/", after_bytes=1000, times=1), id="truncated"),
        pytest.param(lambda hub: hub.corrupt("/cdn/", times=1), id="corrupt"),
        pytest.param(
            lambda hub: hub.corrupt("/resolve/main/config.json", times=1, offset_bytes=0),
            id="corrupt small",
            marks=pytest.mark.full,
        ),
    ],
)
def test_transient_faults_are_retried(
    tmp_path: Path, loopback: LoopbackHub, arm: Callable[[LoopbackHub], None]
) -> None:
    arm(loopback)
    snapshot = build_hub(tmp_path, loopback.environment()).resolve_model()
    for path in (tmp_path / "checkpoint").iterdir():
        assert (snapshot / path.name).read_bytes() == path.read_bytes()


KINDS: dict[str, dict[str, str]] = {
    "model.safetensors": {},
    "tokenizer.json": {},
    "Tiny-Q8_0.gguf": {"gguf_file": "Q8_0"},
    "adapter_model.safetensors": {},
}
"""Files that are downloaded, and settings with which they are."""


def fetch(hub: Hub, name: str) -> Path:
    return hub.resolve_adapter(MODEL) if name.startswith("adapter") else hub.resolve_model()


@pytest.fixture
def kinds(tmp_path: Path, loopback: LoopbackHub) -> LoopbackHub:
    (tmp_path / "checkpoint" / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "checkpoint" / "Tiny-Q8_0.gguf").write_bytes(bytes(100_000))
    loopback.add(MODEL, tmp_path / "checkpoint")
    return loopback


def add_adapter(tmp_path: Path, loopback: LoopbackHub) -> None:
    (tmp_path / "checkpoint" / "adapter_config.json").write_text("{}")
    (tmp_path / "checkpoint" / "adapter_model.safetensors").write_bytes(bytes(50_000))
    loopback.add(MODEL, tmp_path / "checkpoint")


@pytest.mark.parametrize("has_links", [True, *full(False)])
@pytest.mark.parametrize("name", ["model.safetensors", *full(*list(KINDS)[1:])])
def test_a_file_that_arrives_damaged_does_not_stay(
    tmp_path: Path, kinds: LoopbackHub, name: str, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("adapter"):
        add_adapter(tmp_path, kinds)
    environment = kinds.environment()
    if not has_links:  # as on a file system without links
        environment["PYTHONPATH"] = str(without_links(tmp_path))
    kinds.corrupt(f"/{name}" if name.endswith(".json") else "/cdn/", times=8, offset_bytes=0)
    with pytest.raises(HubError, match=f"{name} of {MODEL} arrived damaged twice") as raised:
        fetch(build_hub(tmp_path, environment, **KINDS[name]), name)
    assert raised.value.code == "hub_incomplete"
    assert list((tmp_path / "home").rglob(f".unchecked/*/{name}"))
    with pytest.raises(HubError, match="is not complete in any cache"):
        fetch(build_hub(tmp_path, environment | {"HF_HUB_OFFLINE": "1"}, **KINDS[name]), name)
    kinds.heal()
    folder = fetch(build_hub(tmp_path, environment, **KINDS[name]), name)
    assert (folder / name).read_bytes() == (tmp_path / "checkpoint" / name).read_bytes()
    assert not [path for path in folder.parents[1].glob(".unchecked/**/*") if path.is_file()]


def without_links(tmp_path: Path) -> Path:
    """A folder of Python code with which the Hub's client finds that links cannot be made."""
    folder = tmp_path / "without_links"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os\ndef symlink(*args, **kwargs): raise OSError('none here')\nos.symlink = symlink\n"
    )
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("is_damaged", [True, False])
def test_what_was_not_verified_is_verified_before_it_is_believed(
    tmp_path: Path, kinds: LoopbackHub, name: str, is_damaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if name.startswith("adapter"):
        add_adapter(tmp_path, kinds)
    settings = KINDS[name]
    folder = fetch(build_hub(tmp_path, kinds.environment(), **settings), name)
    original = (folder / name).read_bytes()
    mark = unchecked_mark(folder, name)  # as of a process that was killed before its check
    mark.write_text("")
    if is_damaged:
        flip_bit(folder / name, 1)
    offline = build_hub(tmp_path, kinds.environment() | {"HF_HUB_OFFLINE": "1"}, **settings)
    if is_damaged:
        with pytest.raises(HubError, match="is not complete in any cache"):
            fetch(offline, name)
        assert f"{name} was damaged in the cache" in caplog.text
    else:
        assert fetch(offline, name) == folder
        assert not mark.exists()
    assert (fetch(build_hub(tmp_path, kinds.environment(), **settings), name) / name).read_bytes() == original


@pytest.mark.parametrize("revision", ["v1", "commit"])
def test_download_by_tag_and_by_commit(tmp_path: Path, loopback: LoopbackHub, revision: str) -> None:
    newer = shutil.copytree(tmp_path / "checkpoint", tmp_path / "newer")
    (newer / "config.json").write_text('{"newer": true}')
    commit = loopback.add(MODEL, tmp_path / "checkpoint")
    loopback.add(MODEL, newer, revisions={"v1": tmp_path / "checkpoint"})
    hub = build_hub(tmp_path, loopback.environment(), revision=commit if revision == "commit" else revision)
    snapshot = hub.resolve_model()
    assert snapshot.name == commit
    loopback.requests.clear()
    assert hub.resolve_model() == snapshot
    assert loopback.requests == []


def test_cached_files_are_not_downloaded_again(tmp_path: Path, loopback: LoopbackHub) -> None:
    environment = loopback.environment()
    build_hub(tmp_path, environment, load_format="dummy").resolve_model()
    assert not [request for request in loopback.requests if "model.safetensors" in request.path]
    loopback.requests.clear()
    build_hub(tmp_path, environment).resolve_model()
    paths = [request.path.split("?")[0] for request in loopback.requests if request.method == "GET"]
    assert paths[-1].endswith("/model.safetensors")
    assert not [path for path in paths if "/resolve/" in path]


def test_damaged_small_file_is_downloaded_again(tmp_path: Path, loopback: LoopbackHub) -> None:
    hub = build_hub(tmp_path, loopback.environment())
    snapshot = hub.resolve_model()
    (snapshot / "config.json").write_text("damaged")
    (snapshot / "model.safetensors").unlink()
    assert hub.resolve_model() == snapshot
    assert (snapshot / "config.json").read_text() == "{}"


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 77
exec "$2" -c '
import os, sys
from pathlib import Path
from hf_triton.errors import CheckpointError, HubError
from hf_triton.hub.locate import Hub
from hf_triton.settings import ModelSettings

folder = Path(sys.argv[1])
try:
    open(folder / "probe", "w")
except OSError:
    print(Hub(folder, ModelSettings(huggingface_model=sys.argv[2]), os.environ).resolve_model())
    try:
        Hub(folder, ModelSettings(huggingface_model="org/other"), os.environ).resolve_model()
    except HubError as error:
        print(error.code)
' "$1" org/model
"""


def test_cache_on_a_read_only_mount(tmp_path: Path, loopback: LoopbackHub) -> None:
    snapshot = write_snapshot(tmp_path / "cache")
    environment = os.environ | loopback.environment() | {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": ""}
    command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(tmp_path / "cache"), sys.executable]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this user may not mount a folder read-only")
    assert done.stdout.split() == [str(snapshot), "cache_not_writable"], done.stderr
    assert loopback.requests == []
