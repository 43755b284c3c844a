# SPDX-License-Identifier: Apache-2.0
"""The metrics, each declared once. `meter.py` counts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from hf_triton.engine.sequence import FinishReason

OK: Final = "ok"

WAIT_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0),
)
"""These range from tiny models on a GPU to long completions on a CPU."""
TOKEN_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5),
)


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric family. Prometheus conventions: the unit ends the name, a counter's name ends in `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    """A label of its own, beside `model` and `version`."""
    values: tuple[str, ...] = ("",)
    """The label's values at the start; each is exported with 0, so that a rate has a start."""
    by_adapter: bool = False
    """Whether what comes of a LoRA adapter has the label `adapter`; the model's own has none."""
    of_images: bool = False
    """Whether only models that take images beside text have it."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


UNCOUNTED: Final = "uncounted"
"""The outcome of a request that the metrics leave out."""
REQUESTS: Final = Metric(
    "hf_triton_requests_total",
    "counter",
    "Answered requests by outcome: `ok`, or the error's code (`hook_failed` for the codes of a folder's own hooks).",
    label="outcome",
    values=(OK,),
    by_adapter=True,
)
IN_FLIGHT: Final = Metric("hf_triton_requests_in_flight", "gauge", "Requests without a final response.")
WAITING: Final = Metric(
    "hf_triton_prompts_waiting", "gauge", "Prompts in preparation or in the queue, and preempted sequences."
)
RUNNING: Final = Metric("hf_triton_rows_running", "gauge", "Running sequences: in prefill, or decoding.")
SLEEPING: Final = Metric("hf_triton_sleeping", "gauge", "Instances of the model that sleep.")
QUEUE_TIME: Final = Metric(
    "hf_triton_queue_time_seconds",
    "histogram",
    "From a request's arrival until the engine admits a prompt of it, or an encoder begins with it.",
    buckets=WAIT_BUCKETS_S,
)
TIME_TO_FIRST_TOKEN: Final = Metric(
    "hf_triton_time_to_first_token_seconds",
    "histogram",
    "From a request's arrival to the first token of a prompt.",
    buckets=WAIT_BUCKETS_S,
)
TIME_PER_TOKEN: Final = Metric(
    "hf_triton_time_per_output_token_seconds",
    "histogram",
    "Mean time between two tokens of a sequence that has two or more.",
    buckets=TOKEN_BUCKETS_S,
)
LATENCY: Final = Metric(
    "hf_triton_e2e_request_latency_seconds",
    "histogram",
    "From a request's arrival to its final response, for requests that end `ok`.",
    buckets=WAIT_BUCKETS_S,
)
PROMPT_TOKENS: Final = Metric(
    "hf_triton_prompt_tokens_total", "counter", "Tokens of prompts that were prefilled.", by_adapter=True
)
GENERATED_TOKENS: Final = Metric(
    "hf_triton_generation_tokens_total",
    "counter",
    "Generated tokens, without end-of-sequence tokens.",
    by_adapter=True,
)
SHARED_TOKENS: Final = Metric(
    "hf_triton_prefix_cache_hits_total", "counter", "Prompt tokens served from the prefix cache."
)
COMPLETIONS: Final = Metric(
    "hf_triton_completions_total",
    "counter",
    "Completions by finish reason, without those that best_of discards. The output finish_reason calls both eos and "
    "stop_string stop.",
    label="finish_reason",
    values=get_args(FinishReason),
)
STEPS: Final = Metric(
    "hf_triton_steps_total", "counter", "Steps that gave a sequence its next token, some beside chunks of prompts."
)
STEP_ROWS: Final = Metric(
    "hf_triton_step_rows_total",
    "counter",
    "Sequences that steps gave their next token; divided by the steps, the mean batch size.",
)
PROPOSED_TOKENS: Final = Metric(
    "hf_triton_proposed_tokens_total", "counter", "Tokens that prompt lookup proposed and steps checked."
)
ACCEPTED_TOKENS: Final = Metric(
    "hf_triton_accepted_tokens_total",
    "counter",
    "Proposed tokens that were right; each saved a sequence a decoding step of its own.",
)
PREEMPTIONS: Final = Metric(
    "hf_triton_num_preemptions_total",
    "counter",
    "Preempted sequences: for memory, after a failure, or for a new prefill (LongRoPE).",
)
USED_TOKENS: Final = Metric(
    "hf_triton_kv_cache_tokens",
    "gauge",
    "KV cache tokens in use by the continuous engine, in whole blocks: those of running sequences, without those that "
    "only the prefix cache keeps. States count by their size on a CPU without max_cache_tokens.",
)
MAX_TOKENS: Final = Metric("hf_triton_kv_cache_max_tokens", "gauge", "Tokens that the KV cache may hold now.")
KV_CACHE_USAGE: Final = Metric(
    "hf_triton_kv_cache_usage_ratio",
    "gauge",
    "Use of the KV cache, from 0 to 1: its tokens by those that it may hold; the mean of a model's instances.",
)
IMAGES: Final = Metric(
    "hf_triton_images_total", "counter", "Images of prompts that the engine has admitted.", of_images=True
)
IMAGE_TOKENS: Final = Metric(
    "hf_triton_image_tokens_total", "counter", "Tokens of prompts that stand for these images.", of_images=True
)
TOWER_TIME: Final = Metric(
    "hf_triton_vision_tower_time_seconds",
    "histogram",
    "Time of the vision tower for an image, which all sequences wait for. Not counted: images in the prefix cache, and "
    "models whose images run by generate.",
    of_images=True,
    buckets=(*TOKEN_BUCKETS_S, 5.0, 10.0),
)

METRICS: Final = (
    *(REQUESTS, IN_FLIGHT, WAITING, RUNNING, SLEEPING),
    *(QUEUE_TIME, TIME_TO_FIRST_TOKEN, TIME_PER_TOKEN, LATENCY),
    *(PROMPT_TOKENS, GENERATED_TOKENS, SHARED_TOKENS, COMPLETIONS),
    *(IMAGES, IMAGE_TOKENS, TOWER_TIME),
    *(STEPS, STEP_ROWS, PROPOSED_TOKENS, ACCEPTED_TOKENS, PREEMPTIONS, USED_TOKENS, MAX_TOKENS, KV_CACHE_USAGE),
)
