# SPDX-License-Identifier: Apache-2.0
"""TritonPythonModel: what Triton calls, in the order it calls it. Composes a folder's service, computes nothing."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from hf_triton.extras import check_extras
from hf_triton.settings import ModelSettings
from hf_triton.start_clock import start_clock
from hf_triton.tasks.hooks import Hooks

if TYPE_CHECKING:
    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.hub.locate import Hub
    from hf_triton.protocol.task_declaration import TaskDeclaration
    from hf_triton.tasks.automatic_speech_recognition import SpeechRecognition
    from hf_triton.tasks.encoder_task import EncoderTask
    from hf_triton.tasks.engine_service import EngineService
    from hf_triton.tasks.interface import ResponseConfig
    from hf_triton.tasks.serving.meter import Meter
    from hf_triton.tasks.task import Task
    from hf_triton.triton_backend.dispatcher import Dispatcher

check_extras("hf_triton.TritonPythonModel", "model")
logger = logging.getLogger(__name__)


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
        task_class: A task of an encoder of the folder's own, see `hf_triton.tasks.encoder_task.EncoderTask`. By default
            the one that the setting `task` or the checkpoint's files name.
        settings: The folder's settings, from `initialize` on.
    """

    settings_class: ClassVar[type[ModelSettings]] = ModelSettings
    task_class: ClassVar[type[EncoderTask[Any]] | None] = None

    settings: ModelSettings

    _dispatcher: Dispatcher

    @classmethod
    def auto_complete_config(cls, auto_complete_model_config: Any) -> Any:
        """Add the inputs and outputs that config.pbtxt leaves out."""
        from hf_triton.triton_backend.config_pbtxt import complete_config

        folder = Path(inspect.getfile(cls)).parents[1]
        return complete_config(
            auto_complete_model_config, cls.settings_class, partial(declared_task, cls.task_class, model_folder=folder)
        )

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the checkpoint and start the engine.

        Args:
            args: Triton's: `model_config` (JSON), `model_name`, `model_repository` (this model's folder),
                `model_instance_kind`, `model_instance_device_id`, ...

        Raises:
            TritonModelException: The folder cannot be served; one sentence says why, and what to do. Other folders are
                not affected.
        """
        from hf_triton.tasks.registry import folder_task
        from hf_triton.triton_backend.config_pbtxt import load_failures, read_settings, response_config
        from hf_triton.triton_backend.process import Sentinel, loading_process

        start_clock.end("interpreter")
        with loading_process(args["model_name"]), load_failures():
            config = json.loads(args["model_config"])
            self.settings = read_settings(config, self.settings_class)
            task = folder_task(self.task_class, self.settings, Path(args["model_repository"]))
            responses = response_config(config, self.settings, None if task is None else task.declaration)
            # In a thread that ends, and its OpenMP threads with it: beside a second set of them, the engine's would
            # sleep between any two operations, which makes a step on two cores a third slower.
            with ThreadPoolExecutor(1, thread_name_prefix="hf_triton-load") as loader:
                self._dispatcher = loader.submit(start_dispatcher, self, task, responses, args).result()
        self._dispatcher.closing.callback(Sentinel(args["model_name"]).dismiss)

    def execute(self, requests: list[Any]) -> None:
        """Start each of Triton's requests and return at once; one is answered when its completions are finished."""
        self._dispatcher.execute(requests)

    def finalize(self) -> None:
        """Answer the requests that are left and release the model. Triton calls this when no request is in flight."""
        self._dispatcher.close()

    def is_ready(self) -> bool:
        """Whether the model can take requests; servers from 26.03 on ask."""
        return self._dispatcher.service.is_healthy()


def declared_task(own: type[Task] | None, settings: ModelSettings, model_folder: Path) -> TaskDeclaration | None:
    """What the folder's task takes and gives; None for text generation. Arguments as `folder_task` has them.

    What a checkpoint of the Hub does stands in its small files, which are downloaded if no cache has them.

    Raises:
        LoadError: They cannot be.
    """
    from hf_triton.hub.locate import Hub
    from hf_triton.tasks.registry import VARIANTS, folder_task

    if own is None and settings.task in (None, *(task for task, _ in VARIANTS)):
        Hub(model_folder, settings, os.environ).fetch_config()
    task = folder_task(own, settings, model_folder)
    return None if task is None else task.declaration


def start_dispatcher(
    model: TritonPythonModel, task_class: type[Task] | None, config: ResponseConfig, args: Mapping[str, str]
) -> Dispatcher:
    """Load the checkpoint and start a folder's service, its metrics and its side of the stream door.

    Raises:
        LoadError: The folder cannot be served.
    """
    from hf_triton.runner.cpu import give_back_freed_memory
    from hf_triton.stream_door.client import cancel_elsewhere, sleep_elsewhere
    from hf_triton.stream_door.door_server import DoorServer
    from hf_triton.tasks.checked_hooks import check_hooks
    from hf_triton.tasks.serving.meter import Meter, build_meter
    from hf_triton.tasks.serving.tracing import build_request_tracer
    from hf_triton.triton_backend.cancellation import RequestPoller
    from hf_triton.triton_backend.config_pbtxt import count_instances
    from hf_triton.triton_backend.dispatcher import Dispatcher
    from hf_triton.triton_backend.forwarded_headers import find_forwarded_headers
    from hf_triton.triton_backend.metrics_sink import MetricsSink
    from hf_triton.triton_backend.process import freeze_objects

    name, version, settings = args["model_name"], args["model_version"], model.settings
    check_hooks(type(model))
    meter = Meter()
    if settings.metrics:
        num_instances = count_instances(json.loads(args["model_config"]))
        meter = build_meter(lambda: MetricsSink({"model": name, "version": version}), num_instances)
    start = start_text_generation if task_class is None else partial(start_task, task_class)
    service = start(model, settings, args, meter)
    meter.start(service.load)
    poller, tracer, closing = RequestPoller(), build_request_tracer(os.environ, name), ExitStack()
    dispatcher = Dispatcher(
        service,
        config,
        poller=poller,
        meter=meter,
        cancel_elsewhere=partial(cancel_elsewhere, name),
        sleep_elsewhere=partial(sleep_elsewhere, name),
        closing=closing,
        headers=find_forwarded_headers(settings.forwarded_headers),
        tracer=tracer,
    )
    door = DoorServer(
        name,
        int(version),
        take=dispatcher.take,
        begin_request=meter.begin_request,
        poller=poller,
        set_sleeping=service.set_sleeping,
    )
    door.open()
    if tracer is not None:
        closing.callback(tracer.close)
    for close in (meter.close, door.close, config.sender.close, service.close, door.drain):  # the last is called first
        closing.callback(close)
    freeze_objects()
    give_back_freed_memory()
    start_clock.end("service")
    logger.info("started %s", start_clock.describe())
    if service.info is not None:
        logger.info("loaded: %s", service.info.describe(service.load().max_used_tokens))
    return dispatcher


def start_text_generation(
    hooks: Hooks, settings: ModelSettings, args: Mapping[str, str], meter: Meter
) -> EngineService:
    """Load a checkpoint that generates text and start its engine. Arguments and errors as in `start_dispatcher`."""
    from hf_triton.hub.locate import Hub
    from hf_triton.hub.neighbours import gpu_part
    from hf_triton.tasks.text_generation.chat_template import load_chat_template
    from hf_triton.tasks.text_generation.response_template import load_response_template
    from hf_triton.tasks.text_generation.service import build_text_generation
    from hf_triton.triton_backend.process import stop_server
    from hf_triton.triton_backend.triton_request import takes_response_parameters

    folder = Path(args["model_repository"])
    chat_template = load_chat_template(settings.chat_template, folder)
    response_template = load_response_template(settings.response_template, folder)
    hub = Hub(folder, settings, os.environ)
    gpu = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
    return build_text_generation(
        load(hooks, hub, settings, args),
        settings,
        hooks,
        hub,
        chat_template=chat_template,
        response_template=response_template,
        on_fatal=stop_server,
        observer=meter,
        returns_timings=takes_response_parameters(),
        gpu_part=gpu_part(folder, gpu, settings.gpu_memory_fraction),
    )


def start_task(
    task_class: type[Task], hooks: Hooks, settings: ModelSettings, args: Mapping[str, str], meter: Meter
) -> EngineService:
    """Load the model of a task and start its engine. Arguments and errors as in `start_dispatcher`."""
    from hf_triton.hub.locate import Hub
    from hf_triton.tasks.checked_hooks import check_encoder_hooks
    from hf_triton.tasks.encoder_task import EncoderTask
    from hf_triton.triton_backend.process import stop_server

    check_encoder_hooks(hooks, task_class.declaration.name)
    hub = Hub(Path(args["model_repository"]), settings, os.environ)
    checkpoint = load(hooks, hub, settings, args, task_class.auto_class)
    if issubclass(task_class, EncoderTask):
        from hf_triton.tasks.encoder_service import build_encoder_service

        return build_encoder_service(task_class, checkpoint, settings, on_fatal=stop_server, meter=meter, hub=hub)
    from hf_triton.tasks.speech_service import build_speech_service

    speech = cast("type[SpeechRecognition]", task_class)
    return build_speech_service(speech, checkpoint, settings, on_fatal=stop_server, meter=meter)


def load(
    hooks: Hooks, hub: Hub, settings: ModelSettings, args: Mapping[str, str], auto_class: str | None = None
) -> Checkpoint:
    """The folder's checkpoint on the device that Triton chose, as the hook `load` returns it."""
    from hf_triton.hub.checkpoint import Placement, load_checkpoint
    from hf_triton.tasks.checked_hooks import checked_load

    placement = Placement(args["model_instance_kind"], int(args["model_instance_device_id"]))
    if settings.tensor_parallel_size > 1:
        from hf_triton.hub.ranks import check_own_parts, check_placement
        from hf_triton.triton_backend.config_pbtxt import count_instances

        has_own_load = type(hooks).load is not Hooks.load
        check_own_parts(settings, hub.model_folder, has_own_load=has_own_load, task=auto_class)
        check_placement(settings, placement.kind, count_instances(json.loads(args["model_config"])))
    return checked_load(hooks, load_checkpoint(hub, settings, placement, auto_class))
