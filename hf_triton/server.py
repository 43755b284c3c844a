# SPDX-License-Identifier: Apache-2.0
"""Find and run tritonserver: the one on PATH (the container's), or the one in the nvidia-pytriton wheel.

Knows nothing about models. `TritonServer` is a context manager for tests and for `hf-triton serve`:

    with TritonServer("model_repository") as server:
        urllib.request.urlopen(f"{server.http_url}/v2/health/ready")
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from hf_triton.errors import ServerError
from hf_triton.model_process import SHARED_MEMORY, STARTED_IN
from hf_triton.protocol.load_reasons import first_sentence
from hf_triton.scratch import ScratchFolder

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h: the signal a child gets when its parent dies
DISTRIBUTION_LIBRARIES: Final = ("/usr/lib", "/lib")
"""The loader looks there anyway; named in LD_LIBRARY_PATH, they would hide the image's CUDA compatibility libraries."""
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_GRACE_S = 30.0
NOT_TELLING: Final = re.compile(
    r"I\d{4} |\d{4}-\d\d-\d\d\S* (\S+ )?I(NFO)? |[+|]|\s*$|.*(NVML|DCGM|CudaDriver|pinned_memory|torchao|_pytree)"
)
"""Lines of a log that tell nothing of a failure: information, tables, and what every start says without a GPU."""
TELLING_LINES: Final = 12
STACK_BYTES = 256 << 20
HTTP_RESTRICTED: Final = "--http-restricted-api="
GRPC_RESTRICTED: Final = "--grpc-restricted-protocol="
STUB_TIMEOUT_S: Final = 120
"""How long a model's process may take until it runs Python: more than 30 s where many start at once on few cores."""
ADMIN_APIS: Final = ("model-repository", "shared-memory", "trace", "logging")
"""What changes a server: loading (and the index), regions of shared memory, where Triton writes traces and logs."""
ADMIN_HEADER: Final = "admin-key"
OUTGOING_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
STUB_SCRIPT: Final = f"""#!/bin/sh
export {STARTED_IN}="$PWD"
cd / && exec {{stub}} "$@"
"""
"""Starts the process of a model elsewhere: its Python imports what lies in the current folder before anything else."""


@dataclass(frozen=True)
class Installation:
    """A tritonserver binary and its Python backend."""

    binary: Path
    backend_directory: Path | None
    """The folder that holds `python/` with the backend and its stub; None if the server has a default."""


@dataclass(frozen=True)
class ModelState:
    name: str
    state: str
    """Triton's: `READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE`."""
    reason: str
    """Why it is not served: our sentence inside Triton's message."""

    @property
    def sentence(self) -> str:
        """Our sentence alone: `code: sentence`."""
        return first_sentence(self.reason)


def read_log(file: Path) -> str:
    """A program's log; empty if the file was removed."""
    try:
        return file.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def describe_log(text: str, log: int | Path | None) -> str:
    """The end of an error message: the last lines of a program's log that may say why, or a pointer to them."""
    if not text:
        return "" if isinstance(log, Path) else ": its log above says why"
    lines = text.splitlines()
    telling = [line for line in lines if not NOT_TELLING.match(line)]
    named = f", {log}, says" if isinstance(log, Path) else " ends"
    return f"; its log{named}:\n" + "\n".join(telling[-TELLING_LINES:] or lines[-TELLING_LINES:])


def find_tritonserver(scratch: Path) -> Installation:
    """Find a tritonserver: on PATH, else in the nvidia-pytriton wheel.

    Args:
        scratch: A folder that exists as long as the server. The wheel's Python backend is assembled in it, because the
            wheel has one stub per Python version and its own folder may be read-only.

    Raises:
        ServerError: There is no tritonserver, or the wheel's has no stub for this Python or does not work with this
            numpy.
    """
    on_path = shutil.which("tritonserver")
    if on_path:
        return Installation(Path(on_path), None)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ServerError(
            "server_not_found",
            "there is no tritonserver on PATH and no nvidia-pytriton wheel: `pip install 'hf-triton[server]'`, or use "
            "the container",
        )
    root = Path(spec.origin).parent / "tritonserver"
    return Installation(root / "bin" / "tritonserver", _assemble_backend(root, scratch))


def _assemble_backend(root: Path, scratch: Path) -> Path:
    numpy = importlib.metadata.version("numpy")
    if int(numpy.partition(".")[0]) >= 2:
        raise ServerError(
            "server_not_found",
            f"the nvidia-pytriton wheel's server corrupts strings with numpy {numpy}: `pip install 'numpy<2'`",
        )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        known = ", ".join(sorted(path.name for path in stub.parent.parent.iterdir()))
        raise ServerError(
            "server_not_found", f"the nvidia-pytriton wheel has no stub for Python {version}, only {known}"
        )
    backend = scratch / "backends" / "python"
    backend.mkdir(parents=True)
    for source in (root / "backends" / "python").glob("*.*"):
        (backend / source.name).symlink_to(source)
    script = backend / stub.name
    script.write_text(STUB_SCRIPT.format(stub=shlex.quote(str(stub))))  # no copy: it finds its libraries beside itself
    script.chmod(0o755)
    if not os.access(script, os.X_OK):  # no file of the scratch folder may run: /tmp is mounted noexec
        script.unlink()
        script.symlink_to(stub)
    return backend.parent


def server_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which the Python stub finds this interpreter, its packages and its libpython.

    The stub is linked to `libpythonX.Y.so` and uses the packages of the first `python3` on PATH. With a Python that is
    not the distribution's own, the loader would choose the distribution's libpython, in which `import ssl` fails.
    """
    environment = dict(os.environ)
    libraries = str(sysconfig.get_config_var("LIBDIR") or "")
    if libraries and not libraries.startswith(DISTRIBUTION_LIBRARIES):
        paths = [libraries, environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    return environment | dict(extra or {})


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports that are free.

    They lie below those that the kernel gives to outgoing connections, which could take a port before the server does:
    Triton opens its ports once its models are loaded.

    Raises:
        ServerError: There are not so many.
    """
    first_outgoing = int(OUTGOING_PORTS.read_text().split()[0])
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.sample(range(10_000, first_outgoing if first_outgoing > 20_000 else 60_000), 1000):
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise ServerError("server_failed", f"there are no {count} free ports below {first_outgoing}")


def busy_ports(ports: Sequence[int]) -> list[int]:

    def is_busy(port: int) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                return True
        return False

    return [port for port in ports if is_busy(port)]


def open_local(request: urllib.request.Request | str, timeout_s: float) -> Any:
    """Open a URL of this machine, as `urlopen` does, but never through the proxy of `http_proxy`.

    Of HTTPS it checks no certificate, which is for the names that clients use.
    """
    return _local_opener().open(request, timeout=timeout_s)


@functools.cache
def _local_opener() -> urllib.request.OpenerDirector:
    unchecked = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), unchecked)


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """The value of `--flag=VALUE` in tritonserver's arguments; the last one counts."""
    return dict(argument.partition("=")[::2] for argument in arguments).get(flag)


def lock_flags(key: str) -> list[str]:
    """The arguments that close to clients without a key what changes a server, over HTTP and gRPC."""
    restriction = f"{','.join(ADMIN_APIS)}:{ADMIN_HEADER}={key}"
    return [f"{HTTP_RESTRICTED}{restriction}", f"{GRPC_RESTRICTED}{restriction}"]


def restricted_api_headers(arguments: Sequence[str]) -> dict[str, str]:
    """The headers that `--http-restricted-api=API,...:NAME=VALUE` in tritonserver's arguments asks for."""
    return _restriction_keys(HTTP_RESTRICTED, arguments)


def restricted_protocol_headers(arguments: Sequence[str]) -> dict[str, str]:
    """The headers of gRPC calls that `--grpc-restricted-protocol=API,...:NAME=VALUE` asks for."""
    keys = _restriction_keys(GRPC_RESTRICTED, arguments)
    return {f"triton-grpc-protocol-{name.lower()}": value for name, value in keys.items()}


def _restriction_keys(flag: str, arguments: Sequence[str]) -> dict[str, str]:
    keys = [argument.removeprefix(flag).partition(":")[2] for argument in arguments if argument.startswith(flag)]
    return {name: value for name, equals, value in (key.partition("=") for key in keys) if equals}


def is_shell_safe(name: str) -> bool:
    """Whether a name or path has ASCII letters, digits and `@%_-+=:,./` only.

    Triton starts a model's process through a shell, without quotes.
    """
    return shlex.quote(name) == name


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """Let Ctrl+C, SIGTERM and SIGHUP wait until a new process is started and known.

    Python drops what a signal's handler raises while it forks.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def end_with_parent() -> None:
    """Runs in a new process: it gets SIGTERM when the thread that started it ends."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def describe_status(status: int) -> str:
    """How a process exited, for an error message; a negative status is a signal's."""
    return f"with status {status}" if status >= 0 else f"by signal {-status} ({signal.strsignal(-status)})"


def check_flags(flags: Sequence[str]) -> None:
    """Check that tritonserver knows its flags; its own answer to a wrong one is one line above 400 lines of help.

    Raises:
        ServerError: It does not, or there is no tritonserver.
    """
    if not flags:
        return
    with tempfile.TemporaryDirectory() as scratch:
        binary = find_tritonserver(Path(scratch)).binary
    tried = subprocess.run([binary, *flags, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    name, colon, sentence = tried.stderr.partition("\n")[0].partition(": ")
    if colon and name == str(binary):  # getopt's sentence
        raise ServerError("wrong_usage", f"tritonserver: {sentence}; `{binary} --help` lists its flags")


def _prepare_process() -> None:
    """Runs in the new process before tritonserver."""
    end_with_parent()
    # Triton's HTTP library copies a form body, as sent by `curl -d`, to the stack (libevhtp issue 118).
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    soft = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


class TritonServer:
    """A tritonserver process as a context manager.

    The server gets SIGTERM when the thread that started it ends, so a killed test or command leaves no server behind.

    Args:
        more_repositories: Further ones; a model's name is in one of them only.
        ports: HTTP, gRPC and metrics port; free ones by default.
        arguments: Further tritonserver arguments, such as `["--model-control-mode=explicit"]`.
        environment: Variables to set on top of the current ones.
        ready_timeout_s: Limit for loading the models, in seconds, downloads included.
        exit_on_error: Whether the server exits if a folder fails to load; by default it serves the other folders.
        log: A file descriptor for the server's output, or a file that it is appended to; by default a temporary file.
            `read_log` returns what is in a file.
    """

    def __init__(
        self,
        model_repository: str | os.PathLike[str],
        *more_repositories: str | os.PathLike[str],
        ports: tuple[int, int, int] | None = None,
        host: str = "127.0.0.1",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        ready_timeout_s: float = 120.0,
        exit_on_error: bool = False,
        log: int | Path | None = None,
    ) -> None:
        self.model_repository = Path(model_repository)
        self.model_repositories = [self.model_repository, *map(Path, more_repositories)]
        http, grpc, metrics = ports or free_ports(3)
        self.http_port, self.grpc_port, self.metrics_port = http, grpc, metrics
        self.host = host
        self.http_url = f"http://{host}:{http}"
        self.grpc_url = f"{host}:{grpc}"
        self.metrics_url = f"http://{host}:{metrics}/metrics"
        self._arguments = list(arguments)
        self._headers = restricted_api_headers(self._arguments)
        self._environment = server_environment(environment)
        self._shm_prefix = f"hf_triton_{os.getpid()}_{http}_"
        self._ready_timeout_s = ready_timeout_s
        self._exit_on_error = exit_on_error
        self._log = log
        self._scratch: ScratchFolder | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TritonServer:
        try:
            self.start()
            self.wait_until_started()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and return at once; raises ServerError if there is no tritonserver to start."""
        self._scratch = ScratchFolder("server")
        scratch = Path(self._scratch.name)
        installation = find_tritonserver(scratch)
        repositories = [
            self._safe_path(path, scratch / f"models{number}") for number, path in enumerate(self.model_repositories)
        ]
        log = (self._log_file or scratch / "log").open("ab")
        with log, delayed_signals():
            self.process = subprocess.Popen(
                self.command(installation, repositories),
                env=self._environment | {"TMPDIR": str(scratch)},  # deleted with what Triton leaves in it
                stdin=subprocess.DEVNULL,
                stdout=self._log if isinstance(self._log, int) else log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C reaches this process alone, which stops the server gracefully
                preexec_fn=_prepare_process,
            )

    def _safe_path(self, repository: Path, link: Path) -> Path:
        """The repository's path if it is safe in a shell, else a link to it."""
        repository = repository.absolute()
        if is_shell_safe(str(repository)):
            return repository
        link.symlink_to(repository.resolve())
        return link

    def command(self, installation: Installation, model_repositories: Sequence[Path]) -> list[str]:
        backend = installation.backend_directory
        return [
            str(installation.binary),
            *(f"--model-repository={path}" for path in model_repositories),
            *([f"--backend-directory={backend}"] if backend else []),
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            f"--backend-config=python,stub-timeout-seconds={STUB_TIMEOUT_S}",
            f"--exit-on-error={str(self._exit_on_error).lower()}",
            f"--http-address={self.host}",
            f"--http-port={self.http_port}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.metrics_port}",
            *self._arguments,
        ]

    def wait_until_started(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until each folder is loaded or has failed, which is when the HTTP port opens, and then the metrics port.

        Triton aborts if a model's process does not run for a second (server issue 5949), as on a busy machine; one that
        does so while starting is started once more.

        Args:
            check: Called meanwhile; what it raises ends the wait.

        Raises:
            ServerError: The process ended, or `ready_timeout_s` passed; the message has the log's tail.
        """
        deadline = time.monotonic() + self._ready_timeout_s
        was_repeated = False
        while time.monotonic() < deadline:
            if not was_repeated and self.process and self.process.poll() == -signal.SIGABRT:
                was_repeated = True
                self._clean_up()
                self.start()
            if not self.is_running():
                raise ServerError("server_failed", f"tritonserver exited while starting{self.describe_log()}")
            if self.is_live() and self._has_metrics_port():
                return
            check()
            time.sleep(0.05)
        raise ServerError(
            "server_failed", f"tritonserver did not start within {self._ready_timeout_s:g} s{self.describe_log()}"
        )

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def is_live(self) -> bool:
        """Whether the server answers its liveness endpoint."""
        return self._status("/v2/health/live") == 200

    def _has_metrics_port(self) -> bool:
        """Whether the metrics port, the last to open, is open; True if the arguments say something of metrics."""
        if any(argument.startswith(("--allow-metrics", "--metrics-")) for argument in self._arguments):
            return True
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.metrics_port), 5):
            return True
        return False

    def is_model_ready(self, name: str) -> bool:
        return self._status(f"/v2/models/{name}/ready") == 200

    def _status(self, path: str) -> int:
        try:
            with open_local(urllib.request.Request(self.http_url + path, headers=self._headers), 5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def models(self) -> list[ModelState]:
        """The state of each folder, by name, including folders that are reloading."""
        entries = self._json("/v2/repository/index", data=b"{}")
        return [
            ModelState(entry["name"], entry.get("state", "UNAVAILABLE"), entry.get("reason", "")) for entry in entries
        ]

    def model_config(self, name: str) -> dict[str, Any]:
        config: dict[str, Any] = self._json(f"/v2/models/{name}/config")
        return config

    def _json(self, path: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(self.http_url + path, data, self._headers)
        request.add_header("Connection", "close")
        with open_local(request, 5) as response:
            return json.load(response)

    def read_log(self) -> str:
        """The output of the server and its models so far; empty if `log` is a descriptor."""
        file = self._log_file
        return "" if file is None else read_log(file)

    @property
    def _log_file(self) -> Path | None:
        if isinstance(self._log, Path):
            return self._log
        return None if self._scratch is None or self._log is not None else Path(self._scratch.name) / "log"

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.read_log().splitlines()[-lines:])

    def describe_log(self) -> str:
        """The end of an error message: the last lines of the log that may say why, or a pointer to the log."""
        return describe_log(self.read_log(), self._log)

    def describe_exit(self) -> str:
        """How the process exited, for an error message."""
        status = None if self.process is None else self.process.poll()
        return "not at all" if status is None else describe_status(status)

    def stop(self, grace_s: float = STOP_GRACE_S) -> int | None:
        """Let requests in flight finish, then stop; kill the process group after `grace_s` seconds.

        Returns:
            The exit code; None if the server never ran.
        """
        process = self.process
        try:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
        finally:
            self._clean_up()
        return None if process is None else process.returncode

    def _clean_up(self) -> None:
        if self.process is not None:
            # Python stubs outlive a killed server, so the whole group is killed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for region in SHARED_MEMORY.glob(f"{self._shm_prefix}*"):  # left by a killed server
            region.unlink(missing_ok=True)
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None
