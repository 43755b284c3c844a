# SPDX-License-Identifier: Apache-2.0
"""The names of the tensors in the published files of the models that the ready folders name; `#` is a layer's number.

What a file has beside the tensors of the class that its config names is in the load reports that transformers prints,
which people paste into issues and README files: each such line has its source.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def _both(*stems: str) -> list[str]:
    return [f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")]


def _bert(prefix: str) -> list[str]:
    """BERT's and RoBERTa's own."""
    layer = f"{prefix}encoder.layer.#."
    attention = [f"{layer}attention.{name}" for name in ("self.query", "self.key", "self.value", "output.dense")]
    dense = [f"{layer}{name}" for name in ("attention.output.LayerNorm", "intermediate.dense", "output.dense")]
    tables = [f"{prefix}embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")]
    return [*tables, *_both(f"{prefix}embeddings.LayerNorm", *attention, *dense, f"{layer}output.LayerNorm")]


_DISTIL = "distilbert.transformer.layer.#."
_FALCON = "transformer.h.#."
_PERSIMMON = "model.layers.#."
_LLAMA = "model.layers.#."

PUBLISHED: Mapping[str, list[str]] = {
    # "not used when initializing DistilBertModel: ['pre_classifier.weight', 'classifier.bias', ...]", nothing else
    "sentiment": [
        "distilbert.embeddings.word_embeddings.weight",
        "distilbert.embeddings.position_embeddings.weight",
        *_both("distilbert.embeddings.LayerNorm", f"{_DISTIL}sa_layer_norm", f"{_DISTIL}output_layer_norm"),
        *_both(*(f"{_DISTIL}attention.{name}_lin" for name in ("q", "k", "v", "out"))),
        *_both(f"{_DISTIL}ffn.lin1", f"{_DISTIL}ffn.lin2", "pre_classifier", "classifier"),
    ],
    # "dslim/bert-base-NER were not used when initializing BertForTokenClassification: ['bert.pooler.dense.bias', ...]"
    "ner": [*_bert("bert."), *_both("bert.pooler.dense", "classifier")],
    # "TFRobertaForQuestionAnswering: ['roberta.embeddings.position_ids']" of deepset/tinyroberta-squad2; the pooler is
    # what transformers 3, which trained it, saved of RobertaForQuestionAnswering
    "qa": [*_bert("roberta."), "roberta.embeddings.position_ids", *_both("roberta.pooler.dense", "qa_outputs")],
    # "LOAD REPORT" of BAAI/bge-reranker-base: "roberta.embeddings.position_ids | UNEXPECTED", nothing else
    "reranker": [
        *_bert("roberta."),
        "roberta.embeddings.position_ids",
        *_both("classifier.dense", "classifier.out_proj"),
    ],
    # a BertModel of transformers 4.30, which saved its buffer
    "bge": [*_bert(""), "embeddings.position_ids", *_both("pooler.dense")],
    "falcon7b": [
        "transformer.word_embeddings.weight",
        *_both("transformer.ln_f", f"{_FALCON}input_layernorm"),
        f"{_FALCON}self_attention.query_key_value.weight",
        f"{_FALCON}self_attention.dense.weight",
        f"{_FALCON}mlp.dense_h_to_4h.weight",
        f"{_FALCON}mlp.dense_4h_to_h.weight",
        "lm_head.weight",
    ],
    "persimmon8b": [
        "model.embed_tokens.weight",
        *_both("model.final_layernorm", f"{_PERSIMMON}input_layernorm", f"{_PERSIMMON}post_attention_layernorm"),
        *_both(*(f"{_PERSIMMON}self_attn.{name}" for name in ("query_key_value", "dense"))),
        *_both(*(f"{_PERSIMMON}self_attn.{name}_layernorm" for name in ("q", "k"))),
        *_both(f"{_PERSIMMON}mlp.dense_h_to_4h", f"{_PERSIMMON}mlp.dense_4h_to_h"),
        "lm_head.weight",
    ],
    # model.safetensors.index.json of meta-llama/Llama-2-7b-hf lists a rotary_emb.inv_freq in each layer
    "llama7b": [
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(f"{_LLAMA}{name}_layernorm.weight" for name in ("input", "post_attention")),
        *(f"{_LLAMA}self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")),
        *(f"{_LLAMA}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        f"{_LLAMA}self_attn.rotary_emb.inv_freq",
        "lm_head.weight",
    ],
}
"""By ready folder."""


def publish(folder: Path, name: str) -> Path:
    """Give a tiny checkpoint the tensors that the published one has, and no other."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    layers = sorted({match[1] for key in tensors if (match := re.search(r"\.(\d+)\.", key))})
    names = {pattern.replace("#", layer) for pattern in PUBLISHED[name] for layer in layers}
    assert tensors.keys() <= names, sorted(tensors.keys() - names)
    width = next(iter(tensors[key] for key in tensors if key.endswith(("norm.weight", "Norm.weight")))).shape[0]
    shapes = {"pooler.dense.weight": (width, width), "pooler.dense.bias": (width,), "inv_freq": (8,)}
    for key in sorted(names - tensors.keys()):
        if key.endswith("position_ids"):
            tensors[key] = torch.arange(130)[None]
        else:
            tensors[key] = torch.rand(next(shape for end, shape in shapes.items() if key.endswith(end)))
    save_file(tensors, file, {"format": "pt"})
    return folder
