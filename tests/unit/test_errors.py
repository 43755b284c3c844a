# SPDX-License-Identifier: Apache-2.0
"""Errors: `code: sentence`, every code known and every class with a place among gRPC's words."""

import logging
from asyncio import CancelledError

import pytest
from tokenizers import Tokenizer, models

from hf_triton import errors
from hf_triton.errors import (
    MAX_FRAMES,
    HfTritonError,
    LoadError,
    OneLineFormatter,
    PanicError,
    RequestError,
    SettingsError,
    clip,
    panics_as_errors,
    where,
)


def test_a_message_is_a_code_and_a_sentence() -> None:
    error = RequestError("invalid_input", "text_input is missing")
    assert str(error) == "invalid_input: text_input is missing"
    assert (error.code, error.sentence) == ("invalid_input", "text_input is missing")


def test_the_traceback_of_an_endless_recursion_is_cut() -> None:
    def turn() -> None:
        turn()

    with pytest.raises(RecursionError) as caught:
        turn()
    frames = where(caught.value).split(" < ")
    assert len(frames) == 2 * MAX_FRAMES + 1
    assert frames[MAX_FRAMES].endswith(" more")
    assert frames[0].startswith("RecursionError in turn (test_errors.py:")


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (errors.RequestError, "INVALID_ARG"),
        (errors.UnavailableError, "UNAVAILABLE"),
        (errors.CancelledError, "CANCELLED"),
        (errors.GenerationError, "INTERNAL"),
        (errors.HfTritonError, "INTERNAL"),
    ],
)
def test_each_kind_has_a_triton_code(kind: type[HfTritonError], word: str) -> None:
    assert kind.triton_code == word


def test_the_tree_in_the_docstring_names_every_class() -> None:
    classes = [name for name, value in vars(errors).items() if isinstance(value, type) and name.endswith("Error")]
    assert [name for name in classes if name not in str(errors.__doc__)] == []


def test_settings_errors_can_be_caught_as_what_they_are() -> None:
    error = SettingsError("there is no setting 'x'")
    assert isinstance(error, LoadError)
    assert isinstance(error, ValueError)
    assert str(error) == "invalid_setting: there is no setting 'x'"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (5, "5"),
        ("a", "'a'"),
        ("a" * 100, "'" + "a" * 56 + "..."),
        ("a\nb", r"'a\nb'"),
        (None, "null"),
        (True, "true"),
        ((), "[]"),
        ({"a": [1, {}, [], "b"], 2: None}, "{'a': [1, {}, [], 'b'], 2: None}"),
        ([[1] * 1_000_000] * 1000, "[[" + "1, " * 18 + "1..."),
        ({"a": "b" * 10_000_000}, "{'a': '" + "b" * 50 + "..."),
    ],
    ids=["number", "text", "long text", "line break", "nothing", "boolean", "array", "object", "arrays", "long object"],
)
def test_clip_shows_a_value_and_never_more_than_sixty_characters(value: object, shown: str) -> None:
    assert clip(value) == shown
    assert len(clip(value)) <= 60


@pytest.mark.parametrize("name", ["a\nERROR forged", "a\r\n\x1b[2Jb", "a\u2028b", "a\u202eb", "Zürich 日本"])
def test_a_log_line_is_one_line_whatever_it_names(name: str) -> None:
    record = logging.makeLogRecord({"msg": "loaded %s", "args": (name,), "levelname": "INFO"})
    line = OneLineFormatter("%(levelname)s %(message)s").format(record)
    assert line.isprintable()
    assert line.encode().decode("unicode_escape") == f"INFO loaded {name}" or line == f"INFO loaded {name}"


def test_a_rust_panic_becomes_an_exception_without_its_message() -> None:
    encoding = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).encode(["a"] * 3, is_pretokenized=True)

    def panic() -> None:
        encoding.truncate(1, stride=5)  # fails an assertion in Rust

    with pytest.raises(PanicError) as caught, panics_as_errors():
        panic()
    assert isinstance(caught.value, Exception)
    assert "stride" not in str(caught.value)
    assert "panic (test_errors.py:" in where(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), CancelledError()])
def test_an_exit_of_foreign_code_becomes_an_exception(error: BaseException) -> None:
    with pytest.raises(PanicError, match=f"raised {type(error).__name__}"), panics_as_errors():
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")])
def test_other_exceptions_pass_a_panic_guard(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, panics_as_errors():
        raise error
    assert caught.value is error
