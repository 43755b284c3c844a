# SPDX-License-Identifier: Apache-2.0
"""The setting `weights`: layers of 8 and 4 bits compute with exactly the weights that they say, loaded one by one."""

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_triton.errors import CheckpointError, SettingsError
from hf_triton.hub.pretrained import check_small_weights, load_config, load_model
from hf_triton.runner.cpu import accelerate
from hf_triton.runner.cpu.grouped_linear import ROUNDING, GroupedEmbedding, GroupedLinear
from hf_triton.runner.cpu.small_weights import make_small, round_weight, small_bytes
from hf_triton.runner.float32 import in_float32
from hf_triton.runner.lora.model_adapters import Adapters
from hf_triton.runner.way_probe import WAYS, find_way
from hf_triton.sampling.params import SamplingParams
from hf_triton.settings import ModelSettings
from hf_triton.testing import build_tiny_checkpoint
from tests.support.adapters import save_adapter
from tests.support.architectures import BASE, BATCH, CONTINUOUS, WHOLE, build
from tests.support.engine import Client, PrefixHits, check, start_engine, token_ids
from tests.support.engine import prompts as make_prompts
from tests.support.marks import full

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 200, 300, 11]])
REFUSED: dict[str, tuple[dict[str, Any], str | None, bool, str]] = {
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, None, True, "is quantised: leave it out, or name"),
    "encoder": ({}, "AutoModel", True, "is for language models .*: leave it out"),
    "encoder-decoder": ({"is_encoder_decoder": True}, None, True, "is for language models .*: leave it out"),
    "GPU": ({}, None, False, "is for CPUs: set KIND_CPU"),
}


def load(folder: Path, weights: str, **settings: Any) -> Any:
    own = ModelSettings(huggingface_model=str(folder), weights=weights, **settings)
    return load_model(folder, load_config(folder, own), own, {"": "cpu"}).eval()


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits.float()  # type: ignore[no-any-return]


def apart(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float(((expected - found).abs().amax(-1) / expected.abs().amax(-1)).max())


def widen(model: Any) -> Any:
    """The same model with plain layers of the weights that small ones compute with."""
    for name, layer in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if isinstance(layer, GroupedLinear) and own != "rows":
            plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            plain.load_state_dict({"weight": layer.widened()} | ({} if layer.bias is None else {"bias": layer.bias}))
            setattr(model.get_submodule(parent), own, plain)
        elif isinstance(layer, GroupedEmbedding):
            model.set_input_embeddings(nn.Embedding.from_pretrained(layer.rows.widened()))
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("small") / "llama", "llama", eos_token_id=None)


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "levels"), [(8, 254), (4, 15)])
def test_a_weight_is_at_most_half_a_step_from_its_own(bits: int, levels: int, dtype: torch.dtype) -> None:
    weight = torch.randn(130, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight[0], weight[1] = 0, 3.5  # groups without any range
    weight[2, 40] = 90.0
    layer = round_weight(weight, bits)
    assert layer is not None
    assert layer.num_bytes <= 160 * 256 * (0.6251 if bits == 4 else 1.0626)
    groups = weight.float().view(130, -1, 32)
    low, high = groups.aminmax(dim=-1)
    largest = groups.abs().amax(-1)
    steps = (high - low) / levels if bits == 4 else 2 * largest / levels
    errors = (layer.widened() - weight.float()).view_as(groups).abs().amax(-1)
    # scale and minimum have 11 bits, so that the end of a range may lie out of reach
    assert bool((errors <= 0.5 * steps + 2 * largest * 2**-11 + 1e-7).all())


@pytest.mark.parametrize(("size", "largest"), [(1.0, 1e30), (1e-6, 1e-6)])
def test_half_precision_has_no_scale_for_huge_and_tiny_numbers(size: float, largest: float) -> None:
    weight = torch.linspace(-size, size, 1024).view(32, 32)
    weight[3, 4] = largest
    assert (round_weight(weight, 8), round_weight(weight, 4)) == (None, None)


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "limit"), [("int8", 0.05), ("int4", 0.5)])
@pytest.mark.parametrize("architecture", ["llama", "falcon", "gpt2", "qwen3"])
def test_loaded_layers_are_small(architecture: str, weights: str, limit: float, tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path / "model", architecture, eos_token_id=None)
    plain, model = load(folder, "auto"), load(folder, weights)
    layers = [layer for layer in model.modules() if isinstance(layer, GroupedLinear)]
    assert (model.get_output_embeddings().bits, model.get_input_embeddings().rows.bits) == (8, 8)
    assert not [name for name, own in model.named_parameters() if own.ndim > 1 and "wpe" not in name]
    assert {layer.bits for layer in layers} == ({8} if weights == "int8" else {8, 4})
    assert not hasattr(model.config, "quantization_config")
    assert not hasattr(model, "hf_quantizer")
    with torch.device("meta"):
        empty = type(plain)(plain.config)
    assert small_bytes(empty, 8 if weights == "int8" else 4) == pytest.approx(model.get_memory_footprint(), rel=0.02)
    exact = logits(widen(load(folder, weights)))
    assert apart(exact, logits(model)) < 20 * ROUNDING
    with in_float32(model):
        assert apart(exact, logits(model)) < 1e-5
    assert apart(logits(plain), exact) < limit


def test_tied_embeddings_share_the_codes_of_the_head(tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path / "tied", "qwen2", eos_token_id=None, tie_word_embeddings=True)
    model = load(folder, "int4")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert embedding.rows is head
    assert torch.equal(embedding(TOKENS)[0], head.widened()[TOKENS[0]])


def test_scaled_embeddings_are_multiplied_as_before() -> None:
    """Gemma's are multiplied by the root of their size."""
    model = build(*CONTINUOUS["gemma3"])
    table, ids = model.get_input_embeddings().weight.detach().clone(), TOKENS % 90
    own = model.get_input_embeddings()(ids).detach()
    make_small(model, 8)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, GroupedEmbedding)
    assert apart(own, embedding(ids)) < 0.01
    assert apart(table, embedding.rows.widened()) < 0.01


def test_layers_that_do_not_fit_stay_plain_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = build("LlamaConfig", BASE | {"intermediate_size": 100})
    caplog.set_level("INFO")
    make_small(model, 4)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp.up_proj, GroupedLinear)
    assert type(mlp.down_proj) is nn.Linear
    assert "stay plain (model.layers.0.mlp.down_proj, " in caplog.text


OWN_WEIGHTS = ("lm_head", "out_proj", "dt_proj", "weights_proj", "embed_tokens")


@pytest.mark.parametrize("name", ["mamba2", "jamba", "deepseek-v3.2", "gemma4"])
def test_layers_whose_weights_the_model_reads_stay_plain(name: str) -> None:
    sizes = {"mamba_dt_rank": 32} if name == "jamba" else {}
    config_name, arguments = (CONTINUOUS | WHOLE | BATCH)[name]
    model = build(config_name, arguments | sizes)
    expected = own_logits(model)
    make_small(model, 8)
    assert [layer for layer in model.modules() if isinstance(layer, GroupedLinear)]
    kinds = nn.Linear | nn.Embedding
    plain = {own.rpartition(".")[2] for own, layer in model.named_modules() if isinstance(layer, kinds)}
    assert plain & {*OWN_WEIGHTS}
    assert apart(expected, own_logits(model)) < 0.1


@torch.inference_mode()
def own_logits(model: Any) -> torch.Tensor:
    return model(TOKENS % 90).logits.float()  # type: ignore[no-any-return]


def test_a_head_is_tied_as_the_whole_models_config_says() -> None:
    """That of the language model inside may say something else."""
    model = build(*CONTINUOUS["mistral3-with-images"])
    assert model.config.tie_word_embeddings != model.config.text_config.tie_word_embeddings
    predicted = small_bytes(model, 8)
    make_small(model, 8)
    assert model.get_input_embeddings().rows is model.get_output_embeddings()
    assert predicted == pytest.approx(model.get_memory_footprint(), rel=0.02)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_keep_them_is_refused(name: str, checkpoint: Path) -> None:
    changes, auto_class, is_on_cpu, sentence = REFUSED[name]
    settings = ModelSettings(huggingface_model=str(checkpoint), weights="int8")
    config = load_config(checkpoint, settings)
    config.update(changes)
    with pytest.raises(SettingsError, match=rf"the setting weights \(int8\) .*{sentence}"):
        check_small_weights(checkpoint, config, settings, auto_class, is_on_cpu=is_on_cpu)


def test_a_load_onto_another_device_is_refused(checkpoint: Path) -> None:
    settings = ModelSettings(huggingface_model=str(checkpoint), weights="int8")
    with pytest.raises(SettingsError, match="is for CPUs"):
        load_model(checkpoint, load_config(checkpoint, settings), settings, {"": 0})


@pytest.mark.parametrize("other", [{"quantization_config": {"quant_method": "fp8"}}, {"gguf_file": "a.gguf"}])
def test_two_quantisations_contradict_each_other(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave out quantization_config, gguf_file and runtime, or weights"):
        ModelSettings(huggingface_model="someone/model", weights="int4", **other)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_broken_weights_are_refused(number: float, weights: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = build_tiny_checkpoint(tmp_path / "broken", "llama", eos_token_id=None)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = number
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"NaN or infinite numbers in model\.layers\.1\.mlp\.up_proj"):
        load(folder, weights)


MEASURE = """
import resource, sys, torch
from pathlib import Path
from hf_triton.hub.pretrained import check_small_weights, load_config, load_model
from hf_triton.settings import ModelSettings
small, large = (Path(each) for each in sys.argv[1:])
def load(folder, weights):
    settings = ModelSettings(huggingface_model=str(folder), weights=weights, dtype="float32")
    return load_model(folder, load_config(folder, settings), settings, {"": "cpu"})
def status(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10
load(small, "int4")  # imports, and torch's own memory
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model = load(large, "int4")
print(status("VmHWM") - before, model.get_memory_footprint())
"""


@pytest.mark.full
def test_a_load_takes_the_file_and_the_small_weights(tmp_path: Path) -> None:
    """A file of bfloat16 is mapped; in float32, as which it is loaded, the model would take twice that beside it."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    options: Any = {"dtype": "bfloat16", "eos_token_id": None}
    large = build_tiny_checkpoint(tmp_path / "large", "llama", **sizes, num_hidden_layers=4, **options)
    small = build_tiny_checkpoint(tmp_path / "small", "llama", **sizes, num_hidden_layers=1, **options)
    file_bytes = (large / "model.safetensors").stat().st_size
    assert file_bytes > 32 << 20
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, large], capture_output=True, text=True, timeout=120, check=True
    )
    peak, footprint = map(int, done.stdout.split())
    assert footprint < 0.36 * file_bytes
    assert peak < file_bytes + footprint + (28 << 20)
    assert peak < 2.5 * file_bytes  # in float32 alone the model takes twice its file, beside it


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trial_takes_the_fastest_way(weights: str, dtype: str, checkpoint: Path) -> None:
    finding = find_way(load(checkpoint, weights, dtype=dtype))
    assert finding.way == WAYS[0], finding.obstacle


@pytest.mark.parametrize("weights", ["int4", *full("int8")])
def test_text_in_company_is_that_of_generate(weights: str, checkpoint: Path) -> None:
    """Greedy and seeded, in a cache of a few sequences, and behind a prefix that others have computed."""
    model, observer = load(checkpoint, weights), PrefixHits()
    shared = make_prompts(1, seed=9, longest=60)[0] * 100
    prompts = make_prompts(12, seed=4) + [shared[:130] + each for each in make_prompts(4, seed=5, longest=20)]
    with closing(
        start_engine(model, max_num_seqs=5, context_length=256, max_cache_tokens=512, observer=observer)
    ) as engine:
        client = Client(engine)
        check(model, client, [(prompt, SamplingParams(16)) for prompt in prompts])
        drawn = SamplingParams(16, do_sample=True, temperature=1.5, seed=7)
        alone = [token_ids(client.ask(prompt, drawn)) for prompt in prompts]
        for prompt in prompts:
            client.submit(prompt, drawn)
        assert [token_ids(outcome) for outcome in client.outcomes()[-len(prompts) :]] == alone
    assert sum(observer.counts) >= 128


def test_the_log_says_how_fast_they_are(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(checkpoint, "int4")
    caplog.set_level("INFO")
    accelerate(model)
    assert re.search(r"small weights are [\d.]+ times .* for 1 row and [\d.]+ times for 64 rows", caplog.text)
    caplog.clear()
    accelerate(model, pack_weights=False)
    accelerate(load(checkpoint, "auto"))
    assert "small weights" not in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_an_adapter_adds_to_a_small_layer(weights: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = save_adapter(checkpoint, tmp_path / "adapter", seed=3, r=2, target_modules="all-linear")
    model, plain = load(checkpoint, weights), widen(load(checkpoint, weights))
    without = logits(plain)
    adapters, reference = Adapters(model), Adapters(plain)
    adapter, other = adapters.load(folder), reference.load(folder)
    with adapters.choose([adapter]), reference.choose([other]):
        own, expected = logits(model), logits(plain)
    assert apart(expected, own) < 20 * ROUNDING
    assert apart(without, own) > 1e-2
    with adapters.choose([None]):
        assert apart(without, logits(model)) < 20 * ROUNDING


@pytest.mark.full
def test_an_adapter_that_replaces_a_small_layer_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = save_adapter(checkpoint, tmp_path / "adapter", seed=5, modules_to_save=["lm_head"])
    with pytest.raises(CheckpointError, match="lm_head"):
        Adapters(load(checkpoint, "int8")).load(folder)
