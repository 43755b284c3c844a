# SPDX-License-Identifier: Apache-2.0
"""Gives the tokenizer that transformers makes of a GGUF header what it leaves out of it, so that ids are llama.cpp's.

That is, of byte-level vocabularies: special tokens that are written in other characters than the byte alphabet
(DeepSeek's), the way in which text is split before its merges, and whether a prompt begins with a first token; of
sentencepiece's: the space before a text, which may begin with spaces of its own.
"""

# ruff: noqa: RUF001  # the patterns name characters of other scripts

from __future__ import annotations

import json
import logging
from typing import Any, Final

from hf_triton.errors import CheckpointError, clip
from hf_triton.hub.gguf_header import TOKENS, TYPES, GgufHeader

logger = logging.getLogger(__name__)

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
"""What llama.cpp calls such vocabularies."""
SPACE: Final = "▁"
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found whole in a text."""
GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CONTRACTED: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS: Final = (r"\p{N}", GPT2)
WORDS: Final = (r" ?[^(\s|.,!?…。，、।۔،)]+",)
CJK: Final = "[一-龥ࠀ-一가-퟿]+"
THREE_DIGITS: Final = (rf"{CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}",)
ONE_DIGIT: Final = (rf"{CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}",)
DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS: Final[dict[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK_V3),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "a.x-4.0", "mellum"), (GPT2,)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), WORDS),
    "viking": (*WORDS, r"\p{N}"),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open"), ONE_DIGIT),
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), THREE_DIGITS),
}
"""How text is split, by llama.cpp's name for it, if transformers would split it as GPT-2's: each pattern divides the
pieces of the one before, as in llama.cpp's `llama-vocab.cpp`."""
WHOLE_WORDS: Final = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "glm4", "glm5"),
)
"""Vocabularies that take a word that they have whole, without its merges."""
FIRST_TOKEN: Final = (*WHOLE_WORDS[:10], "chameleon")
"""Vocabularies whose prompts begin with their first token, unless the header says otherwise."""


def mend_tokenizer(tokenizer: Any, header: GgufHeader, name: str) -> None:
    """Complete a tokenizer, see above; other vocabularies stay as they are.

    Raises:
        CheckpointError: The header splits text in a way that is not known.
    """
    from tokenizers import Tokenizer

    vocabulary = header.values.get("tokenizer.ggml.model")
    if TOKENS not in header.values or vocabulary not in (BYTE_LEVEL, SENTENCEPIECE):
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    if vocabulary == BYTE_LEVEL:
        _spell_special_tokens(state, header)
        _split(state, header.values.get("tokenizer.ggml.pre", "default"), name)
    elif not header.architecture.startswith("gemma"):
        _begin_with_space(state, is_added=header.values.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    by_default = vocabulary == SENTENCEPIECE or header.values.get("tokenizer.ggml.pre") in FIRST_TOKEN
    adds_first = header.values.get("tokenizer.ggml.add_bos_token", by_default)
    tokenizer.add_bos_token = adds_first and tokenizer.bos_token_id is not None


def _begin_with_space(state: dict[str, Any], *, is_added: bool) -> None:
    """Put a space before a text, whatever it begins with, as models of this kind were trained; or none."""
    first = [{"type": "Prepend", "prepend": SPACE}] if is_added else []
    others = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    state |= {"normalizer": {"type": "Sequence", "normalizers": [*first, others]}, "pre_tokenizer": None}


def _split(state: dict[str, Any], kind: str, name: str) -> None:
    """Split text as the header says, if it is known how."""
    if kind in SPLITS:
        patterns = [{"Regex": pattern} for pattern in SPLITS[kind]]
        steps = [{"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False} for pattern in patterns]
        last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, last]}
    elif kind not in _known_splits():
        raise CheckpointError(
            "unsupported_model",
            f"{name} splits text in the way {clip(kind)} (tokenizer.ggml.pre), which is not known here: set tokenizer "
            "to the repository of the original, or choose another GGUF file",
        )
    if kind == "default":
        logger.warning("%s does not say how its vocabulary splits text: ids may differ from the original's", name)
    state["model"]["ignore_merges"] = kind in WHOLE_WORDS


def _known_splits() -> Any:
    """The ways that transformers knows."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return GGUF_PRE_TOKENIZER_SPLITS


def _spell_special_tokens(state: dict[str, Any], header: GgufHeader) -> None:
    """Give tokens that are found whole their own ids: transformers spells them in bytes, and adds some anew."""
    vocabulary: dict[str, int] = state["model"]["vocab"]
    spellings = {token_id: spelling for spelling, token_id in vocabulary.items()}
    tokens = header.values[TOKENS].texts
    if TYPES in header.values:
        types = header.values[TYPES].numbers
    else:  # an older file; its padding may be any token
        named = {header.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        types = [CONTROL if token_id in named else 0 for token_id in range(len(tokens))]
    added, seen = [], set()
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in (CONTROL, USER_DEFINED) or token in seen:
            continue
        seen.add(token)
        if (spelling := spellings.get(token_id)) not in (None, token):
            del vocabulary[spelling]
        vocabulary[token] = token_id
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added.append({"id": token_id, "content": token, **flags, "special": kind == CONTROL})
    state["added_tokens"] = added
