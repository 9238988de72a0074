"""The weights of the MLP kernel: one warp streams both GEMMs' through the ring.

They wait for nobody but a free stage, so that DRAM works while the grid meets. What has been asked
for and is not there is bounded: everything else that goes to L2 waits behind it.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from .barriers import wait
from .mlp_config import UNIT_BYTES, MlpConfig
from .mlp_parts import Loads, Problem, Ring, sizes_of, steps_of
from .prefetch import tma_prefetch
from .ring import advance
from .smem import tma_load
from .weight_blocks import boxes_of, pass_of, passes_of, span_of


class MlpWeights:
    """Specialised by :class:`MlpConfig`."""

    def __init__(self, config: MlpConfig):
        self.config = config

    @cute.jit
    def prefetch(self, loads: Loads, problem: Problem, ring: Ring):
        """The first stages' to L2, while the kernel before still runs.

        Not yet to shared memory: should it be that kernel which writes them, L2 has what it wrote.
        """
        step = Int32(0)
        for gemm in cutlass.range_constexpr(2):
            cut = self.config.cuts[gemm]
            rows, k = sizes_of(problem, gemm)
            span = span_of(rows)
            for number in cutlass.range(passes_of(span, cut.blocks), unroll=1):
                part = pass_of(span, number, cut.blocks)
                tiles = boxes_of(loads.weights[gemm], part.first, cut.blocks)
                steps = cutlass.min(steps_of(k, cut), self.config.ahead - step)
                for i in cutlass.range(steps, unroll=1):
                    for slab in cutlass.range_constexpr(self.config.cuts[gemm].slabs):
                        source = tiles[None, None, i * self.config.cuts[gemm].slabs + slab]
                        tma_prefetch(loads.weights[gemm], source, ring.weights[gemm][None, None, 0])
                step = step + cutlass.max(steps, Int32(0))

    @cute.jit
    def load(self, loads: Loads, problem: Problem, ring: Ring):
        """Every stage's, as soon as the stage is free."""
        # A fresh barrier counts as having completed phase 1.
        stage, phase, asked = Int32(0), Int32(1), Int32(0)
        for gemm in cutlass.range_constexpr(2):
            cut = self.config.cuts[gemm]
            rows, k = sizes_of(problem, gemm)
            span = span_of(rows)
            for number in cutlass.range(passes_of(span, cut.blocks), unroll=1):
                part = pass_of(span, number, cut.blocks)
                tiles = boxes_of(loads.weights[gemm], part.first, cut.blocks)
                for step in cutlass.range(steps_of(k, cut), unroll=1):
                    wait(ring.empty + stage, phase)
                    self._wait_for_earlier(ring, asked, stage, phase)
                    self._load_step(loads, ring, tiles, gemm, step, stage)
                    stage, phase = advance(stage, phase, self.config.stages)
                    asked += 1

    @cute.jit
    def _wait_for_earlier(self, ring: Ring, asked: Int32, stage: Int32, phase: Int32):
        """Those that were asked for so many before must have arrived; ``phase`` is ``empty``'s."""
        stages, (first, then) = self.config.stages, self.config.flying
        if asked < stages:
            if asked >= first:
                wait(ring.full + (asked - first), Int32(0))
        elif cutlass.const_expr(then < stages):
            if stage >= then:
                wait(ring.full + (stage - then), phase ^ 1)
            else:
                wait(ring.full + (stage + stages - then), phase)

    @cute.jit
    def _load_step(
        self,
        loads: Loads,
        ring: Ring,
        tiles: cute.Tensor,
        gemm: cutlass.Constexpr,
        step: Int32,
        stage: Int32,
    ):
        full = ring.full + stage
        with cute.arch.elect_one():
            count = self.config.cuts[gemm].units * UNIT_BYTES
            cute.arch.mbarrier_arrive_and_expect_tx(full, count)
            if cutlass.const_expr(self.config.own[gemm] > 0 and self.config.barriers > 2):
                # For the tokens' warp, which has nothing to load here.
                cute.arch.mbarrier_arrive(ring.filled + stage)
        for slab in cutlass.range_constexpr(self.config.cuts[gemm].slabs):
            at = step * self.config.cuts[gemm].slabs + slab
            unit = stage * self.config.units + slab * self.config.cuts[gemm].blocks
            target = ring.weights[gemm][None, None, unit]
            tma_load(loads.weights[gemm], tiles[None, None, at], target, full)
