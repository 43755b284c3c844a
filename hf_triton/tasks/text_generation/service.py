# SPDX-License-Identifier: Apache-2.0
"""Text generation: a request becomes sequence groups for the engine, and their tokens become a response.

Knows no Triton: requests and responses are `InferenceRequest`s.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from hf_triton.engine.protocols import GenerationEngine, Observer, eos_ids
from hf_triton.engine.sequence import Completion, SequenceGroup
from hf_triton.errors import HfTritonError, RequestError, SettingsError, as_own_error, panics_as_errors
from hf_triton.grammar.compiler import GrammarCompiler
from hf_triton.protocol.chat_request import Chat
from hf_triton.protocol.model_info import ModelInfo
from hf_triton.protocol.names import JSON_OUTPUT
from hf_triton.protocol.parameters import parse_parameters
from hf_triton.protocol.prompts import Limits
from hf_triton.protocol.requests import (
    GenerationRequest,
    parse_request,
    with_default_outputs,
    with_named_outputs,
)
from hf_triton.runner.gpu_memory import WHOLE_GPU, GpuPart
from hf_triton.sentence import param
from hf_triton.settings import ModelSettings
from hf_triton.start_clock import start_clock
from hf_triton.tasks.checked_hooks import CheckedHooks
from hf_triton.tasks.engine_service import EngineService
from hf_triton.tasks.hooks import Hooks
from hf_triton.tasks.interface import ResponseConfig, model_info
from hf_triton.tasks.serving.adapters import AdapterStore
from hf_triton.tasks.serving.admission import request_limits
from hf_triton.tasks.serving.inference_request import InferenceRequest
from hf_triton.tasks.text_generation.chat_template import ChatTemplate
from hf_triton.tasks.text_generation.images import ImagePreparer
from hf_triton.tasks.text_generation.prepare import PromptPreparer
from hf_triton.tasks.text_generation.resolve import PromptDefaults
from hf_triton.tasks.text_generation.response import GenerationResponse
from hf_triton.tasks.text_generation.response_template import Spec, build_message_format
from hf_triton.tasks.text_generation.text_codec import TextCodec
from hf_triton.tasks.text_generation.text_to_text import build_text_to_text, max_new_tokens
from hf_triton.tasks.tokenizer_answers import TokenizerAnswers

if TYPE_CHECKING:
    from hf_triton.hub.checkpoint import Checkpoint
    from hf_triton.hub.locate import Hub
    from hf_triton.runner.image_inputs import ImageSample

logger = logging.getLogger(__name__)

FAILED: Final = "with images, the model does not compute as transformers' generate does"
SAMPLE_CHAT: Final = Chat(
    (
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image"},
                {"type": "text", "text": "b"},
                {"type": "image"},
                {"type": "text", "text": "c"},
            ],
        },
    ),
    None,
    {},
    add_generation_prompt=True,
    continue_final_message=False,
    images=(b"", b""),
)
NUM_TOKENIZER_THREADS = 4  # tokenizers run outside the interpreter's lock: a long prompt does not delay a short one
NUM_IMAGE_THREADS = 2  # a request of texts does not wait for images to be decoded
NUM_HOOK_THREADS = 16  # `build_prompt` and `postprocess` may wait for other services


class TextGenerationService(EngineService):
    """Answers requests with generated text.

    Args:
        engine: Runs the sequences. It is closed with this service.
        max_waiting: Prompts that may wait; see `AdmissionGate`.
        returns_timings: Whether the server's responses can have parameters.
    """

    _engine: GenerationEngine

    def __init__(
        self,
        engine: GenerationEngine,
        preparer: PromptPreparer,
        limits: Limits,
        *,
        max_waiting: int,
        returns_timings: bool,
        info: ModelInfo | None = None,
    ) -> None:
        num_threads = NUM_HOOK_THREADS if "build_prompt" in preparer.overridden else NUM_TOKENIZER_THREADS
        super().__init__(
            engine,
            limits,
            max_waiting=max_waiting,
            num_threads=num_threads,
            info=info,
            adapters=preparer.adapters,
        )
        self._preparer = preparer
        self._returns_timings = returns_timings
        self._image_pool = ThreadPoolExecutor(NUM_IMAGE_THREADS, thread_name_prefix="hf_triton-image")
        self._grammar_pool = ThreadPoolExecutor(1, thread_name_prefix="hf_triton-grammar")
        num_threads = NUM_HOOK_THREADS if "postprocess" in preparer.overridden else 1
        self._response_pool = ThreadPoolExecutor(num_threads, thread_name_prefix="hf_triton-response")
        self._pools += [self._image_pool, self._grammar_pool, self._response_pool]

    def submit(self, request: InferenceRequest, config: ResponseConfig) -> None:
        inputs = request.inputs()
        named = config.named_outputs(request)
        checked = parse_request(inputs, with_named_outputs(request.parameters, inputs, named), self._limits)
        checked = with_default_outputs(
            checked,
            names_outputs=bool(named),
            has_json=JSON_OUTPUT in config.output_names and not config.streams_if(checked.options.stream),
            fills_json=self._preparer.fills_json,
        )
        if checked.options.return_timings and not self._returns_timings:
            raise RequestError(
                "invalid_parameter",
                f"{param('return_timings')} needs a server of Triton 25.02 or newer, and this one is older: leave it "
                "out",
            )
        self.generate(request, checked, config)

    def generate(self, request: InferenceRequest, checked: GenerationRequest, config: ResponseConfig) -> None:
        """Start a checked request and return at once. An error of one prompt is the response of all."""
        response = GenerationResponse(request, checked, config, self._preparer, self._response_pool)
        if checked.has_images:
            try:
                self._preparer.hold_files(checked, response)
            except HfTritonError as error:
                response.refuse(error)
                return
        is_quick = self._preparer.is_quick(checked)
        self._begin(
            response,
            partial(self._prepare, response),
            num_prompts=len(checked.prompts),
            deadline_s=request.deadline_s(self._preparer.max_time_s(checked)),
            is_quick=is_quick,
            adapters=() if is_quick else self._preparer.adapter_names(checked),
            pool=self._image_pool if checked.has_images else None,
        )

    def check_defaults(self) -> None:
        """Check that a request without parameters of its own can be answered, and tell its defaults in `info`.

        Raises:
            SettingsError: It cannot.
        """
        try:
            prompt = self._preparer.prepare_default()
            error = self._engine.admission_error(SequenceGroup(prompt.ids, prompt.params))
        except HfTritonError as raised:
            error = raised
        if error is not None:
            raise SettingsError(
                f"a request without parameters of its own could not be answered ({error.sentence}): change "
                "generation_defaults, max_output_length, or the setting that this names"
            ) from None
        if self.info is not None:
            params = prompt.params
            temperature = params.temperature if params.do_sample else 0.0
            defaults = {"temperature": temperature, "top_p": params.top_p, "max_tokens": params.max_new_tokens}
            self.info = replace(self.info, defaults=defaults)

    # --- from a checked request to the engine ------------------------------------------------------------------------

    def _prepare(self, response: GenerationResponse) -> None:
        """Prepare a request's prompts; a grammar that is not cached is compiled in a thread of its own."""
        checked = response.checked
        try:
            for row in range(len(checked.prompts)):
                if response.has_ended():
                    self._leave(response)
                    return
                with panics_as_errors():
                    prompt = self._preparer.prepare(checked, row, streams=response.streams)
                response.prompts.append(prompt)
                if prompt.adapter is not None:
                    response.request.adapter = prompt.adapter.name
        except Exception as error:
            response.refuse(as_own_error("preparing the request", error))
            self._leave(response)
            return
        if checked.options.tokenize_only:
            for row in range(len(response.prompts)):
                response.on_finish(row, [Completion([], "length")])
            self._leave(response)
        elif any(map(self._preparer.has_cold_grammar, response.prompts)):
            self._run(self._grammar_pool, partial(self._start, response), response)
        else:
            self._start(response)

    def _start(self, response: GenerationResponse) -> None:
        """Compile a request's grammars and hand it to the engine."""
        try:
            for row, prompt in enumerate(response.prompts):
                if response.has_ended():
                    return
                with panics_as_errors():
                    response.prompts[row] = self._preparer.compile_grammar(prompt)
            response.request.on_ending(None)  # the queue decides from here on
            self._engine.submit(response.begin())
        except Exception as error:
            response.refuse(as_own_error("queueing the request", error))
        finally:
            self._leave(response)


def build_text_generation(
    checkpoint: Checkpoint,
    settings: ModelSettings,
    hooks: Hooks,
    hub: Hub,
    *,
    chat_template: str | None,
    on_fatal: Callable[[], None],
    observer: Observer,
    returns_timings: bool,
    response_template: Spec | str | None = None,
    gpu_part: GpuPart = WHOLE_GPU,
) -> TextGenerationService:
    """The running service of a checkpoint; raises LoadError if no engine runs it, or its defaults contradict it."""
    from hf_triton.engine.choose import build_engine
    from hf_triton.engine.options import EngineOptions
    from hf_triton.runner.cpu import accelerate
    from hf_triton.runner.cuda import fuse
    from hf_triton.runner.device import DeviceContext
    from hf_triton.runner.lora.model_adapters import Adapters

    limits = request_limits(settings, checkpoint.context_length)
    codec = TextCodec(checkpoint.tokenizer, checkpoint.vocabulary_size)
    messages = build_message_format(response_template, checkpoint.tokenizer, chat_template, codec.special_tokens())
    if settings.strict_tools and not messages.can_hold_calls:
        raise SettingsError(
            "strict_tools cannot be kept: the form in which this model writes calls cannot be enforced in free text; "
            "leave it out, or set response_template to one with calls (docs/chat.md)"
        )
    text_to_text = build_text_to_text(settings.task, checkpoint)
    template = _build_chat_template(checkpoint, chat_template, limits.max_prompt_bytes)
    images, sample = _prepare_sample(checkpoint, settings, template)
    ranks = checkpoint.ranks
    loading = contextlib.nullcontext() if ranks is None else ranks.loading()
    with DeviceContext(checkpoint.model.device) as device, loading:
        accelerate(checkpoint.model, pack_weights=settings.pack_weights if ranks is None else False)
        if ranks is None:
            fuse(checkpoint.model)
        start_clock.end("kernels")
        adapters = Adapters(checkpoint.model)
        if ranks is not None:
            adapters.refuse_all("is not for a model in ranks: leave out tensor_parallel_size")
        store = AdapterStore(adapters, settings.adapters, hub.model_folder, hub.resolve_adapter)
        options = EngineOptions(
            max_num_seqs=device.max_num_seqs if settings.max_num_seqs is None else settings.max_num_seqs,
            context_length=checkpoint.context_length,
            max_cache_tokens=settings.max_cache_tokens,
            gpu_part=gpu_part,
            enable_prefix_caching=settings.enable_prefix_caching,
            prefix_state_fraction=settings.prefix_state_fraction,
            prompt_lookup=settings.prompt_lookup,
            decoding="eager" if ranks is not None and settings.decoding == "auto" else settings.decoding,
            adapters=adapters,
            has_own_code=type(hooks).load is not Hooks.load,
            ranks=ranks,
            on_fatal=on_fatal,
            observer=observer,
            image_sample=sample,
        )
        engine = build_engine(checkpoint.model, settings.engine, options)
        start_clock.end("engine")
    if not isinstance(images, str) and engine.images == "no":
        images = engine.image_obstacle or FAILED
    if isinstance(images, str):
        limits = replace(limits, image_obstacle=images)
    else:
        limits = replace(limits, max_images=settings.max_images, max_image_bytes=settings.max_image_bytes)
    preparer = PromptPreparer(
        codec,
        template,
        GrammarCompiler(checkpoint.tokenizer, checkpoint.vocabulary_size, eos_ids(checkpoint.model)),
        CheckedHooks(hooks, limits.max_prompt_bytes),
        messages,
        store,
        _prompt_defaults(checkpoint, settings, options.max_num_seqs, is_text_to_text=text_to_text is not None),
        text_to_text,
        images,
    )
    service = TextGenerationService(
        engine,
        preparer,
        limits,
        max_waiting=settings.max_waiting_prompts,
        returns_timings=returns_timings,
        info=model_info(
            checkpoint,
            settings,
            task=settings.task or "text-generation",
            engine=engine.name,
            slower=tuple(engine.slower),
            ranks=() if ranks is None else tuple(ranks.shares),
            images="no" if isinstance(images, str) else engine.images,
            image_obstacle=images if isinstance(images, str) else engine.image_obstacle,
            **preparer.chat_info(),
        ),
    )
    service.tokenizer = TokenizerAnswers(checkpoint, checkpoint.context_length, limits, chat_template)
    try:
        service.check_defaults()
    except SettingsError:
        service.close()
        raise
    return service


def _build_chat_template(checkpoint: Checkpoint, text: str | None, max_bytes: int) -> ChatTemplate:
    of_images = getattr(checkpoint.processor, "chat_template", None)
    return ChatTemplate(checkpoint.tokenizer, text, max_bytes, of_images if isinstance(of_images, str) else None)


def _prepare_sample(
    checkpoint: Checkpoint, settings: ModelSettings, template: ChatTemplate
) -> tuple[ImagePreparer | str, ImageSample | None]:
    """What prepares images, with a sample of its work; or why the model is served for its text alone."""
    if checkpoint.processor is None:
        return checkpoint.image_obstacle, None
    try:
        images = ImagePreparer(checkpoint.processor, checkpoint.model, settings, checkpoint.context_length)
        placeholder = images.placeholder
        texts = [f"a {placeholder} b {placeholder} c"]
        with contextlib.suppress(RequestError):  # it has no template, or one that takes no images
            texts.insert(0, template.render_images(SAMPLE_CHAT, placeholder))
        sample = images.sample(texts)
    except Exception as error:  # the model's code and its repository's files may do anything
        reason = as_own_error("preparing images", error).sentence
        logger.warning("%s is served for its text alone: %s", settings.huggingface_model, reason)
        return reason, None
    if len(sample.prompt_ids) >= checkpoint.context_length:
        return f"two small images have {len(sample.prompt_ids)} tokens, which its context does not hold", None
    return images, sample


def _prompt_defaults(
    checkpoint: Checkpoint, settings: ModelSettings, max_num_seqs: int, *, is_text_to_text: bool
) -> PromptDefaults:
    max_output_length = settings.max_output_length
    if is_text_to_text and "max_output_length" not in settings.model_fields_set:
        max_output_length = max_new_tokens(checkpoint) or max_output_length
    return PromptDefaults(
        (parse_parameters(settings.generation_defaults), checkpoint.generation_defaults(with_beams=is_text_to_text)),
        eos_ids(checkpoint.model),
        checkpoint.context_length,
        max_output_length,
        max_num_seqs,
        is_encoder_decoder=checkpoint.is_encoder_decoder,
        excludes_prompt=settings.exclude_input_in_output,
        strict_tools=settings.strict_tools,
    )
