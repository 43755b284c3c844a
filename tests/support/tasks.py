# SPDX-License-Identifier: Apache-2.0
"""Tasks of encoders without a server: tiny checkpoints with heads and tokenizers of three kinds, and their answers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_triton.encoder.forward import EncoderForward, build_forward
from hf_triton.encoder.stacked import StackedForward
from hf_triton.hub.checkpoint import Placement, load_checkpoint
from hf_triton.hub.locate import Hub
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.task_requests import encode_results, outputs_to_fill
from hf_triton.protocol.tensor_values import Array, encode_strings
from hf_triton.settings import ModelSettings
from hf_triton.tasks.image_task import ImageTask
from tests.support.encoders import build_model
from tests.support.marks import full
from tests.support.sentence_checkpoints import LETTERS, quietly

LIMITS = Limits(100, 10_000)
FAMILIES: Mapping[str, str] = {
    "bert": "wordpiece",
    "distilbert": "wordpiece",
    "roberta": "bytes",
    "xlm-roberta": "unigram",
    "deberta-v2": "unigram",
    "modernbert": "bytes",
}
"""Families of `tests.support.encoders` and the kind of their tokenizers."""
SOME = ["bert", "roberta", "xlm-roberta", *full("distilbert", "deberta-v2", "modernbert")]
"""Parameters of a test: one family of each kind in `make test`."""
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
WORDS = (
    "the old harbour has two boats, one lighthouse and more gulls than people",
    "Anna lives in Berlin and works for the Post",
    "was it good or bad? It was very bad, and the café near the Brücke is closed!",
)
TEXTS = [
    "Anna lives in Berlin, near the old harbour.",
    "bad",
    "It was very good: two boats and one lighthouse, but Bob went to München-Ost in 1990!",
    "the  café   (closed) … €",
]


def build_tokenizer(kind: str, *, has_types: bool = True) -> Any:
    """A fast tokenizer of up to 200 tokens with `<s>`, `<pad>`, `</s>`, `<unk>` and `<mask>` as tokens 0 to 4."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = list(SPECIAL.values())
    if kind == "wordpiece":
        pieces = [*special, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
        words = ["the", "Anna", "Berlin", "bad", "good"]
        vocabulary = {piece: place for place, piece in enumerate([*pieces, *words])}
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    elif kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(WORDS, trainer)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False)
        tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1" if has_types else "<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    build: Any = PreTrainedTokenizerFast
    names = ["input_ids", "token_type_ids", "attention_mask"] if has_types else ["input_ids", "attention_mask"]
    marks = {**SPECIAL, "mask_token": AddedToken("<mask>", lstrip=kind != "wordpiece")}
    return build(tokenizer_object=tokenizer, model_max_length=130, model_input_names=names, **marks)


def save_task_checkpoint(folder: Path, family: str, head: str, **config: Any) -> Path:
    """A checkpoint with a head."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(FAMILIES[family], has_types=family in ("bert", "deberta-v2"))
    with quietly():
        build_model(family, head, **{"vocab_size": 320, **config}).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def reference(folder: Path, task: str, texts: Sequence[Any], **options: Any) -> list[Any]:
    """What transformers' pipeline makes of texts, one at a time."""
    from transformers import pipeline

    build: Any = pipeline
    with quietly():
        pipe = build(task, model=str(folder), tokenizer=str(folder), device="cpu", **options.pop("build", {}))
        return [pipe(text, **options) for text in texts]


class Served:
    """A task with its model, run as the service runs it; all texts of a request in one forward."""

    def __init__(self, folder: Path, kind: type[Any], **settings: Any) -> None:
        chosen = ModelSettings(huggingface_model=str(folder), **settings)
        checkpoint = load_checkpoint(Hub(folder, chosen, {}), chosen, Placement("CPU", 0), kind.auto_class)
        self.task = kind(checkpoint, chosen)
        self.forward: EncoderForward | StackedForward
        if isinstance(self.task, ImageTask):
            self.forward = StackedForward(checkpoint.model, self.task.compute)
            return
        self.forward = build_forward(
            checkpoint.model,
            self.task.model_outputs,
            per_token=self.task.per_token,
            reduce=self.task.reduce,
            merge=self.task.merge,
        )

    def ask(self, inputs: Mapping[str, Array], names: Sequence[str] = (), **parameters: Any) -> dict[str, Array]:
        """The outputs for a client that names some, or none."""
        request = self.task.read(inputs, parameters, LIMITS)
        rows = [self.task.encode_row(row, request.options) for row in request.rows]
        outputs = iter(self.forward([each for row in rows for each in row.inputs]))
        results = [self.task.decode(row, request.options, [next(outputs).numpy() for _ in row.inputs]) for row in rows]
        nums_tokens = [sum(each.num_tokens for each in row.inputs) for row in rows]
        declared = self.task.declaration
        names = outputs_to_fill(declared, names, declared.all_outputs, request.default_outputs)
        return encode_results(results, nums_tokens, declared, request.shape, names)

    def json(self, texts: Sequence[str], name: str = "args", **parameters: Any) -> list[Any]:
        rows = self.ask({name: encode_strings(texts, (len(texts),))}, **parameters)["output"]
        return [json.loads(row) for row in rows]
