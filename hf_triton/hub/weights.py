# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint's tensors are those of the model; transformers would initialize what is missing at random."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import sys
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any, Final

from hf_triton.errors import CheckpointError
from hf_triton.runner.gpu_memory import own_part
from hf_triton.settings import ModelSettings

logger = logging.getLogger(__name__)

STALE_BUFFERS: Final = r"(inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids)$"
"""Buffers that older versions of transformers saved and newer ones compute; not part of a model's weights."""


def check_weights(settings: ModelSettings, info: Any, model: Any, *, is_headless: bool = False) -> None:
    """Refuse a checkpoint whose tensors are not those of the model, by transformers' loading info.

    Tensors of another head of the model's family are passed over: a pooler beside token classification, BERT's next
    sentence prediction beside its masked language model. A model without a head (`is_headless`) needs neither a head's
    tensors, of any kind, nor a pooler.
    """
    missing = [name for name in info["missing_keys"] if not (is_headless and "pooler." in name)]
    extra = [name for name in info["unexpected_keys"] if not re.search(STALE_BUFFERS, name)]
    if settings.allow_extra_weights:
        extra = []
    if extra:
        known = set(_names_of_family(model))
        unused = [name for name in extra if name in known or (is_headless and not _is_within(model, name))]
        extra = sorted(set(extra) - set(unused))
        if unused:
            logger.info(
                "%d tensors of another head of the family are not used (%s)", len(unused), _first(sorted(unused))
            )
    names_by_fault: dict[str, Collection[str]] = {
        "missing": missing,
        "of a wrong shape": [
            f"{name} is {list(shape)} and must be {list(needed)}" for name, shape, needed in info["mismatched_keys"]
        ],
        "not in the model": extra,
        "unreadable": info.get("error_msgs") or (),
    }
    faults = [f"{len(names)} {kind} ({_first(sorted(names))})" for kind, names in names_by_fault.items() if names]
    if faults:
        only_extra = [kind for kind, names in names_by_fault.items() if names] == ["not in the model"]
        hint = ", or set allow_extra_weights to true to ignore them" if only_extra else ""
        if missing:
            hint += "; a model for another task lacks such tensors: set task to what the model does"
        revision = "" if settings.revision == "main" else f" (revision {settings.revision})"
        raise CheckpointError(
            "weights_mismatch",
            f"the tensors of {settings.huggingface_model}{revision} do not match its config: "
            f"{'; '.join(faults)}: use a complete checkpoint of this architecture{hint}",
        )


def check_finite(settings: ModelSettings, model: Any) -> None:
    """Refuse NaN or infinite weights, with which a model answers the same token for ever, or now and then, by name.

    Each is read once, and nothing is copied: the largest and the smallest number of a tensor show it.
    """
    import torch

    for name, tensor in chain(model.named_parameters(), _scales_of_codes(model)):
        plain = own_part(tensor.detach())
        is_read = type(plain) is torch.Tensor and plain.is_floating_point() and plain.itemsize > 1  # not what is packed
        if not is_read or plain.is_meta or not plain.numel():
            continue
        if not all(bool(bound.isfinite()) for bound in plain.aminmax()):
            raise CheckpointError(
                "checkpoint_invalid",
                f"the weights of {settings.huggingface_model} have NaN or infinite numbers in {name}: fetch the "
                "checkpoint again, or choose another revision, or a dtype of more range",
            )


def _scales_of_codes(model: Any) -> Iterator[tuple[str, Any]]:
    """What the codes of layers of few bits are multiplied with, and their minimums."""
    import torch

    for name, layer in model.named_modules():
        if hasattr(layer, "widened"):
            for numbers in (layer.scales, layer.minimums):
                if numbers is not None:
                    yield f"{name}.weight", numbers.view(torch.float16)


def _first(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _is_within(model: Any, name: str) -> bool:
    """Whether a tensor belongs to a part that the model has, as that of a layer more than its config says does."""
    own = name.removeprefix(f"{model.base_model_prefix}.")
    return hasattr(model, own.partition(".")[0])


def _names_of_family(model: Any) -> Iterator[str]:
    """The names of the tensors of every class that transformers has for a model's config, with its sizes.

    A model without a head is part of those that have one, so its tensors have two names: with the prefix and without.
    """
    import torch
    from transformers import PreTrainedModel

    for kind in vars(sys.modules[type(model).__module__]).values():
        if not inspect.isclass(kind) or not issubclass(kind, PreTrainedModel):
            continue
        if kind.config_class is not type(model.config):
            continue
        try:
            with torch.device("meta"):
                own: Any = kind(copy.deepcopy(model.config))  # some heads change it
        except Exception:  # a head that cannot be built by this config, whose code is not ours
            continue
        for name in own.state_dict():
            yield name
            yield f"{kind.base_model_prefix}.{name}"
