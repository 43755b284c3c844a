# SPDX-License-Identifier: Apache-2.0
"""Imports transformers without the packages that it takes wherever they are installed, and a model does not ask for.

Each costs every model process tenths of a second and tens of megabytes, as do torch's distributed tensors. transformers
looks for a package once in a process, so what is hidden at its import stays so for it; a folder's own code can import
it all the same.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from hf_triton.files import read_text
from hf_triton.hub.compiler_stand_ins import put_stand_ins
from hf_triton.hub.lazy_names import import_lazily
from hf_triton.settings import ModelSettings
from hf_triton.start_clock import start_clock

logger = logging.getLogger(__name__)

IMAGES: Final = "image", "vision", "pil"
SOUND: Final = "audio", "sound", "speech"
ASKED_BY: Final[dict[str, Collection[str]]] = {
    "torchao": ("torchao",),
    "hqq": ("hqq",),
    "scipy": ("scipy",),  # for the losses of object detectors
    "PIL": IMAGES,
    "torchvision": IMAGES,
    "soundfile": SOUND,
    "soxr": SOUND,
    "torchaudio": SOUND,
}
"""Packages, each with the words of a checkpoint's config or of own code that ask for it."""
FOR_TORCH: Final = "torch.compile", "torch._dynamo", "torch.distributed"
"""Words that ask for torch's compiler or distributed tensors."""


def import_transformers(sources: Iterable[Path], settings: ModelSettings) -> None:
    """Import transformers without garbage collection and without what nothing asks for.

    Does nothing if transformers is imported: the folder's own code may have done so.
    """
    if "transformers" in sys.modules:
        return
    text = _own_text(sources, settings)
    asked = {name for name, words in ASKED_BY.items() if name in sys.modules or any(word in text for word in words)}
    if "torchvision" in asked and torchvision_fault():
        asked.remove("torchvision")  # one that is made for another torch breaks transformers' import
    gc.disable()
    try:
        with hidden(ASKED_BY.keys() - asked), contextlib.ExitStack() as stack:
            import torch  # noqa: F401

            start_clock.end("torch")
            if not asked and settings.tensor_parallel_size == 1 and not any(word in text for word in FOR_TORCH):
                put_stand_ins()
                stack.enter_context(_without_distributed())  # which other packages would be told too
            import_lazily()
            from transformers import AutoModel, AutoTokenizer, GenerationMixin, PreTrainedModel  # noqa: F401
            from transformers.processing_utils import ProcessorMixin  # noqa: F401  # looks for those of sound
    finally:
        gc.enable()
    start_clock.end("transformers")
    gc.freeze()  # a quarter of a million objects that live as long as the process


@functools.cache
def torchvision_fault() -> str:
    """Why transformers cannot use torchvision here; empty: it can."""
    if sys.modules.get("torchvision") is None and importlib.util.find_spec("torchvision") is None:
        return "it is not installed"
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # whatever a compiled library of another build does
        import torch

        logger.warning("torchvision is not used: %s", error)
        return f"the installed one does not fit torch {torch.__version__}"
    return ""


def _own_text(sources: Iterable[Path], settings: ModelSettings) -> str:
    """What may ask for a package, in lower case: configs, the setting of quantisation, and Python code."""
    texts = [json.dumps(settings.quantization_config)]
    for folder in sources:
        for path in [folder / "config.json", *folder.glob("*.py"), *folder.glob("1/*.py")]:
            with contextlib.suppress(OSError, ValueError):  # which says more where the file is needed
                texts.append(read_text(path, errors="replace"))
    return "\n".join(texts).lower()


@contextlib.contextmanager
def _without_distributed() -> Iterator[None]:
    """Let torch say that it was built without its distributed package."""
    import torch

    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available


@contextlib.contextmanager
def hidden(packages: Iterable[str]) -> Iterator[None]:
    """Let imports not find these packages, whether they are imported or not."""
    names = list(packages)
    imported = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None, which an import refuses
    try:
        yield
    finally:
        for name in names:
            if sys.modules.get(name, ...) is None:
                del sys.modules[name]
        sys.modules.update(imported)
