# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, the same for every tokenizer. Knows no engine and no tensors."""

from __future__ import annotations

from typing import Any, Final

from hf_triton.errors import RequestError

REPLACEMENT: Final = "\ufffd"
MAX_CUT_TOKENS: Final = 3  # UTF-8 needs four bytes at most, so an incomplete character has at most three


class TextCodec:
    """A tokenizer, used the one right way.

    Args:
        tokenizer: A transformers tokenizer.
        vocabulary_size: Rows of the model's embedding; a token id beyond it would crash the model.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._tokenizer("")  # drops a padding or truncation saved with it: later calls change nothing, from any thread

    def encode(self, text: str, row: int) -> list[int]:
        """A prompt as token ids, with the special tokens that the tokenizer adds by itself; never empty.

        Raises:
            RequestError: The prompt is empty and the model has no token to begin with, or a token is unknown to the
                model. `row` says which prompt.
        """
        ids: list[int] = self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        if not ids:  # transformers begins an empty prompt with this token too
            ids = [
                token for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id) if token is not None
            ][:1]
        if not ids:
            raise RequestError(
                "invalid_input", f"text_input row {row} is empty, and this model needs a token to begin with"
            )
        if max(ids) >= self._vocabulary_size:
            raise RequestError(
                "invalid_input",
                f"text_input row {row} holds token {max(ids)}, and the model knows {self._vocabulary_size} tokens: "
                "tokenizer and model do not belong together",
            )
        return ids

    def continuation(self, prompt_ids: list[int], token_ids: list[int]) -> str:
        """The text that `token_ids` add to the prompt.

        Decoded together with the prompt and cut, because a tokenizer may drop a space at the beginning of a text.
        """
        before, whole = self._decode(prompt_ids), self._decode(prompt_ids + token_ids)
        return whole[len(before) :] if whole.startswith(before) else self._decode(token_ids)

    def completion(self, token_ids: list[int]) -> str:
        """The text of tokens that stand alone, such as an encoder-decoder's answer."""
        return self._decode(token_ids)

    def _decode(self, ids: list[int]) -> str:
        """Tokens as text; a character that is cut off at the end becomes U+FFFD and harms nothing before it.

        Sentencepiece tokenizers with bytes (Llama 2) decode a whole run of them to U+FFFD where its last character is
        incomplete.
        """
        text = self._decode_once(ids)
        if text.endswith(REPLACEMENT):
            for num_cut in range(1, min(MAX_CUT_TOKENS, len(ids)) + 1):
                whole = self._decode_once(ids[:-num_cut])
                if not whole.endswith(REPLACEMENT):
                    return text if text.startswith(whole) else whole + REPLACEMENT
        return text

    def _decode_once(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
