# SPDX-License-Identifier: Apache-2.0
"""Prepares a prompt of a checked request: encodes it, and resolves its sampling parameters. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from hf_triton.errors import RequestError
from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.grammar.free_calls import CallPlan
from hf_triton.protocol.chat_request import Chat
from hf_triton.protocol.names import MESSAGES, PROMPT_TOKEN_IDS
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.protocol.prompts import Prompt, prompt_name
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.protocol.task_declaration import IMAGE
from hf_triton.protocol.thinking_switches import Thinking, switched
from hf_triton.protocol.tool_choice import ForcedCall
from hf_triton.sampling.allowed_tokens import AllowedTokens
from hf_triton.sampling.params import SamplingParams
from hf_triton.sampling.types import Constraint, bits_of
from hf_triton.sentence import param, remedy
from hf_triton.tasks.checked_hooks import CheckedHooks
from hf_triton.tasks.hooks import HOOKS
from hf_triton.tasks.serving.adapters import AdapterStore
from hf_triton.tasks.text_generation.chat_template import ChatTemplate
from hf_triton.tasks.text_generation.images import ImagePreparer
from hf_triton.tasks.text_generation.message import MessagePlan
from hf_triton.tasks.text_generation.resolve import (
    PromptDefaults,
    TaskParams,
    beam_obstacle,
    check_token_ids,
    resolve_sampling_params,
    resolve_task_params,
    without_beams,
)
from hf_triton.tasks.text_generation.response_template import MessageFormat
from hf_triton.tasks.text_generation.text_codec import NO_IDS, TextCodec
from hf_triton.tasks.text_generation.text_to_text import TEXT_FIELDS, Direction, TextToText

if TYPE_CHECKING:
    from hf_triton.runner.image_inputs import PromptImages
    from hf_triton.runner.lora.model_adapters import Adapter

MAX_INLINE_CHARACTERS = 1000  # of a prompt that is tokenized in the caller's thread: 0.2 ms, less than a thread costs
NUM_BAD_WORDS_KEPT = 32  # prompts of a request, and often requests of a client, share their bad words
NOTHING: Final = SamplingParams(max_new_tokens=1)
"""The parameters of a prompt that is only tokenized."""
NO_DIRECTION: Final = Direction()


@dataclass(frozen=True)
class Encoded:
    """A prompt's tokens; they tell its texts if the request gives tokens, or if some are cut off."""

    codec: TextCodec
    ids: list[int]
    texts: tuple[str, str] | None = None
    """The text as the request gives it, and as the model gets it; of a prompt with images, with their placeholders."""
    first_id: int | None = None
    """The token that completions begin with; None: as the checkpoint says."""
    images: PromptImages | None = None

    @property
    def text(self) -> str:
        """What an output that contains the prompt begins with."""
        return self.codec.decode(self.ids) if self.texts is None else self.texts[0]

    @cached_property
    def model_text(self) -> str:
        return self.codec.decode(self.ids, keeps_special_tokens=True) if self.texts is None else self.texts[1]


@dataclass(frozen=True)
class PreparedPrompt:
    """One prompt of a request, as the engine and the response need it."""

    asked: TaskParams
    ids: list[int]
    params: SamplingParams = NOTHING
    preceding_ids: list[int] = field(default_factory=list)
    """The tokens that its completions continue: its own, or none for an encoder-decoder model."""
    text: str = ""
    """What its outputs begin with: the prompt, or nothing."""
    images: PromptImages | None = None
    adapter: Adapter | None = None
    forced_call: ForcedCall | None = None
    """The tool call that the grammar stands for."""
    message_plan: MessagePlan | None = None
    """How its completions become messages; None: the request does not ask for them."""
    thinking: Thinking | None = None
    """What its completions may begin with, if anything is asked of it."""
    call_plan: CallPlan | None = None
    """The calls that are held in free text; None: none is."""
    constraint: Callable[[], Constraint] | None = None
    """Makes the constraint of one completion; None: no grammar, or it is not compiled yet."""


class PromptPreparer:
    """Prepares prompts. May be used from several threads."""

    def __init__(
        self,
        codec: TextCodec,
        chat_template: ChatTemplate,
        grammars: GrammarCompiler,
        hooks: CheckedHooks,
        messages: MessageFormat,
        adapters: AdapterStore,
        defaults: PromptDefaults,
        text_to_text: TextToText | None = None,
        images: ImagePreparer | str = "",
    ) -> None:
        self.codec = codec
        self.hooks = hooks
        self.overridden = frozenset(name for name in HOOKS if hooks.overrides(name))
        """The names of hooks that the folder has."""
        self._chat_template = chat_template
        self._grammars = grammars
        self._messages = messages
        self.adapters = adapters
        self._defaults = defaults
        self._text_to_text = text_to_text
        self._images = images
        """None can be had if it is a string, which says why, or is empty for a model of texts."""
        self._encode_bad_words = lru_cache(NUM_BAD_WORDS_KEPT)(codec.encode_bad_words)
        self._is_slow_by_default = bool(
            defaults.first("bad_words") or defaults.first("lora_name") or defaults.first("thinking_budget") is not None
        )
        self._has_grammar = next((layer.is_constrained for layer in defaults.layers if layer.gives_grammar), False)
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
            and not request.images
            and len(prompt) <= MAX_INLINE_CHARACTERS
            and not (self._is_slow_by_default or parameters.bad_words or parameters.lora_name)
            and parameters.thinking_budget is None
            and not (parameters.suffix or parameters.allowed_token_ids)
            and not (parameters.is_constrained if parameters.gives_grammar else self._has_grammar)
            and self.codec.is_fast
            and "build_prompt" not in self.overridden
        )

    def adapter_names(self, request: GenerationRequest) -> set[str]:
        default = self._defaults.first("lora_name")
        names = {default if own.lora_name is None else own.lora_name for own in request.parameters}
        return {name for name in names if name}

    def max_time_s(self, request: GenerationRequest) -> float | None:
        """The shortest `max_time` of a request's prompts: an expired one is an error of the whole request."""
        default = self._defaults.first("max_time")
        limits_s = (default if own.max_time is None else own.max_time for own in request.parameters)
        return min((limit_s for limit_s in limits_s if limit_s is not None), default=None)

    def hold_files(self, request: GenerationRequest, holder: object) -> None:
        """Count a request's image files as long as what holds them lives; raises HfTritonError if they are too many."""
        if not isinstance(self._images, str):
            self._images.hold_files(request.files, holder)

    def prepare(self, request: GenerationRequest, row: int, *, streams: bool) -> PreparedPrompt:
        """Prepare one prompt, all but its grammar.

        Raises:
            RequestError: The prompt, or the tokens that it asks for, do not fit; or its parameters contradict each
                other.
        """
        options, source = request.options, request.prompts[row]
        chat = source if isinstance(source, Chat) else None
        forced_call = None if chat is None else chat.forced_call
        asked = self._asked(request.parameters[row], forced_call)
        adapter = self.adapters.get(asked.lora_name) if asked.lora_name else None
        encoded = self._encode(request, row, asked)
        if options.tokenize_only:
            return PreparedPrompt(asked, encoded.ids, text=encoded.model_text)
        thinking = self._thinking(chat, asked, encoded)
        call_plan = None if chat is None else self._call_plan(chat, asked, encoded)
        plan = None
        if options.return_message:
            is_constrained = asked.grammar is not None
            plan = self._messages.plan(chat, encoded.model_text, is_constrained=is_constrained, thinking=thinking)
        holds_calls = call_plan is not None
        obstacle = beam_obstacle(asked, forced_call, options, streams=streams, holds_calls=holds_calls)
        params = self._resolve(request, row, asked, obstacle, encoded)
        if streams and params.num_sequences > params.num_return_sequences:
            raise RequestError(
                "invalid_parameter",
                f"{param('best_of')} cannot be streamed: leave it out, or say {param('stream')} false",
            )
        excludes_prompt = options.exclude_input_in_output
        if excludes_prompt is None:
            excludes_prompt = streams or chat is not None or self._defaults.excludes_prompt
        is_apart = self._defaults.is_encoder_decoder
        return PreparedPrompt(
            asked,
            encoded.ids,
            params,
            preceding_ids=[] if is_apart else encoded.ids,
            text="" if excludes_prompt or is_apart else encoded.text,
            images=encoded.images,
            adapter=adapter,
            forced_call=forced_call,
            message_plan=plan,
            thinking=thinking if params.num_beams == 1 else None,
            call_plan=call_plan,
        )

    def _asked(self, parameters: GenerationParameters, forced_call: ForcedCall | None) -> TaskParams:
        """What a prompt asks of the task; a forced call's grammar, and no stop strings of the folder's beside it."""
        asked = resolve_task_params(parameters, *self._defaults.layers)
        if forced_call is None:
            return asked
        return replace(asked, grammar=forced_call.grammar, stop_strings=parameters.stop_strings or ())

    def _encode(self, request: GenerationRequest, row: int, asked: TaskParams) -> Encoded:
        """A prompt as the tokens that the model gets, all or the last ones."""
        source, adds_special_tokens = request.prompts[row], request.options.add_special_tokens
        about, direction = prompt_name(source, row), self._direction(source, asked)
        texts: tuple[str, str] | None = None
        if request.images or (isinstance(source, Chat) and source.images):
            return self._encode_images(request, row, asked)
        if asked.suffix:
            ids = self._encode_around(source, asked, about, adds_special_tokens=adds_special_tokens is not False)
            texts = (str(source), str(source))
        elif isinstance(source, str):
            built = self.hooks.build_prompt(source) if "build_prompt" in self.overridden else source
            texts = (source, direction.prefix + built)
            adds = adds_special_tokens is not False
            special_ids = direction.special_ids if adds else None
            ids = self.codec.encode(texts[1], about, adds_special_tokens=adds, special_ids=special_ids)
        elif isinstance(source, Chat):
            rendered = self._chat_template.render(source)
            texts = (rendered, rendered)
            ids = self.codec.encode(rendered, about, adds_special_tokens=bool(adds_special_tokens))
        else:
            self.codec.check_ids(PROMPT_TOKEN_IDS, source)
            ids = list(source)
        num_kept = self._num_kept(asked.truncate_prompt_tokens, request.parameters[row])
        if num_kept is not None and num_kept < len(ids):
            texts, ids = None, ids[-num_kept:]
        return Encoded(self.codec, ids, texts, direction.first_id)

    def _encode_images(self, request: GenerationRequest, row: int, asked: TaskParams) -> Encoded:
        """A prompt with images, one or a chat."""
        source, adds_special_tokens = request.prompts[row], request.options.add_special_tokens
        images = self._image_preparer(request, source, asked)
        files, about = source.images if isinstance(source, Chat) else request.images, prompt_name(source, row)
        if isinstance(source, Chat):
            given = text = self._chat_template.render_images(source, images.placeholder)
        else:
            given = str(source)
            text = self.hooks.build_prompt(given) if "build_prompt" in self.overridden else given
            text = _with_placeholders(text, images.placeholder, len(files), about)
        images.check_text(text, about)
        adds = bool(adds_special_tokens) if isinstance(source, Chat) else adds_special_tokens is not False
        names, salt = _names_of_images(source, len(files)), asked.cache_salt
        ids, prepared = images.prepare(text, files, names, adds_special_tokens=adds, salt=salt)
        self.codec.check_ids(PROMPT_TOKEN_IDS, ids)
        num_kept = self._num_kept(asked.truncate_prompt_tokens, request.parameters[row])
        if num_kept is not None and num_kept < len(ids):
            raise RequestError(
                "invalid_parameter",
                f"{about} has {len(ids)} tokens with its images, and {param('truncate_prompt_tokens')} cuts no prompt "
                "with images: shorten it",
            )
        return Encoded(self.codec, ids, (given, text), images=prepared)

    def _image_preparer(self, request: GenerationRequest, source: Prompt, asked: TaskParams) -> ImagePreparer:
        """Raises RequestError if this model, or a request of this kind, takes no images."""
        reason = ""
        if isinstance(self._images, str):
            reason = f"this model takes no images{f' ({self._images})' if self._images else ''}: send text alone"
        elif len(request.prompts) > 1:
            reason = f"images are for a request of one prompt, and this one has {len(request.prompts)}: send each alone"
        elif not isinstance(source, str | Chat):
            reason = f"{param(PROMPT_TOKEN_IDS)} cannot have images beside them: send text, or {param(MESSAGES)}"
        elif asked.suffix:
            reason = f"{param('suffix')} cannot be combined with images: leave it out"
        if reason or isinstance(self._images, str):
            raise RequestError("invalid_input", reason)
        return self._images

    def _encode_around(self, source: Prompt, asked: TaskParams, about: str, *, adds_special_tokens: bool) -> list[int]:
        """A prompt and the suffix behind its completion as tokens."""
        reason = ""
        if not isinstance(source, str):
            reason = f"is for prompts of text, and this one is {about}"
        elif asked.truncate_prompt_tokens is not None:
            reason = f"cannot be combined with {param('truncate_prompt_tokens')}, which would cut its tokens off"
        elif self.codec.fill_in is None:
            reason = (
                "needs tokens for filling in the middle, such as <|fim_prefix|>, and this model's tokenizer has none"
            )
        if reason:
            raise RequestError("invalid_parameter", f"{param('suffix')} {reason}: leave it out", field="suffix")
        text = str(source)
        built = self.hooks.build_prompt(text) if "build_prompt" in self.overridden else text
        return self.codec.encode_around(built, asked.suffix, about, adds_special_tokens=adds_special_tokens)

    def _thinking(self, chat: Chat | None, asked: TaskParams, encoded: Encoded) -> Thinking | None:
        """The thinking of a prompt's completions, if anything is asked of it: a budget, or an answer by a grammar."""
        is_off = chat is not None and switched(chat.template_kwargs) is False
        budget = 0 if is_off else asked.thinking_budget
        if budget is None and (chat is None or asked.grammar is None):
            return None
        thinking = self._messages.thinking(encoded.model_text)
        if thinking is None or (is_off and not thinking.is_open and not thinking.lead):
            return None
        return replace(thinking, budget=budget)

    def _call_plan(self, chat: Chat, asked: TaskParams, encoded: Encoded) -> CallPlan | None:
        """The calls to hold if the model chooses to make any: beside a grammar of the whole output it makes none."""
        names = [] if asked.grammar is not None else [tool["function"]["name"] for tool in chat.tools or ()]
        by_default = self._defaults.strict_tools
        held = {name for name in names if chat.strict.get(name, by_default and name not in chat.custom_names)}
        return self._messages.call_plan(chat, encoded.model_text, held) if held else None

    def _resolve(
        self, request: GenerationRequest, row: int, asked: TaskParams, obstacle: str | None, encoded: Encoded
    ) -> SamplingParams:
        """A prompt's sampling parameters, checked; with an obstacle without the beams that are a default."""
        options, parameters = request.options, without_beams(request.parameters[row], obstacle)
        about = prompt_name(request.prompts[row], row)
        is_whole = encoded.images is not None
        params = self._sampling_params(asked, len(encoded.ids), about, parameters, is_whole=is_whole)
        wants_logprobs = params.logprobs is None and (options.return_logprobs or options.return_cumulative_logprob)
        return replace(
            params,
            logprobs=0 if wants_logprobs else params.logprobs,
            bad_words_ids=self._encode_bad_words(asked.bad_words),
            first_id=encoded.first_id,
        )

    def describe_tokens(self, prompt: PreparedPrompt) -> dict[str, Any]:
        """A prompt's tokens, in the names of vLLM's `/tokenize`."""
        return {
            "count": len(prompt.ids),
            "max_model_len": self._defaults.context_length,
            "tokens": prompt.ids,
            "token_strs": self.codec.token_strings(prompt.ids),
        }

    def _direction(self, source: Prompt, asked: TaskParams) -> Direction:
        """What the folder's task adds to a prompt."""
        if self._text_to_text is not None:
            return self._text_to_text.direction(
                source if isinstance(source, str) else "", asked.src_lang, asked.tgt_lang
            )
        if asked.src_lang or asked.tgt_lang:
            name = "src_lang" if asked.src_lang else "tgt_lang"
            raise RequestError(
                "invalid_parameter",
                f"{param(name)} is for the task translation: leave it out, or set the folder's task to it",
            )
        return NO_DIRECTION

    def _num_kept(self, asked: int | None, parameters: GenerationParameters) -> int | None:
        """How many tokens of the prompt `truncate_prompt_tokens` keeps at most, one at least."""
        if asked != -1:
            return asked
        defaults = self._defaults
        num_new = parameters.max_new_tokens or defaults.first("max_new_tokens") or defaults.max_output_length
        return max(defaults.context_length - (0 if defaults.is_encoder_decoder else num_new), 1)

    def has_cold_grammar(self, prompt: PreparedPrompt) -> bool:
        """Whether the prompt's grammar or tags take long to compile: half a second for some."""
        if prompt.thinking is not None and not self._grammars.knows_tags(prompt.thinking):
            return True
        grammars = [calls.grammar for calls in prompt.call_plan.calls] if prompt.call_plan else [prompt.asked.grammar]
        return any(grammar is not None and not self._grammars.knows(grammar) for grammar in grammars)

    def compile_grammar(self, prompt: PreparedPrompt) -> PreparedPrompt:
        """A prompt with the constraint of its grammar and its thinking, if it has any.

        Raises:
            RequestError: It is not a grammar that can be followed.
        """
        allowed = prompt.asked.allowed_token_ids
        if all(asked is None for asked in (prompt.asked.grammar, prompt.thinking, prompt.call_plan, allowed)):
            return prompt
        params, thinking, plan = prompt.params, prompt.thinking, prompt.call_plan
        constraint: Callable[[], Constraint] | None = None
        answer: Callable[[], Constraint] | None = None
        try:
            if prompt.asked.grammar is not None:
                params, answer = self._grammars.compile(prompt.asked.grammar, params)
                constraint = answer
            elif plan is not None:
                params, constraint, answer = self._grammars.compile_calls(plan, params)
                thinking = thinking and replace(thinking, lead="", num_led=0)  # a call stands in place of the lead
        except RequestError:
            alone = prompt.forced_call.tool_grammars if prompt.forced_call else plan.tool_grammars() if plan else ()
            for grammar in alone:
                self._grammars.compile(grammar, prompt.params)  # to name the tool that is wrong
            raise
        if thinking is not None:
            constraint = self._grammars.behind_thinking(thinking, params, answer) or constraint
        if allowed is not None:
            eos_ids = self._defaults.eos_ids if params.eos_ids is None else params.eos_ids
            size = self.codec.vocabulary_size
            constraint = partial(AllowedTokens, bits_of(allowed, size), bits_of(eos_ids, size), constraint)
        return replace(prompt, params=params, constraint=constraint)

    def prepare_default(self) -> PreparedPrompt:
        """A one-token prompt with the folder's and the checkpoint's defaults, its grammar compiled.

        Raises:
            HfTritonError: A request without parameters of its own could not be answered.
        """
        asked = resolve_task_params(*self._defaults.layers)
        adapter = self.adapters.get(asked.lora_name) if asked.lora_name else None
        parameters = GenerationParameters(max_new_tokens=self._defaults.first("max_new_tokens"))
        params = self._sampling_params(asked, 1, "a prompt", parameters)
        return self.compile_grammar(PreparedPrompt(asked, [0], params, adapter=adapter))

    def _sampling_params(
        self,
        asked: TaskParams,
        num_prompt_tokens: int,
        about: str,
        parameters: GenerationParameters,
        *,
        is_whole: bool = False,
    ) -> SamplingParams:
        """The resolved sampling parameters of one prompt, checked against context and vocabulary.

        A prompt that `is_whole` cannot be cut.
        """
        defaults, context_length = self._defaults, self._defaults.context_length
        room = context_length - (0 if defaults.is_encoder_decoder else num_prompt_tokens)
        if num_prompt_tokens > context_length or room < 1:
            raise RequestError(
                "context_exceeded",
                f"{about} has {num_prompt_tokens} tokens, and the context of {context_length} must "
                "hold the prompt and at least one new token: shorten it"
                + ("" if is_whole else remedy(f", or set {param('truncate_prompt_tokens')}")),
                sizes={"tokens": num_prompt_tokens, "limit": context_length - (not defaults.is_encoder_decoder)},
            )
        for parameter in ("max_new_tokens", "min_new_tokens"):
            number = getattr(parameters, parameter)
            if number is not None and number > room:
                raise RequestError(
                    "context_exceeded",
                    f"{about} has {num_prompt_tokens} tokens, which leaves room for {param(parameter)} <= {room} "
                    f"in the context of {context_length}, got {number}",
                    field=parameter,
                    sizes={"tokens": num_prompt_tokens, "new_tokens": number, "limit": context_length},
                )
        params = resolve_sampling_params(
            parameters, *defaults.layers, max_new_tokens=defaults.max_output_length, room=room
        )
        if params.num_rows > defaults.max_num_seqs:
            counts = {"num_beams": params.num_beams, "best_of": params.best_of}
            parameter = next(
                (name for name, count in counts.items() if count == params.num_rows), "num_return_sequences"
            )
            raise RequestError(
                "invalid_parameter",
                f"{param(parameter)} must be <= {defaults.max_num_seqs} here (setting max_num_seqs), got "
                f"{params.num_rows}",
            )
        check_token_ids(params, self.codec.vocabulary_size)
        self.codec.check_ids("allowed_token_ids", asked.allowed_token_ids or ())
        end_ids = {
            *asked.stop_token_ids,
            *(self.codec.fill_in_ends if asked.suffix and params.eos_ids != NO_IDS else ()),
        }
        if asked.stop_token_ids:
            self.codec.check_ids("stop_token_ids", asked.stop_token_ids)
        if end_ids:
            eos_ids = defaults.eos_ids if params.eos_ids is None else params.eos_ids
            params = replace(params, eos_ids=eos_ids.union(end_ids))
        return params


def _with_placeholders(text: str, placeholder: str, num_images: int, about: str) -> str:
    """A text with a placeholder for each image: its own, or as many before it, on a line each."""
    count = text.count(placeholder) if placeholder else num_images
    if count not in (0, num_images):
        raise RequestError(
            "invalid_input",
            f"{about} has {count} of {placeholder} for {num_images} images: write one where each image stands, or none",
        )
    return text if count else f"{placeholder}\n" * num_images + text


def _names_of_images(source: Prompt, num_images: int) -> list[str]:
    """What sentences call the images of a prompt."""
    if not isinstance(source, Chat):
        return [param(f"{IMAGE}[{number}]") if num_images > 1 else param(IMAGE) for number in range(num_images)]
    return [param(place) for place in source.image_places]
