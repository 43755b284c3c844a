# SPDX-License-Identifier: Apache-2.0
"""`POST /tokenize` and `/detokenize`, and `GET /tokenizer_info`, in vLLM's forms; the model's own tokenizer answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final

import annotated_types
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_triton.errors import clip
from hf_triton.protocol.custom_tools import hosted_type
from hf_triton.protocol.names import JSON_OUTPUT
from hf_triton.protocol.tokenizer_request import TOKENIZER_REQUEST
from hf_triton_gateway.app_state import gateway_of, request_id_of
from hf_triton_gateway.chat.answers import json_output, text_of
from hf_triton_gateway.chat.chat_completions import prefix_of
from hf_triton_gateway.chat.fields import Fields, Messages, TokenIds, Tools
from hf_triton_gateway.encoders.encoders import NUM_TOKENS
from hf_triton_gateway.http.api_errors import ApiError
from hf_triton_gateway.http.bodies import ANY_TASK, ChatRoute, beside_loop, json_response
from hf_triton_gateway.http.client_names import ClientNames
from hf_triton_gateway.http.disconnect import run_while_connected
from hf_triton_gateway.http.hints import pass_over
from hf_triton_gateway.triton.triton_messages import TEXT_GENERATION, Folder, Generation, Outputs, TextRequest, size_of

router = APIRouter(route_class=ChatRoute)
OPTIONS: Final = ("add_special_tokens", "add_generation_prompt", "continue_final_message")


class _TokenFields(Fields):
    task_of_model: ClassVar[str | None] = ANY_TASK

    model: Annotated[str, annotated_types.MinLen(1)]
    """One of `/v1/models`; by default the only one, or `--default-model`."""


class TokenizeRequest(_TokenFields):
    """The body of `/tokenize`: a prompt or messages."""

    prompt: str | None = None
    """A text."""

    messages: Messages | None = None
    """A conversation, which goes through the model's chat template."""

    tools: Tools | None = None
    """Functions that the chat template describes."""

    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens; by default to a prompt, and not to messages, whose template writes
    them."""

    return_token_strs: bool | None = None
    """Whether `token_strs` has the tokens as the vocabulary spells them; else it is null."""

    add_generation_prompt: bool | None = None
    """Whether to append the start of an assistant message; by default true."""

    continue_final_message: bool | None = None
    """Whether the last message is left open."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""


class DetokenizeRequest(_TokenFields):
    """The body of `/detokenize`."""

    tokens: TokenIds
    """Token ids."""


@router.post("/tokenize", response_model=dict[str, Any])
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text or a conversation."""
    if (body.prompt is None) == (body.messages is None):
        param = None if body.prompt is None else "prompt"
        raise ApiError(400, "give either prompt or messages", param=param, code="invalid_parameter")
    more = {} if body.return_token_strs else {"token_strs": None}
    folder = await gateway_of(request).models.folder(body.model, task=None)
    if folder.task != TEXT_GENERATION:
        if body.prompt is None:
            message = f"messages is for models that generate text, and '{body.model}' is for {folder.task}: give prompt"
            raise ApiError(400, message, param="messages", code="invalid_parameter")
        asked = {"text": body.prompt, "add_special_tokens": body.add_special_tokens is not False}
        outputs = await _ask_tokenizer(request, body.model, folder, asked, names={"text": "prompt"})
        return await json_response(size_of(outputs), lambda: json_output(outputs, JSON_OUTPUT, 0) | more)
    options: dict[str, bool | int | str] = {
        name: value for name in OPTIONS if (value := getattr(body, name)) is not None
    }
    for name in ("tools", "chat_template_kwargs"):
        if value := getattr(body, name):
            options[name] = json.dumps(value, ensure_ascii=False)
    for kind in filter(None, map(hosted_type, body.tools or ())):
        pass_over(f"tools.{kind}")
    prompt: dict[str, Any] = {"messages": body.messages} if body.messages else {"prompts": [body.prompt]}
    names = {}
    if body.continue_final_message is None and body.messages and (place := prefix_of(body.messages)):
        options["continue_final_message"], names = True, {"continue_final_message": place}
    outputs = await _run(request, body, options, returns=(JSON_OUTPUT,), names=names, **prompt)
    return await json_response(size_of(outputs), lambda: json_output(outputs, JSON_OUTPUT, 0) | more)


@router.post("/detokenize", response_model=dict[str, Any])
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    if not body.tokens:
        return await json_response(0, dict, prompt="")
    folder = await gateway_of(request).models.folder(body.model, task=None)
    if folder.task != TEXT_GENERATION:
        outputs = await _ask_tokenizer(request, body.model, folder, {"tokens": body.tokens})
        return await json_response(size_of(outputs), json_output, outputs, JSON_OUTPUT, 0)
    outputs = await _run(request, body, {}, returns=(), prompt_token_ids=body.tokens)
    return await json_response(size_of(outputs), dict, prompt=text_of(outputs, 0))


@router.get("/tokenizer_info", response_model=dict[str, Any])
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    """The configuration of a model's tokenizer: its class, special tokens and chat template."""
    gateway = gateway_of(request)
    name = model or (await gateway.models.only(None, gateway.config.default_model, way="by ?model=NAME")).name
    outputs = await _ask_tokenizer(request, name, await gateway.models.folder(name, task=None), {})
    return await json_response(size_of(outputs), json_output, outputs, JSON_OUTPUT, 0)


async def _ask_tokenizer(
    request: Request, model: str, folder: Folder, asked: Mapping[str, object], names: Mapping[str, str] | None = None
) -> Outputs:
    """What a model's tokenizer answers, see `hf_triton.protocol.tokenizer_request`."""
    if folder.task is None or not {JSON_OUTPUT, NUM_TOKENS} <= folder.outputs:
        message = f"the model {clip(model)} is of another library, whose tokenizer cannot be asked"
        raise ApiError(400, message, param="model", code="unsupported_parameter")
    inputs = folder.required or (sorted(folder.inputs)[:1] if folder.max_batch_size else ())
    question = TextRequest(
        model,
        request_id_of(request),
        folder.task,
        {name: [""] * folder.fixed_sizes.get(name, 1) for name in inputs},  # which are not read
        [JSON_OUTPUT],
        {TOKENIZER_REQUEST: await beside_loop(request, json.dumps, asked)},
        ClientNames(names or {}),
    )
    return await run_while_connected(request.receive, gateway_of(request).models.generate(question))


async def _run(
    request: Request,
    body: TokenizeRequest | DetokenizeRequest,
    options: dict[str, bool | int | str],
    returns: tuple[str, ...],
    names: Mapping[str, str] = MappingProxyType({}),
    **prompt: Any,
) -> Outputs:
    generation = Generation(
        body.model,
        request_id_of(request),
        {},
        {"tokenize_only": True, "exclude_input_in_output": False, **options},
        returns=returns,
        names=body.names_of({"prompt_token_ids": "tokens", "text_input": "prompt", **names}, rows=()),
        num_bytes=len(await request.body()),
        **prompt,
    )
    return await run_while_connected(request.receive, gateway_of(request).models.generate(generation))
