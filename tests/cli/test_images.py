# SPDX-License-Identifier: Apache-2.0
"""Folders of models that read images, as the command line sees them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_triton.server import TritonServer
from hf_triton_cli.serving.examples import model_on_demand, ready_text
from hf_triton_gateway.gateway_config import GatewayConfig
from tests.support.commands import in_process
from tests.support.image_checkpoints import build_seeing_checkpoint
from tests.support.images import save_image_checkpoint


@pytest.mark.parametrize(("family", "task"), [("vit", "image-classification"), ("clip", "embeddings")])
def test_a_folder_is_checked_and_shown(
    family: str, task: str, make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = save_image_checkpoint(tmp_path / "checkpoint", family, has_texts=family == "clip")
    folder = make_folder(tmp_path, "mine", huggingface_model=checkpoint)
    done = in_process("check", "--json", folder)
    [checked] = json.loads(done.stdout)
    found = {each["about"]: each["finding"] for each in checked["findings"]}
    assert checked["ok"], found
    assert found["task"] == task
    assert found["image processor"].endswith("ImageProcessorPil")
    assert ("tokenizer" in found) == (family == "clip")

    shown = ready_text(TritonServer(tmp_path), GatewayConfig(), [model_on_demand(folder)])
    assert '"input":"data:image/gif;base64,' in shown or family == "clip"

    refused = in_process("optimize", folder)
    assert "reads images, and optimize is for encoders of texts" in refused.output
    (checkpoint / "preprocessor_config.json").unlink()
    [checked] = json.loads(in_process("check", "--json", folder).stdout)
    assert "has no preprocessor_config.json" in str(checked["findings"])


def test_check_says_whether_a_model_takes_images(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = build_seeing_checkpoint(tmp_path / "checkpoint", "llava")
    folder = make_folder(tmp_path, "mine", huggingface_model=checkpoint)
    blind = make_folder(tmp_path, "blind", huggingface_model=checkpoint, max_images=0)
    checked = json.loads(in_process("check", "--json", folder, blind).stdout)
    found = [{each["about"]: each["finding"] for each in one["findings"]}["images"] for one in checked]
    assert found == ["LlavaProcessor", "served for its text alone: the setting max_images is 0"]
    assert [one["ok"] for one in checked] == [True, True]
