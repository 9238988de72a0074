"""The sweep and the tier checks of ``validate`` on the CPU, where only the clock is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_fp8.evidence import sweep
from cute_fp8.evidence.sweep import Contender
from cute_fp8.testing import TIER_KINDS

SHAPE = (33, 256, 512)
USES = [("reference", "per_token"), ("reference", "mxfp8")]


def clock(found: Sequence[Contender]) -> dict[str, tuple[list[float], list[Tensor]]]:
    """Every call takes 2 us."""
    return {c.impl: ([2.0, 1.0, 3.0], [c.call(i) for i in range(c.copies)]) for c in found}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three copies of a small weight."""
    monkeypatch.setattr(sweep, "ROTATED_BYTES", 3 * SHAPE[1] * SHAPE[2])


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "ROTATED_BYTES", 3 * SHAPE[1] * SHAPE[2])
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


def contender(call: Callable[[int], Tensor], impl: str = "x") -> Contender:
    """The product of ones and the rotated identity, more or less."""
    return Contender(impl, call, 3, exact().double())


def exact() -> Tensor:
    return torch.arange(1.0, 13.0).view(3, 4)


def right(copy: int) -> Tensor:
    return exact().roll(copy, 1).bfloat16()


def refuse(copy: int) -> Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling\nmore")


def one_element_off(copy: int) -> Tensor:
    y = right(copy)
    y[1, 2] += 4
    return y


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (refuse, "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED when calling"),
        (one_element_off, "wrong: an element is far off"),
        (lambda i: right(i) * float("nan"), "wrong: an element is far off"),
        (lambda i: right(i)[:2], "wrong: an element is far off"),
        (lambda i: right(i).float() * 1.007, "wrong: relative L2 error 0.007"),
        (lambda i: right(0), "wrong after the timing: an element is far off"),
    ],
)
def test_what_is_wrong_is_not_timed(call: Callable[[int], Tensor], words: str) -> None:
    fine, wrong = sweep.time_contenders([contender(right, "fine"), contender(call)], clock)
    assert fine["us"] == 2.0 and fine["error"] == 0.0
    assert wrong["failed"].startswith(words) and "us" not in wrong


def test_a_contender_that_cannot_be_captured() -> None:
    (row,) = sweep.time_contenders([contender(right)], lambda found: {})
    assert row["failed"] == "cannot be captured in a CUDA graph"


class Driver:
    """CUDA graphs and events that only take notes: the n-th replay lasts n ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.replays: list[int] = []
        for name in ("CUDAGraph", "Event", "graph", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def synchronize(self) -> None:
        pass

    def graph(self, graph: Any) -> AbstractContextManager[Any]:
        return nullcontext(graph)

    def CUDAGraph(self) -> Any:  # noqa: N802
        return SimpleNamespace(replay=partial(self.replays.append, 0))

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        event = SimpleNamespace(at=0, synchronize=self.synchronize)
        event.record = lambda: setattr(event, "at", len(self.replays))
        event.elapsed_time = lambda end: float(end.at * (end.at - event.at))
        return event


def test_graphs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    calls: list[int] = []

    def noted(copy: int) -> Tensor:
        calls.append(copy)
        return right(copy)

    found = [contender(noted, "a"), contender(refuse, "b"), contender(right, "c")]
    timed = sweep.graph_times(found)
    assert list(timed) == ["a", "c"]
    # Whole rounds over the copies, at least CALLS; the results are those of the last round.
    assert calls == [0, 1, 2] * 7
    times, results = timed["a"]
    assert all(torch.equal(y, right(copy)) for copy, y in enumerate(results))
    assert len(results) == 3
    turns = sweep.WARM_UP + sweep.REPLAYS
    assert len(driver.replays) == 2 * turns
    assert len(times) == sweep.REPLAYS
    first = 2 * sweep.WARM_UP + 1
    assert times == pytest.approx([(first + 2 * i) * 1e3 / 21 for i in range(sweep.REPLAYS)])


def test_copies_fill_more_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "ROTATED_BYTES", 150_000_000)
    for n, k in {(n, k) for _, n, k in sweep.SHAPES}:
        weight = torch.empty((n, k), dtype=torch.uint8, device="meta")
        copies = sweep.copies_of(weight)
        assert 2 <= copies < n
        assert copies * n * k >= 150_000_000


def test_rotated_copies() -> None:
    codes = torch.arange(8.0).view(4, 2).to(torch.float8_e4m3fn)
    for i, copy in enumerate(sweep.rotated(codes, 3)):
        assert torch.equal(copy.float(), codes.float().roll(i, 0))


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
