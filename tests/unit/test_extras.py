# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml declares what is imported, and the message of a missing package names the extra that brings it."""

import ast
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_triton.errors import HfTritonError
from hf_triton.extras import MODULES, MissingExtraError
from hf_triton.hub.gguf_header import check_gguf
from hf_triton.hub.graph_facts import check_graph
from hf_triton.hub.load_failures import QUANTIZED_PACKAGES, explain_load
from hf_triton.hub.pretrained import load_image_processor
from hf_triton.protocol.otlp import build_tracing
from hf_triton.runner import graph_model
from hf_triton.runner.cpu.availability import runs_numba
from hf_triton.runner.lora.adapter_files import _check_method
from hf_triton.server import find_tritonserver
from hf_triton.settings import ModelSettings
from hf_triton.tasks.audio import import_soundfile
from hf_triton_cli.command import NEEDS, check_command, main
from hf_triton_cli.commands import MODULES as COMMAND_MODULES
from hf_triton_cli.commands import SECTIONS
from hf_triton_cli.tables import new_figure
from tests.support.paths import PACKAGES, ROOT, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLAIN, EXTRAS = PROJECT["dependencies"], PROJECT["optional-dependencies"]
OPTIONAL = {
    "compressed-tensors": "quantized",
    "gguf": "gguf",
    "kernels": "kernels",
    "matplotlib": "bench",
    "onnx-ir": "optimize",
    "onnxruntime": "onnx",
    "openvino": "openvino",
}
"""What serving does without, and the extra that brings each."""
NOT_OURS = {"triton", "triton_python_backend_utils", "c_python_backend_utils"}
"""PyTorch for a GPU brings the first, Triton the second."""
NAMED = re.compile(r"`?pip install 'hf-triton\[([\w-]+)\]'")


def required(extra: str) -> set[str]:
    """The requirements of an extra, those of its own extras included."""
    texts = set()
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        texts |= set().union(*map(required, requirement.extras)) if requirement.name == PROJECT["name"] else {text}
    return texts


def declared(extra: str) -> set[str]:
    """The packages that an extra installs, as pyproject.toml names them."""
    return {canonicalize_name(Requirement(text).name) for text in required(extra)}


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


DISTRIBUTIONS = packages_distributions()
INSTALLED = {canonicalize_name(name) for names in DISTRIBUTIONS.values() for name in names}


def imported_modules() -> set[str]:
    modules = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(str(node.module).partition(".")[0])
    return modules - sys.stdlib_module_names - {*PACKAGES} - NOT_OURS


def test_serving_finds_every_import_among_its_dependencies() -> None:
    present = installed_with(*PLAIN, *required("server"))
    providers = {name: set(map(canonicalize_name, DISTRIBUTIONS.get(name, [name]))) for name in imported_modules()}
    missing = set().union(*(packages for packages in providers.values() if not packages & present))
    assert missing == set(OPTIONAL)
    for package, extra in OPTIONAL.items():
        assert package in installed_with(*declared(extra))


# --- products -------------------------------------------------------------------------------------------------------

SHARED = {"opentelemetry"}
"""What the extra `tracing` adds to a model's process and to a gateway."""
COMMAND_LINE = {"matplotlib", "rich"}
"""What tables of other commands import when they are printed."""
MODEL = ("hf_triton.model", "hf_triton.stream_door", "hf_triton.tasks", "hf_triton.triton_backend")
CLIENTS = [name for name, extras in NEEDS.items() if extras == ("cli",)]


@pytest.fixture(scope="module")
def graph_of_imports() -> grimp.ImportGraph:
    return grimp.build_graph(
        *PACKAGES, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )


def undeclared(graph: grimp.ImportGraph, roots: Iterable[str], extras: Iterable[str]) -> set[str]:
    """The packages that modules, and what they import in turn, import without one of the extras."""
    modules: set[str] = set()
    for root in roots:
        for module in {root, *(graph.find_descendants(root) if root not in COMMANDS else ())}:
            modules |= graph.find_upstream_modules(module)
    foreign = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {*PACKAGES} - NOT_OURS
    present = installed_with(*PLAIN, *set().union(*map(required, extras)))
    return {name for name in foreign if not {*map(canonicalize_name, DISTRIBUTIONS.get(name, [name]))} & present}


def module_of(command: str) -> str:
    return f"hf_triton_cli.{COMMAND_MODULES.get(command, f'{command}:').partition(':')[0]}"


COMMANDS = {"hf_triton_cli", *map(module_of, NEEDS)}


def test_errors_settings_and_protocol_need_no_extra(graph_of_imports: grimp.ImportGraph) -> None:
    base = ("hf_triton.errors", "hf_triton.extras", "hf_triton.protocol", "hf_triton.server", "hf_triton.settings")
    assert undeclared(graph_of_imports, base, ()) <= SHARED
    assert installed_with(*PLAIN).isdisjoint({"click", "fastapi", "torch", "tritonclient", "transformers"})


def test_the_gateway_needs_its_extra_alone(graph_of_imports: grimp.ImportGraph) -> None:
    roots = ("hf_triton_gateway", "hf_triton_cli", "hf_triton_cli.serving.openai")
    assert undeclared(graph_of_imports, roots, ["gateway"]) <= SHARED | COMMAND_LINE
    assert installed_with(*PLAIN, *required("gateway")).isdisjoint(declared("model") - {"protobuf", "numpy"})


def test_a_models_process_needs_its_extra_alone(graph_of_imports: grimp.ImportGraph) -> None:
    optional = {
        "PIL",
        "compressed_tensors",
        "llvmlite",
        "numba",
        "peft",
        "soundfile",
        "gguf",
        "kernels",
        "onnx_ir",
        "onnxruntime",
        "openvino",
    }
    assert undeclared(graph_of_imports, MODEL, ["model"]) <= SHARED | optional
    assert declared("model").isdisjoint(declared("cli"))


@pytest.mark.parametrize("command", CLIENTS)
def test_a_client_needs_the_command_line_alone(command: str, graph_of_imports: grimp.ImportGraph) -> None:
    assert undeclared(graph_of_imports, [module_of(command)], ["cli"]) <= SHARED | {"matplotlib", "gguf"}


def test_each_command_says_what_it_needs() -> None:
    assert {*NEEDS} == {name for section in SECTIONS.values() for name in section}


@pytest.mark.full
def test_extras_of_models_have_the_model_and_the_server_has_all() -> None:
    of_models = {*EXTRAS} - {"model", "gateway", "cli", "tracing", "ray", "bench"}
    assert [extra for extra in of_models if not declared(extra) >= declared("model")] == []
    assert declared("server") >= declared("model") | declared("gateway") | declared("cli")
    for extra in MODULES:
        brought = {module: DISTRIBUTIONS[module] for module in MODULES[extra]}
        assert {canonicalize_name(names[0]) for names in brought.values()} - {"grpcio"} == declared(extra) - {
            "protobuf"
        }


@pytest.mark.parametrize(
    ("present", "arguments", "extra"),
    [
        ((), [], "cli"),
        ((), ["--help"], "cli"),
        ((), ["openai"], "gateway"),
        ((), ["list"], "cli"),
        ((), ["serve"], "server"),
        ((), ["check", "folder"], "model,cli"),
        (("model",), ["openai", "--triton", "localhost:8001"], "gateway"),
        (("model",), ["check", "folder"], "cli"),
        (("gateway",), ["serve"], "server"),
        (("gateway",), ["list"], "cli"),
        (("gateway",), ["check", "folder"], "model,cli"),
        (("cli",), ["check", "folder"], "model"),
    ],
)
def test_a_command_names_the_extra_that_it_lacks(
    present: tuple[str, ...], arguments: list[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {name for name in present for name in MODULES[name]}
    monkeypatch.setattr("hf_triton.extras._is_installed", there.__contains__)
    monkeypatch.setattr("sys.argv", ["hf-triton", *arguments])
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(SystemExit) as error:
        main()
    message = str(error.value.code)
    assert message.startswith("error: client_missing: `hf-triton")
    assert re.findall(r"`pip install 'hf-triton\[([\w,]+)\]'`", message) == [extra]
    assert "\n" not in message


def test_the_image_of_a_triton_needs_no_other_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tritonserver").write_text("#!/bin/sh")
    (tmp_path / "tritonserver").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hf_triton.extras._is_installed", lambda name: False)
    with pytest.raises(MissingExtraError, match=r"hf-triton\[model,cli\]"):
        check_command("serve")


def test_every_named_extra_exists() -> None:
    paths = [*sources(), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {name for path in paths for name in re.findall(r"hf-triton\[([\w,-]+)\]", path.read_text())}
    assert {part for name in named for part in name.split(",")} <= set(EXTRAS)
    assert {"audio", "cpu", "lora", "optimize", "quantized", "server", "tracing"} <= named


def test_no_message_sends_to_make() -> None:
    for path in sources():
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
    monkeypatch.setattr(graph_model, "runtime_version", lambda runtime: None)
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
