# SPDX-License-Identifier: Apache-2.0
"""The tables that are read from transformers' source are those that importing it gives."""

from transformers.models.auto import modeling_auto

from hf_triton.hub.model_tables import model_tables


def test_tables_are_transformers_own() -> None:
    names = [name for name in vars(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")]
    own = {
        name.removesuffix("_MAPPING_NAMES").removeprefix("MODEL_FOR_"): {
            model_type: (names,) if isinstance(names, str) else tuple(names)
            for model_type, names in getattr(modeling_auto, name).items()
        }
        for name in names
    }
    own["BASE"] = own.pop("MODEL")
    assert model_tables() == own
