# SPDX-License-Identifier: Apache-2.0
"""What a folder's own `1/model.py` may change about its texts."""

from __future__ import annotations

import difflib
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

from hf_triton.errors import HfTritonError, LoadError, RequestError, TritonCode, where
from hf_triton.runner.faults import is_fatal, is_memory, is_raised_in_python
from hf_triton.sampling.types import LogitsProcessor

if TYPE_CHECKING:
    from hf_triton.hub.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

OWN_FILE: Final = "the folder's own 1/model.py"
CODE: Final = re.compile("(?!ok$)[a-z][a-z0-9_]{0,63}")
LIKENESS: Final = 0.75  # of a method's name to a hook's, by difflib; `make_prompt` is not `build_prompt`, by 0.61


class Hooks:
    """Methods that a subclass may override; as they are, they change nothing.

    What they keep must bear several requests at a time: `build_prompt` and `postprocess` are called in up to 16 threads
    each, and may wait for other services. `logits_processor` and `is_complete` are called between two tokens of all
    running texts, which wait for them. What one of them raises refuses its own request and nobody else's.
    """

    def build_prompt(self, text: str) -> str:
        """What the model is given for a prompt, such as an instruction around it.

        Args:
            text: One element of `text_input`.

        Returns:
            The prompt. `text_output` begins with `text` all the same.
        """
        return text

    def logits_processor(self) -> LogitsProcessor | None:
        """What changes the scores of a text's next token; made once for each text, so it may keep a state.

        Returns:
            A function of the text's token ids so far, prompt included, and the scores `[vocabulary]`, a float32 tensor
            that it may change; it returns the scores to go by. The request's own settings have been applied before, but
            for temperature and what draws; a structured output is enforced after. None: nothing changes them. Where a
            step fails for want of the device's memory it is repeated, and the function called for the same token again.
        """
        return None

    def is_complete(self, text: str) -> bool:
        """A stopping rule beside `stop_strings`: whether a text ends here. Asked whenever it has grown.

        Not asked of structured output, which it would cut.

        Args:
            text: The continuation so far.
        """
        return False

    def postprocess(self, text: str) -> str:
        """What is answered for a complete text. A folder that overrides this streams each text as one piece.

        Args:
            text: The continuation.
        """
        return text


HOOKS: Final = ("load", *(name for name in vars(Hooks) if not name.startswith("_")))


class CheckedHooks:
    """A folder's hooks as they are called here: what they return is checked, and what fails in them is called theirs.

    Each of them raises HfTritonError: what the hook itself raised of that kind, else `hook_failed`, which is logged.

    Args:
        hooks: The folder's own.
        max_prompt_bytes: Of a prompt that a folder makes.
    """

    def __init__(self, hooks: Hooks, max_prompt_bytes: float = math.inf) -> None:
        self._hooks = hooks
        self._max_prompt_bytes = max_prompt_bytes
        methods = (name for name in HOOKS if hasattr(Hooks, name))
        self._overridden = {name for name in methods if _is_own(hooks, name)}

    def overrides(self, name: str) -> bool:
        """Whether the folder has a method of its own: what nobody overrides costs nothing."""
        return name in self._overridden

    def build_prompt(self, text: str) -> str:
        """See `Hooks`."""
        if not self.overrides("build_prompt"):
            return text
        prompt = self._text("build_prompt", self._hooks.build_prompt, text)
        try:
            num_bytes = len(prompt.encode())
        except UnicodeEncodeError:
            raise _wrong_result("build_prompt", "a text that UTF-8 can hold", prompt) from None
        if num_bytes > self._max_prompt_bytes:
            raise RequestError(
                "context_exceeded",
                f"build_prompt of {OWN_FILE} makes {num_bytes} bytes of the prompt, more than the "
                f"{self._max_prompt_bytes} that are accepted (setting max_prompt_bytes)",
            )
        return prompt

    def postprocess(self, text: str) -> str:
        """See `Hooks`."""
        return self._text("postprocess", self._hooks.postprocess, text) if self.overrides("postprocess") else text

    def _text(self, name: str, hook: Callable[[str], object], text: str) -> str:
        with _blaming(name, self._hooks):
            result = hook(text)
        if not isinstance(result, str):
            raise _wrong_result(name, "a text", result)
        return result

    def is_complete(self, text: str) -> bool:
        """See `Hooks`."""
        with _blaming("is_complete", self._hooks):
            result: object = self._hooks.is_complete(text)
        if not isinstance(result, (bool, np.bool_)):
            raise _wrong_result("is_complete", "True or False", result)
        return bool(result)

    def logits_processor(self) -> LogitsProcessor | None:
        """See `Hooks`. It and what it returns leave it to the engine where the device has no memory, or is lost."""
        if not self.overrides("logits_processor"):
            return None
        with _blaming("logits_processor", self._hooks, passes=_is_the_engine_s):
            processor = self._hooks.logits_processor()
        if processor is None:
            return None
        if not callable(processor):
            raise _wrong_result("logits_processor", "a function of token_ids and scores, or None", processor)
        return partial(self._process, processor)

    def _process(self, processor: LogitsProcessor, token_ids: list[int], scores: Any) -> Any:
        shape, had_nan = list(scores.shape), bool(scores.isnan().any())
        with _blaming("logits_processor", self._hooks, passes=_is_the_engine_s):
            result = processor(token_ids, scores)
            is_like = isinstance(result, type(scores)) and list(result.shape) == shape
            if is_like and (had_nan or not result.isnan().any()):  # the model's own nan is not the hook's fault
                return scores.copy_(result)
        raise _wrong_result("logits_processor", f"scores of shape {shape}", math.nan if is_like else result)


def _is_own(hooks: Hooks, name: str) -> bool:
    """Whether a method is the folder's, of its class or put into the object by `load`."""
    return name in vars(hooks) or getattr(type(hooks), name) is not getattr(Hooks, name)


def checked_load(hooks: Hooks, load: Callable[[Checkpoint], Checkpoint], checkpoint: Checkpoint) -> Checkpoint:
    """What the folder's own `load` makes of a checkpoint.

    Raises:
        HfTritonError: It failed, or did not return a checkpoint.
    """
    with _blaming("load", hooks, shows_message=True):
        result = load(checkpoint)
        if isinstance(result, type(checkpoint)):
            result.model.eval()  # layers that it has added are not, nor is what it has trained
            return result
    raise _wrong_result("load", "the checkpoint", result)


def check_hooks(model: type[Hooks], base: type[Hooks]) -> None:
    """Refuse a hook that is no method, and log what has a name that is nearly a hook's: nobody calls that.

    Args:
        model: The folder's own class.
        base: What it is a subclass of.

    Raises:
        LoadError: A hook cannot be called.
    """
    for hook in HOOKS:
        if not callable(getattr(model, hook)):
            raise LoadError("hook_failed", f"{hook} of {OWN_FILE} is not a method: define it with def")
    unused = [hook for hook in HOOKS if getattr(model, hook) is getattr(base, hook)]
    added = (name for name in dir(model) if not (name.startswith("_") or hasattr(base, name)))
    for name in filter(lambda each: callable(getattr(model, each)), added):
        for hook in difflib.get_close_matches(name.lower(), unused, n=1, cutoff=LIKENESS):
            logger.warning("nothing calls the method '%s' of %s: did you mean '%s'?", name, OWN_FILE, hook)


@contextmanager
def _blaming(
    name: str,
    hooks: Hooks,
    *,
    passes: Callable[[BaseException], bool] = lambda error: isinstance(error, HfTritonError),
    shows_message: bool = False,
) -> Iterator[None]:
    """Make `hook_failed` of what a hook raises.

    Args:
        name: The hook's.
        hooks: Whose it is.
        passes: What goes through as it is.
        shows_message: Whether the exception's own words may be seen: there is no prompt that they could quote.
    """
    try:
        yield
    except BaseException as error:  # a panic in a library's Rust code is no Exception
        if passes(error):
            if isinstance(error, HfTritonError):
                _check(error, name)
            raise
        message = f": {error}" if shows_message and str(error) else ""
        sentence = f"{name} of {OWN_FILE} failed ({type(error).__name__} {_place(error, hooks)}){message}"
        logger.error("%s; %s", sentence, where(error))
        raise HfTritonError("hook_failed", sentence) from None


def _check(error: HfTritonError, name: str) -> None:
    """Refuse a folder's own error that cannot be answered: its code becomes a label of the metrics, too."""
    code: object = getattr(error, "code", None)
    fault = None
    if not (isinstance(code, str) and CODE.fullmatch(code)):
        fault = "whose code is not a word of a-z, 0-9 and _, other than ok"
    elif error.triton_code not in get_args(TritonCode):
        fault = f"whose triton_code is not one of {', '.join(get_args(TritonCode))}"
    elif not _has_text(error):
        fault = "that has no text: does its __str__ work?"
    if fault is not None:
        sentence = f"{name} of {OWN_FILE} raised an error {fault}"
        logger.error(sentence)
        raise HfTritonError("hook_failed", sentence) from None


def _has_text(error: HfTritonError) -> bool:
    try:
        return bool(str(error)) and isinstance(error.sentence, str)
    except Exception:  # the folder's own __str__, or no sentence
        return False


def _is_the_engine_s(error: BaseException) -> bool:
    if isinstance(error, HfTritonError):
        return True
    if isinstance(error, MemoryError) or (type(error) is RuntimeError and is_raised_in_python(error)):
        return False  # and not the device's, whatever words of a prompt it quotes
    return isinstance(error, Exception) and (is_memory(error) or is_fatal(error))


def _place(error: BaseException, hooks: Hooks) -> str:
    """Where in the folder's own files an exception came through last."""
    home = Path(inspect.getfile(type(hooks))).parent
    _, _, *frames = traceback.extract_tb(error.__traceback__)  # without `_blaming` and its caller
    if not frames:
        return "as it was called: does it take the arguments that the README shows?"
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(home)]
    frame = own[-1] if own else frames[0]
    return f"at {Path(frame.filename).name}:{frame.lineno}"


def _wrong_result(name: str, wanted: str, result: object) -> HfTritonError:
    """The error for a result of the wrong kind; it shows the kind alone, as the result may quote a prompt."""
    hint = f"is a return missing in {OWN_FILE}?" if result is None else f"see {OWN_FILE}"
    sentence = f"{name} must return {wanted}, got {_kind(result)}: {hint}"
    logger.error(sentence)
    return HfTritonError("hook_failed", sentence)


def _kind(result: object) -> str:
    import torch

    if isinstance(result, torch.Tensor):
        return str(list(result.shape))
    if isinstance(result, float) and math.isnan(result):
        return "nan"
    return "None" if result is None else f"a value of type {type(result).__name__}"
