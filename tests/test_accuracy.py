"""The near-lossless tier, the error report and the smoothing factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, astuple

import pytest
import torch
from torch import Tensor

from cute_fp8 import accuracy
from cute_fp8.accuracy import Verdict, fp8_w8a8_error, near_lossless, smoothquant_factors
from cute_fp8.numerics import (
    dequantize_fp8,
    dequantize_mxfp8,
    quantize_fp8,
    quantize_fp8_activations,
    quantize_mxfp8,
)
from cute_fp8.testing import accumulation_bound, inputs

INF, NAN = float("inf"), float("nan")
ROWS, COLS = 32, 64


def signs(seed: int = 0) -> Tensor:
    """A +-1 matrix: every row and column has an RMS of exactly 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, (ROWS, COLS), generator=generator) * 2.0 - 1.0


def orthogonal(ref: Tensor) -> Tensor:
    """A +-1 matrix that is exactly orthogonal to ref, so that errors can be dialled in."""
    return ref * torch.tensor([1.0, -1.0]).repeat(COLS // 2)


def limits(verdict: Verdict) -> tuple[bool, bool, bool, bool]:
    return accuracy._limits(*astuple(verdict)[1:])


# --- near_lossless ------------------------------------------------------------------------------


def test_figures_are_the_defined_ones() -> None:
    ref = signs()
    verdict = near_lossless(1.01 * ref + 0.05 * orthogonal(ref), ref)
    norm = math.hypot(1.01, 0.05)
    assert verdict.passed
    assert verdict.cosine == pytest.approx(1.01 / norm, abs=1e-6)
    assert verdict.rel_l2 == pytest.approx(math.hypot(0.01, 0.05), abs=1e-6)
    assert verdict.norm_ratio == pytest.approx(norm, abs=1e-6)
    assert verdict.element_ratio == pytest.approx(0.06 / 0.35, abs=1e-6)


@pytest.mark.parametrize(("chord", "good"), [(0.079, True), (0.081, False)])
def test_relative_l2_alone(chord: float, good: bool) -> None:
    ref, angle = signs(), 2 * math.asin(chord / 2)
    y = math.cos(angle) * ref + math.sin(angle) * orthogonal(ref)  # a rotation keeps the norm
    verdict = near_lossless(y, ref)
    assert limits(verdict) == (True, good, True, True)
    assert verdict.passed is good


@pytest.mark.parametrize(
    ("factor", "good"), [(1.019, True), (1.021, False), (0.981, True), (0.979, False)]
)
def test_norm_alone(factor: float, good: bool) -> None:
    verdict = near_lossless(factor * signs(), signs())
    assert limits(verdict) == (True, True, good, True)
    assert verdict.passed is good


@pytest.mark.parametrize(("error", "good"), [(0.34, True), (0.36, False)])
def test_one_element_alone(error: float, good: bool) -> None:
    ref = signs()
    y = ref.clone()
    y[3, 5] += error  # allowed: 0.05 * 1 + 0.3 * 1
    verdict = near_lossless(y, ref)
    assert limits(verdict) == (True, True, True, good)
    assert verdict.passed is good


@pytest.mark.parametrize("transposed", [False, True])
def test_element_allowance_takes_the_larger_of_row_and_column(transposed: bool) -> None:
    ref = torch.ones(64, 64)
    ref[:, 0] = 10.0  # column RMS 10, row RMS 1.6
    for error, good in ((3.4, True), (3.6, False)):  # allowed: 0.05 * 10 + 0.3 * 10
        y = ref.clone()
        y[7, 0] += error
        pair = (y.t(), ref.t()) if transposed else (y, ref)
        assert limits(near_lossless(*pair))[3] is good


def test_cosine_limit() -> None:
    # A cosine below 0.996 forces a relative L2 above 0.089: that limit cannot trip alone.
    ref = signs()
    for cosine, good in ((0.9961, True), (0.9959, False)):
        y = cosine * ref + math.sqrt(1 - cosine**2) * orthogonal(ref)
        assert limits(near_lossless(y, ref)) == (good, False, True, True)
    assert accuracy._limits(0.9959, 0.0, 1.0, 0.0) == (False, True, True, True)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_never_passes(bad: float) -> None:
    dirty = signs()
    dirty[1, 2] = bad
    for y, ref in ((dirty, signs()), (signs(), dirty), (dirty, dirty.clone())):
        assert not near_lossless(y, ref).passed
    assert not near_lossless(torch.full((2, 2), bad), torch.zeros(2, 2)).passed


def test_zero_reference_is_matched_by_zero_only() -> None:
    zero = torch.zeros(3, 4)
    assert near_lossless(-zero, zero) == Verdict(True, 1.0, 0.0, 1.0, 0.0)
    y = zero.clone()
    y[0, 0] = 1e-30
    assert near_lossless(y, zero) == Verdict(False, 0.0, INF, INF, INF)
    assert not near_lossless(zero, y).passed
    # A zero row in a zero column elsewhere: exact zeros are fine there, others are not.
    ref = torch.zeros(4, 4)
    ref[0, :2] = 1.0
    y = ref.clone()
    assert near_lossless(y, ref).passed
    y[2, 3] = 1e-6
    assert near_lossless(y, ref).element_ratio == INF


def test_empty_passes_and_shapes_must_agree() -> None:
    assert near_lossless(torch.zeros(0, 8), torch.zeros(0, 8)).passed
    for y, ref in ((torch.zeros(2, 8), torch.zeros(8, 2)), (torch.zeros(()), torch.zeros(()))):
        with pytest.raises(ValueError, match=r"y and ref: got shapes .*must be"):
            near_lossless(y, ref)


@pytest.mark.parametrize("exponent", [-140, -100, 0, 100])
@pytest.mark.parametrize("factor", [1.0, 1.0625])
def test_magnitude_does_not_matter(exponent: int, factor: float) -> None:
    ref = (signs() * 2.0**exponent).view(4, 8, COLS)
    assert near_lossless(ref * factor, ref).passed is (factor == 1.0)


def test_verdict_prints() -> None:
    good, bad = near_lossless(signs(), signs()), near_lossless(1.05 * signs(), signs())
    assert good.passed
    assert not bad.passed
    assert str(good).startswith("near-lossless: PASS")
    assert "FAILS" not in str(good)
    assert str(bad).startswith("near-lossless: FAIL")
    assert "norm ratio 1.0500 (1 +- 0.02) FAILS" in str(bad)
    assert str(bad).count("FAILS") == 1
    with pytest.raises(FrozenInstanceError):
        good.passed = False  # type: ignore[misc]


# --- fp8_w8a8_error -----------------------------------------------------------------------------


def test_error_report_against_float64() -> None:
    w = inputs("heavy_tailed", 24, 128, seed=0)
    x = inputs("outlier_token", 10, 128, seed=1).view(2, 5, 128)
    q, scale = quantize_fp8(w)
    report = fp8_w8a8_error(w, q, scale, x)
    w64, x64 = w.double(), x.double().view(10, 128)
    wq = q.double() * scale.double().unsqueeze(1)
    codes, x_scale = quantize_fp8_activations(x64.float())
    xq = codes.double() * x_scale.double().unsqueeze(1)
    y, ref = xq @ wq.T, x64 @ w64.T
    expected = {
        "rel_l2": ((wq - w64).norm() / w64.norm()).item(),
        "worst_channel_rel_l2": ((wq - w64).norm(dim=1) / w64.norm(dim=1)).max().item(),
        "activation_rel_l2": ((xq - x64).norm() / x64.norm()).item(),
        "activation_crest": (x64.abs().amax(1) / x64.square().mean(1).sqrt()).max().item(),
        "activation_underflow": ((xq == 0) & (x64 != 0)).sum().item() / (x64 != 0).sum().item(),
        "output_rel_l2": ((y - ref).norm() / ref.norm()).item(),
        "output_cosine": ((y * ref).sum() / (y.norm() * ref.norm())).item(),
        "output_norm_ratio": (y.norm() / ref.norm()).item(),
    }
    assert report == pytest.approx(expected, rel=1e-4)
    assert all(type(value) is float for value in report.values())
    assert report["worst_channel_rel_l2"] > report["rel_l2"]


def test_error_report_crest_and_underflow_by_hand() -> None:
    w = torch.eye(16)
    x = torch.zeros(3, 16)
    x[0] = 1.0  # crest 1
    x[1, 0] = -448.0  # alone: crest 4; the row's scale is 1
    x[1, 1:4] = torch.tensor([2.0**-10, 2.0**-9, -(2.0**-11)])  # ties to 0; kept; lost
    report = fp8_w8a8_error(w, *quantize_fp8(w), x)
    assert report["activation_crest"] == pytest.approx(4.0)
    assert report["activation_underflow"] == pytest.approx(2 / 20)
    assert report["rel_l2"] == 0.0
    assert report["worst_channel_rel_l2"] == 0.0


def test_error_report_edges() -> None:
    w = inputs("gaussian", 16, 32, seed=2)
    w[3] = 0.0
    q, scale = quantize_fp8(w)
    zero = fp8_w8a8_error(w, q, scale, torch.zeros(2, 32))
    assert zero["output_rel_l2"] == zero["activation_underflow"] == zero["activation_crest"] == 0.0
    assert zero["output_cosine"] == zero["output_norm_ratio"] == 1.0
    assert 0.0 < zero["worst_channel_rel_l2"] < 0.05
    assert math.isnan(fp8_w8a8_error(w, q, scale, torch.full((1, 32), NAN))["output_rel_l2"])
    tiny = fp8_w8a8_error(w * 2.0**-90, q, scale * 2.0**-90, torch.ones(2, 32) * 2.0**-30)
    assert tiny["worst_channel_rel_l2"] == pytest.approx(zero["worst_channel_rel_l2"])
    assert tiny["rel_l2"] == pytest.approx(zero["rel_l2"])
    assert tiny["activation_crest"] == 1.0
    shifted = fp8_w8a8_error(w, q, scale * 1.05, inputs("gaussian", 8, 32, seed=3))
    assert shifted["output_norm_ratio"] == pytest.approx(1.05, abs=0.02)
    with pytest.raises(ValueError, match=r"q: got shape .*must be weight's shape"):
        fp8_w8a8_error(w[:8], q, scale, torch.zeros(2, 32))
    with pytest.raises(ValueError, match=r"x: got shape \(2, 16\), must be \[\.\.\., 32\]"):
        fp8_w8a8_error(w, q, scale, torch.zeros(2, 16))


# --- smoothquant_factors ------------------------------------------------------------------------


def hard_layer(seed: int) -> tuple[Tensor, Tensor]:
    """One channel 2**19 times the others in x and 2**-19 in w: outputs ordinary, codes lost."""
    x, w = inputs("gaussian", 48, 256, seed=seed), inputs("gaussian", 64, 256, seed=seed + 500)
    x[:, 77] *= 2.0**19
    w[:, 77] *= 2.0**-19
    return w, x


def w8a8(w: Tensor, x: Tensor) -> Tensor:
    x_deq = dequantize_fp8(*quantize_fp8_activations(x), torch.float32)
    return x_deq @ dequantize_fp8(*quantize_fp8(w), torch.float32).T


@pytest.mark.parametrize("seed", range(3))
def test_smoothing_rescues_a_layer(seed: int) -> None:
    w, x = hard_layer(seed)
    ref = (x.float() @ w.float().T).bfloat16()
    assert not near_lossless(w8a8(w, x).bfloat16(), ref).passed
    s = smoothquant_factors(w, x)
    assert (s.dtype, s.shape) == (torch.float32, (256,))
    assert near_lossless(w8a8(w.float() * s, x.float() / s).bfloat16(), ref).passed
    plain = fp8_w8a8_error(w, *quantize_fp8(w), x)
    smooth_w = w.float() * s
    smooth = fp8_w8a8_error(smooth_w, *quantize_fp8(smooth_w), x.float() / s)
    assert plain["activation_underflow"] > 0.2 > 0.01 > smooth["activation_underflow"]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_factors_follow_the_formula(alpha: float) -> None:
    w, x = hard_layer(9)
    expected = x.double().abs().amax(0) ** alpha / w.double().abs().amax(0) ** (1 - alpha)
    s = smoothquant_factors(w, x.view(4, 12, 256), alpha)
    assert torch.allclose(s.double(), expected, rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_factors_are_positive_and_finite(alpha: float) -> None:
    w, x = torch.ones(2, 16), torch.full((3, 16), 4.0)
    w[:, 0], x[:, 1], w[:, 2], x[:, 3] = 0.0, 0.0, 1e-45, 1e-45
    w[:, 4], x[:, 4], w[:, 5], x[:, 5] = 3e38, 1e-45, 1e-45, 3e38
    w[:, 6], x[:, 6] = 0.0, 0.0
    s = smoothquant_factors(w, x, alpha)
    assert torch.isfinite(s).all()
    assert (s > 0).all()
    for dead in (torch.zeros(3, 16), torch.zeros(0, 16)):
        assert torch.equal(smoothquant_factors(w, dead, alpha), torch.ones(16))


def test_dead_channels_keep_their_place_among_the_weights() -> None:
    w, x = torch.ones(2, 16), torch.full((3, 16), 2.0**-20)
    x[:, 4] = 0.0  # a factor of 1 would make this channel 2**10 times the others in w * s
    assert torch.allclose(smoothquant_factors(w, x), torch.full((16,), 2.0**-10))


def mx(w: Tensor, x: Tensor) -> Tensor:
    x_deq = dequantize_mxfp8(*quantize_mxfp8(x), torch.float32)
    return x_deq @ dequantize_mxfp8(*quantize_mxfp8(w), torch.float32).T


def lopsided_layer(kind: str) -> tuple[Tensor, Tensor]:
    """One massive token in x, or one massive output channel in w; alpha 1 or 0 loses the rest."""
    x, w = inputs("gaussian", 48, 256, seed=6), inputs("gaussian", 64, 256, seed=7)
    (x if kind == "token" else w)[5, 77] = 2.0**19
    return w, x


def fp16_only(w: Tensor) -> tuple[Tensor, Tensor]:
    """A weight quantiser that overflows beyond 65504."""
    return quantize_fp8_activations(w.to(torch.float16))


@pytest.mark.parametrize(("kind", "best"), [("token", 0.0), ("channel", 1.0)])
@pytest.mark.parametrize(("quantiser", "product"), [(quantize_fp8, w8a8), (quantize_mxfp8, mx)])
def test_best_alpha_under_the_weight_quantiser(
    quantiser: Callable[[Tensor], tuple[Tensor, Tensor]],
    product: Callable[[Tensor, Tensor], Tensor],
    kind: str,
    best: float,
) -> None:
    w, x = lopsided_layer(kind)
    ref, errors = x.double() @ w.double().T, {}
    for alpha in (0.0, 1.0):
        s = smoothquant_factors(w, x, alpha)
        y = product(w.float() * s, x.float() / s).double()
        relative = [(y - ref).norm(dim=d) / ref.norm(dim=d) for d in (0, 1)]
        errors[alpha] = (relative[0].mean() + relative[1].mean()).item()
    assert errors[best] < errors[1 - best] / 2
    for candidates in ([0.0, 1.0], (1.0, 0.0)):
        got = smoothquant_factors(w, x, candidates, quantize_weight=quantiser)
        assert torch.equal(got, smoothquant_factors(w, x, best))


def test_the_weight_quantiser_changes_the_choice() -> None:
    w, x = lopsided_layer("channel")
    zero, one = (smoothquant_factors(w, x, alpha) for alpha in (0.0, 1.0))
    assert torch.equal(smoothquant_factors(w, x, [1.0, 0.0], quantize_fp8), one)
    assert torch.equal(smoothquant_factors(w, x, [1.0, 0.0], fp16_only), zero)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda w, x: smoothquant_factors(w, x, 1.5), "alpha: got 1.5, must be in"),
        (lambda w, x: smoothquant_factors(w, x, []), r"alpha: got \[\], must be in"),
        (lambda w, x: smoothquant_factors(w, x, [0.5, NAN]), "alpha: got"),
        (lambda w, x: smoothquant_factors(w[0], x), r"w: got shape \(32,\), must be 2-D"),
        (lambda w, x: smoothquant_factors(w, x[:, :16]), r"x: got shape .* must be \[\.\.\., 32\]"),
        (lambda w, x: smoothquant_factors(w * INF, x), "w: got a NaN or Inf, must be finite"),
        (lambda w, x: smoothquant_factors(w, x * NAN), "x: got a NaN or Inf, must be finite"),
    ],
)
def test_smoothing_refusals(call: Callable[[Tensor, Tensor], Tensor], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(torch.ones(8, 32), torch.ones(4, 32))


# --- the accumulation tolerance -----------------------------------------------------------------


def test_accumulation_bound_values() -> None:
    one = torch.ones((), dtype=torch.float64)
    assert accumulation_bound(4096, one, "sm_120").item() == (128 + 8) * 2.0**-21
    assert accumulation_bound(4096, one, "stand-in").item() == (128 + 8) * 2.0**-21
    assert accumulation_bound(4096, one, "sm_90").item() == 2.0**-10 + 32 * 2.0**-24
    assert accumulation_bound(4096, one * 3, "cpu").item() == 3 * 4096 * 2.0**-24
    with pytest.raises(ValueError, match="arch: got 'sm_80', must be one of"):
        accumulation_bound(4096, one, "sm_80")


def test_fp32_matmul_is_within_the_cpu_bound_and_bf16_is_not() -> None:
    a, b = inputs("gaussian", 16, 256, seed=0), inputs("gaussian", 16, 256, seed=1)
    exact = a.double() @ b.double().T
    bound = accumulation_bound(256, a.double().abs() @ b.double().abs().T, "cpu")
    product = a.float() @ b.float().T
    assert ((product.double() - exact).abs() <= bound).all()
    assert ((product.bfloat16().double() - exact).abs() > bound).any()


def test_autocast_changes_no_figure() -> None:
    w, x = torch.randn(64, 128), torch.randn(32, 128)
    w[:, 3], x[:, 5] = w[:, 3] * 9, x[:, 5] * 40
    codes, scale = quantize_fp8(w)
    alphas = (0.3, 0.5, 0.7)
    want = fp8_w8a8_error(w, codes, scale, x), smoothquant_factors(w, x, alphas)
    with torch.autocast("cpu", torch.bfloat16):
        got = fp8_w8a8_error(w, codes, scale, x), smoothquant_factors(w, x, alphas)
    assert got[0] == want[0] and torch.equal(got[1], want[1])
