"""Warp-specialised, persistent e4m3 GEMM for sm_120 and sm_121, in two variants.

``y[m, n] = act(sum_k xq[m, k] * wq[n, k] * sx * sw + bias[n]) + residual[m, n]``

xq ``[M, K]``, wq ``[N, K]``, y ``[M, N]``, K contiguous in both operands. ``per_token``: sx ``[M]``
and sw ``[N]`` fp32, applied once per output in the epilogue; ``mxfp8``: e8m0 in 128x4 blocks, one
per 32 of K, applied by the MMA. M, N, K and all strides are run-time values; tails are zero-filled
by TMA on the way in and masked on the way out.

Constraints: K a multiple of 16 (mxfp8: 32), N of 8; base addresses and row strides of xq, wq, y,
residual and blocked scales multiples of 16 bytes; M >= 1; shared memory as
``GemmConfig.smem_bytes`` sums it, at most 101,376 bytes.

Warp roles
    ==========  ===========  =====================  =========================  ==================
    role        warps        waits on               arrives on                 arrivals per stage
    ==========  ===========  =====================  =========================  ==================
    load        the last     empty[stage]           full[stage] (+ tx bytes)   1
    mma         all others   full[stage]            empty[stage]               1 per MMA warp
    mma         of ping-pong turn[own group]        turn[other group]          1 per MMA warp, tile
    ==========  ===========  =====================  =========================  ==================

While the MMA warps are in the epilogue, which uses no shared memory, the producer already fills the
ring for the next tile. In the ping-pong schedule two groups of MMA warps have a tile each; one
group's epilogue runs under the other's main loop. The groups take turns by barrier: a group that
waited for a stage two rounds ahead could take an older round's completion, of the same parity, for
its own.

With ``swap_ab`` the weights are the MMA's A operand, ``out^T = W x^T``: a tile may then have as few
as 8 tokens. "A" and "B" are the MMA's sides throughout; m and n are tokens and channels.

The bare-mbarrier style, and the warp sync before a stage's release, follow gau-nernst's gn-kernels
(sm_120 MXFP8 GEMM and its notes on memory ordering).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float8E4M3FN, Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_stream

from .arguments import blocked_scales, matrix, vector
from .barriers import wait
from .block_scales import scale_load_atom
from .config import (
    K_MULTIPLE,
    MMA_K,
    MMA_REGISTERS,
    N_MULTIPLE,
    PRODUCER_REGISTERS,
    SCALE_BLOCK_K,
    SCALE_BLOCK_ROWS,
    WARP_SIZE,
    GemmConfig,
)
from .epilogue import DTYPES, Epilogue, EpilogueOperands
from .mainloop import Mainloop
from .mma import Instruction
from .mx_output import clear_padding
from .registers import kept
from .ring import Loads, Ring, advance, make_ring, skip
from .scheduler import Scheduler, Work
from .smem import tma_load, tma_load_atom
from .split_k import SplitK

if TYPE_CHECKING:
    from .configs import AnyGemm


class GemmSm120:
    """One specialisation of the kernel: a :class:`GemmConfig` and the MMA of the target."""

    def __init__(self, config: GemmConfig, instruction: Instruction):
        self.config = config
        self.tile = config.tile
        self.scheduler = Scheduler(config)
        self.mainloop = Mainloop(config, instruction)
        self.split_k = SplitK(config)
        self.epilogue = Epilogue(config.tile, config.epilogue, scaled=not config.block_scaled)

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        xq: cute.Tensor,
        sx: cute.Tensor,
        wq: cute.Tensor,
        sw: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        out: cute.Tensor,
        out_scales: Any,
        workspace: cute.Tensor | None,
        splits: Int32 | None,
        max_ctas: Int32,
        stream: CUstream,
    ):
        """Launch on ``stream``, at most ``max_ctas`` CTAs; tensors as in ``fake_arguments``."""
        tile, config = self.tile, self.config
        m, n, k = xq.shape[0], wq.shape[0], xq.shape[1]
        a, b, scales_a, scales_b = xq, wq, sx, sw
        if cutlass.const_expr(tile.swap_ab):
            a, b, scales_a, scales_b = wq, xq, sw, sx
        loads = Loads(
            a=tma_load_atom(a, tile.rows_a, tile.k, tile.stages),
            b=tma_load_atom(b, tile.rows_b, tile.k, tile.stages),
            scales_a=self.scale_load(scales_a, a.shape[0], k, config.scale_blocks_a),
            scales_b=self.scale_load(scales_b, b.shape[0], k, config.scale_blocks_b),
        )
        if cutlass.const_expr(config.block_scaled):
            sx, sw = None, None  # the MMA applies them
        if cutlass.const_expr(config.epilogue.mx):
            out_scales = cute.make_tensor(
                cute.recast_ptr(out_scales.iterator, dtype=Uint8), out_scales.layout
            )
        operands = EpilogueOperands(out, out_scales, sx, sw, bias, residual)
        work = Work(
            tiles_m=cute.ceil_div(m, tile.m),
            tiles_n=cute.ceil_div(n, tile.n),
            k_tiles=cute.ceil_div(k, tile.k),
            k_blocks=cute.ceil_div(k, MMA_K),
            splits=splits,
        )
        ctas = self.scheduler.units(work)
        if cutlass.const_expr(not config.dynamic):
            ctas = cutlass.min(ctas, max_ctas)
        self.kernel(loads, operands, workspace, work, m, n).launch(
            grid=(ctas, 1, 1),
            block=(tile.threads, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
            use_pdl=config.pdl,
            stream=stream,
        )

    @cute.jit
    def scale_load(self, scales: cute.Tensor, rows: Int32, k: Int32, blocks: cutlass.Constexpr):
        """The TMA copy of one operand's scales, where the MMA reads them."""
        if cutlass.const_expr(not self.config.block_scaled):
            return None
        return scale_load_atom(scales, rows, k, blocks, self.tile.stages)

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(
        self,
        loads: Loads,
        operands: EpilogueOperands,
        workspace: cute.Tensor | None,
        work: Work,
        m: Int32,
        n: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ring = make_ring(loads, self.config, warp)
        if cutlass.const_expr(self.config.pdl):
            # Nothing that an earlier kernel wrote, or still reads, is touched before this.
            cute.arch.griddepcontrol_wait()
        if warp >= self.tile.mma_warps:
            if cutlass.const_expr(self.tile.moves_registers):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == self.tile.mma_warps:
                self.load(loads, ring, work)
        else:
            if cutlass.const_expr(self.tile.moves_registers):
                cute.arch.setmaxregister_increase(MMA_REGISTERS)
            self.mma(ring, operands, workspace, work, m, n, warp)

    @cute.jit
    def load(self, loads: Loads, ring: Ring, work: Work):
        """Producer warp: fill the ring with the k-tiles of this CTA's units of work, in order."""
        tile, config = self.tile, self.config
        tiles_a = cute.local_tile(loads.a.tma_tensor, (tile.rows_a, tile.k), (None, None))
        tiles_b = cute.local_tile(loads.b.tma_tensor, (tile.rows_b, tile.k), (None, None))
        stage = Int32(0)
        # A fresh barrier counts as having completed phase 1: the first pass over the ring waits for
        # nobody.
        phase, answer_phase = Int32(1), Int32(0)
        unit = self.scheduler.first()
        while unit < self.scheduler.units(work):
            if cutlass.const_expr(config.dynamic):
                self.scheduler.ask(ring.answers, answer_phase)
            part = self.scheduler.tile(unit, work)
            a, b = self.by_side(part.row, part.column)
            for i in cutlass.range(part.k_count, unroll=1):
                k_tile = part.k_first + i
                wait(ring.empty + stage, phase)
                full = ring.full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, config.stage_bytes)
                tma_load(loads.a, tiles_a[None, None, a, k_tile], ring.a[None, None, stage], full)
                tma_load(loads.b, tiles_b[None, None, b, k_tile], ring.b[None, None, stage], full)
                if cutlass.const_expr(config.block_scaled):
                    row_a, row_b = a * tile.rows_a, b * tile.rows_b
                    self.load_scales(loads.scales_a, ring.scales_a, row_a, k_tile, stage, full)
                    self.load_scales(loads.scales_b, ring.scales_b, row_b, k_tile, stage, full)
                stage, phase = advance(stage, phase, tile.stages)
            unit = self.next_unit(unit, ring, answer_phase, 1)
            answer_phase = answer_phase ^ 1
        if cutlass.const_expr(config.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def load_scales(
        self,
        tma: Any,
        ring: cute.Tensor,
        row: Int32,
        k_tile: Int32,
        stage: Int32,
        full: cute.Pointer,
    ):
        """The blocks of scales of the operand rows from ``row`` on, for one k-tile."""
        blocks, words = cutlass.const_expr(ring.shape[0]), cutlass.const_expr(ring.shape[1])
        tiles = cute.local_tile(tma.tma_tensor, (blocks, words), (None, None))
        # A k-tile shorter than a block still brings the whole block.
        row_block, k_block = (
            row // (blocks * SCALE_BLOCK_ROWS),
            k_tile * self.tile.k // SCALE_BLOCK_K,
        )
        tma_load(tma, tiles[None, None, row_block, k_block], ring[None, None, stage], full)

    @cute.jit
    def mma(
        self,
        ring: Ring,
        operands: EpilogueOperands,
        workspace: cute.Tensor | None,
        work: Work,
        m: Int32,
        n: Int32,
        warp: Int32,
    ):
        """MMA warps: multiply each unit's k-tiles as they arrive, then run its epilogue."""
        tile, config = self.tile, self.config
        lane = cute.arch.lane_idx()
        group, warp = warp // tile.group_warps, warp % tile.group_warps
        warp_m, warp_n = warp // tile.warps_n * tile.warp_m, warp % tile.warps_n * tile.warp_n
        warp_a, warp_b = self.by_side(warp_m, warp_n)
        source = self.mainloop.source(ring, warp_a, warp_b, lane)
        fragments = self.mainloop.make_fragments()
        stage, phase, answer_phase = Int32(0), Int32(0), Int32(0)
        unit = self.scheduler.first()
        # A fresh barrier counts as having completed phase 1: the first turn is group 0's.
        turn_phase = group ^ 1
        if cutlass.const_expr(tile.pingpong):
            if group == 1:
                stage, phase = self.skip_unit(stage, phase, unit, work)
                unit += self.scheduler.step()
        if cutlass.const_expr(config.epilogue.mx):
            self.clear_scale_padding(operands, m, n)
        while unit < self.scheduler.units(work):
            part = self.scheduler.tile(unit, work)
            row, column = part.row * tile.m, part.column * tile.n
            unit_source = source
            if cutlass.const_expr(config.block_scaled):
                unit_source = self.mainloop.with_scales(
                    source,
                    ring,
                    self.by_side(row, column),
                    (warp_a, warp_b),
                    self.by_side(m, n),
                    lane,
                )
            if cutlass.const_expr(tile.pingpong):
                wait(ring.turn + group, turn_phase)
            stage, phase = self.mainloop(unit_source, fragments, ring, stage, phase, part, work)
            if cutlass.const_expr(tile.pingpong):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ring.turn + (group ^ 1))
                turn_phase = turn_phase ^ 1
                stage, phase = self.skip_unit(stage, phase, unit + self.scheduler.step(), work)
            done = unit
            unit = self.next_unit(unit, ring, answer_phase, tile.groups)
            answer_phase = answer_phase ^ 1
            # Always true. A branch keeps what follows, and its address arithmetic, out of the last
            # k-tile, where every register is taken.
            if row < m:
                self.finish(fragments.acc, operands, workspace, work, done, m, n, warp, lane)

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,
        operands: EpilogueOperands,
        workspace: cute.Tensor | None,
        work: Work,
        unit: Int32,
        m: Int32,
        n: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """What an MMA warp does with a unit's sums: the epilogue, after split-K's addition."""
        tile = self.tile
        # Worked out again, not kept: the main loop needs the registers.
        part = self.scheduler.tile(kept(unit), work)
        row = part.row * tile.m + warp // tile.warps_n * tile.warp_m
        column = part.column * tile.n + warp % tile.warps_n * tile.warp_n
        complete = cutlass.Boolean(True)
        if cutlass.const_expr(self.config.split_k):
            complete = self.split_k.leave(acc, workspace, part, work, warp, lane)
        if complete:
            if cutlass.const_expr(self.config.split_k):
                self.split_k.add_up(acc, workspace, part, work, warp, lane)
            self.epilogue(acc, operands, m, n, row, column, lane)

    @cute.jit
    def by_side(self, tokens: Any, channels: Any):
        """What belongs to tokens and to channels, as (A's, B's)."""
        return (channels, tokens) if self.tile.swap_ab else (tokens, channels)

    @cute.jit
    def next_unit(self, unit: Int32, ring: Ring, answer_phase: Int32, steps: cutlass.Constexpr):
        """This warp's next unit of work."""
        if cutlass.const_expr(self.config.dynamic):
            return self.scheduler.answer(ring.answers, answer_phase)
        return unit + steps * self.scheduler.step()

    @cute.jit
    def skip_unit(self, stage: Int32, phase: Int32, unit: Int32, work: Work):
        """The ring's position after a unit that is the other group's."""
        return skip(stage, phase, self.scheduler.k_count(unit, work), self.tile.stages)

    @cute.jit
    def clear_scale_padding(self, operands: EpilogueOperands, m: Int32, n: Int32):
        """All MMA warps of the grid: zeros in the padding of the output's scales."""
        threads = self.tile.mma_warps * WARP_SIZE
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        clear_padding(
            operands.out_scales,
            m,
            n // self.epilogue.ratio,
            cta * threads + thread,
            ctas * threads,
        )


def fake_arguments(config: AnyGemm) -> list[object]:
    """What ``cute.compile`` is shown in place of the arguments of ``GemmSm120.__call__``.

    The compiled function checks its tensors against these: dtypes, ranks, sizes that must agree,
    16-byte row strides and addresses, one device. M, N, K and every stride are run-time values; a
    stride of 0 broadcasts. The lengths of blocked scales are the caller's to check.
    """
    epilogue = config.epilogue
    m = cute.sym_int()
    n = cute.sym_int(divisibility=N_MULTIPLE)
    k = cute.sym_int(divisibility=MMA_K if config.block_scaled else K_MULTIPLE)
    # Gated, half of n: the DSL has no halves of symbols, the caller checks that.
    columns = cute.sym_int(divisibility=N_MULTIPLE) if epilogue.gated else n

    def scales(count: object) -> object:
        if config.block_scaled:
            return blocked_scales()
        return vector(Float32, count, stride=cute.sym_int64())

    bias, residual = epilogue.bias, epilogue.residual
    return [
        matrix(Float8E4M3FN, m, k),  # xq
        scales(m),  # sx
        matrix(Float8E4M3FN, n, k),  # wq
        scales(n),  # sw
        vector(DTYPES[bias], n) if bias else None,
        matrix(DTYPES[residual], m, columns) if residual else None,
        matrix(Float8E4M3FN if epilogue.mx else DTYPES[epilogue.out], m, columns),  # out
        blocked_scales() if epilogue.mx else None,  # out_scales
        vector(Int32, cute.sym_int64(), aligned=True) if config.split_k else None,  # workspace
        Int32(2) if config.split_k else None,  # splits
        Int32(1),  # max_ctas
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


def make(config: GemmConfig, target: str) -> tuple[GemmSm120, list[object]]:
    """The kernel for ``target``, and what to compile it with."""
    return GemmSm120(config.check(), Instruction.of(target)), fake_arguments(config)
