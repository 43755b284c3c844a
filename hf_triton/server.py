# SPDX-License-Identifier: Apache-2.0
"""Find and run tritonserver: the one on PATH (the container's), or the one in the nvidia-pytriton wheel.

Knows nothing about models. `TritonServer` is a context manager for tests and for `hf-triton serve`:

    with TritonServer("model_repository") as server:
        urllib.request.urlopen(f"{server.http_url}/v2/health/ready")
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from hf_triton.errors import ServerError

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h: the signal a child gets when its parent dies
STOP_GRACE_S = 30.0
STACK_BYTES = 256 << 20


@dataclass(frozen=True)
class Installation:
    """A tritonserver binary and the Python backend that goes with it."""

    binary: Path
    backend_directory: Path | None
    """Where `python/` with the backend and its stub lies; None where the server knows by itself."""


@dataclass(frozen=True)
class ModelState:
    """A folder as the server sees it."""

    name: str
    state: str
    """Triton's: `READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE`."""
    reason: str
    """Why it is not served; Triton's words around ours."""

    @property
    def sentence(self) -> str:
        """The reason without Triton's words: `code: sentence`."""
        text = self.reason.partition("TritonModelException: ")[2] or self.reason
        return text.partition("\n")[0]


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Get a signal when the thread that started this process ends. To be called in the child."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


def find_tritonserver(scratch: Path) -> Installation:
    """Find a tritonserver, the one on PATH first.

    Args:
        scratch: A folder that lives as long as the server. The wheel carries one Python stub per Python version and
            its own folder may be read-only, so the backend is laid out there.

    Raises:
        ServerError: There is none, or the wheel's has no stub for this Python or cannot do with this numpy.
    """
    on_path = shutil.which("tritonserver")
    if on_path:
        return Installation(Path(on_path), None)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ServerError(
            "server_not_found",
            "there is no tritonserver on PATH and no nvidia-pytriton wheel; run `make setup`, or use the container",
        )
    root = Path(spec.origin).parent / "tritonserver"
    return Installation(root / "bin" / "tritonserver", _lay_out_backend(root, scratch))


def _lay_out_backend(root: Path, scratch: Path) -> Path:
    numpy = importlib.metadata.version("numpy")
    if int(numpy.partition(".")[0]) >= 2:
        raise ServerError(
            "server_not_found",
            f"the nvidia-pytriton wheel's server breaks texts with numpy {numpy}: `pip install 'numpy<2'`",
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
    # The stub finds its libraries through an rpath relative to where it really lies, so files are linked, not copied.
    for source in [*(root / "backends" / "python").glob("*.*"), stub]:
        (backend / source.name).symlink_to(source)
    return backend.parent


def server_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which the Python stub finds this interpreter, its packages and its libpython.

    The stub is linked to `libpythonX.Y.so` and takes the first `python3` on PATH for its packages. With a Python that
    is not the distribution's own, the loader would pick the distribution's libpython, and `import ssl` fails in it.
    """
    environment = dict(os.environ)
    libraries = [str(sysconfig.get_config_var("LIBDIR") or ""), environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    return environment | dict(extra or {})


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def busy_ports(ports: Sequence[int]) -> list[int]:
    """Those of `ports` that somebody listens on already."""

    def is_busy(port: int) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                return True
        return False

    return [port for port in ports if is_busy(port)]


def is_plain(text: str) -> bool:
    """Whether a name or path reaches a model's process as it is: Triton starts that with a line for the shell."""
    return shlex.quote(text) == text  # which leaves ASCII letters, digits and @%_-+=:,./ alone


def _prepare_process() -> None:
    """Runs in the new process before tritonserver does."""
    die_with_parent(signal.SIGTERM)
    # Triton's HTTP library copies a form body, which is what `curl -d` sends, to the stack (libevhtp issue 118).
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    wanted = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


class TritonServer:
    """A tritonserver process as a context manager.

    The server is told to stop when the thread that started it ends: a killed test or command leaves none behind.

    Args:
        model_repository: The folder of model folders.
        ports: HTTP, gRPC and metrics port; free ones by default.
        host: The address to listen on.
        arguments: More tritonserver arguments, such as `["--model-control-mode=explicit"]`.
        environment: Variables to set beside the present ones.
        ready_timeout_s: How long models may take to load; they may be downloading.
        exit_on_error: Whether one folder's failure ends the server; by default the other folders are served.
        log: Where the server's output goes; a temporary file by default (`read_log` shows it).
    """

    def __init__(
        self,
        model_repository: str | os.PathLike[str],
        *,
        ports: tuple[int, int, int] | None = None,
        host: str = "127.0.0.1",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        ready_timeout_s: float = 120.0,
        exit_on_error: bool = False,
        log: int | None = None,
    ) -> None:
        self.model_repository = Path(model_repository)
        http, grpc, metrics = ports or free_ports(3)
        self.http_port, self.grpc_port, self.metrics_port = http, grpc, metrics
        self.host = host
        self.http_url = f"http://{host}:{http}"
        self.grpc_url = f"{host}:{grpc}"
        self.metrics_url = f"http://{host}:{metrics}/metrics"
        self._arguments = list(arguments)
        self._environment = server_environment(environment)
        self._shm_prefix = f"hf_triton_{os.getpid()}_{http}"
        self._ready_timeout_s = ready_timeout_s
        self._exit_on_error = exit_on_error
        self._log = log
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
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
        """Start the process and return at once.

        Raises:
            ServerError: There is no tritonserver to start.
        """
        self._scratch = tempfile.TemporaryDirectory(prefix="hf_triton_server_")
        scratch = Path(self._scratch.name)
        installation = find_tritonserver(scratch)
        with (scratch / "log").open("wb") as own_log:
            self.process = subprocess.Popen(
                self.command(installation, self._plain_repository(scratch)),
                env=self._environment | {"TMPDIR": str(scratch)},  # what Triton leaves there goes with it
                stdin=subprocess.DEVNULL,
                stdout=own_log if self._log is None else self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl+C reaches us alone, and we stop the server in good order
                preexec_fn=_prepare_process,
            )

    def _plain_repository(self, scratch: Path) -> Path:
        """A path to the repository that Triton can start models with."""
        if is_plain(str(self.model_repository)):
            return self.model_repository
        link = scratch / "models"
        link.symlink_to(self.model_repository.resolve())
        return link

    def command(self, installation: Installation, model_repository: Path) -> list[str]:
        """The command line, in tritonserver's own flags."""
        backend = installation.backend_directory
        return [
            str(installation.binary),
            f"--model-repository={model_repository}",
            *([f"--backend-directory={backend}"] if backend else []),
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            f"--exit-on-error={str(self._exit_on_error).lower()}",
            f"--http-address={self.host}",
            f"--http-port={self.http_port}",
            f"--grpc-address={self.host}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-address={self.host}",
            f"--metrics-port={self.metrics_port}",
            *self._arguments,
        ]

    def wait_until_started(self) -> None:
        """Wait until every folder is loaded or has failed: the HTTP port opens then.

        Raises:
            ServerError: The process ended, or `ready_timeout_s` passed; the message holds the log's tail.
        """
        deadline = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < deadline:
            if not self.is_running():
                raise ServerError("server_failed", f"tritonserver ended while starting{self.log_words()}")
            if self.is_live():
                return
            time.sleep(0.05)
        raise ServerError(
            "server_failed",
            f"tritonserver was not up after {self._ready_timeout_s:g} s{self.log_words()}",
        )

    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self.process is not None and self.process.poll() is None

    def is_live(self) -> bool:
        """Whether the server answers its liveness route."""
        return self._status("/v2/health/live") == 200

    def is_model_ready(self, name: str) -> bool:
        """Whether the model `name` takes requests."""
        return self._status(f"/v2/models/{name}/ready") == 200

    def _status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.http_url + path, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def models(self) -> list[ModelState]:
        """What became of every folder, by name; those that load again and again included."""
        entries = self._json("/v2/repository/index", data=b"{}")
        return [ModelState(each["name"], each.get("state", "UNAVAILABLE"), each.get("reason", "")) for each in entries]

    def model_config(self, name: str) -> dict[str, Any]:
        """The config of a model that takes requests, as the server completed it."""
        config: dict[str, Any] = self._json(f"/v2/models/{name}/config")
        return config

    def _json(self, path: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(self.http_url + path, data=data)
        request.add_header("Connection", "close")
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.load(answer)

    def read_log(self) -> str:
        """What the server and its models have printed so far; empty where `log` was given."""
        if self._scratch is None:
            return ""
        return (Path(self._scratch.name) / "log").read_text(errors="replace")

    def log_tail(self, lines: int = 30) -> str:
        """The last `lines` lines of the log."""
        return "\n".join(self.read_log().splitlines()[-lines:])

    def log_words(self) -> str:
        """The end of a sentence that says where to look: the log's tail, or that it has been shown."""
        tail = self.log_tail()
        return f"; its log ends:\n{tail}" if tail else ": its log above says why"

    def ending_words(self) -> str:
        """How the process ended by itself, for a sentence."""
        code = None if self.process is None else self.process.poll()
        if code is None or code >= 0:
            return f"with status {code}"
        return f"by the signal {-code} ({signal.strsignal(-code)})"

    def stop(self, grace_s: float = STOP_GRACE_S) -> int | None:
        """Let requests in flight finish, then stop; kill the whole process group after `grace_s` seconds.

        Returns:
            The exit code, None where the server never ran.
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
            # Python stubs outlive a server that was killed: take the whole group down.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for region in Path("/dev/shm").glob(f"{self._shm_prefix}*"):  # a killed server leaves its regions
            region.unlink(missing_ok=True)
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None
