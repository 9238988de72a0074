"""Frozen weight scales, with kernels that count their launches in place of compiled ones."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8 import freeze_scales, from_blocked, frozen, gpus, to_blocked
from cute_fp8.build import compiler
from cute_fp8.dispatch import TABLE, Route
from cute_fp8.gemms.case import GemmCase, mxfp8_case
from cute_fp8.gemms.choice import Choice
from cute_fp8.gemms.launch import CuteGemm
from cute_fp8.gemms.problem import Operands, check_gemm
from cute_fp8.gemms.selection import select_config
from cute_fp8.gpus import named
from cute_fp8.kernels.config import RelayoutConfig
from cute_fp8.kernels.tiles import TILES

M, N, K = 45, 136, 96
Run = Callable[[GemmCase], Tensor]


@dataclass
class Launches:
    """What the fakes did."""

    relayouts: int = 0
    gemms: int = 0

    def get(self, config: Any, target: str, device: Any) -> Callable[..., None]:
        """In place of ``compiler.get``."""
        return self.relayout if isinstance(config, RelayoutConfig) else self.gemm

    def relayout(self, scale: Tensor, blocked: Tensor) -> None:
        self.relayouts += 1
        blocked.copy_(to_blocked(scale))

    def gemm(self, xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, *rest: Any) -> None:
        self.gemms += 1
        assert sx.dim() == sw.dim() == 1
        rows = from_blocked(sx, len(xq), K // 32), from_blocked(sw, len(wq), K // 32)
        with cute_fp8.use(backend="reference"):
            cute_fp8.gemm(xq, rows[0], wq, rows[1], out_dtype=torch.float32, out=rest[2])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(compiler, "get", found.get)
    monkeypatch.setattr(gpus, "sm_count", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return found


@pytest.fixture
def run(launches: Launches) -> Run:
    """What a launcher makes of a case; both ways of a CuTe kernel."""
    entry = next(e for e in TABLE if e.variant == "mxfp8" and e.backend == "cute")

    def run(case: GemmCase) -> Tensor:
        operands = Operands(case.xq, case.sx, case.wq, case.sw)
        problem = check_gemm(operands, None, torch.float32, False)
        choice = Choice(TILES["mxfp8"][0])
        selection = select_config(problem, named("RTX 5090"), choice)
        route = Route(entry, "sm_120a", selection)
        return CuteGemm(problem, route).launcher()(*operands)

    return run


def row_major() -> GemmCase:
    return mxfp8_case(M, N, K, seed=1, device="cpu", blocked=False)


def right(case: GemmCase, y: Tensor) -> bool:
    return torch.equal(y.double(), case.exact()[0])


def test_a_frozen_weight_is_laid_out_once(run: Run, launches: Launches) -> None:
    case = row_major()
    assert right(case, run(case)) and launches == Launches(2, 1)
    assert freeze_scales(case.sw) is case.sw
    for calls in (1, 2):
        assert right(case, run(case)) and launches == Launches(2 + calls, 1 + calls)


@pytest.mark.parametrize(
    "write",
    [
        lambda sw: sw.view(torch.uint8).add_(1),
        lambda sw: sw.copy_(sw.clone().view(torch.uint8).add(1).view(sw.dtype)),
        lambda sw: setattr(sw, "data", sw.clone().view(torch.uint8).add(1).view(sw.dtype)),
    ],
    ids=["through a view", "copy", "other data"],
)
def test_a_write_that_is_seen_ends_it(
    write: Callable[[Tensor], object], run: Run, launches: Launches
) -> None:
    case = row_major()
    freeze_scales(case.sw)
    write(case.sw)
    for _ in range(2):
        assert right(case, run(case))
    assert launches == Launches(4, 2)
    freeze_scales(case.sw)
    assert right(case, run(case)) and launches == Launches(5, 3)


def test_what_replaced_the_data_is_not_taken_for_it(run: Run) -> None:
    """Though an allocator might hand out the same address again."""
    case = row_major()
    freeze_scales(case.sw)
    addresses = {case.sw.data_ptr()}
    for _ in range(20):
        case.sw.data = case.sw.clone()
        assert case.sw.data_ptr() not in addresses, "kept until the change is seen"
    case.sw.view(torch.uint8)[0, 0] ^= 1
    assert right(case, run(case))


def test_only_that_very_tensor(run: Run, launches: Launches) -> None:
    case = row_major()
    freeze_scales(case.sw)
    for other in (case.sw.clone(), case.sw.view(N, K // 32), copy.deepcopy(case.sw)):
        assert frozen.frozen_blocks(other) is None
    assert frozen.frozen_blocks(case.sx) is None
    assert torch.equal(
        frozen.frozen_blocks(case.sw).view(torch.uint8), to_blocked(case.sw).view(torch.uint8)
    )


def test_it_dies_with_its_tensor() -> None:
    before = len(frozen._kept)
    sw = freeze_scales(row_major().sw)
    blocked = weakref.ref(frozen.frozen_blocks(sw))
    assert len(frozen._kept) == before + 1
    del sw
    gc.collect()
    assert blocked() is None and len(frozen._kept) == before


def test_parameters_and_inference_tensors(run: Run, launches: Launches) -> None:
    case = row_major()
    for make in (
        lambda: torch.nn.Parameter(case.sw, requires_grad=False),
        torch.inference_mode()(lambda: case.sw.clone()),
    ):
        sw = freeze_scales(make())
        launches.relayouts = 0
        problem_case = GemmCase(case.xq, case.sx, case.wq, sw, out_dtype=torch.float32)
        assert right(case, run(problem_case)) and launches.relayouts == 1


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (lambda sw: sw.tolist(), TypeError, "sw: got list, must be a torch.Tensor"),
        (lambda sw: sw.view(torch.uint8), TypeError, "sw: got torch.uint8, must be torch.float8_"),
        (to_blocked, ValueError, r"sw: got shape \(1024,\), must be 2-D"),
        (lambda sw: sw.t(), ValueError, r"sw: got strides \(1, 3\), must be contiguous"),
    ],
    ids=["list", "bytes", "blocked", "transposed"],
)
def test_what_cannot_be_frozen(
    scale: Callable[[Tensor], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        freeze_scales(scale(row_major().sw))


def test_not_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"^freeze_scales: .* must be called before it$"):
        freeze_scales(row_major().sw)


def test_on_a_cpu_nothing_changes() -> None:
    case = row_major()
    expected = case.run()
    freeze_scales(case.sw)
    assert torch.equal(case.run(), expected)
