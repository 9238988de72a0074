"""8x8 pieces of accumulator, and how they change hands between lanes.

In a *piece* lane ``l`` of a warp has row ``l/4``, columns ``2*(l%4)`` and the next: half of what an
m16n8 MMA leaves. Four lanes with the same row are a *quad*. Two columns are too few for a wide
store; four pieces give the lanes of a quad 4x4 pairs of columns, and transposing those leaves each
lane with one piece's row: 8 columns, 16 bytes of bf16, 32 of fp32.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cutlass_dsl import select_


@cute.jit
def quad_transpose(words: cute.Tensor, lane_in_quad: Int32):
    """Transpose, in place, the 4x4 matrix of 32-bit words that a quad's lanes hold (row: lane,
    column: index). Its own inverse.

    Two butterfly steps: 2x2 blocks across lanes that differ in bit 0, then blocks across bit 1.
    """
    for bit in cutlass.range_constexpr(2):
        distance = 1 << bit
        upper = (lane_in_quad & distance) != 0
        for pair in cutlass.range_constexpr(2):
            low = pair * 2 if bit == 0 else pair
            high = low + distance
            sent = select_(upper, words[low], words[high])
            received = cute.arch.shuffle_sync_bfly(sent, distance)
            words[low] = select_(upper, received, words[low])
            words[high] = select_(upper, words[high], received)


@cute.jit
def transpose_planes(words: cute.Tensor, lane_in_quad: Int32):
    """``quad_transpose`` of every plane of ``(planes, 4)`` words."""
    planes = cutlass.const_expr(cute.size(words) // 4)
    by_plane = cute.make_tensor(words.iterator, cute.make_layout((planes, 4)))
    for plane in cutlass.range_constexpr(planes):
        quad_transpose(by_plane[plane, None], lane_in_quad)


@cute.jit
def transpose_pieces(acc: cute.Tensor, lane: Int32):
    """Transpose, in place, every 8x8 piece of ``(4, columns / 8, rows / 16)`` accumulators.

    Where ``out^T`` was computed: rows are channels before and tokens after. What lane ``l`` needs
    then, columns ``2*(l%4)`` and the next of row ``l/4``, were rows of column ``l/4`` before: two
    lanes hold them, both as their first or both as their second value.
    """
    second = lane // 4 % 2 != 0
    sources = [4 * (2 * (lane % 4) + e) + lane // 8 for e in range(2)]
    _, columns, rows = cutlass.const_expr(acc.shape)
    for i in cutlass.range_constexpr(rows):
        for j in cutlass.range_constexpr(columns):
            for half in cutlass.range_constexpr(2):
                first, last = acc[2 * half, j, i], acc[2 * half + 1, j, i]
                for e in cutlass.range_constexpr(2):
                    from_first = cute.arch.shuffle_sync(first, sources[e])
                    from_last = cute.arch.shuffle_sync(last, sources[e])
                    acc[2 * half + e, j, i] = Float32(select_(second, from_last, from_first))


@cute.jit
def pair_words(values: cute.Tensor, dtype: cutlass.Constexpr):
    """Pairs of neighbouring columns of four pieces (2 x 4 fp32) as planes of 32-bit words: (plane,
    piece).
    """
    if cutlass.const_expr(dtype is Float32):
        return cute.recast_tensor(values, Int32)
    rounded = cute.make_rmem_tensor(values.layout, dtype)
    rounded.store(values.load().to(dtype))
    return cute.recast_tensor(rounded, Int32)
