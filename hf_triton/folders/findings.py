# SPDX-License-Identifier: Apache-2.0
"""What is known of a model folder before it is served. Loads no weights and asks no network."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.filesize import decimal

from hf_triton.engine.decoding import decoding_error
from hf_triton.errors import HfTritonError, HubError, SettingsError
from hf_triton.folders.ensembles import misfits
from hf_triton.folders.folders import (
    CONFIG,
    ensemble_steps,
    folder_defect,
    foreign_kind,
    load_folder_settings,
    parse_config,
)
from hf_triton.folders.model_folder import TASKS
from hf_triton.folders.own_code import own_class
from hf_triton.folders.tensor_check import check_tensors
from hf_triton.folders.weight_bytes import build_without_weights, dtype_name, loaded_bytes, read_dtype
from hf_triton.hub.failures import FOLDER_HINT, explain_download
from hf_triton.hub.kind import find_task
from hf_triton.hub.locate import Hub
from hf_triton.hub.pretrained import gguf_of, is_quantized, keeps_gguf_bits, stored_quantization
from hf_triton.hub.scales import check_scales
from hf_triton.hub.sizes import check_sizes
from hf_triton.hub.spec import CheckpointSpec
from hf_triton.model_process import scarce_shared_memory
from hf_triton.settings import DoorSettings, ModelSettings
from hf_triton.stream_door.door_model import other_folder

if TYPE_CHECKING:
    from hf_triton.runner.outline import Outline

OWN: Final = "1/model.py"
State = Literal["ok", "warning", "error"]
SAMPLE_CHAT: Final = '[{"role": "user", "content": "Hello"}]'
NOT_ON_DISK: Final = "not_on_disk"
"""The code of a checkpoint or an adapter that would be downloaded."""
HARMLESS: Final = (NOT_ON_DISK, "adapter_invalid")
"""Codes of errors of an adapter with which the folder is served all the same."""


@dataclass(frozen=True)
class Finding:
    about: str
    state: State
    finding: str


class FolderCheck:
    """Collects findings about a folder, from its files to its model; what depends on a faulty part is left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self.findings: list[Finding] = []

    @property
    def has_errors(self) -> bool:
        return any(finding.state == "error" for finding in self.findings)

    def run(self) -> None:
        """Look at everything. What the folder's own code, or that of a library, raises is a finding too."""
        try:
            self._run()
        except Exception as error:
            self._add(OWN, "error", f"it cannot be checked ({type(error).__name__} {last_line(error)}: {error})")

    def _run(self) -> None:
        with self._errors("folder"):
            if defect := folder_defect(self._folder):
                raise SettingsError(defect)
        if self.has_errors:
            return
        steps = ensemble_steps(self._folder)
        if steps is not None:
            self._check_ensemble(steps)
            return
        config: dict[str, Any] = {}
        with self._errors(CONFIG):
            if kind := foreign_kind(self._folder):
                self._add("folder", "ok", f"not for hf_triton: {kind}")
                return
            config = parse_config(self._folder)
            self._add(CONFIG, "ok", "Triton can read it")
        own, loaded = None, None
        with self._errors(OWN):
            own = own_class(self._folder)
        if config:
            with self._errors("settings"):
                loaded = load_folder_settings(config, own.settings_class if own else ModelSettings)
        if self.has_errors or own is None or loaded is None:
            return
        changed = [name for name, source in loaded.sources.items() if source != "default"]
        self._add("settings", "ok", f"{', '.join(changed) or 'none'} given, the others have their defaults")
        if isinstance(loaded.settings, ModelSettings):
            with self._errors(OWN):
                self._check_model(own, loaded.settings, config)
        else:
            self._check_door(loaded.settings, config)

    def _check_ensemble(self, steps: list[str]) -> None:
        self._add("ensemble", "ok", f"joins {', '.join(steps)}")
        for name in steps:
            if not (self._folder.parent / name).is_dir():
                self._add("ensemble", "warning", f"there is no folder {name} beside it")
        with self._errors("ensemble"):
            for sentence in misfits(self._folder):
                self._add("ensemble", "error", sentence)

    def _check_door(self, settings: DoorSettings, config: Mapping[str, Any]) -> None:
        with self._errors("ports"):
            _check_ports(config, None)
        with self._errors("stream door"):
            other = other_folder(self._folder.name, settings.stream_of)
            if not config.get("model_transaction_policy", {}).get("decoupled"):
                raise SettingsError("it needs model_transaction_policy { decoupled: true } in its config.pbtxt")
            if (self._folder.parent / other).is_dir():
                self._add("stream door", "ok", f"streams what {other} generates")
            else:
                self._add("stream door", "warning", f"there is no folder {other} beside it, which it streams from")

    def _check_model(self, own: Any, settings: ModelSettings, config: Mapping[str, Any]) -> None:
        from hf_triton.tasks.embeddings import Embeddings, find_modules
        from hf_triton.tasks.registry import folder_task

        task = folder_task(own.task_class, settings, self._folder)
        name = task.declaration.name if task else settings.task or "text-generation"
        hub = Hub(self._folder, settings, os.environ, download=_refuse_download)
        decided = name if task or settings.task or settings.gguf_file else None
        self._check_task(hub.find_config_folder(), decided)
        with self._errors("ports"):
            _check_ports(config, task.declaration if task else None)
        checkpoint = self._find_checkpoint(hub, settings)
        if checkpoint is None:
            return
        self._add("checkpoint", "ok", str(checkpoint / (gguf_of(checkpoint, settings) or "")))
        model_config = None
        with self._errors("model"):
            from hf_triton.hub.checkpoint import context_length
            from hf_triton.hub.pretrained import IMAGE_CLASSIFIER, READ_IMAGES, load_config, load_image_processor
            from hf_triton.hub.processor import load_processor, reads_images

            model_config = load_config(checkpoint, settings)
        if model_config is None:
            return
        with self._errors("settings"):
            context_length(model_config, settings.max_context_length)
        with self._errors("device"):
            if settings.tensor_parallel_size > 1:  # first, as another kind of devices would be wrong too
                _check_ranks(own, checkpoint, self._folder, model_config, settings, config, task)
            _check_devices(config)
        if scarce := scarce_shared_memory():
            self._add("shared memory", "warning", scarce)
        self._check_weights(checkpoint, model_config, settings, task, config)
        if task is not None and issubclass(task, Embeddings):
            with self._errors("modules"):
                find_modules(checkpoint, settings)
        if task is not None and task.auto_class in READ_IMAGES:
            with self._errors("image processor"):
                self._add("image processor", "ok", type(load_image_processor(checkpoint, settings)).__name__)
        if task is None and reads_images(model_config):
            processor, obstacle = load_processor(checkpoint, model_config, settings)
            sentence = f"served for its text alone: {obstacle}" if obstacle else type(processor).__name__
            self._add("images", "warning" if obstacle else "ok", sentence)
        if task is not None and task.auto_class == IMAGE_CLASSIFIER:
            return
        with self._errors("tokenizer"):
            self._check_tokenizer(
                hub.resolve_tokenizer() or checkpoint, settings, renders_chats=name == "text-generation"
            )
        self._check_adapters(hub, settings)

    def _check_task(self, config_folder: Path | None, decided: str | None) -> None:
        """What the folder is for, by its settings and code, or else by what its checkpoint's files say."""
        found = decided or (config_folder and find_task(config_folder)) or "text-generation"
        if decided is None and config_folder is None:
            self._add("task", "warning", f"{found}, unless the checkpoint says otherwise, which is not on disk")
        elif decided is None and found not in TASKS:
            self._add(
                "task", "error", f"the checkpoint is for {found}, which is not served: set task, or another model"
            )
        else:
            self._add("task", "ok", found)

    def _find_checkpoint(self, hub: Hub, settings: ModelSettings) -> Path | None:
        """The checkpoint's folder; None if it is not on disk."""
        with self._errors("checkpoint"):
            try:
                folder = hub.resolve_model()
                hub.resolve_tokenizer()
            except HubError as error:
                if error.code != NOT_ON_DISK:
                    raise
                hint = _folder_hint(self._folder, settings.huggingface_model)
                self._add("checkpoint", "warning", f"{error.sentence}: what depends on it is not checked{hint}")
                return None
            return folder
        return None

    def _check_weights(
        self, checkpoint: Path, model_config: Any, settings: ModelSettings, task: Any, config: Mapping[str, Any]
    ) -> None:
        from hf_triton.hub.pretrained import (
            architecture_names,
            check_attention,
            check_known,
            check_quantization,
            check_small_weights,
            model_class,
        )
        from hf_triton.runner.outline import measure_outline

        kind, auto_class_name = None, task.auto_class if task else None
        with self._errors("model"):
            found = model_class(checkpoint, model_config, settings, auto_class_name)
            architecture = architecture_names(model_config)
            check_known(found, model_config, settings)
            check_attention(found, model_config, settings)
            is_on_cpu = device_of(config).type == "cpu"
            check_small_weights(checkpoint, model_config, settings, auto_class_name, is_on_cpu=is_on_cpu)
            if settings.bits is not None:
                self._add("quantisation", "ok", f"layers are rounded to {settings.weights} at load, one by one")
            if task is not None:
                task.check_config(model_config, settings)
                task.check_files(checkpoint, settings)
            self._add("model", "ok", f"{architecture}, by {found.__name__}")
            kind = found
        if kind is None:
            return
        if task is None:
            self._add("engine", *_engine(settings, model_config, device_of(config)))
        elif settings.runtime == "torch" and (error := decoding_error(settings.decoding, device_of(config))):
            self._add("engine", "error", error)
        is_undone = False
        if gguf_of(checkpoint, settings):
            with self._errors("weights"):
                check_sizes(kind, checkpoint, model_config, settings)
            dtype = dtype_name(model_config, settings).replace("None", "float32")
            is_kept = keeps_gguf_bits(settings, is_on_cpu=device_of(config).type == "cpu")
            how = "layers of 4 to 8 bits keep them, others" if is_kept else "undone at load: the weights"
            self._add("quantisation", "ok", f"GGUF, {how} become {dtype}")
        with self._errors("quantisation"):
            if quantization := check_quantization(model_config, settings):
                method, is_undone, why = quantization
                sentence = f"{method}, undone at load{f', since {why}' if why else ' on this machine'}"
                self._add("quantisation", "warning" if why else "ok", sentence if is_undone else method)
        if settings.has_weights and settings.load_format == "auto" and settings.runtime == "torch":
            with self._errors("weights"):
                check_scales(checkpoint, stored_quantization(model_config), settings)
                if check_tensors(checkpoint, model_config, settings, auto_class_name):
                    self._add("weights", "ok", "the tensors of the model")
        if settings.has_weights:
            with self._errors("memory"):
                read_dtype(checkpoint, model_config, settings)
                model = build_without_weights(kind, checkpoint, model_config, settings)
                is_on_cpu = device_of(config).type == "cpu"
                num_bytes = loaded_bytes(
                    checkpoint, model_config, model, settings, from_files=not is_undone, is_on_cpu=is_on_cpu
                )
                outline = None if task or model_config.is_encoder_decoder or not model else measure_outline(model)
                self._check_memory(num_bytes, model_config, settings, device_of(config), outline)

    def _check_memory(
        self, num_bytes: int | None, model_config: Any, settings: ModelSettings, device: Any, outline: Outline | None
    ) -> None:
        from hf_triton.runner.budget import FreeMemory

        if num_bytes is None:
            self._add("memory", "warning", "its weights are not in safetensors, whose sizes can be read")
            return
        free = FreeMemory().of(device)
        is_before = bool(settings.quantization_config) and not is_quantized(model_config)
        cache = f"; each token of KV cache takes {decimal(outline.bytes_per_token)}" if outline else ""
        if outline and outline.slot_tokens:
            cache += f", the states of a sequence {decimal(outline.slot_tokens * outline.bytes_per_token)}"
        weights = f"weights of {decimal(num_bytes)}{' before they are quantised' if is_before else ''}"
        sentence = f"{weights}, {decimal(free)} free on {device.type}{cache}"
        if num_bytes <= free or is_before:
            self._add("memory", "ok", sentence)
            if device.type == "cuda" and outline:
                self._check_gpu_part(num_bytes, settings, device)
        else:
            self._add("memory", "error", f"{sentence}: use a smaller dtype, quantization_config, or a larger machine")

    def _check_gpu_part(self, num_bytes: int, settings: ModelSettings, device: Any) -> None:
        """What an instance gets of the GPU where it has the least, for its KV cache beside the weights."""
        from hf_triton.hub.neighbours import gpu_part
        from hf_triton.runner.gpu_memory import USED_FRACTION, read_memory

        part = gpu_part(self._folder, None, settings.gpu_memory_fraction)
        room = int(read_memory(device)[1] * part.fraction * USED_FRACTION)
        sentence = f"an instance has {decimal(room)} for weights and KV cache ({part.reason})"
        if num_bytes < room or settings.max_cache_tokens is not None:
            self._add("GPU", "ok", sentence)
        else:
            self._add("GPU", "warning", f"{sentence}, less than its weights take: set gpu_memory_fraction")

    def _check_tokenizer(self, tokenizer_folder: Path, settings: ModelSettings, *, renders_chats: bool) -> None:
        from hf_triton.hub.pretrained import load_tokenizer
        from hf_triton.protocol.chat_request import parse_chat
        from hf_triton.tasks.text_generation.chat_template import ChatTemplate, load_chat_template

        tokenizer = load_tokenizer(tokenizer_folder, settings)
        self._add("tokenizer", "ok", f"{type(tokenizer).__name__} of {len(tokenizer)} tokens")
        if not renders_chats:
            return
        template = load_chat_template(settings.chat_template, self._folder)
        if template is None and tokenizer.chat_template is None:
            self._add("chat template", "warning", "there is none: chats are refused; set chat_template to a file")
            return
        ChatTemplate(tokenizer, template, 1 << 20).render(parse_chat(SAMPLE_CHAT, {}, 1 << 20))
        self._add("chat template", "ok", "renders a chat")

    def _check_adapters(self, hub: Hub, settings: ModelSettings) -> None:
        from hf_triton.runner.lora.adapter_files import read_adapter_config

        for name, source in settings.adapters.items():
            about = f"adapter {name}"
            try:
                folder = hub.resolve_adapter(source)
                read_adapter_config(folder)
                self._add(about, "ok", str(folder))
            except HfTritonError as error:
                self._add(about, "warning" if error.code in HARMLESS else "error", error.sentence)

    def _add(self, about: str, state: State, finding: str) -> None:
        self.findings.append(Finding(about, state, finding))

    @contextlib.contextmanager
    def _errors(self, about: str) -> Iterator[None]:
        """Make an error of a part a finding."""
        try:
            yield
        except HfTritonError as error:
            if all(error.sentence != finding.finding for finding in self.findings):
                self._add(about, "error", error.sentence)


def last_line(error: Exception) -> str:
    """Say where an exception came from: `at model.py:9`."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"at {Path(frames[-1].filename).name}:{frames[-1].lineno}"


def _refuse_download(spec: CheckpointSpec, cache: Path, environment: Mapping[str, str], _: object) -> Path:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(spec.name)
    except HFValidationError as error:
        raise explain_download(error, spec, str(cache), environment) from None
    raise HubError(NOT_ON_DISK, f"{spec.name} is in no cache, and is downloaded at load")


def _folder_hint(folder: Path, name: str) -> str:
    """What to say of a name on the Hub where a folder has it too."""
    return f"; {name} is here as well, and {FOLDER_HINT}" if (folder / name).is_dir() else ""


def _check_ports(config: Mapping[str, Any], declaration: Any) -> None:
    from hf_triton.protocol.declared_ports import check_config
    from hf_triton.protocol.task_declaration import check_task_input, check_task_output

    checks = (
        () if declaration is None else (partial(check_task_input, declaration), partial(check_task_output, declaration))
    )
    check_config({"input": [], "output": [], **config}, *checks)


def device_of(config: Mapping[str, Any]) -> Any:
    """The kind of device that the folder's instances are placed on, by its `instance_group`."""
    import torch

    kinds = {group.get("kind") for group in config.get("instance_group", ())}
    return torch.device("cuda" if torch.cuda.is_available() and kinds != {"KIND_CPU"} else "cpu")


def _check_devices(config: Mapping[str, Any]) -> None:
    """Check that the GPUs that `instance_group` asks for are there."""
    from hf_triton.hub.checkpoint import Placement

    for group in config.get("instance_group", ()):
        if group.get("kind") == "KIND_GPU":
            for gpu in group.get("gpus") or [0]:
                Placement("GPU", gpu).device_map()


def _check_ranks(
    own: Any, checkpoint: Path, folder: Path, model_config: Any, settings: ModelSettings, config: Any, task: Any
) -> None:
    """Check that the model can be divided as the setting says, on this machine."""
    import torch

    from hf_triton.hub.ranks import check_own_parts, check_placement, check_ranks
    from hf_triton.tasks.hooks import Hooks

    groups = config.get("instance_group") or [{}]
    kind = groups[0].get("kind", "KIND_AUTO").removeprefix("KIND_")
    check_placement(settings, kind, sum(group.get("count", 1) for group in groups))
    task_class = task and (task.auto_class or task.declaration.name)
    check_own_parts(settings, folder, has_own_load=own.load is not Hooks.load, task=task_class)
    check_ranks(checkpoint, model_config, settings, is_on_cpu=not torch.cuda.is_available())


def _engine(settings: ModelSettings, config: Any, device: Any) -> tuple[State, str]:
    if config.is_encoder_decoder or settings.engine == "batch":
        why = "the setting says so" if settings.engine == "batch" else "it is an encoder-decoder"
        return "ok", f"batch: {why}"
    if error := decoding_error(settings.decoding, device):
        return "error" if settings.engine == "continuous" else "warning", error
    other = "refused, as ranks run in no other" if settings.tensor_parallel_size > 1 else "batch"
    return "ok", f"continuous, if its logits are those of generate when it is tried at load; else {other}"
