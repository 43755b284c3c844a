# SPDX-License-Identifier: Apache-2.0
"""Embeddings: one vector for each text, as sentence-transformers makes it of the checkpoint's modules.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import annotated_types
import numpy as np
import numpy.typing as npt

from hf_triton.errors import RequestError, SettingsError
from hf_triton.hub.sentence_modules import SentenceModules, load_sentence_modules
from hf_triton.protocol.embedding_request import (
    EMBEDDING_REQUEST,
    VLLM_FLAGS,
    VLLM_OUTPUTS,
    parse_embedding_request,
    vllm_outputs,
)
from hf_triton.protocol.names import TEXT_ALIASES
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.task_declaration import (
    TEXT,
    TOKEN_TEXTS,
    TaskDeclaration,
    TaskOptions,
    TaskOutput,
    TextInput,
)
from hf_triton.protocol.task_requests import Row, TaskRequest, TaskResult
from hf_triton.protocol.tensor_values import Array
from hf_triton.protocol.token_rows import INPUT_IDS, TOKEN_INPUTS
from hf_triton.sentence import param, param_list
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.pooling import build_head
from hf_triton.tasks.sentence_prompts import PromptOptions, SentencePrompts

if TYPE_CHECKING:
    import torch

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.settings import ModelSettings

TINY: Final = 1e-12
"""The least length that a vector is divided by, as `torch.nn.functional.normalize` has it."""


class VectorOptions(TaskOptions):
    """Request parameters of vectors."""

    dimensions: Annotated[int, annotated_types.Ge(1)] | None = None
    """Dimensions that a vector is cut to, before it is normalised; at most the model's own, which is the default.
    Only models that were trained so (Matryoshka) keep their sense."""

    normalize: bool | None = None
    """Whether a vector has length 1. By default the folder's setting `normalize`, then as modules.json says."""


class EmbeddingOptions(PromptOptions, VectorOptions):
    """Request parameters of embeddings."""


class Embeddings(EncoderTask[EmbeddingOptions]):
    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="embeddings",
        texts=(
            TextInput(TEXT, "the texts", (*TEXT_ALIASES, "input_text"), is_optional=True),
            TOKEN_TEXTS,
            TextInput(
                EMBEDDING_REQUEST,
                "instead of `text`, the request that Triton's OpenAI frontend sends to the vLLM backend",
                is_optional=True,
            ),
        ),
        outputs={"embedding": TaskOutput("TYPE_FP32", "the vector", num_dims=1), **VLLM_OUTPUTS},
        options=EmbeddingOptions,
        has_json=False,
        takes_tokens=True,
        other_inputs=dict.fromkeys(VLLM_FLAGS, "TYPE_BOOL"),
    )
    model_outputs: ClassVar[tuple[str, ...]] = ("last_hidden_state",)
    per_token: ClassVar[bool] = True

    @classmethod
    def check_files(cls, folder: Path, settings: ModelSettings) -> None:
        find_modules(folder, settings)

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        super().__init__(checkpoint, settings)
        self._modules = find_modules(checkpoint.folder, settings)
        self._normalizes = self._modules.normalizes if settings.normalize is None else settings.normalize
        self.follow(self._modules)
        self._head = build_head(self._modules, checkpoint.model, settings)
        self._prompts = SentencePrompts(self._modules.prompts, self._modules.default_prompt)
        self._prompt_lengths = {name: self._count_prompt(text) for name, text in self._modules.prompts.items()}

    def read(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, object], limits: Limits
    ) -> TaskRequest[EmbeddingOptions]:
        """`embedding_request` is read as the inputs and parameters that it stands for."""
        outputs = None
        if EMBEDDING_REQUEST in inputs or EMBEDDING_REQUEST in parameters:
            outputs = vllm_outputs(inputs, parameters)
            inputs, parameters = parse_embedding_request(inputs, parameters)
        given = [text.name for text in self.declaration.texts if {text.name, *text.aliases} & {*inputs, *parameters}]
        given += [INPUT_IDS] if {*TOKEN_INPUTS} & {*inputs, *parameters} else []
        if len(given) != 1:
            problem = f"{param_list(given, ' and ')} are given" if given else "there is no text"
            names = param_list((*self.declaration.text_names(), INPUT_IDS))
            raise RequestError("invalid_input", f"{problem}: embeddings needs one of {names}")
        flags = [name for name in VLLM_FLAGS if name in inputs or name in parameters]
        if flags:
            raise RequestError(
                "unknown_parameter", f"{param(flags[0])} goes with {param(EMBEDDING_REQUEST)}: leave it out"
            )
        request = super().read(inputs, parameters, limits)
        return dataclasses.replace(request, default_outputs=outputs)

    def check_options(self, options: EmbeddingOptions) -> None:
        check_dimensions(options, self._head.num_outputs)
        self._prompts.check(options.prompt_name)

    def encode(self, row: Row, options: EmbeddingOptions) -> EncodedRow:
        prompt = self._prompts.text(options.prompt_name)
        encoding = self.tokenize(prompt + row[TEXT], options=options)
        encoded = self.to_input(encoding)
        if prompt and not self._modules.includes_prompt:
            num_prompt = self._prompt_lengths[self._prompts.name(options.prompt_name)]
            if encoding.overflowing and self.side(options) == "left":  # the prompt is cut too, or away
                num_prompt = next(place for place, (_, end) in enumerate(encoding.offsets) if end > len(prompt))
            pooled = list(range(num_prompt, len(encoded.ids)))
            if not pooled:
                raise RequestError("invalid_input", "the text has no tokens behind its prompt: send a longer text")
            encoded = dataclasses.replace(encoded, output_positions=pooled)
        return EncodedRow([encoded])

    def reduce(self, outputs: torch.Tensor) -> torch.Tensor:
        """The vector of a text, of float32 `[tokens, hidden size]`; see `EncoderTask`."""
        return self._head(outputs)

    def decode(self, encoded: EncodedRow, options: EmbeddingOptions, outputs: list[npt.NDArray[Any]]) -> TaskResult:
        """A vector is cut, then normalised."""
        normalizes = self._normalizes if options.normalize is None else options.normalize
        vector = cut_vector(outputs[0], options.dimensions or self._modules.dimensions, normalizes=normalizes)
        return TaskResult(json=vector, tensors={"embedding": vector, "num_output_tokens": 0})

    def _count_prompt(self, prompt: str) -> int:
        """Tokens of a prompt, without a special token at its end."""
        ids = self.tokenizer(prompt)["input_ids"]
        return len(ids) - 1 if ids and ids[-1] in self.tokenizer.all_special_ids else len(ids)


def check_dimensions(options: VectorOptions, size: int) -> None:
    """Refuse more dimensions than a model's vectors have; raises RequestError if they are asked for."""
    if options.dimensions is not None and options.dimensions > size:
        raise RequestError(
            "invalid_parameter",
            f"{param('dimensions')} must be an integer >= 1 and <= {size}, got {options.dimensions}",
        )


def cut_vector(vector: npt.NDArray[Any], dimensions: int | None, *, normalizes: bool) -> npt.NDArray[Any]:
    """The first dimensions of a vector, with length 1 if it is to be normalised."""
    cut = vector[:dimensions]
    return cut / max(float(np.linalg.norm(cut)), TINY) if normalizes else cut


def find_modules(folder: Path, settings: ModelSettings) -> SentenceModules:
    """What the checkpoint's modules.json says, and the setting `pooling` in its place.

    Raises:
        LoadError: modules.json cannot be used; or there is none, and no setting.
    """
    modules = load_sentence_modules(folder)
    if settings.pooling is not None:
        return dataclasses.replace(modules or SentenceModules(()), pooling=(settings.pooling,))
    if modules is None:
        raise SettingsError(
            f"{settings.huggingface_model} has no modules.json, which says how its embeddings are made: set pooling to "
            "what its model card says (cls, mean, lasttoken, ...)"
        )
    return modules
