# SPDX-License-Identifier: Apache-2.0
"""Deep narrow models in half precision, other arithmetics that are right, and planted faults, for the probe at load.

Weights weigh as much as in a model of width 4096, so rounding grows with depth as it does there.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from torch.nn import functional

from hf_triton.runner import step_attention
from hf_triton.runner.mask_rules import CAUSAL, Rule, Window
from hf_triton.runner.model_runner import ModelRunner
from hf_triton.runner.step import Step

WINDOW = 6
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 32,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 64}),
}


def build_deep(kind: str, num_layers: int, seed: int, *, width: int = 128, **changes: Any) -> Any:
    """A random model whose layers weigh as much as those of a large one."""
    name, own = KINDS[kind]
    config = {
        "vocab_size": 1024,
        "hidden_size": width,
        "intermediate_size": width * 7 // 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 64,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.02 * (4096 / width) ** 0.5,
    }
    torch.manual_seed(seed)
    config_class: Any = getattr(transformers, name)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config_class(**config | own | changes), dtype=torch.bfloat16
    )
    model.generation_config.eos_token_id = None
    return model.eval()


@contextmanager
def other_sums() -> Iterator[None]:
    """Linear layers add up two halves in 32 bits and round once, as split products of a GPU do."""

    def forward(layer: nn.Linear, states: torch.Tensor) -> torch.Tensor:
        half = states.shape[-1] // 2
        weight = layer.weight
        result = states[..., :half].float() @ weight[:, :half].float().T
        result = result + states[..., half:].float() @ weight[:, half:].float().T
        return (result if layer.bias is None else result + layer.bias.float()).to(states.dtype)

    with patch.object(nn.Linear, "forward", forward):
        yield


@contextmanager
def fused(model: Any) -> Iterator[None]:
    """Norms, gates and rotary embeddings round once, where the model's own round two or three times."""
    modeling = sys.modules[type(model).__module__]
    rotate = modeling.apply_rotary_pos_emb

    def rotary(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any) -> Any:
        rotated = rotate(query.float(), key.float(), cos.float(), sin.float(), *args)
        return tuple(each.to(query.dtype) for each in rotated)

    def norm_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        offset = 1.0 if "Gemma" in type(module).__name__ else 0.0
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
        return lambda states: functional.rms_norm(
            states.float(), module.weight.shape, offset + module.weight.float(), eps
        ).to(states.dtype)

    def gate_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda states: module.down_proj(
            (module.act_fn(module.gate_proj(states).float()) * module.up_proj(states).float()).to(states.dtype)
        )

    with ExitStack() as stack:
        stack.enter_context(patch.object(modeling, "apply_rotary_pos_emb", rotary))
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                stack.enter_context(patch.object(module, "forward", norm_of(module), create=True))
            elif hasattr(module, "gate_proj"):
                stack.enter_context(patch.object(module, "forward", gate_of(module), create=True))
        yield


@contextmanager
def in_steps(*arithmetics: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Steps compute by other arithmetics, `generate` by the model's own."""
    run = ModelRunner.run

    def run_otherwise(runner: ModelRunner, step: Step, *others: Any) -> torch.Tensor:
        with ExitStack() as stack:
            for arithmetic in arithmetics:
                stack.enter_context(arithmetic())
            return run(runner, step, *others)

    with patch.object(ModelRunner, "run", run_otherwise):
        yield


ATTENTION_FAULTS = ("scale", "scale by a tenth", "no first token", "not itself", "exchanged heads")
WINDOW_FAULTS = ("no window", "window and one")
STEP_FAULTS = (
    "decoding rotates one further",
    "chunks rotate one further",
    "chunks rotate from zero",
    "another sequence's block",
    "a block that is not written",
    "decoded keys are lost",
)


def faults_of(kind: str) -> tuple[str, ...]:
    """The faults of attention that change what such a model computes."""
    windows = WINDOW_FAULTS if "sliding_window" in KINDS[kind][1] else ()
    return (*ATTENTION_FAULTS, *windows, *(("no softcap",) if kind == "gemma2" else ()))


@contextmanager
def attention_fault(name: str, layers: range) -> Iterator[None]:
    """Steps compute attention wrongly in some layers."""
    right = step_attention.attend

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        if module.layer_idx not in layers:
            return right(module, query, key, value, mask, **options)
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        rule = getattr(mask, "rule", CAUSAL)
        sees = rule.function
        if name == "scale":
            options["scaling"] = 1.0
        elif name == "scale by a tenth":
            options["scaling"] = 1.1 * scale
        elif name == "no softcap":
            options["softcap"] = None
        elif name == "exchanged heads":
            groups = query.unflatten(1, (key.shape[1], -1)).transpose(1, 2)
            query = groups.reshape(query.shape)
        elif name == "no window":
            mask = _mask(CAUSAL)
        elif name == "no first token":
            mask = _mask(Rule(lambda b, h, q, k: sees(b, h, q, k) & ((k > 0) | (q == 0)), None))
        elif name == "not itself":
            mask = _mask(Rule(lambda b, h, q, k: sees(b, h, q, k) & ((k < q) | (q == 0)), None))
        elif name == "window and one" and rule.window and rule.window.size:
            size = rule.window.size + 1
            mask = _mask(Rule(lambda b, h, q, k: (k <= q) & (q - k < size), Window(size, is_causal=True)))
        return right(module, query, key, value, mask, **options)

    with patch.object(step_attention, "attend", attend):
        yield


def _mask(rule: Rule) -> Any:
    mask: Any = torch.ones(1)
    mask.rule = rule
    return mask


@contextmanager
def step_fault(name: str) -> Iterator[None]:
    """Steps have wrong positions or blocks."""
    run, run_model = ModelRunner.run, ModelRunner._run_model

    def run_wrongly(runner: ModelRunner, step: Step, *others: Any) -> torch.Tensor:
        ranges = list(step.ranges)
        for at, part in enumerate(ranges):
            table = list(part.block_table)
            if part.start and name == "another sequence's block":
                table[0] = next(each.block_table[0] for each in ranges if each is not part) if len(ranges) > 1 else 0
            if part.start and name == "a block that is not written":
                table[0] = max(
                    set(range(runner.cache.num_blocks)) - {each for one in ranges for each in one.block_table}
                )
            ranges[at] = part._replace(block_table=table)
        output = run(runner, Step(tuple(ranges)), *others)
        for part in ranges:
            if part.is_decode and name == "decoded keys are lost":
                block, place = part.block_table[(part.end - 1) // runner.block_size], (part.end - 1) % runner.block_size
                for layer in runner.cache.paged_layers():
                    layer.blocks.keys[block, :, place] = 0  # type: ignore[union-attr]
        return output

    def run_model_wrongly(runner: ModelRunner, step: Any, token_ids: Any, positions: Any, rows: Any) -> torch.Tensor:
        moved = positions.clone().view(-1)
        for part, start, end in zip(step.ranges, step.bounds, step.bounds[1:], strict=False):
            is_chunk = part.start > 0 and not part.is_decode
            if name == ("chunks rotate one further" if is_chunk else "decoding rotates one further") and part.start:
                moved[start:end] += 1
            elif is_chunk and name == "chunks rotate from zero":
                moved[start:end] -= part.start
        return run_model(runner, step, token_ids, moved.view(positions.shape), rows)

    with patch.object(ModelRunner, "run", run_wrongly), patch.object(ModelRunner, "_run_model", run_model_wrongly):
        yield
