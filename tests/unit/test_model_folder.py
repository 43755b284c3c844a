# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from hf_triton.folders.folders import parse_config
from hf_triton.folders.model_folder import write_model_folder


@pytest.mark.parametrize(
    ("given", "groups"),
    [({}, []), ({"tensor_parallel_size": "1"}, []), ({"tensor_parallel_size": "2"}, [("KIND_MODEL", 1)])],
)
def test_a_folder_in_ranks_is_placed_as_they_need(
    given: dict[str, str], groups: list[tuple[str, int]], tmp_path: Path
) -> None:
    write_model_folder(tmp_path / "ranks", {"huggingface_model": "acme/one", **given})
    config = parse_config(tmp_path / "ranks")
    assert [(group["kind"], group["count"]) for group in config.get("instance_group", ())] == groups
