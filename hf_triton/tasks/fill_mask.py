# SPDX-License-Identifier: Apache-2.0
"""Fill-mask: the likeliest tokens for each mask of a text."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Annotated, Any, ClassVar

import annotated_types
from pydantic import BeforeValidator

from hf_triton.errors import CheckpointError, RequestError, clip
from hf_triton.protocol.names import TEXT_ALIASES
from hf_triton.protocol.task_declaration import MAX_FILLS, TEXT, TaskDeclaration, TaskOptions, TextInput
from hf_triton.protocol.task_requests import Row, TaskResult
from hf_triton.protocol.validation import read_strings
from hf_triton.sentence import param
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.scores import Floats, best_first, softmax


class MaskOptions(TaskOptions):
    """Request parameters of fill-mask."""

    top_k: Annotated[int, annotated_types.Ge(1), annotated_types.Le(MAX_FILLS)] = 5
    """How many tokens to return for each mask, the likeliest first; at most as many as the model has, or as `targets`
    has."""

    targets: (
        Annotated[
            tuple[str, ...], annotated_types.MinLen(1), annotated_types.MaxLen(1024), BeforeValidator(read_strings)
        ]
        | None
    ) = None
    """The tokens to choose from, each as the model's vocabulary spells it. By default all."""


class FillMask(EncoderTask[MaskOptions]):
    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="fill-mask",
        texts=(TextInput(TEXT, "the texts, each with one or more of the model's mask tokens", TEXT_ALIASES),),
        outputs={},
        options=MaskOptions,
    )
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    per_token: ClassVar[bool] = True

    def __init__(self, checkpoint: Any, settings: Any) -> None:
        super().__init__(checkpoint, settings)
        if self.tokenizer.mask_token_id is None:
            raise CheckpointError(
                "unsupported_model", f"the tokenizer of {settings.huggingface_model} has no mask token to fill"
            )
        if self.tokenizer.mask_token_id >= checkpoint.vocabulary_size:
            raise CheckpointError(
                "unsupported_model",
                f"the mask token {clip(self.tokenizer.mask_token)} of {settings.huggingface_model} is "
                f"{self.tokenizer.mask_token_id}, and the model knows token ids below {checkpoint.vocabulary_size}",
            )
        self.mask_token = self.tokenizer.mask_token

    def encode(self, row: Row, options: MaskOptions) -> EncodedRow:
        encoding = self.tokenize(row[TEXT], options=options)
        mask, mask_id = self.tokenizer.mask_token, self.tokenizer.mask_token_id
        positions = [position for position, token_id in enumerate(encoding.ids) if token_id == mask_id]
        if not positions:
            raise RequestError("invalid_input", f"the text has no {mask}, the token that is to be filled")
        wanted = dataclasses.replace(self.to_input(encoding), output_positions=positions)
        return EncodedRow([wanted], (encoding.ids, positions, self._targets(options)))

    def _targets(self, options: MaskOptions) -> list[int] | None:
        """The ids of the tokens to choose from; None: all."""
        if options.targets is None:
            return None
        vocabulary = self._vocabulary
        for target in options.targets:
            if target not in vocabulary:
                raise RequestError(
                    "invalid_parameter", f"{param('targets')} holds {clip(target)}, which is no token of the model"
                )
        return list(dict.fromkeys(vocabulary[target] for target in options.targets))

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        return vocabulary

    def decode(self, encoded: EncodedRow, options: MaskOptions, outputs: list[Floats]) -> TaskResult:
        """JSON is an array of tokens; of a text with several masks, one such array for each."""
        ids, positions, targets = encoded.context
        filled = []
        for position, probabilities in zip(positions, softmax(outputs[0]), strict=True):
            choices = probabilities if targets is None else probabilities[targets]
            best = best_first(choices)[: options.top_k]
            tokens = [index if targets is None else targets[index] for index in best]
            filled.append(
                [
                    self._describe(token, float(choices[index]), ids, position, is_only=len(positions) == 1)
                    for token, index in zip(tokens, best, strict=True)
                ]
            )
        return TaskResult(json=filled[0] if len(positions) == 1 else filled, tensors={})

    def _describe(self, token: int, score: float, ids: list[int], position: int, *, is_only: bool) -> dict[str, Any]:
        filled = [*ids[:position], token, *ids[position + 1 :]]
        sequence = self.tokenizer.decode(
            [each for each in filled if each != self.tokenizer.pad_token_id], skip_special_tokens=is_only
        )
        return {"score": score, "token": token, "token_str": self.tokenizer.decode([token]), "sequence": sequence}
