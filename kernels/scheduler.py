"""Which output tiles a CTA computes, and in what order.

*Static*: CTA ``i`` of ``g`` takes units ``i, i + g, i + 2g, ...``. *Dynamic*: a grid of one CTA per
tile, of which those that run cancel those that wait, one by one, and take over their tiles (cluster
launch control, sm_100 and up). Every warp role walks the same list by itself::

    unit = scheduler.first()
    while unit < scheduler.units(work):
        tile = scheduler.tile(unit, work)
        ...
        unit += scheduler.step()

with the hardware's answer (``ask``, ``answer``) in place of the last line where it is dynamic.

A unit is an output tile, or with split-K one part of its k-tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.cutlass_dsl import select_

from .barriers import wait

if TYPE_CHECKING:
    from .configs import AnyGemm

#: Tile rows that advance together. A wave of CTAs then touches a near-square patch of the output,
#: so that both operands' tiles are found in L2.
RASTER_ROWS = 8
#: Larger than any unit: what a dynamic schedule returns at its end.
_NO_UNIT = 0x7FFFFFFF


class Work(NamedTuple):
    """The whole problem: output tiles, k-tiles and k-blocks (32) of each, parts of each."""

    tiles_m: Int32
    tiles_n: Int32
    k_tiles: Int32
    k_blocks: Int32
    splits: Any  # Int32, or None without split-K


class WorkTile(NamedTuple):
    """One unit: the tile's place in the output, and the k-tiles to add up."""

    row: Int32  # in tiles
    column: Int32
    k_first: Int32
    k_count: Int32
    index: Int32  # of the output tile
    split: Int32


class Answers(NamedTuple):
    """The shared memory of a dynamic schedule: one answer of the hardware, and its barriers."""

    unit: cute.Pointer  # 16 bytes
    full: cute.Pointer
    empty: cute.Pointer


class Scheduler:
    """Specialised by a GEMM's configuration."""

    def __init__(self, config: AnyGemm):
        self.config = config
        self.groups = config.tile.groups

    @cute.jit
    def units(self, work: Work) -> Int32:
        """How many there are."""
        units = work.tiles_m * work.tiles_n
        if cutlass.const_expr(self.config.split_k):
            units = units * work.splits
        return units

    @cute.jit
    def first(self) -> Int32:
        """This CTA's first unit."""
        cta, _, _ = cute.arch.block_idx()
        return cta

    @cute.jit
    def step(self) -> Int32:
        """From one unit of this CTA to its next, in a static schedule."""
        ctas, _, _ = cute.arch.grid_dim()
        return ctas

    @cute.jit
    def tile(self, unit: Int32, work: Work) -> WorkTile:
        """Where unit ``unit`` is: bands of ``RASTER_ROWS`` tile rows, down, then right."""
        index, split = unit, Int32(0)
        k_first, k_end = Int32(0), work.k_tiles
        if cutlass.const_expr(self.config.split_k):
            # The parts of a tile are neighbours: they run, and are added up, at about one time.
            index = unit // work.splits
            split = unit - index * work.splits
            k_first, k_end = self.k_cut(split, work), self.k_cut(split + 1, work)
        band_tiles = RASTER_ROWS * work.tiles_n
        band = index // band_tiles
        first_row = band * RASTER_ROWS
        rows = cutlass.min(work.tiles_m - first_row, Int32(RASTER_ROWS))
        within = index - band * band_tiles
        row, column = first_row + within % rows, within // rows
        return WorkTile(row, column, k_first, k_end - k_first, index, split)

    @cute.jit
    def k_count(self, unit: Int32, work: Work) -> Int32:
        """K-tiles of a unit: what a ping-pong group skips that leaves it to the other."""
        count = work.k_tiles
        if cutlass.const_expr(self.config.split_k):
            split = unit % work.splits
            count = self.k_cut(split + 1, work) - self.k_cut(split, work)
        return count

    @cute.jit
    def k_cut(self, split: Int32, work: Work) -> Int32:
        """The first k-tile of a part."""
        granule = self.config.k_granule
        granules = cute.ceil_div(work.k_tiles, granule)
        return cutlass.min(split * granules // work.splits * granule, work.k_tiles)

    # ------------------------------------------------------------------ dynamic

    @cute.jit
    def ask(self, answers: Answers, phase: Int32):
        """Producer warp: have the hardware write its next answer, once all have read the last."""
        wait(answers.empty, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(answers.full, 16)
            cute.arch.issue_clc_query(answers.full, answers.unit, multicast=False)

    @cute.jit
    def answer(self, answers: Answers, phase: Int32) -> Int32:
        """Every warp: the next unit of this CTA, from the answer of this phase."""
        wait(answers.full, phase)
        cta, _, _, got_one = cute.arch.clc_response(answers.unit)
        # The next answer is written by another proxy: what was read here must come before it.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(answers.empty)
        return Int32(select_(got_one != 0, cta, Int32(_NO_UNIT)))
