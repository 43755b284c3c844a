# SPDX-License-Identifier: Apache-2.0
"""What is no checkpoint is refused as what it is, from a folder and from the Hub."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hf_triton.errors import LoadError
from hf_triton.hub.kind import TASKS_BY_TABLE, find_task, find_tasks
from hf_triton.hub.load_failures import explain_load
from hf_triton.hub.locate import Hub
from hf_triton.hub.model_tables import model_tables, tables_of_class
from hf_triton.settings import ModelSettings
from hf_triton.testing import LoopbackHub
from tests.support.marks import full

KINDS: Mapping[str, tuple[str, str]] = {
    "adapter_config.json": ('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}', "an adapter of 'Qwen/Qwen3-0.6B'"),
    "model_index.json": ("{}", "a pipeline of diffusers"),
    "model.onnx": ("onnx", "ONNX files"),
    "consolidated.safetensors": (
        "mistral",
        r"authors' own code \(consolidated.safetensors\) alone: name the repository",
    ),
    "consolidated.00.pth": ("llama", r"authors' own code \(consolidated.00.pth\) alone: name the repository"),
    "flax_model.msgpack": ("flax", "TensorFlow's or Flax's weights alone"),
}


def write(folder: Path, file: str) -> Path:
    folder.mkdir()
    (folder / "README.md").touch()
    (folder / file).write_text(KINDS[file][0])
    return folder


@pytest.mark.parametrize("file", KINDS)
def test_a_folder_is_named_for_what_it_is(file: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", file)
    with pytest.raises(LoadError, match=KINDS[file][1]) as caught:
        Hub(tmp_path, ModelSettings(huggingface_model=str(folder)), os.environ).resolve_model()
    assert caught.value.code == "unsupported_model"


@pytest.mark.parametrize("file", [*list(KINDS)[:2], *full(*list(KINDS)[2:])])
def test_a_repository_is_named_for_what_it_is(file: str, tmp_path: Path) -> None:
    with LoopbackHub() as hub:
        hub.add("acme/thing", write(tmp_path / "folder", file))
        environment = {**os.environ, **hub.environment(), "HF_HOME": str(tmp_path / "home")}
        with pytest.raises(LoadError, match=f"acme/thing .*{KINDS[file][1]}"):
            Hub(tmp_path, ModelSettings(huggingface_model="acme/thing"), environment).resolve_model()


@pytest.mark.parametrize("from_hub", [False, True])
def test_shards_without_their_index_are_named(from_hub: bool, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))):
        (folder / name).write_text("{}")
    with LoopbackHub() as hub:
        hub.add("acme/thing", folder)
        environment = {**os.environ, **hub.environment(), "HF_HOME": str(tmp_path / "home")}
        settings = ModelSettings(huggingface_model="acme/thing" if from_hub else str(folder))
        with pytest.raises(LoadError, match=r"has no model\.safetensors\.index\.json") as caught:
            Hub(tmp_path, settings, environment).resolve_model()
    assert caught.value.code == "checkpoint_incomplete"


@pytest.mark.parametrize(
    ("architecture", "labels", "task"),
    [
        ("BertModel", 2, "embeddings"),
        ("Qwen3ForCausalLM", 2, "text-generation"),
        ("GPT2LMHeadModel", 2, "text-generation"),
        ("T5ForConditionalGeneration", 2, "text-generation"),
        ("BertForSequenceClassification", 3, "text-classification"),
        ("XLMRobertaForSequenceClassification", 1, "rerank"),
        ("BertForTokenClassification", 9, "token-classification"),
        ("RobertaForQuestionAnswering", 2, "question-answering"),
        ("BertForMaskedLM", 2, "fill-mask"),
        ("BertForNextSentencePrediction", 2, "next-sentence-prediction"),
        ("BertForPreTraining", 2, "fill-mask"),
        ("MarianMTModel", 2, "text-generation"),
        ("MarianModel", 2, "text-generation"),
        ("BartModel", 2, "text-generation"),
        ("EncoderDecoderModel", 2, "text-generation"),
        ("SeamlessM4TForTextToText", 2, "text-generation"),
        ("ReformerModelWithLMHead", 2, "text-generation"),
        ("GPT2DoubleHeadsModel", 2, "text-generation"),
        ("FlaubertWithLMHeadModel", 2, "fill-mask"),
        ("XLNetForQuestionAnsweringSimple", 2, "question-answering"),
        ("LlamaModel", 2, "embeddings"),
        ("T5EncoderModel", 2, "embeddings"),
        ("CLIPModel", 2, "embeddings"),
        ("ViTModel", 2, "image"),
        ("WhisperForConditionalGeneration", 2, "automatic-speech-recognition"),
        ("Wav2Vec2ForCTC", 2, "automatic-speech-recognition"),
        ("VoxtralForConditionalGeneration", 2, "text-generation"),
        ("QWenLMHeadModel", 2, "text-generation"),
        ("NewModel", 2, "embeddings"),
        ("NewForSequenceClassification", 1, "rerank"),
        ("Novel", 2, None),
    ],
)
def test_task_is_found_in_the_checkpoint_s_files(
    architecture: str, labels: int, task: str | None, tmp_path: Path
) -> None:
    id2label = {str(index): f"LABEL_{index}" for index in range(labels)}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "id2label": id2label}))
    assert find_task(tmp_path) == task
    (tmp_path / "modules.json").write_text("[]")
    assert find_task(tmp_path) == (task if "SequenceClassification" in architecture else "embeddings")


@pytest.mark.parametrize("table", [*TASKS_BY_TABLE, "IMAGE_TEXT_TO_TEXT", "TEXT_ENCODING"])
def test_every_class_of_transformers_does_what_its_table_says(table: str, tmp_path: Path) -> None:
    task = {"IMAGE_TEXT_TO_TEXT": "text-generation", "TEXT_ENCODING": "embeddings", **TASKS_BY_TABLE}[table]
    for model_type, names in model_tables()[table].items():
        for name in names:
            (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "model_type": model_type}))
            assert task in find_tasks(tmp_path), name


@pytest.mark.parametrize("table", ["CTC", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION"])
def test_a_class_that_is_not_served_is_taken_for_nothing_else(table: str, tmp_path: Path) -> None:
    for names in model_tables()[table].values():
        for name in names:
            (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
            served = tables_of_class(name) & {*TASKS_BY_TABLE}  # Voxtral writes text too
            assert served or not {*find_tasks(tmp_path)} & {"embeddings", "text-generation"}, name


def test_a_repository_s_own_class_generates_if_its_auto_map_says_so(tmp_path: Path) -> None:
    config = {"architectures": ["ChatGLMModel"], "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLM"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_tasks(tmp_path) == ["text-generation", "embeddings"]


def test_tasks_are_found_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MarianMTModel"]}')
    code = f"import sys, pathlib, hf_triton.hub.kind as kind; print(kind.find_task(pathlib.Path({str(tmp_path)!r})), "
    code += "sys.modules.keys() & {'torch', 'transformers'})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "text-generation set()\n"


@pytest.mark.parametrize("message", ["could not quantize", "'int8_weight_only' is no AOBaseConfig"])
def test_a_wrong_quantization_setting_is_the_first_remedy(message: str) -> None:
    error = explain_load(AssertionError(message), "the weights", "acme/thing", has_quantization_setting=True)
    assert ": correct the setting quantization_config" in error.sentence


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ImportError("Loading an AWQ quantized model requires gptqmodel."),
            "without the packages gptqmodel and optimum",
        ),
        (
            RuntimeError("GPU is required to quantize or run quantize model."),
            "without the packages gptqmodel and optimum",
        ),
        (ImportError("Loading a quantized model requires optimum-quanto library"), "library): install it"),
        (ImportError("Using fbgemm fp8 quantization requires a GPU or XPU"), "use one with such a GPU"),
        (RuntimeError("No GPU found. A GPU is needed for quantization."), "use one with such a GPU"),
    ],
)
def test_what_a_quantised_checkpoint_lacks_is_named(error: Exception, words: str) -> None:
    sentence = explain_load(error, "the weights", "acme/thing", has_quantization_setting=False).sentence
    assert words in sentence
    assert "fetch the checkpoint again" not in sentence
    assert "setting" not in sentence


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ImportError("This modeling file requires packages: einops. Run `pip install einops`"), "install einops"),
        (ValueError("You need tiktoken. Install it with `pip install tiktoken`."), "install tiktoken"),
        (ImportError("See https://pypi.org/project/sacremoses/ for installation."), "install sacremoses"),
        (ModuleNotFoundError("No module named 'causal_conv1d.ops'", name="causal_conv1d.ops"), "install causal_conv1d"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "or a machine with more memory"),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
            "set gpu_memory_fraction or max_cache_tokens",
        ),
        (
            RuntimeError("PytorchStreamReader failed reading zip archive"),
            "fetch the checkpoint again, or choose another",
        ),
        (ZeroDivisionError("integer modulo by zero"), "correct config.json, or choose another revision"),
    ],
)
def test_the_remedy_is_that_of_the_exception(error: Exception, remedy: str) -> None:
    sentence = explain_load(error, "the weights", "acme/thing", has_quantization_setting=False).sentence
    assert remedy in sentence.rpartition("): ")[2]


@pytest.mark.parametrize(
    "config",
    ["[" * 100_000, '{"architectures": 5}', '{"architectures": ["BertForSequenceClassification"], "num_labels": "a"}'],
)
def test_a_config_of_other_types_says_nothing_and_stops_nothing(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert find_task(tmp_path) in (None, "text-classification")
