"""The sweep and the tier checks of ``validate`` on the CPU, where only the clock is made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_fp8 import timing
from cute_fp8.evidence import sweep
from cute_fp8.testing import TIER_KINDS
from cute_fp8.timing import Contender

SHAPE = (33, 256, 512)
USES = [("reference", "per_token"), ("reference", "mxfp8")]


def clock(found: Sequence[Contender]) -> dict[str, tuple[list[float], list[Tensor]]]:
    """Every call takes 2 us."""
    return {c.impl: ([2.0, 1.0, 3.0], [c.call(i) for i in range(c.copies)]) for c in found}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three copies of a small weight."""
    monkeypatch.setattr(timing, "ROTATED_BYTES", 3 * SHAPE[1] * SHAPE[2])


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROTATED_BYTES", 3 * SHAPE[1] * SHAPE[2])
        return list(sweep.sweep(USES, [SHAPE], device="cpu", timer=clock))


def test_a_row_for_every_contender(rows: list[dict[str, Any]]) -> None:
    assert [(row["variant"], row["impl"]) for row in rows] == [
        ("per_token", "cute_fp8"),
        ("per_token", "torch_bf16"),
        ("per_token", "torch_rowwise"),
        ("per_token", "torch_tensorwise"),
        ("per_token", "torch_rowwise_fast"),
        ("per_token", "torch_tensorwise_fast"),
        ("mxfp8", "cute_fp8"),
        ("mxfp8", "torch_bf16"),
        ("mxfp8", "torch_mxfp8"),
    ]
    for row in rows:
        assert (row["op"], row["M"], row["N"], row["K"]) == ("gemm", *SHAPE)
        assert ("us" in row) is not ("failed" in row)


def test_ours_carries_its_route_and_figures(rows: list[dict[str, Any]]) -> None:
    m, n, k = SHAPE
    for row in rows:
        if row["impl"] == "cute_fp8":
            assert row["route"] == "reference:gemm"
            assert (row["us"], row["us_min"], row["us_max"]) == (2.0, 1.0, 3.0)
            assert row["tflops"] == pytest.approx(2 * m * n * k / 2.0e6, rel=1e-2)
            assert row["gbps"] == pytest.approx((m * k + n * k + 2 * m * n) / 2.0e3, rel=1e-2)
            # A bf16 output's rounding, and nothing else.
            assert 0.001 < row["error"] < 0.0025


def test_bf16_reads_twice_the_bytes(rows: list[dict[str, Any]]) -> None:
    m, n, k = SHAPE
    (row,) = (r for r in rows if r["impl"] == "torch_bf16" and r["variant"] == "per_token")
    assert row["gbps"] == pytest.approx(2 * (m * k + n * k + m * n) / 2.0e3, rel=1e-2)


def test_copies_fill_more_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROTATED_BYTES", 150_000_000)
    for n, k in {(n, k) for _, n, k in sweep.SHAPES}:
        weight = torch.empty((n, k), dtype=torch.uint8, device="meta")
        copies = timing.copies_of(weight)
        assert 2 <= copies < n
        assert copies * n * k >= 150_000_000


# ------------------------------------------------------------------------------------------ tier


@pytest.mark.parametrize("use", USES, ids=lambda use: use[1])
def test_the_reference_passes_the_tier_and_the_control_is_caught(use: tuple[str, str]) -> None:
    checks = list(sweep.tier([use], device="cpu"))
    assert [check for check in checks if not check["passed"]] == []
    assert {check["kind"] for check in checks} == set(TIER_KINDS)
    controls = [check for check in checks if "control" in check]
    assert len(controls) == len(sweep.TIER_SHAPES)
    assert all(check["norm_ratio"] > 1.04 for check in controls)
    assert {check["route"] for check in checks} == {"reference:gemm"}
    assert {check["variant"] for check in checks} == {use[1]}


def test_a_tier_check_fails_on_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = sweep.cute_fp8.gemm
    monkeypatch.setattr(sweep.cute_fp8, "gemm", lambda *operands: gemm(*operands) * 1.05)
    check = sweep.tier_check(USES[0], (64, 128, 1024), "gaussian", 0, device="cpu")
    assert check["passed"] is False


def test_a_control_that_is_not_caught_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = sweep.cute_fp8.gemm
    monkeypatch.setattr(sweep.cute_fp8, "gemm", lambda *operands: gemm(*operands) / 1.05)
    control = sweep.tier_check(USES[0], (64, 128, 1024), "gaussian", 0, device="cpu", control=True)
    assert control["passed"] is False
