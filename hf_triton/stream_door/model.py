# SPDX-License-Identifier: Apache-2.0
"""StreamDoor: a folder without weights that streams what the model of another folder writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from hf_triton.errors import SettingsError
from hf_triton.model import TritonPythonModel
from hf_triton.protocol.requests import is_cancel_request
from hf_triton.settings import DoorSettings
from hf_triton.stream_door.client import Engines
from hf_triton.tasks.hooks import HOOKS
from hf_triton.tasks.metrics import NoMeter
from hf_triton.tasks.text_generation.sender import InferenceRequest, ResponseConfig

SUFFIX: Final = "_stream"


class StreamDoor(TritonPythonModel):
    """Streams from the model of another folder of the same server, so that one copy of the weights serves both.

    A folder that streams refuses `/infer`: that is Triton's rule. So `NAME` answers `/infer` and `/generate`, and a
    folder `NAME_stream` with this class streams; what it takes, answers and refuses is up to `NAME`. It may be loaded
    before `NAME`, and says `not_loaded` until that is there.
    """

    settings_class: ClassVar[type[DoorSettings]] = DoorSettings  # type: ignore[assignment]

    settings: DoorSettings  # type: ignore[assignment]

    _engines: Engines

    def finalize(self) -> None:
        """Let the engine go. Triton calls this when nothing is in flight."""
        self._sentinel.dismiss()
        self._engines.close()
        self._outlet.outbox.close()

    def is_ready(self) -> bool:
        """Whether the other folder's model is loaded."""
        return self._engines.is_ready()

    def _start(self, settings: DoorSettings, args: Mapping[str, Any]) -> None:  # type: ignore[override]
        if not self._outlet.is_decoupled:
            raise SettingsError("a stream door needs model_transaction_policy { decoupled: true } in its config.pbtxt")
        other = _other_folder(args["model_name"], settings.stream_of)
        for name in HOOKS:
            if getattr(type(self), name) is not getattr(TritonPythonModel, name):
                raise SettingsError(f"{name} changes nothing in a stream door: move it to 1/model.py of '{other}'")
        self._engine_name = other  # a stop told there reaches the calls of all doors
        self._meter = NoMeter()  # the model that writes the text counts
        self._engines = Engines(other)

    def _submit(self, call: InferenceRequest, outlet: ResponseConfig) -> None:
        if is_cancel_request(call.parameters()):
            self._cancel(call)
        else:
            self._engines.submit(call, outlet.output_names, streams=outlet.streams)

    def _cancel_here(self, request_id: str) -> None:
        self._poller.cancel(request_id)


def _other_folder(own_name: str, stream_of: str | None) -> str:
    """The folder to stream from.

    Raises:
        SettingsError: Nothing says which.
    """
    name = own_name.removesuffix(SUFFIX) if stream_of is None else stream_of
    if name in ("", own_name):
        raise SettingsError(
            f"nothing says which folder's model '{own_name}' is to stream from: name this folder NAME{SUFFIX}, or set "
            "stream_of to NAME"
        )
    return name
