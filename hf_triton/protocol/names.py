# SPDX-License-Identifier: Apache-2.0
"""Names that model folders and clients of Triton share. Imports nothing, so that a command starts at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal

PROMPT: Final = "text_input"
PROMPT_TOKEN_IDS: Final = "prompt_token_ids"
MESSAGES: Final = "messages"
IMAGE: Final = "image"
TEXT: Final = "text_output"
LEGACY_TEXT: Final = "text"
"""The output's name in the Triton tutorial; filled too if config.pbtxt declares it."""
TEXT_OUTPUTS: Final = (TEXT, LEGACY_TEXT)
PROMPT_ALIASES: Final = ("args", "text_inputs")
"""What MLServer's clients call the input of prompts."""
TEXT_ALIASES: Final = ("args", "text_input", "text_inputs", "input", "inputs", "TEXT")
"""What clients of other servers call the input `text` of encoders."""
INPUT_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    PROMPT: PROMPT_ALIASES,
    "text": (*TEXT_ALIASES, "input_text", "sequences"),
    "documents": ("document", "texts", "passages"),
    IMAGE: ("images",),
}
"""The names that a folder may declare for an input in place of its own, of all tasks."""
JSON_OUTPUT: Final = "output"
"""One JSON text for each row, under the name that MLServer gives it."""
DOOR_SUFFIX: Final = "_stream"
"""What a stream door's name has behind its model's."""
CANCEL: Final = "cancel"
"""The parameter of a request that cancels those of its id."""
TaskName = Literal[
    "text-generation",
    "embeddings",
    "rerank",
    "text-classification",
    "token-classification",
    "question-answering",
    "fill-mask",
    "zero-shot-classification",
    "feature-extraction",
    "sparse-embeddings",
    "tokenization",
    "image-classification",
    "summarization",
    "translation",
    "text2text-generation",
    "automatic-speech-recognition",
]
TEXT_TO_TEXT: Final[tuple[TaskName, ...]] = ("summarization", "translation", "text2text-generation")
"""Tasks that generate text with an encoder-decoder, see `hf_triton.tasks.text_generation.text_to_text`."""
MODEL_SETTINGS: Final = frozenset({"huggingface_model", "task"})
"""A folder that sets one of them has a model of its own; a stream door does not."""
SERVER_VARIABLE: Final = "HF_TRITON_SERVER"
"""The command line reads the address of a running server from it. No setting."""


def declared_input(name: str, declared: Collection[str], required: Collection[str]) -> str | None:
    """What a folder calls one of its inputs, required ones before others; None: it has none of that kind."""
    names = (name, *INPUT_ALIASES.get(name, ()))
    return next((each for each in names if each in required), next((each for each in names if each in declared), None))
