"""What every GEMM kernel with per-token scales is tested by, against float64.

A kernel's test module takes all of this in, and has fixtures of its own: ``backend``, within which
calls run that kernel; ``tile``, within which they run one of its tiles, for each of them; and
``small_tile`` and ``large_tile``, two of those.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import cute_fp8
from cute_fp8.gemms.case import GemmCase, exact_case, gemm_case
from cute_fp8.kernels.config import ACTIVATIONS
from cute_fp8.testing import KINDS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
#: From the models that the kernels are for, M x N x K.
REAL_SHAPES = (
    (1, 6144, 4096),
    (17, 4096, 14336),
    (352, 2560, 1024),
    (352, 1024, 4096),
    (2048, 4096, 4096),
)


def test_exact_around_every_tile_edge(backend, tile):
    ks = (16, 48, tile.k - 16, tile.k, tile.k + 16, (tile.stages + 1) * tile.k + 16)
    for seed, (m, n, k) in enumerate(product(*edges(tile), ks)):
        exact_case(m, n, k, seed=seed).check_exact()


@pytest.mark.parametrize("out_dtype", [BF16, FP16], ids=str)
def test_exact_around_every_tile_edge_in_16_bits(backend, tile, out_dtype):
    """Sums of 16 products of at most 4 are exact in 8 bits of mantissa."""
    for seed, (m, n) in enumerate(product(*edges(tile))):
        case = exact_case(m, n, 16, seed=seed, out_dtype=out_dtype)
        replace(case, wq=case.wq.float().sign().to(case.wq.dtype)).check_exact()


def edges(tile) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of tokens and of channels around a tile's edges."""
    ms = (1, 2, 7, 9, tile.m - 1, tile.m, tile.m + 1, 2 * tile.m + 1)
    return ms, (8, tile.n - 8, tile.n, tile.n + 8)


def test_exact_with_many_tiles_per_cta(backend, tile):
    """Several output tiles per CTA: ring phases carry over, epilogues overlap the next loads."""
    exact_case(tile.m * 9 + 5, tile.n * 37 + 8, tile.k * (tile.stages + 2), seed=3).check_exact()


@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
def test_gaussian_accuracy(backend, tile, shape):
    case = gemm_case(*shape, seed=11, out_dtype=FP32)
    y = case.run_guarded()
    case.check(y)
    exact, _ = case.exact()
    assert ((y.double() - exact).norm() / exact.norm()).item() <= 1.5e-4
    bf16 = replace(case, out_dtype=BF16)
    bf16.check(bf16.run_guarded())


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("residual", [None, "same", FP32], ids=str)
@pytest.mark.parametrize("bias", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_every_epilogue(backend, small_tile, out_dtype, bias, residual, activation):
    """On the small tile, which compiles in under a second; the large one has the corners below."""
    if residual == "same":
        residual = out_dtype
        if out_dtype is FP32:
            pytest.skip("the same combination as residual=torch.float32")
    options = {"out_dtype": out_dtype, "bias": bias, "residual": residual, "activation": activation}
    with cute_fp8.use(config=small_tile):
        case = gemm_case(45, 136, 208, seed=5, **options)
        case.check(case.run_guarded())


@pytest.mark.parametrize(
    ("out_dtype", "bias", "residual", "activation"),
    [
        (BF16, BF16, BF16, "relu"),
        (BF16, FP32, FP32, "silu"),
        (FP16, FP16, FP16, "gelu"),
        (FP16, BF16, FP32, "gelu_tanh"),
        (FP32, FP32, FP32, "gelu"),
        (FP32, FP16, None, "silu"),
    ],
)
def test_epilogues_of_the_large_tile(backend, large_tile, out_dtype, bias, residual, activation):
    with cute_fp8.use(config=large_tile):
        case = gemm_case(
            300,
            264,
            272,
            seed=6,
            out_dtype=out_dtype,
            bias=bias,
            residual=residual,
            activation=activation,
        )
        case.check(case.run_guarded())


def test_bias_and_residual_are_exact(backend, tile):
    exact_case(tile.m + 3, tile.n + 8, 144, seed=8, bias=FP32, residual=FP32).check_exact()
    exact_case(tile.m + 3, tile.n + 8, 144, seed=9, bias=BF16, residual=FP32).check_exact()


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_input(backend, tile, kind):
    case = gemm_case(131, 200, 288, seed=21, kind=kind, out_dtype=FP32)
    case.check(case.run_guarded())


@pytest.mark.parametrize("activation", [None, "silu"])
def test_nan_tokens_stay_alone(backend, tile, activation):
    """A row with a NaN or Inf is NaN; every other row keeps its bits."""
    nan_rows_alone(activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_tokens_stay_alone_whatever_the_activation(backend, small_tile, activation):
    with cute_fp8.use(config=small_tile):
        nan_rows_alone(activation)


def nan_rows_alone(activation: str | None) -> None:
    """The same call with and without three rows of NaN."""
    clean = gemm_case(70, 136, 160, seed=22, activation=activation)
    dirty = gemm_case(70, 136, 160, seed=22, activation=activation)
    rows = [0, 31, 69]
    dirty.xq.view(torch.uint8)[rows] = 0x7F
    dirty.sx[rows] = float("nan")
    y, expected = dirty.run_guarded(), clean.run_guarded()
    assert y[rows].isnan().all()
    others = [row for row in range(70) if row not in rows]
    assert torch.equal(y[others], expected[others])


def test_fp16_output_does_not_overflow_early(backend, tile):
    """acc alone is past 65504; acc * sx * sw is not."""
    xq = torch.full((40, 512), 448.0, device="cuda").to(torch.float8_e4m3fn)
    wq = torch.full((72, 512), 448.0, device="cuda").to(torch.float8_e4m3fn)
    sx, sw = torch.full((40,), 2.0**-14, device="cuda"), torch.full((72,), 2.0**-6, device="cuda")
    case = GemmCase(xq, sx, wq, sw, out_dtype=FP16)
    case.check(case.run_guarded())


def test_long_sums_do_not_drift(backend, tile):
    """Same-sign products over K = 32768, the worst case of a short accumulator."""
    torch.manual_seed(1)
    codes = torch.rand((64, 32768), device="cuda").add_(0.5).to(torch.float8_e4m3fn)
    ones = torch.ones(64, device="cuda")
    case = GemmCase(codes, ones, codes.clone(), ones, out_dtype=FP32)
    case.check(case.run_guarded())


def test_operand_strides(backend, tile):
    """Row slices, column slices and padded rows of every operand, against contiguous copies."""
    m, n, k = 70, 136, 160
    plain = exact_case(m, n, k, seed=31, residual=FP32)
    wide_x = torch.zeros((2 * m, k + 64), device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    wide_w = torch.zeros((n + 5, k + 48), device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    wide_r = torch.full((m + 1, n + 12), float("nan"), device="cuda")
    views = {
        "xq": wide_x[: 2 * m : 2, 32 : 32 + k].view(torch.float8_e4m3fn),
        "wq": wide_w[5:, 16 : 16 + k].view(torch.float8_e4m3fn),
        "residual": wide_r[1:, 4 : 4 + n],
    }
    views["xq"].copy_(plain.xq)
    views["wq"].copy_(plain.wq)
    views["residual"].copy_(plain.residual)
    for name, view in views.items():
        replace(plain, **{name: view}).check_exact()
    replace(plain, **views).check_exact()


def test_an_expanded_token(backend, tile):
    """A row stride of 0 is a multiple of 16 bytes."""
    case = exact_case(1, 64, 96, seed=32)
    many = replace(case, xq=case.xq.expand(40, 96), sx=case.sx.expand(40))
    many.check_exact()


def test_scale_shapes(backend, tile):
    """Every accepted form of the scales, and views of larger tensors, give the same bits."""
    case = exact_case(60, 72, 96, seed=33)
    expected = case.run()
    spread = torch.zeros((60, 3), device="cuda")
    spread[:, 1] = case.sx
    for sx in (case.sx.view(60, 1), spread[:, 1], spread[:, 1:2]):
        assert torch.equal(replace(case, sx=sx).run(), expected)
    for sw in (case.sw.view(72, 1), case.sw.view(1, 72)):
        assert torch.equal(replace(case, sw=sw).run(), expected)
    half, full = torch.tensor([0.5], device="cuda"), torch.full((60,), 0.5, device="cuda")
    for scalar in (half, half.view(()), half.view(1, 1)):
        assert torch.equal(replace(case, sx=scalar).run(), replace(case, sx=full).run())
    quarter, all_quarter = torch.tensor(0.25, device="cuda"), torch.full((72,), 0.25, device="cuda")
    assert torch.equal(replace(case, sw=quarter).run(), replace(case, sw=all_quarter).run())


def test_batch_dimensions(backend):
    case = exact_case(24, 64, 96, seed=34, residual=FP32)
    expected = case.run()
    y = cute_fp8.gemm(
        case.xq.view(2, 3, 4, 96),
        case.sx.view(2, 3, 4),
        case.wq,
        case.sw,
        residual=case.residual.view(2, 3, 4, 64),
        out_dtype=FP32,
    )
    assert y.shape == (2, 3, 4, 64)
    assert torch.equal(y.view(24, 64), expected)
    y = cute_fp8.gemm(
        case.xq.view(2, 12, 96), case.sx.view(2, 12, 1), case.wq, case.sw, out_dtype=FP32
    )
    assert torch.equal(y.view(24, 64) + case.residual, expected)


def test_no_tokens(backend):
    case = exact_case(0, 64, 96)
    assert case.run().shape == (0, 64)


def test_repeats_are_bit_identical_under_load(backend, tile):
    """A moving result is a race. A second stream keeps the memory system and the SMs busy."""
    case = gemm_case(333, 520, 1104, seed=41, bias=BF16, residual=BF16, activation="gelu")
    expected = case.run()
    load = torch.cuda.Stream()
    a = torch.randn((2048, 2048), device="cuda", dtype=BF16)
    for _ in range(50):
        with torch.cuda.stream(load):
            torch.mm(a, a)
        assert torch.equal(case.run_guarded(), expected)
    torch.cuda.synchronize()
