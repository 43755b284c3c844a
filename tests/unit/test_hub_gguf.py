# SPDX-License-Identifier: Apache-2.0
"""Which GGUF file of a repository is fetched and loaded, and headers that no reader may get."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_triton.errors import CheckpointError, LoadError
from hf_triton.folders.model_folder import folder_name, model_settings
from hf_triton.hub.gguf import choose_gguf
from hf_triton.hub.gguf_header import check_gguf
from hf_triton.hub.locate import Hub
from hf_triton.settings import ModelSettings, load_settings
from hf_triton.testing import LoopbackHub

NAME = "acme/Tiny-GGUF"
FILES = ("Tiny-Q4_K_M.gguf", "Tiny-Q8_0.gguf", "Tiny.F16.gguf", "mmproj-F16.gguf", "imatrix_acme.gguf")
BESIDE = ("README.md", "tokenizer_config.json", "run.py")
PARTS = ("BF16/Big-BF16-00001-of-00002.gguf", "BF16/Big-BF16-00002-of-00002.gguf")
INT32 = 5
UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 6, 7, 8, 9, 10
F32, Q8_0 = 0, 8


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        (FILES, "Q4_K_M", "Tiny-Q4_K_M.gguf"),
        (FILES, "q8_0", "Tiny-Q8_0.gguf"),
        (FILES, "F16", "Tiny.F16.gguf"),
        (FILES, "Tiny-Q8_0.gguf", "Tiny-Q8_0.gguf"),
        (FILES, "mmproj-F16.gguf", "mmproj-F16.gguf"),
        (FILES, None, None),
        (FILES[2:], None, "Tiny.F16.gguf"),
        ((*FILES[2:], "model.safetensors"), None, None),
        ((*FILES[2:], "pytorch_model.bin"), None, "Tiny.F16.gguf"),
        (("Q2_K", "Q3_K", "Q2_K/Tiny-Q2_K.gguf", "Q3_K/Tiny-Q3_K.gguf"), "Q3_K", "Q3_K/Tiny-Q3_K.gguf"),
        (("Tiny-Q8_0-00001-of-00001.gguf",), "Q8_0", "Tiny-Q8_0-00001-of-00001.gguf"),
        (("Tiny-Q8_0-00001-of-00001.gguf",), None, "Tiny-Q8_0-00001-of-00001.gguf"),
        (PARTS, "BF16", PARTS[0]),
        (PARTS, PARTS[1], PARTS[0]),
        (PARTS, None, PARTS[0]),
        ((*PARTS, "Tiny.gguf"), None, None),
        (("config.json",), None, None),
        (("a/b/Tiny-Q8_0.gguf",), None, None),
    ],
)
def test_a_file_is_chosen_by_its_name_or_quantisation(
    names: tuple[str, ...], wanted: str | None, chosen: str | None
) -> None:
    assert choose_gguf(names, wanted) == chosen


@pytest.mark.parametrize(
    ("names", "wanted", "sentence"),
    [
        (FILES, "Q9", "no GGUF file has the name or quantisation 'Q9': set gguf_file to one of Tiny-Q4_K_M.gguf, Tiny"),
        (FILES, "4_K_M", "no GGUF file has the name"),
        (FILES, ".*", r"no GGUF file has the name or quantisation '\.\*'"),
        (("a-Q8_0.gguf", "b-Q8_0.gguf"), "Q8_0", "2 GGUF files have .* one of a-Q8_0.gguf, b-Q8_0.gguf$"),
        (PARTS[:1], "BF16", rf"Big-BF16-00001-of-00002.gguf is one of 2 parts, and {PARTS[1]} is missing: fetch all"),
        (PARTS[1:], PARTS[1], f"is one of 2 parts, and {PARTS[0]} is missing"),
        (("config.json", *FILES[1:2]), "config.json", "no GGUF file has the name or quantisation 'config.json'"),
        (("model.safetensors",), "Q8_0", "set gguf_file only for a repository or folder of them"),
        ([f"T-{n}.gguf" for n in range(30)], "Q8_0", "set gguf_file to one of .{100,200}, [.]{3}$"),
    ],
)
def test_a_choice_that_is_none_lists_what_there_is(names: tuple[str, ...], wanted: str, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        choose_gguf(names, wanted)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    for name, names in {NAME: (*FILES, *BESIDE), "acme/one": FILES[1:2], "acme/parts": PARTS}.items():
        for file in names:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(f"{file} of {name}")
    with LoopbackHub() as hub:
        for name in (NAME, "acme/one", "acme/parts"):
            hub.add(name, tmp_path / name)
        yield hub


def resolve(hub: LoopbackHub, tmp_path: Path, **settings: str) -> Path:
    environment = {**os.environ, **hub.environment(), "HF_HOME": str(tmp_path / "home")}
    return Hub(tmp_path, ModelSettings(**settings), environment).resolve_model()


def test_one_file_of_a_repository_is_fetched(hub: LoopbackHub, tmp_path: Path) -> None:
    folder = resolve(hub, tmp_path, huggingface_model=NAME, gguf_file="Q8_0")
    assert {path.name for path in folder.iterdir()} == {"Tiny-Q8_0.gguf", "tokenizer_config.json"}
    resolve(hub, tmp_path, huggingface_model=NAME, gguf_file="Tiny.F16.gguf")
    assert {path.name for path in folder.glob("*.gguf")} == {"Tiny-Q8_0.gguf", "Tiny.F16.gguf"}
    num_requests = len(hub.requests)
    resolve(hub, tmp_path, huggingface_model=NAME, gguf_file="q8_0")
    assert len(hub.requests) == num_requests


def test_a_file_that_is_alone_needs_no_setting(hub: LoopbackHub, tmp_path: Path) -> None:
    assert [path.name for path in resolve(hub, tmp_path, huggingface_model="acme/one").iterdir()] == [FILES[1]]


@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, {"gguf_file": "BF16"}, {"gguf_file": PARTS[1]}])
def test_all_parts_are_fetched(settings: dict[str, str], hub: LoopbackHub, tmp_path: Path) -> None:
    folder = resolve(hub, tmp_path, huggingface_model="acme/parts", **settings)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.gguf")} == set(PARTS)
    (folder / PARTS[1]).unlink()
    resolve(hub, tmp_path, huggingface_model="acme/parts", **settings)
    assert (folder / PARTS[1]).exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"huggingface_model": NAME},
            rf"{NAME} has GGUF files \(Tiny-Q4_K_M.*\): name one by its .*`hf-triton serve NAME:Q4_K_M`, or by the",
        ),
        ({"huggingface_model": NAME, "gguf_file": "Q2_K"}, "no GGUF file has the name or quantisation 'Q2_K'"),
        ({"huggingface_model": f"./{NAME}/{FILES[0]}"}, "set it to the folder, and gguf_file to Tiny-Q4_K_M.gguf"),
        ({"huggingface_model": f"./{NAME}"}, r"has GGUF files \("),
    ],
)
def test_a_repository_without_a_choice_is_not_fetched(
    hub: LoopbackHub, tmp_path: Path, settings: dict[str, str], sentence: str
) -> None:
    with pytest.raises(LoadError, match=sentence):
        resolve(hub, tmp_path, **settings)
    assert not list((tmp_path / "home").rglob("*.gguf"))


@pytest.mark.parametrize(
    ("model", "settings", "name"),
    [
        ("acme/Tiny-GGUF:Q4_K_M", ("acme/Tiny-GGUF", "Q4_K_M", None), "tiny-gguf-q4_k_m"),
        ("acme/Tiny-GGUF:Q4_K_M@v1", ("acme/Tiny-GGUF", "Q4_K_M", "v1"), "tiny-gguf-q4_k_m"),
        ("acme/Tiny-GGUF:BF16/Tiny.gguf", ("acme/Tiny-GGUF", "BF16/Tiny.gguf", None), "tiny"),
        ("acme/Tiny", ("acme/Tiny", None, None), "tiny"),
        ("acme/Tiny@v1", ("acme/Tiny", None, "v1"), "tiny"),
        ("/models/Tiny-Q8_0.gguf", ("/models", "Tiny-Q8_0.gguf", None), "tiny-q8_0"),
        ("/models/T-00002-of-00003.gguf", ("/models", "T-00002-of-00003.gguf", None), "t"),
    ],
)
def test_a_typed_name_gives_settings_and_a_folder_s_name(
    model: str, settings: tuple[str | None, ...], name: str
) -> None:
    own = model_settings(model, {})
    assert tuple(map(own.get, ("huggingface_model", "gguf_file", "revision"))) == settings
    assert folder_name(own) == name
    assert folder_name(own, [name]) == f"{name}-2"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gguf_file": "../x.gguf"}, "gguf_file must be a file's name in the repository, or a quantisation"),
        ({"gguf_file": "/x.gguf"}, "gguf_file must be"),
        ({"gguf_file": "a/../../x.gguf"}, "gguf_file must be"),
        ({"gguf_file": ""}, "gguf_file must be"),
        ({"gguf_file": "Q8_0", "quantization_config": '{"quant_method": "hqq"}'}, "has its own quantisation"),
        ({"gguf_file": "Q8_0", "runtime": "onnx"}, "is computed by torch"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(LoadError, match=sentence):
        load_settings({"huggingface_model": NAME, **settings}, {})


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(shape: tuple[int, ...] = (4,), kind: int = F32, offset: int = 0, name: bytes = b"a") -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


FAMILY = key(b"general.architecture", STRING, text(b"llama"))


def numbers(*elements: int) -> bytes:
    return struct.pack(f"<IQ{len(elements)}I", UINT32, len(elements), *elements)


TOKENS = key(b"tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"a") + text(b"b"))


def written(
    keys: tuple[bytes, ...] = (FAMILY,),
    tensors: tuple[bytes, ...] = (tensor(),),
    *,
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
    version: int = 3,
    data: int = 64,
) -> bytes:
    counts = counts or (len(tensors), len(keys))
    return magic + struct.pack("<IQQ", version, *counts) + b"".join((*keys, *tensors)) + bytes(data)


HOSTILE = {
    "empty": (b"", "is no GGUF file"),
    "another file": (b"PK\3\4" * 20, "is no GGUF file, which begins with GGUF"),
    "cut in its header": (written()[:60], "ends within its header"),
    "version 1": (written(version=1), "has version 1 of the format"),
    "big-endian": (
        b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(99),
        "other order of bytes (big-endian)",
    ),
    "keys without end": (written(counts=(1, 2**63)), "has 1 tensors and 9223372036854775808 keys by its header"),
    "more keys than there are": (written(counts=(1, 90_000)), "ends within its header"),
    "a long text": (written((key(b"x", STRING, struct.pack("<Q", 2**63) + b"x"),)), "ends within its header"),
    "an endless array": (
        written((FAMILY, key(b"x", ARRAY, struct.pack("<IQ", UINT32, 2**61)))),
        "arrays of more than 1500000 elements",
    ),
    "arrays of arrays": (
        written((FAMILY, key(b"x", ARRAY, struct.pack("<IQ", ARRAY, 1)))),
        "or one of arrays",
    ),
    "an unknown type": (written((key(b"x", 77, b""),)), "a value of the unknown type 77"),
    "no architecture": (written((key(b"x", UINT32, bytes(4)),)), "has no general.architecture"),
    "blocks without end": (
        written((FAMILY, key(b"llama.block_count", UINT64, struct.pack("<Q", 10**12))), (tensor(name=b"blk.1.a"),)),
        "has 1 tensors of 2 blocks, and 1000000000000 by its header",
    ),
    "blocks left out": (
        written((FAMILY, key(b"llama.block_count", UINT32, struct.pack("<I", 1))), (tensor(), tensor(name=b"blk.1.a"))),
        "has 2 tensors of 2 blocks, and 1 by its header",
    ),
    "a key that is not UTF-8": (written((FAMILY, key(b"\xff", BOOL, b"\0"))), "has a text in its header that is not"),
    "a template of numbers": (
        written((FAMILY, key(b"tokenizer.chat_template", UINT32, bytes(4)))),
        "has a tokenizer.chat_template that is no text",
    ),
    "an alignment of zero": (
        written((FAMILY, key(b"general.alignment", UINT32, bytes(4)))),
        "general.alignment 0, which is no power of two",
    ),
    "many dimensions": (written(tensors=(tensor((1,) * 2000),)), "a tensor of 2000 dimensions, 'a'"),
    "a type that is none": (written(tensors=(tensor(kind=99),)), "the tensor 'a' of type 99, which the package"),
    "half a block": (written(tensors=(tensor((33,), Q8_0),)), "the tensor 'a' of rows of 33 values, in blocks of 32"),
    "a tensor beyond the file": (written(tensors=(tensor((4096, 4096)),)), "its tensors end at byte 67108"),
    "dimensions that wrap": (written(tensors=(tensor((2**32, 2**32)),)), "its tensors end at byte 73786976"),
    **{
        f"{name} {given}": (
            written((FAMILY, key(b"llama." + name.encode(), *typed)), (tensor(name=b"blk.0.a"),)),
            f"has {name} {given} in its header, which must be",
        )
        for name, given, typed in (
            ("context_length", "0", (UINT32, bytes(4))),
            ("context_length", "-1", (INT32, struct.pack("<i", -1))),
            ("context_length", "4611686018427387904", (UINT64, struct.pack("<Q", 1 << 62))),
            ("block_count", "1.0", (FLOAT32, struct.pack("<f", 1))),
            ("embedding_length", "true", (BOOL, bytes([1]))),
            ("feed_forward_length", "'64'", (STRING, text(b"64"))),
            ("attention.layer_norm_rms_epsilon", "nan", (FLOAT32, struct.pack("<f", float("nan")))),
            ("rope.freq_base", "inf", (FLOAT32, struct.pack("<f", float("inf")))),
            ("rope.freq_base", "-1.0", (FLOAT32, struct.pack("<f", -1))),
            ("rope.scaling.factor", "'4'", (STRING, text(b"4"))),
        )
    },
    **{
        f"a list of {length} for {name}": (
            written(
                (
                    FAMILY,
                    key(b"llama." + name.encode(), ARRAY, struct.pack(f"<IQ{length}I", UINT32, length, *[9] * length)),
                )
            ),
            f"has a list of {length} for {name} in its header, which must be a number",
        )
        for name, length in (
            ("block_count", 1),
            ("context_length", 1),
            ("attention.head_count_kv", 1),
            ("rope.freq_base", 2),
            ("novel", 1),
        )
    },
    "a first token that is none": (
        written((FAMILY, TOKENS, key(b"tokenizer.ggml.bos_token_id", UINT32, struct.pack("<I", 2)))),
        "has tokenizer.ggml.bos_token_id 2 in its header, and 2 tokens",
    ),
    "tokens that are numbers": (
        written((FAMILY, key(b"tokenizer.ggml.tokens", ARRAY, struct.pack("<IQI", UINT32, 1, 1)))),
        "has a tokenizer.ggml.tokens that is no list of texts",
    ),
    "fewer types than tokens": (
        written((FAMILY, TOKENS, key(b"tokenizer.ggml.token_type", ARRAY, struct.pack("<IQi", INT32, 1, 1)))),
        "has 2 tokens in its header, and 1 of tokenizer.ggml.token_type",
    ),
    "a flag that is a number": (
        written((FAMILY, key(b"tokenizer.ggml.add_bos_token", UINT32, bytes(4)))),
        "has a tokenizer.ggml.add_bos_token that is neither true nor false",
    ),
    "cut in its tensors": (written(tensors=(tensor((64,)),)), "bytes, and its tensors end at byte"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_one_sentence(case: str, tmp_path: Path) -> None:
    content, fault = HOSTILE[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        check_gguf(file, "acme/thing")
    assert caught.value.code == "checkpoint_invalid"
    assert caught.value.sentence.startswith("model.gguf of acme/thing ")
    assert fault in caught.value.sentence
    assert caught.value.sentence.endswith(": fetch the file again, or choose another one")


def test_a_sound_header_is_read(tmp_path: Path) -> None:
    keys = (FAMILY, key(b"half", FLOAT32, struct.pack("<f", 0.5)), key(b"yes", BOOL, b"\1"))
    (tmp_path / "model.gguf").write_bytes(written(keys, (tensor(), tensor((32, 1), Q8_0, 32, b"b")), data=128))
    header = check_gguf(tmp_path / "model.gguf", "acme/thing")
    assert header.values == {"general.architecture": "llama", "half": 0.5, "yes": True}
    assert {name: tensor.shape for name, tensor in header.tensors.items()} == {"a": (4,), "b": (32, 1)}
