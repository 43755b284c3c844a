# SPDX-License-Identifier: Apache-2.0
"""Imports transformers without the packages that it takes wherever they are installed, and a model does not ask for.

Each costs every model process tenths of a second and tens of megabytes. transformers looks for a package once in a
process, so what is hidden at its import stays so for it; a folder's own code can import it all the same.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hf_triton.settings import ModelSettings

COMPILER: Final = "torch._dynamo"
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


@contextlib.contextmanager
def light_imports(sources: Iterable[Path], settings: ModelSettings) -> Iterator[None]:
    """Import transformers without garbage collection, and it and the model inside without what nothing asks for.

    Does nothing if transformers is imported: the folder's own code may have done so.

    Args:
        sources: The folders of the model, of its checkpoint and of its tokenizer.
        settings: The folder's.
    """
    if "transformers" in sys.modules:
        yield
        return
    text = _own_text(sources, settings)
    unasked = [name for name, words in ASKED_BY.items() if name not in sys.modules and not any(map(text.count, words))]
    may_compile = COMPILER in sys.modules or settings.quantization_config or "compile" in text or "quant" in text
    with replaced({} if may_compile else _compiler_stand_ins()):
        gc.disable()
        try:
            with replaced(dict.fromkeys(unasked)):
                _forget_distribution()
                from transformers import AutoModel, AutoTokenizer, GenerationMixin, PreTrainedModel  # noqa: F401
        finally:
            gc.enable()
        gc.freeze()  # a quarter of a million objects that live as long as the process
        yield


def _own_text(sources: Iterable[Path], settings: ModelSettings) -> str:
    """What may ask for a package, in lower case: configs, the setting of quantisation, and Python code."""
    texts = [json.dumps(settings.quantization_config)]
    for folder in sources:
        for path in [folder / "config.json", *folder.glob("*.py"), *folder.glob("1/*.py")]:
            with contextlib.suppress(OSError):  # which says more where the file is needed
                texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(texts).lower()


def _forget_distribution() -> None:
    """Let transformers remember that PyTorch has no `distributed`: no model here is sharded over processes."""
    from torch import distributed
    from transformers.utils.import_utils import is_torch_distributed_available

    is_available, distributed.is_available = distributed.is_available, lambda: False
    try:
        is_torch_distributed_available()
    finally:
        distributed.is_available = is_available


def _compiler_stand_ins() -> dict[str, ModuleType]:
    """What transformers and the device `meta` import of torch's compiler: marks that matter to compiled code alone.

    The compiler itself is imported, in their place, as soon as something uses more of it.
    """

    def unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
        return function or unmarked

    def load(name: str, attribute: str) -> Any:
        if attribute == "__file__":  # which `inspect` asks of every module
            raise AttributeError(attribute)
        for module in (compiler, masks):
            sys.modules.pop(module.__name__, None)
        return getattr(importlib.import_module(name), attribute)

    compiler, masks = ModuleType(COMPILER), ModuleType(f"{COMPILER}._trace_wrapped_higher_order_op")
    vars(compiler).update(dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), unmarked))
    vars(compiler)["__getattr__"] = functools.partial(load, COMPILER)
    vars(masks)["TransformGetItemToIndex"] = lambda: load(masks.__name__, "TransformGetItemToIndex")()
    return {module.__name__: module for module in (compiler, masks)}


@contextlib.contextmanager
def replaced(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Let imports find these modules, and nothing in place of None, whether they are imported or not."""
    imported = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)  # type: ignore[arg-type]  # None, which an import refuses
    try:
        yield
    finally:
        for name, module in modules.items():
            if sys.modules.get(name) is module:
                sys.modules.pop(name, None)
        sys.modules.update(imported)
