"""Split-K: several CTAs add up parts of one output tile's K, the last to arrive adds the parts.

Each MMA warp is on its own: it leaves its part of the accumulators in a workspace and counts itself
in, and whichever warp completes the count adds all parts, always from the first to the last, so
that the result does not depend on who was last. It then runs the epilogue, once.

The workspace is 32-bit words: a counter per output tile and warp, then the parts. Counters are 0
before a launch and left 0 by it. One workspace must not be used by two launches at a time: there is
one per stream, and per graph.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from .config import WARP_SIZE, WORKSPACE_ALIGNMENT, GemmConfig
from .scheduler import Work, WorkTile

#: fp32 of one 16-byte access.
_VECTOR = 4


class SplitK:
    """Specialised by a :class:`GemmConfig`."""

    def __init__(self, config: GemmConfig):
        self.config = config
        self.warps = config.tile.group_warps
        #: fp32 that a lane, and a warp, leaves.
        self.lane_words = config.tile.warp_m * config.tile.warp_n // WARP_SIZE
        self.warp_words = config.tile.warp_m * config.tile.warp_n

    @cute.jit
    def add_up(
        self,
        acc: cute.Tensor,
        workspace: cute.Tensor,
        part: WorkTile,
        work: Work,
        warp: Int32,
        lane: Int32,
    ) -> cutlass.Boolean:
        """Leave this warp's part; if it is the last of its tile, ``acc`` becomes the whole sum.

        Returns:
            Whether it is: the caller then runs the epilogue.
        """
        tiles = work.tiles_m * work.tiles_n
        counters = cute.ceil_div(tiles * self.warps, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        place = Int64(part.index * work.splits * self.warps + warp) * self.warp_words
        first = workspace.iterator + (Int64(counters) + place + _VECTOR * lane)
        stride = self.warps * self.warp_words
        self._store(acc, first + Int64(part.split) * stride)
        last = cutlass.Boolean(False)
        if cutlass.const_expr(self.config.fix_up):
            # Release: every lane's stores are visible to all SMs before the count is.
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            counter = workspace.iterator + (part.index * self.warps + warp)
            arrived = Int32(0)
            if lane == 0:
                arrived = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            arrived = cute.arch.shuffle_sync(arrived, 0)
            last = arrived == work.splits - 1
            if last:
                # Acquire: what the others stored before they counted themselves in.
                cute.arch.fence_acq_rel_gpu()
                acc.fill(0.0)
                for split in cutlass.range(work.splits, unroll=1):
                    self._add(acc, first + Int64(split) * stride)
                if lane == 0:
                    cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
        return last

    @cute.jit
    def _store(self, acc: cute.Tensor, pointer: cute.Pointer):
        values = cute.make_tensor(
            cute.recast_ptr(acc.iterator, dtype=Int32), cute.make_layout((_VECTOR, self._vectors))
        )
        for i in cutlass.range_constexpr(self._vectors):
            cute.autovec_copy(values[None, i], self._vector(pointer, i))

    @cute.jit
    def _add(self, acc: cute.Tensor, pointer: cute.Pointer):
        flat = cute.make_tensor(acc.iterator, cute.make_layout(self.lane_words))
        read = cute.make_rmem_tensor((_VECTOR, self._vectors), Int32)
        for i in cutlass.range_constexpr(self._vectors):
            cute.autovec_copy(self._vector(pointer, i), read[None, i])
        values = cute.recast_tensor(read, Float32)
        for i in cutlass.range_constexpr(self.lane_words):
            flat[i] = flat[i] + values[i]

    @property
    def _vectors(self) -> int:
        """16-byte accesses of a lane."""
        return self.lane_words // _VECTOR

    @cute.jit
    def _vector(self, pointer: cute.Pointer, i: cutlass.Constexpr) -> cute.Tensor:
        """A lane's ``i``-th 16 bytes; a warp's lie side by side."""
        place = pointer + i * _VECTOR * WARP_SIZE
        aligned = cute.make_ptr(Int32, place.toint(), cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(aligned, cute.make_layout(_VECTOR))
