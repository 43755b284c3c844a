# SPDX-License-Identifier: Apache-2.0
"""Text generation: a checked request becomes sequences for the engine, and their tokens become texts.

Knows no Triton: the answer goes to a `Reply`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from hf_triton.engine.types import Engine, EngineLoad, Observer, RequestTimes, SequenceGroup, eos_ids
from hf_triton.errors import HfTritonError, RequestError, SettingsError
from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.protocol.chat import Chat
from hf_triton.protocol.parameters import GenerationParameters, parse_parameters
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.sampling.params import SamplingParams
from hf_triton.settings import ModelSettings
from hf_triton.tasks.hooks import CheckedHooks, Hooks
from hf_triton.tasks.text_generation.chat_template import ChatTemplate
from hf_triton.tasks.text_generation.prepare import Preparation, Preparations, least_max_time_s
from hf_triton.tasks.text_generation.resolve import (
    RequestParams,
    check_token_ids,
    resolve_request_params,
    resolve_sampling_params,
)
from hf_triton.tasks.text_generation.response import Prompt, Reply, ResponseBuilder, fault
from hf_triton.tasks.text_generation.tokenizer import TextCodec

if TYPE_CHECKING:
    from hf_triton.hub.checkpoint import Checkpoint

NUM_TOKENIZER_THREADS = 2  # tokenizers run outside the interpreter's lock: a long prompt does not hold up a short one
NUM_HOOK_THREADS = 16  # `build_prompt` and `postprocess` may wait for other services
MAX_TURN_S = 0.05  # of a request with many prompts, then others have their turn
MAX_INLINE_CHARACTERS = 1000  # of a prompt that is tokenized at once, in some 0.2 ms: less than another thread costs
NUM_BAD_WORDS_KEPT = 32  # the prompts of a request, and often the requests of a client, have the same ones

Steps = Iterator[ThreadPoolExecutor]
"""The way of one request to the engine: each step is done when the next one is asked for."""


class TextGeneration:
    """Turns requests into texts.

    Args:
        engine: Runs the sequences. It is closed with this task.
        codec: The model's tokenizer.
        chat_template: Makes prompts of chats.
        grammars: Reads what texts must follow.
        context_length: Tokens that a prompt and its continuation may have together.
        is_encoder_decoder: Whether the model reads the prompt and writes apart (T5): the two are bounded each, and the
            answer does not contain the prompt.
        defaults: The folder's and the checkpoint's parameters, the first that says something winning.
        max_output_length: New tokens where nobody says how many.
        max_rows: Texts that one prompt may ask for.
        max_waiting: Prompts that may wait to be prepared, beside as many as `max_rows`.
        excludes_prompt: Whether the answer leaves the prompt out where the request does not say.
        hooks: The folder's own.
    """

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        chat_template: ChatTemplate,
        *,
        grammars: GrammarCompiler,
        context_length: int,
        is_encoder_decoder: bool,
        defaults: tuple[GenerationParameters, ...],
        max_output_length: int,
        max_rows: int,
        max_waiting: int,
        excludes_prompt: bool,
        hooks: CheckedHooks,
    ) -> None:
        self._engine = engine
        self._hooks = hooks
        self._codec = codec
        self._chat_template = chat_template
        self._grammars = grammars
        self._encode_bad_words = lru_cache(NUM_BAD_WORDS_KEPT)(codec.encode_bad_words)
        self._context_length = context_length
        self._is_encoder_decoder = is_encoder_decoder
        self._defaults = defaults
        self._has_slow_defaults = any(each.bad_words is not None for each in defaults)
        self._has_default_grammar = next((each.is_constrained for each in defaults if each.gives_grammar), False)
        self._max_output_length = max_output_length
        self._max_rows = max_rows
        self._excludes_prompt = excludes_prompt
        num_readers = NUM_HOOK_THREADS if hooks.overrides("build_prompt") else NUM_TOKENIZER_THREADS
        self._tokenizers = ThreadPoolExecutor(num_readers, thread_name_prefix="hf_triton-tokenizer")
        self._finishers = ThreadPoolExecutor(NUM_HOOK_THREADS, thread_name_prefix="hf_triton-postprocess")
        self._preparations = Preparations(max_rows, max_waiting)
        self._grammar_readers = ThreadPoolExecutor(1, thread_name_prefix="hf_triton-grammar")  # half a second for some

    def submit(
        self,
        request: GenerationRequest,
        reply: Reply,
        is_cancelled: Callable[[], bool],
        *,
        timeout_s: float | None = None,
        streams: bool = False,
        times: RequestTimes | None = None,
    ) -> None:
        """Start on a request and return at once; the reply is finished exactly once, mostly in another thread.

        Args:
            request: One or many prompts; an error of one is the answer of all, and the others are given up.
            reply: Where the answer goes.
            is_cancelled: Asked at every token; true gives the request up.
            timeout_s: Seconds from its arrival that its prompts may take, as `max_time` does; None: as long as it
                takes.
            streams: Whether the texts go out piece by piece.
            times: To be filled in; None: the request comes now.
        """
        times = RequestTimes() if times is None else times
        max_time_s = least_max_time_s(request, self._defaults)
        preparation = Preparation(request, reply, is_cancelled, timeout_s, streams, times, max_time_s)
        if self._is_quick(request):
            self._prepare_at_once(preparation)
            return
        try:
            self._preparations.enter(preparation)
        except HfTritonError as error:
            reply.refuse(error)
        else:
            steps = self._steps(preparation)
            self._prepare_in(next(steps), preparation, steps)

    def check_defaults(self) -> None:
        """Try what the folder and the checkpoint ask for where a request says nothing.

        Raises:
            HfTritonError: No such request could be answered.
        """
        task = resolve_request_params(GenerationParameters(), *self._defaults)
        asked = next((each.max_new_tokens for each in self._defaults if each.max_new_tokens is not None), None)
        plan = self._plan(0, 1, GenerationParameters(max_new_tokens=asked))
        admission_error = self._engine.admission_error(SequenceGroup([0], plan, lambda _: None))
        if admission_error is not None:
            raise admission_error
        if task.grammar:
            self._grammars.compile(task.grammar, plan)

    def is_healthy(self) -> bool:
        """Whether requests can be taken."""
        return self._engine.is_healthy()

    def load(self) -> EngineLoad:
        """What the engine has in hand."""
        load = self._engine.load()
        return replace(load, num_waiting=load.num_waiting + self._preparations.num_prompts)

    def close(self) -> None:
        """Answer everything that is still waiting, then stop."""
        self._preparations.close()
        self._tokenizers.shutdown(wait=True, cancel_futures=True)
        self._grammar_readers.shutdown(wait=True, cancel_futures=True)
        self._engine.close()
        self._finishers.shutdown(wait=True)

    def _is_quick(self, request: GenerationRequest) -> bool:
        """Whether a request is prepared in no time: there is one short text to read, and no hook to wait for."""
        [prompt, *others], parameters = request.prompts, request.parameters[0]
        return (
            isinstance(prompt, str)
            and not others
            and len(prompt) <= MAX_INLINE_CHARACTERS
            and not (self._has_slow_defaults or parameters.bad_words is not None or self._follows_grammar(parameters))
            and self._codec.is_fast
            and not self._hooks.overrides("build_prompt")
        )

    def _follows_grammar(self, parameters: GenerationParameters) -> bool:
        return parameters.is_constrained if parameters.gives_grammar else self._has_default_grammar

    def _prepare_in(self, pool: ThreadPoolExecutor, preparation: Preparation, steps: Steps) -> None:
        try:
            pool.submit(self._prepare, pool, preparation, steps)
        except RuntimeError as error:  # the pool is shut down, and so all is answered; or there is no thread to be had
            self._preparations.done(preparation)
            if self._preparations.leave(preparation):
                preparation.reply.refuse(fault("preparing the request", error))

    def _prepare(self, pool: ThreadPoolExecutor, preparation: Preparation, steps: Steps) -> None:
        """Go on with a request; after a while it is the next one's turn."""
        turn_ends_s = time.monotonic() + MAX_TURN_S
        try:
            while self._preparations.has(preparation):
                if (ending := preparation.ending()) is not None:  # not raised, which would keep it all in a cycle
                    self._preparations.refuse(preparation, ending)
                    break
                next_pool = next(steps, None)
                if next_pool is None:
                    if self._preparations.leave(preparation):
                        self._start(preparation)
                elif next_pool is not pool or time.monotonic() >= turn_ends_s:
                    self._prepare_in(next_pool, preparation, steps)
                    return
        except BaseException as error:  # a panic in the tokenizer's Rust code is no Exception
            if self._preparations.leave(preparation):
                preparation.reply.refuse(fault("preparing the request", error))
        self._preparations.done(preparation)

    def _prepare_at_once(self, preparation: Preparation) -> None:
        try:
            if (ending := preparation.ending()) is not None:
                preparation.reply.refuse(ending)
                return
            for _ in self._steps(preparation):
                pass
        except BaseException as error:  # as above
            preparation.reply.refuse(fault("preparing the request", error))
        else:
            self._start(preparation)

    def _start(self, preparation: Preparation) -> None:
        """Give a request to the engine; it is the caller's to answer until then."""
        try:
            sequences = self._sequences(preparation)
        except BaseException as error:  # as above
            preparation.reply.refuse(fault("preparing the request", error))
            return
        try:
            self._engine.submit(sequences)
        except BaseException as error:
            sequences[0].on_finish(fault("queueing the request", error))  # an error of one is the answer of all

    def _steps(self, preparation: Preparation) -> Steps:
        """Prepare a request; each yield says where the next step is to be done."""
        prompts = preparation.prompts
        for row, parameters in enumerate(preparation.request.parameters):
            yield self._tokenizers
            prompts.append(self._read_prompt(preparation, row, resolve_request_params(parameters, *self._defaults)))
        for row, prompt in enumerate(prompts):
            if prompt.task.grammar:
                is_known = self._grammars.knows(prompt.task.grammar, prompt.plan)
                yield self._tokenizers if is_known else self._grammar_readers
                plan, constraint = self._grammars.compile(prompt.task.grammar, prompt.plan)
                prompts[row] = replace(prompt, plan=plan, constraint=constraint)

    def _sequences(self, preparation: Preparation) -> list[SequenceGroup]:
        answering = ResponseBuilder(
            preparation.prompts,
            self._codec,
            preparation.reply,
            preparation.is_cancelled,
            hooks=self._hooks,
            streams=preparation.streams,
            run_aside=self._finishers.submit,
        )
        return [
            SequenceGroup(
                prompt.ids,
                prompt.plan,
                on_finish=partial(answering.put, row),
                is_cancelled=answering.is_given_up,
                on_token=answering.listener(row),
                constraint=prompt.constraint,
                deadline_s=preparation.deadline_s(prompt.task.max_time_s),
                logits_processor=answering.logits_processor,
                priority=prompt.task.queue_priority,
                times=preparation.times,
            )
            for row, prompt in enumerate(preparation.prompts)
        ]

    def _read_prompt(self, preparation: Preparation, row: int, task: RequestParams) -> Prompt:
        """All of a prompt but what it must follow."""
        request, streams = preparation.request, preparation.streams
        options, parameters, given = request.options, request.parameters[row], request.prompts[row]
        is_chat = isinstance(given, Chat)
        text = self._chat_template.render(given) if isinstance(given, Chat) else given
        model_text = text if is_chat else self._hooks.build_prompt(text)
        ids = self._codec.encode(model_text, row, adds_special_tokens=not is_chat)
        plan = self._plan(row, len(ids), parameters)
        if streams and plan.num_sequences > plan.num_return_sequences:
            raise RequestError("invalid_parameter", "best_of cannot be streamed: leave it out, or say stream false")
        if plan.logprobs is None and (options.return_logprobs or options.return_cumulative_logprob):
            plan = replace(plan, logprobs=0)
        excludes_prompt = options.exclude_input_in_output
        if excludes_prompt is None:
            excludes_prompt = streams or is_chat or self._excludes_prompt
        return Prompt(
            front="" if excludes_prompt or self._is_encoder_decoder else text,
            ids=ids,
            preceding_ids=[] if self._is_encoder_decoder else ids,
            plan=replace(plan, bad_words_ids=self._encode_bad_words(task.bad_words)),
            task=task,
        )

    def _plan(self, row: int, num_prompt_tokens: int, parameters: GenerationParameters) -> SamplingParams:
        """The settled plan of one prompt, checked against the context and the vocabulary.

        Raises:
            RequestError: The prompt, or the prompt and the new tokens asked for, do not fit; there are not so many
                rows, or no such token.
        """
        room = self._context_length - (0 if self._is_encoder_decoder else num_prompt_tokens)
        if num_prompt_tokens > self._context_length or room < 1:
            raise RequestError(
                "context_exceeded",
                f"text_input row {row} has {num_prompt_tokens} tokens, and the context of {self._context_length} must "
                "hold the prompt and at least one new token",
            )
        for name in ("max_new_tokens", "min_new_tokens"):
            asked = getattr(parameters, name)
            if asked is not None and asked > room:
                raise RequestError(
                    "context_exceeded",
                    f"text_input row {row} has {num_prompt_tokens} tokens, which leaves room for {name} <= {room} "
                    f"in the context of {self._context_length}, got {asked}",
                )
        plan = resolve_sampling_params(parameters, *self._defaults, max_new_tokens=self._max_output_length)
        plan = replace(plan, max_new_tokens=min(plan.max_new_tokens, room))
        if plan.num_sequences > self._max_rows:
            name = "num_return_sequences" if plan.best_of is None else "best_of"
            raise RequestError(
                "invalid_parameter",
                f"{name} must be <= {self._max_rows} here (setting max_num_seqs), got {plan.num_sequences}",
            )
        check_token_ids(plan, self._codec.vocabulary_size)
        return plan


def build_text_generation(
    checkpoint: Checkpoint,
    chat_template: ChatTemplate,
    settings: ModelSettings,
    hooks: Hooks,
    max_prompt_bytes: float,
    on_fatal: Callable[[], None],
    observer: Observer | None = None,
) -> TextGeneration:
    """The task of a loaded checkpoint, its engine running.

    Args:
        checkpoint: Model and tokenizer.
        chat_template: Makes prompts of chats.
        settings: The folder's.
        hooks: The folder's own.
        max_prompt_bytes: Of a prompt that hooks make.
        on_fatal: Called after the engine has failed for good.
        observer: Is told what the engine does.

    Raises:
        LoadError: No engine can run the model, or the folder's defaults contradict it.
    """
    from hf_triton.engine.choose import build_engine
    from hf_triton.runner.cpu import accelerate
    from hf_triton.runner.device import DeviceContext

    codec = TextCodec(checkpoint.tokenizer, checkpoint.vocabulary_size)
    with DeviceContext(checkpoint.model.device):
        accelerate(checkpoint.model, pack_weights=settings.pack_weights)
        engine = build_engine(
            checkpoint.model,
            settings.engine,
            max_rows=settings.max_num_seqs,
            max_cache_tokens=settings.max_cache_tokens,
            shares_prefixes=settings.enable_prefix_caching,
            decoding=settings.decoding,
            context_length=checkpoint.context_length,
            on_fatal=on_fatal,
            observer=observer,
        )
    task = TextGeneration(
        engine,
        codec,
        chat_template,
        grammars=GrammarCompiler(checkpoint.tokenizer, checkpoint.vocabulary_size, eos_ids(checkpoint.model)),
        context_length=checkpoint.context_length,
        is_encoder_decoder=checkpoint.is_encoder_decoder,
        defaults=(parse_parameters(settings.generation_defaults), checkpoint.generation_defaults()),
        max_output_length=settings.max_output_length,
        max_rows=settings.max_num_seqs,
        max_waiting=settings.max_waiting_prompts,
        excludes_prompt=settings.exclude_input_in_output,
        hooks=CheckedHooks(hooks, max_prompt_bytes),
    )
    try:
        task.check_defaults()
    except HfTritonError as error:
        task.close()
        raise SettingsError(
            f"a request without parameters of its own could not be answered ({error.sentence}): change "
            "generation_defaults, max_output_length, or the setting that this names"
        ) from None
    return task
