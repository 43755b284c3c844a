# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/: valid by the schemas of what reads them, and true of what they deploy."""

import contextlib
import json
import re
import shlex
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from hf_triton.errors import CODES
from hf_triton.server import free_ports
from hf_triton.tasks.serving.metrics import METRICS
from hf_triton_cli.commands import cli
from hf_triton_gateway.gateway_config import GatewayConfig
from hf_triton_gateway.http.gateway_metrics import Metrics
from hf_triton_gateway.http.health import LIVE_PATHS, READY_PATHS
from tests.support.certificates import Authority
from tests.support.gateway import GatewayThread, add_demo, wait_until
from tests.support.haproxy import haproxy
from tests.support.paths import ROOT, load_script
from tests.support.programs import ENVIRONMENT, program
from tests.support.serving import COMMAND, running

DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.parent.name for path in (DEPLOY / "kubernetes" / "overlays").glob("*/kustomization.yaml"))
KUBERNETES = "1.32"
DASHBOARD = load_script("make_dashboard")
GATEWAY_PORT, METRICS_PORT = 9000, 8002
IMAGE, GATEWAY_IMAGE = "triton_transformer_server", "hf_triton_gateway"
PORTS = {"http": 8000, "grpc": 8001, "metrics": METRICS_PORT, "openai": GATEWAY_PORT}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def rendered(overlay: str) -> dict[str, Any]:
    text = run(program("kubectl"), "kustomize", str(DEPLOY / "kubernetes" / "overlays" / overlay))
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_what_kubernetes_takes(overlay: str) -> None:
    objects = rendered(overlay)
    for document in objects.values():
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    pod = objects["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    selectors = [
        objects["Deployment"]["spec"]["selector"]["matchLabels"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
    ]
    assert all(selector.items() <= labels for selector in selectors)
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]} == volumes


def containers(pod: Any) -> tuple[Any, Any]:
    """The server, which starts first and ends last, and the gateway before it."""
    [server], [gateway] = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert (server["name"], server["restartPolicy"], gateway["name"]) == ("server", "Always", "gateway")
    return server, gateway


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_runs_a_command_that_there_is(overlay: str) -> None:
    server, gateway = containers(rendered(overlay)["Deployment"]["spec"]["template"])
    for container, command, image in ((server, "serve", IMAGE), (gateway, "openai", GATEWAY_IMAGE)):
        assert container["args"][:2] == ["hf-triton", command]
        assert container["image"] == image
        options = [word.partition("=")[0] for word in container["args"] if word.startswith("--")]
        text = CliRunner().invoke(cli, [command, "--help"]).output
        assert [option for option in options if option not in text] == []
    assert "--no-openai" in server["args"]
    assert {port["name"]: port["containerPort"] for each in (server, gateway) for port in each["ports"]} == PORTS
    assert gateway["readinessProbe"]["httpGet"]["path"] in READY_PATHS
    assert gateway["livenessProbe"]["httpGet"]["path"] in LIVE_PATHS


def test_a_pod_has_no_rights_and_its_own_ports_are_closed() -> None:
    objects = rendered("cpu")
    spec = objects["Deployment"]["spec"]["template"]["spec"]
    server, container = containers({"spec": spec})
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    for each in (server, container):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    rules = objects["NetworkPolicy"]["spec"]["ingress"]
    assert [port["port"] for rule in rules if "from" not in rule for port in rule["ports"]] == ["openai"]
    assert "--api-key-file=/run/secrets/hf-triton/api-keys" in container["args"]
    sleep_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    [gateway_s] = [word.partition("=")[2] for word in container["args"] if "shutdown-timeout" in word]
    assert sleep_s + int(gateway_s) + 30 < spec["terminationGracePeriodSeconds"]
    assert spec["enableServiceLinks"] is False


def test_the_autoscalers_read_a_metric_that_there_is() -> None:
    [metric] = rendered("gpu")["HorizontalPodAutoscaler"]["spec"]["metrics"]
    components = DEPLOY / "kubernetes" / "components"
    texts = [(components / name).read_text() for name in ("hpa/prometheus-adapter.yaml", "keda/scaledobject.yaml")]
    assert metric["pods"]["metric"]["name"] in {each.name for each in METRICS}
    assert all(metric["pods"]["metric"]["name"] in text for text in texts)
    assert "replicas" not in rendered("gpu")["Deployment"]["spec"]


def test_the_service_beside_kserve_is_what_kubernetes_takes() -> None:
    [inference_service, service] = yaml.safe_load_all((DEPLOY / "kserve" / "service.yaml").read_text())
    kubernetes_validate.validate(service, KUBERNETES, strict=True)
    assert list(service["spec"]["selector"].values()) == [inference_service["metadata"]["name"]]


# --- Compose ---------------------------------------------------------------------------------------------------------


def test_compose_takes_its_files() -> None:
    files = [str(DEPLOY / name) for name in ("compose.yaml", "compose.gpu.yaml")]
    run(str(ROOT / ".venv" / "bin" / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files)
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).exists(), volume
    assert services["server"]["stop_grace_period"] == "40s"  # 30 s for Triton
    assert services["gateway"]["stop_grace_period"] == "70s"
    assert "--shutdown-timeout-s 60 " in services["gateway"]["command"]
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert [port.rpartition(":")[2] for port in published] == ["9000", "9090", "3000", "8080"]


@pytest.mark.full
def test_the_commands_of_compose_serve_behind_keys(tmp_path: Path) -> None:
    """The server is locked, and the gateway lists its models with the key that its file of headers has."""
    text = (DEPLOY / "compose.yaml").read_text()
    commands = {name: service.get("command") for name, service in yaml.safe_load(text)["services"].items()}
    secrets = re.findall(r"^#   (mkdir -pm 700 .*|\(umask .*)$", text, re.MULTILINE)
    run("bash", "-ec", "\n".join([f"cd {shlex.quote(str(tmp_path))}", *secrets]))
    files = tmp_path / "deploy" / "secrets"
    add_demo(tmp_path / "models")
    names = {"admin_key": "admin-key", "api_keys": "keys", "triton_headers": "triton-headers"}
    here = {f"/run/secrets/{secret}": str(files / name) for secret, name in names.items()}
    here |= {"model_repository": str(tmp_path / "models"), "0.0.0.0": "127.0.0.1"}
    served = [here.get(word, word) for word in commands["server"].split()]
    [port] = free_ports(1)
    with running(*served[2:], output=tmp_path / "server") as serving:
        serving.wait_for("Ctrl+C stops the server")
        here["server:8001"] = f"127.0.0.1:{serving.grpc_port}"
        words = [here.get(word, word) for word in commands["gateway"].split()]
        gateway = subprocess.Popen([COMMAND, *words[1:], "--port", str(port)])
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
                wait_until(lambda: is_answered(client, "/health/ready"))
                assert client.get("/v1/models").status_code == 401
                key = {"Authorization": f"Bearer {(files / 'keys').read_text().strip()}"}
                assert [model["id"] for model in client.get("/v1/models", headers=key).json()["data"]] == ["demo"]
                index = f"http://127.0.0.1:{serving.http_port}/v2/repository/index"
                assert client.post(index, json={}).status_code == 403
        finally:
            gateway.terminate()
            gateway.wait(60)


# --- what changes a server -------------------------------------------------------------------------------------------

CHANGES = (
    "/v2/repository/index",
    "/v2/repository/models/demo/load",
    "//v2/repository/models/demo/load",
    "/v2/models/demo/infer/../../../repository/index",
    "/v2/systemsharedmemory/region/a/register",
    "/v2/trace/setting",
    "/v2/models/demo/trace/setting",
    "/v2/logging",
    "/v2/models/demo/config",
)


def test_each_description_of_a_fleet_locks_what_changes_a_server() -> None:
    texts = {path.name: path.read_text() for path in DEPLOY.rglob("*") if path.is_file()}
    serving = [name for name, text in texts.items() if re.search(r"- serve$|hf-triton serve ", text, re.MULTILINE)]
    assert {"deployment.yaml", "compose.yaml", "runtime.yaml"} <= set(serving)
    assert [name for name in serving if "--admin-key-file" not in texts[name]] == []


def test_secrets_are_files() -> None:
    for path in DEPLOY.rglob("*.yaml"):
        text = path.read_text()
        assert "secretKeyRef" not in text, path
        assert not re.search(r"\bHF_TOKEN\b|_KEY: \$|PASSWORD", text), path


# --- Prometheus and Grafana ------------------------------------------------------------------------------------------


def test_promtool_takes_the_alerts() -> None:
    run(program("promtool"), "check", "rules", str(DEPLOY / "prometheus" / "alerts.yml"))


def test_prometheus_asks_the_ports_of_compose() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = [job["static_configs"][0]["targets"] for job in config["scrape_configs"]]
    assert targets == [[f"server:{METRICS_PORT}"], [f"gateway:{GATEWAY_PORT}"]]


def expressions() -> Iterator[str]:
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for _, row in DASHBOARD.panels():
        yield from (query for panel in row for query in panel.queries.values())


def test_queries_name_metrics_and_outcomes_that_there_are() -> None:
    own = {metric.name for metric in METRICS}
    gateway = {sample.name for metric in Metrics().registry.collect() for sample in metric.samples}
    gateway |= {f"{metric.name}{end}" for metric in Metrics().registry.collect() for end in ("", "_total", "_bucket")}
    known = own | gateway | {f"{name}_bucket" for name in own}
    for expression in expressions():
        names = set(re.findall(r"\bhf_triton_\w+", expression))
        assert names <= known, names - known
        for codes in re.findall(r'outcome=~"([^"]+)"', expression):
            assert set(codes.split("|")) <= CODES.keys()


def test_the_dashboard_is_made_of_the_declarations() -> None:
    path: Path = DASHBOARD.PATH
    assert path.read_text(encoding="utf-8") == DASHBOARD.text(), "run make docs"
    board = json.loads(path.read_text(encoding="utf-8"))
    shown = " ".join(target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
    absent = {"hf_triton_kv_cache_tokens", "hf_triton_kv_cache_max_tokens"}  # their ratio is shown
    assert {metric.name for metric in METRICS if metric.name not in shown} == absent
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_grafana_knows_every_field() -> None:
    register_default_plugins()
    board = json.loads(DASHBOARD.PATH.read_text(encoding="utf-8"))
    known = Dashboard.from_json(board)  # type: ignore[no-untyped-call]
    assert lost(board, json.loads(json.dumps(known, cls=JSONEncoder)), "dashboard") == []


def lost(given: Any, kept: Any, place: str) -> list[str]:
    """The places of what is not in a copy, which may hold more."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [each for name in given for each in lost(given[name], kept.get(name), f"{place}.{name}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [each for number, item in enumerate(given) for each in lost(item, kept[number], f"{place}[{number}]")]
    return [] if given == kept else [place]


# --- HAProxy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["haproxy.cfg", "canary.cfg"])
def test_haproxy_takes_its_files(name: str) -> None:
    run(program("haproxy"), "-c", "-q", "-f", str(DEPLOY / "haproxy" / name))


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_haproxy_speaks_tls_on_both_sides(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    made = ca.issue("fleet")
    (tmp_path / "keys").write_text("sk-of-a-client\n")
    (tmp_path / "both.pem").write_text(made.file.read_text() + made.key.read_text())
    changes = {"  #bind": "  bind", "  #default-server": "  default-server", "/certs/fleet.pem": f"{tmp_path}/both.pem"}
    changes |= {"/certs/ca.pem": str(ca.file), "option httpchk GET /v2": "#option httpchk GET /v2"}
    changes |= {"option httpchk GET /health/ready": "option httpchk GET /health/live"}  # there is no Triton
    config = GatewayConfig(
        triton="127.0.0.1:1", port=0, api_key_file=tmp_path / "keys", ssl_certfile=made.file, ssl_keyfile=made.key
    )
    key = {"Authorization": "Bearer sk-of-a-client"}
    with (
        GatewayThread(config) as gateway,
        haproxy("haproxy.cfg", tmp_path, dict.fromkeys((9000, 9001, 9002), gateway.port), changes) as ports,
        httpx.Client(verify=ca.client(), trust_env=False) as client,
    ):
        url = f"https://127.0.0.1:{ports[8443]}"
        wait_until(lambda: is_answered(client, f"{url}/health/live"))
        assert client.get(f"{url}/version", headers=key).status_code == 200
        assert client.get(f"{url}/version").status_code == 401
        assert client.get(f"{url}/version", headers=[*key.items(), ("Authorization", "Bearer x")]).status_code == 401
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/version", trust_env=False)
        old = ca.client()
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError, match="PROTOCOL_VERSION"):
            httpx.get(f"{url}/version", verify=old, trust_env=False)
        for path in CHANGES:
            for port in (8081, 8444):
                refused = client.post(f"http{'s' * (port > 8443)}://127.0.0.1:{ports[port]}{path}", json={})
                assert refused.status_code == 403, path


def test_half_sent_requests_without_a_key_take_no_servers_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones wait in HAProxy; others are answered, and end when nothing comes any more."""
    monkeypatch.setattr("hf_triton_gateway.uvicorn_server.LINGER_S", 0.5)
    (tmp_path / "keys").write_text("sk-of-a-client\n")
    changes = {"maxconn 64": "maxconn 1", "timeout client 30s": "timeout client 1s"}
    changes |= {"option httpchk GET /health/ready": "option httpchk GET /health/live"}  # there is no Triton
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
    config = GatewayConfig(triton="127.0.0.1:1", port=0, api_key_file=tmp_path / "keys")
    with (
        GatewayThread(config) as gateway,
        haproxy("haproxy.cfg", tmp_path, dict.fromkeys((9000, 9001, 9002), gateway.port), changes) as ports,
        contextlib.ExitStack() as stack,
    ):
        for body in [b"{", b" " * 20_000] * 4:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", ports[8080])))
            client.sendall(head + body)
        url, key = f"http://127.0.0.1:{ports[8080]}/version", {"Authorization": "Bearer sk-of-a-client"}
        assert httpx.get(url, headers=key, timeout=90).status_code == 200


def is_answered(client: httpx.Client, url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get(url).status_code == 200
    return False
