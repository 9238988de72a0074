"""Warp-specialised, persistent e4m3 GEMM for Hopper (sm_90a), with per-token, per-channel scales.

``y[m, n] = act(sum_k xq[m, k] * wq[n, k] * sx[m] * sw[n] + bias[n]) + residual[m, n]``

Operands, constraints, epilogue and launch form are those of ``gemm_sm120.py``; what differs is the
MMA (``mainloop_sm90.py``). The operand on its M side, xq or with ``swap_ab`` wq, is divided among
the warpgroups by rows. Shared memory as ``HopperConfig.smem_bytes`` sums it, at most 232,448 bytes.

Warp roles
    ==========  =============  =====================  =========================  =================
    role        warps          waits on               arrives on                 arrivals per stage
    ==========  =============  =====================  =========================  =================
    load        the first      empty[stage]           full[stage] (+ tx bytes)   1
                after the MMA
                warps
    mma         4 a warpgroup  full[stage]            empty[stage]               1 per MMA warp
    ==========  =============  =====================  =========================  =================

No warpgroup waits for another: one may be in its epilogue while another still multiplies, or
multiplies already for the next tile, as far as the stages reach.

In ping-pong each warpgroup takes every second of the CTA's tiles, the first its first; a warpgroup
multiplies when it has the *turn*, which the other hands over with its last MMAs, and passes over
the other's stages of the ring.

With a dynamic tile, CTAs take their tiles from a counter (``tile_counter.py``).

With ``splits`` the CTAs of a cluster share an output tile's k-tiles (``exchange.py``); such a grid
has a cluster for every tile, so that each CTA works on one.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int16, Int32, cute
from cutlass.memory import SmemAllocator

from .arguments import vector
from .barriers import wait
from .boxes import BoxStore
from .config import MMA_K, WARP_SIZE
from .config_sm90 import PRODUCER_REGISTERS, WARP_ROWS, WARPGROUP, WGMMA_M, HopperConfig
from .epilogue import Epilogue, EpilogueOperands
from .exchange import MEETINGS, exchange, meet
from .gemm_sm120 import fake_arguments
from .mainloop_sm90 import HopperMainloop
from .prefetch import tma_prefetch
from .ring import Loads, Ring, advance, make_ring, skip
from .scheduler import Scheduler, Work
from .smem import Sharing, tma_load, tma_load_atom
from .staging import fetch, put_down
from .tile_counter import TileCounter


class GemmSm90:
    """One specialisation of the kernel."""

    def __init__(self, config: HopperConfig):
        self.config = config
        self.tile = config.tile
        self.scheduler = Scheduler(config)
        self.counter = TileCounter(self.scheduler)
        self.mainloop = HopperMainloop(config)
        self.epilogue = Epilogue(config.tile.warp_share, config.epilogue, scaled=True, staged=True)
        self.boxed, self.box_store = config.boxes > 0, BoxStore(config)

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
        workspace: Any,
        splits: Any,
        max_ctas: Int32,
        stream: CUstream,
    ):
        """Launch on ``stream``, for ``max_ctas`` SMs.

        Tensors as in ``gemm_sm120.fake_arguments``; ``out_scales`` and ``splits`` are None, and so
        is ``workspace`` but for a dynamic tile, whose first word is 0 and is left 0.
        """
        tile, config = self.tile, self.config
        m, n, k = xq.shape[0], wq.shape[0], xq.shape[1]
        a, b = self.by_side(xq, wq)
        loads = Loads(
            a=tma_load_atom(a, tile.rows_a, tile.k, tile.stages, tile.sharers_n),
            b=tma_load_atom(b, tile.rows_b, tile.k, tile.stages, tile.sharers_m),
            scales_a=None,
            scales_b=None,
        )
        work = Work(
            tiles_m=cute.ceil_div(m, tile.m * tile.sharers_m),
            tiles_n=cute.ceil_div(n, tile.n * tile.sharers_n),
            k_tiles=cute.ceil_div(k, tile.k),
            k_blocks=cute.ceil_div(k, MMA_K),
            splits=None,
        )
        clusters = self.scheduler.units(work)
        if cutlass.const_expr(tile.splits == 1):
            clusters = cutlass.min(clusters, max_ctas // tile.cluster)
        operands = EpilogueOperands(out, out_scales, sx, sw, bias, residual)
        counter = None
        if cutlass.const_expr(tile.dynamic):
            counter = workspace.iterator
        store = None
        if cutlass.const_expr(self.boxed):
            store = self.box_store.atom(out)
        self.kernel(loads, store, operands, counter, work, m, n).launch(
            grid=(clusters * tile.cluster, 1, 1),
            block=(tile.threads, 1, 1),
            cluster=(tile.cluster, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
            use_pdl=config.pdl,
            stream=stream,
        )

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(
        self,
        loads: Loads,
        store: Any,
        operands: EpilogueOperands,
        counter: Any,
        work: Work,
        m: Int32,
        n: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        boxes = None
        if cutlass.const_expr(self.boxed):
            boxes = self.box_store.allocate(store)
        ring = make_ring(loads, self.config, warp, self.tile.sharers)
        scales = SmemAllocator().allocate_array(
            Float32, self.tile.warpgroups * self.tile.staged_scales
        )
        if cutlass.const_expr(self.config.pdl):
            # The next kernel may take the room that this one leaves, and wait there.
            cute.arch.griddepcontrol_launch_dependents()
            if warp == self.tile.mma_warps:
                self.prefetch(loads, ring, work)
            # Nothing that an earlier kernel wrote, or still reads, is touched before this.
            cute.arch.griddepcontrol_wait()
        if warp >= self.tile.mma_warps:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == self.tile.mma_warps:
                self.load(loads, ring, counter, work)
            if cutlass.const_expr(self.tile.splits > 1):
                for _ in cutlass.range_constexpr(MEETINGS):
                    meet()
        else:
            cute.arch.setmaxregister_increase(self.tile.mma_registers)
            self.mma(ring, scales, boxes, operands, work, m, n, warp)
        if cutlass.const_expr(self.tile.sharers > 1):
            # Nobody leaves while another's copies or arrivals may still come.
            meet()

    @cute.jit
    def prefetch(self, loads: Loads, ring: Ring, work: Work):
        """Producer warp: have L2 fetch the weights of the ring's first round.

        Before the kernel waits for the one before it, which may be writing these weights: L2 is
        where both meet, so what is loaded from there later is what was written.
        """
        tile = self.tile
        weights, rows, stages, ctas = loads.b, tile.rows_b, ring.b, tile.sharers_m
        if cutlass.const_expr(tile.swap_ab):
            weights, rows, stages, ctas = loads.a, tile.rows_a, ring.a, tile.sharers_n
        tiles = cute.local_tile(weights.tma_tensor, (rows, tile.k), (None, None))
        unit, _, _ = self.place()
        part = self.scheduler.tile(unit, work)
        _, column = self.own_tile(part.row, part.column)
        first, end = self.k_range(work)
        end = cutlass.min(end, first + tile.stages)
        for k_tile in cutlass.range(first, end, unroll=1):
            tile_of_weights = tiles[None, None, column, k_tile]
            tma_prefetch(weights, tile_of_weights, stages[None, None, 0], self.sharing(ctas))

    @cute.jit
    def load(self, loads: Loads, ring: Ring, counter: Any, work: Work):
        """Producer warp: fill the ring with the k-tiles of this CTA's units of work, in order."""
        tile, config = self.tile, self.config
        tiles_a = cute.local_tile(loads.a.tma_tensor, (tile.rows_a, tile.k), (None, None))
        tiles_b = cute.local_tile(loads.b.tma_tensor, (tile.rows_b, tile.k), (None, None))
        # A fresh barrier counts as having completed phase 1: the first pass over the ring waits for
        # nobody.
        stage, phase = Int32(0), Int32(1)
        sharing_a, sharing_b = self.sharing(tile.sharers_n), self.sharing(tile.sharers_m)
        unit, step, _ = self.place()
        k_first, k_end = self.k_range(work)
        answer_phase = Int32(0)
        while unit < self.scheduler.units(work):
            if cutlass.const_expr(tile.dynamic):
                # Long before it is needed: the answer takes a trip to L2.
                step = self.counter.taken(counter, work) - unit
            part = self.scheduler.tile(unit, work)
            a, b = self.by_side(*self.own_tile(part.row, part.column))
            for k_tile in cutlass.range(k_first, k_end, unroll=1):
                wait(ring.empty + stage, phase)
                full = ring.full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, config.stage_bytes)
                tile_a, tile_b = tiles_a[None, None, a, k_tile], tiles_b[None, None, b, k_tile]
                tma_load(loads.a, tile_a, ring.a[None, None, stage], full, sharing_a)
                tma_load(loads.b, tile_b, ring.b[None, None, stage], full, sharing_b)
                stage, phase = advance(stage, phase, tile.stages)
            unit += step
            if cutlass.const_expr(tile.dynamic):
                self.counter.tell(ring.answers, unit, answer_phase)
                answer_phase = answer_phase ^ 1

    @cute.jit
    def mma(
        self,
        ring: Ring,
        scales: cute.Pointer,
        boxes: Any,
        operands: EpilogueOperands,
        work: Work,
        m: Int32,
        n: Int32,
        warp: Int32,
    ):
        """MMA warps: multiply each unit's k-tiles as they arrive, then run its epilogue."""
        tile = self.tile
        group, lane = warp // 4, cute.arch.lane_idx()
        thread = warp % 4 * WARP_SIZE + lane
        token_count, channel_count = self.by_side(tile.warpgroup_rows, tile.rows_b)
        first_row = Int32(0) if tile.pingpong else group * tile.warpgroup_rows
        first_token, first_channel = self.by_side(first_row, 0)
        scales += group * tile.staged_scales
        totals = cute.make_rmem_tensor((tile.part_sums, tile.parts), Float32)
        stage, phase = Int32(0), Int32(0)
        unit, step, rank = self.place()
        k_first, k_end = self.k_range(work)
        # A fresh barrier counts as having completed phase 1: the first turn is group 0's.
        turn_phase = group ^ 1
        answer_phase = Int32(0)
        if cutlass.const_expr(tile.pingpong):
            if group == 1:
                stage, phase = skip(stage, phase, k_end, tile.stages)
                unit += step
        while unit < self.scheduler.units(work):
            part = self.scheduler.tile(unit, work)
            row, column = self.own_tile(part.row, part.column)
            token, channel = row * tile.m + first_token, column * tile.n + first_channel
            sx = fetch(operands.sx, token, token_count, m, thread)
            sw = fetch(operands.sw, channel, channel_count, n, thread)
            totals.fill(0.0)
            if cutlass.const_expr(tile.pingpong):
                wait(ring.turn + group, turn_phase)
                turn_phase = turn_phase ^ 1
            stage, phase = self.mainloop(ring, totals, stage, phase, k_end - k_first, group)
            if cutlass.const_expr(tile.pingpong):
                stage, phase = skip(stage, phase, k_end, tile.stages)
            sums = totals
            if cutlass.const_expr(tile.splits > 1):
                sums = exchange(tile, totals, ring, group * WARPGROUP + thread, rank)
            staged = put_down(sx, token_count, sw, channel_count, scales, operands, group, thread)
            if cutlass.const_expr(tile.splits == 1):
                rank = Int32(0)
            if rank < tile.owners:
                self.finish(sums, boxes, staged, m, n, token, channel, group, warp % 4, lane, rank)
            if cutlass.const_expr(tile.dynamic):
                unit = self.counter.told(ring.answers, answer_phase)
                answer_phase = answer_phase ^ 1
            else:
                unit += tile.groups * step
        if cutlass.const_expr(self.boxed):
            self.box_store.drain(warp % 4)

    @cute.jit
    def finish(
        self,
        sums: cute.Tensor,
        boxes: Any,
        operands: EpilogueOperands,
        m: Int32,
        n: Int32,
        token: Int32,
        channel: Int32,
        group: Int32,
        warp: Int32,
        lane: Int32,
        rank: Int32,
    ):
        """The epilogue of this CTA's share of every part of a warpgroup.

        Args:
            token, channel: the first of the warpgroup, ``group``; warp: of the warpgroup.
        """
        tile = self.tile
        for part in cutlass.range_constexpr(tile.parts):
            acc = cute.make_tensor(
                sums[None, part].iterator, cute.make_layout((4, tile.share_sums // 4, 1))
            )
            row = part % tile.parts_a * WGMMA_M
            column = part // tile.parts_a * tile.part + rank * tile.share
            if cutlass.const_expr(self.boxed):
                place = token + row, channel + column
                self.box_store(acc, boxes, operands, m, n, place, part, group, warp, lane)
            else:
                down, right = self.by_side(row + warp * WARP_ROWS, column)
                self.epilogue(acc, operands, m, n, token + down, channel + right, lane)

    # ------------------------------------------------------------------ places

    @cute.jit
    def by_side(self, tokens: Any, channels: Any):
        """Of tokens and channels, what belongs to the MMA's M side and to its N side; or back."""
        return (channels, tokens) if self.tile.swap_ab else (tokens, channels)

    @cute.jit
    def place(self):
        """This CTA's first unit of work, the step to its next, and its rank in the cluster."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        cluster = self.tile.cluster
        return cta // cluster, ctas // cluster, cta % cluster

    @cute.jit
    def own_tile(self, row: Int32, column: Int32):
        """This CTA's tile, of those that its cluster works on side by side."""
        _, _, rank = self.place()
        if cutlass.const_expr(self.tile.sharers_m > 1):
            row = row * self.tile.sharers_m + rank
        if cutlass.const_expr(self.tile.sharers_n > 1):
            column = column * self.tile.sharers_n + rank
        return row, column

    @cute.jit
    def sharing(self, ctas: cutlass.Constexpr):
        """How an operand's tiles are loaded that so many CTAs of the cluster share."""
        if cutlass.const_expr(ctas == 1):
            return None
        _, _, rank = self.place()
        return Sharing(ctas, rank, Int16((1 << ctas) - 1))

    @cute.jit
    def k_range(self, work: Work):
        """The first k-tile of this CTA, and the first that is not."""
        splits = self.tile.splits
        if cutlass.const_expr(splits == 1):
            return Int32(0), work.k_tiles
        _, _, rank = self.place()
        return rank * work.k_tiles // splits, (rank + 1) * work.k_tiles // splits


#: Which of the arguments the workspace is.
_WORKSPACE = 8


def make(config: HopperConfig, target: str) -> tuple[GemmSm90, list[object]]:
    """The kernel for ``target``, and what to compile it with.

    Raises:
        ValueError: a target without wgmma.
    """
    if target != "sm_90a":
        raise ValueError(f"target: got {target!r}, must be sm_90a")
    arguments = fake_arguments(config)
    if config.dynamic:
        arguments[_WORKSPACE] = vector(Int32, cute.sym_int64(), aligned=True)
    return GemmSm90(config.check()), arguments
