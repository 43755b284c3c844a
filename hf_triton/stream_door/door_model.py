# SPDX-License-Identifier: Apache-2.0
"""StreamDoor: a folder without weights that streams what the model of another folder generates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from hf_triton.errors import SettingsError
from hf_triton.protocol.names import DOOR_SUFFIX
from hf_triton.settings import DoorSettings
from hf_triton.tasks.hooks import HOOKS

if TYPE_CHECKING:
    from hf_triton.triton_backend.dispatcher import Dispatcher


class StreamDoor:
    """Streams from the model of another folder of the same server, so that one copy of the weights serves both.

    A folder that streams refuses `/infer`: that is Triton's rule. So `NAME` answers `/infer` and `/generate`, and a
    folder `NAME_stream` with this class streams; `NAME` decides what it accepts, answers and refuses. It may be loaded
    before `NAME`, and answers `not_loaded` until then.

    Attributes:
        settings_class: The settings that config.pbtxt may hold.
        settings: The folder's settings, from `initialize` on.
    """

    settings_class: ClassVar[type[DoorSettings]] = DoorSettings

    settings: DoorSettings

    _dispatcher: Dispatcher

    @classmethod
    def auto_complete_config(cls, auto_complete_model_config: Any) -> Any:
        """Add the inputs and outputs that config.pbtxt leaves out."""
        from hf_triton.triton_backend.config_pbtxt import complete_config

        return complete_config(auto_complete_model_config, cls.settings_class)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Connect to the other folder's engines as they come. `args` are Triton's.

        Raises:
            TritonModelException: The folder cannot be served; one sentence says why.
        """
        from hf_triton.stream_door.client import Engines, cancel_elsewhere
        from hf_triton.tasks.serving.meter import Meter
        from hf_triton.triton_backend.cancellation import RequestPoller
        from hf_triton.triton_backend.config_pbtxt import load_failures, read_settings, response_config
        from hf_triton.triton_backend.dispatcher import Dispatcher
        from hf_triton.triton_backend.forwarded_headers import find_forwarded_headers
        from hf_triton.triton_backend.process import Sentinel, loading_process

        with loading_process(args["model_name"]), load_failures():
            model_config = json.loads(args["model_config"])
            self.settings = read_settings(model_config, self.settings_class)
            config = response_config(model_config, self.settings)
            if not config.is_decoupled:
                raise SettingsError(
                    "a stream door needs model_transaction_policy { decoupled: true } in its config.pbtxt"
                )
            other = other_folder(args["model_name"], self.settings.stream_of)
            for name in HOOKS:
                if hasattr(self, name):
                    raise SettingsError(f"{name} changes nothing in a stream door: move it to 1/model.py of '{other}'")
            engines, closing = Engines(other), ExitStack()
            self._dispatcher = Dispatcher(
                engines,
                config,
                poller=RequestPoller(),
                meter=Meter(),  # the model that generates counts
                cancel_elsewhere=partial(cancel_elsewhere, other),  # which reaches the requests of all doors
                closing=closing,
                headers=find_forwarded_headers(self.settings.forwarded_headers),
            )
        for close in (config.sender.close, engines.close, Sentinel(args["model_name"]).dismiss):  # the last comes first
            closing.callback(close)

    def execute(self, requests: list[Any]) -> None:
        """Forward every request and return at once. `requests` are Triton's."""
        self._dispatcher.execute(requests)

    def finalize(self) -> None:
        """Refuse the requests that are left and disconnect. Triton calls this when no request is in flight."""
        self._dispatcher.close()

    def is_ready(self) -> bool:
        """Whether the other folder's model is loaded."""
        return self._dispatcher.service.is_healthy()


def other_folder(own_name: str, stream_of: str | None) -> str:
    """The folder to stream from; raises SettingsError if no other folder is named."""
    name = own_name.removesuffix(DOOR_SUFFIX) if stream_of is None else stream_of
    if name in ("", own_name):
        raise SettingsError(
            f"nothing says which folder's model '{own_name}' is to stream from: name this folder "
            f"NAME{DOOR_SUFFIX}, or set stream_of to NAME"
        )
    return name
