"""The main loop of one Hopper warpgroup: wgmma, and promotion of its sums.

The FP8 tensor core keeps about 14 bits of a sum. In precise mode every 128 of K therefore make a
*partial* sum of their own, which is added to the *total* in fp32 registers. That must not stop the
tensor core. Two things keep it busy: other warpgroups of the SM, each of which multiplies while one
adds; and, where a thread has registers for two sets of partial sums, the next set's MMAs, which are
issued before the last set is waited for. The warpgroups taking turns are DeepGEMM's technique.

The machine code is good only as long as the compiler sees that no accumulator is touched while MMAs
are at work on it; else it waits after every single one (ptxas says so: C7510 to C7514). Two rules
keep it that way. Two sets alternate within straight-line code of several k-tiles (a *chain*) and
meet at its end: carried around a loop they are copied in flight. And additions are pinned to where
they stand: left to itself the compiler moves them below the next MMAs, which then need registers of
their own.
"""

from __future__ import annotations

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from .barriers import wait
from .config_sm90 import WGMMA_K, WGMMA_M, HopperConfig
from .ring import Ring, advance


class HopperMainloop:
    """Specialised by a :class:`HopperConfig`."""

    def __init__(self, config: HopperConfig):
        self.tile = config.tile
        self.fast_accum = config.fast_accum
        self.sets = config.tile.sets(config.fast_accum)
        self.links = config.tile.links(config.fast_accum)

    @cute.jit
    def __call__(
        self,
        ring: Ring,
        totals: cute.Tensor,
        stage: Int32,
        phase: Int32,
        k_tiles: Int32,
        group: Int32,
    ):
        """Multiply ``k_tiles`` stages of the ring.

        Args:
            totals: fp32 registers, ``(sums of a part, parts)``, zero.
            group: which warpgroup this is.

        Returns:
            The ring's position after them.
        """
        if cutlass.const_expr(self.fast_accum):
            return self.accumulate(ring, totals, stage, phase, k_tiles, group)
        partials = cute.make_rmem_tensor((self.tile.part_sums, self.sets), Float32)
        left = k_tiles
        for i in cutlass.range_constexpr(len(self.links)):
            links = self.links[i]
            for _ in cutlass.range(left // links, unroll=1):
                stage, phase = self.chain(ring, totals, partials, stage, phase, links, group)
            left = left % links
        return stage, phase

    @cute.jit
    def chain(
        self,
        ring: Ring,
        totals: cute.Tensor,
        partials: cute.Tensor,
        stage: Int32,
        phase: Int32,
        links: cutlass.Constexpr,
        group: Int32,
    ):
        """``links`` k-tiles, every part of each a group of MMAs and then an addition.

        The addition is one group late where there are two sets.
        """
        parts, late = self.tile.parts, self.sets - 1
        groups = links * parts
        read_stage = stage
        for i in cutlass.range_constexpr(groups + late):
            if cutlass.const_expr(i < groups):
                if cutlass.const_expr(i % parts == 0):
                    wait(ring.full + stage, phase)
                self.multiply(ring, partials[None, i % self.sets], i % parts, stage, False, group)
                if cutlass.const_expr(i % parts == parts - 1):
                    stage, phase = advance(stage, phase, self.tile.stages)
            done = i - late
            if cutlass.const_expr(done >= 0):
                warpgroup.wait_group(late if i < groups else 0)
                if cutlass.const_expr(done % parts == parts - 1):
                    self.release(ring, read_stage)
                    read_stage, _ = advance(read_stage, phase, self.tile.stages)
                promote(totals[None, done % parts], partials[None, done % self.sets])
        return stage, phase

    @cute.jit
    def accumulate(
        self,
        ring: Ring,
        totals: cute.Tensor,
        stage: Int32,
        phase: Int32,
        k_tiles: Int32,
        group: Int32,
    ):
        """Without promotion: a stage is released once the next one's MMAs have been issued."""
        last_stage = stage
        for k_tile in cutlass.range(k_tiles, unroll=1):
            wait(ring.full + stage, phase)
            for part in cutlass.range_constexpr(self.tile.parts):
                self.multiply(ring, totals[None, part], part, stage, True, group)
            warpgroup.wait_group(self.tile.parts)
            if k_tile > 0:
                self.release(ring, last_stage)
            last_stage = stage
            stage, phase = advance(stage, phase, self.tile.stages)
        if cutlass.const_expr(self.tile.pingpong):
            # Its MMAs are all under way: the other's may queue up behind them.
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.turn + (group ^ 1))
        warpgroup.wait_group(0)
        if k_tiles > 0:
            self.release(ring, last_stage)
        return stage, phase

    @cute.jit
    def multiply(
        self,
        ring: Ring,
        sums: cute.Tensor,
        part: cutlass.Constexpr,
        stage: Int32,
        accumulate: cutlass.Constexpr,
        group: Int32,
    ):
        """Start the MMAs of one part and stage, as one group.

        Args:
            sums: one part's accumulators; read only if ``accumulate``.
        """
        tile = self.tile
        row_block = part % tile.parts_a
        if cutlass.const_expr(not tile.pingpong):
            row_block += group * tile.parts_a
        column_block = part // tile.parts_a
        # Made anew each time: the DSL keeps `accumulate` in the object, as a value of the block
        # that set it.
        mma = self.instruction()
        lanes = mma.get_slice(0)
        tile_a = cute.local_tile(ring.a[None, None, stage], (WGMMA_M, tile.k), (row_block, 0))
        tile_b = cute.local_tile(ring.b[None, None, stage], (tile.part, tile.k), (column_block, 0))
        a = mma.make_fragment_A(lanes.partition_A(tile_a))
        b = mma.make_fragment_B(lanes.partition_B(tile_b))
        layout = cute.make_layout(((2, 2, tile.part // 8), 1, 1), stride=((1, 2, 4), 0, 0))
        c = cute.make_tensor(sums.iterator, layout)
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        for k_block in cutlass.range_constexpr(tile.k // WGMMA_K):
            cute.gemm(mma, c, a[None, None, k_block], b[None, None, k_block], c)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def instruction(self) -> cute.TiledMma:
        """The wgmma of one part: 64 x part x 32, both operands in shared memory."""
        op = warpgroup.MmaF8Op(
            Float8E4M3FN,
            Float8E4M3FN,
            Float32,
            (WGMMA_M, self.tile.part, WGMMA_K),
            warpgroup.OperandSource.SMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        return cute.make_tiled_mma(op)

    @cute.jit
    def release(self, ring: Ring, stage: Int32):
        """Hand a stage back, once this warp has waited for the MMAs that read it."""
        if cutlass.const_expr(self.tile.sharers == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.empty + stage)
        else:
            # To every CTA that writes into this one's.
            lane = cute.arch.lane_idx()
            if lane < self.tile.sharers:
                cute.arch.mbarrier_arrive(ring.empty + stage, lane)


@cute.jit
def promote(totals: cute.Tensor, partials: cute.Tensor):
    """Add one part's partial sums, here and now."""
    totals.store(totals.load() + partials.load())
    _pin(totals)


@dsl_user_op
def _pin(values: cute.Tensor, *, loc: object = None, ip: object = None) -> None:
    """Have the values in registers at this point of the program: an empty instruction uses them."""
    count = cute.size(values)
    f32 = Float32.mlir_type
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        [values[i].ir_value(loc=loc, ip=ip) for i in range(count)],
        "",
        ",".join(["=f"] * count + [str(i) for i in range(count)]),
        has_side_effects=True,
        is_align_stack=False,
        loc=loc,
        ip=ip,
    )
    for i in range(count):
        values[i] = Float32(llvm.extractvalue(f32, result, [i], loc=loc, ip=ip))
