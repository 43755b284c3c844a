# SPDX-License-Identifier: Apache-2.0
"""What a folder's own `1/model.py` may change about its texts."""

from __future__ import annotations

from hf_triton.engine.interface import LogitsProcessor


class Hooks:
    """Methods that a subclass may override; as they are, they change nothing.

    They are called in the server's threads, several requests at a time: what they keep must bear that. What one of them
    raises refuses its own request and nobody else's.
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
            for temperature and what draws; a structured output is enforced after. None: nothing changes them.
        """
        return None

    def is_complete(self, text: str) -> bool:
        """A stopping rule beside `stop_strings`: whether a text ends here. Asked whenever it has grown.

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


def is_overridden(hooks: Hooks, name: str) -> bool:
    """Whether a subclass has a method of its own: what nobody overrides costs nothing."""
    return getattr(type(hooks), name) is not getattr(Hooks, name)
