# SPDX-License-Identifier: Apache-2.0
"""TLS from clients to the gateway, from the gateway and commands to Triton; what a locked server keeps to its key."""

import asyncio
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import grpc
import httpx
import openai
import pytest
from click.testing import CliRunner
from tritonclient.grpc import service_pb2, service_pb2_grpc

from hf_triton.errors import ServerError, SettingsError
from hf_triton.server import ADMIN_HEADER, TritonServer, free_ports
from hf_triton_cli.client.running_triton import Triton
from hf_triton_cli.commands import cli
from hf_triton_gateway.app import build_app
from hf_triton_gateway.gateway_config import GatewayConfig, TritonAddress
from hf_triton_gateway.http.tls import ServerCertificate
from hf_triton_gateway.triton.endpoint import Endpoint
from tests.support.certificates import Authority
from tests.support.commands import hf_triton
from tests.support.gateway import GatewayThread, add_demo, wait_until
from tests.support.serving import PORTS, Serving, port_options, running

pytestmark = pytest.mark.full

ADMIN_KEY = "c2VjcmV0LW9mLXRoZS1hZG1pbg=="
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}


@dataclass(frozen=True)
class Fleet:
    """A locked server, over TLS on gRPC and at the gateway, and the files of those who reach it."""

    serving: Serving
    folder: Path
    ca: Authority

    @property
    def gateway(self) -> str:
        return f"https://127.0.0.1:{self.serving.openai_port}"

    @property
    def address(self) -> TritonAddress:
        return TritonAddress(
            triton=f"127.0.0.1:{self.serving.grpc_port}",
            triton_ca_file=self.ca.file,
            triton_cert_file=self.folder / "client.pem",
            triton_key_file=self.folder / "client.key",
        )

    def options(self, **changes: Any) -> list[str]:
        fields = {**self.address.model_dump(exclude_none=True), **changes}
        return [f"--{name.replace('_', '-')}={value}" for name, value in fields.items() if value is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ca(folder: Path) -> Authority:
    made = Authority(folder)
    for name in ("server", "client"):
        made.issue(name)
    made.issue("old", is_expired=True)
    made.issue("elsewhere", "DNS:gpu1")
    Authority(folder, "other").issue("stranger")
    return made


@pytest.fixture(scope="module")
def fleet(folder: Path, ca: Authority) -> Iterator[Fleet]:
    add_demo(folder / "models")
    (folder / "admin").write_text(f"{ADMIN_KEY}\n")
    (folder / "headers").write_text(f"triton-grpc-protocol-{ADMIN_HEADER}: {ADMIN_KEY}\n")
    own = [f"--{side}{kind}={folder / file}" for side, kind, file in OWN_FILES]
    flags = [f"--grpc-{name}={value}" for name, value in server_flags(folder, "server", is_mutual=True).items()]
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    with running(
        str(folder / "models"), *own, "--verbose", "--", *flags, *explicit, output=folder / "output"
    ) as serving:
        serving.wait_for("Ctrl+C stops the server")
        yield Fleet(serving, folder, ca)


OWN_FILES = (
    ("ssl-", "certfile", "server.pem"),
    ("ssl-", "keyfile", "server.key"),
    ("triton-", "cert-file", "client.pem"),
    ("triton-", "key-file", "client.key"),
    ("admin-", "key-file", "admin"),
)


def server_flags(folder: Path, name: str, *, is_mutual: bool = False) -> dict[str, object]:
    kind = "use-ssl-mutual" if is_mutual else "use-ssl"
    root = {"root-cert": folder / "ca.pem"} if is_mutual else {}
    return {kind: "true", "server-cert": folder / f"{name}.pem", "server-key": folder / f"{name}.key", **root}


# --- to Triton -------------------------------------------------------------------------------------------------------


def test_commands_speak_tls(fleet: Fleet) -> None:
    options = fleet.options(triton_headers_file=fleet.folder / "headers")
    done = hf_triton("generate", "-m", "demo", "Hello", *options)
    assert done.returncode == 0, done.stderr
    listed = CliRunner().invoke(cli, ["list", "--json", *options])
    assert [model["model"] for model in json.loads(listed.stdout)] == ["demo"]
    commands = (["status"], ["load", "demo"], ["chat", "demo"], ["list", f"--triton=grpcs://{fleet.address.triton}"])
    for command in commands:
        CliRunner().invoke(cli, [command[0], *options, *command[1:]], input="Hello\n", catch_exceptions=False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"triton_ca_file": None, "triton_cert_file": None, "triton_key_file": None},
            "For TLS, write grpcs://HOST:PORT",
        ),
        ({"triton_ca_file": "other.pem"}, "of no authority that is trusted: name one's with --triton-ca-file"),
        ({"triton_ca_file": None}, "of no authority that is trusted"),
        ({"triton_cert_file": None, "triton_key_file": None}, "wants a client certificate: --triton-cert-file"),
        ({"triton_cert_file": "stranger.pem", "triton_key_file": "stranger.key"}, "wants a client certificate"),
        ({"triton_cert_file": "old.pem", "triton_key_file": "old.key"}, "wants a client certificate"),
        ({"triton_server_name": "gpu1"}, "its certificate is for another name"),
    ],
)
def test_a_client_that_does_not_fit_gets_one_sentence(
    fleet: Fleet, changes: Mapping[str, str | None], reason: str
) -> None:
    fields = fleet.address.model_dump() | {
        name: value and fleet.folder / value if name.endswith("_file") else value for name, value in changes.items()
    }
    assert reason in refusal(TritonAddress.model_validate(fields))


def refusal(address: TritonAddress) -> str:
    with pytest.raises(ServerError) as caught:
        Triton(Endpoint.read(address)).index()
    assert caught.value.code == "server_unreachable"
    assert "\n" not in caught.value.sentence
    return caught.value.sentence


@pytest.mark.parametrize(
    ("name", "reason"),
    [("old", "its certificate has expired"), ("elsewhere", "for another name"), (None, "speaks no TLS")],
)
def test_a_server_that_does_not_fit_gets_one_sentence(
    folder: Path, ca: Authority, tmp_path: Path, name: str | None, reason: str
) -> None:
    flags = {} if name is None else server_flags(folder, name)
    arguments = [f"--grpc-{flag}={value}" for flag, value in flags.items()]
    with TritonServer(tmp_path, arguments=[*arguments, "--model-control-mode=explicit"]) as server:
        address = TritonAddress(triton=f"grpcs://{server.grpc_url}", triton_ca_file=ca.file)
        assert reason in refusal(address)
        if name == "elsewhere":
            named = address.model_copy(update={"triton_server_name": "gpu1"})
            assert Triton(Endpoint.read(named)).index() == []
        http = address.model_copy(update={"triton": f"127.0.0.1:{server.http_port}"})
        assert "speaks no TLS" in refusal(http)


def test_the_gateway_says_in_its_log_what_does_not_fit(
    fleet: Fleet, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = GatewayConfig(triton=fleet.address.triton, port=0, triton_ca_file=folder / "other.pem")
    with caplog.at_level("INFO", "hf_triton_gateway"), GatewayThread(wrong) as gateway:
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=CHAT)
        wait_until(lambda: "its certificate is of no authority" in caplog.text)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert "certificate" not in answer.text, "it is nothing to a client"


# --- to the gateway --------------------------------------------------------------------------------------------------


def test_the_gateway_serves_https(fleet: Fleet) -> None:
    with httpx.Client(verify=fleet.ca.client(), trust_env=False) as client:
        openai_client = openai.OpenAI(base_url=f"{fleet.gateway}/v1", api_key="none", http_client=client)
        whole = openai_client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        pieces = list(openai_client.chat.completions.create(**CHAT, stream=True))  # type: ignore[call-overload]
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
        assert client.get(f"{fleet.gateway}/health").status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{fleet.gateway}/health", trust_env=False)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{fleet.serving.openai_port}/health", trust_env=False)
    assert f"OpenAI's API  https://localhost:{fleet.serving.openai_port}/v1" in fleet.serving.output()


@pytest.mark.parametrize(("version", "is_served"), [("TLSv1", False), ("TLSv1_1", False), ("TLSv1_2", True)])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_of_tls_are_refused(fleet: Fleet, version: str, is_served: bool) -> None:
    context = fleet.ca.client()
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    with httpx.Client(verify=context, trust_env=False) as client:
        if is_served:
            assert client.get(f"{fleet.gateway}/health").status_code == 200
        else:
            with pytest.raises(httpx.ConnectError, match=r"PROTOCOL_VERSION|EOF"):
                client.get(f"{fleet.gateway}/health")


def test_run_batch_speaks_https(fleet: Fleet, tmp_path: Path) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    (tmp_path / "in").write_text(json.dumps(line))
    command = ["run-batch", str(tmp_path / "in"), "-o", str(tmp_path / "out"), f"--url={fleet.gateway}"]
    untrusted = hf_triton(*command)
    assert untrusted.returncode == 4
    assert "its certificate is not trusted: " in untrusted.stderr
    assert "SSL_CERT_FILE names authorities" in untrusted.stderr
    assert hf_triton(*command, SSL_CERT_FILE=str(fleet.ca.file)).returncode == 0
    assert json.loads((tmp_path / "out").read_text())["response"]["status_code"] == 200


def test_a_certificate_is_read_again(ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    used = ca.issue("renewed")
    config = GatewayConfig(triton="127.0.0.1:1", port=0, ssl_certfile=used.file, ssl_keyfile=used.key)

    def is_accepted(authority: Authority) -> bool:
        try:
            return httpx.get(f"{gateway.url}/version", verify=authority.client()).status_code == 200
        except httpx.ConnectError:
            return False

    with caplog.at_level("INFO", "hf_triton_gateway"), GatewayThread(config) as gateway:
        assert is_accepted(ca)
        used.file.write_text("half a certificate")
        wait_until(lambda: is_accepted(ca) and "the former certificate stays: " in caplog.text)
        other = Authority(tmp_path, "other")
        new = other.issue("new")
        new.file.replace(used.file)
        new.key.replace(used.key)
        wait_until(lambda: is_accepted(other))
        assert not is_accepted(ca)


# --- files -----------------------------------------------------------------------------------------------------------

WRONG_FILES = {
    "no such file": ("none.pem", "client.key", "cert_?file .*/none.pem cannot be read: No such file or directory"),
    "folder": (".", "client.key", "cannot be read: Is a directory"),
    "empty": ("empty", "client.key", "must be a certificate and its key in PEM, without a passphrase"),
    "key as certificate": ("client.key", "client.key", "must be a certificate and its key in PEM"),
    "locked key": ("client.pem", "locked.key", "without a passphrase"),
    "pipe": ("client.pem", "pipe", "key_?file .*/pipe is a pipe: it must be a file"),
    "key of another": ("client.pem", "server.key", "do not belong together"),
}


@pytest.mark.parametrize(("certificate", "key", "sentence"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_gets_one_sentence(folder: Path, ca: Authority, certificate: str, key: str, sentence: str) -> None:
    (folder / "empty").write_text("")
    if not (folder / "pipe").exists():
        os.mkfifo(folder / "pipe")
    ca.lock(folder / "client.key", folder / "locked.key")
    files = folder / certificate, folder / key
    with pytest.raises(SettingsError, match=sentence):
        ServerCertificate(GatewayConfig(ssl_certfile=files[0], ssl_keyfile=files[1]))
    with pytest.raises(SettingsError, match=sentence):
        build_app(GatewayConfig(triton_cert_file=files[0], triton_key_file=files[1]))


@pytest.mark.parametrize("name", ["client.key", "empty"])
def test_a_file_without_an_authority_gets_one_sentence(folder: Path, ca: Authority, name: str) -> None:
    (folder / "empty").write_text("")
    with pytest.raises(SettingsError, match=f"triton_ca_file .*/{name} holds no certificate in PEM"):
        Endpoint.read(TritonAddress(triton_ca_file=folder / name))


WRONG_OPTIONS = {
    "certificate alone": (["--ssl-certfile=FOLDER/client.pem"], "--ssl-keyfile belongs to ssl_certfile: give both"),
    "key alone": (["--triton-key-file=FOLDER/client.key"], "--triton-key-file belongs to triton_cert_file"),
    "mutual TLS": (["--", "--grpc-use-ssl-mutual=true"], "needs --triton-cert-file and --triton-key-file"),
    "short key": (["--admin-key-file=FOLDER/short"], "must hold one key: 16 to 256 letters"),
    "two keys": (["--admin-key-file=FOLDER/two"], "must hold one key"),
    "locked twice": (
        ["--admin-key-file=FOLDER/admin", "--", "--grpc-restricted-protocol=trace:a=b"],
        "--admin-key-file sets --grpc-restricted-protocol: give one of them",
    ),
}


@pytest.mark.parametrize(("options", "sentence"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_wrong_options_get_one_sentence(folder: Path, ca: Authority, options: list[str], sentence: str) -> None:
    (folder / "admin").write_text(f"{ADMIN_KEY}\n")
    (folder / "short").write_text("secret")
    (folder / "two").write_text(f"{ADMIN_KEY}\n{ADMIN_KEY}\n")
    arguments = [*port_options(free_ports(len(PORTS))), *(each.replace("FOLDER", str(folder)) for each in options)]
    with pytest.raises(click.UsageError) as caught:
        CliRunner().invoke(cli, ["serve", *arguments], standalone_mode=False, catch_exceptions=False)
    assert sentence in caught.value.format_message()
    assert ADMIN_KEY not in caught.value.format_message()


# --- what a key opens ------------------------------------------------------------------------------------------------

REGION = {"key": "/region", "offset": 0, "byte_size": 8}
HTTP_DOORS = {
    "the index": ("POST", "/v2/repository/index", {}),
    "loading": ("POST", "/v2/repository/models/demo/load", {}),
    "unloading": ("POST", "/v2/repository/models/demo/unload", {}),
    "shared memory": ("POST", "/v2/systemsharedmemory/region/mine/register", REGION),
    "its regions": ("GET", "/v2/systemsharedmemory/status", None),
    "memory of GPUs": ("GET", "/v2/cudasharedmemory/status", None),
    "traces": ("POST", "/v2/trace/setting", {"trace_file": "/tmp/taken"}),
    "traces of a model": ("POST", "/v2/models/demo/trace/setting", {"trace_level": ["TENSORS"]}),
    "the log": ("POST", "/v2/logging", {"log_verbose_level": 1}),
}


@pytest.mark.parametrize(("method", "path", "body"), HTTP_DOORS.values(), ids=HTTP_DOORS)
def test_what_changes_a_server_is_closed_over_http(
    fleet: Fleet, method: str, path: str, body: dict[str, object] | None
) -> None:
    url = f"http://127.0.0.1:{fleet.serving.http_port}"
    for variant in (
        path,
        f"/{path}",
        f"{path}?{ADMIN_HEADER}={ADMIN_KEY}",
        f"{path}/",
        path.replace("/v2", "/v2/.", 1),
    ):
        for headers in ({}, {ADMIN_HEADER: "wrong"}, {"triton-grpc-protocol-" + ADMIN_HEADER: ADMIN_KEY}):
            answer = httpx.request(method, url + variant, json=body, headers=headers, trust_env=False)
            assert answer.status_code in (400, 403, 404, 405), (variant, answer.text)
            assert variant != path or answer.status_code == 403
    with httpx.Client(verify=fleet.ca.client(), trust_env=False) as client:
        answer = client.request(method, fleet.gateway + path, json=body, headers={ADMIN_HEADER: ADMIN_KEY})
        assert answer.status_code == 404, "the gateway has no such paths"


def test_the_key_opens_it_over_http(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{fleet.serving.http_port}"
    answer = httpx.post(f"{url}/v2/repository/index", json={}, headers={ADMIN_HEADER: ADMIN_KEY}, trust_env=False)
    assert {model["name"] for model in answer.json()} == {"demo", "demo_stream"}
    open_to_all = httpx.post(f"{url}/v2/models/demo/generate", json={"text_input": "Hello"}, trust_env=False)
    assert open_to_all.status_code == 200


GRPC_DOORS = {
    "RepositoryIndex": service_pb2.RepositoryIndexRequest(),
    "RepositoryModelLoad": service_pb2.RepositoryModelLoadRequest(model_name="demo"),
    "RepositoryModelUnload": service_pb2.RepositoryModelUnloadRequest(model_name="demo"),
    "SystemSharedMemoryStatus": service_pb2.SystemSharedMemoryStatusRequest(),
    "SystemSharedMemoryRegister": service_pb2.SystemSharedMemoryRegisterRequest(name="a", key="/a", byte_size=8),
    "CudaSharedMemoryStatus": service_pb2.CudaSharedMemoryStatusRequest(),
    "TraceSetting": service_pb2.TraceSettingRequest(),
    "LogSettings": service_pb2.LogSettingsRequest(),
}


@pytest.mark.parametrize("name", GRPC_DOORS)
def test_what_changes_a_server_is_closed_over_grpc(fleet: Fleet, name: str) -> None:
    async def ask() -> str:
        channel = Endpoint.read(fleet.address).channel()
        try:
            call = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), name)
            await call(GRPC_DOORS[name], metadata=((ADMIN_HEADER, ADMIN_KEY),))
        except grpc.aio.AioRpcError as error:
            return error.details() or ""
        finally:
            await channel.close()
        return ""

    assert f"expecting header 'triton-grpc-protocol-{ADMIN_HEADER}'" in asyncio.run(ask())


def test_no_key_is_in_the_log(fleet: Fleet) -> None:
    assert ADMIN_KEY not in fleet.serving.output()
