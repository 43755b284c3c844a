# SPDX-License-Identifier: Apache-2.0
"""TritonPythonModel: what Triton calls, in the order it calls it. Orchestrates, computes nothing."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_triton.engine.types import RequestTimes
from hf_triton.errors import HfTritonError, RequestError, SettingsError, where
from hf_triton.protocol.ports import PROMPT, TEXT_OUTPUTS, check_config, missing_ports
from hf_triton.protocol.requests import (
    Limits,
    check_parameter_names,
    is_cancel_request,
    parse_request,
    with_named_outputs,
)
from hf_triton.protocol.tensors import encode_strings
from hf_triton.settings import DoorSettings, LoadedSettings, ModelSettings, load_settings
from hf_triton.stream_door.client import cancel_elsewhere
from hf_triton.stream_door.server import DoorServer
from hf_triton.tasks.hooks import OWN_FILE, Hooks, check_hooks, checked_load
from hf_triton.tasks.metrics import NoMeter, build_meter
from hf_triton.tasks.text_generation.sender import InferenceRequest, ResponseConfig, ResponseSender, StreamReply
from hf_triton.triton_backend.cancellation import RequestPoller

if TYPE_CHECKING:
    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.tasks.text_generation.task import TextGeneration
    from hf_triton.triton_backend.process import Sentinel

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 16  # more than any text has on average; only a bound on what is tokenized at all


class TritonPythonModel(Hooks):
    """A Hugging Face model behind Triton's endpoints; subclass it in your model folder's `1/model.py`.

    The smallest model is two lines, and the folder's config.pbtxt says which checkpoint it serves:

        import hf_triton

        class TritonPythonModel(hf_triton.TritonPythonModel):
            "My model."

    Triton calls, in this order: `auto_complete_config` once (in a process that is thrown away), `initialize` once,
    `execute` for every batch of requests, `finalize` once. Nothing has to be overridden. What may be: `load`, and the
    methods of `Hooks` (`build_prompt`, `logits_processor`, `is_complete`, `postprocess`), which change the texts.

    Attributes:
        settings_class: The settings that config.pbtxt may hold. A subclass of `ModelSettings` adds to them or changes
            their defaults; a field is declared as those in `settings.py` are.
        settings: The folder's settings, from `initialize` on.
    """

    settings_class: ClassVar[type[ModelSettings]] = ModelSettings

    settings: ModelSettings

    _task: TextGeneration
    _outlet: ResponseConfig
    _door: DoorServer
    _engine_name: str  # of the model that writes the texts
    _sentinel: Sentinel
    _limits: Limits
    _poller: RequestPoller
    _meter: NoMeter

    @classmethod
    def auto_complete_config(cls, auto_complete_model_config: Any) -> Any:
        """Add the inputs and outputs that config.pbtxt leaves out.

        Args:
            auto_complete_model_config: Triton's `ModelConfig`.
        """
        from hf_triton.triton_backend import config as triton_config

        config = auto_complete_model_config.as_dict()
        try:
            settings = cls._load_settings(config).settings
            ports = missing_ports(config, settings.parameters_as_inputs)
        except HfTritonError as error:
            raise triton_config.load_failure(error) from None
        return triton_config.add_missing_ports(auto_complete_model_config, ports)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the checkpoint and start the engine.

        Args:
            args: Triton's: `model_config` (JSON), `model_name`, `model_repository` (this model's folder),
                `model_instance_kind`, `model_instance_device_id`, ...

        Raises:
            TritonModelException: The folder cannot be served; one sentence says why, and what would do. Other folders
                are not touched.
        """
        from hf_triton.triton_backend import process
        from hf_triton.triton_backend.config import load_failure

        process.speak_utf8()
        process.end_with_server()
        process.send_logs_to_triton(args["model_name"])
        self._poller = RequestPoller()
        config = json.loads(args["model_config"])
        self._engine_name = args["model_name"]
        try:
            check_config(config)
            loaded = self._load_settings(config)
            for line in loaded.describe():
                logger.info(line)
            self.settings = loaded.settings
            is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
            if loaded.settings.stream and not is_decoupled:
                logger.warning("the setting stream does nothing without model_transaction_policy { decoupled: true }")
            self._outlet = ResponseConfig(
                output_names=[port["name"] for port in config["output"]],
                is_decoupled=is_decoupled,
                streams=loaded.settings.stream,
                outbox=ResponseSender(),
            )
            # In a thread that ends, and takes its OpenMP threads along: beside a second set of them, the engine's would
            # sleep between any two operations, which makes a step on two cores a third slower.
            with ThreadPoolExecutor(1, thread_name_prefix="hf_triton-load") as loader:
                loader.submit(self._start, loaded.settings, args).result()
            self._sentinel = process.Sentinel(args["model_name"])
        except HfTritonError as error:
            raise load_failure(error) from None
        except UnicodeEncodeError as error:
            raise load_failure(
                SettingsError(f"the path {error.object!a} is not ASCII, and Triton's Python opens no other: rename it")
            ) from None

    def execute(self, requests: list[Any]) -> None:
        """Hand every request to the engine and return at once; each is answered when its texts are there.

        Nothing may escape from here: Triton would show the traceback to the client, and could crash.

        Args:
            requests: Triton's `InferenceRequest`s.
        """
        from hf_triton.triton_backend.request import TritonRequest

        for request in requests:
            call = TritonRequest(request, self._poller, self._meter.begin_request())
            self._take(call, self._outlet)
            call.release_inputs()

    def finalize(self) -> None:
        """Answer whoever is still waiting and let the model go. Triton calls this when nothing is in flight."""
        self._sentinel.dismiss()
        self._door.drain()
        self._task.close()
        self._outlet.outbox.close()
        self._door.close()
        self._meter.close()

    def load(self, checkpoint: Checkpoint) -> Checkpoint:
        """Change what was loaded, before it serves: merge an adapter, add a token, replace a layer. May be overridden.

        Args:
            checkpoint: `model` and `tokenizer`, transformers' own objects, on their device; others may be put in their
                place. The model serves in eval mode.

        Returns:
            What to serve.
        """
        return checkpoint

    def is_ready(self) -> bool:
        """Whether the model can take requests; servers from 26.03 on ask."""
        return self._task.is_healthy()

    # --- the parts ---------------------------------------------------------------------------------------------------

    @classmethod
    def _load_settings(cls, config: Mapping[str, Any]) -> LoadedSettings[ModelSettings]:
        from hf_triton.triton_backend.config import parameter_texts

        declared: object = cls.settings_class
        if not (isinstance(declared, type) and issubclass(declared, (ModelSettings, DoorSettings))):
            raise SettingsError(f"settings_class of {OWN_FILE} must be a subclass of hf_triton.settings.ModelSettings")
        return load_settings(parameter_texts(config), os.environ, cls.settings_class)

    def _start(self, settings: ModelSettings, args: Mapping[str, str]) -> None:
        from hf_triton.hub.checkpoint import Placement, load_checkpoint
        from hf_triton.hub.resolve import Hub
        from hf_triton.tasks.text_generation.chat_template import ChatTemplate, load_chat_template
        from hf_triton.tasks.text_generation.task import build_text_generation
        from hf_triton.triton_backend.metrics_sink import MetricsSink
        from hf_triton.triton_backend.process import stop_server

        folder_template = load_chat_template(settings.chat_template, Path(args["model_repository"]))
        hub = Hub(Path(args["model_repository"]), settings, os.environ)
        placement = Placement(args["model_instance_kind"], int(args["model_instance_device_id"]))
        check_hooks(type(self), TritonPythonModel)
        checkpoint = checked_load(self, self.load, load_checkpoint(hub, settings, placement))
        max_prompt_bytes = settings.max_prompt_bytes or BYTES_PER_TOKEN * checkpoint.context_length
        self._limits = Limits(settings.max_prompts, max_prompt_bytes)
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._meter = build_meter(lambda: MetricsSink(labels)) if settings.metrics else NoMeter()
        self._task = build_text_generation(
            checkpoint,
            ChatTemplate(checkpoint.tokenizer, folder_template, max_prompt_bytes),
            settings,
            hooks=self,
            max_prompt_bytes=max_prompt_bytes,
            on_fatal=stop_server,
            observer=self._meter,
        )
        self._meter.start(self._task.load)
        self._door = DoorServer(
            args["model_name"],
            int(args["model_version"]),
            take=self._take,
            begin_request=self._meter.begin_request,
            cancel_own_requests=self._poller.cancel,
        )
        self._door.open()
        _freeze_objects()

    def _take(self, call: InferenceRequest, outlet: ResponseConfig) -> None:
        """Start on a call, or refuse it; nothing is raised."""
        try:
            self._submit(call, outlet)
        except HfTritonError as error:
            call.refuse(error)
        except Exception as error:
            logger.error("taking a request failed: %s", where(error))
            call.refuse(HfTritonError("internal", "the request could not be taken; the server's log says why"))

    def _submit(self, call: InferenceRequest, outlet: ResponseConfig) -> None:
        times = RequestTimes()
        parameters: Mapping[str, object] = call.parameters()
        if is_cancel_request(parameters):
            self._cancel(call)
            return
        inputs = call.inputs()
        parameters = with_named_outputs(parameters, inputs, call.requested_outputs(), outlet.output_names)
        request = parse_request(inputs, parameters, self._limits)
        if request.options.return_timings:
            _check_timings()
        asks_to_stream = outlet.streams if request.options.stream is None else request.options.stream
        self._task.submit(
            request,
            StreamReply(call, request, outlet.output_names, outlet.outbox, times),
            call.is_cancelled,
            timeout_s=call.timeout_s(),
            streams=asks_to_stream and outlet.is_decoupled,
            times=times,
        )

    def _cancel(self, call: InferenceRequest) -> None:
        check_parameter_names(call.parameters())
        if not call.request_id:
            raise RequestError("invalid_parameter", "stop true gives up the request of the same id: say which, by id")
        prompts = call.inputs().get(PROMPT)  # a folder with max_batch_size gets no request without an input
        shape = (1,) if prompts is None else prompts.shape
        empty = encode_strings([""] * math.prod(shape), shape)
        answer = {name: empty for name in self._outlet.output_names if name in TEXT_OUTPUTS}

        def tell_and_answer() -> None:
            cancel_elsewhere(self._engine_name, call.request_id)
            call.answer(answer)

        self._cancel_here(call.request_id)
        self._outlet.outbox.put_long(tell_and_answer)  # another process may let it wait

    def _cancel_here(self, request_id: str) -> None:
        """Give up the requests of an id in this process."""
        self._door.cancel_requests(request_id)


def _check_timings() -> None:
    """Refuse a request for times where no response could tell them."""
    from hf_triton.triton_backend.request import takes_response_parameters

    if not takes_response_parameters():
        raise RequestError(
            "invalid_parameter",
            "return_timings needs a server of Triton 25.02 or newer, and this one is older: leave it out",
        )


def _freeze_objects() -> None:
    """Have the garbage collector pass by the objects that there are now, when all is loaded.

    Torch, transformers and a model are half a million. It would go through them every ten seconds or so of load, for
    0.3 s in which no other thread runs; and as Python ends, of which Triton 24.10's stub dies (segmentation fault).
    """
    gc.collect()
    gc.freeze()
