"""Warp-specialised, persistent e4m3 GEMM for sm_120 and sm_121, per token x per channel.

``y[m, n] = act(sum_k xq[m, k] * wq[n, k] * sx[m] * sw[n] + bias[n]) + residual[m, n]``

xq ``[M, K]``, wq ``[N, K]``, y ``[M, N]``, K contiguous in both operands. M, N, K and all strides
are run-time values; tails are zero-filled by TMA on the way in and masked on the way out.

Constraints: K a multiple of 16, N of 8; base addresses and row strides of xq, wq, y and residual
multiples of 16 bytes; M >= 1; shared memory as ``TileConfig.smem_bytes`` sums it, at most 101,376
bytes.

Warp roles
    ==========  ===========  =====================  =========================  ==================
    role        warps        waits on               arrives on                 arrivals per stage
    ==========  ===========  =====================  =========================  ==================
    load        the last     empty[stage]           full[stage] (+ tx bytes)   1
    mma         all others   full[stage]            empty[stage]               1 per MMA warp
    ==========  ===========  =====================  =========================  ==================

The unit scales of the block-scaled MMA sit in one register (see ``mma.py``); no scale tensor
exists. The real scales are applied once per output, in the epilogue, in registers
(``epilogue.py``). While the MMA warps are in the epilogue, the producer already fills the ring for
the next tile.

The bare-mbarrier style, and the warp sync before a stage's release, follow gau-nernst's gn-kernels
(sm_120 MXFP8 GEMM and its notes on memory ordering).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float8E4M3FN, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from .config import K_MULTIPLE, MMA_K, MMA_M, MMA_N, N_MULTIPLE, STAGE_ALIGNMENT, GemmConfig
from .epilogue import DTYPES, Epilogue, EpilogueOperands
from .mma import Instruction, mma_m16n8k32
from .scheduler import tile_coordinate
from .smem import fragment_address, load_fragments, tma_load, tma_load_atom


class Ring(NamedTuple):
    """The ring of stages in shared memory and its barriers."""

    a: cute.Tensor
    b: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer


class FragmentSource(NamedTuple):
    """This lane's ``ldmatrix`` addresses in stage 0, k-block 0, of both operands."""

    a: Int32
    b: Int32


class Work(NamedTuple):
    """Tiles of the problem, and how many k-tiles each takes."""

    tiles_m: Int32
    tiles_n: Int32
    k_tiles: Int32


class GemmSm120:
    """One specialisation of the kernel: a :class:`GemmConfig` and the MMA instruction of the
    target.
    """

    def __init__(self, config: GemmConfig, instruction: Instruction):
        self.tile = config.tile.check()
        self.instruction = instruction
        self.epilogue = Epilogue(config.tile.warp_m, config.tile.warp_n, config.epilogue)

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
        tile = self.tile
        m, n, k = xq.shape[0], wq.shape[0], xq.shape[1]
        tma_a = tma_load_atom(xq, tile.m, tile.k, tile.stages)
        tma_b = tma_load_atom(wq, tile.n, tile.k, tile.stages)
        operands = EpilogueOperands(out, sx, sw, bias, residual)
        work = Work(cute.ceil_div(m, tile.m), cute.ceil_div(n, tile.n), cute.ceil_div(k, tile.k))
        ctas = cutlass.min(work.tiles_m * work.tiles_n, max_ctas)
        self.kernel(tma_a, tma_b, operands, work, m, n).launch(
            grid=(ctas, 1, 1),
            block=(tile.threads, 1, 1),
            smem=tile.smem_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(
        self,
        tma_a: cpasync.TmaInfo,
        tma_b: cpasync.TmaInfo,
        operands: EpilogueOperands,
        work: Work,
        m: Int32,
        n: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ring = self.make_ring(tma_a, tma_b, warp)
        if warp == self.tile.mma_warps:
            self.load(tma_a, tma_b, ring, work)
        else:
            self.mma(ring, operands, work, m, n, warp)

    @cute.jit
    def make_ring(self, tma_a: cpasync.TmaInfo, tma_b: cpasync.TmaInfo, warp: Int32) -> Ring:
        """Allocate the stages and barriers; initialise the barriers."""
        tile = self.tile
        smem = SmemAllocator()
        layout_a, layout_b = tma_a.smem_layout, tma_b.smem_layout
        a = smem.allocate_tensor(
            Float8E4M3FN, layout_a.outer, byte_alignment=STAGE_ALIGNMENT, swizzle=layout_a.inner
        )
        b = smem.allocate_tensor(
            Float8E4M3FN, layout_b.outer, byte_alignment=STAGE_ALIGNMENT, swizzle=layout_b.inner
        )
        full = smem.allocate_array(Int64, tile.stages)
        empty = smem.allocate_array(Int64, tile.stages)
        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(tile.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, tile.mma_warps)
            # TMA, another proxy, signals these barriers: it must see them initialised.
            cute.arch.mbarrier_init_fence()
        elif warp == tile.mma_warps:
            cpasync.prefetch_descriptor(tma_a.atom)
            cpasync.prefetch_descriptor(tma_b.atom)
        cute.arch.sync_threads()
        return Ring(a, b, full, empty)

    @cute.jit
    def load(self, tma_a: cpasync.TmaInfo, tma_b: cpasync.TmaInfo, ring: Ring, work: Work):
        """Producer warp: fill the ring with the k-tiles of this CTA's output tiles, in order."""
        tile = self.tile
        tiles_a = cute.local_tile(tma_a.tma_tensor, (tile.m, tile.k), (None, None))
        tiles_b = cute.local_tile(tma_b.tma_tensor, (tile.n, tile.k), (None, None))
        stage = Int32(0)
        # A fresh barrier counts as having completed phase 1: the first pass over the ring waits for
        # nobody.
        phase = Int32(1)
        ctas, _, _ = cute.arch.grid_dim()
        index, _, _ = cute.arch.block_idx()
        while index < work.tiles_m * work.tiles_n:
            tile_row, tile_column = tile_coordinate(index, work.tiles_m, work.tiles_n)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                cute.arch.mbarrier_wait(ring.empty + stage, phase)
                full = ring.full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, tile.stage_bytes)
                tma_load(
                    tma_a, tiles_a[None, None, tile_row, k_tile], ring.a[None, None, stage], full
                )
                tma_load(
                    tma_b, tiles_b[None, None, tile_column, k_tile], ring.b[None, None, stage], full
                )
                stage, phase = self.advance(stage, phase)
            index += ctas

    @cute.jit
    def mma(
        self, ring: Ring, operands: EpilogueOperands, work: Work, m: Int32, n: Int32, warp: Int32
    ):
        """MMA warps: multiply the k-tiles of each output tile as they arrive, then its epilogue."""
        tile = self.tile
        lane = cute.arch.lane_idx()
        warp_row, warp_column = warp // tile.warps_n, warp % tile.warps_n
        # ldmatrix.x4 takes row addresses from lanes 0-7, 8-15, 16-23, 24-31 for its four matrices:
        # for A (rows, half) = (0-7, 0), (8-15, 0), (0-7, 1), (8-15, 1); for B (0-7, 0), (0-7, 1),
        # (8-15, 0), (8-15, 1).
        source = FragmentSource(
            a=fragment_address(ring.a, tile.k, warp_row * tile.warp_m, lane % 16, lane // 16),
            b=fragment_address(
                ring.b, tile.k, warp_column * tile.warp_n, lane // 16 * 8 + lane % 8, lane // 8 % 2
            ),
        )
        # Two k-blocks of fragments: one multiplies while the other loads.
        frag_a = cute.make_rmem_tensor((16, tile.warp_m // 16, 2), Float8E4M3FN)
        frag_b = cute.make_rmem_tensor((16, tile.warp_n // 16, 2), Float8E4M3FN)
        acc = cute.make_rmem_tensor((4, tile.warp_n // MMA_N, tile.warp_m // MMA_M), Float32)

        stage, phase = Int32(0), Int32(0)
        ctas, _, _ = cute.arch.grid_dim()
        index, _, _ = cute.arch.block_idx()
        while index < work.tiles_m * work.tiles_n:
            tile_row, tile_column = tile_coordinate(index, work.tiles_m, work.tiles_n)
            acc.fill(0.0)
            cute.arch.mbarrier_wait(ring.full + stage, phase)
            self.load_k_block(source, frag_a, frag_b, 0, stage)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                more = k_tile + 1 < work.k_tiles
                stage, phase = self.multiply_k_tile(
                    source, frag_a, frag_b, acc, ring, stage, phase, more
                )
            # Keeps the epilogue's loads out of the last k-tile, where every register is taken.
            cute.arch.sync_warp()
            row = tile_row * tile.m + warp_row * tile.warp_m
            column = tile_column * tile.n + warp_column * tile.warp_n
            self.epilogue(acc, operands, m, n, row, column, lane)
            index += ctas

    @cute.jit
    def multiply_k_tile(
        self,
        source: FragmentSource,
        frag_a: cute.Tensor,
        frag_b: cute.Tensor,
        acc: cute.Tensor,
        ring: Ring,
        stage: Int32,
        phase: Int32,
        more: cutlass.Boolean,
    ):
        """One stage: its k-blocks in turn, each one's successor loading meanwhile, across stages if
        ``more``.
        """
        k_blocks = self.tile.k // MMA_K
        next_stage, next_phase = self.advance(stage, phase)
        # One ldmatrix.x4 of B holds two 8-column fragments.
        pairs_b = cute.logical_divide(frag_b, (8, None, None))
        for k_block in cutlass.range_constexpr(k_blocks):
            if cutlass.const_expr(k_block + 1 < k_blocks):
                self.load_k_block(source, frag_a, frag_b, k_block + 1, stage)
            else:
                # Every lane's ldmatrix of this stage must be done before the one lane's arrive
                # hands the stage to TMA; an mbarrier arrive orders only its own lane. Without the
                # warp sync the next load may overwrite what a slower lane still reads.
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ring.empty + stage)
                if more:
                    cute.arch.mbarrier_wait(ring.full + next_stage, next_phase)
                    self.load_k_block(source, frag_a, frag_b, 0, next_stage)
            buffer = k_block % 2
            for mi in cutlass.range_constexpr(self.tile.warp_m // MMA_M):
                for ni in cutlass.range_constexpr(self.tile.warp_n // MMA_N):
                    mma_m16n8k32(
                        self.instruction,
                        frag_a[None, mi, buffer],
                        pairs_b[(None, ni % 2), ni // 2, buffer],
                        acc[None, ni, mi],
                    )
        return next_stage, next_phase

    @cute.jit
    def load_k_block(
        self,
        source: FragmentSource,
        frag_a: cute.Tensor,
        frag_b: cute.Tensor,
        k_block: cutlass.Constexpr,
        stage: Int32,
    ):
        """``ldmatrix`` of one k-block into the fragment buffer of its parity."""
        tile, buffer = self.tile, k_block % 2
        address_a = source.a + stage * (tile.m * tile.k)
        address_b = source.b + stage * (tile.n * tile.k)
        load_fragments(frag_a[None, None, buffer], address_a, k_block, tile.k)
        load_fragments(frag_b[None, None, buffer], address_b, k_block, tile.k)

    @cute.jit
    def advance(self, stage: Int32, phase: Int32):
        """The next stage of the ring; a barrier's phase flips once per round."""
        stage += 1
        if stage == self.tile.stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase


def fake_arguments(config: GemmConfig) -> list[object]:
    """What ``cute.compile`` is shown in place of the arguments of ``GemmSm120.__call__``.

    The compiled function checks its tensors against these: dtypes, ranks, sizes that must agree,
    16-byte row strides and addresses, one device. M, N, K and every stride are run-time values; a
    stride of 0 broadcasts.
    """
    epilogue = config.epilogue
    m = cute.sym_int()
    n, k = cute.sym_int(divisibility=N_MULTIPLE), cute.sym_int(divisibility=K_MULTIPLE)

    def matrix(dtype: type[cutlass.Numeric], rows: object, columns: object) -> object:
        row_stride = cute.sym_int64(divisibility=128 // dtype.width)
        return make_fake_tensor(dtype, (rows, columns), (row_stride, 1), assumed_align=16)

    def vector(dtype: type[cutlass.Numeric], count: object, stride: object) -> object:
        return make_fake_tensor(dtype, (count,), (stride,), assumed_align=dtype.width // 8)

    bias, residual = epilogue.bias, epilogue.residual
    return [
        matrix(Float8E4M3FN, m, k),  # xq
        vector(Float32, m, cute.sym_int64()),  # sx
        matrix(Float8E4M3FN, n, k),  # wq
        vector(Float32, n, cute.sym_int64()),  # sw
        vector(DTYPES[bias], n, 1) if bias else None,
        matrix(DTYPES[residual], m, n) if residual else None,
        matrix(DTYPES[epilogue.out], m, n),  # out
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
