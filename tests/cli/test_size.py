# SPDX-License-Identifier: Apache-2.0
"""`hf-triton size`: figures of checkpoints on disk and on the Hub are those of a load; no weights are fetched."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file

from hf_triton.engine.choose import build_engine
from hf_triton.engine.options import EngineOptions
from hf_triton.folders.cards import CARDS
from hf_triton.hub.pretrained import load_config, load_model
from hf_triton.runner.gpu_memory import weight_bytes
from hf_triton.settings import ModelSettings
from hf_triton.testing import LoopbackHub, build_tiny_checkpoint, build_tiny_encoder
from hf_triton_cli.commands import main
from tests.support.commands import in_process
from tests.support.gguf import write_gguf
from tests.support.paths import ROOT

NAME, SHARDED, GGUF, QUANTISED = "acme/tiny", "acme/sharded", "acme/tiny-gguf", "acme/tiny-gptq"
KINDS = {"llama": "auto", "falcon": "float32", "gemma2": "float16", "qwen3_5": "auto", "mamba": "float32"}
"""And the dtypes that they are loaded in."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", dtype="bfloat16")


def run(*arguments: object) -> Result:
    return in_process("size", *arguments)


def sizes(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


def loaded(checkpoint: Path, **given: Any) -> Any:
    settings = ModelSettings(huggingface_model=str(checkpoint), **given)
    return load_model(checkpoint, load_config(checkpoint, settings), settings, {"": "cpu"})


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", KINDS)
def test_figures_are_those_of_a_load(architecture: str, tmp_path: Path) -> None:
    dtype = KINDS[architecture]
    checkpoint = build_tiny_checkpoint(tmp_path / architecture, architecture, dtype="bfloat16")
    found = sizes(checkpoint, "--dtype", dtype, "--context", 100, "--concurrency", 3)
    model = loaded(checkpoint, dtype=dtype)
    assert found["weights_bytes"] == pytest.approx(sum(weight_bytes(model).values()), rel=0.01)
    engine: Any = build_engine(
        model,
        "continuous",
        EngineOptions(
            max_num_seqs=3,
            max_cache_tokens=found["settings"].get("max_cache_tokens"),
            context_length=found["settings"]["max_context_length"],
        ),
    )
    try:
        engine.runner.run_token()
        per_token = sum(each.bytes_per_token for each in engine.runner.cache.blocks())
        if per_token:
            assert engine.memory.has_room(3 * engine.memory.num_blocks(100), 3)
            assert not engine.memory.has_room(3 * engine.memory.num_blocks(100) + 1, 3)
    finally:
        engine.close()
    assert found["kv_cache_bytes_per_token"] == per_token
    assert found.get("state_bytes_per_sequence", 0) == found["sequence_bytes"] - 128 * (per_token or 8)


def rewrite(folder: Path, *, drop: str = "", **tensors: torch.Tensor) -> Path:
    """Add tensors to a checkpoint, and drop a field of its config."""
    config = json.loads((folder / "config.json").read_text())
    config.pop(drop, None)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


def test_a_tied_head_is_loaded_once(tmp_path: Path) -> None:
    """Files of real checkpoints have it twice, as those of Qwen3-0.6B."""
    folder = build_tiny_checkpoint(tmp_path / "llama", "llama", tie_word_embeddings=True)
    before = sizes(folder)["weights_bytes"]
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, **{"lm_head.weight": embeddings.clone()})
    assert sizes(folder)["weights_bytes"] == before
    assert before == pytest.approx(sum(weight_bytes(loaded(folder)).values()), rel=0.01)


def test_a_head_that_is_not_loaded_is_not_counted(tmp_path: Path) -> None:
    encoder = build_tiny_encoder(tmp_path / "bert", "embeddings")
    before = sizes(encoder)["weights_bytes"]
    rewrite(encoder, **{"cls.seq_relationship.weight": torch.zeros(2000, 64)})
    assert sizes(encoder)["weights_bytes"] == before


def test_a_config_without_a_dtype_has_that_of_the_files(checkpoint: Path, tmp_path: Path) -> None:
    folder = rewrite(build_tiny_checkpoint(tmp_path / "llama", "llama", dtype="bfloat16"), drop="dtype")
    assert loaded(folder).dtype == torch.bfloat16
    assert sizes(folder, "--gpu=h100") == sizes(checkpoint, "--gpu=h100") | {"model": str(folder)}


def test_sequences_and_a_card_have_replicas(checkpoint: Path) -> None:
    found = sizes(checkpoint, "--gpu=H100", "--context=128", "--concurrency=5000000")
    per_token = 2 * 2 * 2 * 16 * 2
    assert found["kv_cache_bytes_per_token"] == per_token
    room = int(80e9 * 0.9) - found["weights_bytes"]
    assert found["max_sequences"] == room // per_token // 128
    running = min(found["max_sequences"], 4096)  # the setting's bound
    assert found["replicas_for_concurrency"] == -(-5_000_000 // running)
    assert found["settings"]["max_num_seqs"] <= 4096


def test_a_table_says_where_figures_come_from(checkpoint: Path) -> None:
    lines = [line.split("\t") for line in run(checkpoint, "--gpu=l4").stdout.splitlines()]
    assert lines[0] == ["figure", "value", "from"]
    sources = {line[0]: line[2] for line in lines if len(line) == 3}
    assert sources["memory_bytes"] == "l4: NVIDIA L4 data sheet"
    assert sources["max_sequences"] == "of 256 tokens at a time"


NOTES: dict[str, tuple[tuple[str, ...], str]] = {
    "the batch engine": (("--set", "engine=batch"), "Its keys and values are those of transformers' generate"),
    "quantised at load": (
        ("--gpu=t4", "--set", 'quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": true}'),
        "The weights are those before quantization_config quantises them.",
    ),
    "little": (("--gpu=t4", "--set", "gpu_memory_fraction=0.00001"), "Not one such sequence fits"),
}


@pytest.mark.parametrize("case", NOTES)
def test_what_is_not_known_is_said(case: str, checkpoint: Path) -> None:
    arguments, sentence = NOTES[case]
    assert sentence in " ".join(sizes(checkpoint, *arguments)["notes"])


@pytest.mark.full
def test_a_model_that_is_too_large_needs_several_cards(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "max_position_embeddings": 131072,
                "dtype": "bfloat16",
            }
        )
    )
    found = sizes(tmp_path, "--gpu=h100", "--context=8192")
    assert found["weights_bytes"] == pytest.approx(141e9, rel=0.01)
    assert found["kv_cache_bytes_per_token"] == 80 * 2 * 8 * 128 * 2
    assert found["max_sequences"] == 0
    assert "at least 2 of these for one model" in found["notes"][0]


def test_ranks_have_their_parts(checkpoint: Path) -> None:
    whole, parts = sizes(checkpoint, "--gpu=l4"), sizes(checkpoint, "--gpu=l4", "--gpus=2")
    assert parts["weights_bytes"] == whole["weights_bytes"]
    assert 0.5 <= parts["weights_bytes_per_rank"] / whole["weights_bytes"] < 0.6
    assert parts["kv_cache_bytes_per_token"] * 2 == whole["kv_cache_bytes_per_token"]
    assert sizes(checkpoint, "--gpu=l4", "--set", "tensor_parallel_size=2") == parts
    assert parts["settings"]["tensor_parallel_size"] == 2
    assert sizes(checkpoint, "--gpus=2")["memory_bytes"] < 0.7 * sizes(checkpoint)["memory_bytes"]  # which they share
    assert "cannot be divided by 3" in run(checkpoint, "--gpu=l4", "--gpus=3").stderr


def test_a_model_folder_has_its_settings(checkpoint: Path, tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    folder = make_folder(
        tmp_path, "mine", huggingface_model=checkpoint, max_num_seqs=7, max_context_length=64, max_cache_tokens=256
    )
    found = sizes(folder)
    assert found["max_sequences"] == 4
    assert found["replicas_for_concurrency"] == 2
    assert found["settings"] == {"max_num_seqs": 4, "max_context_length": 64, "max_cache_tokens": 256}
    assert sizes(folder, "--dtype=float32")["weights_bytes"] == 2 * found["weights_bytes"]


def test_an_encoder_has_no_cache(tmp_path: Path) -> None:
    encoder = build_tiny_encoder(tmp_path / "bert", "embeddings")
    found = sizes(encoder, "--gpu=l4", "--dtype=float16")
    assert "max_sequences" not in found
    assert found["activation_bytes"] == 16384 * (4 * 64 + 2 * 128) * 2
    assert found["estimates"].keys() == {"activation_bytes"}
    assert "up to 4096 inputs (max_waiting_prompts)" in found["notes"][0]


def test_an_encoder_decoder_keeps_what_generate_keeps(tmp_path: Path) -> None:
    found = sizes(build_tiny_checkpoint(tmp_path / "t5", "t5"), "--gpu=l4")
    assert "max_num_seqs (256) sequences" in found["notes"][0]


@pytest.mark.full
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_gguf_file_keeps_its_bits_on_a_cpu_alone(is_tied: bool, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "Tiny-Q8_0.gguf", tie_word_embeddings=is_tied)
    model = loaded(tmp_path, gguf_file=file.name)
    own = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    assert sizes(file, "--gpu=cpu")["weights_bytes"] == pytest.approx(own, rel=0.01)
    wide = loaded(tmp_path, gguf_file=file.name, dtype="float32")
    found = sizes(file, "--gpu=l4")
    assert found["weights_bytes"] == pytest.approx(sum(weight_bytes(wide).values()), rel=0.01)
    assert found["weights_bytes"] > file.stat().st_size


# --- on the Hub -------------------------------------------------------------------------------------------------------


def quantise(folder: Path) -> Path:
    """Make a checkpoint's linear layers look like those of GPTQ."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors.pop(name).shape
        own = name.removesuffix(".weight")
        tensors[f"{own}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        tensors[f"{own}.scales"] = torch.zeros(columns // 32, rows, dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[LoopbackHub]:
    """Breaks off what is longer than the headers."""
    root = tmp_path_factory.mktemp("hub")
    sharded = build_tiny_checkpoint(root / "sharded", "llama", dtype="bfloat16")
    model = loaded(sharded)
    (sharded / "model.safetensors").unlink()
    model.save_pretrained(sharded, max_shard_size="50KB")
    (root / "gguf").mkdir()
    write_gguf(root / "gguf" / "Tiny-Q8_0.gguf")
    write_gguf(root / "gguf" / "Tiny-F16.gguf", quant="F16")
    with LoopbackHub() as hub:
        hub.add(NAME, checkpoint)
        hub.add(SHARDED, sharded)
        hub.add(GGUF, root / "gguf")
        hub.add(QUANTISED, quantise(build_tiny_checkpoint(root / "gptq", "llama", dtype="float16")))
        hub.checkpoints = {NAME: checkpoint, SHARDED: sharded, QUANTISED: root / "gptq"}  # type: ignore[attr-defined]
        yield hub


@pytest.fixture
def on_hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LoopbackHub:
    for name, value in (hub.environment() | {"HF_HOME": str(tmp_path / "home")}).items():
        monkeypatch.setenv(name, value)
    hub.heal()
    hub.requests.clear()
    return hub


@pytest.mark.full
@pytest.mark.parametrize("name", [NAME, SHARDED, QUANTISED])
def test_of_the_hub_come_headers_and_no_weights(name: str, on_hub: LoopbackHub, tmp_path: Path) -> None:
    checkpoint: Path = on_hub.checkpoints[name]  # type: ignore[attr-defined]
    options = ("--gpu=l4", "--context=128", "--concurrency=9")
    expected = sizes(checkpoint, *options)
    header = max(8 + struct.unpack("<Q", file.read_bytes()[:8])[0] for file in checkpoint.glob("*.safetensors"))
    assert header < max(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    on_hub.truncate("model-0" if name == SHARDED else "model.safetensors", after_bytes=header)
    found = sizes(name, *options)
    assert {**found, "model": ""} == {**expected, "model": ""}
    files = {request.path.rpartition("/")[2].partition("?")[0] for request in on_hub.requests}
    assert "config.json" in files
    assert not files & {"tokenizer.json", "tokenizer_config.json"}
    assert not list((tmp_path / "home").rglob("*.safetensors")), "the cache must not have files with holes"


def test_of_a_gguf_file_comes_the_header(on_hub: LoopbackHub) -> None:
    found = {quant: sizes(f"{GGUF}:{quant}", "--gpu=l4") for quant in ("Q8_0", "F16")}
    assert found["Q8_0"]["weights_bytes"] == found["F16"]["weights_bytes"]
    assert "Q8_0" in on_hub.requests[-1].path or "F16" in on_hub.requests[-1].path


def test_what_a_cache_has_needs_no_hub(on_hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sizes(NAME, "--gpu=l4")
    assert in_process("pull", NAME).exit_code == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    on_hub.requests.clear()
    assert sizes(NAME, "--gpu=l4") == before
    assert on_hub.requests == []


# --- wrong use --------------------------------------------------------------------------------------------------------

CHECKPOINT = "CHECKPOINT"
WRONG: dict[str, tuple[list[str], int, str]] = {
    "an unknown card": (["demo", "--gpu=h1000"], 2, "no card 'h1000', did you mean h100; known are cpu, t4, l4"),
    "no folder": (["./nowhere"], 3, "there is no folder './nowhere'"),
    "not on the Hub": (["nobody/nothing"], 3, "there is no model nobody/nothing at "),
    "no such revision": ([f"{NAME}@v9"], 3, "has no revision 'v9'"),
    "several GGUF files": ([GGUF], 1, "name one by its quantisation"),
    "no such GGUF file": ([f"{GGUF}:Q2_K"], 1, "no GGUF file has the name or quantisation 'Q2_K'"),
    "a longer context": (
        [CHECKPOINT, "--context=257"],
        2,
        "--context must be <= 256, the model's own context, got 257",
    ),
    "too many tokens": (["HUGE"], 1, "the model"),
    "no sequences": ([CHECKPOINT, "--concurrency=0"], 2, "0 is not in the range x>=1"),
    "a dtype twice": (
        [CHECKPOINT, "--dtype=float16", "--set", "dtype=float16"],
        2,
        "given twice, by --dtype and by --set",
    ),
    "an unknown setting": ([CHECKPOINT, "--set", "dtipe=x"], 2, "there is no setting 'dtipe'"),
    "another task": ([CHECKPOINT, "--set", "task=fill-mask"], 1, "the folder's task needs a model ForMaskedLM"),
    "a model repository": (["REPOSITORY"], 2, "is a model repository: name one of its folders"),
    "a stream door": (["DOOR"], 2, "is a stream door, which has no model"),
    "damaged weights": (["DAMAGED"], 1, "model.safetensors is no safetensors file, or half of one"),
    "no config": (["EMPTY"], 1, "has no config.json"),
    "a wrong config": (["WRONG"], 1, "config.json"),
    "images alone": (["CLIP"], 1, "CLIPConfig is not one of the models of transformers' AutoModelForCausalLM"),
    "impossible sizes": (["IMPOSSIBLE"], 1, "cannot be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_has_a_sentence_and_an_exit_code(
    case: str,
    on_hub: LoopbackHub,
    checkpoint: Path,
    tmp_path: Path,
    make_folder: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments, code, sentence = WRONG[case]
    folder = make_folder(tmp_path / "repository", "mine", huggingface_model=checkpoint)
    door = make_folder(tmp_path / "doors", "mine_stream", config="model_transaction_policy { decoupled: true }")
    (door / "1" / "model.py").write_text(
        "import hf_triton\n\nclass TritonPythonModel(hf_triton.StreamDoor):\n    pass\n"
    )
    damaged, impossible = (build_tiny_checkpoint(tmp_path / name, "llama") for name in ("damaged", "impossible"))
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:3000])
    config = json.loads((impossible / "config.json").read_text())
    (impossible / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))
    for name in ("empty", "wrong", "huge", "clip"):
        (tmp_path / name).mkdir()
    (tmp_path / "clip" / "config.json").write_text('{"model_type": "clip"}')
    (tmp_path / "wrong" / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    (tmp_path / "huge" / "config.json").write_text(json.dumps(config | {"vocab_size": 10**18}))
    places = {
        "HUGE": tmp_path / "huge",
        CHECKPOINT: checkpoint,
        "REPOSITORY": folder.parent,
        "DOOR": door,
        "DAMAGED": damaged,
        "IMPOSSIBLE": impossible,
        "EMPTY": tmp_path / "empty",
        "WRONG": tmp_path / "wrong",
        "CLIP": tmp_path / "clip",
    }
    with pytest.raises(SystemExit) as ended:
        main(["size", *(str(places.get(word, word)) for word in arguments)])
    error = capsys.readouterr().err.splitlines()[-1]
    assert sentence in error
    assert error.startswith("error: ")
    assert ended.value.code == code


def test_cards_have_a_source_and_plausible_figures() -> None:
    for card in CARDS.values():
        assert "NVIDIA" in card.source
        assert 10 < card.memory_gb < 300


# --- the documents ------------------------------------------------------------------------------------------------

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
"""As published."""


def test_the_documented_command_prints_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    command, *shown = text.partition("$ hf-triton size ")[2].partition("```")[0].strip().splitlines()
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    monkeypatch.chdir(tmp_path)
    printed = [" ".join(line.split()) for line in run(*command.split()).stdout.splitlines()[1:]]
    assert len(printed) == len(shown)
    for line, expected in zip(printed, shown, strict=True):
        assert line.startswith(" ".join(expected.split()))
