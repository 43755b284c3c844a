# SPDX-License-Identifier: Apache-2.0
"""`hf-triton check` and `hf-triton export vllm`: what is said of folders, those that can be served and others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import Result
from safetensors.torch import load_file, save_file

from hf_triton.errors import CheckpointError
from hf_triton.folders.folders import folder_defect
from hf_triton.folders.own_code import own_class
from hf_triton.folders.tensor_check import check_tensors
from hf_triton.hub.pretrained import load_config, load_model
from hf_triton.runner.cpu import grouped_layers
from hf_triton.settings import ModelSettings
from hf_triton.testing import ARCHITECTURES, build_tiny_checkpoint
from hf_triton_cli.commands import main
from tests.support.adapters import save_adapter
from tests.support.architectures import BATCH, CONTINUOUS, WHOLE, load, some_in_make_test
from tests.support.commands import hf_triton, in_process
from tests.support.encoders import ALONE, HEADS, PACKED, PADDED, build_model
from tests.support.gguf import write_gguf
from tests.support.paths import ROOT
from tests.support.sentence_checkpoints import real_checkpoint

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("base"), "llama", chat_template=TEMPLATE)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path, make_folder: Callable[..., Path]) -> Path:
    """A folder that can be served."""
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    return make_folder(tmp_path, "mine", huggingface_model=copy)


def run(*arguments: object) -> Result:
    return in_process(*arguments)


def findings(folder: Path) -> dict[str, tuple[str, str]]:
    """By what they are about: state and sentence."""
    [found] = json.loads(run("check", "--json", folder).stdout)
    assert found["ok"] is (not any(each["state"] == "error" for each in found["findings"]))
    return {each["about"]: (each["state"], each["finding"]) for each in found["findings"]}


def test_a_folder_that_can_be_served(folder: Path) -> None:
    found = findings(folder)
    assert {state for state, _ in found.values()} == {"ok"}
    parts = ["config.pbtxt", "settings", "task", "checkpoint", "model", "engine", "weights", "memory"]
    assert list(found) == [*parts, "tokenizer", "chat template"]
    assert found["task"][1] == "text-generation"
    assert found["model"][1] == "LlamaForCausalLM, by AutoModelForCausalLM"
    assert "free on " in found["memory"][1]
    result = run("check", folder)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "folder\tabout\tstate\tfinding"


def test_a_folder_of_a_text_to_text_task_is_called_by_it(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    model = build_tiny_checkpoint(tmp_path / "t5", "t5")
    found = findings(make_folder(tmp_path, "mine", huggingface_model=model, task="summarization"))
    assert found["task"] == ("ok", "summarization")
    assert "chat template" not in found


def test_ensemble_needs_its_models_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ensemble = shutil.copytree(ROOT / "examples" / "bge_apart", tmp_path / "bge_apart")
    shutil.copytree(ROOT / "examples" / "bge_tokenizer", tmp_path / "bge_tokenizer")
    assert findings(ensemble) == {"ensemble": ("warning", "there is no folder bge beside it")}
    shutil.copytree(ROOT / "bge", tmp_path / "bge")
    assert findings(ensemble) == {"ensemble": ("ok", "joins bge_tokenizer, bge")}
    assert findings(tmp_path / "bge_tokenizer")["task"] == ("ok", "tokenization")


def test_ready_folders_and_a_repository(tmp_path: Path, folder: Path) -> None:
    repository = tmp_path / "repository"
    for name in ("falcon7b", "bge"):
        shutil.copytree(ROOT / name, repository / name)
    shutil.copytree(ROOT / "stream_door", repository / "falcon7b_stream")
    result = run("check", "--json", repository, folder)
    assert result.exit_code == 0
    found = {Path(each["folder"]).name: each for each in json.loads(result.stdout)}
    assert list(found) == ["bge", "falcon7b", "falcon7b_stream", "mine"]
    assert found["bge"]["findings"][2]["finding"] == "embeddings"
    task = found["falcon7b"]["findings"][2]
    assert (task["about"], task["state"]) == ("task", "warning")
    assert task["finding"] == "text-generation, unless the checkpoint says otherwise, which is not on disk"
    last = {name: each["findings"][-1] for name, each in found.items()}
    assert last["falcon7b"]["state"] == "warning"
    assert "tiiuae/falcon-7b is in no cache, and is downloaded at load" in last["falcon7b"]["finding"]
    assert last["falcon7b_stream"]["finding"] == "streams what falcon7b generates"


def edit(folder: Path, old: str, new: str) -> None:
    file = folder / "config.pbtxt"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def checkpoint_of(folder: Path) -> Path:
    return folder.parent / "checkpoint"


def add(folder: Path, key: str, value: str) -> None:
    escaped = value.replace('"', '\\"')
    with (folder / "config.pbtxt").open("a") as file:
        file.write(f'parameters {{ key: "{key}" value {{ string_value: "{escaped}" }} }}\n')


def edit_json(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def keep_only(folder: Path, name: str) -> None:
    for path in checkpoint_of(folder).iterdir():
        path.unlink()
    (checkpoint_of(folder) / name).write_text("{}")


def of_another_task(folder: Path) -> None:
    edit_json(checkpoint_of(folder) / "config.json", architectures=["LlamaForTokenClassification"])
    add(folder, "task", "text-generation")


def of_labels(task: str) -> Callable[[Path], None]:
    """A classifier of two labels with a task that they do not fit."""

    def change(folder: Path) -> None:
        edit_json(checkpoint_of(folder) / "config.json", architectures=["LlamaForSequenceClassification"])
        add(folder, "task", task)

    return change


def own_code(folder: Path, lines: str) -> None:
    code = f"import hf_triton\n\n\nclass TritonPythonModel(hf_triton.TritonPythonModel):\n{lines}\n"
    (folder / "1" / "model.py").write_text(code)


def quantized_by(folder: Path, method: str) -> None:
    values = {"quant_method": method, "bits": 4, "group_size": 32}
    edit_json(checkpoint_of(folder) / "config.json", quantization_config=values)


def lacks_a_shard(folder: Path) -> None:
    weights = checkpoint_of(folder) / "model.safetensors"
    weights.rename(weights.with_name("model-00001-of-00002.safetensors"))
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    weights.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def become_gguf(folder: Path, **written: Any) -> None:
    keep_only(folder, "README.md")
    write_gguf(folder / "Tiny-Q8_0.gguf", **written).rename(checkpoint_of(folder) / "Tiny-Q8_0.gguf")


def become_checkpoint(folder: Path) -> None:
    (folder / "config.pbtxt").unlink()
    (folder / "config.json").write_text("{}")
    (folder / "1").rename(folder / "1_Pooling")
    (folder / "1_Pooling" / "model.py").unlink()


WRONG: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a checkpoint": (become_checkpoint, "folder", "it is a checkpoint: `hf-triton new NAME --model /"),
    "no model.py": (lambda it: (it / "1" / "model.py").unlink(), "folder", "it has no 1/model.py"),
    "broken config": (lambda it: edit(it, "}", ""), "config.pbtxt", "cannot be parsed"),
    "another backend": (lambda it: edit(it, "python", "onnx"), "config.pbtxt", 'backend: "python", got'),
    "another name": (
        lambda it: (it / "config.pbtxt").write_text('name: "other"\nbackend: "python"\n'),
        "config.pbtxt",
        "names the model other",
    ),
    "a version that Triton passes over": (
        lambda it: (it / "1").rename(it / "01"),
        "folder",
        "it has no version folder",
    ),
    "a negative batch size": (
        lambda it: edit(it, 'backend: "python"', 'backend: "python" max_batch_size: -3'),
        "config.pbtxt",
        "max_batch_size must be >= 0, got -3",
    ),
    "more context than the model has": (
        lambda it: add(it, "max_context_length", "9999"),
        "settings",
        "max_context_length must be <= 256",
    ),
    "attention of a missing package": (
        lambda it: add(it, "attn_implementation", "flash_attention_2"),
        "model",
        "install it, or leave out the setting",
    ),
    "no name on the Hub": (
        lambda it: edit(it, str(checkpoint_of(it)), "no name"),
        "checkpoint",
        "'no name' is not a valid name on the Hub",
    ),
    "a hook that cannot be called": (
        lambda it: own_code(it, "    build_prompt = 5"),
        "1/model.py",
        "build_prompt of the folder's own 1/model.py is not a method",
    ),
    "misspelt setting": (lambda it: add(it, "dtipe", "float32"), "settings", "did you mean 'dtype'"),
    "own code fails": (
        lambda it: (it / "1" / "model.py").write_text("import hf_triton\n1 / 0\n"),
        "1/model.py",
        "cannot be imported (ZeroDivisionError",
    ),
    "own class is missing": (
        lambda it: (it / "1" / "model.py").write_text("import hf_triton\n"),
        "1/model.py",
        "has no class TritonPythonModel",
    ),
    "unknown input": (
        lambda it: edit(it, 'backend: "python"', 'backend: "python"\ninput { name: "promt" data_type: TYPE_STRING }'),
        "ports",
        "declares the input 'promt'",
    ),
    "no weights": (
        lambda it: (checkpoint_of(it) / "model.safetensors").unlink(),
        "checkpoint",
        "has no model.safetensors",
    ),
    "architectures that are no names": (
        lambda it: edit_json(checkpoint_of(it) / "config.json", architectures=[5], model_type="mpnet"),
        "model",
        "5 is not one of the models",
    ),
    "weights in a folder": (
        lambda it: (
            (checkpoint_of(it) / "model.safetensors").unlink(),
            (checkpoint_of(it) / "model.safetensors").mkdir(),
        ),
        "memory",
        "model.safetensors is no safetensors file",
    ),
    "a missing shard": (lacks_a_shard, "checkpoint", "has no model-00002-of-00002.safetensors"),
    "GPTQ without its packages": (
        lambda it: quantized_by(it, "gptq"),
        "quantisation",
        "without the packages gptqmodel and optimum",
    ),
    "a wrong quantisation": (
        lambda it: add(it, "quantization_config", '{"quant_method": "newest"}'),
        "quantisation",
        "correct the setting quantization_config",
    ),
    "half a file of weights": (
        lambda it: (checkpoint_of(it) / "model.safetensors").write_bytes(b"\xff\x01\0\0\0\0\0\0{"),
        "memory",
        "model.safetensors is no safetensors file, or half of one",
    ),
    "own code ends the process": (
        lambda it: (it / "1" / "model.py").write_text("import sys\nsys.exit(3)\n"),
        "1/model.py",
        "cannot be imported (SystemExit: 3)",
    ),
    "an adapter alone": (lambda it: keep_only(it, "adapter_config.json"), "checkpoint", "is an adapter"),
    "a file that is GGUF by its name alone": (lambda it: keep_only(it, "model.gguf"), "model", "model.gguf of "),
    "an unknown quantisation": (
        lambda it: (keep_only(it, "a-Q8_0.gguf"), add(it, "gguf_file", "Q9")),
        "checkpoint",
        "no GGUF file has the name or quantisation 'Q9': set gguf_file to one of a-Q8_0.gguf",
    ),
    "damaged config.json": (lambda it: (checkpoint_of(it) / "config.json").write_text("{"), "model", "config.json of "),
    "unknown architecture": (
        lambda it: edit_json(
            checkpoint_of(it) / "config.json", model_type="newest", architectures=["NewestForCausalLM"]
        ),
        "model",
        "newest",
    ),
    "another task": (of_another_task, "model", "LlamaForTokenClassification"),
    "labels to rerank by": (of_labels("rerank"), "model", "has 2 labels, and rerank needs a model with one score"),
    "no modules.json": (lambda it: add(it, "task", "embeddings"), "model", "set pooling to what its model card says"),
    "damaged tokenizer": (
        lambda it: (checkpoint_of(it) / "tokenizer.json").write_text("{"),
        "tokenizer",
        "cannot be loaded",
    ),
    "broken template": (
        lambda it: ((it / "chat.jinja").write_text("{% if %}"), add(it, "chat_template", "chat.jinja")),
        "tokenizer",
        "chat.jinja",
    ),
    "a task that is not served": (
        lambda it: edit_json(checkpoint_of(it) / "config.json", architectures=["DetrForObjectDetection"]),
        "task",
        "the checkpoint is for object-detection, which is not served",
    ),
    "missing adapter": (lambda it: add(it, "adapters", '{"sql": "./nowhere"}'), "adapter sql", "there is no folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_folder_that_cannot_be_served_says_why(folder: Path, case: str) -> None:
    change, about, words = WRONG[case]
    change(folder)
    state, sentence = findings(folder)[about]
    assert state == "error"
    assert words in sentence
    assert "\n" not in sentence
    assert run("check", folder).exit_code == 5


def test_a_gguf_file_takes_the_memory_of_its_bits_or_of_the_dtype(folder: Path) -> None:
    become_gguf(folder)
    size = (checkpoint_of(folder) / "Tiny-Q8_0.gguf").stat().st_size
    found = findings(folder)
    assert found["checkpoint"][1].endswith("/Tiny-Q8_0.gguf")
    if grouped_layers():
        assert found["quantisation"] == ("ok", "GGUF, layers of 4 to 8 bits keep them, others become float32")
        assert found["memory"][1].startswith("weights of 131.8 kB, ")
    assert found["chat template"] == ("ok", "renders a chat")
    assert size < 150_000
    add(folder, "dtype", "bfloat16")
    found = findings(folder)
    assert found["quantisation"] == ("ok", "GGUF, undone at load: the weights become bfloat16")
    assert found["memory"][1].startswith("weights of 246.4 kB, ")
    assert not any(state == "error" for state, _ in found.values())


def test_small_weights_take_their_own_memory(folder: Path) -> None:
    full = findings(folder)["memory"][1]
    add(folder, "weights", "int4")
    found = findings(folder)
    assert full.startswith("weights of 492.8 kB, ")
    assert found["quantisation"] == ("ok", "layers are rounded to int4 at load, one by one")
    assert float(found["memory"][1].split()[2]) < 120
    assert not any(state == "error" for state, _ in found.values())


def test_too_little_memory_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_triton.runner.budget.FreeMemory.of", lambda self, device: 1000)
    state, sentence = findings(folder)["memory"]
    assert state == "error"
    assert "1.0 kB free" in sentence


def test_the_part_of_a_gpu_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("hf_triton.runner.budget.FreeMemory.of", lambda self, device: 2_000_000)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2_000_000, 2_000_000))
    assert findings(folder)["GPU"] == (
        "ok",
        "an instance has 1.8 MB for weights and KV cache (the only instance on this GPU)",
    )
    edit(folder, 'backend: "python"', 'backend: "python" instance_group { kind: KIND_AUTO count: 8 }')
    state, sentence = findings(folder)["GPU"]
    assert state == "warning"
    assert "225.0 kB" in sentence
    assert "instances on this GPU: mine 8" in sentence
    assert "set gpu_memory_fraction" in sentence


def test_quantisation_at_load_may_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_triton.runner.budget.FreeMemory.of", lambda self, device: 1000)
    add(folder, "quantization_config", '{"quant_method": "bitsandbytes", "load_in_4bit": true}')
    found = findings(folder)
    assert found["quantisation"] == ("ok", "bitsandbytes")
    assert found["memory"][0] == "ok"
    assert "before they are quantised, 1.0 kB free" in found["memory"][1]


def size_of_weights(folder: Path) -> str:
    return findings(folder)["memory"][1].split(",")[0]


def test_memory_is_that_of_the_weights_as_they_are_loaded(folder: Path) -> None:
    weights = checkpoint_of(folder) / "model.safetensors"
    size = size_of_weights(folder)
    shutil.copy(weights, weights.with_name("consolidated.safetensors"))  # the same weights in their author's form
    assert size_of_weights(folder) == size
    weights.rename(weights.with_name("pytorch_model.bin"))
    add(folder, "allow_pickle", "true")
    assert size_of_weights(folder) == size
    add(folder, "load_format", "dummy")
    assert size_of_weights(folder) == size
    edit_json(checkpoint_of(folder) / "config.json", dtype="bfloat16")
    assert size_of_weights(folder) != size


@pytest.mark.parametrize(
    ("architecture", "size"),
    [
        ("falcon", "256 bytes"),
        ("falcon-40b", "1.0 kB"),  # its keys are repeated for each head before they are cached
        ("qwen3", "512 bytes"),
        ("qwen3_5", "256 bytes, the states of a sequence 6.1 kB"),
        ("t5", ""),
    ],
)
def test_kv_cache_per_token(architecture: str, size: str, tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "checkpoint", architecture)
    memory = findings(make_folder(tmp_path, "mine", huggingface_model=checkpoint))["memory"][1]
    assert memory.partition("each token of KV cache takes ")[2] == size


def lose(checkpoint: Path, lost: str) -> None:
    """Write the weights again without the tensors whose names begin so."""
    tensors = load_file(checkpoint / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    assert len(kept) < len(tensors)
    save_file(kept, checkpoint / "model.safetensors", metadata={"format": "pt"})


def mismatch(checkpoint: Path, config: Any, settings: ModelSettings, auto_class_name: str | None = None) -> str:
    """The sentence of a check, which is that of a load."""
    sentences = []
    for check in (check_tensors, lambda *given: load_model(*given[:3], {"": "cpu"}, given[3])):
        with pytest.raises(CheckpointError) as caught:
            check(checkpoint, config, settings, auto_class_name)
        assert caught.value.code == "weights_mismatch"
        sentences.append(caught.value.sentence)
    assert sentences[0] == sentences[1]
    return sentences[0]


@pytest.mark.full
@pytest.mark.parametrize("name", some_in_make_test([*ARCHITECTURES, *CONTINUOUS, *WHOLE, *BATCH]))
def test_tensors_of_each_architecture_are_found_and_missed(name: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "saved"
    if name in ARCHITECTURES:
        build_tiny_checkpoint(checkpoint, name)
    else:
        load(name, tmp_path).save_pretrained(checkpoint)
    settings = ModelSettings(huggingface_model=str(checkpoint))
    config = load_config(checkpoint, settings)
    assert check_tensors(checkpoint, config, settings, None)
    first = max(load_file(checkpoint / "model.safetensors"))
    lose(checkpoint, first)
    assert "missing (" in mismatch(checkpoint, config, settings)


@pytest.mark.full
@pytest.mark.parametrize("family", PACKED | PADDED | ALONE)
def test_tensors_of_each_encoder_are_found_and_missed(family: str, tmp_path: Path) -> None:
    config_class = getattr(transformers, (PACKED | PADDED | ALONE)[family][0])
    for head, (auto_class_name, *_) in HEADS.items():
        if config_class not in getattr(transformers, auto_class_name)._model_mapping:
            continue
        checkpoint = tmp_path / head
        build_model(family, head).save_pretrained(checkpoint)
        settings = ModelSettings(huggingface_model=str(checkpoint))
        config = load_config(checkpoint, settings)
        assert check_tensors(checkpoint, config, settings, auto_class_name)
        lose(checkpoint, min(load_file(checkpoint / "model.safetensors")))
        assert "missing (" in mismatch(checkpoint, config, settings, auto_class_name)


def test_a_checkpoint_that_lacks_what_its_task_needs(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    checkpoint = shutil.copytree(real_checkpoint(), tmp_path / "minilm")

    def weights(task: str) -> tuple[str, str]:
        return findings(make_folder(tmp_path, task, huggingface_model=checkpoint, task=task))["weights"]

    assert weights("embeddings") == ("ok", "the tensors of the model")
    state, sentence = weights("text-generation")
    assert state == "error"
    assert "6 missing (cls.predictions.bias" in sentence
    assert "set task to what the model does" in sentence
    edit_json(checkpoint / "config.json", architectures=["BertForSequenceClassification"])
    state, sentence = weights("text-classification")
    assert state == "error"
    assert "2 missing (classifier.bias, classifier.weight): use a complete checkpoint" in sentence


def test_tensors_in_pickle_files(folder: Path) -> None:
    weights = checkpoint_of(folder) / "model.safetensors"
    add(folder, "allow_pickle", "true")
    tensors = load_file(weights)
    weights.unlink()
    pickle = weights.with_name("pytorch_model.bin")
    torch.save(tensors, pickle)
    assert findings(folder)["weights"][0] == "ok"
    torch.save(tensors | {"lm_head.weight": torch.zeros(2, 2)}, pickle)
    assert "1 of a wrong shape (lm_head.weight is [2, 2]" in findings(folder)["weights"][1]
    torch.save(tensors, pickle, _use_new_zipfile_serialization=False)  # would be read
    assert "weights" not in findings(folder)


def test_quantised_weights_are_not_judged(folder: Path) -> None:
    lose(checkpoint_of(folder), "lm_head")
    assert findings(folder)["weights"][0] == "error"
    add(folder, "quantization_config", '{"quant_method": "bitsandbytes", "load_in_4bit": true}')
    assert "weights" not in findings(folder)


def test_modules_of_two_folders_may_have_one_name(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    for path, name in ((folder, "of_one"), (other, "of_another")):
        (path / "1" / "rules.py").write_text(f"{name} = 1\n")
        code = (path / "1" / "model.py").read_text()
        (path / "1" / "model.py").write_text(f"{code}\nfrom rules import {name}\n")
    assert run("check", folder, other).exit_code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_an_error(folder: Path) -> None:
    edit(folder, 'backend: "python"', 'backend: "python" instance_group { kind: KIND_GPU }')
    assert findings(folder)["device"][0] == "error"
    edit(folder, "KIND_GPU", "KIND_CPU")
    assert "device" not in findings(folder)
    add(folder, "tensor_parallel_size", "2")
    for kind in ("KIND_CPU", "KIND_GPU"):
        edit(folder, "KIND_CPU", kind)
        assert f"has {kind}: write instance_group [{{ kind: KIND_MODEL" in findings(folder)["device"][1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_graphs_without_a_gpu_are_found(folder: Path) -> None:
    add(folder, "decoding", "cuda_graphs")
    assert findings(folder)["engine"] == (
        "warning",  # the batch engine would run it
        "decoding cuda_graphs needs a GPU, and the model is on cpu: set decoding to auto",
    )
    add(folder, "engine", "continuous")
    assert findings(folder)["engine"][0] == "error"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_graphs_of_an_encoder_without_a_gpu_are_found(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    encoder = make_folder(tmp_path, "mine", huggingface_model=real_checkpoint(), decoding="cuda_graphs")
    assert findings(encoder)["engine"][0] == "error"


def test_own_code_may_print(folder: Path) -> None:
    own_code(folder, "    print('hello')")
    assert findings(folder)["model"][0] == "ok"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_quantisation_that_is_undone_at_load(folder: Path) -> None:
    size = size_of_weights(folder)
    edit_json(checkpoint_of(folder) / "config.json", quantization_config={"quant_method": "fp8"})
    assert findings(folder)["quantisation"] == ("ok", "fp8, undone at load on this machine")
    assert size_of_weights(folder) == size


def test_quantisation_that_is_undone_for_want_of_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_json(checkpoint_of(folder) / "config.json", quantization_config={"quant_method": "fp8"})
    why = "fp8 needs the package kernels, not installed"
    monkeypatch.setattr("hf_triton.hub.pretrained.undo_without_kernels", lambda *_: why)
    assert findings(folder)["quantisation"] == ("warning", f"fp8, undone at load, since {why}")


def test_fp8_without_scales_is_found(folder: Path) -> None:
    checkpoint = checkpoint_of(folder)
    tensors = load_file(checkpoint / "model.safetensors")
    name = next(name for name in tensors if tensors[name].ndim == 2)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, checkpoint / "model.safetensors")
    edit_json(checkpoint / "config.json", quantization_config={"quant_method": "fp8"})
    state, sentence = findings(folder)["weights"]
    assert (state, sentence.startswith(f"{name} of ")) == ("error", True)
    assert f"has no scales ({name}_scale_inv)" in sentence


def test_an_encoder_has_no_kv_cache(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    found = findings(make_folder(tmp_path, "mine", huggingface_model=real_checkpoint()))
    assert found["task"] == ("ok", "embeddings")
    assert found["memory"][0] == "ok"
    assert "KV cache" not in found["memory"][1]


def test_an_adapter_on_disk_is_found(folder: Path, checkpoint: Path) -> None:
    adapter = save_adapter(checkpoint, folder / "sql")
    add(folder, "adapters", json.dumps({"sql": "./sql", "hub": "someone/lora"}))
    found = findings(folder)
    assert found["adapter sql"] == ("ok", str(adapter))
    assert found["adapter hub"][0] == "warning"
    (adapter / "adapter_config.json").write_text("{")
    state, sentence = findings(folder)["adapter sql"]  # refuses its own requests, and no others
    assert state == "warning"
    assert "cannot be read" in sentence


@pytest.mark.full
def test_wrong_use_and_the_command_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "nowhere").exit_code == 2
    assert run("check").exit_code == 2
    assert run("export", "vllm", "nowhere").exit_code == 2
    with pytest.raises(SystemExit) as ended:
        main(["export", "vllm", str(checkpoint_of(folder))])
    assert (ended.value.code, "hf-triton new NAME" in capsys.readouterr().err) == (2, True)
    done = hf_triton("check", str(folder))
    assert done.returncode == 0, done.stderr
    assert "chat template\tok" in done.stdout


# --- export vllm -----------------------------------------------------------------------------------------------------


def test_a_folder_is_exported_for_vllm_backend(folder: Path, tmp_path: Path) -> None:
    for key, value in {
        "dtype": "bfloat16",
        "max_context_length": "128",
        "max_num_seqs": "4",
        "enable_prefix_caching": "false",
        "cache_dir": "cache",
        "quantization_config": '{"quant_method": "bitsandbytes", "load_in_8bit": true}',
        "adapters": '{"sql": "someone/llama-sql@v2", "tone": "./tone"}',
        "generation_defaults": '{"temperature": 0.5}',
    }.items():
        add(folder, key, value)
    code = 'import hf_triton\nclass TritonPythonModel(hf_triton.TritonPythonModel):\n    "x"\n'
    (folder / "1" / "model.py").write_text(code + "    def build_prompt(self, text):\n        return text\n")
    target = tmp_path / "exported"
    result = run("export", "vllm", folder, "--into", target)
    assert result.exit_code == 0, result.output
    assert json.loads((target / "1" / "model.json").read_text()) == {
        "model": str(checkpoint_of(folder)),
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "download_dir": str(folder / "cache"),
        "quantization": "bitsandbytes",
        "enable_lora": True,
    }
    adapters = json.loads((target / "1" / "multi_lora.json").read_text())
    assert adapters == {"sql": "someone/llama-sql", "tone": str(folder / "tone")}
    assert 'backend: "vllm"' in (target / "config.pbtxt").read_text()
    assert result.stderr.splitlines() == [
        "not carried over: the setting generation_defaults",
        "not carried over: load_in_8bit of the setting quantization_config",
        "not carried over: the revision of the adapter sql",
        "not carried over: the hook build_prompt of 1/model.py",
    ]
    again = run("export", "vllm", folder, "--into", target)
    assert (again.exit_code, "exists: choose another folder" in again.output) == (2, True)


def test_what_cannot_be_exported(folder: Path, tmp_path: Path) -> None:
    result = run("export", "vllm", folder, "--into", folder / "config.pbtxt" / "exported")
    assert (result.exit_code, "cannot be written (Not a directory)" in result.output) == (2, True)
    result = run("export", "vllm", ROOT / "bge", "--into", tmp_path / "exported")
    assert (result.exit_code, "bge is for embeddings" in result.output) == (2, True)
    result = run("export", "vllm", ROOT / "stream_door", "--into", tmp_path / "exported")
    assert (result.exit_code, "a stream door has no model" in result.output) == (2, True)
    add(folder, "dtype", "int3")
    done = hf_triton("export", "vllm", str(folder), "--into", str(tmp_path / "exported"))
    assert (done.returncode, "dtype must be one of" in done.stderr) == (2, True)
    assert not (tmp_path / "exported").exists()


def test_the_code_may_have_another_name(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    folder = make_folder(tmp_path, "other", huggingface_model="./x", config='default_model_filename: "serve.py"')
    assert folder_defect(folder) == "it has no 1/serve.py: copy one from a model folder"
    (folder / "1" / "model.py").rename(folder / "1" / "serve.py")
    assert folder_defect(folder) is None
    assert own_class(folder).__name__ == "TritonPythonModel"


def test_models_of_others_are_passed_over(tmp_path: Path, folder: Path) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(folder, repository / "mine")
    for name, file, config in (
        ("graph", "model.onnx", 'backend: "onnxruntime"'),
        ("bare", "model.onnx", None),
        ("platform", "model.plan", 'platform: "tensorrt_plan"'),
        ("other", "model.py", 'backend: "python"'),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / file).write_text("import triton_python_backend_utils\n")
        if config is not None:
            (repository / name / "config.pbtxt").write_text(config)
    result = run("check", "--json", repository)
    assert result.exit_code == 0, result.output
    found = {Path(each["folder"]).name: each["findings"][-1] for each in json.loads(result.stdout)}
    assert found.pop("mine")["about"] == "chat template"
    assert {name: (each["state"], each["finding"]) for name, each in found.items()} == {
        "bare": ("ok", "not for hf_triton: no config.pbtxt names its backend"),
        "graph": ("ok", "not for hf_triton: backend onnxruntime"),
        "other": ("ok", "not for hf_triton: backend python"),
        "platform": ("ok", "not for hf_triton: backend tensorrt_plan"),
    }


OWN_CODE = "import hf_triton\n{}\nclass TritonPythonModel(hf_triton.TritonPythonModel):\n    {}\n"
WRONG_CODE = {
    "settings_class = dict": ("settings", "settings_class of 1/model.py must be a subclass of"),
    "task_class = object()": ("1/model.py", "task_class of 1/model.py must be a subclass of"),
    "task_class = EncoderTask": ("1/model.py", "has no declaration: give it a TaskDeclaration"),
    "task_class = Raises": ("1/model.py", "it cannot be checked (KeyError at model.py:7: 'mine')"),
    "def build_prompt(self): return ''": ("1/model.py", "must take (self, text), as docs/hooks.md shows"),
    "raise KeyError('here')": ("1/model.py", "cannot be imported (KeyError: 'here')"),
}
RAISES = """from hf_triton.tasks.encoder_task import EncoderTask
from hf_triton.protocol.task_declaration import TEXTS, TaskDeclaration
class Raises(EncoderTask):
    declaration = TaskDeclaration("mine", (TEXTS,), {})
    @classmethod
    def check_config(cls, config, settings): raise KeyError("mine")"""


@pytest.mark.parametrize("line", WRONG_CODE)
def test_what_a_folder_s_own_code_raises_is_a_row_and_the_others_are_checked(
    line: str, tmp_path: Path, folder: Path
) -> None:
    repository = tmp_path / "repository"
    own = shutil.copytree(folder, repository / "own")
    shutil.copytree(folder, repository / "right")
    (own / "1" / "model.py").write_text(OWN_CODE.format(RAISES, line))
    result = run("check", "--json", repository)
    assert result.exit_code == 5, result.output
    wrong, right = json.loads(result.stdout)
    assert right["ok"]
    about, sentence = WRONG_CODE[line]
    [error] = [each for each in wrong["findings"] if each["state"] == "error"]
    assert error["about"] == about
    assert sentence in error["finding"]


def test_wrong_dims_are_in_the_table(folder: Path) -> None:
    config = (folder / "config.pbtxt").read_text()
    for dims, batch, is_right in (
        ("1, 1, 3", 0, False),
        ("-1, 1", 0, True),
        ("1", 8, True),
        ("-1, 1", 8, False),
        ("3", 0, True),
    ):
        port = f'input [ {{ name: "text_input" data_type: TYPE_STRING dims: [ {dims} ] }} ]'
        (folder / "config.pbtxt").write_text(f"{config}\nmax_batch_size: {batch}\n{port}\n")
        ports = findings(folder).get("ports")
        assert (ports is None) is is_right, ports
        assert ports is None or "declares text_input with dims" in ports[1]


STEP = """platform: "ensemble"
input [ {{ name: "TEXT" data_type: {type} dims: [ {dims} ] }} ]
output [ {{ name: "FOUND" data_type: TYPE_STRING dims: [ -1 ] }} ]
ensemble_scheduling {{ step [ {{ model_name: "masks" model_version: -1
  input_map {{ key: "{input}" value: "{tensor}" }} output_map {{ key: "{output}" value: "FOUND" }} }} ] }}"""
FITTING = {"type": "TYPE_STRING", "dims": "-1", "input": "text", "tensor": "TEXT", "output": "output"}
MISFITS = {
    "as it is": ({}, ""),
    "a shape": ({"dims": "-1, -1"}, "the tensor 'TEXT' is the ensemble's input TEXT (TYPE_STRING [-1, -1]), and does"),
    "a type": ({"type": "TYPE_FP32"}, "TEXT (TYPE_FP32 [-1]), and does not fit masks's input text (TYPE_STRING [-1])"),
    "an input": ({"input": "txt"}, "masks has no input 'txt', did you mean 'text'?"),
    "an output": ({"output": "outputs"}, "masks has no output 'outputs', did you mean 'output'?"),
    "a tensor": ({"tensor": "TXT"}, "nothing gives the tensor 'TXT', which masks takes as text"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_an_ensemble_that_does_not_fit_is_told(case: str, tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    changes, sentence = MISFITS[case]
    make_folder(tmp_path, "masks", huggingface_model="a/masks", task="fill-mask")
    joined = tmp_path / "joined"
    (joined / "1").mkdir(parents=True)
    (joined / "config.pbtxt").write_text(STEP.format(**FITTING | changes))
    [found] = json.loads(run("check", "--json", joined).stdout)
    errors = [each["finding"] for each in found["findings"] if each["state"] == "error"]
    assert [sentence in error for error in errors] == ([True] if sentence else []), errors


def test_ports_that_another_backend_may_add_are_no_misfit(tmp_path: Path) -> None:
    ports = """input [ {{ name: "{}" data_type: TYPE_STRING dims: [ -1 ] }} ]
    output [ {{ name: "a" data_type: TYPE_FP32 dims: [ 4 ] }} ]"""
    for name, config in (("masks", ports.format("text")), ("joined", STEP.format(**FITTING))):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    assert findings(tmp_path / "joined") == {"ensemble": ("ok", "joins masks")}
    (tmp_path / "masks" / "config.pbtxt").write_text(ports.format("needed"))
    assert findings(tmp_path / "joined")["ensemble"] == ("error", "nothing is mapped to the input 'needed' of masks")
