# SPDX-License-Identifier: Apache-2.0
"""Settings: config.pbtxt before the environment before the default, and nothing unusable is let through."""

import json
import re
from typing import Any

import pytest
from google.protobuf import text_format
from pydantic import ValidationError
from tritonclient.grpc import model_config_pb2

from hf_triton.errors import SettingsError
from hf_triton.settings import (
    DEFAULT_MODELS,
    ENVIRONMENT_PREFIX,
    TRITON_SETTINGS,
    DoorSettings,
    LoadedSettings,
    ModelSettings,
    hub_name,
    load_settings,
)

MODEL = {"huggingface_model": "tiiuae/falcon-7b"}


def load(environment: dict[str, str] | None = None, **parameters: str) -> LoadedSettings:
    return load_settings(MODEL | parameters, environment or {})


def rejection(environment: dict[str, str] | None = None, **parameters: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(environment, **parameters)
    return caught.value.sentence


# --- where a setting comes from --------------------------------------------------------------------------------------


def test_config_pbtxt_overrides_the_environment_and_that_the_default() -> None:
    environment = {"HF_TRITON_MAX_OUTPUT_LENGTH": "20", "HF_TRITON_DTYPE": "float16"}
    loaded = load(environment, max_output_length="30")
    assert (loaded.settings.max_output_length, loaded.settings.dtype, loaded.settings.revision) == (
        30,
        "float16",
        "main",
    )
    assert loaded.sources["max_output_length"] == "config.pbtxt"
    assert loaded.sources["dtype"] == "HF_TRITON_DTYPE"
    assert loaded.sources["revision"] == "default"


def test_every_setting_has_a_source_and_those_without_default_are_described() -> None:
    loaded = load({"HF_TRITON_MAX_NUM_SEQS": "4"})
    assert list(loaded.sources) == list(ModelSettings.model_fields)
    assert loaded.describe() == (
        "huggingface_model = tiiuae/falcon-7b (config.pbtxt), max_num_seqs = 4 (HF_TRITON_MAX_NUM_SEQS)"
    )


@pytest.mark.parametrize("name", ModelSettings.model_fields)
def test_every_setting_can_come_from_the_environment(name: str) -> None:
    examples = {
        "huggingface_model": "a/b",
        "load_format": "auto",
        "dtype": "auto",
        "weights": "int8",
        "engine": "auto",
        "attn_implementation": "sdpa",
        "runtime": "onnx",
        "precision": "float32",
        "decoding": "eager",
        "max_cache_tokens": "1024",
        "gpu_memory_fraction": "0.5",
        "prefix_state_fraction": "0.5",
        "pack_weights": "yes",
        "task": "embeddings",
        "pooling": "cls",
        "normalize": "false",
        "max_batch_tokens": "512",
        "adapters": '{"sql": "someone/llama-sql"}',
    }
    field = ModelSettings.model_fields[name]
    text = examples.get(name) or {bool: "true", dict[str, Any]: "{}"}.get(field.annotation, "7")
    variable = ENVIRONMENT_PREFIX + name.upper()
    loaded = load_settings({} if name == "huggingface_model" else MODEL, {variable: text})
    assert loaded.sources[name] == variable


def test_other_environment_variables_are_ignored() -> None:
    others = {"HF_TOKEN": "hf_secret", "PATH": "/bin", "hf_triton_dtype": "x", "HF_TRITON_SERVER": "localhost:8001"}
    assert load(others).settings == load().settings


@pytest.mark.parametrize("name", sorted(TRITON_SETTINGS))
def test_triton_parameters_are_ignored(name: str) -> None:
    assert load(**{name: "yes"}).settings == load().settings


FORMER = [
    ("share_prefixes", "enable_prefix_caching", "false", False),
    ("max_batch_rows", "max_num_seqs", "4", 4),
    ("engine", "engine", "rolling", "continuous"),
]


@pytest.mark.parametrize(("old", "name", "text", "value"), FORMER)
def test_former_names_and_values_are_accepted(old: str, name: str, text: str, value: object) -> None:
    variable = ENVIRONMENT_PREFIX + old.upper()
    config, environment = load(**{old: text}), load({variable: text})
    assert getattr(config.settings, name) == getattr(environment.settings, name) == value
    assert config.sources[name] == ("config.pbtxt" if old == name else f"config.pbtxt: {old}")
    assert environment.sources[name] == variable
    assert f"{name} = {value} (" in config.describe()


def test_config_pbtxt_comes_first_under_a_former_name_too() -> None:
    assert load({"HF_TRITON_MAX_NUM_SEQS": "8"}, max_batch_rows="4").settings.max_num_seqs == 4
    assert load({"HF_TRITON_MAX_BATCH_ROWS": "8"}, max_num_seqs="4").settings.max_num_seqs == 4


def test_a_former_and_a_new_name_together_are_rejected() -> None:
    words = "max_batch_rows and max_num_seqs, which are one setting: keep the new name max_num_seqs"
    assert rejection(max_batch_rows="4", max_num_seqs="4") == f"config.pbtxt has both {words}"
    variables = {"HF_TRITON_MAX_BATCH_ROWS": "4", "HF_TRITON_MAX_NUM_SEQS": "4"}
    assert rejection(variables).startswith("the environment has both HF_TRITON_MAX_BATCH_ROWS and HF_TRITON_MAX_NUM")


def test_a_bad_value_under_a_former_name_names_both() -> None:
    assert rejection(max_batch_rows="0").startswith("max_num_seqs must be an integer >= 1 and <= 4096, got '0'")
    assert rejection(max_batch_rows="0").endswith("(from config.pbtxt: max_batch_rows)")


def test_a_subclass_cannot_declare_a_former_name() -> None:
    class Mine(ModelSettings):
        max_batch_rows: int = 8

    with pytest.raises(SettingsError, match="Mine declares max_batch_rows, which is max_num_seqs now: rename it"):
        load_settings(MODEL, {}, Mine)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("trust_remote_code", "true", True),
        ("trust_remote_code", "False", False),
        ("allow_pickle", "1", True),
        ("max_output_length", "64", 64),
        ("max_output_length", " 64 ", 64),
        ("download_timeout_s", "1.5", 1.5),
        ("max_context_length", "2048", 2048),
        ("quantization_config", '{"quant_method": "bitsandbytes"}', {"quant_method": "bitsandbytes"}),
        ("quantization_config", "", {}),
        ("generation_defaults", '{"temperature": 0.7, "n": 2}', {"temperature": 0.7, "n": 2}),
        ("huggingface_model", "./weights", "./weights"),
    ],
)
def test_strings_are_parsed_by_the_type_of_the_setting(name: str, text: str, value: object) -> None:
    assert getattr(load(**{name: text}).settings, name) == value


def test_a_task_has_the_model_of_transformers_pipeline() -> None:
    loaded = load_settings({"task": "text-classification"}, {})
    name, revision = DEFAULT_MODELS["text-classification"]
    assert (loaded.settings.huggingface_model, loaded.settings.revision) == (name, revision)
    assert f"huggingface_model = {name} (transformers' default for text-classification)" in loaded.describe()
    own = load_settings({"task": "text-classification", "huggingface_model": "a/b"}, {}).settings
    assert (own.huggingface_model, own.revision) == ("a/b", "main")
    for without in ({}, {"task": "embeddings"}):
        with pytest.raises(SettingsError, match="huggingface_model is required"):
            load_settings(without, {})


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "bits in other words": (
        {"weights": "4bit"},
        "weights must be one of `auto`, `int8`, `int4`, got '4bit', did you mean 'int4'? (from config.pbtxt)",
    ),
    "a typo": ({"dtpye": "float16"}, "there is no setting 'dtpye' (from config.pbtxt), did you mean 'dtype'?"),
    "no boolean": ({"allow_pickle": "maybe"}, "allow_pickle must be true or false, got 'maybe' (from config.pbtxt)"),
    "no number": (
        {"max_output_length": "many"},
        "max_output_length must be an integer >= 1 and <= 2147483647, got 'many'",
    ),
    "zero": ({"max_num_seqs": "0"}, "max_num_seqs must be an integer >= 1 and <= 4096, got '0' (from config.pbtxt)"),
    "no memory": ({"gpu_memory_fraction": "0"}, "gpu_memory_fraction must be a number > 0 and <= 1, got '0'"),
    "less memory than one text needs": ({"max_cache_tokens": "255"}, "max_cache_tokens must be an integer >= 256 and"),
    "not finite": ({"download_timeout_s": "inf"}, "download_timeout_s must be a number > 0 and <= 604800, got 'inf'"),
    "no choice": ({"dtype": "float64"}, "dtype must be one of `auto`, `float32`, `float16`, `bfloat16`, got 'float64'"),
    "no JSON": ({"quantization_config": "{4bit"}, "quantization_config must be a JSON object, got '{4bit'"),
    "an unknown default": (
        {"generation_defaults": '{"temprature": 1}'},
        "generation_defaults: there is no parameter 'temprature', did you mean 'temperature'? (from config.pbtxt)",
    ),
    "a default of how to answer": (
        {"generation_defaults": '{"return_timings": true}'},
        "; parameters of a whole request have no default here (from config.pbtxt)",
    ),
    "an impossible default": (
        {"generation_defaults": '{"top_p": 2}'},
        "generation_defaults: top_p must be a number > 0 and <= 1, got 2 (from config.pbtxt)",
    ),
    "dummy and quantized": (
        {"load_format": "dummy", "quantization_config": '{"quant_method": "x"}'},
        "quantization_config needs real weights: leave it out, or set load_format to auto",
    ),
    "two mistakes": ({"dtype": "x", "max_num_seqs": "0"}, "(from config.pbtxt); max_num_seqs must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_setting_is_rejected(case: str) -> None:
    parameters, words = REFUSED[case]
    assert words in rejection(**parameters)


def test_an_error_names_the_variable() -> None:
    assert rejection({"HF_TRITON_DTYPE": "int3"}).endswith("got 'int3' (from HF_TRITON_DTYPE)")


def test_two_variables_for_a_setting_that_differ_are_rejected() -> None:
    sentence = rejection({"HF_TRITON_DTYPE": "float16", "HF_TRITON_dtype": "float32"})
    assert "both HF_TRITON_DTYPE and HF_TRITON_dtype, which differ" in sentence
    assert load({"HF_TRITON_DTYPE": "float16", "HF_TRITON_dtype": "float16"}).settings.dtype == "float16"


def test_a_variable_close_to_a_setting_is_rejected() -> None:
    sentence = rejection({"HF_TRITON_DTPYE": "float16"})
    assert "the environment variable HF_TRITON_DTPYE, did you mean 'HF_TRITON_DTYPE'?" in sentence


@pytest.mark.parametrize(
    "variable",
    [
        "HF_TRITON_PORT",
        "HF_TRITON_SERVICE_HOST",
        "HF_TRITON_SERVICE_PORT",
        "HF_TRITON_SERVICE_PORT_OPENAI",
        "HF_TRITON_PORT_9000_TCP",
        "HF_TRITON_PORT_9000_TCP_ADDR",
        "HF_TRITON_TASK_SERVICE_HOST",  # of a Service hf-triton-task
    ],
)
def test_variables_of_a_kubernetes_service_are_no_settings(variable: str) -> None:
    assert load({variable: "tcp://10.0.0.1:80"}) == load({})


def test_a_stream_door_knows_the_variables_of_models() -> None:
    with pytest.raises(SettingsError, match=r"HF_TRITON_DTPYE, did you mean 'HF_TRITON_DTYPE'\?"):
        load_settings({}, {"HF_TRITON_DTPYE": "float16"}, DoorSettings)


def test_a_missing_model_comes_with_the_line_to_add() -> None:
    with pytest.raises(SettingsError, match=r'add parameters \{ key: "huggingface_model" value'):
        load_settings({}, {})


@pytest.mark.parametrize("name", ["hf_token", "HF_TOKEN", "access_token", "api_key", "password", "private_repo_token"])
def test_a_secret_is_rejected_and_not_repeated(name: str) -> None:
    sentence = rejection(**{name: "hf_canary"})
    assert "would be shown to every client" in sentence
    assert "HF_TOKEN_PATH" in sentence
    assert "hf_canary" not in sentence


@pytest.mark.parametrize("name", ["max_new_tokens", "max_tokens", "temperature"])
def test_a_request_parameter_is_referred_to_generation_defaults(name: str) -> None:
    sentence = rejection(**{name: "256"})
    assert f"'{name}' (from config.pbtxt) is a request parameter, not a setting" in sentence
    [line] = re.findall(r"parameters \{.*\}", sentence)
    config = text_format.Parse(line.replace("...", "1"), model_config_pb2.ModelConfig())
    assert load(**{key: value.string_value for key, value in config.parameters.items()})
    with pytest.raises(SettingsError, match=rf"""--set 'generation_defaults={{"{name}": ...}}'$"""):
        load_settings({name: "256"}, {}, ModelSettings, "the command line")


def test_a_graph_takes_no_adapters() -> None:
    sentence = rejection(runtime="onnx", adapters='{"law": "./law"}')
    assert "runtime onnx computes a graph, which takes no adapters: set runtime to torch" in sentence


def test_an_error_for_a_long_value_is_short() -> None:
    assert len(rejection(dtype="x" * 100_000)) < 300


# --- the declarations ------------------------------------------------------------------------------------------------


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().settings.dtype = "float16"


def test_the_defaults_are_valid_and_safe() -> None:
    settings = load().settings
    assert ModelSettings.model_validate(json.loads(settings.model_dump_json())) == settings
    assert not settings.trust_remote_code
    assert not settings.allow_pickle
    assert not settings.allow_extra_weights


def test_a_subclass_adds_settings_of_its_own() -> None:
    class Mine(ModelSettings):
        greeting: str = "hello"
        """What to say first."""

    assert load_settings(MODEL, {"HF_TRITON_GREETING": "hi"}, Mine).settings.model_dump()["greeting"] == "hi"
    with pytest.raises(SettingsError, match="did you mean 'greeting'"):
        load_settings(MODEL | {"greetin": "hi"}, {}, Mine)


def test_an_empty_variable_is_not_set() -> None:
    assert load({"HF_TRITON_TOKENIZER": " "}).sources["tokenizer"] == "default"


@pytest.mark.parametrize("text", ["[" * 20_000, "9" * 5_000], ids=["deep", "long"])
def test_json_that_python_cannot_parse_is_rejected(text: str) -> None:
    with pytest.raises(SettingsError, match="generation_defaults must be a JSON object"):
        load_settings({**MODEL, "generation_defaults": text}, {})


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("huggingface.co/Qwen/Qwen3-0.6B/", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/c1899de/onnx", "Qwen/Qwen3-0.6B@c1899de"),
        ("https://huggingface.co/a/b-GGUF/blob/main/b-Q8_0.gguf?download=true", "a/b-GGUF:b-Q8_0.gguf"),
        ("hf.co/a/b-GGUF:Q4_K_M", "a/b-GGUF:Q4_K_M"),
        ("https://huggingface.co/datasets/a/b", "https://huggingface.co/datasets/a/b"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ],
)
def test_the_address_of_a_page_names_its_model(model: str, name: str) -> None:
    assert hub_name(model) == name


def test_a_folder_may_name_a_model_by_its_page() -> None:
    page = "https://huggingface.co/Qwen/Qwen3-0.6B"
    assert load_settings({"huggingface_model": page}, {}).settings.huggingface_model == "Qwen/Qwen3-0.6B"
    with pytest.raises(SettingsError, match=r"must be Qwen/Qwen3-0.6B alone, got .*: set revision or gguf_file"):
        load_settings({"huggingface_model": f"{page}/tree/c1899de"}, {})


def test_a_misspelt_task_has_a_near_one_and_an_own_task_a_hint() -> None:
    with pytest.raises(SettingsError, match=r"task has no value 'text-generatoin', did you mean 'text-generation'\?"):
        load_settings({"huggingface_model": "a/b", "task": "text-generatoin"}, {})
    with pytest.raises(SettingsError, match=r"a folder whose 1/model.py has a task_class sets no task"):
        load_settings({"huggingface_model": "a/b", "task": "similarity"}, {})


@pytest.mark.parametrize("settings_class", [dict, "Settings", None, object()])
def test_what_is_no_class_of_settings_is_refused(settings_class: Any) -> None:
    with pytest.raises(SettingsError, match=r"settings_class of 1/model.py must be a subclass of"):
        load_settings({"huggingface_model": "a/b"}, {}, settings_class)
