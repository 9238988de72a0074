"""The main loop of one MMA warp: fragments and scales from shared memory, MMAs, stage by stage.

Within a stage a k-block multiplies while the next one loads; the last k-block of a stage multiplies
while the first of the next stage loads. So the tensor core waits for shared memory only at an
output tile's first k-block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, cute

from .block_scales import last_k_mask, load_scale_words, scale_source
from .config import MMA_K, MMA_M, MMA_N, SCALE_BLOCK_BYTES, GemmConfig
from .mma import Instruction, Scales, mma_m16n8k32
from .ring import Ring, advance
from .smem import fragment_address, load_fragments


class Fragments(NamedTuple):
    """Registers of one MMA warp: what it multiplies, double-buffered by k-block, and the sums.

    ``scales`` holds a word per 32 rows of A, then of B, for the stage at work and for the next.
    """

    a: cute.Tensor  # (16, rows / 16, 2)
    b: cute.Tensor
    acc: cute.Tensor  # (4, columns / 8, rows / 16)
    scales: Any  # (words of A and B, 2) or None


class Source(NamedTuple):
    """Where this lane reads in stage 0: ``ldmatrix`` addresses of both operands, and its scales."""

    a: Int32
    b: Int32
    scales_a: Any  # ScaleSource or None
    scales_b: Any


class Work(NamedTuple):
    """Tiles of the problem, and how many k-tiles and k-blocks (32) each takes."""

    tiles_m: Int32
    tiles_n: Int32
    k_tiles: Int32
    k_blocks: Int32


class Mainloop:
    """Specialised by a :class:`GemmConfig` and the MMA of the target."""

    def __init__(self, config: GemmConfig, instruction: Instruction):
        self.config = config
        self.tile = config.tile
        self.instruction = instruction
        # One word per lane and 32 rows of the warp tile.
        self.words_a = -(-config.tile.warp_m // 32) if config.block_scaled else 0
        self.words_b = config.tile.warp_n // 32 if config.block_scaled else 0

    @cute.jit
    def source(self, ring: Ring, warp_m: Int32, warp_n: Int32, lane: Int32) -> Source:
        """Where this lane of the warp tile at (warp_m, warp_n) finds its codes.

        ldmatrix.x4 takes row addresses from lanes 0-7, 8-15, 16-23, 24-31 for its four matrices:
        for A (rows, half) = (0-7, 0), (8-15, 0), (0-7, 1), (8-15, 1); for B (0-7, 0), (0-7, 1),
        (8-15, 0), (8-15, 1).
        """
        k = self.tile.k
        return Source(
            a=fragment_address(ring.a, k, warp_m, lane % 16, lane // 16),
            b=fragment_address(ring.b, k, warp_n, lane // 16 * 8 + lane % 8, lane // 8 % 2),
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
        """The same, with where the scales of the output tile at ``origin`` are."""
        scales_a = scale_source(
            ring.scales_a, origin[0], warp_origin[0], self.tile.warp_m, size[0], lane
        )
        scales_b = scale_source(
            ring.scales_b, origin[1], warp_origin[1], self.tile.warp_n, size[1], lane
        )
        return Source(source.a, source.b, scales_a, scales_b)

    @cute.jit
    def make_fragments(self) -> Fragments:
        """Two k-blocks of fragments: one multiplies while the other loads."""
        rows, columns = self.tile.warp_m, self.tile.warp_n
        words = self.words_a + self.words_b
        return Fragments(
            a=cute.make_rmem_tensor((16, rows // 16, 2), Float8E4M3FN),
            b=cute.make_rmem_tensor((16, columns // 16, 2), Float8E4M3FN),
            acc=cute.make_rmem_tensor((4, columns // MMA_N, rows // MMA_M), Float32),
            scales=cute.make_rmem_tensor((words, 2), Int32) if words else None,
        )

    @cute.jit
    def multiply_k_tile(
        self,
        source: Source,
        fragments: Fragments,
        ring: Ring,
        stage: Int32,
        phase: Int32,
        work: Work,
        k_tile: Int32,
    ):
        """One stage: its k-blocks in turn, each one's successor loading meanwhile."""
        k_blocks = self.tile.k // MMA_K
        next_stage, next_phase = advance(stage, phase, self.tile.stages)
        if cutlass.const_expr(self.config.block_scaled):
            fragments.scales[None, 0].store(fragments.scales[None, 1].load())
        for k_block in cutlass.range_constexpr(k_blocks):
            if cutlass.const_expr(k_block + 1 < k_blocks):
                self.load_k_block(source, fragments, k_block + 1, stage)
            else:
                # Every lane's ldmatrix of this stage must be done before the one lane's arrive
                # hands the stage to TMA; an mbarrier arrive orders only its own lane. Without the
                # warp sync the next load may overwrite what a slower lane still reads.
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ring.empty + stage)
                if k_tile + 1 < work.k_tiles:
                    cute.arch.mbarrier_wait(ring.full + next_stage, next_phase)
                    self.load_stage_start(source, fragments, next_stage, work, k_tile + 1)
            self.multiply_k_block(fragments, k_block)
        return next_stage, next_phase

    @cute.jit
    def multiply_k_block(self, fragments: Fragments, k_block: cutlass.Constexpr):
        """All MMAs of one k-block."""
        buffer = k_block % 2
        # One ldmatrix.x4 of B holds two 8-column fragments.
        pairs_b = cute.logical_divide(fragments.b, (8, None, None))
        for mi in cutlass.range_constexpr(self.tile.warp_m // MMA_M):
            for ni in cutlass.range_constexpr(self.tile.warp_n // MMA_N):
                scales = None
                if cutlass.const_expr(self.config.block_scaled):
                    # A word serves two 16-row tiles of A, four 8-column tiles of B.
                    scales = Scales(
                        a=fragments.scales[mi // 2, 0],
                        b=fragments.scales[self.words_a + ni // 4, 0],
                        byte_id=k_block,
                        thread_id_a=mi % 2,
                        thread_id_b=ni % 4,
                    )
                mma_m16n8k32(
                    self.instruction,
                    fragments.a[None, mi, buffer],
                    pairs_b[(None, ni % 2), ni // 2, buffer],
                    fragments.acc[None, ni, mi],
                    scales,
                )

    @cute.jit
    def load_stage_start(
        self, source: Source, fragments: Fragments, stage: Int32, work: Work, k_tile: Int32
    ):
        """What a stage's first MMAs need: its scales, for all its k-blocks, and k-block 0."""
        if cutlass.const_expr(self.config.block_scaled):
            mask = Int32(-1)
            if k_tile + 1 == work.k_tiles:
                mask = last_k_mask(work.k_blocks, work.k_tiles)
            words = cute.make_tensor(
                fragments.scales[None, 1].iterator, cute.make_layout(self.words_a + self.words_b)
            )
            words_a = cute.make_tensor(words.iterator, cute.make_layout(self.words_a))
            words_b = cute.make_tensor(
                words.iterator + self.words_a, cute.make_layout(self.words_b)
            )
            bytes_a = self.config.scale_blocks_a * SCALE_BLOCK_BYTES
            bytes_b = self.config.scale_blocks_b * SCALE_BLOCK_BYTES
            load_scale_words(words_a, source.scales_a, stage * bytes_a, mask)
            load_scale_words(words_b, source.scales_b, stage * bytes_b, mask)
        self.load_k_block(source, fragments, 0, stage)

    @cute.jit
    def load_k_block(
        self, source: Source, fragments: Fragments, k_block: cutlass.Constexpr, stage: Int32
    ):
        """``ldmatrix`` of one k-block into the fragment buffer of its parity."""
        tile, buffer = self.tile, k_block % 2
        address_a = source.a + stage * (tile.m * tile.k)
        address_b = source.b + stage * (tile.n * tile.k)
        load_fragments(fragments.a[None, None, buffer], address_a, k_block, tile.k)
        load_fragments(fragments.b[None, None, buffer], address_b, k_block, tile.k)
