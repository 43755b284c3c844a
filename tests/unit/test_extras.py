# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml declares what is imported, and the message of a missing package names the extra that brings it."""

import ast
import os
import re
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_triton.cli.tables import new_figure
from hf_triton.errors import HfTritonError
from hf_triton.hub.gguf_header import check_gguf
from hf_triton.hub.graph import check_graph
from hf_triton.hub.load_failures import QUANTIZED_PACKAGES, explain_load
from hf_triton.hub.pretrained import load_image_processor
from hf_triton.protocol.tracing import build_tracing
from hf_triton.runner import graph
from hf_triton.runner.adapter_files import _check_method
from hf_triton.runner.cpu.availability import runs_numba
from hf_triton.server import find_tritonserver
from hf_triton.settings import ModelSettings
from hf_triton.tasks.audio import import_soundfile
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLAIN, EXTRAS = PROJECT["dependencies"], PROJECT["optional-dependencies"]
OPTIONAL = {"gguf": "gguf", "matplotlib": "bench", "onnx-ir": "optimize", "onnxruntime": "onnx", "openvino": "openvino"}
"""What serving does without, and the extra that brings each."""
NOT_OURS = {"triton", "triton_python_backend_utils", "c_python_backend_utils"}
"""PyTorch for a GPU brings the first, Triton the second."""
NAMED = re.compile(r"`?pip install 'hf-triton\[([\w-]+)\]'")


def declared(extra: str) -> set[str]:
    """The packages that an extra installs, as pyproject.toml names them, its own extras included."""
    names = set()
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        is_own = requirement.name == PROJECT["name"]
        names |= set().union(*map(declared, requirement.extras)) if is_own else {canonicalize_name(requirement.name)}
    return names


def installed_with(*texts: str) -> set[str]:
    """The packages of requirements, and of what is required by them in turn."""
    names: set[str] = set()
    waiting = [Requirement(text) for text in texts]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = f"{name}{sorted(requirement.extras)}"
        if key in names:
            continue
        names |= {name, key}
        for text in (requires(name) if name in INSTALLED else None) or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                waiting.append(needed)
    return names


INSTALLED = {canonicalize_name(name) for names in packages_distributions().values() for name in names}


def imported_modules() -> set[str]:
    modules = set()
    for path in (ROOT / "hf_triton").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(str(node.module).partition(".")[0])
    return modules - sys.stdlib_module_names - {"hf_triton"} - NOT_OURS


def test_serving_finds_every_import_among_its_dependencies() -> None:
    present = installed_with(*PLAIN, *declared("server"))
    distributions = packages_distributions()
    providers = {name: set(map(canonicalize_name, distributions.get(name, [name]))) for name in imported_modules()}
    missing = set().union(*(packages for packages in providers.values() if not packages & present))
    assert missing == set(OPTIONAL)
    for package, extra in OPTIONAL.items():
        assert package in installed_with(*declared(extra))


def test_clients_and_the_gateway_need_no_extra() -> None:
    present = installed_with(*PLAIN)
    assert {"fastapi", "grpcio", "prometheus-client", "tritonclient", "uvicorn"} <= present


def test_every_named_extra_exists() -> None:
    paths = [*(ROOT / "hf_triton").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {name for path in paths for name in re.findall(r"hf-triton\[([\w,-]+)\]", path.read_text())}
    assert {part for name in named for part in name.split(",")} <= set(EXTRAS)
    assert {"audio", "cpu", "lora", "optimize", "quantized", "server", "tracing"} <= named


def test_no_message_sends_to_make() -> None:
    for path in (ROOT / "hf_triton").rglob("*.py"):
        strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert not [text for text in strings if isinstance(text, str) and re.search(r"run `make", text)], path


def start_server(folder: Path) -> None:
    find_tritonserver(folder)


def read_adapter(_: Path) -> None:
    _check_method({"peft_type": "LORA"})


def read_gguf(folder: Path) -> None:
    check_gguf(folder / "model.gguf", "acme/thing")


def read_images(folder: Path) -> None:
    load_image_processor(folder, ModelSettings(huggingface_model="acme/thing"))


def load_graph(runtime: str) -> Callable[[Path], None]:
    return lambda folder: check_graph(folder, SimpleNamespace(runtime=runtime, precision="float32"))


def trace(_: Path) -> None:
    build_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"}, "x")


def compile_kernels(_: Path) -> None:
    runs_numba.cache_clear()
    runs_numba()


def read_sound(_: Path) -> None:
    import_soundfile()


def plot(_: Path) -> None:
    new_figure()


@pytest.mark.parametrize(
    ("package", "module", "use"),
    [
        ("nvidia-pytriton", "pytriton", start_server),
        ("peft", "peft", read_adapter),
        ("gguf", "gguf", read_gguf),
        ("soundfile", "soundfile", read_sound),
        ("pillow", "PIL", read_images),
        ("numba", "hf_triton.runner.cpu.llvm", compile_kernels),
        ("opentelemetry-sdk", "opentelemetry.sdk.trace", trace),
        ("matplotlib", "matplotlib.figure", plot),
        ("onnxruntime", "onnxruntime", load_graph("onnx")),
        ("openvino", "openvino", load_graph("openvino")),
    ],
)
def test_the_message_of_a_missing_package_names_its_extra(
    package: str,
    module: str,
    use: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(graph, "runtime_version", lambda runtime: None)
    monkeypatch.setenv("PATH", os.devnull)
    message = ""
    try:
        use(tmp_path)
    except HfTritonError as error:
        message = str(error)
    [extra] = NAMED.findall(message + caplog.text + capsys.readouterr().err)
    assert package in declared(extra)
    runs_numba.cache_clear()


@pytest.mark.parametrize("package", QUANTIZED_PACKAGES)
def test_a_quantised_checkpoint_names_its_extra(package: str) -> None:
    error: Any = ImportError(f"This checkpoint requires it: `pip install {package}`")
    sentence = explain_load(error, "the weights", "acme/thing", has_quantization_setting=False).sentence
    assert NAMED.findall(sentence) == ["quantized"]
    assert canonicalize_name(package) in declared("quantized")
