# SPDX-License-Identifier: Apache-2.0
"""How much memory a checkpoint takes, from its config and the headers of its files. Reads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from hf_triton.hub.gguf_header import check_gguf
from hf_triton.hub.graph_facts import check_graph
from hf_triton.hub.pretrained import gguf_of, is_quantized, keeps_gguf_bits, loading
from hf_triton.hub.sizes import build_on_meta, read_safetensors_header, read_stored
from hf_triton.hub.snapshot import weight_files
from hf_triton.runner.cpu import small_layers
from hf_triton.settings import ModelSettings

BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
BYTES_IN_FILE: Final = {"F32": 4, "F16": 2, "BF16": 2}
"""The dtypes that are converted at load."""


def loaded_bytes(
    folder: Path, config: Any, model: Any, settings: ModelSettings, *, from_files: bool = True, is_on_cpu: bool = False
) -> int | None:
    """Bytes of a checkpoint's weights in the dtype that they are loaded in; None: nothing on disk says.

    `model` is that of `build_without_weights`, since files may hold tied tensors twice, and those of another head;
    `from_files` says whether files have the dtypes and shapes that are loaded, `is_on_cpu` where the model computes.

    Raises:
        LoadError: A file is damaged, or a graph is not for this machine.
    """
    if settings.runtime != "torch":
        _, file = check_graph(folder, settings)
        return sum(path.stat().st_size for path in folder.glob(f"{file.name}*"))
    gguf = gguf_of(folder, settings)
    if gguf and model is not None and keeps_gguf_bits(settings, is_on_cpu=is_on_cpu):
        from hf_triton.hub.gguf_weights import bytes_as_loaded

        return bytes_as_loaded(check_gguf(folder / gguf, settings.huggingface_model), model)
    from_files = from_files and not gguf
    num_bytes = _bytes_in_safetensors(folder, config, settings) if from_files else None
    is_as_stored = num_bytes is not None and is_quantized(config)
    if model is None or is_as_stored:
        return num_bytes
    if settings.bits is not None and (small := small_layers()):
        return int(small.small_bytes(model, settings.bits))
    return int(model.get_memory_footprint(return_buffers=False))


def _bytes_in_safetensors(folder: Path, config: Any, settings: ModelSettings) -> int | None:
    """Count by the headers of the files; a quantised checkpoint keeps its dtypes."""
    names = weight_files(folder, [path.name for path in folder.iterdir()], allow_pickle=False)
    loaded = None if is_quantized(config) else BYTES.get(dtype_name(config, settings))
    total = 0
    for name in names:
        for tensor in read_safetensors_header(folder / name).values():
            start, end = tensor["data_offsets"]
            size = BYTES_IN_FILE.get(tensor["dtype"])
            total += (end - start) * loaded // size if size and loaded else end - start
    return total if names else None


def read_dtype(folder: Path, config: Any, settings: ModelSettings) -> None:
    """Give a config that states no dtype the one of the checkpoint's files, as a load does."""
    from transformers.modeling_utils import get_state_dict_dtype, load_state_dict

    if config.dtype is not None or settings.load_format != "auto" or gguf_of(folder, settings):
        return
    for name in weight_files(folder, [path.name for path in folder.iterdir()], allow_pickle=False)[:1]:
        read_safetensors_header(folder / name)
        read: Any = get_state_dict_dtype
        config.dtype = read(load_state_dict(folder / name, map_location="meta"))


def build_without_weights(kind: Any, folder: Path, config: Any, settings: ModelSettings) -> Any:
    """A model on torch's device `meta`, in eval mode and its dtype; None: transformers has none, but the own code."""
    import torch

    if type(config) not in kind._model_mapping:
        return None
    dtype = getattr(torch, dtype_name(config, settings), torch.float32)
    with loading("the model", settings):
        return build_on_meta(
            kind, config, read_stored(folder, settings), settings.huggingface_model, dtype=dtype
        ).eval()


def dtype_name(config: Any, settings: ModelSettings) -> str:
    """The dtype that a model is loaded in, as PyTorch names it; `None` if neither setting nor config says."""
    return str(config.dtype).removeprefix("torch.") if settings.dtype == "auto" else settings.dtype
