# SPDX-License-Identifier: Apache-2.0
"""The output of transformers: `model.generate` on one prompt alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer


@dataclass(frozen=True)
class Reference:
    model: Any
    tokenizer: Any

    def text(self, prompt: str, max_new_tokens: int, **arguments: Any) -> str:
        """Expected `text_output`: the prompt and its continuation, or the output of an encoder-decoder."""
        ids = self.tokenizer(prompt).input_ids
        answer = self.tokenizer.decode(solo_ids(self.model, ids, max_new_tokens, **arguments), skip_special_tokens=True)
        return str(answer) if self.model.config.is_encoder_decoder else prompt + str(answer)


def load_reference(folder: Path) -> Reference:
    torch.set_num_threads(1)  # a server under test wants the other cores
    is_encoder_decoder = AutoConfig.from_pretrained(folder).is_encoder_decoder
    auto_class = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
    return Reference(auto_class.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder))


def solo_ids(model: Any, prompt_ids: list[int], max_new_tokens: int, **arguments: Any) -> list[int]:
    """New token ids of one prompt alone, greedy unless told otherwise, up to the end-of-sequence token."""
    input_ids = torch.tensor([prompt_ids], device=model.device)
    settings = {"do_sample": False, "num_beams": 1, "pad_token_id": 2, "return_dict_in_generate": False} | arguments
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=max_new_tokens, **settings
        )
    new = output[0, 1 if model.config.is_encoder_decoder else len(prompt_ids) :].tolist()
    eos = model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or [])
    return new[: next((place for place, token in enumerate(new) if token in ends), len(new))]


def beam_ids(model: Any, prompt_ids: list[int], max_new_tokens: int, **arguments: Any) -> list[list[int]]:
    """New token ids of the hypotheses of one prompt alone, the best first, each up to its end-of-sequence token."""
    input_ids = torch.tensor([prompt_ids], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            **{"do_sample": False, "pad_token_id": 2, "return_dict_in_generate": True} | arguments,
        )
    eos = arguments.get("eos_token_id", model.generation_config.eos_token_id)
    ends = {eos} if isinstance(eos, int) else set(eos or [])
    start = 1 if model.config.is_encoder_decoder else len(prompt_ids)
    lengths = (output.beam_indices >= 0).sum(1).tolist()
    hypotheses = [ids[:length] for ids, length in zip(output.sequences[:, start:].tolist(), lengths, strict=True)]
    return [ids[:-1] if ids[-1] in ends else ids for ids in hypotheses]
