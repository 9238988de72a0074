"""A row kernel's values in registers: chunks of 8 as 32-bit words, in x's dtype, and as fp32.

Two values of 16 bits share a word, and are rounded and compared two at a time.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, cute

from .row_config import CHUNK

#: The upper of two values; both of them without their signs.
_UPPER, _MAGNITUDES = -0x10000, 0x7FFF7FFF
_PTX = {BFloat16: "bf16x2", Float16: "f16x2"}
#: Two ones, and two negative zeros, which change no sum.
_ONES = {BFloat16: 0x3F803F80, Float16: 0x3C003C00}
_NEGATIVE_ZEROS = 0x80008000


def chunk_words(dtype: Any) -> int:
    """Words of a chunk."""
    return CHUNK * dtype.width // 32


@cute.jit
def widened(words: cute.Tensor, dtype: cutlass.Constexpr) -> cute.Tensor:
    """A chunk as fp32, in registers of its own."""
    values = cute.make_rmem_tensor(CHUNK, Float32)
    if cutlass.const_expr(dtype is BFloat16):
        for i in cutlass.range_constexpr(CHUNK // 2):
            values[2 * i] = (words[i] << 16).bitcast(Float32)
            values[2 * i + 1] = (words[i] & _UPPER).bitcast(Float32)
    else:
        values.store(cute.recast_tensor(words, dtype).load().to(Float32))
    return values


@cute.jit
def narrow(words: cute.Tensor, values: cute.Tensor, dtype: cutlass.Constexpr):
    """Round fp32 values into a chunk's words, to nearest even."""
    for i in cutlass.range_constexpr(cute.size(words)):
        if cutlass.const_expr(dtype is Float32):
            words[i] = values[i].bitcast(Int32)
        else:
            # In PTX: the compiler would round one at a time what is widened again at once.
            words[i] = cute.arch.inline_ptx(
                f"cvt.rn.{_PTX[dtype]}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
                write_only_types=[Int32],
                read_only_args=[values[2 * i], values[2 * i + 1]],
            )


@cute.jit
def multiply(words: cute.Tensor, factors: cute.Tensor, dtype: cutlass.Constexpr):
    """``words *= factors`` of 16 bits each, every product rounded once."""
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = cute.arch.inline_ptx(
            f"{{ .reg .b32 c; mov.b32 c, {_NEGATIVE_ZEROS}; "
            f"fma.rn.{_PTX[dtype]} {{$w0}}, {{$r0}}, {{$r1}}, c; }}",
            write_only_types=[Int32],
            read_only_args=[words[i], factors[i]],
        )


@cute.jit
def add(words: cute.Tensor, others: cute.Tensor, dtype: cutlass.Constexpr):
    """``words += others``, every sum rounded once.

    Of 16 bits, that is the fp32 sum rounded: either it is exact, or far from any tie.
    """
    for i in cutlass.range_constexpr(cute.size(words)):
        if cutlass.const_expr(dtype is Float32):
            total = words[i].bitcast(Float32) + others[i].bitcast(Float32)
            words[i] = total.bitcast(Int32)
        else:
            words[i] = cute.arch.inline_ptx(
                f"{{ .reg .b32 o; mov.b32 o, {_ONES[dtype]}; "
                f"fma.rn.{_PTX[dtype]} {{$w0}}, {{$r0}}, o, {{$r1}}; }}",
                write_only_types=[Int32],
                read_only_args=[words[i], others[i]],
            )


@cute.jit
def amax_bits(words: cute.Tensor, dtype: cutlass.Constexpr) -> Int32:
    """The largest magnitude in some words, as the bits of a non-negative fp32; NaN is largest."""
    if cutlass.const_expr(dtype is Float32):
        amax = Int32(0)
        for i in cutlass.range_constexpr(cute.size(words)):
            magnitude = cute.math.abs(words[i].bitcast(Float32))
            amax = cute.arch.fmax(amax.bitcast(Float32), magnitude, nan=True).bitcast(Int32)
        return amax
    amax = _largest([words[i] for i in range(cute.size(words))], dtype) & _MAGNITUDES
    if cutlass.const_expr(dtype is BFloat16):
        return cutlass.max(amax << 16, amax & _UPPER)
    pair = cute.make_rmem_tensor(2, Float16)
    cute.recast_tensor(pair, Int32)[0] = amax
    both = cute.make_rmem_tensor(2, Float32)
    both.store(pair.load().to(Float32))
    return cutlass.max(both[0].bitcast(Int32), both[1].bitcast(Int32))


def _largest(words: list[Int32], dtype: Any) -> Int32:
    """The larger magnitudes of two columns of 16-bit values, with any signs.

    In pairs of pairs, so that no maximum waits for all before it.
    """
    while len(words) > 1:
        half = len(words) // 2
        pairs = zip(words[:half], words[half : 2 * half], strict=True)
        words = [_larger(a, b, dtype) for a, b in pairs] + words[2 * half :]
    return words[0]


def _larger(a: Int32, b: Int32, dtype: Any) -> Int32:
    larger: Int32 = cute.arch.inline_ptx(
        f"max.NaN.xorsign.abs.{_PTX[dtype]} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )
    return larger
