# SPDX-License-Identifier: Apache-2.0
"""Parameters of a whole request, and the table of all request parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import annotated_types
from pydantic import BaseModel, ConfigDict

from hf_triton.protocol.chat_request import ChatOptions
from hf_triton.protocol.model_info import MODEL_INFO
from hf_triton.protocol.names import CANCEL
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.protocol.sleep import SLEEP
from hf_triton.protocol.tokenizer_request import TOKENIZER_REQUEST
from hf_triton.protocol.validation import validated


class RequestOptions(BaseModel):
    """Parameters of a whole request; those of one prompt are in `GenerationParameters`. None means "not given"."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    stream: bool | None = None
    """Whether to send the response in deltas as tokens are generated. Works in decoupled folders, over
    `/generate_stream` and gRPC streams; other folders answer once. By default the folder's setting `stream`."""

    exclude_input_in_output: bool | None = None
    """Whether `text_output` leaves out the prompt. By default the folder's setting `exclude_input_in_output`, and true
    for streams and chats."""

    tokenize_only: bool | None = None
    """Whether to return the prompt as the model gets it and generate nothing: `text_output` is the prompt, of a chat as
    the template renders it, of `prompt_token_ids` with special tokens; `return_prompt_token_ids` and
    `return_num_input_tokens` fill their outputs, and `return_output` gives vLLM's JSON: `count`, `max_model_len` (the
    context), `tokens` and `token_strs`. The prompt may be longer than the context."""

    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a prompt. By default true for texts, and false for chats, whose
    template writes them."""

    cancel: bool | None = None
    """Whether to cancel the requests with this request's id and do nothing else."""

    model_info: bool | None = None
    """Whether to answer, at once and in the output `output`, what the model is: a JSON object of its task, context
    length, engine, dtype, memory and chat template. Nothing else is done, and the request is not counted."""

    sleep: bool | None = None
    """Whether the model is to sleep, once no request is in flight, or to wake (`false`). The output `output` is a JSON
    object then, `{"is_sleeping": true, "seconds": 0.012, "given_back_bytes": 123456}`; work that arrives before the
    model sleeps keeps it awake. Any later request wakes it. Nothing else is done, and the request is not counted."""

    tokenizer_request: str | None = None
    """A question to the tokenizer, of a model of any task: JSON text, answered as JSON in the output `output`.
    `{"text": "...", "add_special_tokens": true}` asks for a text's tokens, `{"tokens": [...]}` for the text of tokens,
    `{}` for the tokenizer's configuration. Nothing else is done, and the request is not counted."""

    return_finish_reason: bool | None = None
    """Whether to fill the output `finish_reason`: `stop` (end-of-sequence token or stop string), `length`
    (`max_new_tokens`) or `deadline` (`max_time`)."""

    return_stop_string: bool | None = None
    """Whether to fill the output `stop_string`, the one of the stop strings that ended the completion; empty: none
    did."""

    return_num_input_tokens: bool | None = None
    """Whether to fill the output `num_input_tokens`, the length of the prompt. A stream has it in its first and in its
    last response."""

    return_prompt_token_ids: bool | None = None
    """Whether to fill the output `prompt_token_ids`, a JSON array of the prompt's tokens. A stream has it in its first
    and in its last response."""

    return_token_ids: bool | None = None
    """Whether to fill the output `token_ids`, a JSON array of the completion's tokens, in each response of a stream of
    the new ones. The end-of-sequence token is not among them, those of a stop string are."""

    return_num_output_tokens: bool | None = None
    """Whether to fill the output `num_output_tokens`, the length of the completion."""

    return_num_cached_tokens: bool | None = None
    """Whether to fill the output `num_cached_tokens`: how many tokens of the prompt came from the prefix cache."""

    return_num_reasoning_tokens: bool | None = None
    """Whether to fill the output `num_reasoning_tokens`: how many tokens the message's `reasoning_content` has, as the
    tokenizer divides it, without tags. Needs `return_message`; otherwise 0."""

    return_cumulative_logprob: bool | None = None
    """Whether to fill the output `cumulative_logprob`, the sum of the log probabilities of the completion's tokens."""

    return_logprobs: bool | None = None
    """Whether to fill the output `logprobs`: a JSON array with one object per token of the completion, in each response
    of a stream of the new ones. It maps the ids of the token and of the most likely `logprobs` tokens to `logprob` (the
    model's own, before temperature, penalties and biases), `rank` (`null` if the token is not among the most likely),
    `decoded_token`, and `bytes` where that is a part of a character."""

    return_message: bool | None = None
    """Whether to fill the output `message`: a JSON object in the form of OpenAI's API, with `role`, `content`,
    `reasoning_content` and `tool_calls`; in a stream, what is new of it. See docs/chat.md."""

    return_output: bool | None = None
    """Whether to fill the output `output`, the text as JSON in MLServer's form: `{"generated_text": ...}`, in folders
    with such a task `{"summary_text": ...}` or `{"translation_text": ...}`. By default true in folders for
    `summarization`, `translation` and `text2text-generation`, and if the prompts are in MLServer's inputs `args` or
    `text_inputs`: then it is the only output of a request that names none. Streams do not have it."""

    return_timings: bool | None = None
    """Whether the last response has timings among its parameters, in microseconds since the request's arrival:
    `queue_time_us` (first prompt admitted), `time_to_first_token_us` and `e2e_request_latency_us` (response built).
    `/generate` shows them beside the outputs. Behind a stream door a request arrives at the model's folder. Needs
    Triton 25.02 or newer; older servers reject it."""

    pad_id: Annotated[int, annotated_types.Ge(0)] | None = None
    """Padding token of TensorRT-LLM's clients. Accepted and ignored."""

    sampling_parameters: str | None = None
    """Generation parameters as a JSON string, the form of the vLLM backend: `{"temperature": 0.5, "max_tokens":
    20}`."""


PARAMETERS: Final[Mapping[str, type[BaseModel]]] = {
    name: model for model in (RequestOptions, ChatOptions, GenerationParameters) for name in model.model_fields
}
"""Every request parameter and the model that declares it."""
BEFORE_INPUTS: Final = (CANCEL, MODEL_INFO, SLEEP, TOKENIZER_REQUEST)
"""Never inputs: they are read before tensors are."""
OPTIONS: Final = frozenset(RequestOptions.model_fields)
CHAT_OPTIONS: Final = frozenset(ChatOptions.model_fields)
NO_OPTIONS: Final = RequestOptions()


def parse_options(values: Mapping[str, object]) -> RequestOptions:
    """Check the parameters among `values` that are request options."""
    given = {name: value for name, value in values.items() if name in OPTIONS}
    return validated(RequestOptions, given) if given else NO_OPTIONS
