# SPDX-License-Identifier: Apache-2.0
"""Models of GGUF files are those that transformers itself reads from them; what it cannot read is refused by name."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_triton.engine.continuous import ContinuousBatchingEngine
from hf_triton.errors import CheckpointError
from hf_triton.hub.checkpoint import Checkpoint, Placement, load_checkpoint
from hf_triton.hub.gguf_header import check_gguf
from hf_triton.hub.locate import Hub
from hf_triton.runner.lora.model_adapters import Adapters
from hf_triton.sampling.params import SamplingParams
from hf_triton.settings import ModelSettings
from hf_triton.tasks.interface import model_info
from tests.support.adapters import save_adapter
from tests.support.engine import Client, check, prompts, start_engine, token_ids
from tests.support.gguf import TEMPLATE, write_gguf
from tests.support.marks import full

PROMPT = "Where does the river go?"


def load(folder: Path, auto_class: str | None = None, **settings: Any) -> Checkpoint:
    chosen = ModelSettings(huggingface_model=str(folder), **settings)
    return load_checkpoint(Hub(folder, chosen, os.environ), chosen, Placement("CPU", 0), auto_class)


def completion(model: Any, tokenizer: Any) -> list[int]:
    ids = tokenizer(PROMPT, return_tensors="pt")
    return list(model.generate(**ids, max_new_tokens=12, do_sample=False)[0].tolist())


@pytest.mark.parametrize("quant", ["F32", "Q4_0", *full("F16", "Q8_0")])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_model_is_that_of_transformers(architecture: str, quant: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "served" / f"Tiny-{quant}.gguf", architecture, quant)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = load(file.parent, gguf_file=quant)
    assert completion(loaded.model, loaded.tokenizer) == completion(model, tokenizer)
    assert loaded.tokenizer.chat_template == TEMPLATE
    assert loaded.context_length == 256
    if quant == "F32":  # and the file is what the original was
        original: Any = AutoModelForCausalLM.from_pretrained(f"{file}.original")
        for name, tensor in original.state_dict().items():
            assert torch.equal(loaded.model.state_dict()[name], tensor), name


ROWS_OF_256 = {"hidden_size": 256, "intermediate_size": 256}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K", *full("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q5_K", "Q6_K")])
def test_layers_keep_their_bits(quant: str, is_tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_gguf(tmp_path / "served" / "Tiny.gguf", quant=quant, tie_word_embeddings=is_tied, **ROWS_OF_256)
    wide = load(file.parent, dtype="float32").model
    caplog.set_level("INFO")
    model = load(file.parent).model
    assert f"Tiny.gguf: layers keep their bits: {16 - is_tied} of {quant}" in caplog.text
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head is embedding.rows) is is_tied
    token_ids = torch.arange(5, 205)[None]
    with torch.inference_mode():
        expected = wide(token_ids).logits
        tolerance = 5e-3 if quant in ("Q4_K", "Q5_K") else 5e-4  # minimums of 11 bits, larger than the weights
        difference = (model(token_ids).logits - expected).abs().max() / expected.abs().max()
        assert float(difference) <= tolerance
        assert torch.equal(embedding(token_ids), head.widened()[token_ids]) or not is_tied
        exact = (head.widened() - wide.get_output_embeddings().weight).abs().max()
        assert float(exact) <= (2**-10 if quant.endswith("K") else 0) * float(head.widened().abs().max())
    assert not any(parameter.dtype == torch.uint8 for parameter in model.parameters())


@pytest.mark.parametrize(("architecture", "quant"), [("qwen3", "Q8_0"), *full(("llama", "Q4_K"))])
def test_texts_in_company_are_those_of_generate(architecture: str, quant: str, tmp_path: Path) -> None:
    sizes = ROWS_OF_256 if quant.endswith("_K") else {}
    model = load(write_gguf(tmp_path / "served" / "Tiny.gguf", architecture, quant, **sizes).parent).model
    items = [(prompt, SamplingParams(16)) for prompt in prompts(12, seed=3, longest=100)]
    drawn = [(prompt, SamplingParams(8, do_sample=True, seed=3, temperature=1.5)) for prompt, _ in items[:4]]
    engine = start_engine(model, max_num_seqs=5, max_cache_tokens=512)
    try:
        assert isinstance(engine, ContinuousBatchingEngine)
        check(model, Client(engine), items)
        together, alone = Client(engine), Client(engine)
        for item in drawn:
            together.submit(*item)
        outcomes = together.outcomes()
        assert [token_ids(alone.ask(*item)) for item in drawn] == [token_ids(outcome) for outcome in outcomes]
    finally:
        engine.close()


def test_adapters_add_to_layers_that_keep_their_bits(tmp_path: Path) -> None:
    """Two of them and none, in company, as they add to the dequantised model."""
    file = write_gguf(tmp_path / "served" / "Tiny.gguf")
    original, ids, logits = Path(f"{file}.original"), torch.arange(5, 25).expand(3, -1), []
    folders = [
        save_adapter(original, tmp_path / "all", seed=3, r=2, target_modules="all-linear"),
        save_adapter(original, tmp_path / "some", seed=4, target_modules=["q_proj", "down_proj"]),
    ]
    for dtype in ("auto", "float32"):
        model = load(file.parent, dtype=dtype).model
        adapters = Adapters(model)
        first, second = map(adapters.load, folders)
        with adapters.choose([first, None, second]), torch.inference_mode():
            logits.append(model(ids).logits)
    kept, wide = logits
    assert float((kept - wide).abs().max() / wide.abs().max()) <= 5e-4
    assert min(float((wide[1] - wide[row]).abs().max()) for row in (0, 2)) > 0.1


def test_the_bytes_told_are_those_that_layers_keep(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "served" / "Tiny.gguf", "qwen3", "Q4_0")
    told = {}
    for dtype in ("auto", "float32"):
        settings = ModelSettings(huggingface_model=str(file.parent), dtype=dtype)
        loaded = load(file.parent, dtype=dtype)
        told[dtype] = model_info(loaded, settings, task="text-generation", engine="batch").memory_bytes
    assert 0 < told["auto"] < 0.25 * told["float32"]


@pytest.mark.parametrize("quant", ["F32", "Q4_K"])
def test_parts_are_the_whole_file(quant: str, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole" / "Tiny.gguf", quant=quant, **ROWS_OF_256)
    part = write_gguf(tmp_path / "parts" / "Tiny.gguf", quant=quant, tensors_in_part=5, **ROWS_OF_256)
    assert part.name == "Tiny-00001-of-00005.gguf"
    token_ids = torch.arange(5, 205)[None]
    with torch.inference_mode():
        for settings in ({}, {"gguf_file": part.name}):
            logits = load(part.parent, **settings).model(token_ids).logits
            assert torch.equal(logits, load(whole.parent).model(token_ids).logits)
    last = part.with_name("Tiny-00005-of-00005.gguf")
    last.write_bytes(last.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=rf"{last.name} of .* has \d+ bytes, and its tensors end at byte \d+"):
        load(part.parent)
    last.unlink()
    with pytest.raises(CheckpointError, match=f"{part.name} is one of 5 parts, and {last.name} is missing"):
        load(part.parent)


def test_layers_whose_weights_the_model_reads_are_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is tied to the embeddings has the embeddings widened with it."""
    file = write_gguf(tmp_path / "served" / "Tiny.gguf", tie_word_embeddings=True)
    read = {"lm_head", "up_proj"}
    monkeypatch.setattr("hf_triton.hub.gguf_weights.read_directly", lambda _, tables: () if tables else read)
    model, wide = load(file.parent).model, load(file.parent, dtype="float32").model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, wide.model.layers[1].mlp.up_proj.weight)
    assert not hasattr(model.model.layers[1].mlp.down_proj, "weight")


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_broken_scales_are_refused(dtype: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "served" / "Tiny.gguf")
    content, start = bytearray(file.read_bytes()), check_gguf(file, "a model").tensors["blk.1.ffn_up.weight"].start
    content[start : start + 2] = b"\x00\x7e"  # NaN
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"NaN or infinite numbers in model\.layers\.1\.mlp\.up_proj\.weight"):
        load(file.parent, dtype=dtype)


def test_the_dtype_is_that_of_the_setting(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "served" / "Tiny-Q8_0.gguf")
    for given, dtype, told in (("auto", torch.float32, "int8"), ("bfloat16", torch.bfloat16, "bfloat16")):
        loaded = load(file.parent, dtype=given)
        assert loaded.model.dtype == dtype
        settings = ModelSettings(huggingface_model=str(file.parent), dtype=given)
        assert model_info(loaded, settings, task="text-generation", engine="continuous").dtype == told


def test_a_tokenizer_may_come_from_elsewhere(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "served" / "Tiny-Q8_0.gguf", chat_template=None)
    loaded = load(file.parent, tokenizer=f"{file}.original")
    assert len(loaded.tokenizer) == 384


@pytest.mark.parametrize(
    ("written", "settings", "code", "sentence"),
    [
        (
            {"family": "bert"},
            {},
            "unsupported_model",
            "does not read GGUF files of the architecture 'bert', as .* it reads .*gemma2, .*llama, .*qwen3, ",
        ),
        (
            {},
            {"auto_class": "AutoModel"},
            "unsupported_model",
            "is served from a GGUF file, and the folder's task is one of encoders",
        ),
        (
            {"keys": {"llama.embedding_length": 128}},
            {},
            "weights_mismatch",
            r"of a wrong shape \(lm_head.weight is \[384, 64\] and must be \[384, 128\]",
        ),
        (
            {"keys": {"tokenizer.ggml.model": "novel"}},
            {},
            "checkpoint_invalid",
            "the tokenizer of Tiny-Q8_0.gguf .*novel.* choose another GGUF file, or the repository",
        ),
        (
            {"keys": {"llama.vocab_size": 2**31 - 1}},
            {},
            "weights_mismatch",
            r"its files hold 123,200 numbers, .* \(model.embed_tokens.weight alone is \[2147483647, 64\]\)",
        ),
        (
            {"keys": {"tokenizer.ggml.pre": "novel"}},
            {},
            "unsupported_model",
            r"splits text in the way 'novel' \(tokenizer.ggml.pre\), which is not known here",
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    written: dict[str, Any], settings: dict[str, Any], code: str, sentence: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "served" / "Tiny-Q8_0.gguf", **written)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load(file.parent, **settings)
    assert caught.value.code == code
    assert "\n" not in caught.value.sentence


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ),
    "factor alone": ({"rope_type": "linear", "factor": 4.0}, {"llama.rope.scaling.factor": 4.0}),
    "its older name": ({"rope_type": "linear", "factor": 4.0}, {"llama.rope.scale_linear": 4.0}),
    "yarn": (
        YARN,
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
        },
    ),
    "none": ({"rope_type": "default"}, {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}),
    "llama 3": (LLAMA3, {}),
}


def frequency_factors(scaling: dict[str, Any]) -> Any:
    """The tensor that llama.cpp's converter writes for Llama 3."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters={"rope_theta": 10000.0, **scaling})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return (10000.0 ** -(torch.arange(0, 16, 2) / 16) / scaled).float().numpy()


@pytest.mark.parametrize("case", SCALINGS)
def test_positions_are_scaled_as_the_original_s(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scaling, keys = SCALINGS[case]
    more = {"rope_freqs.weight": frequency_factors(scaling)} if case == "llama 3" else {}
    file = write_gguf(
        tmp_path / "served" / "Tiny-F32.gguf",
        quant="F32",
        keys=keys,
        more=more,
        rope_parameters={"rope_theta": 10000.0, **scaling},
    )
    loaded = load(file.parent)
    original: Any = AutoModelForCausalLM.from_pretrained(f"{file}.original")
    token_ids = torch.arange(5, 205)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(token_ids).logits, original(token_ids).logits, rtol=0, atol=1e-4)
    assert "not read" not in caplog.text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"llama.rope.scaling.type": "novel", "llama.rope.scaling.factor": 4.0}, "type 'novel'"),
        ({"llama.rope.scaling.type": "longrope"}, "rope_factors_long.weight is missing"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_log_multiplier": 0.1,
            },
            "yarn_log_multiplier 0.1",
        ),
    ],
)
def test_another_scaling_is_refused_by_name(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "served" / "Tiny-Q8_0.gguf", keys=keys)
    with pytest.raises(CheckpointError, match=f"scales positions in a way that is not served .*{words}"):
        load(file.parent)


def test_a_key_that_is_not_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"llama.expert_count": 0, "llama.attention.key_length": 16, "llama.logit_scale": 0.5}
    load(write_gguf(tmp_path / "served" / "Tiny-Q8_0.gguf", keys=keys).parent)
    assert "Tiny-Q8_0.gguf has keys that are not read (logit_scale): texts may differ" in caplog.text


def test_heads_have_the_size_of_the_header(tmp_path: Path) -> None:
    keys = {"qwen3.attention.key_length": 32, "qwen3.attention.value_length": 32}
    file = write_gguf(tmp_path / "served" / "Tiny-F32.gguf", "qwen3", "F32", keys=keys, head_dim=32)
    original: Any = AutoModelForCausalLM.from_pretrained(f"{file}.original")
    token_ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        torch.testing.assert_close(load(file.parent).model(token_ids).logits, original(token_ids).logits)


FIRST = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
"""DeepSeek's first token, in characters that are no bytes' names."""


def test_special_tokens_in_any_characters_keep_their_ids(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.add_bos_token": True}
    loaded = load(write_gguf(tmp_path / "served" / "Tiny-Q8_0.gguf", keys=keys, special={0: FIRST}).parent)
    tokenizer = loaded.tokenizer
    assert len(tokenizer) == loaded.vocabulary_size
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == (FIRST, 0)
    ids = tokenizer(f"a{FIRST}b")["input_ids"]
    assert ids[0] == 0
    assert ids.count(0) == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize(
    ("keys", "begins"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "tekken"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.pre": "qwen2"}, False),
        ({"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": True}, True),
        ({}, False),
    ],
)
def test_prompts_begin_as_those_of_llama_cpp(keys: dict[str, Any], begins: bool, tmp_path: Path) -> None:
    tokenizer = load(write_gguf(tmp_path / "served" / "Tiny-Q8_0.gguf", keys=keys).parent).tokenizer
    assert (tokenizer("a")["input_ids"][0] == 0) is begins
    assert tokenizer("a", add_special_tokens=False)["input_ids"][0] != 0


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("gpt-2", "ab 12345", ["ab", " 12345"]),
        ("smollm", "ab 12", ["ab", " ", "1", "2"]),
        ("deepseek-llm", "ab\n\nc", ["ab", "\n", "\n", "c"]),
        ("deepseek-coder", "a 12", ["a", " ", "1", "2"]),
        ("deepseek-v3", "a12345", ["a", "123", "45"]),
        ("falcon", "a12345", ["a", "123", "45"]),
    ],
)
def test_text_is_split_as_the_header_says(kind: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = load(
        write_gguf(tmp_path / "served" / "Tiny-Q8_0.gguf", keys={"tokenizer.ggml.pre": kind}).parent
    ).tokenizer
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces
