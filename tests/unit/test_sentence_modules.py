# SPDX-License-Identifier: Apache-2.0
"""The files of sentence-transformers belong to a checkpoint: they are downloaded, and missed if they are not there."""

import json
from pathlib import Path

import pytest

from hf_triton.errors import HubError
from hf_triton.hub.sentence_modules import load_sentence_modules
from hf_triton.hub.snapshot import missing_files
from hf_triton.hub.spec import CheckpointSpec
from hf_triton.testing import LoopbackHub
from tests.support.hub import MODEL, build_hub

PREFIX = "sentence_transformers.models."
MODULES = [
    {"path": "", "type": PREFIX + "Transformer"},
    {"path": "1_Pooling", "type": PREFIX + "Pooling"},
    {"path": "2_Dense", "type": PREFIX + "Dense"},
    {"path": "3_Normalize", "type": PREFIX + "Normalize"},
]
SMALL = ["config.json", "tokenizer.json", "sentence_bert_config.json", "1_Pooling/config.json"]
DENSE = {"in_features": 4, "out_features": 2, "activation_function": "torch.nn.modules.linear.Identity"}


def write_model(folder: Path, dense_weights: str = "model.safetensors") -> Path:
    for name in (*SMALL, "model.safetensors", f"2_Dense/{dense_weights}", "onnx/model.onnx", "onnx/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "2_Dense/config.json").write_text(json.dumps(DENSE))
    return folder


def test_download_brings_the_modules_and_nothing_else(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with LoopbackHub() as hub:
        hub.add(MODEL, model)
        snapshot = build_hub(tmp_path, hub.environment()).resolve_model()
    names = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}
    wanted = {*SMALL, "model.safetensors", "modules.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    assert names == wanted
    modules = load_sentence_modules(snapshot)
    assert modules is not None
    assert modules.pooling == ("mean",)
    assert modules.normalizes


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_pickled_dense_weights_need_the_setting(allow_pickle: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", dense_weights="pytorch_model.bin")
    with LoopbackHub() as hub:
        hub.add(MODEL, model)
        cached = build_hub(tmp_path, hub.environment(), allow_pickle=allow_pickle)
        if allow_pickle:
            assert (cached.resolve_model() / "2_Dense/pytorch_model.bin").exists()
            return
        with pytest.raises(HubError, match=r"pickle weights only \(2_Dense/pytorch_model\.bin\)"):
            cached.resolve_model()


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"])
def test_folder_without_a_module_s_file_is_incomplete(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    spec = CheckpointSpec(str(model))
    assert missing_files(model, spec) == []
    (model / name).unlink()
    assert missing_files(model, spec) == [name]
    assert missing_files(model, CheckpointSpec(str(model), needs_config=False, needs_weights=False)) == []
