"""Tiles that TMA fetches into L2 and no further: what a kernel will load first, before it may."""

from __future__ import annotations

from cutlass import cute
from cutlass.cute.nvgpu import cpasync

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
