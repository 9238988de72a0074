"""The CPU's GEMM, which defines what every kernel computes, against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8 import from_blocked, quantize_mxfp8, to_blocked
from cute_fp8.gemms.case import activate64, exact_case, gemm_case
from cute_fp8.testing import accumulation_bound, inputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
DTYPES = (BF16, FP16, FP32)
ACTIVATIONS = (None, "relu", "silu", "gelu", "gelu_tanh")
SHAPES = ((1, 8, 16), (3, 24, 48), (130, 136, 160), (17, 64, 4096))
MX_SHAPES = ((1, 32, 32), (3, 64, 96), (130, 160, 160), (9, 32, 2048))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def mx_call(m: int, n: int, k: int, seed: int = 0) -> list[Tensor]:
    """Codes and row-major scales of Gaussian operands."""
    x = inputs("gaussian", m, k, seed=seed, dtype=FP32)
    w = inputs("gaussian", n, k, seed=seed + 1, dtype=FP32) / k**0.5
    return [*quantize_mxfp8(x), *quantize_mxfp8(w)]


def mx_float64(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes with row-major scales, from the bytes: 2^(byte - 127), NaN for 0xFF."""
    exponents = scales.view(torch.uint8).double() - 127
    factors = torch.exp2(exponents).masked_fill(exponents == 128, float("nan"))
    return codes.double() * factors.repeat_interleave(32, dim=1)


# ---------------------------------------------------------------------------- per token x channel


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_every_part_of_the_epilogue(shape: tuple[int, int, int], out_dtype: torch.dtype) -> None:
    """Each with each: within the bound of float64, one rounding, nothing else written."""
    residuals = dict.fromkeys((None, out_dtype, FP32))
    for seed, (bias, residual, activation) in enumerate(
        product((None, *DTYPES), residuals, ACTIVATIONS)
    ):
        options = {"bias": bias, "residual": residual, "activation": activation}
        case = gemm_case(*shape, seed=seed, device="cpu", out_dtype=out_dtype, **options)
        case.check(case.run_guarded())


@pytest.mark.parametrize("kind", ["gaussian", "heavy_tailed", "massive_channel", "max_codes"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accumulation_within_the_cpu_tolerance(kind: str, shape: tuple[int, int, int]) -> None:
    case = gemm_case(*shape, seed=3, device="cpu", kind=kind, out_dtype=FP32)
    exact, _ = case.exact()
    a, b = case.xq.double().abs(), case.wq.double().abs()
    scale = case.sx.double()[:, None] * case.sw.double()
    # The sum's error, then three roundings to fp32: times sx, times sw, and of the sum itself.
    allowed = accumulation_bound(case.k, a @ b.t(), "cpu") * scale + exact.abs() * 3 * 2.0**-24
    assert ((case.run().double() - exact).abs() <= allowed).all()


def test_gaussian_codes_are_within_the_relative_tolerance() -> None:
    case = gemm_case(64, 128, 4096, seed=4, device="cpu", out_dtype=FP32)
    exact, _ = case.exact()
    assert ((case.run().double() - exact).norm() / exact.norm()).item() <= 1.5e-4


@pytest.mark.parametrize("shape", [*SHAPES, (257, 264, 272)], ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_exact_sums_are_right_to_the_last_bit(
    shape: tuple[int, int, int], out_dtype: torch.dtype
) -> None:
    """What fp32 computes exactly is rounded once, whatever is fused."""
    for seed, (bias, residual) in enumerate(product((None, BF16, FP32), (None, out_dtype, FP32))):
        case = exact_case(
            *shape, seed=seed, device="cpu", out_dtype=out_dtype, bias=bias, residual=residual
        )
        exact, _ = case.exact()
        assert torch.equal(exact.float().double(), exact), "the case itself is not exact"
        assert same(case.run_guarded(), exact.to(FP32).to(out_dtype))


def test_a_fused_residual_is_rounded_once() -> None:
    """1 + 2^-8 is a tie of bf16: rounded before the residual is added, the residual is lost."""
    xq = torch.zeros((1, 16)).index_fill(1, torch.tensor([0]), 1.0).to(E4M3)
    wq = torch.ones((8, 16)).to(E4M3)
    sx, sw = torch.full((1,), 1 + 2.0**-8), torch.ones(8)
    residual = torch.full((1, 8), 2.0**-9)
    y = cute_fp8.gemm(xq, sx, wq, sw, residual=residual)
    assert y.tolist() == [[1 + 2.0**-7] * 8]
    assert (cute_fp8.gemm(xq, sx, wq, sw) + residual.to(BF16)).tolist() == [[1.0] * 8]


def test_scales_are_applied_one_after_the_other() -> None:
    """Their product may overflow or underflow where the result does not."""
    for code, sx, sw in ((2.0**-9, 2.0**70, 2.0**69), (256.0, 2.0**-75, 2.0**-76)):
        codes = torch.zeros((8, 16)).index_fill(1, torch.tensor([0]), code).to(E4M3)
        scales = torch.full((8,), sx), torch.full((8,), sw)
        y = cute_fp8.gemm(codes, scales[0], codes, scales[1], out_dtype=FP32)
        assert (y == code * code * sx * sw).all() and torch.isfinite(y).all() and (y != 0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_scales_make_nan_rows_and_no_others(activation: str | None) -> None:
    case = gemm_case(9, 16, 32, seed=5, device="cpu", kind="nan_rows", activation=activation)
    y = case.run()
    assert y.isnan().all(dim=1).tolist() == [row % 3 == 0 for row in range(9)]
    case.check(y)
    codes = case.xq.view(torch.uint8).clone()
    codes[::3] = 0
    clean = replace(case, xq=codes.view(E4M3), sx=case.sx.nan_to_num(1.0)).run()
    assert same(clean[1::3], y[1::3]) and same(clean[2::3], y[2::3])


# ---------------------------------------------------------------------------- keywords


CHANGES = {
    "bias": {"bias": torch.linspace(-1, 1, 32)},
    "residual": {"residual": torch.linspace(-1, 1, 5 * 32).view(5, 32)},
    **{name: {"activation": name} for name in ACTIVATIONS if name},
}


@pytest.mark.parametrize("variant", ["per-token", "mx"])
def test_every_keyword_changes_the_result(variant: str) -> None:
    """And each differently."""
    case = gemm_case(5, 32, 64, seed=6, device="cpu")
    call = (case.xq, case.sx, case.wq, case.sw) if variant == "per-token" else mx_call(5, 32, 64)
    results = [cute_fp8.gemm(*call), *(cute_fp8.gemm(*call, **c) for c in CHANGES.values())]
    for i, j in product(range(len(results)), repeat=2):
        assert i == j or not torch.equal(results[i], results[j]), (i, j)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_out_dtype_rounds_the_same_fp32_result(out_dtype: torch.dtype) -> None:
    case = gemm_case(5, 32, 64, seed=7, device="cpu", bias=BF16, activation="gelu")
    fp32 = replace(case, out_dtype=FP32).run()
    assert same(replace(case, out_dtype=out_dtype).run(), fp32.to(out_dtype))
    assert not torch.equal(fp32, fp32.to(BF16).float())


@pytest.mark.parametrize("variant", ["per-token", "mx"])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_out_is_written_and_returned(variant: str, out_dtype: torch.dtype) -> None:
    case = gemm_case(5, 32, 64, seed=8, device="cpu")
    call = (case.xq, case.sx, case.wq, case.sw) if variant == "per-token" else mx_call(5, 32, 64)
    expected = cute_fp8.gemm(*call, **CHANGES["bias"], out_dtype=out_dtype)
    buffer = torch.full((5, 48), float("nan"), dtype=out_dtype)
    out = buffer[:, 8:40]
    assert cute_fp8.gemm(*call, **CHANGES["bias"], out_dtype=out_dtype, out=out) is out
    assert same(out, expected)
    assert buffer[:, :8].isnan().all() and buffer[:, 40:].isnan().all()


def test_fast_accum_is_for_hopper_alone() -> None:
    case = gemm_case(5, 32, 64, seed=9, device="cpu")
    assert same(replace(case, options={"fast_accum": True}).run(), case.run())


def test_the_inputs_are_not_changed() -> None:
    case = gemm_case(5, 32, 64, seed=10, device="cpu", bias=FP32, residual=FP32, activation="relu")
    tensors = (case.xq, case.sx, case.wq, case.sw, case.bias, case.residual)
    before = [tensor.clone() for tensor in tensors]
    case.run()
    assert all(same(a, b) for a, b in zip(tensors, before, strict=True))


# ---------------------------------------------------------------------------- MXFP8


@pytest.mark.parametrize("shape", MX_SHAPES, ids=str)
def test_mx_against_float64(shape: tuple[int, int, int]) -> None:
    m, n, _ = shape
    xq, sx, wq, sw = mx_call(*shape, seed=11)
    acc = mx_float64(xq, sx) @ mx_float64(wq, sw).t()
    generator = torch.Generator().manual_seed(12)
    bias = torch.randn(n, generator=generator)
    residual = torch.randn((m, n), generator=generator)
    for activation, out_dtype in product(ACTIVATIONS, DTYPES):
        y = cute_fp8.gemm(
            xq, sx, wq, sw, bias, residual=residual, activation=activation, out_dtype=out_dtype
        )
        exact = activate64(activation, acc + bias.double()) + residual.double()
        # The epilogue's few roundings at the size of its terms, then the output's one.
        terms = acc.abs() + bias.abs() + residual.abs()
        roundoff = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}[out_dtype]
        allowed = terms * 8 * 2.0**-24 + exact.abs() * roundoff + 2.0**-24
        assert ((y.double() - exact).abs() <= allowed).all(), (activation, out_dtype)


@pytest.mark.parametrize("shape", MX_SHAPES, ids=str)
def test_mx_row_major_scales_equal_blocked_ones(shape: tuple[int, int, int]) -> None:
    xq, sx, wq, sw = mx_call(*shape, seed=13)
    expected = cute_fp8.gemm(xq, sx, wq, sw)
    assert expected.float().norm() > 0
    for a, b in product((sx, to_blocked(sx)), (sw, to_blocked(sw))):
        assert same(cute_fp8.gemm(xq, a, wq, b), expected)


def test_mx_scales_over_the_whole_range() -> None:
    """Every pair of scale bytes, from 2^-127 * 2^-127 to 2^127 * 2^127, and NaN for 0xFF."""
    one = torch.zeros((256, 32))
    one[:, 5] = 1.0
    codes, scale_bytes = one.to(E4M3), torch.arange(256).to(torch.uint8).view(256, 1).view(E8M0)
    y = cute_fp8.gemm(codes, scale_bytes, codes, scale_bytes, out_dtype=FP32)
    exponent = torch.arange(256.0).double() - 127
    expected = torch.exp2(exponent[:, None] + exponent).to(FP32)  # overflows and denormals too
    expected[255, :] = expected[:, 255] = float("nan")
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(0.0), expected.nan_to_num(0.0))
    assert y[254, 0] == y[0, 254] == y[127, 127] == 1.0
    assert y[254, 254] == float("inf") and y[0, 0] == 0.0 and y[0, 105] == 2.0**-149


def test_mx_extreme_scales_meet_inside_one_sum() -> None:
    """Blocks of 2^127 * 2^-127, of 2^-127 * 2^127 and of 1 * 1: 32 ones each."""
    ones = torch.ones((8, 96)).to(E4M3)
    a = torch.tensor([254, 0, 127], dtype=torch.uint8).repeat(8, 1).view(E8M0)
    b = torch.tensor([0, 254, 127], dtype=torch.uint8).repeat(8, 1).view(E8M0)
    assert (cute_fp8.gemm(ones, a, ones, b, out_dtype=FP32) == 96).all()


def test_mx_exact_sums_are_right_to_the_last_bit() -> None:
    case = exact_case(130, 136, 160, seed=14, device="cpu")
    generator = torch.Generator().manual_seed(15)
    sx, sw = (
        torch.randint(123, 132, (rows, 5), dtype=torch.uint8, generator=generator).view(E8M0)
        for rows in (130, 136)
    )
    exact = mx_float64(case.xq, sx) @ mx_float64(case.wq, sw).t()
    assert torch.equal(exact.float().double(), exact), "the case itself is not exact"
    for out_dtype in DTYPES:
        y = cute_fp8.gemm(case.xq, sx, case.wq, sw, out_dtype=out_dtype)
        assert same(y, exact.to(FP32).to(out_dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mx_nan_blocks_make_nan_rows_and_no_others(activation: str | None) -> None:
    x = inputs("nan_rows", 9, 64, seed=16, dtype=FP32)
    wq, sw = quantize_mxfp8(inputs("gaussian", 32, 64, seed=17))
    y = cute_fp8.gemm(*quantize_mxfp8(x), wq, sw, activation=activation)
    assert y.isnan().any(dim=1).tolist() == y.isnan().all(dim=1).tolist()
    assert y.isnan().all(dim=1).tolist() == [row % 3 == 0 for row in range(9)]


def test_mx_padding_bytes_change_nothing() -> None:
    """130 and 160 rows of 5 scales leave padding in rows and in columns; 0xFF there is no NaN."""
    xq, sx, wq, sw = mx_call(130, 160, 160, seed=18)
    clean = [to_blocked(sx), to_blocked(sw)]
    poisoned = []
    for blocked, scales in zip(clean, (sx, sw), strict=True):
        padding = to_blocked(torch.ones_like(scales.view(torch.uint8))) == 0
        assert padding.any()
        poisoned.append(blocked.view(torch.uint8).masked_fill(padding, 0xFF).view(E8M0))
    expected = cute_fp8.gemm(xq, clean[0], wq, clean[1])
    assert same(cute_fp8.gemm(xq, poisoned[0], wq, poisoned[1]), expected)
    assert not expected.isnan().any()


@pytest.mark.parametrize("shape", MX_SHAPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mx_output_is_quantize_mxfp8_of_the_bf16_result(
    shape: tuple[int, int, int], activation: str | None
) -> None:
    m, n, _ = shape
    call = mx_call(*shape, seed=19)
    generator = torch.Generator().manual_seed(20)
    options = {
        "bias": torch.randn(n, generator=generator),
        "residual": torch.randn((m, n), generator=generator),
        "activation": activation,
    }
    codes, scales = cute_fp8.gemm(*call, **options, out_dtype=E4M3)
    expected = quantize_mxfp8(cute_fp8.gemm(*call, **options), blocked=True)
    assert same(codes, expected[0]) and codes.shape == (m, n)
    assert same(scales, expected[1]) and scales.dim() == 1 and scales.dtype is E8M0
    # It can be fed to the next GEMM, in either order of its scales.
    wq, sw = quantize_mxfp8(inputs("gaussian", 8, n, seed=21))
    again = cute_fp8.gemm(codes, scales, wq, sw)
    assert same(again, cute_fp8.gemm(codes, from_blocked(scales, m, n // 32), wq, sw))


def test_mx_output_of_batches() -> None:
    xq, sx, wq, sw = mx_call(6, 64, 96, seed=21)
    codes, scales = cute_fp8.gemm(xq.view(2, 3, 96), sx, wq, sw, out_dtype=E4M3)
    flat = cute_fp8.gemm(xq, sx, wq, sw, out_dtype=E4M3)
    assert codes.shape == (2, 3, 64)
    assert same(codes.view(6, 64), flat[0]) and same(scales, flat[1])


# ---------------------------------------------------------------------------- no tokens


@pytest.mark.parametrize("out_dtype", [*DTYPES, E4M3], ids=str)
def test_no_tokens(out_dtype: torch.dtype) -> None:
    xq, sx, wq, sw = mx_call(0, 64, 96)
    y = cute_fp8.gemm(xq, sx, wq, sw, torch.ones(64), out_dtype=out_dtype)
    if out_dtype is E4M3:
        expected = quantize_mxfp8(torch.empty((0, 64)), blocked=True)
        assert same(y[0], expected[0]) and same(y[1], expected[1])
        return
    assert y.shape == (0, 64) and y.dtype is out_dtype
    y = cute_fp8.gemm(xq, torch.ones(0), wq, torch.ones(64), out_dtype=out_dtype)
    assert y.shape == (0, 64) and y.dtype is out_dtype
