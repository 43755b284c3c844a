# SPDX-License-Identifier: Apache-2.0
"""Hooks: the methods by which a folder's own `1/model.py` changes what is loaded, generated and returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hf_triton.sampling.types import LogitsProcessor

if TYPE_CHECKING:
    from hf_triton.hub.checkpoint import Checkpoint

OWN_FILE: Final = "the folder's own 1/model.py"


class Hooks:
    """Methods that a subclass may override; as they are, they change nothing.

    Hooks must be thread-safe: `build_prompt` and `postprocess` are called in up to 16 threads each, and may wait for
    other services. `logits_processor` and `is_complete` are called between two decoding steps, which wait for them. An
    exception in a hook refuses its own request and no other.
    """

    def load(self, checkpoint: Checkpoint) -> Checkpoint:
        """Change the loaded checkpoint before it serves: merge an adapter, add a token, replace a layer.

        Args:
            checkpoint: `model` and `tokenizer`, transformers' own objects, on their device; both may be replaced. The
                model serves in eval mode.

        Returns:
            The checkpoint to serve.
        """
        return checkpoint

    def build_prompt(self, text: str) -> str:
        """Build the model's prompt from a client's, such as an instruction around it.

        Args:
            text: One element of `text_input`.

        Returns:
            The prompt. `text_output` still begins with `text`.
        """
        return text

    def logits_processor(self) -> LogitsProcessor | None:
        """Make a function that changes the scores of a sequence's next token. Called once for each sequence.

        Returns:
            A function of the token ids so far, prompt included, and the scores `[vocabulary]`, a float32 tensor that it
            may change; it returns the new scores. Penalties and biases of the request are applied before, temperature,
            sampling and structured output after. None: the scores stay. If the device runs out of memory, the step is
            repeated, and the function called again for the same token.
        """
        return None

    def is_complete(self, text: str) -> bool:
        """A stopping rule beside `stop_strings`: whether a completion ends here.

        Called whenever the text has grown; not for structured output.

        Args:
            text: The completion so far.
        """
        return False

    def postprocess(self, text: str) -> str:
        """Change a finished completion. A folder that overrides this streams each completion as one delta.

        Args:
            text: The completion.
        """
        return text


HOOKS: Final = tuple(name for name in vars(Hooks) if not name.startswith("_"))
