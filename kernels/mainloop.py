"""The MMA warps' main loop: fragments from shared memory, MMAs, stage by stage.

Within a stage a k-block multiplies while the next one loads; the last k-block of a stage multiplies
while the first of the next stage loads. So the tensor core waits for shared memory only at an
output tile's first k-block. The last k-tile is apart from the loop: only there is nothing to load
ahead, and padding of K to leave out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, cute

from .barriers import wait
from .block_scales import (
    load_scale_words,
    missing_k_blocks,
    scale_source,
    take_scale_words,
)
from .config import MMA_K, MMA_M, MMA_N, SCALE_BLOCK_BYTES, GemmConfig
from .mma import (
    UNIT_SCALES,
    Instruction,
    Selected,
    mma_m16n8k32,
    scales_a,
    scales_b,
    unit_scales,
)
from .registers import kept
from .ring import Ring, advance
from .scheduler import Work, WorkTile
from .smem import fragment_address, load_fragments

_K_BLOCKS_PER_WORD = 4


class Fragments(NamedTuple):
    """Registers of one MMA warp: what it multiplies, double-buffered by k-block, and the sums.

    ``words`` holds a word of scales per 32 rows of A, then of B, for the stage at work;
    ``loaded`` the next stage's, as they are in memory.
    """

    a: cute.Tensor  # (16, rows / 16, 2)
    b: cute.Tensor
    acc: cute.Tensor  # (4, rows of B / 8, rows of A / 16)
    words: Any  # (words of A and B,) or None
    loaded: Any


class Source(NamedTuple):
    """Where this lane reads in stage 0: ``ldmatrix`` addresses of both operands, and its scales."""

    a: Int32
    b: Int32
    unit: Int32  # four unit scales
    scales_a: Any  # ScaleSource or None
    scales_b: Any


class Mainloop:
    """Specialised by a :class:`GemmConfig` and the MMA of the target."""

    def __init__(self, config: GemmConfig, instruction: Instruction):
        self.config = config
        self.tile = config.tile
        self.instruction = instruction
        # One word per lane and 32 rows of the warp tile.
        self.words_a = -(-config.tile.warp_a // 32) if config.block_scaled else 0
        self.words_b = -(-config.tile.warp_b // 32) if config.block_scaled else 0
        #: K-tiles that share a word of scales.
        self.halves = config.k_granule

    @cute.jit
    def source(self, ring: Ring, warp_a: Int32, warp_b: Int32, lane: Int32) -> Source:
        """Where this lane of the warp tile at (warp_a, warp_b) finds its codes.

        ldmatrix.x4 takes row addresses from lanes 0-7, 8-15, 16-23, 24-31 for its four matrices:
        for A (rows, half) = (0-7, 0), (8-15, 0), (0-7, 1), (8-15, 1); for B (0-7, 0), (0-7, 1),
        (8-15, 0), (8-15, 1). A B of 8 rows is read twice.
        """
        k = self.tile.k
        row_b = lane % 8 if self.tile.warp_b == 8 else lane // 16 * 8 + lane % 8
        return Source(
            a=fragment_address(ring.a, k, warp_a, lane % 16, lane // 16),
            b=fragment_address(ring.b, k, warp_b, row_b, lane // 8 % 2),
            unit=kept(UNIT_SCALES),
            scales_a=None,
            scales_b=None,
        )

    @cute.jit
    def with_scales(
        self,
        source: Source,
        ring: Ring,
        origin: cute.Coord,
        warp_origin: cute.Coord,
        size: cute.Coord,
        lane: Int32,
    ) -> Source:
        """The same, with where the scales of the tile at ``origin``, in rows of A and B, are."""
        scales_a = scale_source(
            ring.scales_a, origin[0], warp_origin[0], self.tile.warp_a, size[0], lane
        )
        scales_b = scale_source(
            ring.scales_b, origin[1], warp_origin[1], self.tile.warp_b, size[1], lane
        )
        return Source(source.a, source.b, source.unit, scales_a, scales_b)

    @cute.jit
    def make_fragments(self) -> Fragments:
        """Two k-blocks of fragments: one multiplies while the other loads."""
        a, b = self.tile.warp_a, self.tile.warp_b
        words = self.words_a + self.words_b
        return Fragments(
            a=cute.make_rmem_tensor((16, a // 16, 2), Float8E4M3FN),
            b=cute.make_rmem_tensor((16, -(-b // 16), 2), Float8E4M3FN),
            acc=cute.make_rmem_tensor((4, b // MMA_N, a // MMA_M), Float32),
            words=cute.make_rmem_tensor(words, Int32) if words else None,
            loaded=cute.make_rmem_tensor(words, Int32) if words else None,
        )

    @cute.jit
    def __call__(
        self,
        source: Source,
        fragments: Fragments,
        ring: Ring,
        stage: Int32,
        phase: Int32,
        part: WorkTile,
        work: Work,
    ):
        """Add up the k-tiles of one unit of work; the ring's position after them."""
        fragments.acc.fill(0.0)
        missing = Int32(0)
        if cutlass.const_expr(self.config.block_scaled):
            if part.k_first + part.k_count == work.k_tiles:
                existing = (work.k_blocks - 1) % _K_BLOCKS_PER_WORD + 1
                missing = missing_k_blocks(existing)
        wait(ring.full + stage, phase)
        a, b = self.load_stage_start(source, fragments, stage, scales=True)
        at = (source, fragments, ring)
        # All but the last k-tile; or where two k-tiles share a word of scales, all but the last one
        # or two.
        for _ in cutlass.range((part.k_count - 1) // self.halves, unroll=1):
            for half in cutlass.range_constexpr(self.halves):
                stage, phase, a, b = self.multiply_k_tile(*at, stage, phase, a, b, half)
        if cutlass.const_expr(self.halves == 1):
            return self.multiply_last(*at, stage, phase, a, b, missing)
        if part.k_count % 2 == 0:
            stage, phase, a, b = self.multiply_k_tile(*at, stage, phase, a, b, 0, missing)
            stage, phase = self.multiply_last(*at, stage, phase, a, b, missing, 1)
        else:
            stage, phase = self.multiply_last(*at, stage, phase, a, b, missing)
        return stage, phase

    @cute.jit
    def multiply_last(
        self,
        source: Source,
        fragments: Fragments,
        ring: Ring,
        stage: Int32,
        phase: Int32,
        a: Int32,
        b: Int32,
        missing: Int32,
        half: cutlass.Constexpr = 0,
    ):
        """The last k-tile, after which nothing is loaded; the ring's position after it."""
        stage, phase, _, _ = self.multiply_k_tile(
            source, fragments, ring, stage, phase, a, b, half, missing, last=True
        )
        return stage, phase

    @cute.jit
    def multiply_k_tile(
        self,
        source: Source,
        fragments: Fragments,
        ring: Ring,
        stage: Int32,
        phase: Int32,
        a: Int32,
        b: Int32,
        half: cutlass.Constexpr,
        missing: Int32 | None = None,
        last: cutlass.Constexpr = False,
    ):
        """One stage: its k-blocks in turn, each one's successor loading meanwhile.

        Args:
            stage, phase, a, b: the ring's position, and where both operands are there; returned
                for the next stage.
            half: of the words of scales that the stage before loaded too.
            missing: which k-blocks of the last word are past the end of K.
            last: whether this is the last k-tile.
        """
        k_blocks = self.tile.k // MMA_K
        next_stage, next_phase = advance(stage, phase, self.tile.stages)
        if cutlass.const_expr(self.config.block_scaled and half == 0):
            self.take_scales(source, fragments, missing)
        for k_block in cutlass.range_constexpr(k_blocks):
            if cutlass.const_expr(k_block + 1 < k_blocks):
                self.load_k_block(fragments, k_block + 1, a, b)
            else:
                # Every lane's ldmatrix of this stage must be done before the one lane's arrive
                # hands the stage to TMA; an mbarrier arrive orders only its own lane. Without the
                # warp sync the next load may overwrite what a slower lane still reads.
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ring.empty + stage)
                if cutlass.const_expr(not last):
                    wait(ring.full + next_stage, next_phase)
                    new_word = half + 1 == self.halves
                    a, b = self.load_stage_start(source, fragments, next_stage, new_word)
            self.multiply_k_block(source, fragments, k_block, half * k_blocks + k_block)
        return next_stage, next_phase, a, b

    @cute.jit
    def multiply_k_block(
        self,
        source: Source,
        fragments: Fragments,
        k_block: cutlass.Constexpr,
        byte_id: cutlass.Constexpr,
    ):
        """All MMAs of one k-block, whose scales are byte ``byte_id`` of the words."""
        buffer = k_block % 2
        # One ldmatrix.x4 of B holds two 8-column fragments.
        pairs_b = cute.logical_divide(fragments.b, (8, None, None))
        of_a, of_b = self._scales(source, fragments, byte_id)
        for mi in cutlass.range_constexpr(self.tile.warp_a // MMA_M):
            for ni in cutlass.range_constexpr(self.tile.warp_b // MMA_N):
                mma_m16n8k32(
                    self.instruction,
                    fragments.a[None, mi, buffer],
                    pairs_b[(None, ni % 2), ni // 2, buffer],
                    fragments.acc[None, ni, mi],
                    of_a[mi],
                    of_b[ni],
                )

    def _scales(self, source: Source, fragments: Fragments, byte_id: int) -> tuple[Any, Any]:
        """The scales of each 16 rows of A and each 8 of B. Python, run at trace time."""
        tiles_a, tiles_b = self.tile.warp_a // MMA_M, self.tile.warp_b // MMA_N
        if not self.config.block_scaled:
            unit = unit_scales(self.instruction, source.unit)
            return [unit] * tiles_a, [unit] * tiles_b
        # A word serves two 16-row tiles of A, four 8-column tiles of B.
        words_a, words_b = self._by_operand(fragments.words)
        selected_a = [Selected(words_a[i // 2], byte_id, i % 2) for i in range(tiles_a)]
        selected_b = [Selected(words_b[i // 4], byte_id, i % 4) for i in range(tiles_b)]
        return (
            [scales_a(self.instruction, selected) for selected in selected_a],
            [scales_b(self.instruction, selected) for selected in selected_b],
        )

    @cute.jit
    def load_stage_start(
        self, source: Source, fragments: Fragments, stage: Int32, scales: cutlass.Constexpr
    ):
        """What a stage's first MMAs need: k-block 0, and its scales unless they are there already.

        Returns:
            Where both operands are in that stage.
        """
        if cutlass.const_expr(self.config.block_scaled and scales):
            words_a, words_b = self._by_operand(fragments.loaded)
            bytes_a = self.config.scale_blocks_a * SCALE_BLOCK_BYTES
            bytes_b = self.config.scale_blocks_b * SCALE_BLOCK_BYTES
            load_scale_words(words_a, source.scales_a, stage * bytes_a)
            load_scale_words(words_b, source.scales_b, stage * bytes_b)
        a = source.a + stage * (self.tile.rows_a * self.tile.k)
        b = source.b + stage * (self.tile.rows_b * self.tile.k)
        self.load_k_block(fragments, 0, a, b)
        return a, b

    @cute.jit
    def load_k_block(self, fragments: Fragments, k_block: cutlass.Constexpr, a: Int32, b: Int32):
        """``ldmatrix`` of one k-block into the fragment buffer of its parity."""
        buffer, k = k_block % 2, self.tile.k
        load_fragments(fragments.a[None, None, buffer], a, k_block, k)
        load_fragments(fragments.b[None, None, buffer], b, k_block, k)

    @cute.jit
    def take_scales(self, source: Source, fragments: Fragments, missing: Int32 | None):
        """The loaded words become those of the stage at work."""
        words_a, words_b = self._by_operand(fragments.words)
        loaded_a, loaded_b = self._by_operand(fragments.loaded)
        take_scale_words(words_a, loaded_a, source.scales_a, missing)
        take_scale_words(words_b, loaded_b, source.scales_b, missing)

    def _by_operand(self, words: cute.Tensor):
        """The words of A, and those of B."""
        return (
            cute.make_tensor(words.iterator, cute.make_layout(self.words_a)),
            cute.make_tensor(words.iterator + self.words_a, cute.make_layout(self.words_b)),
        )
