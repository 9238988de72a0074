"""Scales and codes of e4m3, bit for bit as ``cute_fp8/numerics.py`` has them.

An amax travels as the bits of a non-negative fp32, as an integer: integers order those bits as
numbers, Inf above all numbers and NaN above Inf, so that no maximum drops a NaN.

Per token, ``code = rne(x / scale)`` with the IEEE quotient. Its hardware sequence would be repeated
for every element of a row whose divisor is the same; instead the row's reciprocal is divided once,
in IEEE, and each quotient is corrected from its exact remainder (Markstein, "Computation of
elementary functions on the IBM RISC System/6000 processor", 1990):

    q = x * r                        within two ulp of x / s
    q = q - (q * s - x) * r          within one ulp
    q = q - (q * s - x) * r          x / s correctly rounded, as r is 1 / s correctly rounded

Written so, -0 stays -0. The remainders must be exact, for which no product may fall below what fp32
can hold: rows of tiny scale are multiplied by a power of two first, as is their scale. In bf16 and
fp16, one correction gives the same codes for every pair of an element and an amax, which is tested
for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, cute
from cutlass.cutlass_dsl import select_

from .floats import E8M0_BIAS, E8M0_NAN, float_of
from .mx_output import scale_byte

#: Bits of Inf, and of the NaN that marks a row.
_INF, _NAN = 0x7F800000, 0x7FC00000
_FP8_MAX, _MIN_SCALE = 448.0, 2.0**-126
#: Scales below this are lifted: 2^-93 and more leave all remainders of normal codes exact.
_TINY, _LIFT = 2.0**-90, 2.0**64
_NAN_CODES = 0x7F7F7F7F


class Masks(NamedTuple):
    """What becomes of four codes: ``codes & keep | put``."""

    keep: Int32
    put: Int32


class TokenScale(NamedTuple):
    """The scale of a row, and what its codes are made with."""

    bits: Int32
    divisor: Float32
    reciprocal: Float32
    lift: Float32
    masks: Masks


class BlockScale(NamedTuple):
    """The scale of a block of 32, and what its codes are made with."""

    byte: Int32
    factor: Float32
    masks: Masks


@cute.jit
def token_scale(amax: Int32) -> TokenScale:
    """``amax / 448`` of a row, 1 for a zero row, NaN for one with a NaN or Inf in it."""
    bad, zero = amax >= _INF, amax == 0
    plain = bad | zero
    finite = Float32(select_(plain, Float32(1.0), amax.bitcast(Float32)))
    scale = cute.arch.fmax(finite / Float32(_FP8_MAX), Float32(_MIN_SCALE))
    scale = Float32(select_(plain, Float32(1.0), scale))
    lift = Float32(select_(scale < Float32(_TINY), Float32(_LIFT), Float32(1.0)))
    divisor = scale * lift
    bits = Int32(select_(bad, Int32(_NAN), scale.bitcast(Int32)))
    return TokenScale(bits, divisor, Float32(1.0) / divisor, lift, _masks(bad, zero))


@cute.jit
def block_scale(amax: Int32) -> BlockScale:
    """``2^ceil(log2(amax / 448))`` of a block, from the exponent's bits."""
    byte = scale_byte(amax)
    # At most 247 for what is finite: a normal factor, and no product is rounded above 2^-126.
    factor = float_of((2 * E8M0_BIAS - cutlass.min(byte, Int32(E8M0_NAN - 1))) << 23)
    return BlockScale(byte, factor, _masks(amax >= _INF, amax == 0))


@cute.jit
def _masks(bad, zero) -> Masks:
    keep = Int32(select_(bad | zero, Int32(0), Int32(-1)))
    return Masks(keep, Int32(select_(bad, Int32(_NAN_CODES), Int32(0))))


@cute.jit
def token_codes(values: cute.Tensor, scale: TokenScale, corrections: cutlass.Constexpr):
    """Words of four codes each, of ``values / scale``; overwrites ``values``."""
    if scale.lift != Float32(1.0):
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] * scale.lift
    for i in cutlass.range_constexpr(cute.size(values)):
        x = values[i]
        q = x * scale.reciprocal
        for _ in cutlass.range_constexpr(corrections):
            excess = cute.math.fma(q, scale.divisor, -x)
            q = cute.math.fma(-excess, scale.reciprocal, q)
        values[i] = q
    return _words(values, scale.masks)


@cute.jit
def block_codes(values: cute.Tensor, scale: BlockScale):
    """Words of four codes each, of ``values * 2^-exponent``; overwrites ``values``."""
    for i in cutlass.range_constexpr(cute.size(values)):
        values[i] = values[i] * scale.factor
    return _words(values, scale.masks)


@cute.jit
def _words(values: cute.Tensor, masks: Masks):
    # The conversion rounds to nearest even and saturates: no clamp is needed.
    codes = cute.make_rmem_tensor(values.layout, Float8E4M3FN)
    codes.store(values.load().to(Float8E4M3FN))
    words = cute.recast_tensor(codes, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = (words[i] & masks.keep) | masks.put
    return words
