# SPDX-License-Identifier: Apache-2.0
"""EncoderTask: what a task does around the forward passes of an encoder. Subclass it to add a task.

The service has the task `read` a request and calls `encode_row` for each row; the engine computes the token sequences
of all requests together; then `decode` makes the row's result of the model's outputs.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

import numpy.typing as npt

from hf_triton.encoder.jobs import EncoderInput
from hf_triton.errors import CheckpointError, RequestError
from hf_triton.protocol.prompts import Limits, decode_token_ids
from hf_triton.protocol.task_declaration import TOKEN_IDS, TaskOptions
from hf_triton.protocol.task_requests import Row, TaskRequest, TaskResult, read_task_request
from hf_triton.protocol.tensor_values import Array
from hf_triton.protocol.token_rows import TokenRow
from hf_triton.sentence import param, remedy
from hf_triton.tasks.task import Task

if TYPE_CHECKING:
    import torch

    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.hub.sentence_files import TransformerConfig
    from hf_triton.hub.sentence_modules import SentenceModules
    from hf_triton.settings import ModelSettings


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


class EncoderTask(Task, ABC, Generic[Options]):
    """A task of an encoder, see `Task`. Its methods are called from several threads.

    Attributes:
        model_outputs: The fields of the model's output that it needs: `logits`, `last_hidden_state`, ...
        per_token: Whether they have a value for each token, or one for the whole sequence.
        needs_fast_tokenizer: Whether texts are tokenized by a tokenizer.json.
        mask_token: What stands in a text for a token that the task fills in; empty: it fills none.
        merge: Joins what `reduce` returns of two parts of a sequence's tokens; None: it needs all of them at once.

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
        self._own_side = str(getattr(self.tokenizer, "truncation_side", "right"))
        self.cutting = Lock()
        """Held while a tokenizer is set to cut a text, and cuts it."""
        self._window_tokenizer = lru_cache(NUM_WINDOW_TOKENIZERS)(self._make_window_tokenizer)

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
        """Check what the declaration cannot say of options; raises RequestError if one does not fit the model."""

    def encode_row(self, row: Row | TokenRow, options: Options) -> EncodedRow:
        """Make token sequences of a row, or take those that it is; raises as the two methods do."""
        if not isinstance(row, TokenRow) and TOKEN_IDS in row:
            text = row[TOKEN_IDS]
            row = TokenRow(list(decode_token_ids(text, Limits(1, len(text)), TOKEN_IDS)))
        return self.encode_tokens(row, options) if isinstance(row, TokenRow) else self.encode(row, options)

    @abstractmethod
    def encode(self, row: Row, options: Options) -> EncodedRow:
        """Make token sequences of a row's texts; raises RequestError if a text does not fit."""

    def encode_tokens(self, row: TokenRow, options: Options) -> EncodedRow:
        """Take a row's token ids as they are, special tokens included; for declarations with `takes_tokens`.

        Raises:
            RequestError: They are none, or too many, and not to be cut.
        """
        limit = self.limit(options)
        if len(row.ids) > limit and not self.may_cut(options):
            raise RequestError(
                "context_exceeded",
                f"the row has {len(row.ids)} tokens, more than the {limit} of the model: send fewer"
                + remedy(f", or set {param('truncate')} to true"),
                sizes={"tokens": len(row.ids), "limit": limit},
            )
        type_ids = row.type_ids and self.cut(row.type_ids, limit, options)
        return EncodedRow([EncoderInput(self.cut(row.ids, limit, options), type_ids)])

    def may_cut(self, options: TaskOptions) -> bool:
        """Whether what is too long is cut, by a request's options or else the folder's setting."""
        if options.truncate_prompt_tokens is not None:
            return True
        return self.settings.truncate if options.truncate is None else options.truncate

    def limit(self, options: TaskOptions, num_special_tokens: int = 0) -> int:
        """The number of tokens that a text is cut to.

        Raises:
            RequestError: The request asks for more tokens than the model takes, for none of the text's own, or that
                nothing is cut.
        """
        asked, least = options.truncate_prompt_tokens, num_special_tokens + 1
        if asked is not None and options.truncate is False:
            names = f"{param('truncate_prompt_tokens')} and {param('truncate')} false"
            raise RequestError("invalid_parameter", f"{names} contradict each other: leave one of them out")
        if asked is None or asked == -1:
            return self.max_length
        if not least <= asked <= self.max_length:
            special = f", of which {num_special_tokens} are special" if num_special_tokens else ""
            raise RequestError(
                "invalid_parameter",
                f"{param('truncate_prompt_tokens')} must be -1, or an integer >= {least} and <= {self.max_length}"
                f"{special}; got {asked}",
            )
        return asked

    def side(self, options: TaskOptions) -> str:
        """The side, `left` or `right`, at which what is too long is cut."""
        return options.truncation_side or self._own_side

    def cut(self, ids: Sequence[int], limit: int, options: TaskOptions) -> list[int]:
        """Token ids, cut to a number of them, at least 1."""
        return list(ids[-limit:] if self.side(options) == "left" else ids[:limit])

    def refuse_limit(self, options: TaskOptions) -> None:
        """Refuse `truncate_prompt_tokens` of a request whose texts are computed whole, in windows.

        Raises:
            RequestError: It is given, and not -1.
        """
        if options.truncate_prompt_tokens not in (None, -1):
            name = param("truncate_prompt_tokens")
            raise RequestError(
                "invalid_parameter", f"{name} is for texts that are not computed in windows: leave it out"
            )

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

    def tokenize(
        self, text: str, pair: str | None = None, options: TaskOptions | None = None, *, truncate: bool | None = None
    ) -> Any:
        """Tokenize a text or a pair, special tokens included.

        Returns:
            The tokenizer's `Encoding`, with `ids`, `type_ids`, `offsets` and `sequence_ids`.

        Raises:
            RequestError: The text is too long, and not to be cut.
        """
        options = options or TaskOptions(truncate=truncate)
        limit = self.limit(options, self._whole.num_special_tokens_to_add(pair is not None))
        encoding = self._whole.encode(text, pair)
        if len(encoding.ids) <= limit:
            return encoding
        self.check_cut(len(encoding.ids), options)
        with self.cutting:
            self._cut.enable_truncation(limit, direction=self.side(options))
            return self._cut.encode(text, pair)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters of each token of a text, without special tokens: the first, and that behind the last."""
        offsets: list[tuple[int, int]] = self._whole.encode(text, add_special_tokens=False).offsets
        return offsets

    def check_cut(self, num_tokens: int, options: TaskOptions) -> None:
        """Refuse a text that is too long and not to be cut."""
        if not self.may_cut(options):
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
        """The tokenizer that cuts as it is set each time, by one thread at a time: `cutting` is held."""
        return copy.deepcopy(self._whole)

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
