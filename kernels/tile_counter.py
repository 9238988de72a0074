"""Output tiles from a counter, on Hopper, which has no launch control that hands them out.

CTAs begin with one each and take every further one from a counter in the workspace: the producer
asks for it a tile ahead, and tells the MMA warps through shared memory. With fixed lists all wait
for the slowest, and which are slow is a matter of where SMs lie.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from .barriers import wait
from .scheduler import Answers, Scheduler, Work


class TileCounter:
    """Of the units that a scheduler has."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler

    @cute.jit
    def taken(self, counter: Any, work: Work) -> Int32:
        """Producer warp: a unit that nobody has, or one past the last.

        Each unit but the first of each CTA is asked for once, and each CTA asks once in vain: as
        often as there are units. The last to ask leaves the counter as it was found, at 0.
        """
        ctas, _, _ = cute.arch.grid_dim()
        before = Int32(0)
        if cute.arch.lane_idx() == 0:
            before = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
            if before == self.scheduler.units(work) - 1:
                cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
        return cute.arch.shuffle_sync(before, 0) + ctas

    @cute.jit
    def tell(self, answers: Answers, unit: Int32, phase: Int32):
        """Producer warp: hand the next unit on to the MMA warps, once all have read the last."""
        wait(answers.empty, phase ^ 1)
        with cute.arch.elect_one():
            cute.make_tensor(answers.unit, cute.make_layout(1))[0] = unit
            cute.arch.mbarrier_arrive(answers.full)
            cute.arch.mbarrier_arrive(answers.empty)

    @cute.jit
    def told(self, answers: Answers, phase: Int32) -> Int32:
        """MMA warps: the next unit. One lane reads it and says so: no other lane reads late."""
        wait(answers.full, phase)
        unit = Int32(0)
        if cute.arch.lane_idx() == 0:
            unit = cute.make_tensor(answers.unit, cute.make_layout(1))[0]
            cute.arch.mbarrier_arrive(answers.empty)
        return cute.arch.shuffle_sync(unit, 0)
