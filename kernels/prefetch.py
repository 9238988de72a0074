"""Tiles that TMA fetches into L2 and no further: what a kernel will load first, before it may."""

from __future__ import annotations

from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op

from .smem import Sharing


@cute.jit
def tma_prefetch(tma, source: cute.Tensor, stage: cute.Tensor, sharing: Sharing | None = None):
    """Have one tile, or this CTA's part of it, fetched. Called by the whole warp.

    Args:
        source: the tile; stage: any that it could be loaded to.
        sharing: as of the load.
    """
    rank, ctas = (0, 1) if sharing is None else (sharing.rank, sharing.ctas)
    _, part = cpasync.tma_partition(
        tma.atom,
        rank,
        cute.make_layout(ctas),
        cute.group_modes(stage, 0),
        cute.group_modes(source, 0),
    )
    cute.prefetch(tma.atom, part)


@dsl_user_op
def _bulk_prefetch(address: Int64, count: Int32, *, loc: object = None, ip: object = None) -> None:
    llvm.inline_asm(
        None,
        [value.ir_value(loc=loc, ip=ip) for value in (address, count)],
        "cp.async.bulk.prefetch.L2.global [$0], $1;",
        "l,r",
        has_side_effects=True,
        is_align_stack=False,
        loc=loc,
        ip=ip,
    )


def bulk_prefetch(matrix: cute.Tensor, row: Int32, width: Int32) -> None:
    """Have the first ``width`` bytes of a row of codes fetched, a multiple of 16. Called by one
    lane. Python, run at trace time.
    """
    address = (matrix.iterator + Int64(row) * matrix.stride[0]).toint()
    _bulk_prefetch(Int64(address), width)
