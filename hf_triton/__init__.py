# SPDX-License-Identifier: Apache-2.0
"""Serve Hugging Face models on Triton Inference Server: a model is a folder.

Importing this loads neither torch, transformers nor Triton: they come when a model is loaded. The public names come
when they are asked for, so that a command that needs none of them starts at once.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hf_triton.errors import HfTritonError as HfTritonError
    from hf_triton.model import TritonPythonModel as TritonPythonModel
    from hf_triton.settings import ModelSettings as ModelSettings
    from hf_triton.stream_door.door_model import StreamDoor as StreamDoor

__version__ = "0.2.0"
_MODULES: Final = {
    "HfTritonError": "errors",
    "ModelSettings": "settings",
    "StreamDoor": "stream_door.door_model",
    "TritonPythonModel": "model",
}


def __getattr__(name: str) -> Any:
    if name in ("errors", "model", "settings"):
        return importlib.import_module(f"hf_triton.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'hf_triton' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hf_triton.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
