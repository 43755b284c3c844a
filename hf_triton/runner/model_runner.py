# SPDX-License-Identifier: Apache-2.0
"""Runs a step through a model: one packed forward, or one for all decoding sequences and one for each chunk.

`Way` says how a model runs; the probe tries each. Knows no sampling and no scheduling.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from hf_triton.runner.calling import cache_name
from hf_triton.runner.cuda import capture_graphs, forward_context
from hf_triton.runner.device_step import DeviceStep, StepSize, decode_sizes, step_sizes
from hf_triton.runner.experts import gathered_experts, gathering_sizes, why_experts_wait
from hf_triton.runner.faults import described
from hf_triton.runner.images import Images
from hf_triton.runner.long_rope import LongRope, has_long_rope
from hf_triton.runner.lora.model_adapters import Adapters
from hf_triton.runner.paged_cache import PagedCache
from hf_triton.runner.recorded import SIZES, RecordedForward, Recorder
from hf_triton.runner.state_scans import continue_scans
from hf_triton.runner.state_slots import decodes_as_it_prefills
from hf_triton.runner.step import Step, TokenRange
from hf_triton.runner.step_attention import TorchAttention, attention_configs, attention_of, register
from hf_triton.runner.step_tensors import InflightTokens, StepTensors
from hf_triton.runner.transfer import to_device, to_index

if TYPE_CHECKING:
    from hf_triton.runner.cuda.graphs import StepGraph, StepGraphs

logger = logging.getLogger(__name__)

MAX_TABLES: Final = 2**20
"""Blocks of all tables of a captured step, 8 MiB of numbers; many sequences may share a prefix's blocks."""
WARM_UP_TOKENS: Final = 1024, 1040
"""Steps of as many as the largest graph has, and of more, which is another kernel of attention, run at load."""
CPU_BLOCK_SIZE: Final = 64
"""Tokens of a block: a CPU's prefetching wants long runs, a GPU's memory short ones."""
GPU_BLOCK_SIZE: Final = 16
MAX_RECORDED: Final = 16
"""Tokens of the largest step whose calls are recorded: larger ones take their time for the model's own operations."""
MAX_RECORDED_S: Final = 0.1
"""Recording saves a few milliseconds of a step: one that takes so long is not worth the trial."""
TRIAL_LENGTH: Final = 8
"""Tokens of each sequence that a trial of recorded calls has."""


@dataclass(frozen=True)
class Way:
    """How a model runs a step."""

    gathers: bool = False
    """Its attention is given the cached states of whole sequences (`PagedCache`)."""
    calls_torch: bool = False
    """It calls torch's attention itself."""
    prefills_whole: bool = False
    """A context is computed in one forward: a scan begins anew at each chunk."""
    joins_images: bool = False
    """The tokens of an image attend to each other, so that an image is never cut."""
    num_axes: int = 0
    """Axes of the positions that images change (M-RoPE)."""


PACKED: Final = Way()


class ModelRunner:
    """Runs steps of one model.

    Args:
        adapters: Its LoRA adapters; None: it has none.
        block_size: Tokens of a block; None: the device's.
    """

    def __init__(
        self, model: Any, way: Way, adapters: Adapters | None = None, *, block_size: int | None = None
    ) -> None:
        register()
        self.model = model
        self.way = way
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.block_size = block_size or (CPU_BLOCK_SIZE if self.device.type == "cpu" else GPU_BLOCK_SIZE)
        self.recomputes = decodes_as_it_prefills(model)
        """Whether a sequence can be recomputed: prefilling its tokens gives the KV that decoding gave."""
        self._adapters = adapters
        self._adapter_of: dict[int, str] = {}
        self._is_split = len({parameter.device for parameter in model.parameters()}) > 1
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._cache_name = cache_name(model)
        self._configs = [] if way.calls_torch else attention_configs(model)
        self._torch_attention: AbstractContextManager[Any] = TorchAttention() if way.calls_torch else nullcontext()
        self._device_context = forward_context(self.device)
        self._long_rope = LongRope(model) if has_long_rope(model) else None
        self.switch_length = self._long_rope.switch_length if self._long_rope else None
        """The most tokens of a sequence with LongRoPE's first set of frequencies; None: the model has one set."""
        self.cache = self._new_cache(1)
        self.images = Images(model, joins=way.joins_images)
        self._graphs: StepGraphs | None = None
        self._adapter_graphs: StepGraphs | None = None
        """Graphs of steps with adapters."""
        self._recorded: RecordedForward | None = None
        """Stands in the model's place for small steps; see `record`."""
        self._num_slots = 1
        self._captured: tuple[int, int] | None = None  # the arguments of a capture that is repeated after a sleep
        self.partly: list[str] = []
        """Says which small steps run eagerly though others are captured, and why; see `Worker.slower`."""
        if self.cache.has_states:
            continue_scans(model)
        self.is_packed = not self.cache.has_states
        """Whether the ranges of a step are one row; else each chunk is a forward, and one token of every sequence."""

    def _new_cache(self, num_blocks: int) -> PagedCache:
        config = self.model.config.get_text_config(decoder=True)
        return PagedCache(config, num_blocks, self.block_size, gathers=self.way.gathers)

    def allocate(self, num_blocks: int, num_slots: int = 1) -> None:
        """Use an empty cache of so many blocks.

        On a CPU its memory is touched when blocks are written. On any other device all is allocated here, states of
        so many sequences too: layers allocate at their first token.
        """
        self.cache, self._num_slots = self._new_cache(num_blocks), num_slots
        if self.device.type != "cpu":
            self.run_token(num_slots)  # which is one more, `NO_SLOT`

    def give_back(self, blocks: list[int]) -> None:
        """Free the memory of blocks that hold nothing."""
        for layer in self.cache.blocks():
            layer.give_back(blocks)

    def sleep(self) -> None:
        """Drop what `wake` makes again: graphs, which hold addresses, and the memory of blocks and states."""
        self._graphs = self._adapter_graphs = None
        self.cache.free()

    def wake(self) -> None:
        """Allocate and capture what was there after the load; on a CPU, blocks are allocated when they are written."""
        if self.device.type != "cpu":
            self.run_token(self._num_slots)
        if self._captured is not None:
            num_partly = len(self.partly)
            if (reason := self.capture(*self._captured)) is not None:
                logger.warning("the model runs eagerly since it slept: %s", reason)
            del self.partly[num_partly:]

    def trim_slots(self, num_slots: int) -> None:
        """Free the memory of states behind the first ones."""
        self.cache.trim_slots(num_slots)

    def memory_per_token(self) -> tuple[Mapping[torch.device, int], int]:
        """See `PagedCache.memory_per_token`; it runs one token through the model."""
        self.cache = self._new_cache(1)
        self.run_token()
        return self.cache.memory_per_token(self.device)

    def run_token(self, slot: int = 0) -> torch.Tensor:
        """Logits of a token of a sequence in the first block, `[1, vocabulary]`; for trials while nothing else runs."""
        return self.run(Step((TokenRange(0, 0, 1, [0], [0], 1, samples=(0,), slot=slot),)))

    def warm_up(self) -> None:
        """Run large steps, whose kernels a GPU would else compile while sequences wait for them; nothing else runs."""
        if self.device.type == "cuda" and self.is_packed:
            length = min(self.block_size, 16)  # shorter than any context
            part = TokenRange(0, 0, length, [0] * length, [0], length)
            for num_tokens in WARM_UP_TOKENS:
                self.run(Step((part,) * (num_tokens // length)))

    @torch.inference_mode()
    def capture(self, max_sequences: int, num_drafted: int = 0) -> str | None:
        """Capture the forwards of small steps, which then take a GPU's time and not Python's; see `StepGraphs`.

        Args:
            max_sequences: The most sequences of a step.
            num_drafted: The most tokens of a sequence's proposal.

        Returns:
            Why all steps run eagerly; None: small ones are captured.
        """
        reason = self._why_eager()
        if reason is None:
            if self.is_packed:
                sizes = step_sizes(max_sequences, self.way.num_axes, num_drafted)
            else:
                sizes = decode_sizes(max_sequences, self.way.num_axes)
            try:
                self._graphs = self._capture(self._forward_on_device, sizes)
            except Exception as error:  # a model may do anything in its forward
                waits = why_experts_wait(error, self.model.dtype, self.device)
                if waits is None or not self._capture_gathering(sizes, waits):
                    reason = waits or described(error)
        if reason is None:
            self._captured = max_sequences, num_drafted
        if self._adapters is not None and self._adapters.have_slots:
            if reason is None:
                self._capture_adapters(sizes)
            if self._adapter_graphs is None:
                self._adapters.drop_slots()
        return reason

    @torch.inference_mode()
    def record(self, max_tokens: int) -> None:
        """On a CPU, record the calls of small steps, of up to so many tokens, if a trial finds the same bits.

        Nothing else runs.

        LongRoPE has two sets of frequencies: a model with them runs as it is, and so do all while adapters run.
        """
        way, count = self.way, min(self.cache.num_blocks, max(max_tokens, SIZES[-1]), MAX_RECORDED)
        is_other = way.gathers or way.calls_torch or way.prefills_whole or not self.is_packed or self._is_split
        has_more = self._long_rope is not None or "position_ids" not in self._accepts
        if self.device.type != "cpu" or is_other or has_more or count < SIZES[-1]:
            return

        def run(size: int, start: int, end: int) -> torch.Tensor:
            return self.run(Step(tuple(_trial_range(number, start, end) for number in range(size))))

        model, recorder = self.model, Recorder(self.model)
        sizes = [size for size in sorted({1, 2, 3, 5, 9, 12, count}) if size <= count]
        trials = [*((size, 4, 5) for size in sizes), (count, 7, 8)]
        try:
            run(count, 0, TRIAL_LENGTH)
            times = []
            for _ in range(2):  # the first one may compile a kernel
                started_s = time.perf_counter()
                run(1, 3, 4)
                times.append(time.perf_counter() - started_s)
            if min(times) > MAX_RECORDED_S:
                return
            self.model = recorder
            for at, size in enumerate(SIZES):  # at other places, whose number is no tensor's size then
                run(size, 3 + 3 * at, 4 + 3 * at)
            self.model = model
            expected = [run(*trial) for trial in trials]
            self._recorded = recorder.recorded(count)
            if not all(torch.equal(logits, run(*trial)) for logits, trial in zip(expected, trials, strict=True)):
                self._recorded = None
            logger.info("calls of steps of up to %d tokens are recorded: %s", count, self._recorded is not None)
        except Exception as error:  # a model may do anything in its forward
            self.model, self._recorded = model, None
            logger.info("no calls are recorded: %s", described(error))
        finally:
            self.give_back(list(range(count)))

    def _capture_gathering(self, sizes: Sequence[StepSize], reason: str) -> bool:
        """Capture the smallest steps of a mixture of experts otherwise; `reason`: why not as it is."""
        with suppress(Exception):
            few = gathering_sizes(self.model, sizes)
            if few:
                with gathered_experts(self.model):
                    self._graphs = self._capture(self._forward_on_device, few)
                self.partly.append(f"runs steps of {few[-1].num_tokens + 1} tokens or more eagerly, as {reason}")
                logger.warning("the model %s", self.partly[-1])
                return True
        return False

    def _capture_adapters(self, sizes: Sequence[StepSize]) -> None:
        try:
            self._adapter_graphs = self._capture(self._forward_with_slots, sizes, beside=self._graphs)
        except Exception as error:
            self._tell_adapters_eager(described(error))

    def _tell_adapters_eager(self, reason: str) -> None:
        self.partly.append(f"runs steps with LoRA adapters eagerly: {reason}")
        logger.warning("the model %s", self.partly[-1])

    def _capture(
        self,
        forward: Callable[[DeviceStep], torch.Tensor],
        sizes: Sequence[StepSize],
        *,
        beside: StepGraphs | None = None,
    ) -> StepGraphs:
        """The captured forwards of these sizes, ascending; raises what the model does, or if a replay is wrong."""
        most = sizes[-1].num_sequences
        graphs = capture_graphs(
            forward,
            self.device,
            sizes=sizes,
            num_tables=min(most * self.cache.num_blocks, MAX_TABLES),
            beside=beside,
        )
        if self.is_packed:
            trial = [_trial_step(0, 3), _trial_step(3, 4), _trial_step(0, min(self.block_size, 16), min(8, most))]
        else:
            count = min(3, most, self.cache.num_blocks)
            trial = [Step(tuple(_trial_range(slot, 3, 4) for slot in slots)) for slots in ([0], range(count)[::-1])]
        if not all(self._replays_right(graphs, step) for step in trial):
            raise RuntimeError("captured logits differ from eager ones of the same numbers")
        return graphs

    def _replays_right(self, graphs: StepGraphs, step: Step) -> bool:
        """Whether a small step's replay, if there is one, gives what an eager forward of the same numbers gives."""
        tensors = StepTensors(step.ranges, self.block_size, self.device)
        rows = _logit_rows(step.ranges, tensors.bounds)
        graph = self._find_graph(graphs, tensors, len(rows))
        if graph is None:
            return True
        graphs.load(tensors.numbers(graph.size, rows))
        if self.is_packed:
            return graphs.replays_right(graph)
        prompts = Step(tuple(_trial_range(part.slot, 0, 3) for part in step.ranges))
        return graphs.replays_right(graph, lambda: self.run(prompts))

    def allocate_slots(self) -> None:
        """Allocate what steps with adapters need to be captured, while the cache has not taken the memory."""
        if self._adapters is None or self.device.type != "cuda" or self._is_split or not self.is_packed:
            return
        if reason := self._adapters.build_slots(self.device, step_sizes(1)[-1].num_tokens):
            self._adapters.drop_slots()
            self._tell_adapters_eager(reason)

    def _why_eager(self) -> str | None:
        """Why no step of this model can be captured; None: it can be tried."""
        if self.device.type != "cuda":
            return f"the model is on {self.device}"
        if self._is_split:
            return "the model is on several devices"
        if self.way.gathers:
            return "the keys and values of each sequence are copied at every step, as for multi-head latent attention"
        if self.is_packed and self.way.prefills_whole:
            return "the model does not run as one packed row"
        if not all(layer.operation for layer in self.cache.paged_layers() if layer.blocks is not None):
            return "the device has no attention kernel for it"
        return None

    @torch.inference_mode()
    def _forward_on_device(self, numbers: DeviceStep) -> torch.Tensor:
        """The logits of a step of which the host knows the size alone."""
        step = StepTensors((), self.block_size, self.device, numbers)
        no_adapters = nullcontext() if self._adapters is None else self._adapters.choose(None)
        no_long = nullcontext() if self._long_rope is None else self._long_rope.by_token(None)
        with no_adapters, no_long:
            if self.is_packed:
                return self._run_model(step, numbers.token_ids[None], numbers.positions.unsqueeze(-2), numbers.rows)
            logits = self._run_model(step, numbers.token_ids[:, None], numbers.positions.unsqueeze(-1), None)
            return logits[numbers.rows]

    @torch.inference_mode()
    def _forward_with_slots(self, numbers: DeviceStep) -> torch.Tensor:
        """The same for a step whose tokens have adapters."""
        step = StepTensors((), self.block_size, self.device, numbers)
        assert self._adapters is not None
        no_long = nullcontext() if self._long_rope is None else self._long_rope.by_token(None)
        with self._adapters.choose_slots(len(numbers.token_ids)), no_long:
            return self._run_model(step, numbers.token_ids[None], numbers.positions.unsqueeze(-2), numbers.rows)

    # --- a step ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def see(self, step: Step) -> None:
        """Compute the features of a step's images, before it or an earlier one runs, and drop those that it names."""
        with nullcontext() if self._adapters is None else self._adapters.choose(None):
            self.images.begin(step)

    @torch.inference_mode()
    def run(self, step: Step, inflight: InflightTokens | None = None) -> torch.Tensor:
        """Compute a step's ranges.

        Args:
            step: At least one range.
            inflight: The tokens of ranges without any, which the step before samples; None: there are none.

        Returns:
            `[logits, vocabulary]`: range by range, those of its first `num_scored` tokens, then that of its last token
            if it samples, behind those of the tokens before it that are or precede a proposal.
        """
        for sequence in step.finished:
            self._adapter_of.pop(sequence, None)
        for new in step.admitted:
            if new.adapter:
                self._adapter_of[new.sequence_id] = new.adapter
        if step.block_copies:
            self.cache.copy_blocks(step.block_copies)
        if step.slot_copies:
            self.cache.copy_slots(step.slot_copies)
        if self.is_packed:
            return self._run_packed(step.ranges, inflight)
        logits = [self._forward(group, inflight) for group in _groups(step.ranges)]
        kept = [(part.slot, part.kept_slot) for part in step.ranges if part.kept_slot >= 0]
        if kept:  # only now: a forward that fails leaves none of its states in the prefix cache
            self.cache.copy_slots(kept)
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _run_packed(self, ranges: Sequence[TokenRange], inflight: InflightTokens | None) -> torch.Tensor:
        """One forward; ranges with images are in another one, or, if their tokens attend to each other, each alone.

        So an image costs the others neither their graph nor their kernel, and no token of theirs is a placeholder.
        """
        seeing = [number for number, part in enumerate(ranges) if part.images]
        if not seeing:
            return self._forward(ranges, inflight)
        groups = [[number for number, part in enumerate(ranges) if not part.images]]
        groups += [[number] for number in seeing] if self.way.joins_images else [seeing]
        logits = [self._forward([ranges[number] for number in group], inflight) for group in groups if group]
        order = [number for group in groups for number in group]
        rows = [[number] * ranges[number].num_rows for number in order]
        at = [number for same in rows for number in same]  # the range of each row
        if at == sorted(at):
            return torch.cat(logits)
        return torch.cat(logits)[to_index(sorted(range(len(at)), key=at.__getitem__), self.device)]

    def _forward(self, ranges: Sequence[TokenRange], inflight: InflightTokens | None) -> torch.Tensor:
        """Logits of the wanted tokens: a graph's replay, or the model's forward."""
        step = StepTensors(ranges, self.block_size, self.device)
        rows = _logit_rows(ranges, step.bounds)
        keys = [self._adapter_of.get(part.sequence_id) for part in ranges] if self._adapter_of else []
        adapters = {key for key in keys if key}
        graphs = self._adapter_graphs if adapters else self._graphs
        if (
            graphs is not None
            and (graph := self._find_graph(graphs, step, len(rows))) is not None
            and (not adapters or self._bring_adapters(step, keys, graph.size.num_tokens))
        ):
            graphs.load(step.numbers(graph.size, rows))
            step.put_inflight(graph.step.token_ids, inflight)
            graph.graph.replay()
            return graphs.outputs[: len(rows)]
        return self._run_eagerly(step, rows or [0], inflight)[: len(rows)]  # kernels of linear layers need a row

    def _bring_adapters(self, step: StepTensors, keys: Sequence[str | None], num_tokens: int) -> bool:
        """Bring a step's adapters to where its graph computes with them; whether there is room."""
        assert self._adapters is not None
        if not self._adapters.bring({key for key in keys if key}):
            return False
        self._adapters.load_tokens(_by_token(keys, step.ranges), num_tokens)
        return True

    def _run_eagerly(self, step: StepTensors, rows: list[int], inflight: InflightTokens | None) -> torch.Tensor:
        token_ids, positions, index = step.inputs(rows)
        step.put_inflight(token_ids, inflight)
        # Rows of one token keep that token's logits; other forwards those that are wanted.
        shape = (1, -1) if self.is_packed or len(step.ranges) == 1 else (-1, 1)
        keeps = shape[0] == 1 and len(rows) < step.num_tokens
        positions = positions.view(*positions.shape[:-1], *shape)
        with self._choose_adapters(step, rows), self._choose_frequencies(step.ranges):
            images = self.images.arguments(step) if any(part.images for part in step.ranges) else {}
            logits = self._run_model(step, token_ids.view(shape), positions, index if keeps else None, **images)
        return logits if keeps or len(rows) == len(logits) else logits[index.to(logits.device)]

    def _run_model(
        self,
        step: StepTensors,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
        **images: Any,
    ) -> torch.Tensor:
        """Logits of the wanted rows, `[rows, vocabulary]`; None: of all tokens."""
        arguments: dict[str, Any] = {self._cache_name: self.cache, "use_cache": True, "attention_mask": None}
        arguments |= images
        if "position_ids" in self._accepts:
            arguments["position_ids"] = positions
        keeps = rows is not None and "logits_to_keep" in self._accepts
        if rows is not None and keeps:
            # A list is an index on whichever device the last layer is; the host waits for it.
            arguments["logits_to_keep"] = rows.tolist() if self._is_split else rows
        self.cache.begin(step)
        with self._device_context, attention_of(self.cache, self._configs), self._torch_attention:
            recorded = self._recorded
            is_plain = recorded is not None and not self._adapter_of and recorded.stands_for(self.model)
            call = recorded if recorded is not None and is_plain else self.model
            output = call(input_ids=token_ids, **arguments)
        self.cache.end()
        logits: torch.Tensor = output.logits.flatten(0, 1)
        return logits if keeps or rows is None else logits[rows.to(logits.device)]

    def _find_graph(self, graphs: StepGraphs, step: StepTensors, num_rows: int) -> StepGraph | None:
        """The graph of a step; None: it runs eagerly."""
        if self.switch_length is not None and any(part.context_length > self.switch_length for part in step.ranges):
            return None
        if not self.is_packed and step.num_decodes < len(step.ranges):
            return None
        if any(part.images for part in step.ranges):
            return None
        num_tables = sum(len(part.block_table) for part in step.ranges)
        return graphs.find(step.num_tokens, len(step.ranges), num_rows, num_tables)

    def _choose_adapters(self, step: StepTensors, rows: list[int]) -> AbstractContextManager[None]:
        if self._adapters is None:
            return nullcontext()
        ranges = step.ranges
        keys = [self._adapter_of.get(part.sequence_id) for part in ranges]
        if not any(keys):
            return self._adapters.choose(None)
        of_token = _by_token(keys, ranges)
        wanted = [of_token[row] for row in rows]
        gathered = [key for key, end in zip(keys, step.ends, strict=True) for _ in range(end)]
        return self._adapters.choose_tokens(of_token, wanted, *([gathered] if self.way.gathers else []))

    def _choose_frequencies(self, ranges: Sequence[TokenRange]) -> AbstractContextManager[None]:
        if self._long_rope is None:
            return nullcontext()
        assert self.switch_length is not None
        is_long = [part.context_length > self.switch_length for part in ranges for _ in range(part.num_tokens)]
        return self._long_rope.by_token(to_device(is_long, torch.bool, self.device) if any(is_long) else None)


def _trial_step(start: int, end: int, num_ranges: int = 1) -> Step:
    """Tokens of a sequence in the first block, as often as ranges are wanted."""
    return Step((TokenRange(0, start, end, list(range(start, end)), [0], end, samples=(0,)),) * num_ranges)


def _trial_range(number: int, start: int, end: int) -> TokenRange:
    """Tokens of a sequence that has the block and the state slot of its number."""
    token_ids = [number + at for at in range(start, end)]
    return TokenRange(number, start, end, token_ids, [number], end, samples=(number,), slot=number)


def _by_token(keys: Sequence[str | None], ranges: Sequence[TokenRange]) -> list[str | None]:
    """The adapter of each token, from that of each range."""
    return [key for key, part in zip(keys, ranges, strict=True) for _ in range(part.num_tokens)]


def _groups(ranges: tuple[TokenRange, ...]) -> Iterator[Sequence[TokenRange]]:
    """The ranges of each forward of a model that does not run as one packed row."""
    num_decodes = next((at for at, part in enumerate(ranges) if not part.is_decode or part.images), len(ranges))
    if num_decodes:
        yield ranges[:num_decodes]
    for part in ranges[num_decodes:]:
        yield (part,)


def _logit_rows(ranges: Sequence[TokenRange], bounds: list[int]) -> list[int]:
    """The tokens of a forward whose logits are wanted, see `ModelRunner.run`."""
    indices: list[int] = []
    for part, start, end in zip(ranges, bounds, bounds[1:], strict=False):
        indices += range(start, start + part.num_scored)
        if part.samples:
            indices += range(end - 1 - part.num_drafted, end)
    return indices
