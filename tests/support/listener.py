# SPDX-License-Identifier: Apache-2.0
"""A listener and a sequence group made of functions."""

from collections.abc import Callable
from typing import Any

from hf_triton.engine.sequence import SequenceGroup, SequenceListener
from hf_triton.sampling.params import SamplingParams

CALLBACKS = ("on_finish", "is_cancelled", "on_token", "is_complete", "logits_processor")


class Functions(SequenceListener):
    """Calls functions in place of its methods, without the row."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            takes_row = name in ("on_finish", "on_token", "is_complete")
            setattr(self, name, (lambda row, *rest, call=function: call(*rest)) if takes_row else function)


def group_of(prompt_ids: list[int], params: SamplingParams, **options: Any) -> SequenceGroup:
    """A group whose listener calls those of the options that are in `CALLBACKS`."""
    functions = {name: options.pop(name) for name in CALLBACKS if name in options}
    listens = "on_token" in functions or "is_complete" in functions
    return SequenceGroup(prompt_ids, params, listener=Functions(**functions), listens_to_tokens=listens, **options)
