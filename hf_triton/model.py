# SPDX-License-Identifier: Apache-2.0
"""TritonPythonModel: what Triton calls, in the order it calls it. Orchestrates, computes nothing."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_triton import wire
from hf_triton.errors import HfTritonError, SettingsError, where
from hf_triton.settings import LoadedSettings, ModelSettings, load_settings

if TYPE_CHECKING:
    from hf_triton._triton import Call  # exists inside Triton's Python process alone: imported where Triton calls
    from hf_triton.tasks.text_generation import TextGeneration

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 16  # more than any text has on average; only a bound on what is tokenized at all


class TritonPythonModel:
    """A Hugging Face model behind Triton's endpoints; subclass it in your model folder's `1/model.py`.

    The smallest model is two lines, and the folder's config.pbtxt says which checkpoint it serves:

        import hf_triton

        class TritonPythonModel(hf_triton.TritonPythonModel):
            "My model."

    Triton calls, in this order: `auto_complete_config` once (in a process that is thrown away), `initialize` once,
    `execute` for every batch of requests, `finalize` once. Nothing has to be overridden. What may be:

    Attributes:
        settings_class: The settings that config.pbtxt may hold. A subclass of `ModelSettings` adds to them or changes
            their defaults; a field is declared as those in `settings.py` are.
        settings: The folder's settings, from `initialize` on.
    """

    settings_class: ClassVar[type[ModelSettings]] = ModelSettings

    settings: ModelSettings

    _task: TextGeneration
    _output_names: list[str]
    _limits: wire.Limits

    @classmethod
    def auto_complete_config(cls, auto_complete_model_config: Any) -> Any:
        """Add the inputs and outputs that config.pbtxt leaves out.

        Args:
            auto_complete_model_config: Triton's `ModelConfig`.
        """
        from hf_triton import _triton

        config = auto_complete_model_config.as_dict()
        try:
            settings = cls._load_settings(config).settings
            ports = wire.missing_ports(config, settings.parameters_as_inputs)
        except HfTritonError as error:
            raise _triton.load_failure(error) from None
        return _triton.add_missing_ports(auto_complete_model_config, ports)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the checkpoint and start the engine.

        Args:
            args: Triton's: `model_config` (JSON), `model_name`, `model_repository` (this model's folder),
                `model_instance_kind`, `model_instance_device_id`, ...

        Raises:
            TritonModelException: The folder cannot be served; one sentence says why, and what would do. Other folders
                are not touched.
        """
        from hf_triton import _triton

        _triton.speak_utf8()
        _triton.end_with_server()
        _triton.send_logs_to_triton(args["model_name"])
        config = json.loads(args["model_config"])
        self._output_names = [port["name"] for port in config["output"]]
        try:
            wire.check_config(config)
            loaded = self._load_settings(config)
            for line in loaded.describe():
                logger.info(line)
            self.settings = loaded.settings
            self._start(loaded.settings, args)
        except HfTritonError as error:
            raise _triton.load_failure(error) from None
        except UnicodeEncodeError as error:
            raise _triton.load_failure(
                SettingsError(f"the path {error.object!a} is not ASCII, and Triton's Python opens no other: rename it")
            ) from None

    def execute(self, requests: list[Any]) -> None:
        """Hand every request to the engine and return at once; each is answered when its texts are there.

        Nothing may escape from here: Triton would show the traceback to the client, and could crash.

        Args:
            requests: Triton's `InferenceRequest`s.
        """
        from hf_triton import _triton

        for request in requests:
            call = _triton.Call(request)
            try:
                self._submit(call)
            except HfTritonError as error:
                call.refuse(error)
            except Exception as error:
                logger.error("taking a request failed: %s", where(error))
                call.refuse(HfTritonError("internal", "the request could not be taken; the server's log says why"))

    def finalize(self) -> None:
        """Answer whoever is still waiting and let the model go. Triton calls this when nothing is in flight."""
        self._task.close()

    def is_ready(self) -> bool:
        """Whether the model can take requests; servers from 26.03 on ask."""
        return self._task.is_healthy()

    # --- the parts ---------------------------------------------------------------------------------------------------

    @classmethod
    def _load_settings(cls, config: Mapping[str, Any]) -> LoadedSettings:
        from hf_triton import _triton

        return load_settings(_triton.parameter_texts(config), os.environ, cls.settings_class)

    def _start(self, settings: ModelSettings, args: Mapping[str, str]) -> None:
        from hf_triton import _triton
        from hf_triton.checkpoint import Placement, load_checkpoint
        from hf_triton.hub import Hub
        from hf_triton.tasks.text_generation import build_text_generation

        hub = Hub(Path(args["model_repository"]), settings, os.environ)
        placement = Placement(args["model_instance_kind"], int(args["model_instance_device_id"]))
        checkpoint = load_checkpoint(hub, settings, placement)
        max_prompt_bytes = settings.max_prompt_bytes or BYTES_PER_TOKEN * checkpoint.context_length
        self._limits = wire.Limits(settings.max_prompts, max_prompt_bytes)
        self._task = build_text_generation(checkpoint, settings, on_fatal=_triton.stop_server)

    def _submit(self, call: Call) -> None:
        request = wire.parse_request(call.inputs(), call.parameters(), self._limits)

        def answer(result: list[str] | HfTritonError) -> None:
            if isinstance(result, HfTritonError):
                call.refuse(result)
            else:
                texts = wire.encode_texts(result, request.shape)
                call.answer(dict.fromkeys(self._output_names, texts))

        self._task.submit(request, answer, call.is_cancelled, call.timeout_s())
