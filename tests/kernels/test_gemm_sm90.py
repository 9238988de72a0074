"""The Hopper GEMM kernel against float64, in both modes of accumulation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from gemm_bodies import *  # noqa: F403
from gemm_bodies import BF16, FP16, FP32, edges

import cute_fp8
from cute_fp8.dispatch import explain
from cute_fp8.gating import interleave_gate_up
from cute_fp8.gemms.case import GemmCase, exact_case, gemm_case
from cute_fp8.kernels.tiles_sm90 import TILES_SM90

pytestmark = [pytest.mark.gpu, pytest.mark.needs_cc(9)]


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


def check_rounded(case: GemmCase) -> None:
    """Guarded; right to the last bit where sums are exact and only the output is rounded."""
    assert torch.equal(case.run_guarded(), case.exact()[0].to(case.out_dtype))


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


@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("fast_tile", FAST, ids=lambda tile: tile.name)
def test_fast_with_many_tiles_per_cta(backend, fast_tile, out_dtype):
    """Ping-pong groups have several turns each, boxes of output are filled again and again."""
    m, n = fast_tile.m * 17 + 5, fast_tile.n * 37 + 8
    with cute_fp8.use(config=fast_tile):
        check_rounded(fast(exact_case(m, n, 400, seed=4, out_dtype=out_dtype)))


@pytest.mark.parametrize("out_dtype", [BF16, FP16], ids=str)
def test_16_bits_with_many_tiles_per_cta(backend, tile, out_dtype):
    """Boxes of output are filled again while their last stores may still read them."""
    m, n, k = tile.m * 9 + 5, tile.n * 37 + 8, tile.k * 3 + 16
    check_rounded(exact_case(m, n, k, seed=5, out_dtype=out_dtype, bias=FP32))


def test_every_chain_is_exact(backend, tile):
    """K-tiles for a chain of each length, and one with a tail."""
    k = sum(tile.links(fast_accum=False)) * tile.k
    for length in (k - 16, k, k + tile.k + 16):
        exact_case(tile.m + 1, tile.n + 8, length, seed=6).check_exact()


@pytest.mark.parametrize("name", ["bias", "activation", "gated"])
@pytest.mark.parametrize("hasty", [False, True])
def test_16_bits_are_32_rounded_once(backend, large_tile, name, hasty):
    """Outputs through shared memory and those from registers go by the same arithmetic."""
    case = gemm_case(261, 400, 1040, seed=16, bias=BF16 if name == "bias" else None)
    call = cute_fp8.gemm_gated if name == "gated" else cute_fp8.gemm
    options = {"fast_accum": hasty, "activation": None if name == "bias" else "silu"}
    for chosen in (large_tile, *(FAST[-3:] if hasty else ())):
        with cute_fp8.use(config=chosen):
            operands = case.xq, case.sx, case.wq, case.sw, case.bias
            exact = call(*operands, **options, out_dtype=FP32)
            for dtype in (BF16, FP16):
                assert torch.equal(call(*operands, **options, out_dtype=dtype), exact.to(dtype))


def test_weights_may_come_from_the_kernel_before(backend, tile):
    """They are fetched into L2 before that kernel is waited for: what arrives is what it wrote."""
    channels, columns = 2 * tile.n + 8, 1024
    # Its bf16 outputs are taken for codes. A few tiles and a long K: the next CTAs come early.
    before = gemm_case(channels, columns // 2, 16384, seed=7)
    x = gemm_case(tile.m + 1, 8, columns, seed=8)
    buffer = torch.empty((channels, columns // 2), dtype=BF16, device="cuda")
    weights, sw = buffer.view(torch.float8_e4m3fn), torch.ones(channels, device="cuda")

    def bits():
        return cute_fp8.gemm(x.xq, x.sx, weights, sw).view(torch.int16)

    before.run(out=buffer)
    torch.cuda.synchronize()
    expected = bits()
    for _ in range(20):
        buffer.zero_()
        before.run(out=buffer)
        assert torch.equal(bits(), expected)


def test_counters_of_tiles_are_not_shared(backend):
    """Launches that overlap, on two streams and by a graph, each have all tiles computed once; and
    one after the other on a stream with fewer and with more SMs' worth of tiles.
    """
    dynamic = next(tile for tile in PRECISE if tile.dynamic)
    cases = [exact_case(m, 1544, 400, seed=m) for m in (40, 12800, 2600)]
    right = [case.exact()[0] for case in cases]
    other, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with cute_fp8.use(config=dynamic):
        for case, exact in zip(cases, right, strict=True):
            assert torch.equal(case.run().double(), exact)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = [case.run() for case in cases]
        for _ in range(5):
            for y in captured:
                y.zero_()
            torch.cuda.synchronize()
            graph.replay()
            with torch.cuda.stream(other):
                there = [case.run() for case in cases * 3]
            here = [case.run() for case in cases * 3]
            torch.cuda.synchronize()
            for results in (captured, there, here):
                for i, y in enumerate(results):
                    assert torch.equal(y.double(), right[i % 3])


@pytest.mark.parametrize("k", [4096, 14336])
def test_promotion_is_what_makes_it_accurate(backend, k):
    """The negative control: without it, errors grow along K."""
    case = gemm_case(256, 512, k, seed=12, out_dtype=FP32)
    exact, _ = case.exact()

    def error(y):
        return ((y.double() - exact).norm() / exact.norm()).item()

    # Without splits: they would cut the sums short, and promote at each cut.
    for tile in (tile for tile in PRECISE if tile.splits == 1 and tile.m >= 128):
        with cute_fp8.use(config=tile):
            assert error(case.run()) <= 1.5e-4
    with cute_fp8.use(config=FAST[0]):
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
