"""Split-K: several CTAs add up parts of one output tile's K, the last to arrive adds the parts.

Each MMA warp is on its own: it leaves its part of the accumulators in a workspace and counts itself
in, and whichever warp completes the count adds all parts, always from the first to the last, so
that the result does not depend on who was last. It then runs the epilogue, once.

The workspace is 32-bit words: room for a counter per output tile and warp, then the parts. Counters
are 0 before a launch and left 0 by it. One workspace must not be used by two launches at a time:
there is one per stream, and per graph.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from .config import WARP_SIZE, WORKSPACE_COUNTERS, GemmConfig
from .scheduler import Work, WorkTile

#: fp32 of one 16-byte access.
_VECTOR = 4
#: Accesses that are under way together: with 8 warps of 32 lanes, 16 KB.
_AT_A_TIME = 4


class SplitK:
    """Specialised by a :class:`GemmConfig`."""

    def __init__(self, config: GemmConfig):
        self.config = config
        self.warps = config.tile.group_warps
        #: fp32 that a lane, and a warp, leaves.
        self.lane_words = config.tile.warp_m * config.tile.warp_n // WARP_SIZE
        self.warp_words = config.tile.warp_m * config.tile.warp_n

    @cute.jit
    def leave(
        self,
        acc: cute.Tensor,
        workspace: cute.Tensor,
        part: WorkTile,
        work: Work,
        warp: Int32,
        lane: Int32,
    ) -> cutlass.Boolean:
        """Leave this warp's part and count it in; whether it is the last of its tile."""
        words = self.warps * self.warp_words
        self._store(acc, self._place(workspace, part, work, warp, lane) + Int64(part.split) * words)
        last = cutlass.Boolean(False)
        if cutlass.const_expr(self.config.fix_up):
            # Release: every lane's stores are visible to all SMs before the count is.
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            arrived = Int32(0)
            if lane == 0:
                counter = self._counter(workspace, part, warp)
                arrived = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
            last = cute.arch.shuffle_sync(arrived, 0) == work.splits - 1
        return last

    @cute.jit
    def add_up(
        self,
        acc: cute.Tensor,
        workspace: cute.Tensor,
        part: WorkTile,
        work: Work,
        warp: Int32,
        lane: Int32,
    ):
        """The last warp: ``acc`` becomes the sum of all parts, first to last; the counter 0."""
        # Acquire, by every lane after the one that counted: what the others stored before.
        cute.arch.sync_warp()
        cute.arch.fence_acq_rel_gpu()
        if lane == 0:
            counter = self._counter(workspace, part, warp)
            cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
        place = self._place(workspace, part, work, warp, lane)
        words = self.warps * self.warp_words
        acc.fill(0.0)
        for split in cutlass.range(work.splits, unroll=1):
            self._add(acc, place + Int64(split) * words)

    @cute.jit
    def _counter(self, workspace: cute.Tensor, part: WorkTile, warp: Int32) -> cute.Pointer:
        return workspace.iterator + (part.index * self.warps + warp)

    @cute.jit
    def _place(
        self, workspace: cute.Tensor, part: WorkTile, work: Work, warp: Int32, lane: Int32
    ) -> cute.Pointer:
        """Where this lane's share of its tile's first part is."""
        words = Int64(part.index * work.splits * self.warps + warp) * self.warp_words
        return workspace.iterator + (WORKSPACE_COUNTERS + words + _VECTOR * lane)

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
        for first in cutlass.range_constexpr(0, self._vectors, _AT_A_TIME):
            count = min(_AT_A_TIME, self._vectors - first)
            read = cute.make_rmem_tensor((_VECTOR, count), Int32)
            for i in cutlass.range_constexpr(count):
                cute.autovec_copy(self._vector(pointer, first + i), read[None, i])
            values = cute.recast_tensor(read, Float32)
            for i in cutlass.range_constexpr(_VECTOR * count):
                flat[_VECTOR * first + i] = flat[_VECTOR * first + i] + values[i]
            # Loads do not move over it: all at once, they would take more registers than there are.
            cute.arch.sync_warp()

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
