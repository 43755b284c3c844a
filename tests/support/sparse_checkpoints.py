# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints that make sparse embeddings, as SparseEncoder and FlagEmbedding have them, and references."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.support.sentence_checkpoints import quietly, save_sentence_model
from tests.support.tasks import save_task_checkpoint


def save_splade(folder: Path, family: str = "bert", *, max_length: int | None = None, **options: Any) -> Path:
    """A checkpoint as SparseEncoder saves it; options of the encoder, or of SpladePooling by their names."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    plain = save_task_checkpoint(folder.with_name(folder.name + "-plain"), family, "masks")
    pooling = {name: options.pop(name) for name in ("pooling_strategy", "activation_function") if name in options}
    with quietly():
        transformer: Any = Transformer(str(plain), transformer_task="fill-mask", max_seq_length=max_length)
        modules: Any = [transformer, SpladePooling(**pooling)]
        SparseEncoder(modules=modules, device="cpu", **options).save(str(folder), create_model_card=False)
    return folder


def save_lexical(folder: Path, weights: Any = None, name: str = "sparse_linear.pt") -> Path:
    """A checkpoint as bge-m3 is one: dense by modules.json, and a layer beside it."""
    save_sentence_model(folder, "xlm-roberta", pooling="cls")
    torch.manual_seed(5)
    linear = torch.nn.Linear(32, 1).half()
    torch.save(dict(linear.state_dict()) if weights is None else weights, folder / name)
    torch.save({}, folder / "colbert_linear.pt")
    return folder


def expected_splade(folder: Path, texts: list[str], **options: Any) -> npt.NDArray[np.float32]:
    """What SparseEncoder makes of texts, one at a time."""
    from sentence_transformers import SparseEncoder

    with quietly():
        model = SparseEncoder(str(folder), device="cpu", local_files_only=True)
        vectors: Any = model.encode(texts, batch_size=1, convert_to_sparse_tensor=False, **options)
    return np.asarray(vectors.numpy())


def expected_lexical(folder: Path, texts: list[str]) -> npt.NDArray[np.float32]:
    """FlagEmbedding's formula: for each token id the largest weight of its places, without four special tokens."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder)
    linear = torch.nn.Linear(32, 1)
    linear.load_state_dict(torch.load(folder / "sparse_linear.pt", weights_only=True))
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    rows = np.zeros((len(texts), 200), np.float32)
    for row, text in zip(rows, texts, strict=True):
        ids = tokenizer(text)["input_ids"]
        with torch.inference_mode():
            weights = linear(model(input_ids=torch.tensor([ids])).last_hidden_state).relu()[0, :, 0]
        for token_id, weight in zip(ids, weights.tolist(), strict=True):
            row[token_id] = 0 if token_id in unused else max(row[token_id], weight)
    return rows
