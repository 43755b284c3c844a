# SPDX-License-Identifier: Apache-2.0
"""From a prompt of a checked request to tokens and sampling parameters. Knows no engine."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from hf_triton.errors import RequestError
from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.protocol.chat import Chat
from hf_triton.protocol.options import RequestOptions
from hf_triton.protocol.parameters import GenerationParameters, beam_conflict
from hf_triton.protocol.prompts import PROMPT_TOKEN_IDS, Prompt, prompt_name
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.sampling.params import SamplingParams
from hf_triton.tasks.checked_hooks import CheckedHooks
from hf_triton.tasks.text_generation.adapters import AdapterStore
from hf_triton.tasks.text_generation.chat_template import ChatTemplate
from hf_triton.tasks.text_generation.resolve import (
    PreparedPrompt,
    check_token_ids,
    resolve_request_params,
    resolve_sampling_params,
)
from hf_triton.tasks.text_generation.response_template import MessageFormat
from hf_triton.tasks.text_generation.text_to_text import TEXT_FIELDS, Direction, TextToText
from hf_triton.tasks.text_generation.tokenizer import TextCodec

MAX_INLINE_CHARACTERS = 1000  # of a prompt that is tokenized in the caller's thread: 0.2 ms, less than a thread costs
NUM_BAD_WORDS_KEPT = 32  # prompts of a request, and often requests of a client, share their bad words


class PromptPreparer:
    """Prepares prompts. May be used from several threads.

    Args:
        codec: The model's tokenizer.
        chat_template: Renders chats.
        grammars: Compiles grammars.
        hooks: The folder's own.
        messages: Makes messages of completions.
        adapters: The folder's LoRA adapters.
        eos_ids: The model's own end-of-sequence tokens.
        context_length: Tokens that a prompt and its completion may have together.
        is_encoder_decoder: Whether prompt and completion are bounded each, and outputs never contain the prompt (T5).
        defaults: The folder's and the checkpoint's parameters; the first that sets one wins.
        max_output_length: New tokens if neither request nor defaults set a number.
        max_num_seqs: Sequences that one prompt may ask for.
        excludes_prompt: Whether outputs leave the prompt out if the request does not say.
        text_to_text: The folder's task; None: text generation.
    """

    def __init__(
        self,
        codec: TextCodec,
        chat_template: ChatTemplate,
        grammars: GrammarCompiler,
        hooks: CheckedHooks,
        messages: MessageFormat,
        adapters: AdapterStore,
        *,
        eos_ids: frozenset[int],
        context_length: int,
        is_encoder_decoder: bool,
        defaults: tuple[GenerationParameters, ...],
        max_output_length: int,
        max_num_seqs: int,
        excludes_prompt: bool,
        text_to_text: TextToText | None = None,
    ) -> None:
        self.codec = codec
        self.hooks = hooks
        self._chat_template = chat_template
        self._grammars = grammars
        self._messages = messages
        self._adapters = adapters
        self._encode_bad_words = lru_cache(NUM_BAD_WORDS_KEPT)(codec.encode_bad_words)
        self._eos_ids = eos_ids
        self._context_length = context_length
        self._is_encoder_decoder = is_encoder_decoder
        self._defaults = defaults
        self._has_slow_defaults = any(layer.bad_words is not None for layer in defaults)
        self._has_default_adapter = any(layer.lora_name for layer in defaults)
        self._has_default_grammar = next((layer.is_constrained for layer in defaults if layer.gives_grammar), False)
        self._max_output_length = max_output_length
        self._max_num_seqs = max_num_seqs
        self._excludes_prompt = excludes_prompt
        self._text_to_text = text_to_text
        self.fills_json = text_to_text is not None
        """Whether responses have the output `output` by default."""
        self.text_field = TEXT_FIELDS[text_to_text.name if text_to_text else "text-generation"]
        """The text's name there."""

    def chat_info(self) -> dict[str, Any]:
        """What the model's `ModelInfo` says of chats."""
        return {**self._chat_template.info(), "reasons": self._messages.reasons}

    def is_quick(self, request: GenerationRequest) -> bool:
        """Whether another thread would cost more than preparing: one short prompt, no hook, no grammar."""
        [prompt, *others], parameters = request.prompts, request.parameters[0]
        return (
            not isinstance(prompt, Chat)
            and not others
            and len(prompt) <= MAX_INLINE_CHARACTERS
            and not (self._has_slow_defaults or parameters.bad_words is not None or self._follows_grammar(parameters))
            and not (self._has_default_adapter or parameters.lora_name)
            and self.codec.is_fast
            and not self.hooks.overrides("build_prompt")
        )

    def max_time_s(self, request: GenerationRequest) -> float | None:
        """The shortest `max_time` of a request's prompts: an expired one is an error of the whole request."""
        default = next((layer.max_time for layer in self._defaults if layer.max_time is not None), None)
        limits_s = (default if own.max_time is None else own.max_time for own in request.parameters)
        return min((limit_s for limit_s in limits_s if limit_s is not None), default=None)

    def prepare(self, request: GenerationRequest, row: int, *, streams: bool) -> PreparedPrompt:
        """Prepare one prompt, all but its grammar.

        Args:
            request: The checked request.
            row: The prompt's index.
            streams: Whether its completions are streamed.

        Raises:
            RequestError: The prompt, or the tokens that it asks for, do not fit; or its parameters contradict each
                other.
        """
        options, parameters, source = request.options, request.parameters[row], request.prompts[row]
        prompt = resolve_request_params(parameters, *self._defaults)
        prompt.adapter = self._adapters.get(prompt.lora_name) if prompt.lora_name else None
        direction = self._direction(source, prompt)
        text, model_text, prompt.ids = self._encode(source, row, direction, options.add_special_tokens)
        num_kept = self._num_kept(prompt.truncate_prompt_tokens, parameters)
        if num_kept is not None and num_kept < len(prompt.ids):
            text = model_text = None
            prompt.ids = prompt.ids[-num_kept:]
        if options.tokenize_only:
            prompt.text = self.codec.decode(prompt.ids, keeps_special_tokens=True) if model_text is None else model_text
            return prompt
        chat = source if isinstance(source, Chat) else None
        if chat is not None and chat.forced_call is not None:
            prompt.grammar, prompt.stop_strings = chat.forced_call.grammar, parameters.stop_strings or ()
            prompt.forced_call = chat.forced_call
        if options.return_message:
            shown = self.codec.decode(prompt.ids, keeps_special_tokens=True) if model_text is None else model_text
            prompt.message_plan = self._messages.plan(chat, shown, is_constrained=prompt.grammar is not None)
        parameters = _without_beams(parameters, _beam_obstacle(prompt, options, streams=streams))
        params = self._sampling_params(prompt, prompt_name(source, row), parameters)
        if streams and params.num_sequences > params.num_return_sequences:
            raise RequestError("invalid_parameter", "best_of cannot be streamed: leave it out, or say stream false")
        if params.logprobs is None and (options.return_logprobs or options.return_cumulative_logprob):
            params = replace(params, logprobs=0)
        excludes_prompt = options.exclude_input_in_output
        if excludes_prompt is None:
            excludes_prompt = streams or isinstance(source, Chat) or self._excludes_prompt
        prompt.params = replace(
            params, bad_words_ids=self._encode_bad_words(prompt.bad_words), first_id=direction.first_id
        )
        if not (excludes_prompt or self._is_encoder_decoder):
            prompt.text = self.codec.decode(prompt.ids) if text is None else text
        prompt.preceding_ids = [] if self._is_encoder_decoder else prompt.ids
        return prompt

    def describe_tokens(self, prompt: PreparedPrompt) -> dict[str, Any]:
        """A prompt's tokens, in the names of vLLM's `/tokenize`."""
        return {
            "count": len(prompt.ids),
            "max_model_len": self._context_length,
            "tokens": prompt.ids,
            "token_strs": self.codec.token_strings(prompt.ids),
        }

    def _direction(self, source: Prompt, prompt: PreparedPrompt) -> Direction:
        """What the folder's task adds to a prompt."""
        if self._text_to_text is not None:
            return self._text_to_text.direction(
                source if isinstance(source, str) else "", prompt.src_lang, prompt.tgt_lang
            )
        if prompt.src_lang or prompt.tgt_lang:
            name = "src_lang" if prompt.src_lang else "tgt_lang"
            raise RequestError(
                "invalid_parameter", f"{name} is for the task translation: leave it out, or set the folder's task to it"
            )
        return Direction()

    def _encode(
        self, source: Prompt, row: int, direction: Direction, adds_special_tokens: bool | None
    ) -> tuple[str | None, str | None, list[int]]:
        """A prompt's text, as the request gives it and as the model gets it, and its tokens; no texts of tokens."""
        if isinstance(source, str):
            model_text = direction.prefix + self.hooks.build_prompt(source)
            if adds_special_tokens is False:
                return source, model_text, self.codec.encode(model_text, row, adds_special_tokens=False)
            return source, model_text, self.codec.encode(model_text, row, special_ids=direction.special_ids)
        if isinstance(source, Chat):
            text = self._chat_template.render(source)
            return text, text, self.codec.encode(text, row, adds_special_tokens=bool(adds_special_tokens))
        self.codec.check_ids(PROMPT_TOKEN_IDS, source)
        return None, None, list(source)

    def _num_kept(self, asked: int | None, parameters: GenerationParameters) -> int | None:
        """How many tokens of the prompt `truncate_prompt_tokens` keeps at most, one at least."""
        if asked != -1:
            return asked
        layers = (parameters, *self._defaults)
        set_by = next((layer.max_new_tokens for layer in layers if layer.max_new_tokens), self._max_output_length)
        return max(self._context_length - (0 if self._is_encoder_decoder else set_by), 1)

    def has_cold_grammar(self, prompt: PreparedPrompt) -> bool:
        """Whether the prompt's grammar takes long to compile: half a second for some."""
        return prompt.grammar is not None and not self._grammars.knows(prompt.grammar)

    def compile_grammar(self, prompt: PreparedPrompt) -> None:
        """Compile the prompt's grammar, if it has one.

        Raises:
            RequestError: It is not a grammar that can be followed.
        """
        if prompt.grammar is None:
            return
        try:
            prompt.params, prompt.constraint = self._grammars.compile(prompt.grammar, prompt.params)
        except RequestError:
            for grammar in prompt.forced_call.tool_grammars if prompt.forced_call else ():
                self._grammars.compile(grammar, prompt.params)  # to name the tool that is wrong
            raise

    def prepare_default(self) -> PreparedPrompt:
        """A one-token prompt with the folder's and the checkpoint's defaults, its grammar compiled.

        Raises:
            HfTritonError: A request without parameters of its own could not be answered.
        """
        prompt = resolve_request_params(GenerationParameters(), *self._defaults)
        max_new_tokens = next((layer.max_new_tokens for layer in self._defaults if layer.max_new_tokens), None)
        prompt.adapter = self._adapters.get(prompt.lora_name) if prompt.lora_name else None
        prompt.ids = [0]
        prompt.params = self._sampling_params(prompt, "a prompt", GenerationParameters(max_new_tokens=max_new_tokens))
        self.compile_grammar(prompt)
        return prompt

    def _follows_grammar(self, parameters: GenerationParameters) -> bool:
        return parameters.is_constrained if parameters.gives_grammar else self._has_default_grammar

    def _sampling_params(self, prompt: PreparedPrompt, name: str, parameters: GenerationParameters) -> SamplingParams:
        """The resolved sampling parameters of one prompt, checked against context and vocabulary."""
        num_prompt_tokens = len(prompt.ids)
        room = self._context_length - (0 if self._is_encoder_decoder else num_prompt_tokens)
        if num_prompt_tokens > self._context_length or room < 1:
            raise RequestError(
                "context_exceeded",
                f"{name} has {num_prompt_tokens} tokens, and the context of {self._context_length} must "
                "hold the prompt and at least one new token: shorten it, or set truncate_prompt_tokens",
            )
        for parameter in ("max_new_tokens", "min_new_tokens"):
            asked = getattr(parameters, parameter)
            if asked is not None and asked > room:
                raise RequestError(
                    "context_exceeded",
                    f"{name} has {num_prompt_tokens} tokens, which leaves room for {parameter} <= {room} "
                    f"in the context of {self._context_length}, got {asked}",
                )
        params = resolve_sampling_params(parameters, *self._defaults, max_new_tokens=self._max_output_length)
        params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
        if params.num_rows > self._max_num_seqs:
            counts = {"num_beams": params.num_beams, "best_of": params.best_of}
            parameter = next(
                (name for name, count in counts.items() if count == params.num_rows), "num_return_sequences"
            )
            raise RequestError(
                "invalid_parameter",
                f"{parameter} must be <= {self._max_num_seqs} here (setting max_num_seqs), got {params.num_rows}",
            )
        check_token_ids(params, self.codec.vocabulary_size)
        if prompt.stop_token_ids:
            self.codec.check_ids("stop_token_ids", prompt.stop_token_ids)
            eos_ids = self._eos_ids if params.eos_ids is None else params.eos_ids
            params = replace(params, eos_ids=eos_ids.union(prompt.stop_token_ids))
        return params


def _beam_obstacle(prompt: PreparedPrompt, options: RequestOptions, *, streams: bool) -> str | None:
    """What a request asks for, beside a prompt's own parameters, that beam search does not give."""
    if streams:
        return "stream"
    if prompt.forced_call is not None:
        return "tool_choice"
    if prompt.grammar is not None:
        return prompt.grammar.parameter
    names = ("return_logprobs", "return_cumulative_logprob")
    return next((name for name in names if getattr(options, name)), None)


def _without_beams(parameters: GenerationParameters, obstacle: str | None) -> GenerationParameters:
    """A prompt's parameters; with an obstacle without the beams that are a default.

    Raises:
        RequestError: The request itself asks for beams.
    """
    if obstacle is None:
        return parameters
    if parameters.num_beams is not None and parameters.num_beams > 1:
        raise RequestError("invalid_parameter", beam_conflict(obstacle, parameters.num_beams))
    return parameters.model_copy(update={"num_beams": 1})
