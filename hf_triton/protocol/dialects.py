# SPDX-License-Identifier: Apache-2.0
"""Names, defaults and tensor types of other servers: OpenAI's API, the vLLM and TensorRT-LLM backends, LiteLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ALIASES: Final[Mapping[str, str]] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "random_seed": "seed",
    "stop": "stop_strings",
    "stop_words": "stop_strings",
    "end_id": "eos_token_id",
    "beam_width": "num_beams",
    "thinking_token_budget": "thinking_budget",
}
"""Names of other servers for our parameters, which have transformers' names."""
SUGGESTIONS: Final[Mapping[str, str]] = {
    "prompt": "text_input",
    "system": "messages",
    "max_length": "max_new_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "json_schema": "guided_json",
    "return_log_probs": "return_logprobs",
    "text": "text_input",
    "args": "text_input",
    "text_inputs": "text_input",
    "max_output_length": "max_new_tokens",
    "timeout": "max_time",
    "echo": "exclude_input_in_output",
    "return_full_text": "exclude_input_in_output",
}
"""What to suggest for an unknown name with a similar meaning but another spelling."""
UNSUPPORTED: Final[Mapping[str, str]] = {
    "model": "the URL names the model",
    "skip_special_tokens": "special tokens are always skipped",
    "embedding_request": "this model generates text",
}
"""Parameters of other servers that no value makes work, and why."""
NO_EFFECT: Final[Mapping[str, object]] = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "detokenize": True,
    **dict.fromkeys(("end_id", "seed"), -1),
    **dict.fromkeys(("return_log_probs", "return_context_logits", "return_generation_logits"), False),
    **dict.fromkeys(("logits_processors", "extra_args")),
}
"""Values of other servers' parameters, mostly defaults, that ask for what happens anyway; they are ignored."""

DIALECT_TYPES: Final[Mapping[str, str]] = {
    "max_tokens": "TYPE_INT32",
    "max_completion_tokens": "TYPE_INT32",
    "min_tokens": "TYPE_INT32",
    "top_k": "TYPE_INT32",
    "seed": "TYPE_UINT64",
    "random_seed": "TYPE_UINT64",
    "end_id": "TYPE_INT32",
    "pad_id": "TYPE_INT32",
    "beam_width": "TYPE_INT32",
}
"""Types that clients of TensorRT-LLM and LiteLLM send; Triton refuses inputs of any type but the declared one."""
BEAM_SEARCH: Final = "use_beam_search"
"""vLLM's: whether the number of completions is the number of beams; see `parameters.read_beam_search`."""
GUIDES: Final = ("structured_outputs", "guided_decoding", "guided_decoding_guide_type", "guided_decoding_guide")
"""Structured output in the forms of vLLM, in the first two, and TensorRT-LLM; see `structured_output.read_guides`."""
DIALECT_INPUTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(GUIDES, "TYPE_STRING"),
    "return_log_probs": "TYPE_BOOL",
    "return_context_logits": "TYPE_BOOL",
    "return_generation_logits": "TYPE_BOOL",
}
"""Tensors that clients of TensorRT-LLM send, beside the aliases. Those of unsupported parameters are accepted with the
values in `NO_EFFECT`."""


def has_no_effect(name: str, value: object) -> bool:
    """Whether a parameter of another server asks for what happens anyway."""
    if name not in NO_EFFECT or isinstance(value, bool) != isinstance(NO_EFFECT[name], bool):
        return False
    return NO_EFFECT[name] == value
