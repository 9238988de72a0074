"""MXFP8 output of an epilogue: codes, and one e8m0 scale per row and 32 columns, in 128x4 blocks.

The fp32 result is rounded to bf16 and then quantised, as ``quantize_mxfp8`` would the stored bf16
result, bit for bit: the scale is ``2^ceil(log2(amax / 448))`` from the bits of amax, codes are made
by an exact multiplication, a block of zeros (-0 too) has scale 0x00 and codes 0x00, one with a NaN
or an Inf has 0xFF and 0x7F.
"""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float32, Int16, Int32, Int64, Uint8, cute
from cutlass.cutlass_dsl import select_

from .config import MX_BLOCK, SCALE_BLOCK_BYTES, SCALE_BLOCK_ROWS
from .floats import ABS_MASK, E8M0_BIAS, E8M0_NAN, bits_of, exp2
from .pieces import quad_transpose

#: 448 is 1.75 * 2^8: a mantissa above that of 1.75 needs the next power of two.
_MANTISSA, _MANTISSA_448, _EXPONENT_448 = 0x7FFFFF, 0x600000, 8
_BLOCK_COLUMNS, _GROUP_ROWS = SCALE_BLOCK_BYTES // SCALE_BLOCK_ROWS, 32


def scale_byte(amax_bits: Int32) -> Int32:
    """The e8m0 scale of a block from the fp32 bits of its largest magnitude."""
    biased = amax_bits >> 23
    above = Int32(select_((amax_bits & _MANTISSA) > _MANTISSA_448, Int32(1), Int32(0)))
    byte = cutlass.max(biased - _EXPONENT_448 + above, Int32(0))
    return Int32(select_(biased == E8M0_NAN, Int32(E8M0_NAN), byte))


@cute.jit
def quantize_block(values: cute.Tensor, lane_in_quad: Int32):
    """Quantise a row of 32 columns that a quad holds: (codes, scale byte).

    Args:
        values: fp32 pairs of four pieces side by side, ``(2, 4)`` per lane.

    Returns:
        The codes as 16-bit pairs in four words, transposed: this lane's 8 consecutive columns.
    """
    amax = Int32(0)
    for i in cutlass.range_constexpr(cute.size(values)):
        values[i] = values[i].to(BFloat16).to(Float32)
        amax = cutlass.max(amax, bits_of(values[i]) & ABS_MASK)
    for bit in cutlass.range_constexpr(2):
        amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, 1 << bit))
    byte = scale_byte(amax)
    factor = exp2(E8M0_BIAS - cutlass.min(byte, Int32(E8M0_NAN - 1)))
    for i in cutlass.range_constexpr(cute.size(values)):
        values[i] = values[i] * factor
    codes = cute.make_rmem_tensor(values.layout, Float8E4M3FN)
    codes.store(values.load().to(Float8E4M3FN))
    pairs = cute.recast_tensor(codes, Int16)
    words = cute.make_rmem_tensor(4, Int32)
    for j in cutlass.range_constexpr(4):
        word = Int32(select_(byte == E8M0_NAN, Int32(0x7F7F), pairs[j].to(Int32) & 0xFFFF))
        words[j] = Int32(select_(amax == 0, Int32(0), word))
    quad_transpose(words, lane_in_quad)
    return words, byte


@cute.jit
def pack_pairs(words: cute.Tensor) -> cute.Tensor:
    """Four words of two codes each as two words of four."""
    packed = cute.make_rmem_tensor(2, Int32)
    for i in cutlass.range_constexpr(2):
        packed[i] = words[2 * i] | (words[2 * i + 1] << 16)
    return packed


@cute.jit
def scale_offset(row: Int32, block: Int32, block_columns: Int32) -> Int64:
    """Where the scale of ``row``'s ``block``-th 32 columns is (``cute_fp8/scales.py``)."""
    tile = Int64(row // SCALE_BLOCK_ROWS) * block_columns + block // _BLOCK_COLUMNS
    within = row % _GROUP_ROWS * 16 + row % SCALE_BLOCK_ROWS // _GROUP_ROWS * 4
    return tile * SCALE_BLOCK_BYTES + within + block % _BLOCK_COLUMNS


@cute.jit
def clear_padding(scales: cute.Tensor, m: Int32, columns: Int32, thread: Int32, threads: Int32):
    """Write 0x00 in the padding of blocked scales of ``m`` rows of ``columns`` values.

    Args:
        thread, threads: of the whole grid; each writes a share. No other byte is touched, so this
            may run at any time beside the stores of scales.
    """
    blocks = columns // MX_BLOCK
    block_columns = cute.ceil_div(blocks, _BLOCK_COLUMNS)
    all_rows = cute.ceil_div(m, SCALE_BLOCK_ROWS) * SCALE_BLOCK_ROWS
    all_blocks = block_columns * _BLOCK_COLUMNS
    below = (all_rows - m) * all_blocks
    beside = m * (all_blocks - blocks)
    index = thread
    while index < below + beside:
        row, block = m + index // all_blocks, index % all_blocks
        if index >= below:
            missing = all_blocks - blocks
            row, block = (index - below) // missing, blocks + (index - below) % missing
        scales[scale_offset(row, block, block_columns)] = Uint8(0)
        index += threads
