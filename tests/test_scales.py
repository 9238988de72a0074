"""The blocked scale layout against an index formula written out independently."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cute_fp8 import scales
from cute_fp8.scales import blocked_numel, from_blocked, to_blocked

SHAPES = [(1, 1), (3, 4), (32, 4), (33, 5), (128, 4), (129, 4), (128, 9), (300, 17), (0, 4), (5, 0)]


def numbered(rows: int, cols: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Bytes 1 .. 251 in row-major order; no period of the layout divides the prime 251."""
    values = torch.arange(rows * cols).remainder(251) + 1
    return values.to(torch.uint8).view(rows, cols).view(dtype)


def byte_offset(row: int, col: int, cols: int) -> int:
    """Address of a scale by bit fields: tile | row bits 0-4 | row bits 5-6 | column bits 0-1."""
    tiles_per_row = (cols + 3) >> 2
    tile = (row >> 7) * tiles_per_row + (col >> 2)
    return tile << 9 | (row & 31) << 4 | (row >> 5 & 3) << 2 | (col & 3)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_order_and_padding(rows: int, cols: int) -> None:
    source = numbered(rows, cols)
    expected = [0] * blocked_numel(rows, cols)  # padding is 0x00
    for row in range(rows):
        for col in range(cols):
            expected[byte_offset(row, col, cols)] = int(source[row, col])
    assert to_blocked(source).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_round_trip_keeps_dtype_and_bytes(rows: int, cols: int, dtype: torch.dtype) -> None:
    source = numbered(rows, cols, dtype)
    blocked = to_blocked(source)
    back = from_blocked(blocked, rows, cols)
    assert blocked.dtype == back.dtype == dtype
    assert blocked.shape == (blocked_numel(rows, cols),)
    assert back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), source.view(torch.uint8))


def test_poisoned_padding_is_ignored() -> None:
    source = numbered(130, 5)
    blocked = to_blocked(source)
    is_padding = to_blocked(torch.ones_like(source)) == 0
    assert is_padding.sum() == 2048 - 650
    blocked[is_padding] = 0xFF
    assert torch.equal(from_blocked(blocked, 130, 5), source)


def test_strided_inputs() -> None:
    source = numbered(130, 6)
    assert torch.equal(to_blocked(source.t().contiguous().t()), to_blocked(source))
    assert torch.equal(to_blocked(source[::2, 1:]), to_blocked(source[::2, 1:].contiguous()))
    blocked = to_blocked(source)
    assert torch.equal(from_blocked(blocked.repeat_interleave(2)[::2], 130, 6), source)


def test_blocked_numel() -> None:
    assert [blocked_numel(*shape) for shape in ((1, 1), (128, 4), (129, 4), (128, 5), (0, 7))] == [
        512,
        512,
        1024,
        1024,
        0,
    ]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: to_blocked(torch.zeros(4, 4)), TypeError, "scales: got torch.float32"),
        (lambda: to_blocked(numbered(4, 4)[0]), ValueError, r"scales: got shape \(4,\)"),
        (lambda: from_blocked(torch.zeros(512), 1, 1), TypeError, "blocked: got torch.float32"),
        (lambda: from_blocked(numbered(1, 512)[0], 129, 1), ValueError, r"must be \(1024,\)"),
        (lambda: from_blocked(numbered(128, 4), 128, 4), ValueError, r"blocked: got shape"),
        (lambda: from_blocked(numbered(1, 512)[0], -1, 4), ValueError, "rows: got -1"),
        (lambda: blocked_numel(4, -2), ValueError, "cols: got -2"),
    ],
)
def test_refusals(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert "must be" in str(caught.value)


def test_documented_example() -> None:
    outcome = doctest.testmod(scales)
    assert outcome.attempted >= 7
    assert outcome.failed == 0
