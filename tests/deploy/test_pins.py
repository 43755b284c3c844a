# SPDX-License-Identifier: Apache-2.0
"""The image's packages: each pinned by a hash, in the versions that were tested together."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

FILES = ("requirements-torch.txt", "requirements-image.txt")
PIN = re.compile(r"^(\S+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def pins(*names: str) -> dict[str, str]:
    text = "".join((ROOT / name).read_text() for name in names)
    assert PIN.sub("", text).strip() == "", "a line that is no pin"
    return {canonicalize_name(name): version for name, version, _ in PIN.findall(text)}


@pytest.fixture(scope="module")
def extras() -> dict[str, list[Requirement]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(text) for text in texts] for name, texts in groups.items()}


def test_what_the_image_installs_is_pinned_as_tested(extras: dict[str, list[Requirement]]) -> None:
    pinned = pins(*FILES)
    tested = dict(re.findall(r"^([^#\s]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    own = {canonicalize_name(name): version for name, version in tested.items()}
    assert {name: version for name, version in pinned.items() if own.get(name, version) != version} == {}, "make lock"
    gateway = pins("requirements-gateway.txt")
    assert {name: version for name, version in gateway.items() if pinned[name] != version} == {}, "make lock"
    assert gateway.keys().isdisjoint({"torch", "transformers", "huggingface-hub", "rich"})
    for requirement in (*extras[""], *extras["gateway"], *extras["tracing"]):
        assert gateway[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    [listed] = re.findall(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    needed = [requirement for name in ("", *listed.split()) for requirement in extras[name]]
    named = {"audio", "cli", "cpu", "cuda", "gateway", "gguf", "image", "lora", "model", "quantized", "tracing"}
    assert named <= set(listed.split())
    for requirement in needed:
        if requirement.name != "hf-triton":
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_each_package_is_in_one_file() -> None:
    assert pins(FILES[0]).keys().isdisjoint(pins(FILES[1]))
    assert {"torch", "triton", "nvidia-cublas"} <= pins(FILES[0]).keys()


def test_the_image_installs_nothing_else() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert all(f"--requirement {name}" in text for name in FILES)
    installs = re.findall(r"pip install --no-cache-dir (.*)", text.replace("\\\n", " "))
    [torch] = re.findall(r'^ARG TORCH="(.*)"', text, re.MULTILINE)
    hashed = "--no-deps --require-hashes --only-binary=:all: --requirement"
    assert torch.startswith(hashed)
    own = ("${TORCH}", hashed, "--no-deps --no-build-isolation .")
    others = [words for words in installs if not words.startswith(own)]
    asked = [re.findall(r"\$\{TRANSFORMERS\}|\.\[kernels\]", words) for words in others]
    assert asked == [["${TRANSFORMERS}"], [".[kernels]"]], "which nobody asks for by default"


def test_the_gateways_image_installs_nothing_else() -> None:
    text = (ROOT / "deploy" / "gateway" / "Dockerfile").read_text()
    assert re.findall(r"pip install --no-cache-dir (.*)", text) == [
        "--no-deps --require-hashes --only-binary=:all: --requirement requirements-gateway.txt",
        "--no-deps --no-build-isolation . && rm -rf /tmp/hf_triton",
    ]


def test_the_image_has_what_kernels_of_a_gpu_need() -> None:
    text = (ROOT / "Dockerfile").read_text()
    [packages] = re.findall(r"apt-get install -y --no-install-recommends (.*) \\$", text, re.MULTILINE)
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(packages.split()), "a launcher is compiled at first use"
    assert "TRITON_CACHE_DIR=${HOME}/.cache/triton PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text
