# SPDX-License-Identifier: Apache-2.0
"""One small tokenizer of each kind."""

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_triton.tasks.text_generation.text_codec import TextCodec

BOS, EOS, UNK = "<s>", "</s>", "<unk>"
SPECIAL = [BOS, EOS, UNK]
CORPUS = [
    "The old harbour has two boats, one lighthouse and more gulls than people.",
    "Where does the river go after the bridge? It goes to the mill, and then to the sea.",
    "Der Zug fährt über die Brücke, et le café est déjà fermé.",
    "你好世界 🙂 naïve \t tabs",
]
TEXTS = [
    "The river goes",
    " leading space",
    "trailing space ",
    "double  spaces  inside",
    "fährt über",
    "你好世界",
    "🙂🙂",
    "nul\0byte",
    "line\nbreak\n",
    "\ufffd a replacement character of one's own",
    "e\u0301",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> Tokenizer:
    """GPT-2, Falcon, Qwen: every byte has a token, spaces belong to the word behind them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2: sentencepiece's BPE; a space is put in front and taken away again, rare characters are bytes."""
    pieces = ["▁", *sorted(set("".join(CORPUS[:2])) - {" "}), "▁t", "▁th", "▁the", "▁g", "▁go", "es"]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys([*SPECIAL, *BYTES, *pieces]))}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "g"), ("▁g", "o"), ("e", "s")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=UNK, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def unigram() -> Tokenizer:
    """T5, XGLM: a unigram model, words begin with a space, the first one's is dropped."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    letters = sorted(set("".join(CORPUS + TEXTS)) - {" "})
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token=UNK, initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """BPE with sentencepiece's spaces and no bytes: what it never saw is unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    letters = sorted(set("".join(CORPUS + TEXTS)) - {" "})
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, initial_alphabet=letters)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT-like: words without spaces, which decoding inserts."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL))
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    each.__name__: each for each in (byte_level, byte_fallback, unigram, metaspace, wordpiece)
}
WITH_BYTES = ["byte_level", "byte_fallback"]


@cache
def tokenizer_of(kind: str) -> Any:
    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=KINDS[kind](), bos_token=BOS, eos_token=EOS, unk_token=UNK)


def codec_of(kind: str) -> TextCodec:
    return TextCodec(tokenizer_of(kind), len(tokenizer_of(kind)))


def raw_ids(kind: str, text: str) -> list[int]:
    """Token ids without added special tokens."""
    return list(tokenizer_of(kind)(text, add_special_tokens=False)["input_ids"])


def bytes_of(kind: str, text: str) -> list[int]:
    if kind == "byte_fallback":
        return [tokenizer_of(kind).convert_tokens_to_ids(BYTES[byte]) for byte in text.encode()]
    return [token for letter in text for token in raw_ids(kind, letter)]


def train_sentencepiece(file: Path, kind: str, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """Train a model on the spot, and read it as sentencepiece does."""
    written = io.BytesIO()
    given = {"vocab_size": 120, "hard_vocab_limit": False, "character_coverage": 1.0, "minloglevel": 2, **options}
    sentences = [sentence.lower() for sentence in CORPUS[:3]] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=written, model_type=kind, **given
    )
    file.write_bytes(written.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def write_opus_tokenizer(folder: Path) -> sentencepiece.SentencePieceProcessor:
    """Write the tokenizer's files of Opus-MT, a model for each side and one vocabulary; returns the source's model."""
    source = train_sentencepiece(folder / "source.spm", "unigram")
    target = train_sentencepiece(folder / "target.spm", "unigram", normalization_rule_name="identity")
    pieces = [each.id_to_piece(token) for each in (source, target) for token in range(3, each.get_piece_size())]
    names = ["</s>", "<unk>", *dict.fromkeys(pieces), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({name: place for place, name in enumerate(names)}))
    config = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return source
