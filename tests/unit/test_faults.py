# SPDX-License-Identifier: Apache-2.0
"""What a failed forward is answered with, and what the log has of it: torch's words, none that may quote a prompt."""

from collections.abc import Callable

import pytest
import torch

from hf_triton.runner.faults import error_outcome

SECRET = "a secret prompt"


def raise_by_hand() -> None:
    raise RuntimeError(f"cannot write {SECRET}")


def look_up() -> None:
    dict[str, int]()[SECRET]


def raise_another() -> None:
    raise ValueError(SECRET)


def raised_by(work: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        work()
    return caught.value


@pytest.mark.parametrize("work", [raise_by_hand, look_up, raise_another], ids=lambda work: work.__name__)
def test_no_words_that_may_quote_a_prompt_are_logged(
    work: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    outcome = error_outcome(raised_by(work))
    assert outcome.code == "generation_failed"
    assert SECRET not in str(outcome)
    assert SECRET not in caplog.text
    assert f"in {work.__name__} (test_faults.py:" in caplog.text


def test_torch_s_own_words_are(caplog: pytest.LogCaptureFixture) -> None:
    error_outcome(raised_by(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3)))
    assert "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)" in caplog.text


def test_want_of_memory_is_told_from_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    assert error_outcome(raised_by(lambda: torch.empty(1 << 50))).code == "out_of_memory"
    assert "failed" not in caplog.text
