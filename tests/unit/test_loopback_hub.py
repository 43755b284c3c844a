# SPDX-License-Identifier: Apache-2.0
"""The loopback Hub with the real client in a child process, and with `http.client` for raw responses."""

import hashlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hf_triton.testing import HubRequest, LoopbackHub
from tests.support.marks import full

REPO, GATED = "tiiuae/falcon-7b", "meta-llama/Llama-2-7b-hf"
WEIGHTS = bytes(range(256)) * 400
CLIENT = """
import json, sys
from pathlib import Path
from huggingface_hub import *
results = []
for expression in sys.argv[1:]:
    try:
        results.append(eval(expression))
    except Exception as error:
        results.append(type(error).__name__)
print(json.dumps(results))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    folder, older = tmp_path / "checkpoint", tmp_path / "older"
    for path, content in (
        (folder / "config.json", b'{"model_type": "falcon"}'),
        (folder / "model.safetensors", WEIGHTS),
        (folder / "notes" / "training run.md", "é\n".encode()),
        (folder / ".cache" / "private", b"not served"),
        (older / "config.json", b"{}"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with LoopbackHub() as hub:
        hub.add(REPO, folder, revisions={"v1": str(older)})
        hub.add(GATED, folder, gated=True)
        hub.add("gpt2", str(older))
        yield hub


@pytest.fixture
def ask(hub: LoopbackHub, tmp_path: Path) -> Any:
    """Evaluate expressions with huggingface_hub's names in one child process; an exception becomes its class name."""

    def ask(*expressions: str, token: str | None = None) -> list[Any]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        environment = clean | hub.environment() | {"HF_HOME": str(tmp_path / "hf")}
        environment |= {"HF_TOKEN": token} if token else {}
        command = [sys.executable, "-c", CLIENT, *expressions]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert child.returncode == 0, child.stderr
        results: list[Any] = json.loads(child.stdout)
        return results

    return ask


def get(hub: LoopbackHub, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(hub.endpoint.removeprefix("http://"), timeout=5)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def cdn_path(hub: LoopbackHub) -> str:
    response, _ = get(hub, f"/{REPO}/resolve/main/model.safetensors", "HEAD")
    return "/" + response.headers["Location"].split("/", 3)[3]


@pytest.mark.full
def test_snapshot_equals_the_folder(hub: LoopbackHub, ask: Any) -> None:
    snapshot = Path(ask(f"snapshot_download({REPO!r})")[0])
    names = sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())
    assert names == ["config.json", "model.safetensors", "notes/training run.md"]
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert (snapshot / "model.safetensors").resolve().name == hashlib.sha256(WEIGHTS).hexdigest()
    assert (snapshot / "notes" / "training run.md").read_text() == "é\n"

    hub.requests.clear()
    assert ask(f"snapshot_download({REPO!r})") == [str(snapshot)]
    assert not [request for request in hub.requests if "/resolve/" in request.path], "a cached file was requested"


FILES = ["config.json", "model.safetensors", "notes/training run.md"]


def test_public_repository(ask: Any) -> None:
    cases: list[tuple[str, object]] = [
        (f"Path(hf_hub_download({REPO!r}, 'config.json', revision='v1')).read_text()", "{}"),
        (
            f"(lambda sha: Path(hf_hub_download({REPO!r}, 'config.json', revision=sha)).read_text())"
            f"(model_info({REPO!r}, revision='v1').sha)",
            "{}",
        ),
        ("Path(hf_hub_download('gpt2', 'config.json')).read_text()", "{}"),
        (f"[s.rfilename for s in model_info({REPO!r}).siblings]", FILES),
        (
            f"[(s.size, s.lfs and s.lfs.sha256) for s in model_info({REPO!r}, files_metadata=True).siblings][:2]",
            [[24, None], [len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest()]],
        ),
        (f"sorted(f.path for f in list_repo_tree({REPO!r}))", ["config.json", "model.safetensors", "notes"]),
        (f"sorted(f.path for f in list_repo_tree({REPO!r}, recursive=True))", sorted([*FILES, "notes"])),
        (f"[f.path for f in list_repo_tree({REPO!r}, 'notes')]", ["notes/training run.md"]),
        (f"list(list_repo_tree({REPO!r}, 'nowhere'))", "RemoteEntryNotFoundError"),
        (f"[ref.name for ref in list_repo_refs({REPO!r}).tags]", ["v1"]),
        (f"file_exists({REPO!r}, 'pytorch_model.bin')", False),
        (f"hf_hub_download({REPO!r}, 'pytorch_model.bin')", "RemoteEntryNotFoundError"),
        (f"hf_hub_download({REPO!r}, 'config.json', revision='v2')", "RevisionNotFoundError"),
        (f"snapshot_download({REPO!r}, revision='v2')", "RevisionNotFoundError"),
    ]
    expressions = [expression for expression, _ in cases]
    assert list(zip(expressions, ask(*expressions), strict=True)) == cases


HIDDEN = ("RepositoryNotFoundError", "manual", "GatedRepoError", "GatedRepoError")


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        *full(
            (None, [*HIDDEN, "LocalTokenNotFoundError"]),
            ("stranger", [*HIDDEN, "stranger"]),
        ),
        ("member", ["RepositoryNotFoundError", "manual", None, True, "member"]),
    ],
)
def test_access_by_token(hub: LoopbackHub, ask: Any, user: str | None, expected: list[object]) -> None:
    token = {"stranger": hub.stranger_token, "member": hub.access_token}.get(user or "")
    results = ask(
        "model_info('no/such')",
        f"model_info({GATED!r}).gated",
        f"auth_check({GATED!r})",
        f"Path(snapshot_download({GATED!r}), 'config.json').exists()",
        "whoami()['name']",
        token=token,
    )
    assert results == expected


@pytest.mark.parametrize(
    ("path", "token", "status", "code"),
    [
        ("/api/models/no/such", None, 401, "RepoNotFound"),
        ("/api/models/no/such", "stranger", 404, "RepoNotFound"),
        ("/no/such/resolve/main/config.json", "member", 404, "RepoNotFound"),
        (f"/{REPO}/resolve/v2/config.json", None, 404, "RevisionNotFound"),
        (f"/{REPO}/resolve/main/none", None, 404, "EntryNotFound"),
        (f"/{GATED}/resolve/main/config.json", None, 401, "GatedRepo"),
        (f"/{GATED}/resolve/main/config.json", "stranger", 403, "GatedRepo"),
        (f"/{GATED}/resolve/main/config.json", "member", 200, None),
        (f"/{REPO}/resolve/main/config.json", "expired", 401, None),
        (f"/cdn/{REPO}/main/config.json", "member", 404, None),
        ("/api/agent-harnesses", None, 404, None),
        ("/api/models/a/%0d%0aX-Injected:%201/%E6%97%A5/tree/main", None, 404, None),
        (f"/api/models/{REPO}/revision/%E6%97%A5%0d%0a", None, 404, "RevisionNotFound"),
    ],
)
def test_status_and_error_code(hub: LoopbackHub, path: str, token: str | None, status: int, code: str | None) -> None:
    tokens = {"stranger": hub.stranger_token, "member": hub.access_token}
    headers = {"Authorization": f"Bearer {tokens.get(token, token)}"} if token else {}
    for method in ("GET", "HEAD"):
        response, _ = get(hub, path, method, **headers)
        assert (response.status, response.headers["X-Error-Code"]) == (status, code)


@pytest.mark.full
def test_large_files_come_from_another_host_without_the_token(hub: LoopbackHub, ask: Any) -> None:
    ask(f"hf_hub_download({GATED!r}, 'model.safetensors')", token=hub.access_token)
    sent = [request for request in hub.requests if "model.safetensors" in request.path]
    assert [(request.method, request.had_valid_token) for request in sent] == [("HEAD", True), ("GET", False)]
    assert sent[0] == HubRequest("HEAD", f"/{GATED}/resolve/main/model.safetensors", True)

    response, _ = get(hub, f"/{REPO}/resolve/main/model.safetensors", "HEAD")
    assert response.status == 302
    assert response.headers["X-Linked-ETag"] == f'"{hashlib.sha256(WEIGHTS).hexdigest()}"'
    assert response.headers["X-Linked-Size"] == str(len(WEIGHTS))
    assert response.headers["Location"].startswith("http://localhost:")
    assert not [name for name in response.headers if "xet" in name.lower()]
    unsigned, _ = get(hub, sent[1].path.split("?")[0])
    assert unsigned.status == 403


@pytest.mark.parametrize(
    ("header", "status", "expected"),
    [
        ("bytes=5-", 206, WEIGHTS[5:]),
        ("bytes=5-9", 206, WEIGHTS[5:10]),
        ("bytes=-7", 206, WEIGHTS[-7:]),
        (f"bytes={len(WEIGHTS)}-", 416, b""),
        ("lines=1-2", 200, WEIGHTS),
    ],
)
def test_ranges(hub: LoopbackHub, header: str, status: int, expected: bytes) -> None:
    response, body = get(hub, cdn_path(hub), Range=header)
    assert (response.status, body) == (status, expected)
    assert (status == 200) == ("Content-Range" not in response.headers)


def test_new_commit_moves_main_and_keeps_the_old_one(hub: LoopbackHub, tmp_path: Path) -> None:
    shas = []
    for content in ("one", "two"):
        folder = tmp_path / content
        folder.mkdir()
        (folder / "config.json").write_text(content)
        shas.append(hub.add("org/moving", folder))
    for revision, content in (("main", b"two"), (shas[0], b"one"), (shas[1], b"two")):
        assert get(hub, f"/org/moving/resolve/{revision}/config.json")[1] == content


DOWNLOAD = f"Path(hf_hub_download({REPO!r}, 'model.safetensors')).read_bytes() == bytes(range(256)) * 400"


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "options", "expression", "expected"),
    [
        ("fail", {"status": 503, "times": 2, "path": "model.safetensors"}, DOWNLOAD, True),
        ("fail", {"status": 429, "times": 1, "path": "/cdn/", "retry_after_s": 0}, DOWNLOAD, True),
        ("fail", {"status": 401}, f"model_info({REPO!r}).sha", "RepositoryNotFoundError"),
        ("fail", {"status": 403}, f"model_info({REPO!r}).sha", "GatedRepoError"),
        ("fail", {"status": 404, "path": "/resolve/"}, DOWNLOAD, "RemoteEntryNotFoundError"),
        ("fail", {"status": 500}, f"model_info({REPO!r}).sha", "HfHubHTTPError"),
        ("truncate", {"path": "model.safetensors", "after_bytes": 1000, "times": 1}, DOWNLOAD, True),
        ("corrupt", {"path": "model.safetensors", "times": 1}, DOWNLOAD, False),
        ("captive_portal", {}, DOWNLOAD, "LocalEntryNotFoundError"),
        ("drop", {}, f"model_info({REPO!r}).sha", "RemoteProtocolError"),
    ],
)
def test_client_with_faults(
    hub: LoopbackHub, ask: Any, fault: str, options: dict[str, Any], expression: str, expected: object
) -> None:
    getattr(hub, fault)(**options)
    assert ask(expression) == [expected]


def test_truncated_download_can_be_resumed(hub: LoopbackHub) -> None:
    hub.truncate("model.safetensors", after_bytes=1000, times=1)
    with pytest.raises(http.client.IncompleteRead) as cut:
        get(hub, cdn_path(hub))
    _, rest = get(hub, cdn_path(hub), Range="bytes=1000-")
    assert cut.value.partial + rest == WEIGHTS


@pytest.mark.parametrize("range_start", [0, 100, len(WEIGHTS) - 10])
def test_corruption_flips_the_same_byte_in_any_range(hub: LoopbackHub, range_start: int) -> None:
    hub.corrupt("model.safetensors", offset_bytes=len(WEIGHTS) - 5)
    _, body = get(hub, cdn_path(hub), Range=f"bytes={range_start}-")
    wrong = [index for index, (got, sent) in enumerate(zip(body, WEIGHTS[range_start:], strict=True)) if got != sent]
    assert wrong == [len(WEIGHTS) - 5 - range_start]


def test_faults_apply_to_matching_requests_and_are_counted(hub: LoopbackHub) -> None:
    hub.fail(status=503, times=5, path="/api/models/")
    hub.fail(status=500, times=1, path="/api/models/")
    with ThreadPoolExecutor(8) as pool:
        paths = [f"/api/models/{REPO}"] * 16 + [f"/{REPO}/resolve/main/config.json"] * 16
        statuses = list(pool.map(lambda path: get(hub, path)[0].status, paths))
    assert sorted(statuses) == [200] * 26 + [500] + [503] * 5
    assert set(statuses[16:]) == {200}

    hub.fail(status=503)
    hub.heal()
    assert get(hub, f"/api/models/{REPO}")[0].status == 200
    with pytest.raises(ValueError, match="times must be at least 1"):
        hub.drop(times=0)


def test_slow_bodies_take_their_time(hub: LoopbackHub) -> None:
    hub.slow("config.json", bytes_per_s=100, times=1)
    begin = time.monotonic()
    _, body = get(hub, f"/{REPO}/resolve/main/config.json")
    assert len(body) == 24
    assert time.monotonic() - begin > 0.2


def test_stops_promptly_with_open_requests(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"x" * 10_000)
    path = "/org/name/resolve/main/config.json"
    with LoopbackHub() as hub:
        hub.add("org/name", tmp_path)
        connections = [http.client.HTTPConnection(hub.endpoint.removeprefix("http://")) for _ in range(3)]
        idle, slow, hung = connections
        idle.request("GET", "/nowhere")
        idle.getresponse().read()
        hub.slow("config.json", bytes_per_s=1, times=1)
        slow.request("GET", path)
        slow_response = slow.getresponse()
        hub.hang(path)
        hung.request("GET", path)
        while len(hub.requests) < 3:
            time.sleep(0.01)
        begin = time.monotonic()
    assert time.monotonic() - begin < 20
    with pytest.raises(http.client.RemoteDisconnected):
        hung.getresponse()
    slow_response.close()
    for connection in connections:
        connection.close()
    with pytest.raises(RuntimeError, match="no address"):
        hub.endpoint  # noqa: B018


@pytest.mark.parametrize("repo_id", ["", "/name", "a/b/c", "a b", "name/"])
def test_bad_repo_id_is_refused(repo_id: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="repo_id must look like"):
        LoopbackHub().add(repo_id, tmp_path)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LoopbackHub().add("org/name", tmp_path / "nowhere")


def test_environment_keeps_no_proxy(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    monkeypatch.delenv("no_proxy", raising=False)
    environment = hub.environment()
    assert environment["NO_PROXY"] == "intranet.example,127.0.0.1,localhost"
    assert environment["no_proxy"] == "127.0.0.1,localhost"


def test_import_loads_no_heavy_packages() -> None:
    code = "import sys, hf_triton.testing; print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "set()"
