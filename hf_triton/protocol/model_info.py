# SPDX-License-Identifier: Apache-2.0
"""What a model's process says of its model: the gateway and the commands read it, and guess nothing from the ports.

A request with the parameter `model_info` true is answered with it, as JSON in the output `output`: at once, however
full the queue is, and outside the counts of requests.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MODEL_INFO: Final = "model_info"
"""The parameter."""
ENGINES: Final[Mapping[str, str]] = {"continuous": "continuous batching", "batch": "a batch at a time"}
"""Engines of text generation, in words."""


@dataclass(frozen=True)
class ModelInfo:
    """A model as its process has loaded it; see the fields."""

    task: str
    """The task that the setting `task` names, or the folder's own."""
    model: str
    """The model's name on the Hub, or that of its folder."""
    context_length: int
    """Maximum tokens of a prompt and its completion together; of an encoder, of a text with its special tokens; 0: it
    reads no text."""
    engine: str
    """`continuous` or `batch`; of an encoder, its `runtime`."""
    dtype: str
    """The type of the weights: `bfloat16`; `int4` or `int8`, the fewest bits of a layer, if some are kept so."""
    device: str
    """The place of the first weights: `cpu`, `cuda:0`."""
    memory_bytes: int
    """Bytes of the weights; 0 if they are not known."""
    max_prompts: int
    """Prompts or texts that one request may hold."""
    max_waiting_prompts: int
    """Prompts or texts that may wait."""
    template_variables: tuple[str, ...] | None = None
    """The variables of the chat template that `chat_template_kwargs` may set; None: there is no chat template."""
    reads_tools: bool = False
    """Whether the chat template reads `tools`."""
    reasons: bool = False
    """Whether messages may have `reasoning_content`."""
    architecture: str = ""
    """The model's class, `LlamaForCausalLM`; empty: it is not known."""
    defaults: Mapping[str, float] | None = None
    """`temperature` (0: greedy), `top_p` and `max_tokens` of a request that names none; None: it generates no text."""
    inputs: tuple[str, ...] = ()
    """The inputs of texts or files that a request gives."""
    mask_token: str = ""
    """What stands in a text for a token to fill in; empty: the task fills none."""
    slower: tuple[str, ...] = ()
    """Why it runs slower than it could, what was measured and what it costs: `runs eagerly, ...`; a sentence each."""
    images: str = ""
    """How prompts with images are computed: `continuous`, `generate`, or `no`; empty: it generates no text, or is an
    older process that takes none."""
    image_obstacle: str = ""
    """Why a model that could read images takes none, or has them computed by `generate`; empty: neither is so."""
    error_form: int = 0
    """The version of errors as data that a request may ask for by the parameter `error_form`; 0: none."""
    ranks: tuple[Mapping[str, Any], ...] = ()
    """Of a model in ranks, what each holds, rank 0 first: `device`, `weights_bytes`, and `cache_bytes`, those of all
    blocks of its KV cache; empty: it is whole."""
    is_sleeping: bool | None = None
    """Whether it sleeps, see `hf_triton.protocol.sleep`; asking does not wake it. None: a process that cannot."""

    @property
    def takes_images(self) -> bool:
        return self.images not in ("", "no")

    def describe(self, max_cache_tokens: int = 0) -> str:
        """One line for people; `max_cache_tokens` are those of the KV cache, 0 if the engine manages none."""
        facts = (
            self.architecture,
            self.task if self.engine not in ENGINES else "",
            f"{self.dtype} on {self.device}" + (f" in {len(self.ranks)} ranks" if self.ranks else ""),
            f"{self.memory_bytes / 1e9:.2f} GB" if self.memory_bytes >= 1e9 else f"{self.memory_bytes / 1e6:.1f} MB",
            ENGINES.get(self.engine, self.engine),
            f"KV cache of {max_cache_tokens:,} tokens" if max_cache_tokens else "",
        )
        return ", ".join(filter(None, facts))

    def to_json(self) -> str:
        """The output's text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelInfo:
        """Read the output's text, of any release: unknown fields are passed over. Another text is a `ValueError`."""
        values = json.loads(text)
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            info = cls(**{name: value for name, value in values.items() if name in names})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"it is not what {MODEL_INFO} answers") from error
        variables = info.template_variables and tuple(info.template_variables)
        return dataclasses.replace(
            info,
            template_variables=variables,
            inputs=tuple(info.inputs),
            slower=tuple(info.slower),
            ranks=tuple(info.ranks),
        )
