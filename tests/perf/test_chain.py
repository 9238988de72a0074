"""The chain's measurement on the CPU: what its graphs would hold, and the checks of it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("jsonschema")
from cute_fp8.numerics import quantize_fp8
from cute_fp8.rows.case import row_case
from cute_fp8.timing import rotated
from perf import chain, producers, report


def pair() -> chain.Pair:
    first = row_case("rmsnorm_quantize", 8, 64, residual=True, rounding="hf")
    codes, scales = quantize_fp8(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
    xq, sx, _ = first.run()
    cases = producers.copies_of(first, 10_000)
    return chain.Pair(cases, rotated(codes, 3), rotated(scales, 3), xq, sx)


@pytest.mark.parametrize("part", chain.PARTS)
def test_each_part_is_right_and_wrong_ones_are_found(part: str) -> None:
    data = pair()
    for i in (0, 4):
        result = getattr(data, part)(i)
        assert data.error(part, i, result) < 0.03
        # Another call's data.
        assert data.error(part, i + 1, result) == float("inf")


def test_a_wrong_product_of_right_codes_is_found() -> None:
    data = pair()
    codes, scales, hidden, y = data.norm_gemm(1)
    y[3] *= 1.1
    assert data.error("norm_gemm", 1, (codes, scales, hidden, y)) == float("inf")


def test_lines_and_losses() -> None:
    head = {"variant": "per_token", "impl": "cute_fp8", "M": 16, "N": 32, "K": 64}
    us = dict(zip(chain.PARTS, (10.0, 2.0, 9.0), strict=True))
    found = [{"op": op, **head, "us": us[op]} for op in chain.PARTS]
    (line,) = chain.summary(found)
    assert line == "16x32x64 cute_fp8: 10.00 us, apart 2.00 + 9.00 = 11.00, saved 1.00"
    failed = [*found[:2], {"op": "gemm", **head, "failed": "wrong"}]
    assert list(chain.summary(failed)) == ["gemm cute_fp8: wrong"]
    assert {"cute_fp8", "cute_fp8_no_pdl"} <= set(report.NAMES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu(capsys: pytest.CaptureFixture) -> None:
    assert chain.main([]) == 2
    assert "got no CUDA GPU" in capsys.readouterr().err
