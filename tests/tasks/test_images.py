# SPDX-License-Identifier: Apache-2.0
"""Models that read images answer as transformers does, whatever their company."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from hf_triton.encoder.engine import EncoderEngine
from hf_triton.encoder.stacked import StackedForward
from hf_triton.errors import CheckpointError, HfTritonError, RequestError
from hf_triton.hub.kind import find_tasks, find_way
from hf_triton.hub.locate import Hub
from hf_triton.settings import ModelSettings
from hf_triton.tasks.registry import folder_task
from hf_triton.testing import LoopbackHub
from tests.support.images import (
    BOTH,
    CLASSIFIERS,
    IMAGES,
    LABELS,
    bytes_tensor,
    encoded,
    made_image,
    save_image_checkpoint,
)
from tests.support.sentence_checkpoints import quietly
from tests.support.tasks import Served

TOLERANCE = 1e-5
FILES = bytes_tensor(list(map(encoded, IMAGES)))
TEXTS = ["a cat", "the old harbour has two boats, and a cat", "bad"]


def served(folder: Path, **settings: Any) -> Served:
    kind = folder_task(None, ModelSettings(huggingface_model=str(folder)), folder)
    assert kind is not None
    return Served(folder, kind, **settings)


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_checkpoint(tmp_path_factory.mktemp("vit"), "vit")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_checkpoint(tmp_path_factory.mktemp("clip"), "clip", has_texts=True)


def pil_processor(folder: Path) -> Any:
    """The one that is served, also where torchvision is installed: their pixels differ by a grey level."""
    load: Any = AutoImageProcessor.from_pretrained
    return load(folder, backend="pil")


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_labels_and_scores_are_those_of_the_pipeline(family: str, tmp_path: Path) -> None:
    folder = save_image_checkpoint(tmp_path, family)
    assert find_tasks(folder) == ["image-classification"]
    outputs = served(folder).ask({"image": FILES}, ["label", "score", "all_scores", "all_labels"], top_k=2)
    build: Any = transformers.pipeline
    with quietly():
        processor = pil_processor(folder)
        pipe = build("image-classification", model=str(folder), image_processor=processor, device="cpu")
        expected = [pipe(image, top_k=len(LABELS)) for image in IMAGES]
    for row, best in enumerate(expected):
        by_label = {each["label"]: each["score"] for each in best}
        assert outputs["label"][row].tolist() == [each["label"].encode() for each in best[:2]]
        assert outputs["score"][row] == pytest.approx([each["score"] for each in best[:2]], abs=TOLERANCE)
        assert outputs["all_scores"][row] == pytest.approx([by_label[name] for name in LABELS.values()], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("settings", "function"),
    [
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "single_label_classification"}, "softmax"),
    ],
)
def test_the_problem_decides_what_makes_scores(settings: dict[str, str], function: str, tmp_path: Path) -> None:
    own = served(save_image_checkpoint(tmp_path, "vit", **settings))
    names = ["all_scores"]
    by_default = own.ask({"image": FILES}, names)["all_scores"]
    assert np.array_equal(by_default, own.ask({"image": FILES}, names, function_to_apply=function)["all_scores"])


@pytest.mark.parametrize("family", BOTH)
def test_texts_and_images_have_the_vectors_of_transformers(family: str, tmp_path: Path) -> None:
    folder = save_image_checkpoint(tmp_path, family, has_texts=True)
    assert (find_tasks(folder), find_way(folder)) == (["embeddings"], "image")
    own = served(folder)
    with quietly():
        model, processor = AutoModel.from_pretrained(folder).eval(), pil_processor(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    padding = {"padding": "max_length", "max_length": 40} if family.startswith("siglip") else {}
    images, texts = [], []
    with torch.no_grad():
        for image in IMAGES:
            images.append(model.get_image_features(**processor(images=image, return_tensors="pt")).pooler_output[0])
        for text in TEXTS:
            inputs = tokenizer(text, return_tensors="pt", **padding)
            inputs.pop("token_type_ids", None)
            texts.append(model.get_text_features(**inputs).pooler_output[0])
    check_close(own.ask({"image": FILES})["embedding"], images)
    check_close(own.ask({"text": bytes_tensor(TEXTS)})["embedding"], texts)
    ids = [json.dumps(tokenizer(text)["input_ids"]) for text in TEXTS]
    check_close(own.ask({"token_ids": bytes_tensor(ids)})["embedding"], texts)


def check_close(found: npt.NDArray[Any], expected: list[torch.Tensor]) -> None:
    reference = torch.stack(expected).numpy()
    assert np.abs(found - reference).max() <= TOLERANCE * np.abs(reference).max()
    assert np.abs(reference[0] - reference[1]).max() > 0.01 * np.abs(reference).max()


@pytest.mark.parametrize(("family", "has_texts"), [("vit", False), ("convnext", False), ("siglip2", True)])
def test_an_image_has_its_outputs_in_any_company(family: str, has_texts: bool, tmp_path: Path) -> None:
    own = served(save_image_checkpoint(tmp_path, family, has_texts=has_texts))
    name = "embedding" if has_texts else "all_scores"
    files = [encoded(made_image(20 + 7 * seed, 60, seed)) for seed in range(9)]
    together = own.ask({"image": bytes_tensor(files)}, [name])[name]
    alone = np.concatenate([own.ask({"image": bytes_tensor([file])}, [name])[name] for file in files])
    assert np.abs(together - alone).max() <= TOLERANCE * np.abs(alone).max()


def test_a_vector_is_cut_then_normalised(clip: Path) -> None:
    whole = served(clip).ask({"image": FILES})["embedding"]
    cut = served(clip, normalize=True).ask({"image": FILES}, dimensions=5)["embedding"]
    assert np.allclose(cut, whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True), atol=1e-6)
    texts = served(clip).ask({"text": bytes_tensor(TEXTS)}, normalize=True)["embedding"]
    assert np.linalg.norm(texts, axis=1) == pytest.approx(1)


def test_shapes_share_a_forward(vit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = served(vit)
    sizes: list[int] = []
    compute = own.task.compute
    monkeypatch.setattr(
        own.forward, "_compute", lambda arrays: sizes.append(len(arrays["pixel_values"])) or compute(arrays)
    )
    own.ask({"image": FILES})
    assert sizes == [3]


def test_an_image_that_fails_fails_alone(vit: Path) -> None:
    own = served(vit)
    good = own.task.image(FILES[0])
    bad = own.task.image(FILES[1])
    bad.arrays["pixel_values"][:] = np.nan
    assert isinstance(own.forward, StackedForward)
    engine = EncoderEngine(own.forward)
    try:
        with pytest.raises(HfTritonError, match="NaN"):
            engine.run([bad])
        assert len(engine.run([good, good])) == 2
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("inputs", "options", "sentence"),
    [
        ({}, {}, "there is no text and no image: give one of text, token_ids, image"),
        ({"text": ["a"], "image": [FILES[0]]}, {}, "text and image are given: give one of text, token_ids, image"),
        (
            {"text": ["a cat " * 60]},
            {},
            "the text has 242 tokens, more than the 40 of the model: shorten it, or set truncate to true",
        ),
        ({"token_ids": ["[400]"]}, {}, "the text must have tokens, with ids in 0 to 319"),
        ({"image": [FILES[0]]}, {"dimensions": 25}, "dimensions must be an integer >= 1 and <= 24, got 25"),
        ({"image": ["a cat"]}, {}, "image is not PNG, JPEG, WebP or GIF, nor base64 of it"),
        ({"text": [b"\xff"]}, {}, "text row 0 is not valid UTF-8: byte 0xff at offset 0"),
        (
            {"image": [encoded(made_image(200, 200), "JPEG")]},
            {},
            "image has 200 x 200 pixels, more than the 10000 that are accepted (setting max_image_pixels): make it "
            "smaller",
        ),
    ],
)
def test_wrong_inputs_get_a_sentence(
    clip: Path, inputs: dict[str, Any], options: dict[str, Any], sentence: str
) -> None:
    own = served(clip, max_image_pixels=10_000)
    with pytest.raises(RequestError) as caught:
        own.ask({name: bytes_tensor(values) for name, values in inputs.items()}, **options)
    assert caught.value.sentence == sentence


def test_an_image_as_text_is_read(vit: Path) -> None:
    text = base64.b64encode(FILES[0]).decode()
    own = served(vit)
    expected = own.ask({"image": FILES[:1]})["label"]
    assert own.ask({}, image=f"data:image/png;base64,{text}")["label"] == expected
    assert own.ask({"images": bytes_tensor([text])})["label"] == expected


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        ("preprocessor_config.json", None, "has no preprocessor_config.json: copy the whole checkpoint there"),
        ("preprocessor_config.json", "[1]", "preprocessor_config.json"),
        ("preprocessor_config.json", '{"image_processor_type": "NoImageProcessor"}', "preprocessor_config.json"),
        (
            "preprocessor_config.json",
            '{"image_processor_type": "ViTImageProcessor", "size": {"height": 1048576, "width": 16}}',
            "has a size of 1048576 pixels, more than 8192",
        ),
        (
            "preprocessor_config.json",
            '{"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}',
            "image processor",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    file: str, change: str | None, sentence: str, tmp_path: Path
) -> None:
    folder = save_image_checkpoint(tmp_path, "vit")
    (folder / file).unlink()
    if change is not None:
        (folder / file).write_text(change)
    with pytest.raises(CheckpointError, match=sentence):
        served(folder)


@pytest.mark.full
@pytest.mark.parametrize(("family", "has_texts"), [("vit", False), ("clip", True)])
def test_a_name_on_the_hub_brings_the_image_processor(family: str, has_texts: bool, tmp_path: Path) -> None:
    folder = save_image_checkpoint(tmp_path / family, family, has_texts=has_texts)
    (tmp_path / "mine").mkdir()
    settings = ModelSettings(huggingface_model="acme/sight")
    with LoopbackHub() as loopback:
        loopback.add("acme/sight", folder)
        hub = Hub(tmp_path / "mine", settings, {**loopback.environment(), "HF_HOME": str(tmp_path / "home")})
        hub.fetch_config()
        fetched = hub.resolve_model()
    assert (fetched / "preprocessor_config.json").exists()
    assert (fetched / "model.safetensors").exists()
