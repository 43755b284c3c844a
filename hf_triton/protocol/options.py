# SPDX-License-Identifier: Apache-2.0
"""Parameters of a whole request, and the table of all request parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError

from hf_triton.errors import RequestError
from hf_triton.protocol.chat import ChatOptions
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.protocol.validation import problems


class RequestOptions(BaseModel):
    """Parameters of a whole request; those of generation are in `GenerationParameters`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    stream: bool | None = None
    """Whether the text comes piece by piece, as it is written: from folders that say `decoupled`, over
    `/generate_stream` and gRPC streams. The others answer once. By default what the folder's setting of the same name
    says."""

    exclude_input_in_output: bool | None = None
    """Whether `text_output` holds the continuation alone, without the prompt. By default what the folder's setting of
    the same name says; a stream leaves the prompt out."""

    return_finish_reason: bool | None = None
    """Whether to fill the output `finish_reason`: `stop` (the model or a stop string ended the text), `length`
    (`max_new_tokens`) or `deadline` (`max_time`)."""

    return_num_input_tokens: bool | None = None
    """Whether to fill the output `num_input_tokens`, the prompt's."""

    return_num_output_tokens: bool | None = None
    """Whether to fill the output `num_output_tokens`, the text's."""

    return_cumulative_logprob: bool | None = None
    """Whether to fill the output `cumulative_logprob`, the sum of the log probabilities of the text's tokens."""

    return_logprobs: bool | None = None
    """Whether to fill the output `logprobs`: a JSON array with an object for each token of the text, which holds the
    token and the likeliest `logprobs` by their ids, each with `logprob` (the model's own, before temperature, penalties
    and biases), `rank` among those likeliest (`null` beyond them) and `decoded_token`."""

    return_timings: bool | None = None
    """Whether the last response has the request's own times among its parameters, in whole microseconds since its
    arrival: `queue_time_us` until the engine took a prompt of it, `time_to_first_token_us` until a text of it had its
    first token, `e2e_request_latency_us` until its answer was made. In the JSON of `/generate` they are beside the
    outputs. Behind a stream door a request arrives where its model is. Needs a server of Triton 25.02 or newer, and is
    refused by others."""

    pad_id: Annotated[int, annotated_types.Ge(0)] | None = None
    """What clients of TensorRT-LLM say of padding. It is in no text, so that this changes none."""

    sampling_parameters: str | None = None
    """Generation parameters as one JSON text, as the vLLM backend takes them: `{"temperature": 0.5, "max_tokens": 20}`.
    """


PARAMETERS: Final[Mapping[str, type[BaseModel]]] = {
    name: model for model in (RequestOptions, ChatOptions, GenerationParameters) for name in model.model_fields
}
"""Every request parameter and where it is declared."""
OPTIONS: Final = frozenset(RequestOptions.model_fields)
CHAT_OPTIONS: Final = frozenset(ChatOptions.model_fields)
NO_OPTIONS: Final = RequestOptions()


def parse_options(row: Mapping[str, object]) -> RequestOptions:
    said = {name: value for name, value in row.items() if name in OPTIONS}
    try:
        return RequestOptions.model_validate(said) if said else NO_OPTIONS
    except ValidationError as error:
        raise RequestError("invalid_parameter", problems(RequestOptions, error)[0].sentence) from None
