"""Scales and codes of e4m3, bit for bit as ``cute_fp8/numerics.py`` has them.

An amax travels as the bits of a non-negative fp32, as an integer: integers order those bits as
numbers, Inf above all numbers and NaN above Inf, so that no maximum drops a NaN.

Per token, ``code = rne(x / scale)`` with the IEEE quotient, whose hardware sequence would be
repeated for every element of a row although the divisor is the same. What is done once for a row
depends on x's dtype.

*16 bits*: ``1 / s = high + low`` to 2^-44, and ``q = x * high + (x * low)``, rounded once by an
FMA. That is no proof of the IEEE quotient, but its code is the same: an x of 11 bits or less is
either far from every tie of two codes, or x / amax is one exactly, and then s's own rounding leaves
x / s at least 2^-35 (relatively) from where the quotient would be rounded to another side of the
tie. All pairs of mantissas are tested. ``high`` lies below 1 / s, so that ``low`` is never
negative and -0 stays -0.

*fp32*: the row's reciprocal is divided in IEEE, and each quotient is corrected from its exact
remainder (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor",
1990):

    q = x * r                        within two ulp of x / s
    q = q - (q * s - x) * r          within one ulp
    q = q - (q * s - x) * r          x / s correctly rounded, as r is 1 / s correctly rounded

The remainders must be exact, for which no product may fall below what fp32 can hold: rows of tiny
scale are multiplied by a power of two first, as is their scale.

Rows and blocks of zeros, and those with a NaN, have factors that make every code 0x00, and 0x7F.
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
_NEGATIVE_ZERO = -0x80000000
_FP8_MAX, _MIN_SCALE = 448.0, 2.0**-126
#: In fp32, scales below this are lifted: 2^-93 and more leave all remainders of normal codes exact.
_TINY, _LIFT = 2.0**-90, 2.0**64
#: In bf16, scales above this are lowered: the lower part of their reciprocal would be denormal;
#: the factor as two bf16 in a word.
_HUGE, _LOWER, LOWER_PAIR = 2.0**90, 2.0**-64, 0x1F801F80
#: What an approximate reciprocal is multiplied with to be below the true one.
_BELOW = 1.0 - 2.0**-22


class TokenScale(NamedTuple):
    """The scale of a row, and what its codes are made with.

    Attributes:
        bits: of the scale.
        lift: a power of two that x is multiplied with first; nearly always 1.
        first, second: of 16-bit rows the two parts of the reciprocal; of fp32 ones the divisor and
            its reciprocal.
    """

    bits: Int32
    lift: Float32
    first: Float32
    second: Float32


class BlockScale(NamedTuple):
    """The scale of a block of 32, and what its codes are made with.

    Attributes:
        byte: e8m0.
        factor: ``2^-exponent``; NaN for a block with a NaN or Inf in it.
        zero: -0, which changes no product; of a block of zeros +0, which makes all of them +0.
    """

    byte: Int32
    factor: Float32
    zero: Float32


@cute.jit
def token_scale(amax: Int32, narrow: cutlass.Constexpr) -> TokenScale:
    """``amax / 448`` of a row, 1 for a zero row, NaN for one with a NaN or Inf in it.

    ``narrow``: whether the row's elements have 16 bits.
    """
    bad, zero = amax >= _INF, amax == 0
    finite = Float32(select_(bad | zero, Float32(_FP8_MAX), amax.bitcast(Float32)))
    scale = cute.arch.fmax(_divided_by_448(finite), Float32(_MIN_SCALE))
    bits = Int32(select_(bad, Int32(_NAN), scale.bitcast(Int32)))
    nan = float_of(Int32(_NAN))
    if cutlass.const_expr(narrow):
        lift = Float32(select_(scale > Float32(_HUGE), Float32(_LOWER), Float32(1.0)))
        divisor = scale * lift
        high = cute.arch.rcp_approx(divisor) * Float32(_BELOW)
        rest = cute.math.fma(-high, divisor, Float32(1.0))
        low = cute.math.fma(rest, rest, rest) * high
        # 0 * high - 0 and -0 * high + 0 are both +0.
        low = Float32(select_(zero, Float32(-1.0), low))
        return TokenScale(bits, lift, Float32(select_(bad, nan, high)), low)
    lift = Float32(select_(scale < Float32(_TINY), Float32(_LIFT), Float32(1.0)))
    divisor = scale * lift
    reciprocal = Float32(select_(bad, nan, Float32(1.0) / divisor))
    # With both -1, +0 and -0 become +0 in each step of `_quotient`.
    divisor = Float32(select_(zero, Float32(-1.0), divisor))
    return TokenScale(bits, lift, divisor, Float32(select_(zero, Float32(-1.0), reciprocal)))


@cute.jit
def _divided_by_448(value: Float32) -> Float32:
    """The IEEE quotient, for a value that is no less than 448 * 2^-126; else something below."""
    inverse = Float32(1.0 / _FP8_MAX)
    q = value * inverse
    return cute.math.fma(cute.math.fma(-q, Float32(_FP8_MAX), value), inverse, q)


@cute.jit
def block_scale(amax: Int32) -> BlockScale:
    """``2^ceil(log2(amax / 448))`` of a block, from the exponent's bits."""
    byte = scale_byte(amax)
    # At most 247 for what is finite: a normal factor, and no product is rounded above 2^-126.
    factor = float_of((2 * E8M0_BIAS - cutlass.min(byte, Int32(E8M0_NAN - 1))) << 23)
    factor = Float32(select_(amax >= _INF, float_of(Int32(_NAN)), factor))
    # By their bits: as numbers, 0 and -0 are one constant to the compiler.
    zero = float_of(Int32(select_(amax == 0, Int32(0), Int32(_NEGATIVE_ZERO))))
    return BlockScale(byte, factor, zero)


@cute.jit
def token_codes(values: cute.Tensor, scale: TokenScale, narrow: cutlass.Constexpr):
    """Words of four codes each, of ``values / scale``; overwrites ``values``.

    16-bit values have been multiplied by ``scale.lift``.
    """
    if cutlass.const_expr(not narrow):
        if scale.lift != Float32(1.0):
            for i in cutlass.range_constexpr(cute.size(values)):
                values[i] = values[i] * scale.lift
    for i in cutlass.range_constexpr(cute.size(values)):
        if cutlass.const_expr(narrow):
            values[i] = cute.math.fma(values[i], scale.first, values[i] * scale.second)
        else:
            values[i] = _quotient(values[i], scale.first, scale.second)
    return _words(values)


@cute.jit
def _quotient(x: Float32, divisor: Float32, reciprocal: Float32) -> Float32:
    q = x * reciprocal
    for _ in cutlass.range_constexpr(2):
        excess = cute.math.fma(q, divisor, -x)
        q = cute.math.fma(-excess, reciprocal, q)
    return q


@cute.jit
def block_codes(values: cute.Tensor, scale: BlockScale):
    """Words of four codes each, of ``values * 2^-exponent``; overwrites ``values``."""
    for i in cutlass.range_constexpr(cute.size(values)):
        values[i] = cute.math.fma(values[i], scale.factor, scale.zero)
    return _words(values)


@cute.jit
def _words(values: cute.Tensor):
    # The conversion rounds to nearest even and saturates: no clamp is needed. NaN becomes 0x7F.
    codes = cute.make_rmem_tensor(values.layout, Float8E4M3FN)
    codes.store(values.load().to(Float8E4M3FN))
    return cute.recast_tensor(codes, Int32)
