# SPDX-License-Identifier: Apache-2.0
"""Speech recognition beside transformers' own `generate` and pipeline, on a tiny Whisper and made sounds."""

import base64
import copy
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_triton.errors import CancelledError, CheckpointError, HfTritonError, RequestError
from hf_triton.hub.kind import find_task
from hf_triton.tasks.audio import BLOCK_VALUES
from tests.support.marks import full
from tests.support.sentence_checkpoints import quietly
from tests.support.speech import RATE, WINDOW_S, Asked, Served, encode, save_whisper, sound

SHORT = [sound(seconds, seed) for seed, seconds in enumerate((0.5, 1.3, 2.9, 3.0))]
LONG = [sound(7.9, 5), sound(3.1, 6), sound(13.0, 7)]
SOUNDS = [SHORT[0], SHORT[3], LONG[1], *full(*SHORT[1:3], LONG[0], LONG[2])]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(save_whisper(tmp_path_factory.mktemp("whisper")))
    yield served
    served.service.close()


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(save_whisper(tmp_path_factory.mktemp("english"), languages=()))
    yield served
    served.service.close()


def test_a_folder_of_whisper_has_the_task(served: Served) -> None:
    assert find_task(served.checkpoint.folder) == "automatic-speech-recognition"
    assert served.service.info is not None
    assert served.service.info.task == "automatic-speech-recognition"


@pytest.mark.parametrize("samples", SOUNDS, ids=lambda samples: f"{len(samples) / RATE:g} s")
@pytest.mark.parametrize(
    "parameters",
    [{"language": "de"}, *full({}, {"task": "translate"}, {"max_new_tokens": 5})],
    ids=lambda parameters: "".join(parameters) or "plain",
)
def test_texts_are_those_of_transformers(served: Served, samples: Any, parameters: dict[str, Any]) -> None:
    expected = served.reference(samples, **{"task": "transcribe", **parameters})
    outputs = served.ask(encode(samples, subtype="FLOAT"), **parameters)
    assert outputs["text"][0].decode() == served.text(expected["sequences"][0])
    assert outputs["num_output_tokens"][0] == sum(len(each["tokens"]) for each in expected["segments"][0])
    assert outputs["duration"][0] == pytest.approx(len(samples) / RATE)
    assert outputs["language"][0].decode() == parameters.get("language", "en")


@pytest.mark.parametrize("samples", SOUNDS, ids=lambda samples: f"{len(samples) / RATE:g} s")
def test_timestamps_are_those_of_transformers(served: Served, samples: Any) -> None:
    expected = served.reference(samples, task="transcribe", language="en", return_timestamps=True)
    [found] = served.json(encode(samples, subtype="FLOAT"), language="english", return_timestamps=True)
    duration_s = len(samples) / RATE
    assert [each["text"] for each in found["chunks"]] == [
        served.text(each["tokens"]) for each in expected["segments"][0]
    ]
    times = [[min(float(each[name]), duration_s) for name in ("start", "end")] for each in expected["segments"][0]]
    np.testing.assert_allclose([each["timestamp"] for each in found["chunks"]], times, atol=1e-3)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:std")  # of one token, in transformers' timestamps of words
@pytest.mark.parametrize("samples", SOUNDS, ids=lambda samples: f"{len(samples) / RATE:g} s")
def test_words_are_those_of_the_pipeline(served: Served, samples: Any) -> None:
    from transformers import pipeline

    model = served.checkpoint.model
    before = model.model.config._attn_implementation
    asked = {"language": "en", "task": "transcribe", "max_new_tokens": 40}
    [found] = served.json(encode(samples, subtype="FLOAT"), return_timestamps="word", **asked)
    assert model.model.config._attn_implementation == before
    build: Any = pipeline
    with quietly():
        pipe = build(
            "automatic-speech-recognition",
            model=copy.deepcopy(model),
            tokenizer=served.checkpoint.tokenizer,
            feature_extractor=served.service._task.extractor,
        )
        expected = pipe(samples, return_timestamps="word", generate_kwargs={"num_beams": 1, **asked})["chunks"]
    assert [each["text"] for each in found["words"]] == [each["text"].strip() for each in expected]
    duration_s = len(samples) / RATE
    times = [[min(time_s, duration_s) for time_s in each["timestamp"]] for each in expected]
    np.testing.assert_allclose([each["timestamp"] for each in found["words"]], times, atol=1e-3)
    [again] = served.json(encode(samples, subtype="FLOAT"), return_timestamps="segment", **asked)
    assert found["chunks"] == again["chunks"]


@pytest.mark.filterwarnings("ignore:std")  # of one token, in transformers' timestamps of words
def test_words_of_very_short_audio_are_within_it(served: Served) -> None:
    for num_samples in (1, 160):
        [found] = served.json(encode(SHORT[0][:num_samples]), return_timestamps="word")
        for start_s, end_s in (word["timestamp"] for word in found["words"]):
            assert 0 <= start_s <= end_s <= num_samples / RATE + 0.001


def test_a_temperature_that_no_score_bears_is_greedy(served: Served) -> None:
    data = encode(SHORT[1])
    greedy = served.json(data, temperature=0)
    for temperature in (5e-324, 1e-45, 1e-9):
        assert served.json(data, temperature=temperature) == greedy


def test_an_initial_prompt_is_that_of_transformers(served: Served) -> None:
    prompt = "the old harbour " * 30
    ids = served.checkpoint.tokenizer.get_prompt_ids(prompt, return_tensors="pt")
    kept = torch.cat([ids[:1], ids[-31:]])  # half of the decoder's 64 positions
    expected = served.reference(SHORT[1], task="transcribe", prompt_ids=kept)
    [found] = served.json(encode(SHORT[1], subtype="FLOAT"), prompt=prompt)
    assert found["text"] == served.text(expected["sequences"][0])
    assert found["text"] != served.json(encode(SHORT[1], subtype="FLOAT"))[0]["text"]


@pytest.mark.full
def test_audio_in_company_is_as_alone(served: Served) -> None:
    files = [encode(samples, subtype="FLOAT") for samples in (*SHORT[1:], *LONG[:2])]
    alone = [served.json(file, return_timestamps=True)[0] for file in files]
    assert served.json(*files, return_timestamps=True) == alone
    requests = [Asked([file], return_timestamps=True) for file in (*files, *files[:3])]
    others = [Asked([file], language="fr") for file in files[:3]]
    for request in (*requests, *others):
        served.start(request)
    texts = [request.wait()["text"][0].decode() for request in requests]
    assert texts == [each["text"] for each in (*alone, *alone[:3])]
    for request in others:
        assert request.wait()["language"][0] == b"fr"


def test_several_languages_share_a_batch(served: Served) -> None:
    samples = SHORT[2]
    requests = [Asked([encode(samples, subtype="FLOAT")], language=code) for code in ("de", "fr", "zh", "en")]
    for request in requests:
        served.start(request)
    for request in requests:
        code = request.parameters["language"]
        expected = served.reference(samples, task="transcribe", language=code)
        assert request.wait()["text"][0].decode() == served.text(expected["sequences"][0])


def test_requests_do_not_change_the_checkpoint(served: Served) -> None:
    before = copy.deepcopy(served.checkpoint.model.generation_config.to_dict())
    served.json(encode(LONG[0]), task="translate", language="fr", prompt="boats", temperature=0.7)
    assert served.checkpoint.model.generation_config.to_dict() == before


# --- English alone ---------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("samples", [SHORT[1], LONG[0]], ids=["short", "long"])
def test_a_model_of_one_language(english: Served, samples: Any) -> None:
    expected = english.reference(samples)
    for parameters in ({}, {"language": "en"}, {"language": "English"}):
        [found] = english.json(encode(samples, subtype="FLOAT"), **parameters)
        assert (found["text"], found["language"]) == (english.text(expected["sequences"][0]), "en")


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"language": "de"}, "language must be one of en, the one that this model knows; got 'de'"),
        ({"task": "translate"}, "this model knows one language, and does not translate: task must be transcribe"),
    ],
)
def test_what_a_model_of_one_language_refuses(english: Served, parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        english.ask(encode(SHORT[0]), **parameters)
    assert refused.value.sentence == sentence


# --- wrong parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"language": "xx"}, "language must be one of de, en, fr, zh; got 'xx'"),
        ({"language": "spanish"}, "language must be one of de, en, fr, zh; got 'spanish'"),
        ({"language": 3}, "language must be a string, got 3"),
        ({"task": "sing"}, "task must be one of `transcribe`, `translate`, got 'sing'"),
        ({"return_timestamps": "char"}, "return_timestamps must be one of `none`, `segment`, `word`, got 'char'"),
        ({"return_timestamps": 1}, "return_timestamps must be one of `none`, `segment`, `word`, got 1"),
        ({"prompt": "a <|notimestamps|> b"}, "prompt holds a special token, <|...|>: leave it out"),
        ({"prompt": "a" * 10_001}, "prompt must be a string of up to 10000 characters"),
        ({"temperature": -1.0}, "temperature must be a number >= 0 and <= 2, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be a number >= 0 and <= 2, got nan"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ({"max_new_tokens": 61}, "max_new_tokens must be <= 60, as many as fit behind the prompt, got 61"),
        ({"beams": 3}, "there is no input or parameter 'beams' in automatic-speech-recognition"),
        ({"top_p": 0.3}, "top_p is a parameter of text generation, and this model does automatic-speech-recognition"),
        ({"audio": "x"}, "audio is given twice"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_parameters(served: Served, parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        served.ask(encode(SHORT[0]), **parameters)
    assert refused.value.sentence.startswith(sentence)


def test_a_checkpoint_that_cannot_align_or_time(tmp_path: Path) -> None:
    for without, parameters, sentence in (
        ("alignment_heads", {"return_timestamps": "word"}, "lacks alignment_heads"),
        (
            "no_timestamps_token_id",
            {"return_timestamps": True},
            "return_timestamps asks for timestamps, and this model knows none",
        ),
        ("no_timestamps_token_id", {}, f"audio has 7.9 s, more than the {WINDOW_S} s that are accepted"),
    ):
        served = Served(save_whisper(tmp_path / without, without=without))
        try:
            with pytest.raises(RequestError, match=sentence):
                served.ask(encode(LONG[0]), **parameters)
        finally:
            served.service.close()


# --- one request's outcome -------------------------------------------------------------------------------------------


def test_a_wrong_file_names_its_row_and_touches_no_other(served: Served) -> None:
    good = served.start(Asked([encode(SHORT[0])]))
    with pytest.raises(RequestError, match=r"audio is not WAV, .* \(row 1\)$"):
        served.ask(encode(SHORT[0]), b"nonsense")
    assert good.wait()["text"].shape == (1,)


def test_cancelled_and_late_requests_are_refused(served: Served) -> None:
    file = encode(sound(600, 3))
    long, late = served.start(Asked([file])), served.start(Asked([file], timeout_s=0.05))
    with pytest.raises(HfTritonError, match="deadline_exceeded"):
        late.wait()
    long.cancel()
    with pytest.raises(HfTritonError, match="cancelled"):
        long.wait()
    assert served.ask(encode(SHORT[0]))["text"].shape == (1,)
    assert [len(each.answers) for each in (long, late)] == [1, 1]


def test_a_request_that_ends_while_its_audio_is_read_is_read_no_further(served: Served) -> None:
    class Ending(Asked):
        num_left = 2

        def ending(self) -> HfTritonError | None:
            self.num_left -= 1
            return CancelledError() if self.num_left < 0 else None

    samples = np.zeros(3 * BLOCK_VALUES, np.int16)
    request = served.start(Ending([encode(samples, 384_000, "FLAC")]))
    with pytest.raises(CancelledError):
        request.wait()
    assert request.num_left == -1


def test_a_row_at_fault_fails_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served.service._engine
    whole = engine._extract
    held = threading.Event()

    def extract(groups: Any, is_long: bool) -> Any:
        held.wait(10)
        if any(len(group.samples) == len(SHORT[3]) for group in groups):
            raise ValueError("no")
        return whole(groups, is_long)

    monkeypatch.setattr(engine, "_extract", extract)
    requests = [served.start(Asked([encode(samples)])) for samples in SHORT]
    held.set()
    assert [request.wait()["text"].size for request in requests[:3]] == [1, 1, 1]
    with pytest.raises(HfTritonError, match="generation_failed"):
        requests[3].wait()


def test_closing_answers_everyone(tmp_path: Path) -> None:
    served = Served(save_whisper(tmp_path))
    requests = [served.start(Asked([encode(sound(100, seed))])) for seed in range(3)]
    served.service.close()
    for request in requests:
        with pytest.raises(HfTritonError, match="shutting_down"):
            request.wait()


def test_timestamps_that_do_not_move_on_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def stay(*_: Any, **__: Any) -> Any:
        return [], 0

    monkeypatch.setattr(type(served.checkpoint.model), "_retrieve_segment", staticmethod(stay))
    with pytest.raises(HfTritonError, match="generation_failed"):
        served.ask(encode(SHORT[0]))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_half_precision_becomes_float32_on_a_cpu_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_triton.runner.dtypes.has_instructions", lambda dtype: False)
    served = Served(save_whisper(tmp_path, dtype="float16"))
    try:
        assert served.checkpoint.model.dtype == torch.float32
        assert served.ask(encode(SHORT[0]))["text"].size == 1
    finally:
        served.service.close()


def test_base64_is_read_as_the_file(served: Served) -> None:
    file = encode(SHORT[1])
    encoded = base64.b64encode(file)
    whole = served.json(file)
    assert served.json(encoded) == served.json(b"data:audio/wav;base64," + encoded) == whole


@pytest.mark.parametrize("kind", ["Wav2Vec2ForCTC", "MoonshineForConditionalGeneration"])
def test_other_families_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    import transformers

    config: Any = getattr(transformers, kind.replace("ForCTC", "Config").replace("ForConditionalGeneration", "Config"))
    folder = save_whisper(tmp_path)
    config(architectures=[kind]).save_pretrained(folder)
    assert find_task(folder) == "automatic-speech-recognition"
    with pytest.raises(CheckpointError) as refused:
        Served(folder)
    assert refused.value.sentence.endswith(
        f"is a {kind} according to its config.json, and automatic-speech-recognition serves Whisper "
        "(WhisperForConditionalGeneration) alone: choose such a checkpoint"
    )


def test_a_checkpoint_without_a_feature_extractor(tmp_path: Path) -> None:
    folder = save_whisper(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        Served(folder)


@pytest.mark.full
@pytest.mark.parametrize(("language", "code"), [("de", "de"), ("german", "de"), ("<|fr|>", "fr")])
def test_the_checkpoint_s_language_and_task_are_the_defaults(language: str, code: str, tmp_path: Path) -> None:
    folder = save_whisper(tmp_path / "tuned", defaults={"language": language, "task": "translate"})
    served = Served(folder)
    try:
        samples = SHORT[1]
        expected = served.reference(samples)
        outputs = served.ask(encode(samples, subtype="FLOAT"))
        assert outputs["text"][0].decode() == served.text(expected["sequences"][0])
        assert outputs["language"][0].decode() == code
        asked = served.ask(encode(samples, subtype="FLOAT"), language="zh", task="transcribe")
        expected = served.reference(samples, language="zh", task="transcribe")
        assert asked["language"][0].decode() == "zh"
        assert asked["text"][0].decode() == served.text(expected["sequences"][0])
    finally:
        served.service.close()


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"language": "klingon"}, "generation_config.json has language 'klingon', which is none of de, en, fr, zh"),
        ({"language": 7}, "generation_config.json has language 7"),
        ({"task": "sing"}, "generation_config.json has task 'sing', which is none of transcribe, translate"),
    ],
)
def test_defaults_that_the_model_does_not_know_are_refused(defaults: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        Served(save_whisper(tmp_path / "wrong", defaults=defaults))


@pytest.mark.parametrize("config", [{"num_mel_bins": 128}, {"max_source_positions": 100}])
def test_a_preprocessor_that_does_not_fit_is_refused_at_load(config: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"cannot read what preprocessor_config.json makes of sound \(80 mel bins"
    ):
        Served(save_whisper(tmp_path / "wrong", **config))


@pytest.mark.parametrize("name", ["feature_size", "n_fft", "chunk_length"])
def test_a_preprocessor_s_sizes_take_no_memory(name: str, tmp_path: Path) -> None:
    folder = save_whisper(tmp_path / "huge")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: 1 << 40}))
    with pytest.raises(CheckpointError, match=f"`{name}` is 1099511627776, more than"):
        Served(folder)
