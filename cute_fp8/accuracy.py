"""Measures of accuracy: the near-lossless tier, the error report of a layer, and smoothing factors.

Everything here is for tests, reports and conversion. It reads values on the host and must not be
called during CUDA graph capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cute_fp8.arguments import check_tensor
from cute_fp8.numerics import (
    dequantize_fp8,
    dequantize_mxfp8,
    quantize_fp8,
    quantize_fp8_activations,
    quantize_mxfp8,
    without_autocast,
)

MIN_COSINE = 0.996
MAX_REL_L2 = 0.08
MAX_NORM_DEVIATION = 0.02
MAX_ELEMENT_RATIO = 1.0


@dataclass(frozen=True)
class Verdict:
    """Outcome of :func:`near_lossless`.

    Attributes:
        passed: all four limits hold.
        cosine: cosine of y and ref as vectors; must be >= 0.996.
        rel_l2: ``||y - ref|| / ||ref||``; must be <= 0.08.
        norm_ratio: ``||y|| / ||ref||``; must be within 2 % of 1.
        element_ratio: the largest ratio of an element's error to its allowance; must be <= 1.
    """

    passed: bool
    cosine: float
    rel_l2: float
    norm_ratio: float
    element_ratio: float

    def __str__(self) -> str:
        limits = _limits(self.cosine, self.rel_l2, self.norm_ratio, self.element_ratio)
        parts = (
            (f"cosine {self.cosine:.5f} (>= {MIN_COSINE})", limits[0]),
            (f"relative L2 {self.rel_l2:.4f} (<= {MAX_REL_L2})", limits[1]),
            (f"norm ratio {self.norm_ratio:.4f} (1 +- {MAX_NORM_DEVIATION})", limits[2]),
            (f"element ratio {self.element_ratio:.3f} (<= {MAX_ELEMENT_RATIO:g})", limits[3]),
        )
        head = "near-lossless: " + ("PASS" if self.passed else "FAIL")
        return "; ".join([head] + [text if good else text + " FAILS" for text, good in parts])


@torch.no_grad()
def near_lossless(y: Tensor, ref: Tensor) -> Verdict:
    """Judge y against the result that it stands for, by the near-lossless tier.

    The tier: cosine >= 0.996, relative L2 <= 0.08, norm within 2 %, and for every element of the
    flattened rows ``|y - ref| <= 0.05 * |ref| + 0.3 * max(rms(ref[m, :]), rms(ref[:, n]))``. All
    four are computed in fp32, after a common power-of-two scaling that keeps squares in range.

    Edge cases: a NaN or Inf anywhere fails. An all-zero ref is matched only by an all-zero y, which
    passes (cosine and norm ratio count as 1); any other y fails. Empty tensors pass.

    Args:
        y: ``[..., N]``, any floating dtype that converts to fp32.
        ref: the same shape, such as the bf16 original's output.

    Returns:
        The verdict, with the four figures as Python floats.

    Raises:
        ValueError: different shapes, or no dimension.
    """
    check_tensor("y", y)
    check_tensor("ref", ref)
    if y.shape != ref.shape or ref.dim() == 0:
        shapes = f"{tuple(y.shape)} and {tuple(ref.shape)}"
        raise ValueError(f"y and ref: got shapes {shapes}, must be equal and [..., N]")
    if ref.numel() == 0:
        return Verdict(True, 1.0, 0.0, 1.0, 0.0)
    y2 = y.detach().to(torch.float32).reshape(-1, y.shape[-1])
    ref2 = ref.detach().to(torch.float32).reshape(-1, ref.shape[-1])
    y2, ref2 = _normalise(y2, ref2)
    cosine, rel_l2, norm_ratio = _similarity(y2, ref2)
    square = ref2.square()
    rms = torch.maximum(square.mean(dim=1, keepdim=True), square.mean(dim=0, keepdim=True)).sqrt()
    error = (y2 - ref2).abs()
    # 0/0 is an exact zero where ref's row and column vanish; maximum() keeps any other NaN.
    ratio = (error / (0.05 * ref2.abs() + 0.3 * rms)).masked_fill(error == 0, 0.0)
    element_ratio = float(ratio.max())
    passed = all(_limits(cosine, rel_l2, norm_ratio, element_ratio))
    return Verdict(passed, cosine, rel_l2, norm_ratio, element_ratio)


@torch.no_grad()
def fp8_w8a8_error(weight: Tensor, q: Tensor, scale: Tensor, x: Tensor) -> dict[str, float]:
    """What the per-token x per-channel recipe costs on one layer and one batch.

    x is quantised per token here. Products are fp32 matrix multiplications of dequantised operands
    (on CUDA they follow torch's ``float32_matmul_precision``; the default is full fp32).

    Args:
        weight: ``[N, K]`` original weight, bf16, fp16 or fp32.
        q: ``[N, K]`` codes of the weight, ``float8_e4m3fn``.
        scale: ``[N]`` fp32 scales of the weight.
        x: ``[..., K]`` activations, bf16, fp16 or fp32.

    Returns:
        Python floats; a norm ratio is ours over the original's, and 0/0 counts as no error:

        * ``rel_l2``: ``||W' - W|| / ||W||`` with ``W' = q * scale``;
        * ``worst_channel_rel_l2``: the largest such value of a single output channel;
        * ``activation_rel_l2``: ``||x' - x|| / ||x||`` with x' quantised and dequantised;
        * ``activation_crest``: ``amax(|x[m]|) / rms(x[m])``, the maximum over tokens; 0 for a zero
          token;
        * ``activation_underflow``: fraction of x's non-zero elements whose code is a zero;
        * ``output_rel_l2``, ``output_cosine``, ``output_norm_ratio``: ``x' W'^T`` against
          ``x W^T``.

        A NaN or Inf in x makes the activation and output values NaN.

    Raises:
        TypeError: a dtype that the quantisers refuse.
        ValueError: shapes that do not belong together.
    """
    check_tensor("q", q)
    _check_layer("weight", weight, x)
    if q.shape != weight.shape:
        got, want = tuple(q.shape), tuple(weight.shape)
        raise ValueError(f"q: got shape {got}, must be weight's shape {want}")
    w32 = weight.detach().to(torch.float32)
    x32 = x.detach().to(torch.float32).reshape(-1, x.shape[-1])
    w_deq = dequantize_fp8(q, scale, torch.float32)
    x_deq = dequantize_fp8(*quantize_fp8_activations(x32), torch.float32)
    output = _similarity(_product(x_deq, w_deq), _product(x32, w32))
    w_peak = w32.abs().amax(dim=1, keepdim=True)  # rows over their peaks, so that squares fit
    channels = _ratio(_ratio(w_deq - w32, w_peak).norm(dim=1), _ratio(w32, w_peak).norm(dim=1))
    return {
        "rel_l2": _similarity(w_deq, w32).rel_l2,
        "worst_channel_rel_l2": _largest(channels),
        **activation_error(x32),
        "output_rel_l2": output.rel_l2,
        "output_cosine": output.cosine,
        "output_norm_ratio": output.norm_ratio,
    }


@torch.no_grad()
def activation_error(x: Tensor, variant: str = "per_token") -> dict[str, float]:
    """What quantising activations costs: the ``activation_*`` of :func:`fp8_w8a8_error`.

    Args:
        x: ``[..., K]``, bf16, fp16 or fp32.
        variant: ``per_token`` or ``mxfp8``.
    """
    x32 = x.detach().to(torch.float32).reshape(-1, x.shape[-1])
    if variant == "mxfp8":
        x_codes, x_scale = quantize_mxfp8(x32)
        x_deq = dequantize_mxfp8(x_codes, x_scale, torch.float32)
    else:
        x_codes, x_scale = quantize_fp8_activations(x32)
        x_deq = dequantize_fp8(x_codes, x_scale, torch.float32)
    peak = x32.abs().amax(dim=1, keepdim=True)
    crest = _ratio(_ratio(peak, peak)[:, 0], _ratio(x32, peak).square().mean(dim=1).sqrt())
    nonzero = x32 != 0
    lost = nonzero & ((x_codes.view(torch.uint8) & 0x7F) == 0)
    return {
        "activation_rel_l2": _similarity(x_deq, x32).rel_l2,
        "activation_crest": _largest(crest),
        "activation_underflow": int(lost.sum()) / max(1, int(nonzero.sum())),
    }


@torch.no_grad()
def smoothquant_factors(
    w: Tensor,
    x: Tensor,
    alpha: float | Sequence[float] = 0.5,
    quantize_weight: Callable[[Tensor], tuple[Tensor, Tensor]] = quantize_fp8,
) -> Tensor:
    """Per-input-channel factors that move activation outliers into the weight.

    Use as ``x / s`` and ``w * s``: their product is unchanged, and channels of x that are massive
    no longer push the others of the same token below e4m3's range. The formula is SmoothQuant's
    (Xiao et al., 2022, equation 4):
    ``s[k] = amax(|x[..., k]|)**alpha / amax(|w[:, k]|)**(1 - alpha)``.

    A channel that is all zero in x or in w has no such value; it gets the geometric mean of the
    others (1 if there are none), which keeps its place among the weights. Factors are clamped to
    fp32's normal range, so they are always positive and finite.

    Args:
        w: ``[N, K]`` weight, bf16, fp16 or fp32.
        x: ``[..., K]`` calibration activations, bf16, fp16 or fp32.
        alpha: how much of the difficulty moves to the weight, in [0, 1]; 0 ignores x. With a
            sequence, each candidate's factors are tried on x, and those with the smallest error of
            the layer's output are returned; the first wins a tie. The error is the relative L2
            averaged over tokens plus that averaged over output channels: neither a massive token
            nor a massive output channel hides what happens to the others.
        quantize_weight: with which quantiser the candidates are judged, :func:`quantize_fp8` or
            :func:`quantize_mxfp8` (or a function like one of them); x is quantised by the same
            recipe. Not called for a single alpha.

    Returns:
        ``[K]`` fp32 on w's device.

    Raises:
        ValueError: shapes that do not belong together, no or a bad alpha, a NaN or Inf in w or x.
    """
    _check_layer("w", w, x)
    candidates = [float(a) for a in (alpha if isinstance(alpha, Sequence) else (alpha,))]
    if not candidates or not all(0.0 <= a <= 1.0 for a in candidates):
        raise ValueError(f"alpha: got {alpha}, must be in [0, 1], one or several")
    w32 = w.detach().to(torch.float32)
    x32 = x.detach().to(w.device, torch.float32).reshape(-1, x.shape[-1])
    w_amax, x_amax = _channel_amax("w", w32), _channel_amax("x", x32)
    factors = [_factors(w_amax, x_amax, a) for a in candidates]
    if len(factors) == 1:
        return factors[0]
    ref = _product(x32, w32)
    errors = []
    for s in factors:
        output = _quantized_output(w32 * s, x32 / s, quantize_weight)
        error = _balanced_error(output, ref)
        errors.append(math.inf if math.isnan(error) else error)  # an overflow never wins
    return factors[errors.index(min(errors))]


class _Similarity(NamedTuple):
    cosine: float
    rel_l2: float
    norm_ratio: float


def _similarity(y: Tensor, ref: Tensor) -> _Similarity:
    """Whole-tensor measures of two fp32 tensors; 0 against 0 is a perfect match."""
    y, ref = _normalise(y, ref)
    y_norm, ref_norm = _norm(y), _norm(ref)
    if ref_norm == 0.0:
        if y_norm == 0.0:
            return _Similarity(1.0, 0.0, 1.0)
        bad = math.nan if math.isnan(y_norm) else math.inf
        return _Similarity(0.0, bad, bad)
    cosine = float((y * ref).sum()) / (y_norm * ref_norm) if y_norm else 0.0
    return _Similarity(cosine, _norm(y - ref) / ref_norm, y_norm / ref_norm)


def _norm(values: Tensor) -> float:
    """L2 norm; torch sums pairwise, which stays accurate for as many elements as fit in memory."""
    return float(values.square().sum().sqrt())


def _limits(
    cosine: float, rel_l2: float, norm_ratio: float, element_ratio: float
) -> tuple[bool, bool, bool, bool]:
    """Which of the tier's limits hold; every comparison is false for NaN."""
    return (
        cosine >= MIN_COSINE,
        rel_l2 <= MAX_REL_L2,
        abs(norm_ratio - 1.0) <= MAX_NORM_DEVIATION,
        element_ratio <= MAX_ELEMENT_RATIO,
    )


def _normalise(y: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """Scale both by the power of two that brings ref's peak (y's if ref is 0) into [0.5, 1)."""
    peak = (float(ref.abs().max()) or float(y.abs().max())) if ref.numel() else 0.0
    exponent = -math.frexp(peak)[1]  # 0 for a zero, NaN or Inf
    first, second = 2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2)  # 2**149 is no fp32
    return y * first * second, ref * first * second


def _balanced_error(y: Tensor, ref: Tensor) -> float:
    """Mean relative L2 error of the rows plus that of the columns; 0/0 counts as 0."""
    y, ref = _normalise(y, ref)
    error = y - ref
    return sum(float(_ratio(error.norm(dim=d), ref.norm(dim=d)).mean()) for d in (0, 1))


def _ratio(value: Tensor, reference: Tensor) -> Tensor:
    """``value / reference`` where 0/0 is 0."""
    return (value / reference).masked_fill((value == 0) & (reference == 0), 0.0)


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _channel_amax(name: str, matrix: Tensor) -> Tensor:
    """``amax(|matrix|, dim=0)`` of ``[rows, K]``, 0 for no rows; ValueError unless finite."""
    if matrix.shape[0] == 0:
        return matrix.new_zeros(matrix.shape[1])
    amax = matrix.abs().amax(dim=0)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError(f"{name}: got a NaN or Inf, must be finite")
    return amax


def _factors(w_amax: Tensor, x_amax: Tensor, alpha: float) -> Tensor:
    """The formula of :func:`smoothquant_factors`, in log2 and fp64 so that nothing overflows."""
    log_s = alpha * x_amax.double().log2() - (1.0 - alpha) * w_amax.double().log2()
    live = (x_amax > 0) & (w_amax > 0)
    mean = log_s[live].mean() if bool(live.any()) else log_s.new_zeros(())
    return torch.where(live, log_s, mean).clamp(-126.0, 127.0).exp2().to(torch.float32)


def _quantized_output(
    w: Tensor, x: Tensor, quantize_weight: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """``x W^T`` in fp32 after both were quantised by the recipe that the weight's scales show."""
    codes, scale = quantize_weight(w)
    if scale.dtype == torch.float8_e8m0fnu:
        x_deq = dequantize_mxfp8(*quantize_mxfp8(x), torch.float32)
        return _product(x_deq, dequantize_mxfp8(codes, scale, torch.float32))
    x_deq = dequantize_fp8(*quantize_fp8_activations(x), torch.float32)
    return _product(x_deq, dequantize_fp8(codes, scale, torch.float32))


def _product(x: Tensor, w: Tensor) -> Tensor:
    """``x W^T`` in fp32, under autocast too."""
    with without_autocast(x.device.type):
        return x @ w.T


def _check_layer(name: str, weight: Tensor, x: Tensor) -> None:
    check_tensor(name, weight)
    check_tensor("x", x)
    if weight.dim() != 2:
        raise ValueError(f"{name}: got shape {tuple(weight.shape)}, must be 2-D [N, K]")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x: got shape {tuple(x.shape)}, must be [..., {weight.shape[1]}]")
