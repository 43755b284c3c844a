# SPDX-License-Identifier: Apache-2.0
"""Sparse embeddings equal sentence-transformers' SparseEncoder and FlagEmbedding's formula, or say what is wrong."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hf_triton.encoder import forward
from hf_triton.errors import LoadError, RequestError
from hf_triton.hub.kind import find_tasks, find_way
from hf_triton.protocol.tensor_values import encode_strings
from hf_triton.settings import ModelSettings
from hf_triton.tasks.embeddings import Embeddings
from hf_triton.tasks.lexical_sparse_embeddings import LexicalSparseEmbeddings
from hf_triton.tasks.registry import folder_task
from hf_triton.tasks.sparse_embeddings import SparseEmbeddings
from tests.support.sentence_checkpoints import quietly
from tests.support.sparse_checkpoints import expected_lexical, expected_splade, save_lexical, save_splade
from tests.support.tasks import TEXTS, Served, save_task_checkpoint

TOLERANCE = 1e-5


def dense(answers: list[Any], size: int) -> npt.NDArray[np.float32]:
    """Sparse vectors as rows; their indices ascend, and no value is 0."""
    rows = np.zeros((len(answers), size), np.float32)
    for row, answer in zip(rows, answers, strict=True):
        assert answer["indices"] == sorted(set(answer["indices"]))
        assert min(answer["values"], default=1) > 0
        row[answer["indices"]] = answer["values"]
    return rows


def same(answers: list[Any], expected: npt.NDArray[np.float32]) -> None:
    found = dense(answers, expected.shape[1])
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert [len(answer["indices"]) for answer in answers] == np.count_nonzero(expected, axis=1).tolist()


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_every_pooling_and_activation_gives_the_vectors_of_sparse_encoder(
    pooling: str, activation: str, tmp_path: Path
) -> None:
    folder = save_splade(tmp_path / "model", pooling_strategy=pooling, activation_function=activation)
    assert find_tasks(folder)[0] == "sparse-embeddings"
    served = Served(folder, SparseEmbeddings)
    assert served.forward.way == "packed"
    same(served.json(TEXTS), expected_splade(folder, TEXTS))


@pytest.mark.parametrize("family", ["distilbert", "roberta", "xlm-roberta", "deberta-v2", "modernbert"])
def test_families_give_the_vectors_of_sparse_encoder(family: str, tmp_path: Path) -> None:
    folder = save_splade(tmp_path / "model", family)
    same(Served(folder, SparseEmbeddings).json(TEXTS), expected_splade(folder, TEXTS))


def test_prompts_lengths_and_numbers_are_those_of_the_files_and_of_requests(tmp_path: Path) -> None:
    prompts = {"query": "the good Anna ", "document": ""}
    folder = save_splade(tmp_path / "model", max_length=12, prompts=prompts, max_active_dims=7)
    served = Served(folder, SparseEmbeddings, truncate=True)
    for options in ({}, {"prompt_name": "query"}, {"max_active_dims": 3}, {"max_active_dims": 10**6}):
        same(served.json(TEXTS, **options), expected_splade(folder, TEXTS, **options))
    with pytest.raises(RequestError, match="prompt_name must be a prompt of the model, got 'passage'"):
        served.json(TEXTS, prompt_name="passage")
    with pytest.raises(RequestError, match="max_active_dims must be an integer >= 1, got 0"):
        served.json(TEXTS, max_active_dims=0)


def test_a_plain_masked_language_model_is_pooled_as_sparse_encoder_does_it(tmp_path: Path) -> None:
    folder = save_task_checkpoint(tmp_path / "model", "bert", "masks")
    assert find_tasks(folder) == ["fill-mask"]
    same(Served(folder, SparseEmbeddings, task="sparse-embeddings").json(TEXTS), expected_splade(folder, TEXTS))


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    folder = save_splade(tmp_path / "model")
    expected = expected_splade(folder, TEXTS)
    path = "sentence_transformers.sparse_encoder.models"
    kinds = {"": "MLMTransformer", "1_SpladePooling": "SpladePooling"}
    modules = [{"idx": 0, "name": "0", "path": place, "type": f"{path}.{kind}"} for place, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 130, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").unlink()
    assert find_tasks(folder)[0] == "sparse-embeddings"
    same(Served(folder, SparseEmbeddings).json(TEXTS), expected)


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_a_long_text_is_pooled_in_parts(pooling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_splade(tmp_path / "model", pooling_strategy=pooling)
    monkeypatch.setattr(forward, "MAX_OUTPUTS", 320 * 9)
    served = Served(folder, SparseEmbeddings)
    pooled: list[int] = []
    monkeypatch.setattr(served.forward, "_reduce", lambda part: pooled.append(len(part)) or served.task.reduce(part))
    same(served.json(TEXTS), expected_splade(folder, TEXTS))
    assert max(pooled) <= 9 < sum(pooled) / len(TEXTS)


def test_outputs_are_tensors_too(tmp_path: Path) -> None:
    served = Served(save_splade(tmp_path / "model", max_active_dims=5), SparseEmbeddings)
    ported = served.task.declaration.all_outputs
    answers = served.json(TEXTS)
    for shape in ((4,), (4, 1)):
        outputs = served.ask({"args": encode_strings(TEXTS, shape)}, names=["indices", "values", "num_values"])
        assert {name: outputs[name].dtype.name for name in outputs} == {
            "indices": "int64",
            "values": "float32",
            "num_values": "uint32",
        }
        assert outputs["num_values"].shape == shape
        assert outputs["indices"].shape == outputs["values"].shape == (20, *shape[1:])
        assert outputs["indices"].ravel().tolist() == [index for answer in answers for index in answer["indices"]]
        np.testing.assert_allclose(outputs["values"].ravel(), np.concatenate([each["values"] for each in answers]))
    assert [name for name, port in ported.items() if port.by_default] == ["output"]


@pytest.fixture(scope="module")
def lexical(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lexical(tmp_path_factory.mktemp("lexical") / "model")


def test_lexical_weights_are_those_of_flag_embedding(lexical: Path) -> None:
    assert find_tasks(lexical)[0] == "embeddings"
    assert find_way(lexical) == "lexical"
    expected = expected_lexical(lexical, TEXTS)
    assert np.count_nonzero(expected) > 10
    settings = ModelSettings(huggingface_model=str(lexical), task="sparse-embeddings")
    kind: Any = folder_task(None, settings, lexical)
    assert kind is LexicalSparseEmbeddings
    same(Served(lexical, kind, task="sparse-embeddings").json(TEXTS), expected)


def test_the_layer_may_be_safetensors(lexical: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = shutil.copytree(lexical, tmp_path / "model")
    save_file(torch.load(folder / "sparse_linear.pt", weights_only=True), folder / "sparse_linear.safetensors")
    (folder / "sparse_linear.pt").unlink()
    same(Served(folder, LexicalSparseEmbeddings).json(TEXTS), expected_lexical(lexical, TEXTS))


class Runs:
    """Code in a pickle: it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.file,)


WRONG_LAYERS: dict[str, Callable[[Path], Any]] = {
    "code": lambda folder: Runs(folder / "ran"),
    "another size": lambda folder: {"weight": torch.zeros(1, 31), "bias": torch.zeros(1)},
    "several weights": lambda folder: {"weight": torch.zeros(2, 32), "bias": torch.zeros(2)},
    "other names": lambda folder: {"kernel": torch.zeros(1, 32)},
    "no tensors": lambda folder: {"weight": "heavy", "bias": None},
    "no dictionary": lambda folder: torch.zeros(1, 32),
}


@pytest.mark.parametrize("case", WRONG_LAYERS)
def test_a_wrong_layer_is_refused_and_runs_no_code(case: str, lexical: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(lexical, tmp_path / "model")
    torch.save(WRONG_LAYERS[case](folder), folder / "sparse_linear.pt")
    with pytest.raises(LoadError, match=r"sparse_linear\.pt holds no layer that makes a weight of 32 numbers"):
        Served(folder, LexicalSparseEmbeddings)
    assert not (folder / "ran").exists()


def test_bytes_that_are_no_torch_file_are_refused(lexical: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(lexical, tmp_path / "model")
    for content in (b"", b"version https://git-lfs", pickle.dumps(Runs(folder / "ran"))):
        (folder / "sparse_linear.pt").write_bytes(content)
        with pytest.raises(LoadError, match="holds no layer"):
            Served(folder, LexicalSparseEmbeddings)
    assert not (folder / "ran").exists()


def write(folder: Path, file: str, **options: Any) -> None:
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **options}))


POOLING = "1_SpladePooling/config.json"
GENERAL = "config_sentence_transformers.json"
WRONG_FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "pooling": (POOLING, {"pooling_strategy": "mean"}, "has pooling_strategy 'mean' in SpladePooling; served are max"),
    "activation": (POOLING, {"activation_function": ["relu"]}, r"has activation_function .* served are relu and log1p"),
    "task": ("sentence_bert_config.json", {"transformer_task": "retrieval"}, "has transformer_task 'retrieval'"),
    "number": (GENERAL, {"max_active_dims": "many"}, "cannot be read"),
    "no number": (GENERAL, {"max_active_dims": 0}, "max_active_dims is 0"),
    "prompt": (GENERAL, {"default_prompt_name": "passage"}, "names no prompt"),
    "kind": (GENERAL, {"model_type": "MultiVectorEncoder"}, "is a MultiVectorEncoder"),
}


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_splade(tmp_path_factory.mktemp("splade") / "model")


@pytest.mark.parametrize("case", WRONG_FILES)
def test_wrong_files_are_refused_by_what_is_wrong(case: str, splade: Path, tmp_path: Path) -> None:
    file, options, sentence = WRONG_FILES[case]
    folder = shutil.copytree(splade, tmp_path / "model")
    write(folder, file, **options)
    with pytest.raises(LoadError, match=sentence):
        SparseEmbeddings.check_files(folder, ModelSettings(huggingface_model=str(folder)))
    with pytest.raises(LoadError, match=sentence):
        Served(folder, SparseEmbeddings)


def save_router(plain: Path) -> list[Any]:
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    transformer: Any = Transformer(str(plain), transformer_task="fill-mask")
    query: Any = [SparseStaticEmbedding(transformer.tokenizer)]
    return [Router.for_query_document(query_modules=query, document_modules=[transformer, SpladePooling()])]


def save_csr(plain: Path) -> list[Any]:
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder

    return [Transformer(str(plain)), Pooling(32, "mean"), SparseAutoEncoder(32, 64, k=8, k_aux=8)]


@pytest.mark.parametrize(("build", "module"), [(save_router, "Router"), (save_csr, "SparseAutoEncoder")])
def test_other_sparse_encoders_are_refused_by_their_module(build: Any, module: str, tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    plain = save_task_checkpoint(tmp_path / "plain", "bert", "masks")
    with quietly():
        SparseEncoder(modules=build(plain), device="cpu").save(str(tmp_path / "model"), create_model_card=False)
    assert find_tasks(tmp_path / "model")[0] == "sparse-embeddings"
    with pytest.raises(LoadError, match=f"has the module '{module}' in its modules.json"):
        SparseEmbeddings.check_files(tmp_path / "model", ModelSettings(huggingface_model="x"))


def test_dense_models_and_sparse_ones_are_not_taken_for_each_other(splade: Path, lexical: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="is a SparseEncoder by its files: set task to what it does"):
        Served(splade, Embeddings)
    folder = shutil.copytree(lexical, tmp_path / "model")
    (folder / "sparse_linear.pt").unlink()
    with pytest.raises(LoadError, match=r"needs a model ForMaskedLM, or sparse_linear\.pt beside it"):
        Served(folder, SparseEmbeddings, task="sparse-embeddings")
    with pytest.raises(LoadError, match=r"modules Transformer, Pooling.* and no sparse_linear\.pt.*set task"):
        SparseEmbeddings.check_files(folder, ModelSettings(huggingface_model="x"))
