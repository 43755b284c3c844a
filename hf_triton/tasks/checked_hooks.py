# SPDX-License-Identifier: Apache-2.0
"""Calls hooks: their results are checked, and their exceptions become errors that show no prompt."""

from __future__ import annotations

import inspect
import logging
import math
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import numpy as np

from hf_triton.errors import HfTritonError, LoadError, RequestError, SettingsError, TritonCode, where
from hf_triton.runner.faults import is_fatal, is_memory
from hf_triton.sampling.types import LogitsProcessor
from hf_triton.tasks.hooks import HOOKS, OWN_FILE, Hooks

if TYPE_CHECKING:
    from hf_triton.hub.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

CODE: Final = re.compile("(?!ok$)[a-z][a-z0-9_]{0,63}")
DEVICE_ERRORS: Final = ("CUDA error", "CUBLAS_STATUS", "[enforce fail", "DefaultCPUAllocator")
"""Beginnings of torch's own messages about a device."""


class CheckedHooks:
    """A folder's hooks, their results checked: those of `build_prompt` have `max_prompt_bytes` at most.

    Each raises HfTritonError: the hook's own, or `hook_failed`, which is logged.
    """

    def __init__(self, hooks: Hooks, max_prompt_bytes: float = math.inf) -> None:
        self._hooks = hooks
        self._max_prompt_bytes = max_prompt_bytes
        self._overridden = {
            name for name in HOOKS if name in vars(hooks) or getattr(type(hooks), name) is not getattr(Hooks, name)
        }

    def overrides(self, name: str) -> bool:
        """Whether the folder has this hook, in its class or set by `load`."""
        return name in self._overridden

    def build_prompt(self, text: str) -> str:
        if not self.overrides("build_prompt"):
            return text
        prompt = self._text("build_prompt", text)
        try:
            num_bytes = len(prompt.encode())
        except UnicodeEncodeError:
            raise _wrong_result("build_prompt", "a string that UTF-8 can encode", prompt) from None
        if num_bytes > self._max_prompt_bytes:
            raise RequestError(
                "context_exceeded",
                f"build_prompt of {OWN_FILE} makes {num_bytes} bytes of the prompt, more than the "
                f"{self._max_prompt_bytes} that are accepted (setting max_prompt_bytes)",
                sizes={"bytes": num_bytes, "limit": int(self._max_prompt_bytes)},
            )
        return prompt

    def postprocess(self, text: str) -> str:
        return self._text("postprocess", text) if self.overrides("postprocess") else text

    def _text(self, name: str, text: str) -> str:
        result: str = self._call(name, str, "a string", text)
        return result

    def is_complete(self, text: str) -> bool:
        return bool(self._call("is_complete", (bool, np.bool_), "True or False", text))

    def logits_processor(self) -> LogitsProcessor | None:
        if not self.overrides("logits_processor"):
            return None
        wanted = "a function of token_ids and scores, or None"
        processor = self._call("logits_processor", (Callable, type(None)), wanted)
        return None if processor is None else partial(self._process, processor)

    def _call(self, name: str, kinds: Any, wanted: str, *arguments: str) -> Any:
        """Call a hook, and refuse a result that is not of one of these kinds."""
        with _hook_failures(name, self._hooks):
            result = getattr(self._hooks, name)(*arguments)
        if not isinstance(result, kinds):
            raise _wrong_result(name, wanted, result)
        return result

    def _process(self, processor: LogitsProcessor, token_ids: list[int], scores: Any) -> Any:
        shape, had_nan = list(scores.shape), bool(scores.isnan().any())
        with _hook_failures("logits_processor", self._hooks):
            result = processor(token_ids, scores)
            is_like = isinstance(result, type(scores)) and list(result.shape) == shape
            if is_like and (had_nan or not result.isnan().any()):  # NaN of the model is not the hook's fault
                return scores.copy_(result)
        raise _wrong_result("logits_processor", f"scores of shape {shape}", math.nan if is_like else result)


def checked_load(hooks: Hooks, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint that the folder's `load` returns; peft's wrapper around its model is taken off.

    Raises:
        HfTritonError: It failed, or did not return a checkpoint.
    """
    from hf_triton.runner.lora.model_adapters import without_peft_wrapper

    with _hook_failures("load", hooks):
        result = hooks.load(checkpoint)
        if isinstance(result, type(checkpoint)):
            result.model = without_peft_wrapper(result.model)
            result.model.eval()  # layers that it has added are not in eval mode, nor is a model that it has trained
            return result
    raise _wrong_result("load", "the checkpoint", result)


def check_hooks(model: type[Hooks]) -> None:
    """Refuse a folder's class with a hook that cannot be called as it will be.

    Raises:
        LoadError: Names the hook, and the arguments that it must take.
    """
    for hook in HOOKS:
        if not callable(getattr(model, hook)):
            raise LoadError("hook_failed", f"{hook} of {OWN_FILE} is not a method: define it with def")
        own = inspect.getattr_static(model, hook)
        if not inspect.isfunction(own):  # a static method, or what a library makes of one
            continue
        try:
            inspect.signature(own).bind(*_parameters(hook))
        except TypeError:
            wanted = ", ".join(_parameters(hook))
            raise LoadError(
                "hook_failed", f"{hook} of {OWN_FILE} must take ({wanted}), as docs/hooks.md shows"
            ) from None


def _parameters(hook: str) -> list[str]:
    return list(inspect.signature(getattr(Hooks, hook)).parameters)


def check_encoder_hooks(hooks: Hooks, task: str) -> None:
    """Refuse hooks of text generation in a folder with another task; the SettingsError names one."""
    for name in HOOKS:
        if name != "load" and getattr(type(hooks), name) is not getattr(Hooks, name):
            raise SettingsError(
                f"{name} of {OWN_FILE} changes nothing in a model for {task}: take it out, or write a task_class"
            )


@contextmanager
def _hook_failures(name: str, hooks: Hooks) -> Iterator[None]:
    """Raise what a hook raises as `hook_failed`; our own errors and those of the device pass as they are.

    The exception's message is shown for `load` alone: elsewhere a prompt may be in it.
    """
    try:
        yield
    except BaseException as error:  # a hook may call `sys.exit`, or Rust code that panics
        if isinstance(error, HfTritonError):
            _check_own_error(name, error)
            raise
        if name == "logits_processor" and _is_of_device(error):
            raise
        message = f": {error}" if name == "load" and str(error) else ""
        sentence = f"{name} of {OWN_FILE} failed ({type(error).__name__} {_origin(name, error, hooks)}){message}"
        logger.error("%s; %s", sentence, where(error))
        raise HfTritonError("hook_failed", sentence) from None


def _check_own_error(name: str, error: HfTritonError) -> None:
    """Refuse an error of ours that a hook made and that cannot be sent; its code is a label of the metrics, too."""
    code: object = getattr(error, "code", None)
    if not (isinstance(code, str) and CODE.fullmatch(code)):
        problem = "whose code is not a word of a-z, 0-9 and _, other than ok"
    elif error.triton_code not in get_args(TritonCode):
        problem = f"whose triton_code is not one of {', '.join(get_args(TritonCode))}"
    else:
        return
    logger.error("%s of %s raised an error %s", name, OWN_FILE, problem)
    raise HfTritonError("hook_failed", f"{name} of {OWN_FILE} raised an error {problem}") from None


def _is_of_device(error: BaseException) -> bool:
    """Whether an exception is the device's and not the hook's, whose message may quote a prompt with the same words."""
    if not isinstance(error, Exception) or isinstance(error, MemoryError):
        return False
    is_torch_s = type(error) is not RuntimeError or str(error).startswith(DEVICE_ERRORS)
    return is_torch_s and (is_memory(error) or is_fatal(error))


def _origin(name: str, error: BaseException, hooks: Hooks) -> str:
    """Say where in the folder's own files an exception came from."""
    home = Path(inspect.getfile(type(hooks))).parent
    _, _, *frames = traceback.extract_tb(error.__traceback__)  # without `_hook_failures` and its caller
    if not frames:
        return f"as it was called: must it take ({', '.join(_parameters(name))}), as docs/hooks.md shows?"
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(home)]
    frame = own[-1] if own else frames[0]
    return f"at {Path(frame.filename).name}:{frame.lineno}"


def _wrong_result(name: str, wanted: str, result: object) -> HfTritonError:
    """The error for a result of the wrong kind. It shows the kind alone, because the result may quote a prompt."""
    import torch

    if isinstance(result, torch.Tensor):
        kind = str(list(result.shape))
    elif isinstance(result, float) and math.isnan(result):
        kind = "nan"
    else:
        kind = "None" if result is None else f"a value of type {type(result).__name__}"
    hint = f"is a return missing in {OWN_FILE}?" if result is None else f"see {OWN_FILE}"
    sentence = f"{name} must return {wanted}, got {kind}: {hint}"
    logger.error(sentence)
    return HfTritonError("hook_failed", sentence)
