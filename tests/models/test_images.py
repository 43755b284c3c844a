# SPDX-License-Identifier: Apache-2.0
"""Images in a step, by tiny random models that see: the logits of `generate`, whole, in chunks, in company."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_triton.errors import CheckpointError
from hf_triton.runner.gpu_memory import WHOLE_GPU, LoadMemory
from hf_triton.runner.image_inputs import ImageInput, ImageSample
from hf_triton.runner.image_probe import find_images
from hf_triton.runner.images import ImageMemory, image_memory
from hf_triton.runner.model_comparison import distance
from hf_triton.runner.model_runner import PACKED, ModelRunner, Way
from hf_triton.runner.reference import logits_after
from hf_triton.runner.step import Step, TokenRange
from hf_triton.runner.way_probe import find_way
from tests.support.image_models import IMAGE, SEEING, Prompt, build_seeing, expected, make_runner, make_sample, way_of

LIMIT = 1e-4
"""Part of a row's largest logit; another image changes them by a hundred times as much."""


@pytest.fixture(scope="module", params=SEEING)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return build_seeing(name)


@pytest.fixture(scope="module")
def way(name: str) -> Way:
    return way_of(name)


def run_alone(runner: ModelRunner, prompt: Prompt, cuts: list[int]) -> torch.Tensor:
    """The logits behind a prompt in chunks that end at `cuts`, and of what is decoded, `[1 + AFTER, vocabulary]`."""
    chunks = [prompt.range(start, end) for start, end in zip([0, *cuts], cuts, strict=False)]
    logits = [runner.run(Step((part,))) for part in (*chunks, *prompt.decodes())]
    return torch.cat(logits)


def test_chunks_and_what_is_decoded_behind_images(name: str, model: Any, way: Way) -> None:
    """Whole; in chunks that cut both images, end before and behind them, or have one token of an image."""
    sample = make_sample(name, model, (0, 1))
    first, second = sample.images.images
    end = len(sample.prompt_ids)
    reference = expected(model, sample)
    cuts = [[end], [first.start, end], [first.end + 2, second.start, second.end, end]]
    if not way.joins_images:
        cuts += [[first.start + 1, second.end - 1, end], [first.end - 1, first.end, second.start + 2, end]]
    for each in cuts:
        runner = make_runner(model, way)
        assert distance(reference, run_alone(runner, Prompt(runner, sample), each)) < LIMIT, each
    assert distance(reference, expected(model, make_sample(name, model, (2, 3)))) > 100 * LIMIT


def test_company(name: str, model: Any, way: Way) -> None:
    """Prompts with other images and text share steps, in any order; the logits are each one's own."""
    samples = [make_sample(name, model, (0, 1)), make_sample(name, model, (2,), text=9), make_sample(name, model, (4,))]
    runner = make_runner(model, way)
    one, two, three = (Prompt(runner, sample, number) for number, sample in enumerate(samples))
    text = [7, 9, 11, 13, 17]
    middle = samples[0].images.images[1].start + (0 if way.joins_images else 2)
    ends = [len(sample.prompt_ids) for sample in samples]

    def plain(start: int, end: int) -> TokenRange:
        return TokenRange(3, start, end, text[start:end], [3], end, samples=(3,), slot=3)

    decodes = [prompt.decodes() for prompt in (one, two, three)]
    steps = [
        (one.range(0, middle), two.range(0, ends[1]), plain(0, 3)),
        (plain(3, 4), next(decodes[1]), one.range(middle, ends[0]), three.range(0, ends[2])),
        (*map(next, decodes), plain(4, 5)),
    ]
    found: dict[int, list[torch.Tensor]] = {number: [] for number in range(4)}
    for ranges in steps:
        sampling = [part for part in ranges if part.samples]
        for part, row in zip(sampling, runner.run(Step(ranges)), strict=True):
            found[part.sequence_id].append(row)
    for number, sample in enumerate(samples):
        rows = torch.stack(found[number])
        assert distance(expected(model, sample)[: len(rows)], rows) < LIMIT, number
    assert distance(logits_after(model, [text[:3]], [text[3:]])[:, 0], torch.stack(found[3])) < LIMIT


def test_placeholders_that_stand_for_no_image(name: str, model: Any, way: Way) -> None:
    """A recomputed sequence has generated a token that looks like a placeholder: it is its own embedding."""
    if name == "gemma4":
        pytest.skip("its forward embeds a placeholder that it generates as padding")
    sample = make_sample(name, model)
    once = make_runner(model, way)
    ids = [*sample.prompt_ids, IMAGE, IMAGE, 50]
    prompts = []
    for runner in (once, make_runner(model, way)):
        prompt = Prompt(runner, sample)
        prompt.ids = ids
        prompts.append((runner, prompt))
    end = len(sample.prompt_ids)
    last = run_alone(*prompts[0], [end])[-1:]
    recomputed = prompts[1][0].run(Step((prompts[1][1].range(0, len(ids)),)))
    assert distance(last, recomputed) < LIMIT


def test_the_trial(name: str, model: Any, way: Way) -> None:
    """Every model here runs images as it runs text, and the trial finds out whether they are cut."""
    finding = find_way(model, 256, make_sample(name, model, (0, 1)))
    assert finding.images.mode == "continuous", finding.images.obstacle
    assert finding.way == way
    assert not finding.obstacle


def test_the_tower_runs_once_for_equal_images(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_seeing("llava")
    runs: list[object] = []
    tower = model.base_model.get_image_features
    monkeypatch.setattr(model.base_model, "get_image_features", lambda **given: runs.append(given) or tower(**given))
    sample = make_sample("llava", model)
    (image,) = sample.images.images
    again = ImageInput(image.places + 3, image.arguments, image.digest)
    other = replace(image, digest=b"x" * 32, number=10**6)
    runs.clear()
    runner = make_runner(model, PACKED)
    runner.see(Step(images=(image,)))
    runner.see(Step(images=(image, again)))
    assert len(runs) == 1
    runner.see(Step(images=(other,), dropped_images=(image.number,)))
    assert len(runs) == 2
    assert len(runner.images) == 2
    runner.see(Step(dropped_images=(again.number, other.number, other.number)))
    assert len(runner.images) == 0


def test_an_image_of_another_size_than_its_places() -> None:
    """The step fails, and nothing is kept: features would go to the places of other images."""
    model = build_seeing("llava")
    (image,) = make_sample("llava", model).images.images
    runner = make_runner(model, PACKED)
    with pytest.raises(ValueError, match="16 features, and the prompt 15 places"):
        runner.see(Step(images=(replace(image, places=image.places[1:]),)))
    assert len(runner.images) == 0


def test_models_that_fail_the_trial() -> None:
    """Wrong logits: images run by `generate`; so they do where text does. A model without a tower takes none."""
    model = build_seeing("qwen2.5-vl")
    sample = make_sample("qwen2.5-vl", model)
    wrong = ImageSample(sample.prompt_ids, replace(sample.images, positions=sample.images.positions + 3))
    finding = find_images(model, PACKED, replace(wrong, images=replace(wrong.images, positions=None)))
    assert finding.mode == "generate"
    assert "of the largest output in float32, where 1.0e-03 is allowed" in finding.obstacle
    assert find_images(model, None, sample).mode == "generate"
    assert find_images(model, PACKED, None).mode == "no"
    beyond = ImageSample([*sample.prompt_ids[:-1], 300], sample.images)
    assert find_images(model, PACKED, beyond).mode == "no"
    del model.model.visual
    finding = find_images(model, PACKED, sample)
    assert finding.mode == "no"
    assert "visual" in finding.obstacle


def test_a_half_precision_trial() -> None:
    """Compared in float32: a tower's rounding is no fault."""
    model = build_seeing("qwen3-vl").to(torch.bfloat16)
    assert find_images(model, PACKED, make_sample("qwen3-vl", model)).mode == "continuous"


def test_memory_for_images_on_a_gpu() -> None:
    """The tower's run and idle features come off the KV cache, and each token of it has room for a feature."""
    model = build_seeing("qwen3-vl")
    sample = make_sample("qwen3-vl", model)
    images = image_memory(model, sample, 1024)
    assert images.per_token == 3 * 32 * 4  # hidden states and two layers more, in float32
    (reserved,) = images.reserved.values()
    assert reserved > 4096 * images.per_token + 1024 * 4 * 64 * 4  # four patches a token, as wide as an MLP
    gpu = torch.device("cuda", 0)

    def memory(images: ImageMemory | None) -> LoadMemory:
        return LoadMemory(torch.nn.Linear(1, 1), {gpu: 100}, WHOLE_GPU, 0, lambda _: (10**6, 10**6), images)

    assert memory(None).cache_tokens(1000, 4096) == 9000
    assert memory(ImageMemory(20, {gpu: 300_000})).cache_tokens(1000, 4096) == 5000
    with pytest.raises(CheckpointError, match="kept for images"):
        memory(ImageMemory(20, {gpu: 900_000})).cache_tokens(1000, 4096)
