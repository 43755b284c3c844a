# SPDX-License-Identifier: Apache-2.0
"""The one door to Triton: requests in, answers out, log lines, the server's life. Imported inside Triton's stub alone.

A request's sender is dangerous to touch twice: asking it whether the request was cancelled after its final answer takes
the whole server down, and one that is never answered hangs its client and the server's exit. `TritonRequest` owns the
sender, and one thread asks for all requests, because asking is a round trip between processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import locale
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from hf_triton.errors import HfTritonError, RequestError, UnavailableError, where
from hf_triton.protocol.validation import reject_duplicates
from hf_triton.tasks.metrics import METRICS, OK, Metric

logger = logging.getLogger(__name__)

SERVER_POLL_S = 1.0
CANCEL_POLL_S = 0.05
CANCEL_REST = 4
"""Between two rounds of asking, times what a round has taken. With a hundred calls open, one may take 50 ms."""
SHARED_MEMORY: Final = "/dev/shm"
"""Where Triton and its processes have what they pass to each other."""
AMPLE_BYTES: Final = 32 * 2**20
"""Free of it, beside what an answer takes, from which on nobody doubts that it fits."""


class TritonRequest:
    """One inference request and its one answer, which a decoupled folder may give in parts.

    Exactly one final answer is sent, whatever happens: a second one is ignored, and a call that is dropped without one
    answers with an error. Safe from any thread.
    """

    def __init__(
        self, request: pb_utils.InferenceRequest, on_answer: Callable[[str], None] = lambda outcome: None
    ) -> None:
        self._lock = threading.Lock()
        self._is_answered = False
        self._on_answer = on_answer  # told `ok` or the error's code, once
        self._was_cancelled = False
        self._sender = request.get_response_sender()
        self._request = request
        self.request_id = _request_id(request)
        """What the client calls it; empty where it does not."""
        _cancel_watch.add(self)

    def release_inputs(self) -> None:
        """Give the request's tensors back to the server's shared memory: all has been read, and only answers follow."""
        del self._request

    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        """The request's tensors by name; copies, which may outlive `execute`."""
        return {tensor.name(): np.array(tensor.as_numpy(), copy=True) for tensor in self._request.inputs()}

    def parameters(self) -> dict[str, object]:
        """The request's parameters by name; scalars.

        Raises:
            RequestError: A name or a text among them is not UTF-8; or one is given twice, beside the text and in
                `parameters`.
        """
        try:
            parsed: dict[str, object] = json.loads(
                self._request.parameters() or "{}", object_pairs_hook=reject_duplicates
            )
        except UnicodeDecodeError:
            raise RequestError("invalid_parameter", "a parameter's name or value is not valid UTF-8") from None
        return parsed

    def requested_outputs(self) -> list[str]:
        """The outputs that the client is to have: those that it names, all where it names none."""
        return list(self._request.requested_output_names())

    def timeout_s(self) -> float | None:
        """The time that the client gives the request: `timeout` (microseconds) of `/infer` and of the clients."""
        timeout_us: int = self._request.timeout()
        return timeout_us / 1e6 if timeout_us else None

    def is_cancelled(self) -> bool:
        """Whether the client gave up, as known not much longer than `CANCEL_POLL_S` ago while few calls are open."""
        return self._was_cancelled

    def cancel(self) -> None:
        """Give the request up, as if its client had."""
        self._was_cancelled = True

    def watch(self) -> bool:
        """Ask Triton whether the client gave up; whether there is a reason to ask again."""
        with self._lock:
            # Asking takes a while, and `cancel` may come meanwhile: what it says must stay.
            if not (self._is_answered or self._was_cancelled) and self._sender.is_cancelled():
                self._was_cancelled = True
            return not (self._is_answered or self._was_cancelled)

    def add(self, outputs: Mapping[str, npt.NDArray[Any]]) -> None:
        """Send a response with more to come. The folder must be decoupled.

        One that cannot be sent ends the answer with an error: a text with a hole in it would look like a good one.
        """
        with self._lock:
            if self._is_answered:
                return
            try:
                self._sender.send(_response(outputs))
            except Exception as error:  # as in `_has_sent`
                logger.error("a part of an answer could not be sent: %s", where(error))
                self._was_cancelled = True
                self._finish(_too_large(), "out_of_memory")

    def answer(self, outputs: Mapping[str, npt.NDArray[Any]], parameters: Mapping[str, int] | None = None) -> None:
        """Send the one answer, or the last part of it.

        Args:
            outputs: Tensors by name.
            parameters: The response's own, where the server takes any (`takes_response_parameters`).
        """
        self._send(_response(outputs, parameters), OK, sum(map(_num_bytes, outputs.values())))

    def refuse(self, error: HfTritonError) -> None:
        """Send an error as the one answer."""
        code: int = getattr(pb_utils.TritonError, error.triton_code)
        message = str(error).encode(errors="replace").decode()  # a folder's own words may be no UTF-8
        self._send(pb_utils.InferenceResponse([], error=pb_utils.TritonError(message, code)), error.code)

    def _send(self, response: pb_utils.InferenceResponse, outcome: str, num_bytes: int = 0) -> None:
        with self._lock:
            if not self._is_answered:
                self._finish(response, outcome, num_bytes)

    def _finish(self, response: pb_utils.InferenceResponse, outcome: str, num_bytes: int = 0) -> None:
        """Send the last response; the lock is held. Raises nothing.

        A sender that fails to send a response that it was told is the last takes no other, and its client waits for
        ever. So where the response may not fit the shared memory, its end is sent by itself: behind an error in a
        decoupled folder; elsewhere, where only one response may be tried, Triton says that there was none (500).
        """
        self._is_answered = True
        is_ample = _has_room(num_bytes)
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if not self._has_sent(partial(self._sender.send, response, flags=final if is_ample else 0)):
            outcome = "out_of_memory"
            self._has_sent(partial(self._sender.send, _too_large()))
        if not is_ample:
            self._has_sent(partial(self._sender.send, flags=final))
        self._on_answer(outcome)

    @staticmethod
    def _has_sent(send: Callable[[], None]) -> bool:
        try:
            send()
        except Exception as error:  # the shared memory is full
            logger.error("an answer could not be sent: %s", where(error))
            return False
        return True

    def __del__(self) -> None:
        if not getattr(self, "_is_answered", True):
            self.refuse(HfTritonError("internal", "the request was dropped; the server's log may say why"))


def _request_id(request: pb_utils.InferenceRequest) -> str:
    try:
        return request.request_id()
    except UnicodeDecodeError:  # `parameters` has it too, and refuses the request
        return ""


class _CancelWatch:
    """Asks Triton about every open call in turn, in a thread that sleeps while there is none. Keeps no call alive."""

    def __init__(self) -> None:
        self._open: set[weakref.ref[TritonRequest]] = set()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, call: TritonRequest) -> None:
        """Watch a call until it is answered, cancelled or gone."""
        with self._wake:
            self._open.add(weakref.ref(call))
            self._wake.notify()
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._loop, name="hf_triton-cancel-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there is none to be had; the next call tries again
            logger.error("nobody asks whether requests are cancelled: %s", where(error))
        else:
            self._thread = thread

    def open_calls(self) -> list[TritonRequest]:
        """The calls that were neither answered nor cancelled when last asked about."""
        with self._wake:
            return [call for reference in self._open if (call := reference()) is not None]

    def _loop(self) -> None:
        took_s = 0.0
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._open)
            time.sleep(max(CANCEL_POLL_S, CANCEL_REST * took_s))
            began_s = time.monotonic()
            with self._wake:
                asked = list(self._open)
            closed = {reference for reference in asked if not self._is_open(reference)}
            with self._wake:
                self._open -= closed
            took_s = time.monotonic() - began_s

    @staticmethod
    def _is_open(reference: weakref.ref[TritonRequest]) -> bool:
        call = reference()
        try:
            return call is not None and call.watch()
        except BaseException as error:  # the thread serves the other calls too
            logger.error("asking whether a request was cancelled failed: %s", where(error))
            return False


_cancel_watch = _CancelWatch()


def cancel_requests(request_id: str) -> None:
    """Give up the open calls of this process that have an id."""
    for call in _cancel_watch.open_calls():
        if call.request_id == request_id:
            call.cancel()


@cache
def takes_response_parameters() -> bool:
    """Whether responses may have parameters: from Triton 25.02 on."""
    try:
        pb_utils.InferenceResponse([], parameters={})
    except TypeError:
        return False
    return True


def _response(
    outputs: Mapping[str, npt.NDArray[Any]], parameters: Mapping[str, int] | None = None
) -> pb_utils.InferenceResponse:
    tensors = [pb_utils.Tensor(name, array) for name, array in outputs.items()]
    if not parameters:
        return pb_utils.InferenceResponse(tensors)
    return pb_utils.InferenceResponse(tensors, parameters=dict(parameters))


def _num_bytes(array: npt.NDArray[Any]) -> int:
    """What an output takes of the shared memory."""
    return sum(4 + len(element) for element in array.flat) if array.dtype == np.object_ else array.nbytes


def _has_room(num_bytes: int) -> bool:
    """Whether the server's shared memory is sure to take so many bytes more."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= num_bytes + AMPLE_BYTES


def _too_large() -> pb_utils.InferenceResponse:
    error = UnavailableError(
        "out_of_memory", "the answer does not fit the server's shared memory: ask for less, or raise --shm-size"
    )
    return pb_utils.InferenceResponse([], error=pb_utils.TritonError(str(error), pb_utils.TritonError.UNAVAILABLE))


def add_missing_ports(
    config: pb_utils.ModelConfig, ports: tuple[list[dict[str, Any]], list[dict[str, Any]]]
) -> pb_utils.ModelConfig:
    """Add inputs and outputs to a configuration that is being completed."""
    inputs, outputs = ports
    for port in inputs:
        config.add_input(port)
    for port in outputs:
        config.add_output(port)
    return config


def parameter_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """config.pbtxt's `parameters` as plain text by key."""
    return {key: value["string_value"] for key, value in config["parameters"].items()}


def load_failure(error: HfTritonError) -> Exception:
    """The exception that Triton reports as the reason why a folder is not served."""
    return pb_utils.TritonModelException(str(error))


def end_with_server() -> None:
    """End this process when the server is gone: a stub whose server was killed can live on, and keep its GPU memory."""
    server = os.getppid()

    def watch() -> None:
        while os.getppid() == server:
            time.sleep(SERVER_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="hf_triton-server-watch", daemon=True).start()


SENTINEL: Final = """
read -r word && exit
grep -qs "^State:.Z" "/proc/$1/status" && exit
kill -TERM "$1" 2>/dev/null || exit
echo "hf_triton: the process of the model $2 has died; stopping the server" >&2
for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; kill -0 "$1" 2>/dev/null || exit; done
kill -KILL "$1"
"""
"""A shell that waits for a word. Where the pipe closes without one, the server $1 is told to end, then made to.

A server that has died itself is not told: whoever reads the log's last lines would look for the fault in a model.
"""


class Sentinel:
    """Ends the server when this process dies without a word, killed from outside or for its memory.

    Triton starts no other one in its place, stays ready, and leaves the requests in flight without an answer for ever.

    Args:
        model_name: For the log.
    """

    def __init__(self, model_name: str) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", SENTINEL, "hf_triton-sentinel", str(os.getppid()), model_name], stdin=subprocess.PIPE
        )

    def dismiss(self) -> None:
        """This process is going to end in good order."""
        with contextlib.suppress(OSError):  # it has ended before
            self._shell.communicate(b"word\n")


def stop_server() -> None:
    """Ask the server to finish what is running and end, so that whoever supervises it starts a fresh one.

    A stub that died is never replaced, and its model stays ready on servers before 26.01: lingering would be worse.
    """
    logger.error("stopping the server: a model's engine cannot go on")
    os.kill(os.getppid(), signal.SIGTERM)


def speak_utf8() -> None:
    """Make UTF-8 the encoding of files and prints, and have these come out line by line.

    Triton starts its Python in ASCII, whatever the locale says; what a folder's own code prints would come at the end.
    """
    with contextlib.suppress(locale.Error):  # a system without it keeps its own
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _TritonHandler(logging.Handler):
    """Sends log records to the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if record.levelno >= logging.ERROR:
                pb_utils.Logger.log_error(text)
            elif record.levelno >= logging.WARNING:
                pb_utils.Logger.log_warn(text)
            else:
                pb_utils.Logger.log_info(text)
        except Exception:  # such as a folder's `logger.info("%d", "x")`: what is done goes on without the line
            self.handleError(record)


def send_logs_to_triton(model_name: str) -> None:
    """Send hf_triton's own log lines to the server's log, each with the model's name."""
    root = logging.getLogger("hf_triton")
    for old in list(root.handlers):
        root.removeHandler(old)
    handler = _TritonHandler()
    handler.setFormatter(logging.Formatter(f"{model_name}: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


class MetricsSink:
    """The server's metrics. What several instances of a model add under the same labels adds up.

    Args:
        labels: Of every metric.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._families = {
            metric: pb_utils.MetricFamily(
                name=metric.name, description=metric.help, kind=getattr(pb_utils.MetricFamily, metric.kind.upper())
            )
            for metric in METRICS
        }
        self._declared: dict[tuple[Metric, str], pb_utils.Metric] = {}

    def declare(self, metric: Metric, value: str) -> None:
        """Export a metric from now on, even if it is still 0. Its own label, if it has one, is `value`."""
        if (metric, value) not in self._declared:
            labels = self._labels | ({metric.label: value} if metric.label else {})
            buckets = {"buckets": list(metric.buckets)} if metric.buckets else {}
            self._declared[metric, value] = self._families[metric].Metric(labels=labels, **buckets)

    def add(self, metric: Metric, value: str, amount: float) -> None:
        """Add to a counter or a gauge."""
        self.declare(metric, value)
        self._declared[metric, value].increment(amount)

    def observe(self, metric: Metric, amount: float) -> None:
        """Put one value into a histogram."""
        self.declare(metric, "")
        self._declared[metric, ""].observe(amount)
