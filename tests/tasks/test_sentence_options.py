# SPDX-License-Identifier: Apache-2.0
"""Every option that the installed sentence-transformers writes is followed, without effect, or refused by its name."""

import importlib
import json
import pkgutil
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_triton.errors import LoadError, RequestError
from hf_triton.hub.kind import find_task
from hf_triton.hub.sentence_files import FORMER_KINDS, OPTIONS, SERVED
from hf_triton.hub.sentence_names import GENERAL
from hf_triton.protocol.tensor_values import encode_strings
from hf_triton.settings import ModelSettings
from hf_triton.tasks.embeddings import Embeddings
from hf_triton.tasks.registry import folder_task
from hf_triton.tasks.rerank import Rerank
from hf_triton.testing import build_tiny_checkpoint
from tests.support.sentence_checkpoints import TEXTS, quietly, reference_embeddings, save_plain, save_sentence_model
from tests.support.tasks import Served, save_task_checkpoint

QUERY = "Where is the boat?"
ROLES = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content if m.content is string else m.content[0].text }}\n{% endfor %}"
)


def module_classes() -> dict[str, Any]:
    """The module classes of the installed library, by name."""
    import sentence_transformers
    from sentence_transformers.base.modules import Module

    for package in ("base", "sentence_transformer", "cross_encoder", "sparse_encoder", "multi_vector_encoder"):
        modules = importlib.import_module(f"sentence_transformers.{package}.modules")
        for found in pkgutil.iter_modules(modules.__path__):
            importlib.import_module(f"{modules.__name__}.{found.name}")

    def below(kind: Any) -> list[Any]:
        return [kind, *(each for child in kind.__subclasses__() for each in below(child))]

    classes = {each.__name__: each for each in below(Module) if each.__module__.startswith("sentence_transformers.")}
    assert sentence_transformers.__version__ >= "6"
    return {name: each for name, each in classes.items() if name not in ("Module", "InputModule")}


FOLLOWED = {
    GENERAL: "model_type prompts default_prompt_name truncate_dim activation_fn max_active_dims "
    "__version__ similarity_fn_name requirements",
    "Transformer": "max_seq_length do_lower_case transformer_task module_output_name modality_config unpad_inputs",
    "Pooling": "pooling_mode include_prompt pooling_mode_cls_token pooling_mode_max_tokens pooling_mode_mean_tokens "
    "pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens pooling_mode_lasttoken "
    "embedding_dimension word_embedding_dimension",
    "Dense": "in_features out_features bias activation_function use_residual module_output_name",
    "LayerNorm": "dimension",
    "Dropout": "dropout",
    "SpladePooling": "pooling_strategy activation_function embedding_dimension word_embedding_dimension chunk_size",
    "LogitScore": "true_token_id false_token_id",
}
"""The options that are followed, or have no effect here."""


def decided(kind: str) -> set[str]:
    return {*OPTIONS[kind], *FOLLOWED.get(kind, "").split()}


@pytest.mark.parametrize("kind", SERVED)
def test_every_option_of_a_module_is_decided(kind: str) -> None:
    written = {*module_classes()[kind].config_keys}
    assert written <= decided(kind)


def test_every_option_of_a_model_is_decided(tmp_path: Path) -> None:
    embedder = save_sentence_model(tmp_path / "embedder")
    reranker = save_cross_encoder(save_task_checkpoint(tmp_path / "plain", "bert", "sequence", num_labels=1))
    for folder in (embedder, reranker):
        assert set(json.loads((folder / GENERAL).read_text())) <= decided(GENERAL)


def edit(file: Path, **options: object) -> None:
    given = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**given, **options}))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sentence_model(tmp_path_factory.mktemp("st") / "model", dense=[24])


FILES = {GENERAL: "", "Transformer": "sentence_bert_config.json", "Pooling": "1_Pooling", "Dense": "2_Dense"}
REFUSED = [
    *((kind, name, "something") for kind in FILES for name in OPTIONS[kind]),
    ("Transformer", "transformer_task", "retrieval"),
    ("Transformer", "module_output_name", "pixel_embeddings"),
    ("Transformer", "modality_config", {"image": {"method": "get_image_features", "method_output_name": None}}),
    ("Dense", "module_output_name", "token_embeddings"),
    ("Dense", "activation_function", "mine.Activation"),
    ("Pooling", "pooling_mode", "attention"),
    ("Normalize", "module_input_name", "token_embeddings"),
]


@pytest.mark.parametrize(("kind", "name", "value"), REFUSED)
def test_what_is_not_followed_is_refused_by_name(
    kind: str, name: str, value: object, embedder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(embedder, tmp_path / "model")
    places = {**FILES, GENERAL: GENERAL, "Pooling": "1_Pooling/config.json", "Dense": "2_Dense/config.json"}
    edit(folder / places.get(kind, "3_Normalize/config.json"), **{name: value})
    words = "reads texts by" if name == "modality_config" else "activation" if name == "activation_function" else name
    settings = ModelSettings(huggingface_model=str(folder))
    with pytest.raises(LoadError, match=words) as loaded:
        Served(folder, Embeddings)
    with pytest.raises(LoadError) as checked:
        Embeddings.check_files(folder, settings)
    assert str(checked.value) == str(loaded.value)


@pytest.mark.parametrize("kind", sorted({*module_classes()} - {*SERVED, *FORMER_KINDS}))
def test_other_modules_are_refused_by_name_without_their_files(kind: str, tmp_path: Path) -> None:
    type_ = f"{module_classes()[kind].__module__}.{kind}"
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": f"0_{kind}", "type": type_}]))
    with pytest.raises(LoadError, match=f"has the module '{kind}' in its modules.json"):
        Served(tmp_path, Embeddings)


def test_a_model_in_a_subfolder_is_refused_with_that_reason(embedder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(embedder, tmp_path / "model")
    (folder / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(folder / "0_Transformer" / name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(LoadError, match=r"keeps the model in the folder '?0_Transformer'?, by modules\.json"):
        Served(folder, Embeddings)


def test_models_of_other_kinds_are_refused_by_kind(embedder: Path, tmp_path: Path) -> None:
    for kind in ("SparseEncoder", "MultiVectorEncoder", "CrossEncoder"):
        folder = shutil.copytree(embedder, tmp_path / kind)
        edit(folder / GENERAL, model_type=kind)
        with pytest.raises(LoadError, match=f"is a {kind}"):
            Served(folder, Embeddings)


def test_texts_for_a_chat_template_are_refused_as_embeddings(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    plain = save_plain(tmp_path / "plain", "qwen3")
    edit(plain / "tokenizer_config.json", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with quietly():
        modules: Any = [Transformer(str(plain)), Pooling(32, "lasttoken")]
        SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "model"), create_model_card=False)
    with pytest.raises(LoadError, match="makes vectors by the chat template"):
        Served(tmp_path / "model", Embeddings)


def test_an_encoder_of_t5_and_a_layer_norm_give_the_vectors_of_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
    from transformers import T5Config, T5EncoderModel

    plain = save_plain(tmp_path / "plain")
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    T5EncoderModel(T5Config(vocab_size=200, pad_token_id=1, eos_token_id=2, **shape)).save_pretrained(plain)
    with quietly():
        dense = Dense(32, 24, bias=False, activation_function=torch.nn.Identity())
        modules: Any = [Transformer(str(plain)), Pooling(32, "mean"), dense, LayerNorm(24), Normalize()]
        SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "model"), create_model_card=False)
    edit(tmp_path / "model" / "config.json", is_encoder_decoder=True)  # as the checkpoints on the Hub have it
    assert find_task(tmp_path / "model") == "embeddings"
    vectors = Served(tmp_path / "model", Embeddings).ask({"text": encode_strings(TEXTS, (len(TEXTS),))})["embedding"]
    np.testing.assert_allclose(vectors, reference_embeddings(tmp_path / "model", TEXTS), atol=1e-5)


def save_cross_encoder(plain: Path, *modules: Any, **options: Any) -> Path:
    from sentence_transformers import CrossEncoder

    folder = plain.with_name(plain.name + "-saved")
    with quietly():
        if modules:
            model = CrossEncoder(modules=list(modules), device="cpu", **options)
        else:
            model = CrossEncoder(str(plain), device="cpu", **options)
        model.save_pretrained(str(folder), create_model_card=False)
    return folder


def pooled(plain: Path) -> list[Any]:
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

    torch.manual_seed(3)
    hidden = Dense(32, 32, activation_function=torch.nn.GELU())
    score = Dense(32, 1, activation_function=torch.nn.Identity(), module_output_name="scores")
    return [Transformer(str(plain)), Pooling(32, "cls"), hidden, LayerNorm(32), score]


def generative(plain: Path) -> list[Any]:
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    return [Transformer(str(plain), transformer_task="text-generation"), LogitScore(7, 9)]


def save_generative(folder: Path, template: str | None) -> Path:
    plain = build_tiny_checkpoint(folder, "qwen3", max_position_embeddings=1024, vocab_size=400)
    for name in ("chat_template.jinja",):
        (plain / name).unlink(missing_ok=True)
    edit(plain / "tokenizer_config.json", chat_template=template, pad_token="<unk>")
    return plain


PROMPTS: dict[str, Any] = {"prompts": {"q": "find: ", "other": "look for "}, "default_prompt_name": "q"}
RERANKERS: dict[str, Callable[[Path], Path]] = {
    "default prompt": lambda at: save_cross_encoder(
        save_task_checkpoint(at, "bert", "sequence", num_labels=1), **PROMPTS
    ),
    "identity": lambda at: save_cross_encoder(
        save_task_checkpoint(at, "roberta", "sequence", num_labels=1), activation_fn=torch.nn.Identity()
    ),
    "pooled": lambda at: save_cross_encoder(at, *pooled(save_task_checkpoint(at, "modernbert", "embeddings"))),
    "pooled, with a prompt": lambda at: save_cross_encoder(
        at, *pooled(save_task_checkpoint(at, "bert", "embeddings")), activation_fn=torch.nn.Identity(), **PROMPTS
    ),
    "generative": lambda at: save_cross_encoder(at, *generative(save_generative(at, None)), **PROMPTS),
    "generative, by a template": lambda at: save_cross_encoder(
        at, *generative(save_generative(at, ROLES)), activation_fn=torch.nn.Identity(), **PROMPTS
    ),
}


@pytest.mark.parametrize("case", RERANKERS)
def test_rerankers_score_as_their_own_files_say(case: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = RERANKERS[case](tmp_path / "model")
    assert find_task(folder) == "rerank" or "generative" in case
    settings = ModelSettings(huggingface_model=str(folder), task="rerank")
    served = Served(folder, folder_task(None, settings, folder) or object)
    inputs = {"query": encode_strings([QUERY], (1,)), "documents": encode_strings(TEXTS, (len(TEXTS),))}
    pairs = [(QUERY, text) for text in TEXTS]
    with quietly():
        reference = CrossEncoder(str(folder), device="cpu")
        np.testing.assert_allclose(served.ask(inputs)["score"], reference.predict(pairs), atol=1e-5)
        names = ("", "other") if reference.default_prompt_name else ("",)
        for name in names:
            expected = reference.predict(pairs, prompt=reference.prompts.get(name) or "")
            np.testing.assert_allclose(served.ask(inputs, prompt_name=name)["score"], expected, atol=1e-5)
    with pytest.raises(RequestError, match="prompt_name must be a prompt of the model, got 'nothing'"):
        served.ask(inputs, prompt_name="nothing")


@pytest.mark.parametrize("content", ["[" * 100_000, "nothing", '{"prompts": 5}', '{"truncate_dim": 1e999}', "[]"])
def test_a_general_config_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    folder = save_task_checkpoint(tmp_path / "reranker", "bert", "sequence", num_labels=1)
    (folder / GENERAL).write_text(content)
    assert find_task(folder) == "rerank"
    with pytest.raises(LoadError, match=f"{GENERAL} (cannot be read|holds no JSON object)"):
        Served(folder, Rerank)


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "2_Dense/config.json", "modules.json"])
def test_a_deep_config_is_a_sentence(name: str, embedder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(embedder, tmp_path / "model")
    (folder / name).write_text("[" * 100_000)
    with pytest.raises(LoadError, match=r"cannot be read \(RecursionError\)"):
        Served(folder, Embeddings)


@pytest.mark.parametrize("size", [-1, 0, 10**9, 1e999])
def test_an_impossible_size_is_refused_before_its_memory_is_taken(size: float, embedder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(embedder, tmp_path / "model")
    edit(folder / "2_Dense/config.json", out_features=size)
    with pytest.raises(LoadError, match=r"out_features|OverflowError"):
        Served(folder, Embeddings)


@pytest.mark.parametrize("name", ["Linear", "GLU", "ModuleList", "CrossEntropyLoss", "Conv2d"])
def test_a_module_that_is_no_activation_is_refused(name: str, embedder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(embedder, tmp_path / "model")
    edit(folder / "2_Dense/config.json", activation_function=f"torch.nn.{name}")
    with pytest.raises(LoadError, match=f"has the activation {name}, which makes no vector of a vector"):
        Served(folder, Embeddings)
