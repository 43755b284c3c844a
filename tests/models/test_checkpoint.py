# SPDX-License-Identifier: Apache-2.0
"""Loading a checkpoint in process: accepted ones, and refusals in one sentence with the remedy."""

import json
import logging
import os
import pickle
import re
import shutil
import typing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_triton.errors import CODES, CheckpointError, LoadError, SettingsError
from hf_triton.hub.checkpoint import Checkpoint, Placement, context_length, load_checkpoint
from hf_triton.hub.locate import Hub
from hf_triton.protocol.names import TaskName
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.settings import DEFAULT_MODELS, ModelSettings
from hf_triton.testing import (
    LoopbackHub,
    add_tensor,
    build_tiny_checkpoint,
    drop_tensor,
    flip_bit,
    reshape_tensor,
    truncate,
)
from tests.support.architectures import BASE, CONTINUOUS, EYE, HEADS, build
from tests.support.marks import full
from tests.support.reference import solo_ids

WEIGHT = "model.layers.0.mlp.down_proj.weight"
CPU = Placement("CPU", 0)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("pristine"), "llama")


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return shutil.copytree(pristine, tmp_path / "org--model")


def load(checkpoint: Path, **settings: Any) -> Checkpoint:
    chosen = ModelSettings(huggingface_model=str(checkpoint), **settings)
    return load_checkpoint(Hub(checkpoint, chosen, {}), chosen, CPU)


def reason(checkpoint: Path, **settings: Any) -> LoadError:
    with pytest.raises(LoadError) as raised:
        load(checkpoint, **settings)
    assert raised.value.code in CODES
    assert checkpoint.name in raised.value.sentence
    assert "\n" not in raised.value.sentence
    return raised.value


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def use_pickle(checkpoint: Path, content: object = None) -> None:
    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights) if content is None else content
    torch.save(tensors, checkpoint / "pytorch_model.bin")
    weights.unlink()


# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: drop_tensor(folder, WEIGHT), f"1 missing ({WEIGHT}): use a complete checkpoint"),
        (lambda folder: reshape_tensor(folder, WEIGHT), f"({WEIGHT} is [63, 128] and must be [64, 128])"),
        (
            lambda folder: add_tensor(folder, "vision.weight"),
            "1 not in the model (vision.weight): use a complete checkpoint of this architecture, or set "
            "allow_extra_weights to true",
        ),
        (lambda folder: edit(folder / "config.json", num_hidden_layers=3), "9 missing (model.layers.2."),
        (lambda folder: edit(folder / "config.json", num_hidden_layers=1), "9 not in the model (model.layers.1."),
        (lambda folder: edit(folder / "config.json", vocab_size=500), "lm_head.weight is [384, 64] and must be [500"),
    ],
    ids=["missing", "shape", "extra", "fewer layers", "more layers", "vocabulary"],
)
def test_mismatched_tensors_are_refused(checkpoint: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(checkpoint)
    refused = reason(checkpoint)
    assert refused.code == "weights_mismatch"
    assert words in refused.sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 1 << 23}, r"of its sizes 1,073,8.* \(model.embed_tokens.weight alone is \[8388608, 64"),
        ({"intermediate_size": 1 << 40}, "do not match its config: its files hold 123,200 numbers"),
        ({"num_hidden_layers": 900_000}, "more than 10042 tensors by its config, against 21 tensors in its files"),
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers 1000000000, more than the 1000000 that are read"),
    ],
)
@pytest.mark.parametrize("is_sharded", [False, *full(True)])
def test_sizes_of_a_config_take_no_memory(
    checkpoint: Path, change: dict[str, int], words: str, is_sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_sharded:
        shard(checkpoint)
    edit(checkpoint / "config.json", **change)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", None)  # which would allocate it
    assert re.search(words, reason(checkpoint).sentence)


def shard(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, checkpoint / file, {"format": "pt"})
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused(checkpoint: Path, number: float) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[WEIGHT][3, 5] = number
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    assert f"have NaN or infinite numbers in {WEIGHT}: fetch" in reason(checkpoint).sentence


OTHER_TASKS = {
    "LlamaForSequenceClassification": "text-classification",
    "LlamaForTokenClassification": "token-classification",
    "BertForMaskedLM": "fill-mask",
    "BertForQuestionAnswering": "question-answering",
}


@pytest.mark.parametrize("kind", OTHER_TASKS)
def test_model_for_another_task_is_refused_by_name(checkpoint: Path, kind: str) -> None:
    edit(checkpoint / "config.json", architectures=[kind])
    for settings, advice in (
        ({}, f"a model for {OTHER_TASKS[kind]} that was not on disk when the folder's inputs were declared: set task"),
        ({"task": "text-generation"}, f"which does not generate text: set task to {OTHER_TASKS[kind]}, or choose"),
    ):
        refused = reason(checkpoint, **settings)
        assert refused.code == "unsupported_model"
        assert f"is a {kind} according to its config.json, {advice}" in refused.sentence


def test_extra_tensors_may_be_allowed_and_other_faults_not(checkpoint: Path) -> None:
    add_tensor(checkpoint, "vision.weight")
    load(checkpoint, allow_extra_weights=True)
    reshape_tensor(checkpoint, WEIGHT)
    assert "allow_extra_weights" not in reason(checkpoint, allow_extra_weights=True).sentence


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.attn.masked_bias"])
def test_buffers_saved_by_older_versions_are_ignored(checkpoint: Path, name: str) -> None:
    add_tensor(checkpoint, name)
    load(checkpoint)


@pytest.mark.parametrize(
    "damage",
    [
        lambda weights: truncate(weights),
        lambda weights: flip_bit(weights, 0),
        lambda weights: weights.write_bytes(b""),
        lambda weights: weights.write_bytes(b"<!doctype html>" * 100),
    ],
    ids=["truncated", "header", "empty", "page"],
)
def test_unreadable_weights_are_refused(checkpoint: Path, damage: Callable[[Path], object]) -> None:
    damage(checkpoint / "model.safetensors")
    refused = reason(checkpoint)
    assert refused.code == "checkpoint_invalid"
    assert "the weights of" in refused.sentence
    assert "fetch the checkpoint again" in refused.sentence


# --- code in a download ----------------------------------------------------------------------------------------------


def test_pickle_is_refused_unless_allowed(checkpoint: Path) -> None:
    use_pickle(checkpoint)
    refused = reason(checkpoint)
    assert refused.code == "weights_not_safe"
    assert "set allow_pickle to true" in refused.sentence
    assert load(checkpoint, allow_pickle=True).vocabulary_size == 384


class Malicious:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_allowed_pickle_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    use_pickle(checkpoint, {WEIGHT: Malicious(tmp_path / "made")})
    refused = reason(checkpoint, allow_pickle=True)
    assert refused.code == "weights_not_safe"
    assert "do not use them" in refused.sentence
    assert not (tmp_path / "made").exists()
    pickle.loads(pickle.dumps(Malicious(tmp_path / "made")))
    assert (tmp_path / "made").exists()  # the attack works


def add_code(checkpoint: Path, code: str) -> None:
    edit(checkpoint / "config.json", model_type="mine", auto_map={"AutoConfig": "configuration_mine.Mine"})
    (checkpoint / "configuration_mine.py").write_text(code)


def test_code_runs_only_if_trusted(checkpoint: Path, tmp_path: Path) -> None:
    add_code(checkpoint, f"import os; os.mkdir({str(tmp_path / 'made')!r})\nraise RuntimeError('was run')")
    refused = reason(checkpoint)
    assert refused.code == "needs_trust_remote_code"
    assert "set trust_remote_code to true" in refused.sentence
    assert not (tmp_path / "made").exists()
    assert "RuntimeError: was run" in reason(checkpoint, trust_remote_code=True).sentence
    assert (tmp_path / "made").exists()


def test_missing_trusted_code_is_named(checkpoint: Path) -> None:
    add_code(checkpoint, "")
    (checkpoint / "configuration_mine.py").unlink()
    assert "has no configuration_mine.py" in reason(checkpoint, trust_remote_code=True).sentence


def test_attention_named_by_the_config_is_ignored(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", attn_implementation="evil/kernel", _attn_implementation="evil/kernel")
    assert load(checkpoint).model.config._attn_implementation == "sdpa"


def test_attention_named_by_the_settings_is_used(checkpoint: Path) -> None:
    assert load(checkpoint, attn_implementation="eager").model.config._attn_implementation == "eager"


def test_model_without_sdpa_uses_eager(tmp_path: Path) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "org--model", "mpt")
    assert load(checkpoint).model.config._attn_implementation == "eager"


# --- multimodal models -----------------------------------------------------------------------------------------------


def replace_model(checkpoint: Path, name: str) -> Any:
    """Replace a checkpoint's model by one of `tests/support/architectures.py`, and keep its tokenizer."""
    (checkpoint / "model.safetensors").unlink()
    config, arguments = CONTINUOUS[name]
    text = arguments["text_config"] | {"vocab_size": 512}
    model = build(config, arguments | {"text_config": text})
    model.save_pretrained(checkpoint)
    return model


@pytest.mark.parametrize("name", ["mistral3-with-images", "gemma3-with-images", "internvl", "qwen2.5-vl", "qwen3-vl"])
def test_multimodal_model_generates_text(name: str, checkpoint: Path) -> None:
    saved = replace_model(checkpoint, name)
    loaded = load(checkpoint)
    assert type(loaded.model) is type(saved)
    assert (loaded.context_length, loaded.vocabulary_size) == (256, 512)
    assert solo_ids(loaded.model, [5, 6, 7], 8) == solo_ids(saved, [5, 6, 7], 8)


def test_text_part_that_is_a_model_of_its_own_is_loaded_alone(checkpoint: Path) -> None:
    text = BASE | HEADS | {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
    config = transformers.Llama4Config(text_config=text, vision_config={**EYE, "num_hidden_layers": 1})
    (checkpoint / "model.safetensors").unlink()
    transformers.AutoModelForMultimodalLM.from_config(config).save_pretrained(checkpoint)
    refused = reason(checkpoint)
    assert refused.code == "weights_mismatch"
    assert "or set allow_extra_weights to true to ignore them" in refused.sentence
    assert type(load(checkpoint, allow_extra_weights=True).model).__name__ == "Llama4ForCausalLM"
    assert type(load(checkpoint, load_format="dummy").model).__name__ == "Llama4ForCausalLM"


def test_dummy_weights_of_a_multimodal_model(checkpoint: Path) -> None:
    replace_model(checkpoint, "mistral3-with-images")
    (checkpoint / "model.safetensors").unlink()
    assert type(load(checkpoint, load_format="dummy").model).__name__ == "Mistral3ForConditionalGeneration"


def test_chat_template_of_an_older_processor_is_used(checkpoint: Path) -> None:
    (checkpoint / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert load(checkpoint).tokenizer.chat_template == "{{ messages[0].content }}!"


def test_chat_template_of_the_tokenizer_has_priority(tmp_path: Path) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "org--model", "llama", chat_template="own")
    (checkpoint / "chat_template.json").write_text(json.dumps({"chat_template": "other"}))
    assert load(checkpoint).tokenizer.chat_template == "own"


@pytest.mark.parametrize("several", [{"default": "a", "tool_use": "b"}, None])
def test_several_chat_templates_or_none(several: object, checkpoint: Path) -> None:
    listed = [{"name": name, "template": text} for name, text in several.items()] if isinstance(several, dict) else None
    for value in (several, listed):
        (checkpoint / "chat_template.json").write_text("\ufeff" + json.dumps({"chat_template": value}))
        assert load(checkpoint).tokenizer.chat_template == several


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"chat_template": 5}', '{"chat_template": [5]}'])
def test_invalid_chat_template_names_its_file(content: str, checkpoint: Path) -> None:
    (checkpoint / "chat_template.json").write_text(content)
    refused = reason(checkpoint)
    assert refused.code == "checkpoint_invalid"
    assert "chat_template.json of" in refused.sentence


# --- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        (
            {"model_type": "brandnew"},
            "unsupported_model",
            "(brandnew): choose another model, or build the image with a newer transformers",
        ),
        ({"model_type": "vit"}, "unsupported_model", "(ViTConfig): choose another model"),
        ({}, "checkpoint_invalid", "config.json of"),
        ({"model_type": "llama", "hidden_size": "big"}, "checkpoint_invalid", "hidden_size"),
        ([1], "checkpoint_invalid", "config.json of"),
    ],
)
def test_unusable_config(checkpoint: Path, config: object, code: str, words: str) -> None:
    (checkpoint / "config.json").write_text(json.dumps(config))
    refused = reason(checkpoint)
    assert refused.code == code
    assert words in refused.sentence


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_invalid_json_names_its_file(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text("{")
    refused = reason(checkpoint)
    assert refused.code == "checkpoint_invalid"
    assert name.removesuffix(".json") in refused.sentence
    assert "fetch the checkpoint again" in refused.sentence


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}},
            "rope_parameters.rope_type ('su') in config.json",
        ),
        ({"hidden_act": "gelu_super"}, "hidden_act ('gelu_super') in config.json"),
        ({"dtype": "auto"}, "dtype ('auto') in config.json"),
        ({"quantization_config": {}}, "quantization_config in config.json"),
        ({"pad_token_id": 384}, "pad_token_id in config.json"),
        ({"layer_types": ["new", "new"]}, "layer_types in config.json"),
    ],
)
def test_the_entry_that_is_wrong_is_named(checkpoint: Path, entries: dict[str, Any], words: str) -> None:
    edit(checkpoint / "config.json", **entries)
    assert reason(checkpoint).sentence.endswith(f": correct {words}, or choose another revision")


def test_a_missing_model_type_is_named(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": None}))
    assert "fetch" not in reason(checkpoint).sentence
    del config["model_type"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert ": add model_type to config.json" in reason(checkpoint).sentence


def test_a_tokenizer_of_sentencepiece_that_breaks_off_needs_no_package(checkpoint: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    (checkpoint / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15")
    assert "fetch the checkpoint again" in reason(checkpoint).sentence


def test_a_number_of_labels_that_no_head_has_is_refused_before_names_are_made_of_it(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", num_labels=10**400)
    assert "num_labels" in reason(checkpoint).sentence


def test_generation_defaults_are_validated(checkpoint: Path) -> None:
    edit(checkpoint / "generation_config.json", do_sample=True, temperature=0.5, top_k=7)
    defaults = load(checkpoint).generation_defaults()
    assert (defaults.do_sample, defaults.temperature, defaults.top_k) == (True, 0.5, 7)
    edit(checkpoint / "generation_config.json", temperature=-3.0)
    assert "temperature" in reason(checkpoint).sentence


SAMPLING = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8}
ALWAYS = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 2}
NEUTRAL_VALUES = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
}
NEUTRAL_VALUES |= {"no_repeat_ngram_size": 0, "min_new_tokens": None}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"do_sample": True, **SAMPLING, **ALWAYS}, {"do_sample": True, **SAMPLING, **ALWAYS}),
        ({**SAMPLING, **ALWAYS}, {"do_sample": False, **ALWAYS}),
        ({"do_sample": True, **NEUTRAL_VALUES}, {"do_sample": True}),
        (NEUTRAL_VALUES, {"do_sample": False}),
        ({}, {"do_sample": False}),
        ({"do_sample": True, "temperature": 1e-6, "top_k": 5, **ALWAYS}, {"do_sample": False, **ALWAYS}),
        ({"do_sample": True, "temperature": 0.0, "top_k": 5, **ALWAYS}, {"do_sample": False, **ALWAYS}),
    ],
    ids=["sampling", "greedy", "sampling, neutral", "greedy, neutral", "nothing", "near zero", "zero"],
)
def test_defaults_of_a_generation_config(
    checkpoint: Path, written: dict[str, object], expected: dict[str, object]
) -> None:
    loaded = load(checkpoint)
    loaded.model.generation_config = transformers.GenerationConfig(**written)
    assert loaded.generation_defaults() == GenerationParameters.model_validate(expected)


def test_sampling_parameters_without_do_sample_are_greedy(checkpoint: Path) -> None:
    edit(checkpoint / "generation_config.json", temperature=0.5)
    defaults = load(checkpoint).generation_defaults()
    assert not defaults.do_sample
    assert defaults.temperature is None


@pytest.mark.parametrize(
    ("config", "limit", "expected"),
    [
        ({"max_position_embeddings": 256}, None, 256),
        ({"max_position_embeddings": 256}, 100, 100),
        ({"n_positions": 64}, None, 64),
        ({"max_seq_len": 0, "seq_length": None}, None, 32768),
        ({}, 100, 100),
        ({}, 65536, 65536),
    ],
)
def test_context_length(config: dict[str, object], limit: int | None, expected: int) -> None:
    text_config = SimpleNamespace(**config)
    assert context_length(SimpleNamespace(get_text_config=lambda: text_config), limit) == expected


def test_context_above_the_config_is_refused() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(n_positions=256))
    with pytest.raises(SettingsError, match="max_context_length must be <= 256, the model's own context, got 257"):
        context_length(config, 257)


# --- settings --------------------------------------------------------------------------------------------------------


def test_dummy_weights_need_no_weight_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    loaded = load(checkpoint, load_format="dummy")
    assert not any(parameter.is_meta for parameter in loaded.model.parameters())
    assert loaded.model.lm_head.weight.std() > 0


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_dtype(checkpoint: Path, load_format: str) -> None:
    assert load(checkpoint, load_format=load_format).model.dtype == torch.float32
    assert load(checkpoint, load_format=load_format, dtype="bfloat16").model.dtype == torch.bfloat16


def test_dtype_of_the_checkpoint_is_the_default(tmp_path: Path) -> None:
    checkpoint = build_tiny_checkpoint(tmp_path / "org--model", "llama", dtype="bfloat16")
    for load_format in ("auto", "dummy"):
        assert load(checkpoint, load_format=load_format).model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "supported", "avx512", "advised"),
    [
        ("float16", ["bf16"], ["avx512", "avx512_bf16"], "bfloat16"),
        ("float16", ["bf16"], ["avx512"], "float32"),
        ("float16", ["bf16"], [], "bfloat16"),  # an ARM processor
        ("float16", [], [], "float32"),
        ("bfloat16", ["bf16"], ["avx512"], "float32"),
        ("bfloat16", [], [], "float32"),
        ("float16", ["bf16", "fp16"], ["avx512", "avx512_bf16"], None),
        ("bfloat16", ["bf16"], ["avx512", "avx512_bf16"], None),
        ("float32", [], [], None),
    ],
)
def test_dtype_without_instructions_is_a_warning(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
    supported: list[str],
    avx512: list[str],
    advised: str | None,
) -> None:
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(
            torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda has=name in supported: has, raising=False
        )
    for name in ("avx512", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda has=name in avx512: has)
    load(checkpoint, dtype=dtype)
    words = f"no instructions for {dtype}: the model is several times faster with the setting dtype {advised}"
    assert (words in caplog.text) is (advised is not None)
    assert len(caplog.records) == (advised is not None)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_separate_tokenizer(checkpoint: Path, tmp_path: Path, load_format: str) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(checkpoint / name, other / name)
    edit(other / "tokenizer_config.json", eos_token="<pad>")
    assert "has no tokenizer.json" in reason(checkpoint).sentence
    assert load(checkpoint, load_format=load_format, tokenizer=str(other)).tokenizer.eos_token == "<pad>"
    (other / "tokenizer.json").write_text("{")
    assert f"the tokenizer {other} of" in reason(checkpoint, load_format=load_format, tokenizer=str(other)).sentence


def test_tokenizer_larger_than_the_model_is_a_warning(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(checkpoint)
    assert not caplog.records
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(checkpoint)
    loaded = load(checkpoint)
    assert loaded.vocabulary_size == 384
    assert "the tokenizer has 385 tokens and the model 384" in caplog.text


def test_a_tokenizer_whose_first_token_the_model_lacks_is_refused(checkpoint: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_special_tokens({"bos_token": "<new>"})
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(checkpoint)
    assert "a token that the model does not have (token 384 of 384)" in reason(checkpoint).sentence


def test_quantization_config_is_passed_to_transformers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    real = transformers.AutoModelForCausalLM.from_pretrained

    def record(*arguments: Any, **named: Any) -> Any:
        given.append(named.pop("quantization_config", None))
        return real(*arguments, **named)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", record)
    wanted = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    load(checkpoint, quantization_config=wanted)
    load(checkpoint)
    assert [each and each.to_dict()["load_in_4bit"] for each in given] == [True, None]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "without the packages gptqmodel and optimum"),
        ({"quantization_config": {"quant_method": "unknown"}}, "...): correct the setting quantization_config"),
        (
            {"quantization_config": {"quant_method": "torchao", "quant_type": "int8_weight_only"}},
            "Expected only one key 'default' in quant_type dictionary): correct the setting quantization_config",
        ),
        ({"attn_implementation": "flash_attention_2"}, "install it, or leave out the setting"),
    ],
)
def test_missing_packages_are_named(checkpoint: Path, settings: dict[str, Any], words: str) -> None:
    refused = reason(checkpoint, **settings)
    assert refused.code == "checkpoint_invalid"
    assert words in refused.sentence
    assert "another revision" not in refused.sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_is_an_error(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="set instance_group to KIND_CPU") as raised:
        Placement("GPU", 3).device_map()
    assert raised.value.code == "device_unavailable"
    assert Placement("MODEL", 0).device_map() == {"": "cpu"}


def test_gpu_is_current_while_its_model_is_loaded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(Placement, "device_map", lambda _: {"": "cpu"})
    settings = ModelSettings(huggingface_model=str(checkpoint))
    for placement in (CPU, Placement("MODEL", 0), Placement("GPU", 1)):
        load_checkpoint(Hub(checkpoint, settings, {}), settings, placement)
    assert chosen == [1]


# --- damaged caches --------------------------------------------------------------------------------------------------


def test_damaged_cached_tokenizer_is_downloaded_again(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ModelSettings(huggingface_model=str(checkpoint), tokenizer="org/tokenizer")
    with LoopbackHub() as loopback, caplog.at_level(logging.WARNING, "hf_triton"):
        loopback.add("org/tokenizer", checkpoint)
        hub = Hub(checkpoint, settings, loopback.environment() | {"HF_HOME": str(tmp_path / "home")})
        load_checkpoint(hub, settings, CPU)
        folder = hub.resolve_tokenizer()
        assert folder is not None
        (folder / "tokenizer.json").write_text("{")
        load_checkpoint(hub, settings, CPU)
    assert "tokenizer.json damaged in the cache (checkpoint_invalid); downloading again" in caplog.text


def test_weights_damaged_on_the_hub_are_downloaded_once(checkpoint: Path, tmp_path: Path) -> None:
    truncate(checkpoint / "model.safetensors")
    settings = ModelSettings(huggingface_model="org/model")
    with LoopbackHub() as loopback:
        loopback.add("org/model", checkpoint)
        hub = Hub(tmp_path, settings, loopback.environment() | {"HF_HOME": str(tmp_path / "home")})
        with pytest.raises(CheckpointError, match="the weights of org/model cannot be loaded"):
            load_checkpoint(hub, settings, CPU)
        downloads = [request for request in loopback.requests if request.method == "GET" and "/cdn/" in request.path]
    assert len(downloads) == 1


def test_default_models_are_those_of_transformers() -> None:
    from transformers.pipelines import SUPPORTED_TASKS, get_default_model_and_revision

    ours = {task: model for task, model in DEFAULT_MODELS.items() if task in SUPPORTED_TASKS}
    assert len(ours) >= 6
    assert ours == {task: get_default_model_and_revision(SUPPORTED_TASKS[task], None) for task in ours}
    not_served = {"automatic-speech-recognition"}  # the pipeline's default there is no Whisper
    assert (SUPPORTED_TASKS.keys() & {*typing.get_args(TaskName)}) - not_served == ours.keys()
