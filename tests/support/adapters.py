# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters made on the spot, and what peft itself generates with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.support.sentence_checkpoints import quietly


def save_adapter(checkpoint: Path, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Save an adapter with random weights, which changes every token."""
    chosen = {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.5, **config}
    return save_lora(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), folder, seed, **chosen)


def save_lora(model: Any, folder: Path, seed: int = 0, **config: Any) -> Path:
    """The same for a loaded model, which is changed."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    with quietly():
        adapted = get_peft_model(model, LoraConfig(**{"r": 4, "init_lora_weights": False, **config}))
        for name, weights in adapted.named_parameters():
            if weights.requires_grad and "lora_" not in name:  # those that begin as the base model's
                weights.data += torch.randn_like(weights) * weights.std()
        adapted.save_pretrained(str(folder))
    return folder


def generate_with(checkpoint: Path, adapter: Path | None, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    prompt = torch.tensor([list(prompt_ids)])
    output = _model(checkpoint, adapter).generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False
    )
    tokens: list[int] = output[0, prompt.shape[1] :].tolist()
    return tokens


@cache
def _model(checkpoint: Path, adapter: Path | None) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return model if adapter is None else wrap(model, adapter)


def wrap(model: Any, adapter: Path) -> Any:
    from peft import PeftModel

    with quietly():
        return PeftModel.from_pretrained(model, str(adapter)).eval()
