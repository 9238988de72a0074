"""The MXFP8 variant of the sm_120 GEMM: natively on sm_120, through the stand-in on Hopper.

What the per-token variant's tests show of the shared parts (epilogue, tails, strides) is not shown
again for all of its combinations; here it is the scales that are put to the test.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import cute_fp8
from cute_fp8.build import compiler
from cute_fp8.gemms.case import GemmCase, mxfp8_case, poisoned_blocks
from cute_fp8.gemms.launch import ScaleBlocks
from cute_fp8.kernels.config import ACTIVATIONS
from cute_fp8.kernels.tiles import TILES
from cute_fp8.numerics import quantize_mxfp8
from cute_fp8.scales import from_blocked
from cute_fp8.targets import target_of
from cute_fp8.testing import KINDS, inputs

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E8M0 = torch.float8_e8m0fnu


@pytest.fixture(params=TILES["mxfp8"], ids=lambda tile: tile.name)
def tile(request):
    """Every tile serves every problem: each is forced on all of them."""
    with cute_fp8.use(config=request.param):
        yield request.param


def test_exact_around_every_tile_edge(backend, tile):
    """Every block has its own scale, so a shifted or swapped one fails; padding is poisoned."""
    ms = (1, 7, 33, tile.m - 1, tile.m, tile.m + 1, 2 * tile.m + 1)
    ns = (8, tile.n - 8, tile.n, tile.n + 8)
    ks = (32, 96, tile.k - 32, tile.k, tile.k + 32, (tile.stages + 1) * tile.k + 64)
    for seed, (m, n, k) in enumerate(product(ms, ns, ks)):
        mxfp8_case(m, n, k, seed=seed).check_exact()


def test_exact_with_many_tiles_per_cta(backend, tile):
    mxfp8_case(tile.m * 9 + 5, tile.n * 37 + 8, tile.k * (tile.stages + 2), seed=3).check_exact()


@pytest.mark.parametrize("m", range(1, 18))
def test_few_tokens(backend, m):
    mxfp8_case(m, 264, 416, seed=m).check_exact()


def test_scales_over_the_whole_range(backend, tile):
    """Exponents from -127 to 127 in both operands, whose sum stays near 0."""
    mxfp8_case(77, 136, 1120, seed=4, base=126).check_exact()


@pytest.mark.parametrize(("byte_a", "byte_b"), [(0, 0), (0, 254), (254, 0), (1, 253), (254, 254)])
def test_the_ends_of_the_scale_range(backend, tile, byte_a, byte_b):
    """2^-127 and 2^127: results that overflow or underflow fp32, and those that just do not."""
    case = mxfp8_case(40, 64, 64, seed=5)
    a = torch.full((40, 2), byte_a, dtype=torch.uint8, device="cuda")
    b = torch.full((64, 2), byte_b, dtype=torch.uint8, device="cuda")
    # Of one sign, so that no sum of infinities is NaN.
    ones = torch.ones_like(case.xq.float()).to(case.xq.dtype)
    case = replace(case, xq=ones, sx=poisoned_blocks(a), sw=poisoned_blocks(b))
    case = replace(case, wq=case.wq.float().abs().to(case.wq.dtype))
    y, (exact, _) = case.run_guarded(), case.exact()
    assert torch.equal(y, exact.to(FP32))


def test_a_nan_scale_poisons_its_row_or_column_alone(backend, tile):
    case = mxfp8_case(70, 136, 160, seed=6)
    expected = case.run()
    for name, rows, index in (("sx", 70, 33), ("sw", 136, 9)):
        scale = from_blocked(getattr(case, name).view(torch.uint8), rows, 5)
        scale[index, 4] = 0xFF
        y = replace(case, **{name: poisoned_blocks(scale)}).run_guarded()
        poisoned = y[index] if name == "sx" else y[:, index]
        assert poisoned.isnan().all()
        poisoned.copy_(expected[index] if name == "sx" else expected[:, index])
        assert torch.equal(y, expected)


def test_row_major_scales_give_the_same_bits(backend, tile):
    for m, n, k in ((1, 8, 32), (45, 136, 96), (129, 264, 1120)):
        case = mxfp8_case(m, n, k, seed=7)
        row_major = mxfp8_case(m, n, k, seed=7, blocked=False)
        expected = case.run()
        assert torch.equal(row_major.run_guarded(), expected)
        assert torch.equal(replace(case, sw=row_major.sw).run(), expected)
        assert torch.equal(replace(case, sx=row_major.sx).run(), expected)


def test_row_major_scales_cost_one_launch_each(backend, launched):
    case = mxfp8_case(45, 136, 96, seed=8, blocked=False)
    case.run()
    kernels = launched(case.run)
    assert len(kernels) == 3, kernels


def test_row_major_weight_scales_may_be_written_to(backend):
    """In ways that leave no trace in a version counter, under graph replay too."""
    case = mxfp8_case(45, 136, 96, seed=8, blocked=False)
    case.run()
    case.sw.data.view(torch.uint8).add_(1)
    assert torch.equal(case.run().double(), case.exact()[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.run()
    case.sw.view(torch.uint8).add_(1)
    graph.replay()
    assert torch.equal(y.double(), case.exact()[0])


def test_frozen_weight_scales_cost_no_launch(backend, launched):
    case = mxfp8_case(45, 136, 96, seed=8, blocked=False)
    case.run()
    cute_fp8.freeze_scales(case.sw)
    case.check_exact()
    blocked_tokens = replace(case, sx=cute_fp8.to_blocked(case.sx))
    for run, count in ((case.run, 2), (blocked_tokens.run, 1)):
        run()
        kernels = launched(run)
        assert len(kernels) == count, kernels
    case.sw.view(torch.uint8).add_(1)
    kernels = launched(case.run)
    assert len(kernels) == 3, kernels
    case.check_exact()


def test_frozen_weight_scales_on_other_streams_and_in_graphs(backend):
    case = mxfp8_case(45, 136, 96, seed=8, blocked=False)
    expected = case.run()
    freezing, using = torch.cuda.Stream(), torch.cuda.Stream()
    sw = torch.zeros_like(case.sw.view(torch.uint8)).view(E8M0)
    torch.cuda.synchronize()
    with torch.cuda.stream(freezing):
        torch.cuda._sleep(50_000_000)
        sw.view(torch.uint8).copy_(case.sw.view(torch.uint8))
        cute_fp8.freeze_scales(sw)
    case = replace(case, sw=sw)
    with torch.cuda.stream(using):
        y = case.run()
    using.synchronize()
    assert torch.equal(y, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.run()
        with pytest.raises(RuntimeError, match=r"^freeze_scales: .* capture"):
            cute_fp8.freeze_scales(sw)
    for _ in range(2):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)


def test_blocked_scales_cost_one_launch(backend, launched):
    case = mxfp8_case(45, 136, 96, seed=9)
    case.run()
    kernels = launched(case.run)
    assert len(kernels) == 1, kernels


def test_relayout_equals_to_blocked(backend):
    capability = torch.cuda.get_device_capability()
    blocks = ScaleBlocks(str(target_of(capability)), torch.device("cuda", 0))
    for rows, columns in product((1, 31, 128, 129, 300), (1, 3, 4, 5, 35)):
        scale = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device="cuda").view(E8M0)
        blocked = blocks.of(scale, rows)
        assert torch.equal(blocked.view(torch.uint8), cute_fp8.to_blocked(scale).view(torch.uint8))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "denormals"])
def test_kinds_of_input(backend, tile, kind):
    x = inputs(kind, 131, 288, seed=21, dtype=FP32, device="cuda")
    w = inputs("gaussian", 200, 288, seed=22, dtype=FP32, device="cuda") / 17
    xq, sx = quantize_mxfp8(x, blocked=True)
    wq, sw = quantize_mxfp8(w, blocked=True)
    case = GemmCase(xq, sx, wq, sw, out_dtype=FP32)
    case.check(case.run_guarded())


@pytest.mark.parametrize(
    "shape", [(17, 4096, 14336), (352, 2560, 1024), (2048, 4096, 4096)], ids=str
)
def test_gaussian_accuracy(backend, tile, shape):
    m, n, k = shape
    x = inputs("gaussian", m, k, seed=23, dtype=FP32, device="cuda")
    w = inputs("gaussian", n, k, seed=24, dtype=FP32, device="cuda") / k**0.5
    xq, sx = quantize_mxfp8(x, blocked=True)
    wq, sw = quantize_mxfp8(w, blocked=True)
    case = GemmCase(xq, sx, wq, sw, out_dtype=FP32)
    y = case.run_guarded()
    case.check(y)
    exact, _ = case.exact()
    assert ((y.double() - exact).norm() / exact.norm()).item() <= 1.5e-4


@pytest.mark.parametrize(
    ("out_dtype", "bias", "residual"), [(BF16, BF16, BF16), (FP16, FP32, FP32), (FP32, FP16, FP32)]
)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_epilogues(backend, out_dtype, bias, residual, activation):
    case = mxfp8_case(45, 136, 224, seed=25, out_dtype=out_dtype, bias=bias, residual=residual)
    case = replace(case, activation=activation)
    case.check(case.run_guarded())


def test_linear_reference(backend):
    """``mxfp8_linear``, which never takes these kernels, agrees with them."""
    torch.manual_seed(0)
    x = torch.randn((3, 11, 512), dtype=BF16, device="cuda")
    w = torch.randn((264, 512), dtype=BF16, device="cuda") / 512**0.5
    bias = torch.randn(264, dtype=BF16, device="cuda")
    q, scale = quantize_mxfp8(w)
    codes, sx = quantize_mxfp8(x)
    expected = cute_fp8.mxfp8_linear(x, q, scale, bias)
    y = cute_fp8.gemm(codes, sx, q, scale, bias)
    assert y.shape == expected.shape == (3, 11, 264)
    assert ((y - expected).float().norm() / expected.float().norm()).item() < 3e-3


def test_repeats_are_bit_identical_under_load(backend, tile):
    case = mxfp8_case(333, 520, 1120, seed=41, exponents=20, base=90, bias=FP32, residual=FP32)
    expected = case.run()
    load = torch.cuda.Stream()
    a = torch.randn((2048, 2048), device="cuda", dtype=BF16)
    for _ in range(50):
        with torch.cuda.stream(load):
            torch.mm(a, a)
        assert torch.equal(case.run_guarded(), expected)
    torch.cuda.synchronize()


def test_graph_capture_and_replay(backend):
    case = mxfp8_case(64, 128, 256, seed=42)
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.run()
    fresh = mxfp8_case(64, 128, 256, seed=43)
    for name in ("xq", "sx", "wq", "sw"):
        getattr(case, name).view(torch.uint8).copy_(getattr(fresh, name).view(torch.uint8))
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, fresh.run())


def test_everything_shipped_can_be_made_ready(backend):
    compiler.forget()
    report = cute_fp8.compile("cuda:0", ops="*-bfloat16")
    assert len(report) == sum(len(tiles) for tiles in TILES.values())
