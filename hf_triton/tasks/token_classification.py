# SPDX-License-Identifier: Apache-2.0
"""Token classification, such as named entities: the tokens, words or entities of a text with their labels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

import annotated_types
from pydantic import BeforeValidator

from hf_triton.errors import RequestError
from hf_triton.protocol.task_declaration import TEXT, TEXTS, TaskDeclaration, TaskOptions
from hf_triton.protocol.task_requests import Row, TaskResult
from hf_triton.protocol.validation import read_strings
from hf_triton.sentence import param
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.scores import Floats


class TokenOptions(TaskOptions):
    """Request parameters of token-classification."""

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "none"
    """How tokens become entities, as in transformers' pipeline. `none` gives each token; `simple` joins neighbours of
    one label; the others first make the tokens of a word agree, on the label of its first token, of their mean or of
    the highest score."""

    ignore_labels: Annotated[tuple[str, ...], annotated_types.MaxLen(1024), BeforeValidator(read_strings)] = ("O",)
    """Labels that are left out."""

    stride: Annotated[int, annotated_types.Ge(0)] | None = None
    """Tokens that two windows share, if a text is longer than the model's context and so computed in windows. By
    default such a text is refused, or cut with `truncate`. Needs an `aggregation_strategy` other than `none`."""


class TokenClassification(EncoderTask[TokenOptions]):
    declaration: ClassVar[TaskDeclaration] = TaskDeclaration(
        name="token-classification",
        texts=(TEXTS,),
        outputs={},
        options=TokenOptions,
    )
    auto_class: ClassVar[str] = "AutoModelForTokenClassification"
    per_token: ClassVar[bool] = True

    def encode(self, row: Row, options: TokenOptions) -> EncodedRow:
        text = row[TEXT]
        if options.stride is None:
            encodings = [self.tokenize(text, options=options)]
        else:
            encodings = self.windows(text, length=self.max_length, stride=self._checked_stride(options))
        return EncodedRow(list(map(self.to_input, encodings)), (text, encodings))

    def _checked_stride(self, options: TokenOptions) -> int:
        room = self.max_length - self.tokenizer.num_special_tokens_to_add()
        self.refuse_limit(options)
        stride = options.stride or 0
        if stride >= room:
            raise RequestError(
                "invalid_parameter", f"{param('stride')} must be an integer >= 0 and <= {room - 1}, got {stride}"
            )
        if options.aggregation_strategy == "none":
            raise RequestError(
                "invalid_parameter",
                f"{param('stride')} needs an {param('aggregation_strategy')} other than none, which joins the windows",
            )
        return stride

    def decode(self, encoded: EncodedRow, options: TokenOptions, outputs: list[Floats]) -> TaskResult:
        """JSON is an array of entities, as transformers' pipeline has them."""
        text, encodings = encoded.context
        entities = join_tokens(self.tokenizer, self.config, text, encodings, outputs, options)
        return TaskResult(json=entities, tensors={})


def join_tokens(
    tokenizer: Any, config: Any, text: str, encodings: list[Any], outputs: list[Floats], options: TokenOptions
) -> list[dict[str, Any]]:
    """The entities of a text, by transformers' pipeline's postprocessing of logits `[tokens, labels]` a window."""
    import torch
    from transformers import TokenClassificationPipeline
    from transformers.pipelines.token_classification import AggregationStrategy

    pipeline: Any = TokenClassificationPipeline.__new__(TokenClassificationPipeline)  # without a model that computes
    pipeline.tokenizer, pipeline.model = tokenizer, SimpleNamespace(config=config)
    windows = [
        {
            "logits": torch.from_numpy(logits)[None],
            "sentence": text,
            "input_ids": torch.tensor([encoding.ids]),
            "offset_mapping": [encoding.offsets],
            "special_tokens_mask": torch.tensor([encoding.special_tokens_mask]),
        }
        for encoding, logits in zip(encodings, outputs, strict=True)
    ]
    strategy = AggregationStrategy(options.aggregation_strategy)
    entities = pipeline.postprocess(windows, strategy, list(options.ignore_labels))
    return [{**entity, "score": float(entity["score"])} for entity in entities]
