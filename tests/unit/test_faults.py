# SPDX-License-Identifier: Apache-2.0
"""The outcome of a failed forward, and its log line: torch's messages, none that may quote a prompt."""

from collections.abc import Callable

import pytest
import torch

from hf_triton.runner.faults import error_outcome

SECRET = "a secret prompt"


def raise_in_python() -> None:
    raise RuntimeError(f"cannot write {SECRET}")


def look_up() -> None:
    dict[str, int]()[SECRET]


def raise_another() -> None:
    raise ValueError(SECRET)


def raised_by(work: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        work()
    return caught.value


def run_without_source() -> None:
    exec(compile(f"raise RuntimeError({SECRET!r})", "<no file>", "exec"))


@pytest.mark.parametrize("work", [raise_in_python, look_up, raise_another], ids=lambda work: work.__name__)
def test_messages_that_may_quote_a_prompt_are_not_logged(
    work: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    outcome = error_outcome(raised_by(work))
    assert outcome.code == "generation_failed"
    assert SECRET not in str(outcome)
    assert SECRET not in caplog.text
    assert f"in {work.__name__} (test_faults.py:" in caplog.text


def test_messages_of_code_without_source_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    error_outcome(raised_by(run_without_source))
    assert "(RuntimeError)" in caplog.text
    assert SECRET not in caplog.text


def test_messages_of_torch_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    error_outcome(raised_by(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3)))
    assert "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)" in caplog.text


def test_out_of_memory_is_not_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    assert error_outcome(raised_by(lambda: torch.empty(1 << 50))).code == "out_of_memory"
    assert "failed" not in caplog.text
