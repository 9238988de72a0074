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
    ==========  ===========  =====================  =========================  ==================

While the MMA warps are in the epilogue, which uses no shared memory, the producer already fills the
ring for the next tile.

The bare-mbarrier style, and the warp sync before a stage's release, follow gau-nernst's gn-kernels
(sm_120 MXFP8 GEMM and its notes on memory ordering).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float8E4M3FN, Float8E8M0FNU, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .block_scales import scale_load_atom
from .config import (
    K_MULTIPLE,
    MMA_K,
    N_MULTIPLE,
    SCALE_BLOCK_BYTES,
    SCALE_BLOCK_ROWS,
    GemmConfig,
)
from .epilogue import DTYPES, Epilogue, EpilogueOperands
from .mainloop import Mainloop, Work
from .mma import Instruction
from .ring import Loads, Ring, advance, make_ring
from .scheduler import tile_coordinate
from .smem import tma_load, tma_load_atom


class GemmSm120:
    """One specialisation of the kernel: a :class:`GemmConfig` and the MMA of the target."""

    def __init__(self, config: GemmConfig, instruction: Instruction):
        self.config = config
        self.tile = config.tile
        self.mainloop = Mainloop(config, instruction)
        self.epilogue = Epilogue(
            config.tile.warp_m, config.tile.warp_n, config.epilogue, scaled=not config.block_scaled
        )

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
        max_ctas: Int32,
        stream: CUstream,
    ):
        """Launch on ``stream``, at most ``max_ctas`` CTAs; tensors as in ``fake_arguments``."""
        tile, config = self.tile, self.config
        m, n, k = xq.shape[0], wq.shape[0], xq.shape[1]
        loads = Loads(
            a=tma_load_atom(xq, tile.m, tile.k, tile.stages),
            b=tma_load_atom(wq, tile.n, tile.k, tile.stages),
            scales_a=scale_load_atom(sx, m, k, config.scale_blocks_a, tile.stages)
            if config.block_scaled
            else None,
            scales_b=scale_load_atom(sw, n, k, config.scale_blocks_b, tile.stages)
            if config.block_scaled
            else None,
        )
        if cutlass.const_expr(config.block_scaled):
            sx, sw = None, None  # the MMA applies them
        operands = EpilogueOperands(out, sx, sw, bias, residual)
        work = Work(
            tiles_m=cute.ceil_div(m, tile.m),
            tiles_n=cute.ceil_div(n, tile.n),
            k_tiles=cute.ceil_div(k, tile.k),
            k_blocks=cute.ceil_div(k, MMA_K),
        )
        ctas = cutlass.min(work.tiles_m * work.tiles_n, max_ctas)
        self.kernel(loads, operands, work, m, n).launch(
            grid=(ctas, 1, 1),
            block=(tile.threads, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(self, loads: Loads, operands: EpilogueOperands, work: Work, m: Int32, n: Int32):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ring = make_ring(loads, self.tile, warp)
        if warp == self.tile.mma_warps:
            self.load(loads, ring, work)
        else:
            self.mma(ring, operands, work, m, n, warp)

    @cute.jit
    def load(self, loads: Loads, ring: Ring, work: Work):
        """Producer warp: fill the ring with the k-tiles of this CTA's output tiles, in order."""
        tile, config = self.tile, self.config
        tiles_a = cute.local_tile(loads.a.tma_tensor, (tile.m, tile.k), (None, None))
        tiles_b = cute.local_tile(loads.b.tma_tensor, (tile.n, tile.k), (None, None))
        stage = Int32(0)
        # A fresh barrier counts as having completed phase 1: the first pass over the ring waits for
        # nobody.
        phase = Int32(1)
        ctas, _, _ = cute.arch.grid_dim()
        index, _, _ = cute.arch.block_idx()
        while index < work.tiles_m * work.tiles_n:
            row, column = tile_coordinate(index, work.tiles_m, work.tiles_n)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                cute.arch.mbarrier_wait(ring.empty + stage, phase)
                full = ring.full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, config.stage_bytes)
                tma_load(loads.a, tiles_a[None, None, row, k_tile], ring.a[None, None, stage], full)
                tma_load(
                    loads.b, tiles_b[None, None, column, k_tile], ring.b[None, None, stage], full
                )
                if cutlass.const_expr(config.block_scaled):
                    self.load_scales(
                        loads.scales_a, ring.scales_a, row * tile.m, k_tile, stage, full
                    )
                    self.load_scales(
                        loads.scales_b, ring.scales_b, column * tile.n, k_tile, stage, full
                    )
                stage, phase = advance(stage, phase, tile.stages)
            index += ctas

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
        block = row // (blocks * SCALE_BLOCK_ROWS)
        tma_load(tma, tiles[None, None, block, k_tile], ring[None, None, stage], full)

    @cute.jit
    def mma(
        self,
        ring: Ring,
        operands: EpilogueOperands,
        work: Work,
        m: Int32,
        n: Int32,
        warp: Int32,
    ):
        """MMA warps: multiply the k-tiles of each output tile as they arrive, then its epilogue."""
        tile = self.tile
        lane = cute.arch.lane_idx()
        warp_m, warp_n = warp // tile.warps_n * tile.warp_m, warp % tile.warps_n * tile.warp_n
        source = self.mainloop.source(ring, warp_m, warp_n, lane)
        fragments = self.mainloop.make_fragments()
        stage, phase = Int32(0), Int32(0)
        ctas, _, _ = cute.arch.grid_dim()
        index, _, _ = cute.arch.block_idx()
        while index < work.tiles_m * work.tiles_n:
            tile_row, tile_column = tile_coordinate(index, work.tiles_m, work.tiles_n)
            row, column = tile_row * tile.m, tile_column * tile.n
            tile_source = source
            if cutlass.const_expr(self.config.block_scaled):
                tile_source = self.mainloop.with_scales(
                    source, ring, (row, column), (warp_m, warp_n), (m, n), lane
                )
            fragments.acc.fill(0.0)
            cute.arch.mbarrier_wait(ring.full + stage, phase)
            self.mainloop.load_stage_start(tile_source, fragments, stage, work, Int32(0))
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                stage, phase = self.mainloop.multiply_k_tile(
                    tile_source, fragments, ring, stage, phase, work, k_tile
                )
            # Keeps the epilogue's loads out of the last k-tile, where every register is taken.
            cute.arch.sync_warp()
            self.epilogue(fragments.acc, operands, m, n, row + warp_m, column + warp_n, lane)
            index += ctas


def fake_arguments(config: GemmConfig) -> list[object]:
    """What ``cute.compile`` is shown in place of the arguments of ``GemmSm120.__call__``.

    The compiled function checks its tensors against these: dtypes, ranks, sizes that must agree,
    16-byte row strides and addresses, one device. M, N, K and every stride are run-time values; a
    stride of 0 broadcasts. The lengths of blocked scales are the caller's to check.
    """
    epilogue = config.epilogue
    m = cute.sym_int()
    n = cute.sym_int(divisibility=N_MULTIPLE)
    k = cute.sym_int(divisibility=MMA_K if config.block_scaled else K_MULTIPLE)

    def matrix(dtype: type[cutlass.Numeric], rows: object, columns: object) -> object:
        row_stride = cute.sym_int64(divisibility=128 // dtype.width)
        return make_fake_tensor(dtype, (rows, columns), (row_stride, 1), assumed_align=16)

    def vector(dtype: type[cutlass.Numeric], count: object, stride: object) -> object:
        return make_fake_tensor(dtype, (count,), (stride,), assumed_align=dtype.width // 8)

    def scales(count: object) -> object:
        if not config.block_scaled:
            return vector(Float32, count, cute.sym_int64())
        length = cute.sym_int64(divisibility=SCALE_BLOCK_BYTES)
        return make_fake_tensor(Float8E8M0FNU, (length,), (1,), assumed_align=16)

    bias, residual = epilogue.bias, epilogue.residual
    return [
        matrix(Float8E4M3FN, m, k),  # xq
        scales(m),  # sx
        matrix(Float8E4M3FN, n, k),  # wq
        scales(n),  # sw
        vector(DTYPES[bias], n, 1) if bias else None,
        matrix(DTYPES[residual], m, n) if residual else None,
        matrix(DTYPES[epilogue.out], m, n),  # out
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


def make(config: GemmConfig, target: str) -> tuple[GemmSm120, list[object]]:
    """The kernel for ``target``, and what to compile it with."""
    return GemmSm120(config.check(), Instruction.of(target)), fake_arguments(config)
