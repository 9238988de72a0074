"""Floating-point numbers by their bits: exact powers of two, order-free maxima that keep NaN."""

from __future__ import annotations

from cutlass import Float32, Int16, Int32, Numeric
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import select_

E8M0_BIAS, E8M0_NAN = 127, 255
#: Of fp32: without the sign, the order of bits is the order of values, with NaN above Inf.
ABS_MASK = 0x7FFFFFFF


def bits_of(x: Float32) -> Int32:
    """The bits of ``x``."""
    return Int32(llvm.bitcast(Int32.mlir_type, x.ir_value()))


def bits_of_half(x: Numeric) -> Int16:
    """The bits of a number of 16 bits."""
    return Int16(llvm.bitcast(Int16.mlir_type, x.ir_value()))


def float_of(bits: Int32) -> Float32:
    """The fp32 value that has these bits."""
    return Float32(llvm.bitcast(Float32.mlir_type, bits.ir_value()))


def exp2(exponent: Int32) -> Float32:
    """2^exponent, exactly, for -127 (a denormal) to 127."""
    bits = select_(exponent == -E8M0_BIAS, Int32(1 << 22), (exponent + E8M0_BIAS) << 23)
    return float_of(Int32(bits))
