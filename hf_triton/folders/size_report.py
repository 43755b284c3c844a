# SPDX-License-Identifier: Apache-2.0
"""The figures of `hf-triton size`, each with where it comes from; what is an estimate says so."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from hf_triton.encoder.engine import MAX_BATCH_TOKENS
from hf_triton.errors import CheckpointError
from hf_triton.folders.capacity import Room
from hf_triton.folders.cards import CARDS, CPU
from hf_triton.folders.outlined import Outlined
from hf_triton.folders.weight_bytes import BYTES, build_without_weights, dtype_name, loaded_bytes
from hf_triton.hub.pretrained import SPEECH, check_quantization, check_small_weights, is_quantized
from hf_triton.runner.budget import FreeMemory, size_words
from hf_triton.runner.device import DEFAULT_NUM_SEQS, MAX_NUM_SEQS
from hf_triton.runner.gpu_memory import USED_FRACTION
from hf_triton.runner.outline import measure_outline
from hf_triton.settings import MOST_SEQS

WIDTHS: Final = 4, 2
"""An encoder's layer keeps about so many vectors of its hidden and of its intermediate size for each token."""


class SizeReport:
    """Collects figures about a model and `concurrency` sequences of `context` tokens on a device."""

    def __init__(self, found: Outlined, gpu: str, context: int, concurrency: int | None) -> None:
        self.values: dict[str, Any] = {}
        self.estimates: dict[str, str] = {}
        """How figures that are estimates are made, by name."""
        self.notes: list[str] = []
        self.rows: list[dict[str, object]] = []
        self._found, self._gpu, self._context = found, gpu, context
        self._device = "cpu" if gpu == CPU else "cuda"
        default = MAX_NUM_SEQS.get(self._device, DEFAULT_NUM_SEQS)
        self._concurrency = concurrency or found.settings.max_num_seqs or default

    @cached_property
    def _model(self) -> Any:
        found = self._found
        return build_without_weights(found.kind, found.folder, found.config, found.settings)

    def run(self, name: str) -> None:
        """Collect all of a model, under the name that was given."""
        found = self._found
        self._add("model", name, name, f"by {found.kind.__name__}")
        weights, total = self._weights(), self._memory()
        generates = found.task is None and found.settings.engine != "batch" and not found.config.is_encoder_decoder
        outline = measure_outline(self._model) if generates and self._model is not None else None
        if outline is None:
            self._describe_others(weights, total)
            return
        settings = found.settings
        outline = replace(outline, bytes_per_token=-(-outline.bytes_per_token // settings.tensor_parallel_size))
        fraction = settings.gpu_memory_fraction or 1.0
        self._describe_room(Room(outline, weights, self._device, total, fraction, settings.max_cache_tokens))

    def _add(self, name: str, value: Any, words: str, source: str) -> None:
        self.values[name] = value
        if source.startswith("estimate"):
            self.estimates[name] = source
        self.rows.append({"figure": name, "value": words, "from": source})

    def _add_bytes(self, name: str, value: int, source: str) -> None:
        self._add(name, value, size_words(value), source)

    def _weights(self) -> int:
        found, is_undone = self._found, False
        check_small_weights(found.folder, found.config, found.settings, None, is_on_cpu=self._gpu == CPU)
        if self._gpu == CPU and (quantization := check_quantization(found.config, found.settings)):
            is_undone = quantization[1]
        weights = loaded_bytes(
            found.folder,
            found.config,
            self._model,
            found.settings,
            from_files=not is_undone,
            is_on_cpu=self._gpu == CPU,
        )
        if weights is None:
            raise CheckpointError(
                "unsupported_model",
                "its weights are not in safetensors, and transformers has no such model to count: convert them",
            )
        self._add_bytes("weights_bytes", weights, "its tensors, as they are loaded")
        if found.settings.quantization_config and not is_quantized(found.config):
            self.notes.append("The weights are those before quantization_config quantises them.")
        size = found.settings.tensor_parallel_size
        if size > 1 and self._model is not None:
            from hf_triton.hub.ranks import check_ranks, rank_bytes

            check_ranks(found.folder, found.config, found.settings, is_on_cpu=True)
            weights = rank_bytes(self._model, size)
            self._add_bytes("weights_bytes_per_rank", weights, f"what transformers' plan gives each of {size} ranks")
            self.notes.append(
                f"Memory, cache and bytes of tokens are those of one of {size} ranks, which are one replica together."
            )
        return weights

    def _memory(self) -> int:
        if self._gpu == CPU:
            import torch

            size = self._found.settings.tensor_parallel_size
            total = FreeMemory().of(torch.device("cpu")) // size
            part = "free on this machine" if size == 1 else f"a rank's part of what is free on this machine: 1/{size}"
            self._add_bytes("memory_bytes", total, part)
        else:
            total = CARDS[self._gpu].memory_gb * 10**9
            self._add_bytes("memory_bytes", total, f"{self._gpu}: {CARDS[self._gpu].source}")
        return total

    def _describe_room(self, room: Room) -> None:
        """Add what a model that generates takes."""
        outline, context, concurrency = room.outline, self._context, self._concurrency
        source = "the engine's own cache, of a forward without weights"
        self._add_bytes("kv_cache_bytes_per_token", outline.bytes_per_token if outline.has_keys else 0, source)
        if outline.slot_tokens:
            self._add_bytes("state_bytes_per_sequence", outline.slot_tokens * outline.bytes_per_token, source)
        each = room.sequence_bytes(context)
        self._add_bytes("sequence_bytes", each, f"{context} tokens, in blocks of {room.block_size}")
        cache = room.num_tokens * outline.bytes_per_token
        part = "80 % of what the weights leave" if self._gpu == CPU else "what the weights leave of 90 %"
        self._add_bytes("cache_bytes", cache, f"{part}, as the engine counts")
        number = room.num_sequences(context)
        self._add("max_sequences", number, f"{number:,}", f"of {context} tokens at a time")
        if not number:
            self.notes.append(self._too_large(room, each))
            return
        running = min(number, MOST_SEQS)
        replicas = math.ceil(concurrency / running)
        self._add("replicas_for_concurrency", replicas, f"{replicas:,}", f"for {concurrency} of these sequences")
        running = min(running, math.ceil(concurrency / replicas))
        settings = {"max_num_seqs": running, "max_context_length": context}
        if (size := self._found.settings.tensor_parallel_size) > 1:
            settings["tensor_parallel_size"] = size
        if outline.has_keys:
            settings["max_cache_tokens"] = max(256, running * room.sequence_tokens(context))
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        self._add("settings", settings, words, "of the folder of each replica")

    def _too_large(self, room: Room, sequence: int) -> str:
        remedy = "Not one such sequence fits: use quantised weights, a smaller --dtype, a shorter --context"
        if self._gpu == CPU:
            return f"{remedy} or a machine with more memory."
        size = self._found.settings.tensor_parallel_size
        number = math.ceil(size * (room.weights + sequence) / (USED_FRACTION * room.total))
        spread = f", or at least {number} of these for one model (instance_group of KIND_MODEL)" if number > 1 else ""
        return f"{remedy}, or a larger card{spread}."

    def _describe_others(self, weights: int, total: int) -> None:
        """Say what is known of a model without a KV cache of the continuous engine."""
        task = self._found.task
        if weights > USED_FRACTION * total:
            self.notes.append("The weights do not fit: use a smaller --dtype, or a larger machine.")
        if task is None or task.auto_class == SPEECH:
            self.notes.append(
                "Its keys and values are those of transformers' generate, or cannot be seen without weights: they grow "
                f"beside the weights with each of max_num_seqs ({self._concurrency}) sequences that run."
            )
        else:
            self._describe_encoder()

    def _describe_encoder(self) -> None:
        config, settings = self._found.config.get_text_config(), self._found.settings
        tokens = settings.max_batch_tokens or MAX_BATCH_TOKENS[self._device]
        sizes = [getattr(config, name, None) or 0 for name in ("hidden_size", "intermediate_size")]
        if all(sizes):
            width = sum(count * size for count, size in zip(WIDTHS, sizes, strict=True))
            item = BYTES.get(dtype_name(self._found.config, settings), 4)
            source = f"estimate: {WIDTHS[0]} x hidden_size + {WIDTHS[1]} x intermediate_size of {tokens} tokens"
            self._add_bytes("activation_bytes", tokens * width * item, f"{source}, without attention")
        self.notes.append(
            f"It has no KV cache: what does not run waits in the host's memory, up to {settings.max_waiting_prompts} "
            "inputs (max_waiting_prompts) of at most max_prompt_bytes."
        )
