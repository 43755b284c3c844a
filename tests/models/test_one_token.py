# SPDX-License-Identifier: Apache-2.0
"""Attention of one token of every row by products: it is that of torch in float64, or is left to torch."""

import itertools
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_triton.runner import one_token
from hf_triton.runner.one_token import DTYPES, attend

ROWS, COLUMNS, SIZE = 3, 9, 8
LENGTHS = [COLUMNS, 4, 1]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little there is."""
    monkeypatch.setattr(one_token, "WORTH", 0)
    monkeypatch.setattr(one_token, "WORTH_SHARED_BFLOAT16", 0)


def tensors(dtype: torch.dtype, heads: int = 6, key_heads: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(heads)
    query = torch.randn(ROWS, 1, heads, SIZE, generator=source).to(dtype).transpose(1, 2)  # as models lay it out
    key, value = torch.randn(2, ROWS, key_heads, 2 * COLUMNS, SIZE, generator=source).to(dtype)[..., 5:-4, :]
    return query, key, torch.cat([value, value + 1], dim=-1)  # as wide as it likes


def last_columns(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(COLUMNS) >= COLUMNS - torch.tensor(lengths)[:, None])[:, None, None]


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    exact = (tensor.double() for tensor in (query, key, value))
    return scaled_dot_product_attention(*exact, *others, enable_gqa=True, **options).to(query.dtype)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("lengths", [LENGTHS, None])
@pytest.mark.parametrize("key_heads", [6, 2, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rows_see_their_own_columns(
    dtype: torch.dtype, key_heads: int, lengths: list[int] | None, scale: float | None
) -> None:
    query, key, value = tensors(dtype, key_heads=key_heads)
    attn_mask = None if lengths is None else last_columns(lengths)
    found = attend(query, key, value, attn_mask, scale)
    torch.testing.assert_close(found, exact(query, key, value, attn_mask, scale=scale))


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_what_is_in_the_padding_does_not_matter() -> None:
    query, key, value = tensors(torch.float32)
    wanted = exact(query, key, value, last_columns(LENGTHS))
    for row, length in enumerate(LENGTHS):
        key[row, :, : COLUMNS - length] = torch.nan
        value[row, :, : COLUMNS - length] = torch.nan
    torch.testing.assert_close(attend(query, key, value, last_columns(LENGTHS)), wanted)


@pytest.mark.parametrize(("cached", "at_a_time"), [(SIZE * COLUMNS, 2), (1, 1)])
@pytest.mark.parametrize("key_heads", [6, 2])
@torch.inference_mode()
def test_few_heads_at_a_time(key_heads: int, cached: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors(torch.float16, key_heads=key_heads)
    converted: list[int] = []
    plain = torch.bmm

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        converted.append(len(left))
        return plain(left, right)

    monkeypatch.setattr(torch, "bmm", product)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(one_token, "CACHED", cached)
    found = attend(query, key, value)
    torch.testing.assert_close(found, exact(query, key, value))
    assert converted == [at_a_time] * (2 * ROWS * key_heads // at_a_time)  # both products of each part


HOLES = last_columns(LENGTHS).logical_xor(torch.arange(COLUMNS) == COLUMNS - 2)
NOTHING = last_columns([COLUMNS, 4, 0])


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "attn_mask",
    [HOLES, NOTHING, last_columns(LENGTHS).float(), last_columns([4]), last_columns(LENGTHS).expand(-1, 6, -1, -1)],
    ids=["holes", "a row that sees nothing", "float", "of all rows", "of each head"],
)
@torch.inference_mode()
def test_what_is_more_than_the_last_columns_is_left_to_torch(attn_mask: torch.Tensor) -> None:
    assert attend(*tensors(torch.float32), attn_mask) is None


@pytest.mark.usefixtures("always")
def test_what_is_not_one_token_in_inference_is_left_to_torch() -> None:
    query, key, value = tensors(torch.float32)
    assert attend(query, key, value) is None  # its gradient may be asked for
    with torch.inference_mode():
        assert attend(query, key, value) is not None
        assert attend(query.expand(-1, -1, 2, -1), key, value) is None
        assert attend(query.double(), key.double(), value.double()) is None
        assert attend(query, key.half(), value.half()) is None
        assert attend(query[0], key[0], value[0]) is None
        assert attend(query[:0], key[:0], value[:0]) is None
        assert attend(query, key[:, :0], value[:, :0]) is None
        assert attend(query, key[:, :, :0], value[:, :, :0]) is None
        assert attend(query[:, :4], key, value) is None
        assert attend(query, key[:1], value[:1]) is None
        assert attend(query, key, value[:, :1]) is None
        assert attend(query.to("meta"), key.to("meta"), value.to("meta")) is None


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_a_mask_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[torch.Tensor] = []
    plain = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *call, **options: looks.append(call) or plain(*call, **options))
    call, attn_mask = tensors(torch.float32), last_columns(LENGTHS)
    looks.clear()
    for _ in range(3):
        torch.testing.assert_close(attend(*call, attn_mask), exact(*call, attn_mask))
    assert len(looks) == 1


@pytest.mark.usefixtures("always")
@torch.inference_mode()
def test_a_mask_is_known_again_only_where_it_fits() -> None:
    attn_mask = torch.ones(1, 1, 1, COLUMNS, dtype=torch.bool)
    query, key, value = tensors(torch.float32)
    assert attend(query[:1], key[:1], value[:1], attn_mask) is not None
    assert attend(query, key, value, attn_mask) is None
    assert attend(query[:1], key[:1, :, 1:], value[:1, :, 1:], attn_mask) is None


@pytest.mark.parametrize(
    ("dtype", "key_heads", "has_mask", "name"),
    [
        *((torch.float32, *each, "WORTH") for each in itertools.product([6, 2], [True, False])),
        (torch.bfloat16, 2, True, "WORTH_SHARED_BFLOAT16"),
        (torch.bfloat16, 2, False, None),
        (torch.bfloat16, 6, True, None),
        (torch.float16, 2, True, None),
    ],
)
@torch.inference_mode()
def test_little_is_left_to_torch(
    dtype: torch.dtype, key_heads: int, has_mask: bool, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = tensors(dtype, key_heads=key_heads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    lengths = [COLUMNS, 4, 2] if has_mask else [COLUMNS] * ROWS
    attn_mask = last_columns(lengths) if has_mask else None
    assert (attend(query, key, value, attn_mask) is None) == (name is not None)
    if name:
        worth = key_heads * SIZE * (2 * COLUMNS - sum(lengths) // ROWS) // 2  # for each of two threads
        monkeypatch.setattr(one_token, name, worth)
        assert attend(query, key, value, attn_mask) is not None
        monkeypatch.setattr(one_token, name, worth + 1)
        assert attend(query, key, value, attn_mask) is None
