# SPDX-License-Identifier: Apache-2.0
"""One decoding step of the running sequences: a token in, the logits of the next one out.

*Eager* decoding calls the model's forward over the slots and columns in use. *Static* decoding calls it over buckets of
slots and columns, so that shapes and addresses stay; on a CUDA device it replays the forward as a captured graph, and
the step no longer waits for Python's kernel launches. Knows no sampling.
"""

from __future__ import annotations

import logging
from typing import Final, Literal

import torch

from hf_triton.runner.adapters import AdapterRows
from hf_triton.runner.cuda import graph_capture
from hf_triton.runner.faults import is_memory, kind
from hf_triton.runner.forward import Forward
from hf_triton.runner.kv_cache import COLUMN_STEP, KVCache
from hf_triton.runner.numerics import agree

logger = logging.getLogger(__name__)

DecodingMode = Literal["auto", "eager", "cuda_graphs", "static"]
"""`auto`: `cuda_graphs` on a CUDA device, else `eager`. `static`: the shapes of `cuda_graphs`, without capture."""

TRIAL_PROMPTS: Final = (19, 5, 8)
"""Lengths of the trial's prompts: two fill a bucket of slots, three do not."""
TRIAL_COLUMNS: Final = 512
"""Columns of a nearly empty bucket: a model that counts its sliding window from the bucket's end (GPT-Neo, 256 tokens)
sees nothing in it."""


class Decoder:
    """Runs the decoding steps of one model.

    Static decoding is first compared with eager decoding; if it fails or its logits differ, all steps are eager, and a
    line is logged.

    Args:
        forward: The model's.
        mode: How steps run.

    Raises:
        ValueError: `cuda_graphs` without a CUDA device.
    """

    def __init__(self, forward: Forward, mode: DecodingMode = "auto") -> None:
        is_cuda = forward.device.type == "cuda"
        error = decoding_error(mode, forward.device)
        if error:
            raise ValueError(error)
        self._forward = forward
        self._graph_capture = graph_capture(forward.device) if is_cuda and mode in ("auto", "cuda_graphs") else None
        self.is_static = self._graph_capture is not None or mode == "static"
        """Whether steps have static shapes. Buffers that are kept while no sequence runs keep their graphs valid."""
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None]  # by slots and columns; None: not captured
        self._input_ids: torch.Tensor  # [slots, 1], read by graphs
        self._logits: torch.Tensor  # [slots, vocabulary], written by graphs; empty before the first
        self._drop_graphs(None)
        self._is_on_trial = True
        if self.is_static and not forward.is_on_one_device:
            self._fall_back("it is on several devices")
        if self.is_static:
            self._try_out()
        self._is_on_trial = False

    @torch.inference_mode()
    def step(self, memory: KVCache, newest: torch.Tensor, adapters: AdapterRows = None) -> torch.Tensor:
        """Run one token of every sequence and advance the clock.

        Args:
            memory: The KV cache, with at least one sequence.
            newest: `[num_rows]` int64 on the device, the last token of each sequence, not cached yet.
            adapters: The LoRA adapter of each sequence. A step with any is eager, as graphs have none.

        Returns:
            `[num_rows, vocabulary]` on the device, valid until the next step.
        """
        memory.make_column()
        input_ids = newest.unsqueeze(1)
        logits = self._static(memory, input_ids) if self.is_static and not adapters else None
        if logits is None:
            logits = self._run(memory, input_ids, adapters)
        memory.advance()
        return logits

    def release(self) -> None:
        """Free the graphs and their buffers, and return unused device memory to other processes."""
        if self.is_static:
            self._drop_graphs(None)
        if self._forward.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, memory: KVCache, input_ids: torch.Tensor, adapters: AdapterRows = None) -> torch.Tensor:
        mask, position_ids = memory.attention_mask(), memory.position_ids()
        return self._forward(input_ids, mask, memory.cache, position_ids=position_ids, adapters=adapters)[:, -1]

    # --- static shapes -----------------------------------------------------------------------------------------------

    def _static(self, memory: KVCache, input_ids: torch.Tensor) -> torch.Tensor | None:
        """The logits, computed over a bucket; None if the step must run eagerly."""
        if memory.allocation is not self._allocation:
            self._drop_graphs(memory)
        self._input_ids[: memory.num_rows] = input_ids
        bucket = bucket_of(memory)
        if self._graph_capture is None:
            return self._run_bucket(memory, bucket)[: memory.num_rows]
        if bucket not in self._graphs:
            self._graphs[bucket] = self._try_capture(memory, bucket)
        graph = self._graphs[bucket]
        if graph is None:
            return None
        graph.replay()
        return self._logits[: memory.num_rows]

    def _run_bucket(self, memory: KVCache, bucket: tuple[int, int]) -> torch.Tensor:
        with memory.padded_to(*bucket):
            return self._run(memory, self._input_ids[: bucket[0]])

    def _try_capture(self, memory: KVCache, bucket: tuple[int, int]) -> torch.cuda.CUDAGraph | None:
        """A bucket's graph; None if the device lacks the memory, or the model cannot be captured."""
        try:
            with memory.states_kept():
                return self._capture(memory, bucket)
        except Exception as error:  # a model may do anything in its forward
            if not is_memory(error):
                self._fall_back(kind(error))
            return None

    def _capture(self, memory: KVCache, bucket: tuple[int, int]) -> torch.cuda.CUDAGraph:
        """Capture a step; the runs before it write what the step itself is going to write."""

        def run() -> None:
            logits = self._run_bucket(memory, bucket)
            if not self._logits.numel():
                self._logits = logits.new_zeros(memory.shape[0], logits.shape[1])
            self._logits[: bucket[0]] = logits

        assert self._graph_capture is not None
        return self._graph_capture.capture(run, checks_sync=self._is_on_trial)

    def _drop_graphs(self, memory: KVCache | None) -> None:
        """Forget all graphs, and allocate their inputs for the present buffers of a KV cache."""
        device = self._forward.device
        self._graphs = {}
        if self._graph_capture is not None:
            self._graph_capture.reset()
        self._allocation = memory.allocation if memory else None
        self._input_ids = torch.zeros(memory.shape[0] if memory else 0, 1, dtype=torch.int64, device=device)
        self._logits = torch.zeros(0, 0, device=device)

    # --- trial -------------------------------------------------------------------------------------------------------

    def _fall_back(self, reason: str) -> None:
        if self.is_static:
            logger.warning("CUDA graphs disabled for this model (%s); falling back to eager decoding", reason)
        self.is_static = False

    @torch.inference_mode()
    def _try_out(self) -> None:
        try:
            agrees = self._agrees_with_eager() and self._agrees_when_wide()
        except Exception as error:
            self._fall_back(kind(error))
        else:
            if not agrees:
                self._fall_back("the logits differ")
        self._drop_graphs(None)

    def _agrees_with_eager(self) -> bool:
        """Whether static and eager logits agree while sequences join."""
        memory = KVCache(self._forward.device)
        memory.max_tokens = 0
        newest: list[int] = []
        for length in TRIAL_PROMPTS:
            logits = self._add_prompt(memory, length)
            memory.make_column()
            input_ids = torch.tensor([*newest, int(logits.argmax())], device=self._forward.device).unsqueeze(1)
            with memory.states_kept():
                eager = self._run(memory, input_ids)
            static = self._static(memory, input_ids)
            if static is None:
                raise torch.OutOfMemoryError("a graph")  # or the capture failed, which is logged
            if not agree(eager, static, eager.dtype):
                return False
            memory.advance()
            newest = eager.argmax(-1).tolist()
        return True

    def _agrees_when_wide(self) -> bool:
        """Whether they agree in a bucket of `TRIAL_COLUMNS`; also true if the model has fewer positions."""
        memory = KVCache(self._forward.device)
        memory.max_tokens = 0
        newest = self._add_prompt(memory, TRIAL_PROMPTS[0]).argmax(-1).unsqueeze(1)
        memory.widen(TRIAL_COLUMNS)
        memory.make_column()
        with memory.states_kept():
            eager = self._run(memory, newest)
        try:
            with memory.padded_to(1, TRIAL_COLUMNS):
                static = self._run(memory, newest)
        except RuntimeError as error:
            if is_memory(error):
                raise
            return True  # the table of positions is shorter
        return agree(eager, static, eager.dtype)

    def _add_prompt(self, memory: KVCache, length: int) -> torch.Tensor:
        """Prefill a prompt of token ids below 19 to a new slot; the logits that follow it, `[1, vocabulary]`."""
        prefilled, logits = self._forward.prefill([7 * index % 19 for index in range(length)])
        memory.add(prefilled, 0, length)
        return logits


def decoding_error(mode: DecodingMode, device: torch.device) -> str | None:
    """The error of a mode that cannot run on a device; None: it can."""
    if mode == "cuda_graphs" and device.type != "cuda":
        return f"decoding cuda_graphs needs a GPU, and the model is on {device}: set decoding to auto"
    return None


def bucket_of(memory: KVCache) -> tuple[int, int]:
    """Slots (1, 2, 4, 8, 16, 24, 32, ...) and columns (128, 256, ..., 1024, 1280, ...) that cover those in use."""
    rows, columns = memory.num_rows, memory.clock + 1
    rows = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
    step = max(COLUMN_STEP, 1 << (columns - 1).bit_length() >> 3)
    return min(rows, memory.shape[0]), min(-(-columns // step) * step, memory.shape[1])
