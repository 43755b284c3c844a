# SPDX-License-Identifier: Apache-2.0
"""Prompts with images are prepared as transformers' processor prepares them; a bad one refuses its own request."""

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hf_triton.engine.protocols import EngineLoad
from hf_triton.engine.sequence import Completion, SequenceGroup
from hf_triton.errors import HfTritonError, RequestError, UnavailableError
from hf_triton.hub import processor as processors
from hf_triton.hub.checkpoint import Checkpoint, Placement, load_checkpoint
from hf_triton.hub.imports import torchvision_fault
from hf_triton.hub.locate import Hub
from hf_triton.protocol.chat_request import Chat
from hf_triton.protocol.parameters import GenerationParameters
from hf_triton.protocol.request_options import RequestOptions
from hf_triton.protocol.requests import GenerationRequest
from hf_triton.runner.image_inputs import PromptImages
from hf_triton.settings import ModelSettings
from hf_triton.tasks.hooks import Hooks
from hf_triton.tasks.text_generation.images import HeldMemory, ImagePreparer
from hf_triton.tasks.text_generation.service import TextGenerationService, build_text_generation
from tests.support.collector import Collector, config_of
from tests.support.image_checkpoints import ALL, build_seeing_checkpoint
from tests.support.image_reference import ImageReference, load_image_reference
from tests.support.images import encoded, made_image

SMALL, TALL = encoded(made_image(61, 40, 1)), encoded(made_image(40, 90, 2), "JPEG")
FILES = [SMALL, TALL, SMALL]
NAMES = ["the first", "the second", "the third"]
IMAGE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


MESSAGES = (
    {"role": "user", "content": [text("What is "), IMAGE, text("?")]},
    {"role": "assistant", "content": "A boat."},
    {"role": "user", "content": [IMAGE, text(" and "), IMAGE, text(" too?")]},
)


def chat_of(*messages: dict[str, Any], files: list[bytes]) -> Chat:
    places = [
        f"messages[{index}].content[{place}]"
        for index, message in enumerate(messages)
        for place, part in enumerate(message["content"])
        if part == IMAGE
    ]
    return Chat(
        messages,
        None,
        {},
        add_generation_prompt=True,
        continue_final_message=False,
        images=tuple(files),
        image_places=tuple(places),
    )


def load(folder: Path, **settings: Any) -> tuple[Checkpoint, ModelSettings]:
    checked = ModelSettings(huggingface_model=str(folder), **settings)
    return load_checkpoint(Hub(folder, checked, {}), checked, Placement("CPU", 0)), checked


def preparer_of(folder: Path, **settings: Any) -> ImagePreparer:
    checkpoint, checked = load(folder, **settings)
    assert checkpoint.processor is not None, checkpoint.image_obstacle
    return ImagePreparer(checkpoint.processor, checkpoint.model, checked, checkpoint.context_length)


@pytest.mark.parametrize("family", ALL)
def test_tokens_pixels_and_positions_are_the_processors(family: str, tmp_path: Path) -> None:
    folder = build_seeing_checkpoint(tmp_path / "model", family)
    images, reference = preparer_of(folder), load_image_reference(folder)
    prompt = reference.text(MESSAGES)
    ids, prepared = images.prepare(prompt, FILES, NAMES)
    expected = reference.inputs(MESSAGES, FILES)
    assert ids == expected.pop("input_ids")[0].tolist()
    expected.pop("attention_mask")
    generated = set(prepared.arguments)
    assert generated >= {name for name in expected if name != "mm_token_type_ids"}
    for name in generated:
        assert np.array_equal(prepared.arguments[name], expected[name].numpy())
    check_places(prepared, ids, reference)
    check_parts(prepared, images, prompt)
    check_features(prepared, reference)
    check_positions(prepared, ids, expected, reference)


def check_places(prepared: PromptImages, ids: list[int], reference: ImageReference) -> None:
    assert len(prepared.images) == 3
    places = np.concatenate([image.places for image in prepared.images])
    assert places.tolist() == [i for i, each in enumerate(ids) if each == reference.model.config.image_token_id]


def check_parts(prepared: PromptImages, images: ImagePreparer, prompt: str) -> None:
    """Equal images are equal, here and in another prompt of the same salt; others are not."""
    first, second, third = (image.digest for image in prepared.images)
    assert first == third != second
    start, end = prompt.index(images.placeholder), prompt.rindex(images.placeholder) + len(images.placeholder)
    _, other = images.prepare(f"{prompt[:start]}x{images.placeholder}{prompt[end:]}", [SMALL], NAMES[:1])
    assert [image.digest for image in other.images] == [first]
    _, salted = images.prepare(f"{prompt[:start]}x{images.placeholder}{prompt[end:]}", [SMALL], NAMES[:1], salt="mine")
    assert salted.images[0].digest != first
    assert len({image.number for image in (*prepared.images, *other.images)}) == 4


def check_features(prepared: PromptImages, reference: ImageReference) -> None:
    """What the vision tower is given for each image gives as many features as it has places."""
    for image in prepared.images:
        arguments = {name: torch.from_numpy(array.copy()) for name, array in image.arguments.items()}
        with torch.inference_mode():
            features = reference.model.base_model.get_image_features(**arguments, return_dict=True).pooler_output
        assert sum(each.reshape(-1, each.shape[-1]).shape[0] for each in features) == len(image.places)


def check_positions(
    prepared: PromptImages, ids: list[int], expected: dict[str, Any], reference: ImageReference
) -> None:
    rule = getattr(reference.model.base_model, "get_rope_index", None)
    assert (prepared.positions is None) == (rule is None)
    if rule is not None:
        names = {name: expected[name] for name in ("image_grid_thw", "mm_token_type_ids")}
        positions, offset = rule(torch.tensor([ids]), **names)
        assert np.array_equal(prepared.positions, positions[:, 0].numpy())
        assert prepared.offset == offset.item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_seeing_checkpoint(tmp_path_factory.mktemp("llava") / "model", "llava")


@pytest.fixture(scope="module")
def images(folder: Path) -> ImagePreparer:
    return preparer_of(folder, max_image_pixels=10_000)


def test_images_that_cannot_be_told_apart_are_one(images: ImagePreparer, monkeypatch: pytest.MonkeyPatch) -> None:
    make = images._process

    def process(prompt: str, files: Any, **options: Any) -> Any:
        if prompt == images.placeholder:
            raise RequestError("invalid_input", "no")
        return make(prompt, files, **options)

    monkeypatch.setattr(images, "_process", process)
    _, prepared = images.prepare("a <image> b <image>", [SMALL, TALL], NAMES[:2])
    [image] = prepared.images
    assert len(image.places) == 32
    assert np.array_equal(image.arguments["pixel_values"], prepared.arguments["pixel_values"])


def test_special_tokens_are_added_as_to_a_text(images: ImagePreparer) -> None:
    without, _ = images.prepare("a <image>", [SMALL], NAMES[:1])
    tokenizer = images._processor.tokenizer
    added = tokenizer("a")["input_ids"]
    ids, _ = images.prepare("a <image>", [SMALL], NAMES[:1], adds_special_tokens=True)
    assert len(ids) - len(without) == len(added) - len(tokenizer("a", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("prompt", "files", "words"),
    [
        pytest.param("<image>", [encoded(Image.new("L", (9000, 9000)), optimize=True)], "", id="bomb"),
        pytest.param("<image>", [SMALL[:200]], "damaged", id="truncated"),
        pytest.param("<image>", [b"%PDF-1.7"], "is not PNG", id="wrong type"),
        pytest.param("<image> <image>", [SMALL, b""], "the second is empty", id="empty"),
        pytest.param("<image>", [b"https://example.com/a.png"], "nothing is fetched", id="address"),
        pytest.param("<image>", [encoded(Image.new("RGB", (5000, 1)))], "longer side", id="ratio"),
        pytest.param("<image>", [SMALL, SMALL], "refuses the images", id="fewer placeholders"),
        pytest.param("no place", [SMALL], "refuses the images", id="no placeholder"),
    ],
)
def test_a_bad_image_is_refused(prompt: str, files: list[bytes], words: str, images: ImagePreparer) -> None:
    before = images._memory.held
    with pytest.raises(RequestError) as raised:
        images.prepare(prompt, files, NAMES[: len(files)])
    assert words in raised.value.sentence
    assert images._memory.held == before
    assert images.prepare("<image>", [SMALL], NAMES[:1])


def test_images_that_exceed_the_context_are_not_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = preparer_of(folder, max_context_length=40)
    monkeypatch.setattr("hf_triton.tasks.text_generation.images.read_image", None)
    with pytest.raises(RequestError) as raised:
        images.prepare("<image><image><image>", FILES, NAMES)
    assert raised.value.code == "context_exceeded"
    assert "48 tokens" in raised.value.sentence


def test_each_image_counts_as_it_takes_the_fewest_tokens(
    images: ImagePreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(image_sizes: list[tuple[int, int]]) -> Any:
        return SimpleNamespace(num_image_tokens=[10 * height for height, _ in image_sizes])

    monkeypatch.setattr(images._processor, "_get_num_multimodal_tokens", count)
    images._check_tokens([(80, 10), (10, 80)])
    with pytest.raises(RequestError, match="take 600 tokens"):
        images._check_tokens([(80, 30), (30, 80)])


def test_the_memory_of_images_is_bounded_and_freed(images: ImagePreparer) -> None:
    memory = HeldMemory(20_000)
    _, prepared = images.prepare("a <image>", [SMALL], NAMES[:1])
    memory.keep(prepared)
    assert memory.held == prepared.arguments["pixel_values"].nbytes == 9408
    with memory.hold(10_000), pytest.raises(UnavailableError, match="send the request again"):
        memory.hold(1000).__enter__()
    with pytest.raises(RequestError, match="fewer or smaller"):
        memory.hold(20_001).__enter__()
    del prepared
    gc.collect()
    assert memory.held == 0


def test_a_tiny_image_counts_as_the_processor_enlarges_it(folder: Path) -> None:
    images = preparer_of(folder)
    images.sample(["<image> <image>"])
    images._memory = HeldMemory(2 * 2 * 28 * 28 * 3 * 4 - 1)
    tiny = encoded(made_image(1, 1))
    images.prepare("<image>", [tiny], NAMES[:1])
    with pytest.raises(RequestError, match="fewer or smaller"):
        images.prepare("<image><image>", [tiny] * 2, NAMES[:2])


def test_the_memory_of_files_that_wait_is_bounded_and_freed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, engine = serve(folder, monkeypatch)
    gate, files = threading.Event(), HeldMemory(3 * len(SMALL))
    service._preparer._images._files = files  # type: ignore[union-attr]
    replies = [Collector() for _ in range(5)]
    with closing(service):
        for _ in range(2):
            service._image_pool.submit(gate.wait)
        for reply in replies:
            row = GenerationParameters(max_new_tokens=1)
            service.generate(reply, GenerationRequest(["a"], [row], RequestOptions(), (1,), (SMALL,)), config_of())
        gate.set()
        assert all(reply.is_finished.wait(30) for reply in replies)
    codes = [reply.results[0].code for reply in replies if isinstance(reply.results[0], HfTritonError)]
    assert codes == ["queue_full"] * 2
    del reply, replies
    engine.groups.clear()
    gc.collect()
    assert files.held == 0


# --- the way to the engine -------------------------------------------------------------------------------------------


class Engine:
    """Keeps what it is sent, and answers it."""

    name = "continuous"
    images, image_obstacle = "continuous", ""
    slower: list[str] = []

    def __init__(self, *_: Any) -> None:
        self.groups: list[SequenceGroup] = []

    def submit(self, groups: list[SequenceGroup]) -> None:
        self.groups += groups
        for group in groups:
            group.finish([Completion([5], "length")])

    def load(self) -> EngineLoad:
        return EngineLoad()

    def admission_error(self, group: SequenceGroup) -> None:
        return None

    def close(self) -> None:
        pass


Ask = Callable[..., Any]


@pytest.fixture
def ask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    service, engine = serve(folder, monkeypatch)

    def send(*prompts: Any, files: list[bytes] = [], options: dict[str, Any] = {}, **parameters: Any) -> Any:  # noqa: B006
        reply, rows = Collector(), [GenerationParameters(**parameters)] * len(prompts)
        asked = GenerationRequest(list(prompts), rows, RequestOptions(**options), (len(prompts),), images=tuple(files))
        engine.groups.clear()
        service.generate(reply, asked, config_of())
        assert reply.is_finished.wait(30)
        [result] = reply.results
        return result if isinstance(result, HfTritonError) else list(engine.groups)

    yield send
    service.close()


def serve(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[TextGenerationService, Engine]:
    checkpoint, checked = load(folder, **settings)
    engine = Engine()
    engine_options: list[Any] = []
    monkeypatch.setattr(
        "hf_triton.engine.choose.build_engine", lambda _, __, options: engine_options.append(options) or engine
    )
    service = build_text_generation(
        checkpoint,
        checked,
        Hooks(),
        Hub(folder, checked, {}),
        chat_template=None,
        on_fatal=lambda: None,
        observer=None,  # type: ignore[arg-type]
        returns_timings=True,
    )
    engine.sample = engine_options[0].image_sample  # type: ignore[attr-defined]
    return service, engine


def test_a_prompt_reaches_the_engine_with_its_images(ask: Ask, folder: Path) -> None:
    reference = load_image_reference(folder)
    [chat] = ask(chat_of(*MESSAGES, files=FILES))
    [written] = ask("a <image> b", files=[TALL])
    [unwritten] = ask("b", files=[TALL, SMALL])
    [plain] = ask("a")
    assert chat.prompt_ids == reference.inputs(MESSAGES, FILES)["input_ids"][0].tolist()
    assert written.prompt_ids == reference.inputs("a <image> b", [TALL])["input_ids"][0].tolist()
    assert unwritten.prompt_ids == reference.inputs("<image>\n<image>\nb", [TALL, SMALL])["input_ids"][0].tolist()
    assert [len(group.images.images) for group in (chat, written, unwritten)] == [3, 1, 2]
    assert plain.images is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompts": ["a", "b"]}, "one prompt, and this one has 2"),
        ({"prompts": [(3, 4)]}, "cannot have images beside"),
        ({"prompts": ["<image> <image> <image>"]}, "3 of <image> for 1 images"),
        ({"prompts": ["a"], "suffix": "b"}, "cannot be combined with images"),
        ({"prompts": ["a"], "truncate_prompt_tokens": 3}, "cuts no prompt with images"),
        ({"prompts": ["a " * 600]}, "at least one new token: shorten it"),
        ({"prompts": ["a"], "files": [b"no"]}, "is not PNG"),
    ],
)
def test_what_images_cannot_be_combined_with_is_refused(ask: Ask, asked: dict[str, Any], words: str) -> None:
    prompts = asked.pop("prompts")
    error = ask(*prompts, **{"files": [SMALL], **asked})
    assert isinstance(error, RequestError)
    assert words in error.sentence


def test_a_bad_image_is_named_by_its_place(ask: Ask) -> None:
    named = "messages[2].content[2] is damaged"
    assert str(ask(chat_of(*MESSAGES, files=[SMALL, TALL, SMALL[:90]]))).startswith(f"invalid_input: {named}")
    assert str(ask("a", files=[SMALL, SMALL[:90]])).startswith("invalid_input: image[1] is damaged")


def test_a_text_with_the_token_of_images_is_refused(tmp_path: Path) -> None:
    """The placeholder of Gemma 3 is another word."""
    images = preparer_of(build_seeing_checkpoint(tmp_path / "model", "gemma3"))
    images.check_text(f"a {images.placeholder}{images.placeholder} b", "x")
    with pytest.raises(RequestError, match="x must not have the text <image_soft_token>"):
        images.check_text(f"a {images.placeholder} <image_soft_token>", "x")


def test_tokens_of_images_are_counted(ask: Ask) -> None:
    error = ask("a", files=[SMALL], max_new_tokens=500)
    assert error.code == "context_exceeded"
    assert error.sizes["tokens"] > 16


def test_the_model_is_tried_with_two_images_beside_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, engine = serve(folder, monkeypatch)
    assert service.info is not None
    assert (service.info.images, service.info.image_obstacle) == ("continuous", "")
    assert (service._limits.max_images, service._limits.max_image_bytes) == (16, 20 << 20)
    sample = engine.sample  # type: ignore[attr-defined]
    first, second = sample.images.images
    assert first.digest != second.digest
    assert 0 < first.start < first.end < second.start < second.end < len(sample.prompt_ids)
    service.close()


@pytest.mark.parametrize(
    ("settings", "missing", "words"),
    [
        ({"max_images": 0}, None, "max_images is 0"),
        ({}, "processor_config.json", "no processor"),
        ({"max_context_length": 20}, None, "two small images"),
    ],
)
def test_a_model_that_takes_no_images_says_why(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    missing: str | None,
    words: str,
) -> None:
    for file in folder.iterdir():
        if file.name != missing:
            (tmp_path / file.name).symlink_to(file)
    service, engine = serve(tmp_path, monkeypatch, **settings)
    assert service.info is not None
    assert (service.info.images, service._limits.max_images) == ("no", 0)
    assert words in service.info.image_obstacle
    assert engine.sample is None  # type: ignore[attr-defined]
    reply = Collector()
    request = GenerationRequest(["a"], [GenerationParameters()], RequestOptions(), (1,), images=(SMALL,))
    service.generate(reply, request, config_of())
    assert reply.is_finished.wait(30)
    [error] = reply.results
    assert words in error.sentence
    service.close()


def test_a_processor_that_cannot_be_made_says_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "torchvision_fault", lambda: "it is not installed")
    monkeypatch.setattr(processors, "_load", lambda *_: (_ for _ in ()).throw(ImportError("it requires torchvision")))
    checkpoint, _ = load(folder)
    assert checkpoint.processor is None
    assert "torchvision, and it is not installed: pip install 'hf-triton[image]'" in checkpoint.image_obstacle


@pytest.mark.parametrize("family", [each for each in ALL if "qwen3.5" in each.values])
def test_a_model_whose_text_part_is_a_model_is_loaded_whole_for_images_alone(family: str, tmp_path: Path) -> None:
    folder = build_seeing_checkpoint(tmp_path / "model", family)
    assert "ConditionalGeneration" in type(load(folder)[0].model).__name__
    assert "CausalLM" in type(load(folder, max_images=0)[0].model).__name__


def test_a_torchvision_that_does_not_fit_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    torchvision_fault.cache_clear()
    assert torchvision_fault() == f"the installed one does not fit torch {torch.__version__}"
    assert "operator torchvision::nms does not exist" in caplog.text
    torchvision_fault.cache_clear()
