# SPDX-License-Identifier: Apache-2.0
"""A folder's config.pbtxt: settings, the ports that are completed, and the errors that Triton reports of a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from hf_triton.errors import HfTritonError, SettingsError
from hf_triton.protocol.declared_ports import check_config, missing_ports
from hf_triton.protocol.task_declaration import TaskDeclaration, check_task_input, check_task_output, missing_task_ports
from hf_triton.settings import AnySettings, LoadedSettings, load_settings
from hf_triton.tasks.interface import ResponseConfig
from hf_triton.tasks.serving.sender import ResponseSender
from hf_triton.triton_backend.process import use_started_folder

logger = logging.getLogger(__name__)


@contextmanager
def load_failures() -> Iterator[None]:
    """Raise our own errors as the exception that Triton reports as the reason why a folder is not served."""
    try:
        yield
    except HfTritonError as error:
        raise pb_utils.TritonModelException(str(error)) from None
    except UnicodeEncodeError as error:
        raise pb_utils.TritonModelException(
            str(SettingsError(f"the path {error.object!a} is not ASCII, and Triton's Python opens no other: rename it"))
        ) from None


Declare = Callable[[Any], TaskDeclaration | None]
"""Finds the declaration of a task by the folder's settings; None for text generation."""


def complete_config(
    model_config: Any, settings_class: type[AnySettings], declare: Declare = lambda settings: None
) -> Any:
    """Add the inputs and outputs that config.pbtxt leaves out to Triton's `ModelConfig`."""
    use_started_folder()
    config = model_config.as_dict()
    with load_failures():
        settings = _load_settings(config, settings_class).settings
        task = declare(settings)
        if task is None:
            inputs, outputs = missing_ports(config, settings.parameters_as_inputs)
        else:
            inputs, outputs = missing_task_ports(task, config, settings.parameters_as_inputs)
    for port in inputs:
        model_config.add_input(port)
    for port in outputs:
        model_config.add_output(port)
    return model_config


def read_settings(config: Mapping[str, Any], settings_class: type[AnySettings]) -> AnySettings:
    """A folder's settings, which are logged; raises SettingsError if a setting cannot be used."""
    loaded = _load_settings(config, settings_class)
    logger.info("settings: %s", loaded.describe() or "all have their defaults")
    return loaded.settings


def response_config(
    config: Mapping[str, Any], settings: AnySettings, task: TaskDeclaration | None = None
) -> ResponseConfig:
    """How a folder's requests are answered; raises SettingsError if a port cannot be used."""
    check_config(config, *(() if task is None else (partial(check_task_input, task), partial(check_task_output, task))))
    is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
    if settings.stream and not is_decoupled:
        logger.warning("the setting stream does nothing without model_transaction_policy { decoupled: true }")
    return ResponseConfig(
        output_names=[port["name"] for port in config["output"]],
        is_decoupled=is_decoupled,
        streams=settings.stream,
        sender=ResponseSender(),
        is_batching=config["max_batch_size"] > 0,
    )


def count_instances(config: Mapping[str, Any]) -> int:
    """Instances of a version of a folder; at least 1."""
    groups = config.get("instance_group", [])
    count: int = sum(group.get("count", 1) * max(1, len(group.get("gpus", []))) for group in groups)
    return max(count, 1)


def _load_settings(config: Mapping[str, Any], settings_class: type[AnySettings]) -> LoadedSettings[AnySettings]:
    parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
    return load_settings(parameters, os.environ, settings_class)
