"""Shared-memory tiles of e4m3 codes: their layout, the TMA that fills them, the reads of them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Int16, Int32, cute
from cutlass.cute.nvgpu import cpasync, warp

from .config import MMA_K


class Sharing(NamedTuple):
    """CTAs of a cluster that need the same tile: each loads its part of it, for all of them."""

    ctas: int
    rank: Int32  # of this CTA
    mask: Int16  # of all of them


@cute.jit
def tma_load_atom(
    operand: cute.Tensor,
    rows: cutlass.Constexpr,
    k: cutlass.Constexpr,
    stages: cutlass.Constexpr,
    sharers: cutlass.Constexpr = 1,
):
    """TMA copy of ``rows x k`` tiles of a K-major operand, for a ring of ``stages``.

    A tile row is one swizzle row (64 or 128 bytes): its 16-byte chunks are permuted by the row
    number, so that the 8 rows which one ``ldmatrix`` phase reads lie in 8 different bank groups.
    Rows and K past the end arrive as zeros. With ``sharers`` one copy is of as much less, and goes
    to all of them.
    """
    swizzle = cute.make_swizzle(3 if k == 128 else 2, 4, 3)
    plain = cute.make_layout((rows, k, stages), stride=(k, 1, rows * k))
    layout = cute.make_composed_layout(swizzle, 0, plain)
    op = cpasync.CopyBulkTensorTileG2SOp()
    if cutlass.const_expr(sharers > 1):
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.make_tiled_tma_atom(op, operand, layout, (rows, k), num_multicast=sharers)


@cute.jit
def tma_load(
    tma,
    source: cute.Tensor,
    target: cute.Tensor,
    barrier: cute.Pointer,
    sharing: Sharing | None = None,
):
    """Start one tile's copy, or this CTA's part of it.

    ``barrier`` counts its bytes. Called by the whole warp, issued by one lane.
    """
    grouped_target = cute.group_modes(target, 0)
    grouped_source = cute.group_modes(source, 0)
    rank, ctas, mask = (0, 1, {}) if sharing is None else _part_of(sharing)
    smem_part, gmem_part = cpasync.tma_partition(
        tma.atom, rank, cute.make_layout(ctas), grouped_target, grouped_source
    )
    cute.copy(tma.atom, gmem_part, smem_part, tma_bar_ptr=barrier, **mask)


def _part_of(sharing: Sharing) -> tuple[Int32, int, dict[str, Int16]]:
    """This CTA's part, of how many, and what else its copy is told."""
    return sharing.rank, sharing.ctas, {"mcast_mask": sharing.mask}


def swizzle_bits(row: Int32, k: int) -> Int32:
    """What the swizzle of ``tma_load_atom`` XORs into the byte offset of any 16-byte chunk in tile
    row ``row``.
    """
    return (row % 8) * 16 if k == 128 else (row // 2 % 4) * 16


@cute.jit
def fragment_address(
    stages: cute.Tensor, k: cutlass.Constexpr, first_row: Int32, row: Int32, half: Int32
) -> Int32:
    """Shared-memory address of the 16 bytes that this lane feeds to ``ldmatrix`` for k-block 0 of
    stage 0.

    The swizzle depends on the row modulo 8 alone, so it is worked out once: a later k-block is an
    XOR of ``32 * k_block``, a later stage or a later 16 rows an addition of a multiple of the
    swizzle's period.

    Args:
        stages: the ring of one operand, ``(rows, k, stages)``.
        first_row: of this warp's part of the tile, a multiple of 16; row: 0 to 15 within the
            fragment.
        half: which 16 bytes of the 32-byte k-block.
    """
    return stages.iterator.toint() + (first_row + row) * k + (half * 16 ^ swizzle_bits(row, k))


@cute.jit
def line_address(tile: Int32, k: cutlass.Constexpr, row: Int32, half: Int32) -> Int32:
    """The same of any tile, by its address, a multiple of the swizzle's period or of 8 rows."""
    return tile + row * k + (half * 16 ^ swizzle_bits(row, k))


@cute.jit
def load_fragments(
    fragments: cute.Tensor, address: Int32, k_block: cutlass.Constexpr, k: cutlass.Constexpr
):
    """``ldmatrix.x4`` per 16 rows: the 16x32-byte fragment of A, or two 8x32-byte fragments of B.

    Args:
        fragments: registers, ``(16, rows / 16)`` e4m3 codes.
        address: ``fragment_address`` of this lane plus the stage's offset.
    """
    source = cute.make_ptr(
        Float8E4M3FN, address ^ (MMA_K * k_block), cute.AddressSpace.smem, assumed_align=16
    )
    rows = cutlass.const_expr(cute.size(fragments, mode=[1]))
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(num_matrices=4), Float8E4M3FN)
    cute.copy(
        atom, cute.make_tensor(source, cute.make_layout((16, rows), stride=(1, 16 * k))), fragments
    )
