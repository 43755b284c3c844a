# SPDX-License-Identifier: Apache-2.0
"""TritonPythonModel: what Triton calls, in the order it calls it. Composes a service, computes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_triton.settings import ModelSettings
from hf_triton.tasks.hooks import Hooks

if TYPE_CHECKING:
    from hf_triton.tasks.interface import ResponseConfig
    from hf_triton.triton_backend.service import Service


class TritonPythonModel(Hooks):
    """A Hugging Face model behind Triton's endpoints; subclass it in your model folder's `1/model.py`.

    The smallest model is two lines, and the folder's config.pbtxt says which checkpoint it serves:

        import hf_triton

        class TritonPythonModel(hf_triton.TritonPythonModel):
            "My model."

    Triton calls, in this order: `auto_complete_config` once (in a process that is thrown away), `initialize` once,
    `execute` for every batch of requests, `finalize` once. Nothing has to be overridden. The hooks may be: `load`,
    `build_prompt`, `logits_processor`, `is_complete` and `postprocess`; see `hf_triton.tasks.hooks.Hooks`.

    Attributes:
        settings_class: The settings that config.pbtxt may hold. A subclass of `ModelSettings` adds to them or changes
            their defaults; declare a field as `settings.py` does.
        settings: The folder's settings, from `initialize` on.
    """

    settings_class: ClassVar[type[ModelSettings]] = ModelSettings

    settings: ModelSettings

    _service: Service

    @classmethod
    def auto_complete_config(cls, auto_complete_model_config: Any) -> Any:
        """Add the inputs and outputs that config.pbtxt leaves out.

        Args:
            auto_complete_model_config: Triton's `ModelConfig`.
        """
        from hf_triton.triton_backend.config import complete_config

        return complete_config(auto_complete_model_config, cls.settings_class)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the checkpoint and start the engine.

        Args:
            args: Triton's: `model_config` (JSON), `model_name`, `model_repository` (this model's folder),
                `model_instance_kind`, `model_instance_device_id`, ...

        Raises:
            TritonModelException: The folder cannot be served; one sentence says why, and what to do. Other folders are
                not affected.
        """
        from hf_triton.triton_backend.config import load_failures, read_config
        from hf_triton.triton_backend.process import start_process

        start_process(args["model_name"])
        with load_failures():
            self.settings, config = read_config(json.loads(args["model_config"]), self.settings_class)
            # In a thread that ends, and its OpenMP threads with it: beside a second set of them, the engine's would
            # sleep between any two operations, which makes a step on two cores a third slower.
            with ThreadPoolExecutor(1, thread_name_prefix="hf_triton-load") as loader:
                self._service = loader.submit(start_service, self, self.settings, config, args).result()

    def execute(self, requests: list[Any]) -> None:
        """Start every request and return at once; each is answered when its completions are finished.

        Args:
            requests: Triton's `InferenceRequest`s.
        """
        self._service.execute(requests)

    def finalize(self) -> None:
        """Answer the requests that are left and release the model. Triton calls this when no request is in flight."""
        self._service.close()

    def is_ready(self) -> bool:
        """Whether the model can take requests; servers from 26.03 on ask."""
        return self._service.task.is_healthy()


def start_service(hooks: Hooks, settings: ModelSettings, config: ResponseConfig, args: Mapping[str, str]) -> Service:
    """Load the checkpoint and start a folder's text generation, its metrics and its side of the stream door.

    Args:
        hooks: The folder's own.
        settings: The folder's.
        config: How its requests are answered.
        args: See `TritonPythonModel.initialize`.

    Raises:
        LoadError: The folder cannot be served.
    """
    from hf_triton.hub.checkpoint import Placement, load_checkpoint
    from hf_triton.hub.resolve import Hub
    from hf_triton.stream_door.client import cancel_elsewhere
    from hf_triton.stream_door.server import DoorServer
    from hf_triton.tasks.checked_hooks import check_hooks, checked_load
    from hf_triton.tasks.meter import Meter, build_meter
    from hf_triton.tasks.text_generation.chat_template import load_chat_template
    from hf_triton.tasks.text_generation.response_template import load_response_template
    from hf_triton.tasks.text_generation.task import build_text_generation
    from hf_triton.tasks.tracing import build_request_tracer
    from hf_triton.triton_backend.cancellation import RequestPoller
    from hf_triton.triton_backend.config import count_instances
    from hf_triton.triton_backend.forwarded_headers import find_forwarded_headers
    from hf_triton.triton_backend.metrics_sink import MetricsSink
    from hf_triton.triton_backend.process import Sentinel, freeze_objects, stop_server
    from hf_triton.triton_backend.request import takes_response_parameters
    from hf_triton.triton_backend.service import Service

    name, version, folder = args["model_name"], args["model_version"], Path(args["model_repository"])
    chat_template = load_chat_template(settings.chat_template, folder)
    response_template = load_response_template(settings.response_template, folder)
    check_hooks(type(hooks), TritonPythonModel)
    placement = Placement(args["model_instance_kind"], int(args["model_instance_device_id"]))
    checkpoint = checked_load(hooks, load_checkpoint(Hub(folder, settings, os.environ), settings, placement))
    meter = Meter()
    if settings.metrics:
        num_instances = count_instances(json.loads(args["model_config"]))
        meter = build_meter(lambda: MetricsSink({"model": name, "version": version}), num_instances)
    task = build_text_generation(
        checkpoint,
        settings,
        hooks,
        chat_template=chat_template,
        response_template=response_template,
        on_fatal=stop_server,
        observer=meter,
        returns_timings=takes_response_parameters(),
    )
    meter.start(task.load)
    poller, tracer = RequestPoller(), build_request_tracer(os.environ, name)
    service = Service(
        task,
        config,
        poller=poller,
        meter=meter,
        cancel_elsewhere=partial(cancel_elsewhere, name),
        headers=find_forwarded_headers(settings.forwarded_headers),
        tracer=tracer,
    )
    door = DoorServer(name, int(version), take=service.take, begin_request=meter.begin_request, poller=poller)
    door.open()
    service.closers = (Sentinel(name).dismiss, door.drain, task.close, config.sender.close, door.close, meter.close)
    if tracer is not None:
        service.closers = (*service.closers, tracer.close)
    freeze_objects()
    return service
