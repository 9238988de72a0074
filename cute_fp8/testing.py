"""Shared material for tests: named inputs, the accumulation tolerance, exact quantisers.

Inputs are drawn on the CPU from a seed and then moved, so that every device sees the same bits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Generator, Tensor

TIER_KINDS = ("gaussian", "heavy_tailed", "massive_channel", "outlier_token", "ocp_trap")
"""Kinds that look like layers: right scales pass the near-lossless tier, wrong ones do not."""

EDGE_KINDS = ("all_equal", "zeros", "denormals", "max_codes", "nan_rows")
"""Kinds that provoke one rule of the numerics each."""

KINDS = TIER_KINDS + EDGE_KINDS

# Worst-case relative accumulation error of a dot product of length K, in units of sum |a_k b_k|.
_ACCUMULATION: dict[str, Callable[[int], float]] = {
    "sm_120": lambda k: (k / 32 + 8) * 2.0**-21,
    "stand-in": lambda k: (k / 32 + 8) * 2.0**-21,
    "sm_90": lambda k: 8 * 2.0**-13 + k / 128 * 2.0**-24,
    "cpu": lambda k: k * 2.0**-24,
}


def accumulation_bound(k: int, abs_product_sum: Tensor, arch: str) -> Tensor:
    """Largest allowed ``|acc - acc64|`` per element, before the output's own rounding.

    * ``sm_120`` and its ``stand-in``: one truncating addition of ~21 bits per MMA (32 along K);
    * ``sm_90``: about 14 bits inside the tensor core, promoted to fp32 every 128 along K;
    * ``cpu``: plain fp32 in any order.

    Args:
        k: length of the dot products.
        abs_product_sum: ``sum_k |a_k * b_k|`` per output element (best in fp64).
        arch: one of the names above.

    Returns:
        Tensor of ``abs_product_sum``'s shape and dtype.

    Raises:
        ValueError: an unknown arch.
    """
    if arch not in _ACCUMULATION:
        raise ValueError(f"arch: got {arch!r}, must be one of {', '.join(_ACCUMULATION)}")
    return abs_product_sum * _ACCUMULATION[arch](k)


def inputs(
    kind: str,
    rows: int,
    k: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A reproducible ``[rows, k]`` tensor of the named kind.

    Args:
        kind: one of :data:`KINDS`:

            * ``gaussian``: standard normal;
            * ``heavy_tailed``: Student's t with three degrees of freedom;
            * ``massive_channel``: normal, one channel times sqrt(k): about half of the energy;
            * ``outlier_token``: normal, and row ``seed % rows`` holds one element of
              1.5 sqrt(k): another seed, another row;
            * ``ocp_trap``: normal, and one channel drawn from ``+-[1.80, 1.99] * 2**j``, with
              each token's power of two from sqrt(k) to 4 sqrt(k): it is its block's maximum and
              dominates the output's norm;
            * ``all_equal``: constant rows, of different and alternating constants;
            * ``zeros``: +0 and -0;
            * ``denormals``: only denormals of ``dtype``;
            * ``max_codes``: rows of ``448 * 2**j`` with alternating sign: every code is +-448 and
              every scale a power of two;
            * ``nan_rows``: normal, and rows 0, 3, 6... hold one NaN, Inf or -Inf.
        rows: number of rows, may be 0.
        k: number of columns, at least 16.
        seed: of the generator; also places the special row or channel.
        dtype: bf16, fp16 or fp32.
        device: of the result.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in _BUILDERS:
        raise ValueError(f"kind: got {kind!r}, must be one of {', '.join(KINDS)}")
    generator = torch.Generator().manual_seed(seed)
    values = _BUILDERS[kind](rows, k, seed, generator, dtype)
    return values.to(dtype).to(device)


def _gaussian(rows: int, k: int, seed: int, g: Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, k, generator=g)


def _heavy_tailed(rows: int, k: int, seed: int, g: Generator, dtype: torch.dtype) -> Tensor:
    chi_square = torch.randn(3, rows, k, generator=g).square().sum(dim=0)
    values = torch.randn(rows, k, generator=g) / (chi_square / 3).sqrt()
    return values.clamp(-1e4, 1e4)  # inside fp16's range


def _massive_channel(rows: int, k: int, seed: int, g: Generator, dtype: torch.dtype) -> Tensor:
    values = torch.randn(rows, k, generator=g)
    values[:, seed % k] *= math.sqrt(k)
    return values


def _outlier_token(rows: int, k: int, seed: int, g: Generator, dtype: torch.dtype) -> Tensor:
    values = torch.randn(rows, k, generator=g)
    channel = int(torch.randint(k, (), generator=g))
    if rows:
        values[seed % rows, channel] = (-1) ** seed * 1.5 * math.sqrt(k)
    return values


def _ocp_trap(rows: int, k: int, seed: int, g: Generator, dtype: torch.dtype) -> Tensor:
    values = torch.randn(rows, k, generator=g)
    mantissa = 1.80 + 0.19 * torch.rand(rows, generator=g)
    sign = torch.randint(2, (rows,), generator=g) * 2 - 1
    exponent = round(math.log2(2 * math.sqrt(k))) + torch.randint(-1, 2, (rows,), generator=g)
    values[:, seed % k] = sign * mantissa * 2.0**exponent
    return values


def _all_equal(rows: int, k: int, seed: int, g: Generator, dtype: torch.dtype) -> Tensor:
    constant = 0.375 * (1 + (torch.arange(rows) + seed) % 7) * (-1.0) ** torch.arange(rows)
    return constant.unsqueeze(1).expand(rows, k)


def _zeros(rows: int, k: int, seed: int, g: Generator, dtype: torch.dtype) -> Tensor:
    return torch.zeros(rows, k) * (torch.randint(2, (rows, k), generator=g) * 2.0 - 1.0)


def _denormals(rows: int, k: int, seed: int, g: Generator, dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    steps = round(1 / info.eps)  # denormals are steps of smallest_normal * eps, 1 .. steps - 1
    sign = torch.randint(2, (rows, k), generator=g) * 2 - 1
    mantissa = torch.randint(1, steps, (rows, k), generator=g)
    return (sign * mantissa).double() * (info.smallest_normal * info.eps)


def _max_codes(rows: int, k: int, seed: int, g: Generator, dtype: torch.dtype) -> Tensor:
    row = torch.arange(rows)
    constant = 448.0 * 2.0 ** ((row + seed) % 8 - 4) * (-1.0) ** row
    return constant.unsqueeze(1).expand(rows, k)


def _nan_rows(rows: int, k: int, seed: int, g: Generator, dtype: torch.dtype) -> Tensor:
    values = torch.randn(rows, k, generator=g)
    bad = (float("nan"), float("inf"), float("-inf"))
    for index, row in enumerate(range(0, rows, 3)):
        values[row, int(torch.randint(k, (), generator=g))] = bad[(index + seed) % 3]
    return values


_BUILDERS: dict[str, Callable[[int, int, int, Generator, torch.dtype], Tensor]] = {
    "gaussian": _gaussian,
    "heavy_tailed": _heavy_tailed,
    "massive_channel": _massive_channel,
    "outlier_token": _outlier_token,
    "ocp_trap": _ocp_trap,
    "all_equal": _all_equal,
    "zeros": _zeros,
    "denormals": _denormals,
    "max_codes": _max_codes,
    "nan_rows": _nan_rows,
}


# Quantisation in exact rational arithmetic. Slow, and independent of torch's casts and divisions.


def e4m3_code(magnitude: Fraction) -> int:
    """Code of the e4m3fn value nearest to ``magnitude >= 0``, ties to even, saturating at 0x7E."""
    if magnitude >= E4M3_MAGNITUDES[-1]:
        return len(E4M3_MAGNITUDES) - 1
    above = bisect_left(E4M3_MAGNITUDES, magnitude)
    if E4M3_MAGNITUDES[above] == magnitude:
        return above
    low, high = magnitude - E4M3_MAGNITUDES[above - 1], E4M3_MAGNITUDES[above] - magnitude
    if low == high:
        return above - above % 2
    return above if high < low else above - 1


def round_fp32(value: Fraction) -> Fraction:
    """``value >= 0`` rounded to fp32, ties to even, denormals included; no overflow."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    return round(value / quantum) * quantum


def exact_row(row: Sequence[float]) -> tuple[Fraction, list[int]]:
    """Scale and codes of one finite row of the per-row recipe."""
    amax = max(abs(Fraction(v)) for v in row)
    if amax == 0:
        return Fraction(1), [0] * len(row)
    scale = max(round_fp32(amax / 448), Fraction(1, 2**126))
    return scale, [_signed(v, e4m3_code(round_fp32(abs(Fraction(v)) / scale))) for v in row]


def exact_mx_block(block: Sequence[float]) -> tuple[int, list[int]]:
    """Scale byte and codes of one finite block of MXFP8."""
    amax = max(abs(Fraction(v)) for v in block)
    if amax == 0:
        return 0, [0] * len(block)
    # Start below the answer, by the bit lengths, and stop at the first power that is large enough.
    exponent = max(-127, amax.numerator.bit_length() - amax.denominator.bit_length() - 10)
    while amax > 448 * Fraction(2) ** exponent:
        exponent += 1
    unit = Fraction(2) ** exponent
    return exponent + 127, [_signed(v, e4m3_code(abs(Fraction(v)) / unit)) for v in block]


def _e4m3_magnitude(code: int) -> Fraction:
    """Value of code 0x00 .. 0x7E: four exponent bits of bias 7, three mantissa bits."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 2**9)
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


def _signed(value: float, code: int) -> int:
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


E4M3_MAGNITUDES = [_e4m3_magnitude(code) for code in range(0x7F)]
"""Every finite non-negative e4m3fn value, indexed by its code."""
