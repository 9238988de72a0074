"""The Hopper GEMM kernel against float64, in both modes of accumulation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from gemm_bodies import *  # noqa: F403
from gemm_bodies import edges

import cute_fp8
from cute_fp8.dispatch import explain
from cute_fp8.gating import interleave_gate_up
from cute_fp8.gemm_case import GemmCase, exact_case, gemm_case
from cute_fp8.kernels.tiles_sm90 import TILES_SM90

pytestmark = [pytest.mark.gpu, pytest.mark.needs_cc(9)]
FP32 = torch.float32


PRECISE = [tile for tile in TILES_SM90 if tile.fits(fast_accum=False)]
FAST = [tile for tile in TILES_SM90 if tile.fits(fast_accum=True)]


@pytest.fixture
def backend():
    """The native kernel, or nothing."""
    with cute_fp8.use(backend="cute"):
        yield "cute"


@pytest.fixture(params=PRECISE, ids=lambda tile: tile.name)
def tile(request):
    """Every tile serves every problem: each is forced on all of them."""
    with cute_fp8.use(config=request.param):
        yield request.param


@pytest.fixture
def large_tile():
    """One of two sets of partial sums."""
    return PRECISE[0]


@pytest.fixture
def small_tile():
    """One with tokens on the MMA's N side, whose CTAs exchange sums."""
    return next(tile for tile in PRECISE if tile.swap_ab and tile.owners > 1)


def fast(case: GemmCase) -> GemmCase:
    """The same call without promotion."""
    return replace(case, options={"fast_accum": True})


@pytest.mark.parametrize("fast_tile", FAST, ids=lambda tile: tile.name)
def test_fast_is_exact_where_its_sums_are(backend, fast_tile):
    """Sums of up to 14 bits: nothing is rounded, with or without promotion."""
    ms, ns = edges(fast_tile)
    with cute_fp8.use(config=fast_tile):
        for seed, (m, n, k) in enumerate(itertools.product(ms, ns, (16, 128, 400))):
            fast(exact_case(m, n, k, seed=seed)).check_exact()


@pytest.mark.parametrize("k", [4096, 14336])
def test_promotion_is_what_makes_it_accurate(backend, k):
    """The negative control: without it, errors grow along K."""
    case = gemm_case(256, 512, k, seed=12, out_dtype=FP32)
    exact, _ = case.exact()

    def error(y):
        return ((y.double() - exact).norm() / exact.norm()).item()

    # Without splits: they would cut the sums short, and promote at each cut.
    with cute_fp8.use(config=FAST[0]):
        assert error(case.run()) <= 1.5e-4
        assert 1e-3 < error(fast(case).run()) < 1e-2


def test_fast_is_another_kernel():
    """And both are deterministic."""
    case = gemm_case(200, 264, 4096, seed=13, out_dtype=FP32)
    precise, hasty = case.run(), fast(case).run()
    assert not torch.equal(precise, hasty)
    for _ in range(20):
        assert torch.equal(case.run(), precise) and torch.equal(fast(case).run(), hasty)


def test_gated(backend, tile):
    """y = silu(gate) * up, of interleaved rows, against the two halves computed apart."""
    m, n, k = 37, 72, 272
    gate, up = gemm_case(m, n, k, seed=14, out_dtype=FP32), gemm_case(m, n, k, seed=15)
    wq = interleave_gate_up(gate.wq, up.wq)
    sw = interleave_gate_up(gate.sw, up.sw)
    y = cute_fp8.gemm_gated(gate.xq, gate.sx, wq, sw, out_dtype=FP32)
    left = gate.exact()[0]
    right = replace(gate, wq=up.wq, sw=up.sw).exact()[0]
    expected = left * torch.sigmoid(left) * right
    assert ((y.double() - expected).norm() / expected.norm()).item() <= 3e-4


def test_a_plain_call_takes_it():
    """The table's first entry on Hopper."""
    route = explain("gemm", m=64, n=256, k=256).route
    assert route is not None and route.entry.name == "cute:gemm_sm90"
