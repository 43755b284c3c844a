# SPDX-License-Identifier: Apache-2.0
"""`hf-triton bundle` writes one file from which models are served where no network is."""

import ensurepip
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hf_triton.folders import bundle
from hf_triton.folders.folders import parse_config
from hf_triton.folders.sources import model_repository
from hf_triton.server import free_ports
from hf_triton.testing import LoopbackHub, build_tiny_checkpoint
from hf_triton_cli.progress import show_download
from tests.support.adapters import save_adapter
from tests.support.commands import hf_triton

pytestmark = pytest.mark.full

QWEN, TOKENIZER, GGUF, LORA = "acme/qwen", "acme/words", "acme/tiny-gguf", "acme/lora"
WITHOUT_NETWORK = ["unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
OWN_CODE = "import hf_triton\n\n\nclass TritonPythonModel(hf_triton.TritonPythonModel):\n    name = 'own'\n"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle of the demo model, a name and a folder with all that a folder may name, unpacked; and the checkpoint."""
    root = tmp_path_factory.mktemp("bundle")
    checkpoint = build_tiny_checkpoint(root / "qwen", "qwen3")
    gguf = root / "gguf"
    gguf.mkdir()
    for quant in ("Q4_K_M", "Q8_0"):
        (gguf / f"Tiny-{quant}.gguf").write_text(quant)
    folder = root / "mine"
    (folder / "1" / "__pycache__").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(OWN_CODE)
    (folder / "1" / "__pycache__" / "old.pyc").write_text("")
    named = {"huggingface_model": QWEN, "revision": "main", "tokenizer": TOKENIZER, "cache_dir": str(root / "cache")}
    named["adapters"] = json.dumps({"tone": LORA})
    values = {key: json.dumps(value) for key, value in named.items()}
    lines = [f'parameters {{ key: "{key}" value {{ string_value: {value} }} }}' for key, value in values.items()]
    (folder / "config.pbtxt").write_text("\n".join(['backend: "python"', *lines]))
    with LoopbackHub() as hub:
        for name, source in ((QWEN, checkpoint), (TOKENIZER, checkpoint), (GGUF, gguf)):
            hub.add(name, source)
        hub.add(LORA, save_adapter(checkpoint, root / "lora"))
        environment = hub.environment() | {"HF_HOME": str(root / "home")}
        done = hf_triton(
            "bundle", "demo", f"{GGUF}:Q8_0", str(folder), "-o", str(root / "all.tar"), "--no-wheels", **environment
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Wrote {root / 'all.tar'} (")
    shutil.unpack_archive(root / "all.tar", root / "there", filter="data")
    return root / "there" / "all", checkpoint


def test_a_bundle_has_what_its_folders_name(written: tuple[Path, Path]) -> None:
    unpacked, checkpoint = written
    models = unpacked / "models"
    assert sorted(path.name for path in models.iterdir()) == ["demo", "mine", "tiny-gguf-q8_0"]
    sums = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=unpacked, capture_output=True, text=True, check=True
    )
    files = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert {line.rpartition(":")[0] for line in sums.stdout.splitlines()} == files - {"SHA256SUMS"}
    for place in ("checkpoint", "tokenizer"):
        assert (models / "mine" / place / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    settings = {key: value["string_value"] for key, value in parse_config(models / "mine")["parameters"].items()}
    assert settings == {
        "huggingface_model": "./checkpoint",
        "tokenizer": "./tokenizer",
        "adapters": '{"tone": "./lora/tone"}',
    }
    assert (models / "mine" / "1" / "model.py").read_text() == OWN_CODE
    assert [path.name for path in models.rglob("*.gguf")] == ["Tiny-Q8_0.gguf"]
    assert not list(models.rglob("__pycache__"))


@pytest.mark.skipif(subprocess.run([*WITHOUT_NETWORK, "true"], check=False).returncode != 0, reason="needs unshare")
def test_a_bundle_is_served_without_network(written: tuple[Path, Path], tmp_path: Path) -> None:
    ports = dict(zip(("http", "grpc", "metrics", "openai"), map(str, free_ports(4)), strict=True))
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    serve = [
        sys.executable,
        "-m",
        "hf_triton_cli",
        "serve",
        str(written[0] / "models" / "demo"),
        str(written[0] / "models" / "mine"),
    ]
    serve += [f"--{name}-port={port}" for name, port in ports.items()]
    command = [*WITHOUT_NETWORK, sys.executable, str(script), ports["http"], *serve]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "How can you be" in done.stdout


ASK = """
import subprocess, sys, time, urllib.request

port, *serve = sys.argv[1:]
server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
for line in server.stdout:
    if "Ctrl+C stops the server" in line:
        break
for model in ("demo", "mine"):
    body = b'{"text_input": "How can you be", "max_tokens": 4}'
    answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{model}/generate", body)
    print(answer.read().decode())
server.terminate()
server.wait()
"""


@pytest.fixture
def installable(tmp_path: Path) -> Path:
    """An unpacked bundle with packages, in place of which stand two small ones."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    [pip] = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    shutil.copy(pip, wheels)
    with zipfile.ZipFile(wheels / "small-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small.py", "VALUE = 1\n")
        wheel.writestr("small-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1\n")
        wheel.writestr("small-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("small-1.dist-info/RECORD", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "build_wheels", lambda folder, extras: shutil.copytree(wheels, folder))
        with model_repository(["demo"], {}, stream=False, progress=show_download) as repository:
            bundle.write_bundle(repository, tmp_path / "small.tar", ["server"], show_download)
    shutil.unpack_archive(tmp_path / "small.tar", tmp_path, filter="tar")
    return tmp_path / "small"


def install(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    is_cut = subprocess.run([*WITHOUT_NETWORK, "true"], check=False).returncode == 0
    command = [*(WITHOUT_NETWORK if is_cut else []), str(folder / "install.sh")]
    pairs = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(command, env=pairs, capture_output=True, text=True, check=False)


def test_install_sh_installs_the_packages_and_says_how_to_serve(installable: Path) -> None:
    done = install(installable)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Serve the models: {installable}/.venv/bin/hf-triton serve {installable}/models\n"
    assert subprocess.run([installable / ".venv/bin/python", "-c", "import small; assert small.VALUE"], check=True)


def test_install_sh_refuses_a_damaged_bundle_and_another_python(installable: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    refused = install(installable, PYTHON=str(other))
    assert refused.returncode == 1
    assert "is needed, as its packages are for it: PYTHON=/path/to/python3" in refused.stderr
    with (installable / "models" / "demo" / "config.pbtxt").open("a") as file:
        file.write(" ")
    damaged = install(installable)
    assert damaged.returncode == 1
    assert "the bundle is damaged: copy it again" in damaged.stderr
    assert not (installable / ".venv").exists()


def test_wrong_use_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "x.tar"
    assert hf_triton("bundle", "demo", "-o", str(target), "--no-wheels", "--extra=gguf").returncode == 2
    broken = tmp_path / "broken"
    (broken / "1").mkdir(parents=True)
    (broken / "1" / "model.py").write_text(OWN_CODE)
    (broken / "config.pbtxt").write_text(
        'backend: "python" parameters { key: "huggingface_modle" value { string_value: "x" } }'
    )
    done = hf_triton("bundle", str(broken), "-o", str(target), "--no-wheels")
    assert done.returncode == 2
    assert done.stderr.startswith("error: invalid_setting: broken: ")
    assert not list(tmp_path.glob("x.tar*"))
    target.write_text("")
    done = hf_triton("bundle", "demo", "-o", str(target), "--no-wheels")
    assert done.returncode == 2
    assert "exists: choose another name, or remove it" in done.stderr
