# SPDX-License-Identifier: Apache-2.0
"""Serve Hugging Face models on Triton Inference Server: a model is a folder.

Importing this loads neither torch, transformers nor Triton: they come when a model is loaded.
"""

from hf_triton.errors import HfTritonError as HfTritonError
from hf_triton.model import TritonPythonModel as TritonPythonModel
from hf_triton.settings import ModelSettings as ModelSettings
from hf_triton.stream_door.model import StreamDoor as StreamDoor

__version__ = "0.2.0"
