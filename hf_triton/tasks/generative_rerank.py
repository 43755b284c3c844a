# SPDX-License-Identifier: Apache-2.0
"""Rerank by a model that generates: whether its next token would be `yes` or `no`.

It is asked as the checkpoint's modules.json of sentence-transformers says, else as Qwen3-Reranker is.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Final

from hf_triton.encoder.jobs import EncoderInput
from hf_triton.errors import CheckpointError, RequestError
from hf_triton.hub.sentence_files import load_general_config
from hf_triton.hub.sentence_modules import LogitScore, load_logit_score
from hf_triton.protocol.task_declaration import TaskDeclaration
from hf_triton.protocol.task_requests import Row, TaskResult
from hf_triton.sentence import param, remedy
from hf_triton.tasks.encoder_task import EncodedRow, EncoderTask
from hf_triton.tasks.rerank import DOCUMENTS, QUERY, Rerank, RerankOptions, activation_of, first_tokens, score_result
from hf_triton.tasks.scores import Floats
from hf_triton.tasks.sentence_prompts import SentencePrompts

HEAD: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
TAIL: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The texts before and behind the pair, in the words of the model's card, with which it was trained."""
ANSWERS: Final = ("yes", "no")
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"


class GenerativeOptions(RerankOptions):
    """Request parameters of rerank, by a model that generates."""

    instruction: str | None = None
    """What makes a document relevant. By default the checkpoint's prompt, else Qwen3-Reranker's: `Given a web search
    query, retrieve relevant passages that answer the query`."""


class GenerativeRerank(EncoderTask[GenerativeOptions]):
    declaration: ClassVar[TaskDeclaration] = dataclasses.replace(
        Rerank.declaration, options=GenerativeOptions, takes_tokens=False
    )
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    per_token: ClassVar[bool] = True

    @classmethod
    def check_files(cls, folder: Path, settings: Any) -> None:
        load_general_config(folder)
        load_logit_score(folder)

    def __init__(self, checkpoint: Any, settings: Any) -> None:
        super().__init__(checkpoint, settings)
        general = load_general_config(checkpoint.folder)
        self._prompts = SentencePrompts(general.prompts, general.default_prompt)
        self._activation = activation_of(self.config, general.activation, settings)
        self._score = load_logit_score(checkpoint.folder) or LogitScore(*self._answers())
        if self._score.transformer is None:
            self._head, self._tail = (self._plain_ids(text) for text in (HEAD, TAIL))
        else:
            self.follow(self._score.transformer)

    def _answers(self) -> tuple[int, int]:
        """The tokens `yes` and `no`; raises CheckpointError if the model has none."""
        ids = [self._plain_ids(answer) for answer in ANSWERS]
        if any(len(each) != 1 for each in ids):
            raise CheckpointError(
                "unsupported_model",
                f"{self.settings.huggingface_model} has no tokens yes and no, by which a reranker that generates "
                "answers: choose another model",
            )
        return ids[0][0], ids[1][0]

    def check_options(self, options: GenerativeOptions) -> None:
        self._prompts.check(options.prompt_name)

    def _plain_ids(self, text: str) -> list[int]:
        ids: list[int] = self._whole.encode(text, add_special_tokens=False).ids
        return ids

    def encode(self, row: Row, options: GenerativeOptions) -> EncodedRow:
        prompt = self._prompts.text(options.prompt_name) if options.instruction is None else options.instruction
        row = {**row, DOCUMENTS: first_tokens(self, row[DOCUMENTS], options.max_tokens_per_doc)}
        if self._score.transformer is None:
            ids = self._asked(prompt or INSTRUCTION, row, options)
        elif self._score.transformer.message_format is None:
            ids = list(self.tokenize(prompt + row[QUERY], row[DOCUMENTS], options).ids)
        else:
            ids = self._rendered(prompt, row, options, self._score.transformer.message_format)
        return EncodedRow([EncoderInput(ids, output_positions=[len(ids) - 1])])

    def _asked(self, instruction: str, row: Row, options: GenerativeOptions) -> list[int]:
        text = f"<Instruct>: {instruction}\n<Query>: {row[QUERY]}\n<Document>: {row[DOCUMENTS]}"
        ids, num_own = self._plain_ids(text), len(self._head) + len(self._tail)
        room = self.limit(options, num_own) - num_own
        if len(ids) > room and not self.may_cut(options):
            raise RequestError(
                "context_exceeded",
                f"query and document have {len(ids)} tokens with the instruction, more than the {room} that the "
                "model's own words leave: shorten them" + remedy(f", or set {param('truncate')} to true"),
                sizes={"tokens": len(ids), "limit": room},
            )
        return [*self._head, *self.cut(ids, room, options), *self._tail]

    def _rendered(self, prompt: str, row: Row, options: GenerativeOptions, message_format: str) -> list[int]:
        """A pair by the tokenizer's chat template, whose text cannot be cut."""
        pairs = [("system", prompt)] * bool(prompt) + [("query", row[QUERY]), ("document", row[DOCUMENTS])]
        messages = [
            {"role": role, "content": text if message_format == "flat" else [{"type": "text", "text": text}]}
            for role, text in pairs
        ]
        ids = self._plain_ids(self.tokenizer.apply_chat_template(messages, tokenize=False))
        limit = self.limit(options)
        if len(ids) > limit:
            raise RequestError(
                "context_exceeded",
                f"query and document have {len(ids)} tokens as the chat template writes them, more than the "
                f"{limit} that it may have: shorten them",
                sizes={"tokens": len(ids), "limit": limit},
            )
        return ids

    def decode(self, encoded: EncodedRow, options: GenerativeOptions, outputs: list[Floats]) -> TaskResult:
        """The logit is that of `yes`, less that of `no`."""
        logits = outputs[0][-1]
        no = 0.0 if self._score.false_token is None else logits[self._score.false_token]
        is_raw = options.raw_scores or self._activation == "identity"
        return score_result(logits[self._score.true_token] - no, is_raw=is_raw)
