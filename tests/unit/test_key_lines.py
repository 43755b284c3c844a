# SPDX-License-Identifier: Apache-2.0
"""The lines of a file of API keys."""

import pytest

from hf_triton_gateway.keys.key_lines import KeyLineError, Quota, read_lines

SECRET = "sk-secret-4711="
OTHER = "sk-other-0815"


def read(text: str) -> dict[bytes, Quota]:
    return read_lines(text.encode().splitlines(), "the file")


def test_a_line_is_a_key_and_what_it_may_ask_for() -> None:
    text = f"""
# of two clients
{SECRET} name=alice requests_per_minute=60 tokens_per_minute=20000 tokens_per_day=1000000 concurrent_requests=4
{OTHER}\tmodels=llama,bge  # the second one
"""
    first = Quota(
        name="alice", requests_per_minute=60, tokens_per_minute=20_000, tokens_per_day=1_000_000, concurrent_requests=4
    )
    second = read(text)[OTHER.encode()]
    assert read(text) == {SECRET.encode(): first, OTHER.encode(): second}
    assert (second.name, second.models, second.requests_per_minute) == ("key-2", ("llama", "bge"), None)


def test_a_key_alone_has_no_limits() -> None:
    assert read(f"{SECRET}\n{SECRET}\nsk#third # comment\n") == {
        SECRET.encode(): Quota(name="key-1"),
        b"sk#third": Quota(name="key-2"),
    }


def test_limits_of_every_key_are_those_that_it_does_not_state() -> None:
    found = read(f"{SECRET} requests_per_minute=none\n* requests_per_minute=10 concurrent_requests=2\n{OTHER}\n")
    assert found[SECRET.encode()] == Quota(name="key-1", concurrent_requests=2)
    assert found[OTHER.encode()] == Quota(name="key-2", requests_per_minute=10, concurrent_requests=2)
    assert b"*" not in found
    assert read("* requests_per_minute=10\n") == {}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            f"{OTHER} {SECRET}",
            "line 2: word 2 must be a limit, NAME=VALUE; known are admin, concurrent_requests, models, name",
        ),
        (f"{OTHER} rate=5 {SECRET}", "line 2: word 2 must be a limit, NAME=VALUE; known are"),
        (f"{OTHER} request_per_minute=5", "word 2 must be a limit, NAME=VALUE, did you mean 'requests_per_minute'?"),
        (f"{OTHER} requests_per_minute", "word 2 must be a limit, NAME=VALUE; known are"),
        (
            f"{OTHER} requests_per_minute=",
            "line 2: requests_per_minute must be an integer >= 1 and <= 1000000000000000, got",
        ),
        (f"{OTHER} requests_per_minute=0", "requests_per_minute must be an integer >= 1 and <= 1000000000000000, got"),
        (f"{OTHER} tokens_per_minute=-1", "tokens_per_minute must be an integer >= 1 and <= 1000000000000000, got"),
        (f"{OTHER} tokens_per_day=1.5", "tokens_per_day must be an integer >= 1 and <= 1000000000000000, got"),
        (f"{OTHER} tokens_per_day=1e6", "tokens_per_day must be an integer >= 1 and <= 1000000000000000, got"),
        (f"{OTHER} tokens_per_day={10**16}", "tokens_per_day must be an integer >= 1 and <= 1000000000000000, got"),
        (
            f"{OTHER} concurrent_requests=many",
            "concurrent_requests must be an integer >= 1 and <= 1000000000000000, got",
        ),
        (f"{OTHER} concurrent_requests=1 concurrent_requests=2", "line 2 has concurrent_requests twice"),
        (f"{OTHER} name=", "name must be 1 to 64 letters, digits, _, . and -"),
        (f"{OTHER} name=\N{SNOWMAN}", "name must be 1 to 64 letters, digits, _, . and -"),
        (f"{OTHER} name={'x' * 65}", "name must be 1 to 64 letters, digits, _, . and -"),
        (f"{OTHER} name=key-1", "line 2: line 1 has the name key-1 too"),
        (f"{OTHER} models=", "models must be names of models, without adapters, got ''"),
        (f"{OTHER} models=a,,b", "models must be names of models, without adapters, got ''"),
        (f"{OTHER} models=llama:law", "models must be names of models, without adapters, got 'llama:law'"),
        ("requests_per_minute=5", "line 2 begins with a limit: write the key before it"),
        ("* name=all", "line 2 has name for all keys: it is that of one"),
        ("* requests_per_minute=x", "line 2: requests_per_minute must be an integer >= 1 and <= 1000000000000000, got"),
        (f"{SECRET} requests_per_minute=5", "line 2 gives the key of line 1 other limits"),
    ],
)
def test_wrong_line_is_named_and_no_key_is(line: str, sentence: str) -> None:
    with pytest.raises(KeyLineError) as refused:
        read(f"{SECRET}\n{line}\n")
    assert refused.value.sentence.startswith("the file, line 2")
    assert sentence in refused.value.sentence
    for secret in (SECRET, OTHER, SECRET.rstrip("=")):
        assert secret not in refused.value.sentence


def test_bytes_that_are_no_text_are_a_key() -> None:
    assert read_lines([b"\xff\xfe name=odd"], "the file") == {b"\xff\xfe": Quota(name="odd")}
    with pytest.raises(KeyLineError):
        read_lines([b"a \xff=1"], "the file")
