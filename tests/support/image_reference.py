# SPDX-License-Identifier: Apache-2.0
"""What transformers makes of prompts with images: its processor and `model.generate`, one prompt alone."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Messages = Sequence[dict[str, Any]]
"""Parts of type `image` stand for the files beside them, in order."""


@dataclass(frozen=True)
class ImageReference:
    model: Any
    processor: Any

    def inputs(self, prompt: str | Messages, files: Sequence[bytes] = (), **template: Any) -> dict[str, Any]:
        """What `generate` is given for a text with placeholders or a chat."""
        from transformers.image_utils import load_image

        text = prompt if isinstance(prompt, str) else self.text(prompt, **template)
        images = [load_image(base64.b64encode(file).decode()) for file in files]
        return dict(self.processor(images=images or None, text=text, return_tensors="pt").to(self.model.device))

    def text(self, chat: Messages, **template: Any) -> str:
        options = {"add_generation_prompt": True, "tokenize": False} | template
        return str(self.processor.apply_chat_template(list(chat), **options))

    def ids(
        self,
        prompt: str | Messages,
        files: Sequence[bytes] = (),
        max_new_tokens: int = 12,
        *,
        template: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> list[int]:
        """The greedy completion's tokens."""
        inputs = self.inputs(prompt, files, **(template or {}))
        settings = {"do_sample": False, "pad_token_id": 2, "max_new_tokens": max_new_tokens} | arguments
        with torch.inference_mode():
            output = self.model.generate(**inputs, **settings)
        new: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return new

    def logits(self, prompt: str | Messages, files: Sequence[bytes] = (), **template: Any) -> torch.Tensor:
        """The logits of the prompt's tokens, `[tokens, vocabulary]`, float32."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(**self.inputs(prompt, files, **template)).logits
        return logits[0].float()


def load_image_reference(folder: Path) -> ImageReference:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processors: Any = AutoProcessor
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    return ImageReference(model.eval(), processors.from_pretrained(folder))
