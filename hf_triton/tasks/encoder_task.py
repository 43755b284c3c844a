# SPDX-License-Identifier: Apache-2.0
"""EncoderTask: what a task does around the forward passes of an encoder. Subclass it to add a task.

The service reads the request by the task's declaration and calls, for each row, `encode`; the encoder runs the token
sequences of all requests together, without padding; then `decode` makes the row's result of the model's outputs.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

import numpy.typing as npt

from hf_triton.encoder.types import EncoderInput
from hf_triton.errors import CheckpointError, RequestError
from hf_triton.protocol.prompts import Limits, decode_token_ids
from hf_triton.protocol.task_declaration import TOKEN_IDS, TaskOptions
from hf_triton.protocol.task_requests import Row, TaskRequest, TaskResult, read_task_request
from hf_triton.protocol.tensors import Array
from hf_triton.protocol.token_rows import TokenRow
from hf_triton.sentence import param, remedy
from hf_triton.tasks.declared_task import DeclaredTask

if TYPE_CHECKING:
    import torch

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.hub.resolve import Hub
    from hf_triton.hub.sentence_files import TransformerConfig
    from hf_triton.hub.sentence_modules import SentenceModules
    from hf_triton.settings import ModelSettings
    from hf_triton.tasks.encoding import EncoderService
    from hf_triton.tasks.meter import Meter


Merge = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
NUM_WINDOW_TOKENIZERS: Final = 8
Options = TypeVar("Options", bound=TaskOptions)


@dataclass(frozen=True)
class EncodedRow:
    """The token sequences of one row, and what `decode` needs to know of them."""

    inputs: Sequence[Any]
    """One or more `EncoderInput`s; a long context, or several labels, make several. `ArrayInput`s of an `ImageTask`."""
    context: Any = None
    """The task's own."""


class EncoderTask(DeclaredTask, ABC, Generic[Options]):
    """A task of an encoder, see `DeclaredTask`. Its methods are called from several threads.

    Attributes:
        model_outputs: The fields of the model's output that it needs: `logits`, `last_hidden_state`, ...
        per_token: Whether they have a value for each token, or one for the whole sequence.
        needs_fast_tokenizer: Whether texts are tokenized by a tokenizer.json.
        mask_token: What stands in a text for a token that the task fills in; empty: it fills none.
        merge: Joins what `reduce` returns of two parts of a sequence's tokens; None: it needs all of them at once.

    Args:
        checkpoint: Model, tokenizer and the checkpoint's folder.
        settings: The folder's.

    Raises:
        LoadError: The checkpoint does not fit the task.
    """

    model_outputs: ClassVar[tuple[str, ...]] = ("logits",)
    per_token: ClassVar[bool] = False
    merge: Merge | None = None
    needs_fast_tokenizer: ClassVar[bool] = True
    mask_token: str = ""

    def __init__(self, checkpoint: Checkpoint, settings: ModelSettings) -> None:
        self.tokenizer = checkpoint.tokenizer
        if self.needs_fast_tokenizer and not self.tokenizer.is_fast:
            raise CheckpointError(
                "unsupported_model",
                f"{settings.huggingface_model} has no tokenizer.json, which {self.declaration.name} needs: set the "
                "setting tokenizer to a checkpoint that has one",
            )
        self.config = checkpoint.model.config
        self.check_config(self.config, settings)
        self.max_length = checkpoint.context_length
        self.settings = settings
        self._window_tokenizer = lru_cache(NUM_WINDOW_TOKENIZERS)(self._make_window_tokenizer)

    @classmethod
    def start(
        cls,
        checkpoint: Checkpoint,
        settings: ModelSettings,
        *,
        on_fatal: Callable[[], None],
        meter: Meter,
        hub: Hub | None = None,
    ) -> EncoderService:
        """See `DeclaredTask`."""
        from hf_triton.tasks.encoding import build_encoder_service

        return build_encoder_service(cls, checkpoint, settings, on_fatal=on_fatal, meter=meter, hub=hub)

    def read(
        self, inputs: Mapping[str, Array], parameters: Mapping[str, object], limits: Limits
    ) -> TaskRequest[Options]:
        """Check a request, by the declaration.

        Raises:
            RequestError: The message names what is wrong and what is allowed.
        """
        options: Any = self.declaration.options
        request: TaskRequest[Options] = read_task_request(self.declaration, options, inputs, parameters, limits)
        self.check_options(request.options)
        return request

    def check_options(self, options: Options) -> None:
        """Check what the declaration cannot say of a request's options.

        Raises:
            RequestError: One does not fit the model.
        """

    def encode_row(self, row: Row | TokenRow, options: Options) -> EncodedRow:
        """Make token sequences of a row, or take those that it is; raises as the two methods do."""
        if not isinstance(row, TokenRow) and TOKEN_IDS in row:
            text = row[TOKEN_IDS]
            row = TokenRow(list(decode_token_ids(text, Limits(1, len(text)), TOKEN_IDS)))
        return self.encode_tokens(row, options) if isinstance(row, TokenRow) else self.encode(row, options)

    @abstractmethod
    def encode(self, row: Row, options: Options) -> EncodedRow:
        """Make token sequences of a row's texts.

        Raises:
            RequestError: A text does not fit.
        """

    def encode_tokens(self, row: TokenRow, options: Options) -> EncodedRow:
        """Take a row's token ids as they are, special tokens included; for declarations with `takes_tokens`.

        Raises:
            RequestError: They are none, or too many, and not to be cut.
        """
        if len(row.ids) > self.max_length and not self.may_cut(options.truncate):
            raise RequestError(
                "context_exceeded",
                f"the row has {len(row.ids)} tokens, more than the {self.max_length} of the model: send fewer"
                + remedy(f", or set {param('truncate')} to true"),
                sizes={"tokens": len(row.ids), "limit": self.max_length},
            )
        type_ids = row.type_ids and row.type_ids[: self.max_length]
        return EncodedRow([EncoderInput(row.ids[: self.max_length], type_ids)])

    def may_cut(self, truncate: bool | None) -> bool:
        """Whether what is too long is cut, by a request's `truncate` or else the folder's setting."""
        return self.settings.truncate if truncate is None else truncate

    def reduce(self, outputs: torch.Tensor) -> torch.Tensor:
        """Change the model's outputs for one sequence on the device, such as pooling. As it is, it changes nothing.

        Args:
            outputs: float32 `[labels]`, or `[tokens, ...]` with `per_token`; several outputs stacked, `[outputs, ...]`.
        """
        return outputs

    @abstractmethod
    def decode(self, encoded: EncodedRow, options: Options, outputs: list[npt.NDArray[Any]]) -> TaskResult:
        """Make a row's result of what the model gave for each of its sequences.

        Args:
            encoded: As `encode` returned it.
            options: The request's.
            outputs: For each of `encoded.inputs`, what `reduce` returned, float32.
        """

    def windows(self, text: str, pair: str | None = None, *, length: int, stride: int) -> list[Any]:
        """Tokenize a text, or the second of a pair, in overlapping windows.

        Args:
            text: The text; of a pair, it stands in every window.
            pair: The second text.
            length: Tokens of a window at most, special tokens and the first text of a pair included.
            stride: Tokens that two windows share; it leaves room for one more in a window.

        Returns:
            An `Encoding` for each window; offsets are those of the whole text.
        """
        encoding = self._window_tokenizer(length, stride, pair is not None).encode(text, pair)
        return [encoding, *encoding.overflowing]

    def tokenize(self, text: str, pair: str | None = None, *, truncate: bool | None = None) -> Any:
        """Tokenize a text or a pair, special tokens included.

        Args:
            text: The text.
            pair: A second text, to stand behind it.
            truncate: Whether to cut what is too long; None: as the folder's setting `truncate` says.

        Returns:
            The tokenizer's `Encoding`, with `ids`, `type_ids`, `offsets` and `sequence_ids`.

        Raises:
            RequestError: The text is too long, and not to be cut.
        """
        encoding = self._whole.encode(text, pair)
        if len(encoding.ids) <= self.max_length:
            return encoding
        self.check_cut(len(encoding.ids), truncate)
        return self._cut.encode(text, pair)

    def check_cut(self, num_tokens: int, truncate: bool | None) -> None:
        """Refuse a text that is too long and not to be cut; `truncate` as above."""
        if not self.may_cut(truncate):
            raise RequestError(
                "context_exceeded",
                f"the text has {num_tokens} tokens, more than the {self.max_length} of the model: shorten it"
                + remedy(f", or set {param('truncate')} to true"),
                sizes={"tokens": num_tokens, "limit": self.max_length},
            )

    @cached_property
    def _whole(self) -> Any:
        """The tokenizer that cuts nothing.

        transformers sets truncation on the tokenizer with each call: what one thread asks for, another would get.
        """
        tokenizer = copy.deepcopy(self.tokenizer.backend_tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def _make_window_tokenizer(self, length: int, stride: int, is_pair: bool) -> Any:
        tokenizer = copy.deepcopy(self._whole)
        strategy = "only_second" if is_pair else "longest_first"
        tokenizer.enable_truncation(length, stride=stride, strategy=strategy)
        return tokenizer

    @cached_property
    def _cut(self) -> Any:
        """The tokenizer that cuts to the model's context."""
        tokenizer = copy.deepcopy(self._whole)
        tokenizer.enable_truncation(self.max_length, direction=self.tokenizer.truncation_side)
        return tokenizer

    def to_input(self, encoding: Any) -> EncoderInput:
        """A tokenizer's `Encoding` as the encoder takes it."""
        has_types = "token_type_ids" in self.tokenizer.model_input_names
        return EncoderInput(list(encoding.ids), list(encoding.type_ids) if has_types else None)

    def follow(self, modules: SentenceModules | TransformerConfig) -> None:
        """Cut texts and make them lower case as the files of sentence-transformers say."""
        self.max_length = min(self.max_length, modules.max_length or self.max_length)
        if modules.lowercases:
            _add_lowercase(self.tokenizer)

    def label(self, index: int) -> str:
        """The name that the checkpoint's config gives a label."""
        return str((self.config.id2label or {}).get(index, f"LABEL_{index}"))


def _add_lowercase(tokenizer: Any) -> None:
    """Let a tokenizer make texts lower case first, but not its special tokens."""
    from tokenizers import normalizers

    backend = tokenizer.backend_tokenizer
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
