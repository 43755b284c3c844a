# SPDX-License-Identifier: Apache-2.0
"""Build a small stand-in for NVIDIA's Triton image, on which tests build and run the real Dockerfile.

NVIDIA's image has 20 GB and is in a registry that a test machine may not reach. The stand-in is Debian with the
tritonserver of the nvidia-pytriton wheel, arranged as in NVIDIA's image: /opt/tritonserver on PATH, the user
triton-server with id 1000 and no home, an entrypoint that executes its arguments, a Python that pip may change.

That Python is a copy of the 3.12 that PYTHON312 in the environment names, as NVIDIA's is, with its libpython beside it.
It is Debian's 3.11 where PYTHON312 is empty, or where pip's settings offer torch for 3.12 as a CUDA build of 6 GB
alone; PyTorch's CPU index in PIP_EXTRA_INDEX_URL offers the other.

It also has the host's pip settings with their constraints and, if they name a folder of wheels, the torch wheel in
that folder, which is the CPU build on a host without a GPU.

    python tests/container/stand_in_base.py     prints {"engine": ..., "environment": ..., "image": ...}

Exits with 3 if no container engine responds.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUITE = "bookworm"
PACKAGES = ["ca-certificates", "curl", "libpython3.11", "python3", "python3-pip"]
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
WHEELS = "/opt/wheels"
CONSTRAINTS = "/etc/pip_constraints.txt"
NO_ENGINE = 3


def offers_cpu_torch(python: str) -> bool:
    """Whether pip's settings offer the pinned torch for this version of Python as the build for processors."""
    options = ["--only-binary=:all:", "--python-version", python]
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", *options]
    offered = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    pinned = importlib.metadata.version("torch").partition("+")[0]
    return f"{pinned}+cpu" in offered.partition("INSTALLED")[0]


PYTHON312 = os.environ.get("PYTHON312", "") if offers_cpu_torch("3.12") else ""
PYTHON = "3.12" if PYTHON312 else "3.11"

ENTRYPOINT = """\
#!/bin/bash
echo "== Stand-in for NVIDIA's Triton image =="
exec "${@:-/bin/bash}"
"""

DOCKERFILE = f"""\
FROM scratch
ADD root.tar /
ENV PATH=/opt/tritonserver/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY nvidia_pytriton.libs /nvidia_pytriton.libs
COPY tritonserver /opt/tritonserver
COPY python /usr/local
COPY wheels {WHEELS}
COPY entrypoint.sh /opt/nvidia/nvidia_entrypoint.sh
COPY pip.conf /etc/pip.conf
COPY constraints.txt {CONSTRAINTS}
COPY certificates.crt {CERTIFICATES}
RUN useradd --uid 1000 --no-create-home triton-server
RUN ldconfig && if command -v python3.12; then python3.12 -m ensurepip --default-pip; fi
ENV PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /opt/tritonserver
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh"]
"""


def find_engine() -> tuple[str, dict[str, str]]:
    """Find a container engine that responds, and the environment variables that it needs.

    CONTAINER_ENGINE names one. By default root prefers podman, which needs no daemon, and other users docker, whose
    containers may use all user ids.
    """
    is_root = os.geteuid() == 0
    # HEALTHCHECK exists in Docker's image format alone.
    environments: dict[str, dict[str, str]] = {"podman": {"BUILDAH_FORMAT": "docker"}, "docker": {}}
    if is_root:
        environments["podman"]["CONTAINERS_CONF"] = str(HERE / "containers.conf")
    chosen = os.environ.get("CONTAINER_ENGINE")
    for engine in [chosen] if chosen else sorted(environments, reverse=is_root):
        if shutil.which(engine) and _succeeds([engine, "info"], environments.get(engine, {})):
            return engine, environments[engine]
    sys.exit(_no_engine())


def _no_engine() -> int:
    print("neither podman nor docker responds; tests/container/setup.sh installs podman on Debian", file=sys.stderr)
    return NO_ENGINE


def _succeeds(command: list[str], environment: Mapping[str, str]) -> bool:
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, check=False)
    return result.returncode == 0


def pip_settings() -> dict[str, str]:
    """pip's settings on the host: configuration files, overridden by the environment."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    pairs = (line.partition("=")[::2] for line in lines)
    settings = {name: value.strip("'\"") for name, value in pairs}
    from_files = {name.removeprefix("global."): value for name, value in settings.items() if name.startswith("global.")}
    from_environment = {name.removeprefix(":env:."): value for name, value in settings.items() if ":env:" in name}
    return from_files | from_environment


def torch_wheels(settings: Mapping[str, str]) -> list[Path]:
    """The torch wheels in the folders of pip's find-links."""
    folders = [Path(word.removeprefix("file://")) for word in settings.get("find-links", "").split()]
    tag = PYTHON.replace(".", "")
    return sorted(wheel for folder in folders for wheel in folder.glob(f"torch-*cp{tag}-*.whl"))


def constraints(settings: Mapping[str, str]) -> str:
    """The concatenated constraints files of pip's settings; one at a URL is included by reference."""
    words = settings.get("constraint", "").split()
    return "\n".join(f"-c {word}" if "://" in word else Path(word).read_text() for word in words)


def settings_inside(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings for the image, in which the host's files do not exist."""
    elsewhere = ("find-links", "cert", "cache-dir", "constraint")
    inside = {name: value for name, value in settings.items() if name not in elsewhere}
    for name in ("index-url", "extra-index-url"):
        inside[name] = " ".join(word for word in inside.get(name, "").split() if not word.startswith("file:"))
    given = {name: value for name, value in inside.items() if value}
    return given | {"cert": CERTIFICATES, "find-links": WHEELS, "constraint": CONSTRAINTS}


def certificates(settings: Mapping[str, str]) -> Path:
    """The certificates that the host trusts, including a proxy's."""
    return Path(settings.get("cert") or os.environ.get("SSL_CERT_FILE") or CERTIFICATES)


def image_tag(settings: Mapping[str, str]) -> str:
    """A name that changes with the image's inputs."""
    parts = [
        Path(__file__).read_bytes(),
        importlib.metadata.version("nvidia-pytriton").encode(),
        PYTHON312.encode(),
        json.dumps(settings, sort_keys=True).encode(),
        constraints(settings).encode(),
        *(wheel.name.encode() for wheel in torch_wheels(settings)),
        certificates(settings).read_bytes(),
    ]
    return "hf-triton-stand-in:" + hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def lay_out_context(context: Path, settings: Mapping[str, str]) -> None:
    """Write the build context of the image."""
    _make_debian(context / "root.tar")
    _copy_tritonserver(context)
    _copy_python(context / "python")
    (context / "wheels").mkdir()
    for wheel in torch_wheels(settings):
        shutil.copy(wheel, context / "wheels")
    configuration = configparser.RawConfigParser()
    configuration["global"] = settings_inside(settings)
    with (context / "pip.conf").open("w") as file:
        configuration.write(file)
    (context / "constraints.txt").write_text(constraints(settings))
    shutil.copy(certificates(settings), context / "certificates.crt")
    (context / "entrypoint.sh").write_text(ENTRYPOINT)
    (context / "entrypoint.sh").chmod(0o755)
    (context / "Dockerfile").write_text(DOCKERFILE)


def _make_debian(archive: Path) -> None:
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(archive)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def _copy_python(target: Path) -> None:
    """The Python of PYTHON312 without its packages; an empty folder if there is none."""
    target.mkdir()
    if not PYTHON312:
        return
    command = [PYTHON312, "-c", "import sys; print(sys.base_prefix)"]
    source = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    files = [*source.glob(f"lib/libpython{PYTHON}.so*"), *source.glob("bin/python3*")]
    for file in files:
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(file, copy, follow_symlinks=False)
    ignored = shutil.ignore_patterns("site-packages", "test", "__pycache__", "config-*")
    shutil.copytree(source / "lib" / f"python{PYTHON}", target / "lib" / f"python{PYTHON}", ignore=ignored)


def _copy_tritonserver(context: Path) -> None:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        sys.exit("the nvidia-pytriton wheel is not installed; run `make setup`")
    package = Path(spec.origin).parent
    shutil.copytree(package.parent / "nvidia_pytriton.libs", context / "nvidia_pytriton.libs")
    source, target = package / "tritonserver", context / "tritonserver"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("python_backend_stubs", "__pycache__"))
    stub = shutil.copy(
        source / "python_backend_stubs" / PYTHON / "triton_python_backend_stub", target / "backends" / "python"
    )
    for binary in (target / "bin" / "tritonserver", Path(stub)):
        binary.chmod(0o755)


def main() -> None:
    engine, environment = find_engine()
    settings = pip_settings()
    print(f"the stand-in has Python {PYTHON}", file=sys.stderr)
    image = image_tag(settings)
    if not _succeeds([engine, "image", "inspect", image], environment):
        with tempfile.TemporaryDirectory() as context:
            lay_out_context(Path(context), settings)
            build = [engine, "build", "--tag", image, context]
            subprocess.run(build, env=os.environ | environment, check=True, stdout=sys.stderr)
    print(json.dumps({"engine": engine, "environment": environment, "image": image}))


if __name__ == "__main__":
    main()
