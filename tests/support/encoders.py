# SPDX-License-Identifier: Apache-2.0
"""Tiny encoders of many families with random weights, built from their configs, and inputs for them."""

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
import transformers

from hf_triton.encoder.engine import EncoderEngine
from hf_triton.encoder.forward import EncoderForward
from hf_triton.encoder.jobs import EncoderGroup, EncoderInput
from tests.support.listener import Functions

BASE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "num_labels": 3,
}
WINDOW: dict[str, Any] = {
    "local_attention": 16,
    "num_hidden_layers": 3,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
DISTIL: dict[str, Any] = {
    "vocab_size": 200,
    "dim": 32,
    "hidden_dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
    "num_labels": 3,
    "seq_classif_dropout": 0.0,
}
GPT_OSS: dict[str, Any] = {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA3: dict[str, Any] = {
    "use_bidirectional_attention": True,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}
DECODER: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8, "use_sliding_window": False}

PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", BASE),
    "roberta": ("RobertaConfig", BASE),
    "xlm-roberta": ("XLMRobertaConfig", BASE),
    "distilbert": ("DistilBertConfig", DISTIL),
    "electra": ("ElectraConfig", BASE | {"embedding_size": 16}),
    "albert": ("AlbertConfig", BASE | {"embedding_size": 16}),
    "modernbert": ("ModernBertConfig", BASE | WINDOW),
    "mistral": ("MistralConfig", BASE | {"num_key_value_heads": 2, "sliding_window": 16}),
    "qwen3": ("Qwen3Config", BASE | DECODER),
    "gemma2": ("Gemma2Config", BASE | DECODER | {"sliding_window": 16}),
    "gemma3-bidirectional": ("Gemma3TextConfig", BASE | DECODER | GEMMA3),
    "gpt-oss": ("GptOssConfig", BASE | DECODER | GPT_OSS),
    "qwen3-no-padding": ("Qwen3Config", BASE | DECODER | {"pad_token_id": None}),
}
RELATIVE: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
PADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta-v2": ("DebertaV2Config", BASE | RELATIVE),
    "mpnet": ("MPNetConfig", BASE),
    "esm": ("EsmConfig", BASE | {"token_dropout": True, "mask_token_id": 4, "position_embedding_type": "rotary"}),
}
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "fnet": ("FNetConfig", BASE),
    "convbert": ("ConvBertConfig", BASE | {"embedding_size": 32}),
}
LENGTH_DEPENDENT: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("Qwen3Config", BASE | DECODER | {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "longrope": ("Phi3Config", BASE | DECODER | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
}
"""Their rotary embeddings change with the longest sequence of a batch."""
HEADS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "embeddings": ("AutoModel", ("last_hidden_state",), True),
    "sequence": ("AutoModelForSequenceClassification", ("logits",), False),
    "tokens": ("AutoModelForTokenClassification", ("logits",), True),
    "answers": ("AutoModelForQuestionAnswering", ("start_logits", "end_logits"), True),
    "masks": ("AutoModelForMaskedLM", ("logits",), True),
}
"""By head: the class that loads it, its outputs, and whether they are per token."""


def build_model(family: str, head: str, **overrides: Any) -> Any:
    """A model in eval mode; its weights are large enough that every token matters to the others.

    Args:
        family: Of `PACKED`, `PADDED`, `ALONE` or `LENGTH_DEPENDENT`.
        head: Of `HEADS`.
    """
    name, settings = (PACKED | PADDED | ALONE | LENGTH_DEPENDENT)[family]
    config = getattr(transformers, name)(**settings | ({"num_labels": 2} if head == "answers" else {}) | overrides)
    torch.manual_seed(0)
    model = getattr(transformers, HEADS[head][0]).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def random_inputs(lengths: list[int], seed: int = 0, *, with_types: bool = False) -> list[EncoderInput]:
    rng = random.Random(seed)
    return [
        EncoderInput(
            [0, *rng.choices(range(3, 200), k=length - 2), 2],
            type_ids=[0] * (length // 2) + [1] * (length - length // 2) if with_types else None,
        )
        for length in lengths
    ]


@torch.inference_mode()
def expected_outputs(model: Any, each: EncoderInput, outputs: tuple[str, ...], *, per_token: bool) -> torch.Tensor:
    """What transformers gives for an input alone."""
    arguments = {"token_type_ids": torch.tensor([each.type_ids])} if each.type_ids else {}
    output = model(input_ids=torch.tensor([each.ids]), **arguments)
    stacked = torch.stack([output[name][0] for name in outputs])
    if per_token and each.output_positions is not None:
        stacked = stacked[:, each.output_positions]
    return stacked[0] if len(outputs) == 1 else stacked


class ObservedForward(EncoderForward):
    """A forward that notes its calls, waits at a gate, and does as told before it computes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[list[EncoderInput]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.has_begun = threading.Event()
        self.before: Callable[[list[EncoderInput]], None] = lambda inputs: None

    def __call__(self, inputs: list[EncoderInput]) -> list[torch.Tensor]:
        self.calls.append(inputs)
        self.has_begun.set()
        assert self.gate.wait(60)
        self.before(inputs)
        return super().__call__(inputs)

    def hold(self) -> None:
        """Let no call pass before the gate is set."""
        self.gate.clear()
        self.has_begun.clear()


StartEncoder = Callable[..., EncoderEngine]
"""Starts an engine: `start(forward, max_batch_tokens=...)`."""


class Answer:
    """A group's answer, when it has come."""

    def __init__(self, inputs: list[EncoderInput], deadline_s: float | None = None) -> None:
        self.answers: list[Any] = []
        self.is_cancelled = False
        self._came = threading.Event()
        self.group = EncoderGroup(
            inputs,
            listener=Functions(on_finish=self._take, is_cancelled=lambda: self.is_cancelled),
            deadline_s=deadline_s,
        )

    def _take(self, answer: Any) -> None:
        self.answers.append(answer)
        self._came.set()

    def wait(self) -> Any:
        """The only answer: a list of arrays, or an error."""
        assert self._came.wait(60)
        assert len(self.answers) == 1
        return self.answers[0]
