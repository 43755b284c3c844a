# SPDX-License-Identifier: Apache-2.0
"""One step of the running rows: a token in, the logits of the next one out.

Two ways behind one interface. *Eager* calls the model's forward over what is in use. *Static* calls it over buckets of
rows and columns, so that shapes and addresses stay, and on a CUDA device replays it as a captured graph: the step then
costs what the device needs for it and not what Python needs to launch it. Knows no texts and no sampling.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

import torch

from hf_triton.runner.faults import is_memory, kind
from hf_triton.runner.forward import Forward
from hf_triton.runner.kv_cache import COLUMN_STEP, KVCache
from hf_triton.runner.numerics import agree

logger = logging.getLogger(__name__)

DecodingMode = Literal["auto", "eager", "cuda_graphs", "static"]
"""`auto`: `cuda_graphs` on a CUDA device, else `eager`. `static`: as `cuda_graphs` does it, but nothing is captured."""

TRIAL_PROMPTS: Final = (19, 5, 8)
"""Lengths of the prompts that static decoding is tried on: two fill a bucket of rows, three do not."""
TRIAL_TOKENS: Final = 19  # ids below, which every vocabulary has
TRIAL_COLUMNS: Final = 512
"""Of a bucket that is nearly empty: a model that counts its sliding window from the bucket's end (GPT-Neo, 256 tokens)
sees nothing in it."""

_CAPTURING: Final = threading.Lock()  # torch: one capture at a time in a process


class Decoder:
    """Runs the steps of one model.

    Static decoding is tried at once beside eager decoding; where it fails or its logits are others, all steps are
    eager, which is logged.

    Args:
        forward: The model's.
        mode: Which way.

    Raises:
        ValueError: `cuda_graphs` without a CUDA device.
    """

    def __init__(self, forward: Forward, mode: DecodingMode = "auto") -> None:
        is_cuda = forward.device.type == "cuda"
        if mode == "cuda_graphs" and not is_cuda:
            raise ValueError(
                f"decoding cuda_graphs needs a CUDA device, and the model is on {forward.device}: take auto"
            )
        self._forward = forward
        self._captures = is_cuda and mode in ("auto", "cuda_graphs")
        self.is_static = self._captures or mode == "static"
        """Whether steps have static shapes. Buffers that are kept, even while no row is in use, keep their graphs."""
        self._stream = torch.cuda.Stream(forward.device) if self._captures else None  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None]  # by rows and columns; None: cannot be had
        self._input_ids: torch.Tensor  # [rows, 1], what graphs read
        self._logits: torch.Tensor  # [rows, vocabulary], what they write; empty before the first
        self._drop_graphs(None)
        self._is_on_trial = True
        if self.is_static and not forward.is_on_one_device:
            self._fall_back("it is on several devices")
        if self.is_static:
            self._try_out()
        self._is_on_trial = False

    @torch.inference_mode()
    def step(self, memory: KVCache, newest: torch.Tensor) -> torch.Tensor:
        """Run one token for every row and advance the clock.

        Args:
            memory: At least one row.
            newest: `[num_rows]` int64 on the device, the last token of each row, which is not in the memory yet.

        Returns:
            `[num_rows, vocabulary]`, on the device, good until the next step.
        """
        memory.make_column()
        input_ids = newest.unsqueeze(1)
        logits = self._static(memory, input_ids) if self.is_static else None
        if logits is None:
            logits = self._run(memory, input_ids)
        memory.advance()
        return logits

    def release(self) -> None:
        """Give back what is kept for the next step, and to other processes what this one has for no use."""
        if self.is_static:
            self._drop_graphs(None)
        if self._forward.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, memory: KVCache, input_ids: torch.Tensor) -> torch.Tensor:
        mask, position_ids = memory.attention_mask(), memory.position_ids()
        return self._forward(input_ids, mask, memory.cache, position_ids=position_ids)[:, -1]

    # --- static shapes -----------------------------------------------------------------------------------------------

    def _static(self, memory: KVCache, input_ids: torch.Tensor) -> torch.Tensor | None:
        """The logits by a bucket; None where there is no way but an eager step."""
        if memory.allocation is not self._allocation:
            self._drop_graphs(memory)
        self._input_ids[: memory.num_rows] = input_ids
        bucket = _bucket(memory)
        if not self._captures:
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
        """A bucket's graph; None where the device has no memory for it, or the model none at all."""
        try:
            with memory.states_kept():
                return self._capture(memory, bucket)
        except Exception as error:  # what a model does while it is captured is its own affair
            if not is_memory(error):
                self._fall_back(kind(error))
            return None

    def _capture(self, memory: KVCache, bucket: tuple[int, int]) -> torch.cuda.CUDAGraph:
        """After one run on the stream, as torch asks for; both write what the step itself is going to write.

        Graphs share one pool of memory: they never run at a time, and none needs what another has left there.
        """
        stream, current = self._stream, torch.cuda.current_stream(self._forward.device)
        assert stream is not None
        stream.wait_stream(current)
        try:
            with _CAPTURING, torch.cuda.stream(stream):
                logits = self._run_bucket(memory, bucket)
                if not self._logits.numel():
                    self._logits = logits.new_zeros(memory.shape[0], logits.shape[1])
                del logits  # its memory can be the graph's
                if self._is_on_trial:
                    with _waiting_refused():
                        self._run_bucket(memory, bucket)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                    self._logits[: bucket[0]] = self._run_bucket(memory, bucket)
        finally:
            current.wait_stream(stream)
        return graph

    def _drop_graphs(self, memory: KVCache | None) -> None:
        """Begin anew, for the buffers that this memory has now."""
        device = self._forward.device
        self._graphs = {}
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._allocation = memory.allocation if memory else None
        self._input_ids = torch.zeros(memory.shape[0] if memory else 0, 1, dtype=torch.int64, device=device)
        self._logits = torch.zeros(0, 0, device=device)

    # --- trial -------------------------------------------------------------------------------------------------------

    def _fall_back(self, reason: str) -> None:
        if self.is_static:
            logger.warning("static shapes do not do for this model (%s): decoding steps run eagerly", reason)
        self.is_static = False

    @torch.inference_mode()
    def _try_out(self) -> None:
        try:
            agrees = self._agrees_with_eager() and self._agrees_when_wide()
        except Exception as error:
            self._fall_back(kind(error))
        else:
            if not agrees:
                self._fall_back("its logits are others")
        self._drop_graphs(None)

    def _agrees_with_eager(self) -> bool:
        """Whether static logits are the eager ones while texts join."""
        memory = KVCache(self._forward.device)
        memory.max_tokens = 0  # no more than needed
        newest: list[int] = []
        for length in TRIAL_PROMPTS:
            logits = self._add_prompt(memory, length)
            memory.make_column()
            input_ids = torch.tensor([*newest, int(logits.argmax())], device=self._forward.device).unsqueeze(1)
            with memory.states_kept():
                eager = self._run(memory, input_ids)
            static = self._static(memory, input_ids)
            if static is None:
                raise torch.OutOfMemoryError("a graph")  # or the model cannot be captured, which has been logged
            if not agree(eager, static, eager.dtype):
                return False
            memory.advance()
            newest = eager.argmax(-1).tolist()
        return True

    def _agrees_when_wide(self) -> bool:
        """Whether they are in a bucket of `TRIAL_COLUMNS`; so they are taken to be where a model has none so wide."""
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
            return True  # a table of positions ends before
        return agree(eager, static, eager.dtype)

    def _add_prompt(self, memory: KVCache, length: int) -> torch.Tensor:
        """Lay a prompt to try into the rows; the logits that follow it, `[1, vocabulary]`."""
        prefilled, logits = self._forward.prefill([7 * place % TRIAL_TOKENS for place in range(length)])
        memory.add(prefilled, 0, length)
        return logits


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Have torch raise where the host would wait for the device.

    To know before: a capture that breaks off for that leaves torch's allocator, up to 2.12 at least, as if it went on.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _bucket(memory: KVCache) -> tuple[int, int]:
    """Rows (1, 2, 4, 8, 16, 24, 32, ...) and columns (128, 256, ..., 1024, 1280, ...) that hold what is in use."""
    rows, columns = memory.num_rows, memory.clock + 1
    rows = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
    step = max(COLUMN_STEP, 1 << (columns - 1).bit_length() >> 3)
    return min(rows, memory.shape[0]), min(-(-columns // step) * step, memory.shape[1])
