# SPDX-License-Identifier: Apache-2.0
"""`hf-triton optimize`: what it measures, writes and refuses, and what its folders refuse."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file

from hf_triton.errors import CheckpointError, LoadError, SettingsError
from hf_triton.folders.candidates import TEXTS as MIXED
from hf_triton.folders.candidates import Candidate, Child
from hf_triton.folders.comparison import Row, agreement, judge
from hf_triton.folders.graph_folder import GraphWriter
from hf_triton.folders.optimizable import written_candidates
from hf_triton.hub.checkpoint import Placement, load_checkpoint
from hf_triton.hub.locate import Hub
from hf_triton.runner.graph_model import PACKAGES, GraphError, OnnxSession, gpu_providers
from hf_triton.settings import ModelSettings
from hf_triton.testing import TritonServer, build_tiny_checkpoint
from hf_triton_cli.optimize import choose, conclusion
from tests.support.client import post
from tests.support.commands import hf_triton as run_command
from tests.support.commands import in_process
from tests.support.graphs import write_graph_folder
from tests.support.sentence_checkpoints import TEXTS, real_checkpoint, reference_embeddings, save_sentence_model

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_folder: Callable[..., Path]) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    checkpoint = save_sentence_model(place / "model", dense=[16], prompts={"query": "query: "})
    config = "max_batch_size: 4\ninstance_group [{ kind: KIND_AUTO }]"
    return make_folder(place, "mine", config=config, huggingface_model=checkpoint, dtype="float32", truncate=True)


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    return write_graph_folder(folder, folder.with_name("mine_optimized"))


def run(*arguments: object) -> Result:
    return in_process(*arguments)


def load(folder: Path, **settings: Any) -> Any:
    chosen = ModelSettings(huggingface_model="./1/onnx", **{"runtime": "onnx"} | settings)
    return load_checkpoint(Hub(folder, chosen, {}), chosen, Placement("CPU", 0), "AutoModel")


# --- what it writes --------------------------------------------------------------------------------------------------


def test_a_written_folder_has_all_that_serving_needs(written: Path) -> None:
    names = sorted(str(path.relative_to(written)) for path in written.rglob("*") if path.is_file())
    here = ["1/model.py", "1/onnx/graph.json", "1/onnx/model.onnx", "1/onnx/model.onnx.data", "config.pbtxt"]
    assert set(here) <= set(names)
    assert {"1/onnx/2_Dense/model.safetensors", "1/onnx/modules.json", "1/onnx/tokenizer.json"} < set(names)
    assert "1/onnx/model.safetensors" not in names
    config = (written / "config.pbtxt").read_text()
    assert "max_batch_size: 4" in config
    assert "kind: KIND_CPU" in config
    assert "dtype" not in config
    assert 'key: "truncate"' in config
    result = run("check", written)
    assert result.exit_code == 0, result.output
    task, _, settings = Candidate(written).load()
    assert (task.declaration.name, settings.runtime, settings.precision) == ("embeddings", "onnx", "float32")


@pytest.mark.serial
def test_minilm_is_optimized_and_served_without_hub(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    repository = tmp_path / "repository"
    checkpoint = shutil.copytree(real_checkpoint(), tmp_path / "checkpoint")
    mine = make_folder(tmp_path, "minilm", huggingface_model=checkpoint, pack_weights=False)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    options = ["--seq-len", "16", "--batch", "1", "--rounds=3", "--int8", f"--texts={tmp_path / 'texts.txt'}"]
    done = run_command(
        *("optimize", str(mine), *options, f"--into={repository / 'minilm'}", f"--out={tmp_path / 'out'}", "--json"),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    if "too much to decide by" in done.stderr:
        pytest.skip("this machine is too busy to measure on")
    report = json.loads(done.stdout)
    assert json.loads((tmp_path / "out" / "optimize.json").read_text()) == report
    rows = {row["candidate"]: row for row in report["candidates"]}
    assert list(rows)[:4] == ["pytorch", "pytorch, padded", "onnxruntime", "onnxruntime, int8"]
    assert rows["onnxruntime"]["largest difference"] < 1e-5
    assert 0.9 < rows["onnxruntime, int8"]["lowest cosine"] < 0.99999
    assert report["written"] == str(repository / "minilm")
    shutil.rmtree(mine)
    expected = reference_embeddings(checkpoint, TEXTS)
    shutil.rmtree(checkpoint)
    if 'string_value: "int8"' in (repository / "minilm" / "config.pbtxt").read_text():
        pytest.skip("int8 was exact enough and the fastest")
    with TritonServer(repository, environment={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}) as server:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}
        reply = post(server, "/v2/models/minilm/infer", {"inputs": [tensor]})
        assert reply.status == 200, reply.body
        [output] = reply.json()["outputs"]
        vectors = np.array(output["data"]).reshape(output["shape"])
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


# --- what its folders refuse -----------------------------------------------------------------------------------------


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "copy")


def change_facts(folder: Path, **facts: object) -> None:
    file = folder / "1" / "onnx" / "graph.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


@pytest.mark.parametrize(
    ("fact", "value", "sentence"),
    [
        ("processor", "Z80 (none)", "was optimized for Z80 (none), and this is "),
        ("version", "0.1", "was optimized for onnxruntime 0.1, and this is onnxruntime "),
    ],
)
def test_another_machine_is_refused(copy: Path, fact: str, value: str, sentence: str) -> None:
    change_facts(copy, **{fact: value})
    with pytest.raises(CheckpointError) as error:
        load(copy)
    assert error.value.code == "optimized_elsewhere"
    assert sentence in error.value.sentence
    assert error.value.sentence.endswith("run `hf-triton optimize` on this machine")
    result = run("check", copy)
    assert result.exit_code == 5
    assert sentence in result.output


def test_broken_folders_are_refused(copy: Path) -> None:
    (copy / "1" / "onnx" / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(CheckpointError, match=r"checkpoint_invalid: .*model\.onnx cannot be loaded"):
        load(copy)
    change_facts(copy, colour="red")
    with pytest.raises(CheckpointError, match=r"checkpoint_invalid: .*is not what was written"):
        load(copy)
    with pytest.raises(CheckpointError, match=r"checkpoint_incomplete: .* has no model_int8\.onnx"):
        load(copy, precision="int8")


def test_a_missing_runtime_is_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "onnx", "no-such-package")
    with pytest.raises(SettingsError, match="runtime onnx needs no-such-package, which is not installed: `pip install"):
        load(copy)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"load_format": "dummy"}])
def test_settings_of_pytorch_are_refused_beside_a_graph(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="runtime onnx computes a graph, whose numbers are fixed"):
        ModelSettings.model_validate({"huggingface_model": "x/y", "runtime": "onnx", **settings})


def test_a_graph_generates_no_text(copy: Path) -> None:
    chosen = ModelSettings(huggingface_model="./1/onnx", runtime="onnx")
    with pytest.raises(SettingsError, match="runtime onnx is for tasks of encoders"):
        load_checkpoint(Hub(copy, chosen, {}), chosen, Placement("CPU", 0))


# --- on a GPU --------------------------------------------------------------------------------------------------------

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"


@pytest.mark.parametrize(
    ("on_gpu", "providers", "names"),
    [
        (False, [CUDA, TENSORRT], ["onnxruntime", "onnxruntime, int8"]),
        (True, ["CPUExecutionProvider"], ["pytorch, float16"]),
        (True, [CUDA], ["pytorch, float16", "onnxruntime, cuda"]),
        (True, [TENSORRT, CUDA], ["pytorch, float16", "onnxruntime, cuda", "onnxruntime, tensorrt"]),
    ],
)
def test_candidates_are_what_the_machine_has(on_gpu: bool, providers: list[str], names: list[str]) -> None:
    found = written_candidates(Path(), providers, on_gpu=on_gpu, int8=not on_gpu)
    assert [name for name in found if name != "openvino"] == names


def test_providers_take_their_gpu() -> None:
    file = Path("/model/model.onnx")
    cuda, cpu = (CUDA, {"device_id": 1}), ("CPUExecutionProvider", {})
    assert gpu_providers("onnx-cuda", file, 1) == (cuda, cpu)
    first, *others = gpu_providers("onnx-tensorrt", file, 1)
    cache = {"trt_engine_cache_enable": True, "trt_engine_cache_path": "/model/tensorrt"}
    assert first == (TENSORRT, {"device_id": 1, **cache})
    assert others == [cuda, cpu]


@pytest.fixture(scope="module")
def for_cuda(folder: Path) -> Path:
    """What would be written on this machine if it had a GPU."""
    target = folder.with_name("mine_cuda")
    with closing(Child(Path(os.devnull), GraphWriter, folder)) as writer:
        assert writer.call("write", target, "onnx-cuda") == "transformers.exporters, fused"
    return target


def test_a_folder_for_a_gpu_is_refused_without_one(for_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "KIND_CPU" not in (for_cuda / "config.pbtxt").read_text()
    lacks_provider = "needs the CUDAExecutionProvider of onnxruntime-gpu, which is not installed: `pip install onnxrunt"
    for providers, sentence in (([], lacks_provider), ([CUDA], "this is a machine without a GPU: run `hf-triton")):
        monkeypatch.setattr("onnxruntime.get_available_providers", lambda providers=providers: providers)
        change_facts(for_cuda, processor="NVIDIA H100", version=version("onnxruntime"))
        result = run("check", for_cuda)
        assert result.exit_code == 5
        assert sentence in result.output
        with pytest.raises(LoadError) as error:
            load(for_cuda, runtime="onnx-cuda")
        assert sentence in str(error.value)


def test_a_folder_for_a_gpu_is_refused_on_the_cpu(for_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [CUDA])
    change_facts(for_cuda, processor="a machine without a GPU", version=version("onnxruntime"))
    with pytest.raises(SettingsError, match="onnx-cuda computes on a GPU, and Triton places this model on the CPU"):
        load(for_cuda, runtime="onnx-cuda")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_provider_that_cannot_be_loaded_is_no_fallback_to_the_cpu(for_cuda: Path) -> None:
    file = for_cuda / "1" / "onnx" / "model.onnx"
    with pytest.raises(GraphError, match="ONNX Runtime cannot load its CUDAExecutionProvider"):
        OnnxSession(file, 1, gpu_providers("onnx-cuda", file, 0))


def test_a_folder_in_float16(folder: Path) -> None:
    target = folder.with_name("mine_float16")
    with closing(Child(Path(os.devnull), GraphWriter, folder)) as writer:
        assert writer.call("save", target) == "save_pretrained"
    tensors = load_file(target / "1" / "float16" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    _, checkpoint, settings = Candidate(target).load()
    assert (settings.runtime, settings.dtype, checkpoint.model.dtype) == ("torch", "float16", torch.float16)
    result = run("check", target)
    assert result.exit_code == 0, result.output


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_wrong_usage_is_refused_before_anything_is_loaded(folder: Path, written: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one line\n")
    refusals = {
        ("--tolerance", "0"): "0.0 is not in the range x>0",
        ("--seq-len", "16", "x"): "unexpected extra argument",
        ("--seq-len", "16,x"): "must be integers >= 1, as in 1,4,16, got '16,x'",
        ("--int8",): "--int8 is judged by your own texts: give --texts FILE",
        ("--texts", str(tmp_path / "file")): "must have two or more lines of UTF-8",
        ("--into", str(written)): "exists: choose another folder with --into",
        ("--into", str(tmp_path / "file" / "in")): "cannot be written to",
    }
    for options, sentence in refusals.items():
        result = run("optimize", folder, "--into", tmp_path / "new", *options)
        assert result.exit_code == 2, options
        assert sentence in " ".join(result.output.split()), options
    assert "is an optimized folder" in run("optimize", written).output


def test_a_folder_that_generates_is_refused(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    mine = make_folder(tmp_path, "mine", huggingface_model=build_tiny_checkpoint(tmp_path / "model", "llama"))
    result = run("optimize", mine)
    assert result.exit_code == 2
    assert "mine generates text, and optimize is for encoders" in result.output


def test_missing_packages_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hf_triton.folders.optimizable"], "PACKAGES", ("onnx", "no_such_package"))
    result = run("optimize", folder, "--into", tmp_path / "new")
    assert "client_missing: optimize needs no_such_package: `pip install 'hf-triton[optimize]'`" in result.output


# --- what it keeps ---------------------------------------------------------------------------------------------------


def vectors(*rows: list[float]) -> list[Any]:
    return [np.array(row, np.float32) for row in rows]


def test_what_misses_the_tolerance_is_refused() -> None:
    reference, near, far = vectors([1, 0], [0, 1]), vectors([1, 1e-4], [0, 1]), vectors([1, 0.01], [0, 1])
    for outputs, tolerance, is_refused in ((near, 1e-3, False), (far, 1e-3, True), (far, 0.1, False)):
        row = Row("onnxruntime", Candidate(Path()))
        judge(row, reference, outputs, tolerance, "vectors")
        assert (row.refusal is not None) is is_refused


def test_int8_is_judged_by_cosine_and_agreement() -> None:
    reference, turned = vectors([1, 0], [1, 0.1], [0, 1]), vectors([1, 0], [1, 0.12], [0.1, 1])
    for outputs, is_refused in ((turned, False), (vectors([1, 0], [1, 0.1], [1, 1]), True)):
        row = Row("onnxruntime, int8", Candidate(Path()))
        judge(row, reference, outputs, 1e-3, "vectors")
        assert (row.refusal is not None) is is_refused
    assert agreement(reference, turned, "vectors") == 1
    assert agreement(vectors([1, 2], [2, 1]), vectors([1, 2], [1, 2]), "logits") == 0.5
    assert agreement(vectors([1], [2], [3]), vectors([1], [3], [2]), "logits") == pytest.approx(2 / 3)


def timed(name: str, folder: str, *rounds_ms: list[float]) -> Row:
    return Row(name, Candidate(Path(folder)), rounds={(1, 16): [[each / 1000 for each in ms] for ms in rounds_ms]})


QUIET = timed("pytorch", "a", [2.0, 2.1, 2.2], [2.0, 2.1, 2.0])


@pytest.mark.parametrize(
    ("base", "other", "sentence"),
    [
        (QUIET, timed("onnxruntime", "b", [1.0, 1.1, 1.0], [1.0, 1.2, 1.0]), "Wrote"),
        (QUIET, timed("onnxruntime", "b", [1.9, 1.95, 2.0], [1.9, 1.9, 2.0]), "and it takes 1.1."),
        (
            timed("pytorch", "a", [178, 227, 190], [0.2, 178, 227]),
            timed("onnxruntime", "b", [0.18, 0.12, 190], [0.18, 0.2, 0.12]),
            "the times of pytorch for 1 x 16 tokens scatter from 0.20 to 227.00 ms, too much to decide by",
        ),
        # Medians tell a gain that the shortest runs deny.
        (timed("pytorch", "a", [2, 4, 4]), timed("onnxruntime", "b", [2, 2, 2]), "is 1.00 times as fast, and it takes"),
    ],
)
def test_a_folder_is_written_for_a_gain_and_not_for_noise(base: Row, other: Row, sentence: str) -> None:
    for row in (base, other):
        row.rounds[MIXED] = row.rounds[1, 16]
    best = choose([base, other])
    assert (best is not None) is (sentence == "Wrote")
    assert sentence in conclusion([base, other], best, Path("there"))
