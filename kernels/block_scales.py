"""Block scales of the MXFP8 variant: from global memory, in 128x4 blocks, to the MMA's registers.

One block holds the e8m0 scales of 128 rows and 128 of K (``cute_fp8/scales.py`` has a picture): 32
groups of 16 bytes, group r being the four k-blocks' scales of rows r, r + 32, r + 64 and r + 96. So
a 32-bit word is one row's scales of four k-blocks: loaded once per stage, its bytes picked by the
MMA.

A word serves 32 rows of a warp tile: lane ``l`` loads that of row ``l/4 + 8 * (l%4)``, which is
where the MMA of thread-id 0 (rows 0-15 of A; columns 0-7 of B), 1 and so on looks for it
(``mma.py``).

Blocks are padded beyond the last row and the last of K, with anything. No padding reaches an MMA:
on its way from the register that it was loaded to into the one that the MMA reads, a word is
permuted byte by byte with unit scales, by a selector worked out once per output tile.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import select_

from .config import SCALE_BLOCK_BYTES, SCALE_BLOCK_K, SCALE_BLOCK_ROWS
from .mma import UNIT_SCALES

#: 32-bit words of a block; rows that one word per lane serves.
BLOCK_WORDS, GROUP_ROWS = SCALE_BLOCK_BYTES // 4, 32
#: Selectors of ``prmt(word, unit scales)``, a nibble per byte: the word as it is; unit scales (4
#: and up pick from the second operand).
_KEEP, _REPLACE = 0x3210, 0x4444


@cute.jit
def scale_load_atom(
    scales: cute.Tensor,
    rows: Int32,
    k: Int32,
    blocks: cutlass.Constexpr,
    stages: cutlass.Constexpr,
):
    """TMA copy of ``blocks`` blocks below each other, 128 of K wide, for a ring of ``stages``."""
    block_rows = cute.ceil_div(rows, SCALE_BLOCK_ROWS)
    # A row of blocks is contiguous.
    row_words = cute.ceil_div(k, SCALE_BLOCK_K) * BLOCK_WORDS
    words = cute.make_tensor(
        cute.recast_ptr(scales.iterator, dtype=Int32),
        cute.make_layout(
            (block_rows, row_words), stride=(cute.assume(row_words, divby=BLOCK_WORDS), 1)
        ),
    )
    layout = cute.make_layout(
        (blocks, BLOCK_WORDS, stages), stride=(BLOCK_WORDS, 1, blocks * BLOCK_WORDS)
    )
    op = cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(op, words, layout, (blocks, BLOCK_WORDS))


class ScaleSource(NamedTuple):
    """Where this lane finds its words of one operand in stage 0, and what it makes of them."""

    address: Int32
    selectors: cute.Tensor  # (words,), for prmt(word, unit scales)


@cute.jit
def scale_source(
    stages: cute.Tensor,
    tile_row: Int32,
    warp_row: Int32,
    warp_rows: cutlass.Constexpr,
    rows: Int32,
    lane: Int32,
) -> ScaleSource:
    """For one output tile.

    Args:
        stages: the ring of one operand's scales, ``(blocks, 128 words, stages)``.
        tile_row: first row of the CTA tile in the operand; warp_row: of the warp tile within it.
        warp_rows: rows of the warp tile; of fewer than 32, lanes of a quad share words.
        rows: of the operand.
    """
    lane_row = lane // 4 + 8 * (lane % min(4, warp_rows // 8))
    # A CTA tile smaller than a block starts somewhere inside it.
    row = tile_row % SCALE_BLOCK_ROWS + warp_row + lane_row
    word = row // SCALE_BLOCK_ROWS * BLOCK_WORDS
    word += row % GROUP_ROWS * 4 + row % SCALE_BLOCK_ROWS // GROUP_ROWS
    rows_left = rows - tile_row - warp_row - lane_row
    selectors = cute.make_rmem_tensor(-(-warp_rows // GROUP_ROWS), Int32)
    for group in cutlass.range_constexpr(cute.size(selectors)):
        exists = GROUP_ROWS * group < rows_left
        choice = Int32(select_(exists, Int32(0x3210), Int32(0x7654)))
        # By prmt, which the compiler cannot see through: it would work it out anew in every k-tile.
        selectors[group] = Int32(cute.arch.prmt(Int32(_KEEP), Int32(_REPLACE), choice))
    return ScaleSource(stages.iterator.toint() + 4 * word, selectors)


@cute.jit
def load_scale_words(words: cute.Tensor, source: ScaleSource, stage_offset: Int32):
    """One word per 32 rows of the warp tile: ``(warp rows / 32,)`` registers."""
    count = cutlass.const_expr(cute.size(words))
    pointer = cute.make_ptr(
        Int32, source.address + stage_offset, cute.AddressSpace.smem, assumed_align=4 * count
    )
    # The groups of a warp tile lie side by side in the block: one load.
    words.store(cute.make_tensor(pointer, cute.make_layout(count)).load())


@cute.jit
def take_scale_words(
    words: cute.Tensor, loaded: cute.Tensor, source: ScaleSource, missing: Int32 | None = None
):
    """``loaded`` to ``words``, unit scales in place of padding.

    Args:
        missing: ``missing_k_blocks`` in the last word.
    """
    for group in cutlass.range_constexpr(cute.size(words)):
        selector = source.selectors[group]
        if cutlass.const_expr(missing is not None):
            selector = selector | missing
        words[group] = Int32(cute.arch.prmt(loaded[group], Int32(UNIT_SCALES), selector))


@cute.jit
def missing_k_blocks(existing: Int32) -> Int32:
    """For a word of which only ``existing`` k-blocks are inside K: replaces the bytes after."""
    return (_REPLACE << (4 * existing)) & 0xFFFF
