"""What the MMA warps of the MLP kernel do: both GEMMs' sums, and what is made of them.

Weights are the MMA's A operand, tokens its B: a lane has, of a block of 16 rows, rows ``lane/4``
and ``lane/4 + 8``, which are a gate and its up, and of every 8 tokens two.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, cute

from .barriers import wait
from .config import MMA_K, MMA_N, WARP_SIZE
from .epilogue import DTYPES, activate
from .floats import ABS_MASK
from .mlp_announced import announce_product
from .mlp_config import BLOCK, SLAB, UNIT_BYTES, Cut, MlpConfig
from .mlp_parts import Problem, Ring, Tensors, steps_of, sync_mma_warps
from .mma import UNIT_SCALES, Instruction, mma_prepared, prepared, unit_scales
from .registers import kept
from .ring import advance
from .smem import fragment_address, line_address, load_fragments
from .weight_blocks import Span

#: MMAs of a warp that do not wait for one another, if there are as many.
_MMAS = 4


class MlpMath:
    """Specialised by :class:`MlpConfig` and the MMA of the target."""

    def __init__(self, config: MlpConfig, instruction: Instruction):
        self.config, self.instruction = config, instruction
        self.dtype = DTYPES[config.dtype]
        self.groups = config.tokens // MMA_N
        #: Sums of a lane for one block.
        self.block_sums = 4 * self.groups
        #: K-blocks that are loaded together: all of a slab, unless there are too few registers.
        self.together = SLAB // MMA_K if config.tokens <= 16 else 1

    @cute.jit
    def registers(self) -> cute.Tensor:
        """A lane's sums: of rows and tokens, of groups of 8 tokens, of blocks."""
        return cute.make_rmem_tensor((4, self.groups, self.config.warp_blocks), Float32)

    @cute.jit
    def multiply(
        self,
        acc: cute.Tensor,
        ring: Ring,
        gemm: cutlass.Constexpr,
        blocks: Int32,
        k: Int32,
        stage: Int32,
        phase: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """One pass over K; the ring's position after it."""
        config, cut = self.config, self.config.cuts[gemm]
        # Several sums of the same element, so that MMAs wait less for one another.
        chains = max(1, _MMAS // (self.groups * cut.warp_blocks))
        shape = (4, self.groups, self.config.warp_blocks, chains)
        sums = cute.make_rmem_tensor(shape, Float32)
        sums.fill(0.0)
        row_warp, k_warp = warp % cut.row_warps, warp // cut.row_warps
        row_b = lane % 8 if config.tokens == MMA_N else lane // 16 * 8 + lane % 8
        a = fragment_address(ring.weights[0], SLAB, Int32(0), lane % 16, lane // 16)
        if cutlass.const_expr(config.own[gemm] > 0):
            lines = config.rows
            b = line_address(ring.own, SLAB, row_b % lines, lane // 8 % 2)
        else:
            lines = config.tokens
            b = fragment_address(ring.tokens[gemm], SLAB, Int32(0), row_b, lane // 8 % 2)
        for step in cutlass.range(steps_of(k, cut), unroll=1):
            wait(ring.full + stage, phase)
            if cutlass.const_expr(config.own[gemm] == 0):
                wait(ring.filled + stage, phase)
            for i in cutlass.range_constexpr(cut.warp_slabs):
                slab = k_warp + i * cut.k_warps
                a_slab = a + (stage * config.units + slab * cut.blocks) * UNIT_BYTES
                if cutlass.const_expr(config.own[gemm] > 0):
                    b_slab = b + (step * cut.slabs + slab) * (lines * SLAB)
                else:
                    b_slab = b + (stage * config.stage_bytes + slab * (lines * SLAB))
                self._multiply_slab(sums, a_slab, b_slab, cut, blocks, row_warp)
            # As in the GEMM: all lanes have read before one of them says so.
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.empty + stage)
            stage, phase = advance(stage, phase, self.config.stages)
        for i in cutlass.range_constexpr(cute.size(acc)):
            total = sums[i]
            for chain in cutlass.range_constexpr(1, chains):
                total = total + sums[i + chain * cute.size(acc)]
            acc[i] = total
        return stage, phase

    @cute.jit
    def _multiply_slab(
        self,
        acc: cute.Tensor,
        a: Int32,
        b: Int32,
        cut: cutlass.Constexpr[Cut],
        blocks: Int32,
        row_warp: Int32,
    ):
        unit = unit_scales(self.instruction, kept(UNIT_SCALES))
        for first in cutlass.range_constexpr(0, SLAB // MMA_K, self.together):
            shape = (16, -(-self.groups // 2), self.together)
            tokens = cute.make_rmem_tensor(shape, Float8E4M3FN)
            for i in cutlass.range_constexpr(self.together):
                load_fragments(tokens[None, None, i], b, first + i, SLAB)
            pairs = cute.logical_divide(tokens, (8, None, None))
            columns = [
                [
                    prepared(self.instruction, pairs[(None, n % 2), n // 2, i])
                    for n in range(self.groups)
                ]
                for i in range(self.together)
            ]
            for j in cutlass.range_constexpr(cut.warp_blocks):
                block = row_warp + j * cut.row_warps
                if block < blocks:
                    rows = cute.make_rmem_tensor((16, 1, self.together), Float8E4M3FN)
                    for i in cutlass.range_constexpr(self.together):
                        address = a + block * UNIT_BYTES
                        load_fragments(rows[None, None, i], address, first + i, SLAB)
                    for i in cutlass.range_constexpr(self.together):
                        row = prepared(self.instruction, rows[None, 0, i])
                        for n in cutlass.range_constexpr(self.groups):
                            chain = (first + i) % cute.size(acc, mode=[3])
                            mma_prepared(
                                self.instruction, row, columns[i][n], acc[None, n, j, chain], unit
                            )

    @cute.jit
    def add_up(
        self, acc: cute.Tensor, ring: Ring, cut: cutlass.Constexpr[Cut], warp: Int32, lane: Int32
    ):
        """Where warps have shares of the same blocks: all of them show theirs to one another."""
        if cutlass.const_expr(cut.k_warps > 1):
            count = self.block_sums * cut.warp_blocks
            # What the pass before left has been read.
            sync_mma_warps()
            for i in cutlass.range_constexpr(count):
                ring.sums[(warp * count + i) * WARP_SIZE + lane] = acc[i]
            sync_mma_warps()

    @cute.jit
    def _sum(
        self,
        acc: cute.Tensor,
        ring: Ring,
        cut: cutlass.Constexpr[Cut],
        warp: Int32,
        lane: Int32,
        i: Int32,
    ) -> Float32:
        """The ``i``-th of a lane's sums, of all warps that have a share, in their order."""
        if cutlass.const_expr(cut.k_warps == 1):
            total = acc[i]
        else:
            count, row_warp = self.block_sums * cut.warp_blocks, warp % cut.row_warps
            total = Float32(0.0)
            for other in cutlass.range_constexpr(cut.k_warps):
                first = (row_warp + other * cut.row_warps) * count
                total = total + ring.sums[(first + i) * WARP_SIZE + lane]
        return total

    def shares(self, gemm: int) -> int:
        """How many outputs a lane finishes, of those that it and the same lanes of others have."""
        cut = self.config.cuts[gemm]
        outputs = (2 if gemm == 0 else 4) * self.groups * cut.warp_blocks
        return -(-outputs // cut.k_warps)

    def _place(
        self, gemm: int, share: int, span: Span, warp: Int32, lane: Int32
    ) -> tuple[Any, Int32, Int32, Int32, Boolean]:
        """Of an output that a lane finishes. Python, run at trace time.

        Returns:
            Which of the lane's sums it is (a product: its gate's), its token, its block, which half
            of the block it is in, and whether there is such a one.
        """
        cut = self.config.cuts[gemm]
        number: Any = share
        inside = Boolean(True)
        if cut.k_warps > 1:
            number = warp // cut.row_warps * self.shares(gemm) + share
            inside = number < (2 if gemm == 0 else 4) * self.groups
        e = number % 2
        half = Int32(0) if gemm == 0 else Int32(number // 2 % 2)
        rest = number // (2 if gemm == 0 else 4)
        n, j = rest % self.groups, rest // self.groups
        i = e + 4 * rest + (0 if gemm == 0 else 2 * (number // 2 % 2))
        token = Int32(n * MMA_N + lane % 4 * 2 + e)
        block = Int32(warp % cut.row_warps + j * cut.row_warps)
        return i, token, span.first + block, half, inside & (block < span.count)

    @cute.jit
    def channel_scales(
        self,
        tensors: Tensors,
        span: Span,
        gemm: cutlass.Constexpr,
        warp: Int32,
        lane: Int32,
    ) -> cute.Tensor:
        """Of gate and up, or of the outputs, that a lane finishes; read before they are needed."""
        shares = cutlass.const_expr(self.shares(gemm))
        scales = cute.make_rmem_tensor((2 - gemm, shares), Float32)
        scales.fill(0.0)
        for share in cutlass.range_constexpr(shares):
            _, _, block, half, inside = self._place(gemm, share, span, warp, lane)
            if inside:
                row = block * BLOCK + lane // 4 + half * (BLOCK // 2)
                for part in cutlass.range_constexpr(2 - gemm):
                    scales[part, share] = tensors.weight_scales[gemm][row + part * (BLOCK // 2)]
        return scales

    @cute.jit
    def finish_product(
        self,
        acc: cute.Tensor,
        channels: cute.Tensor,
        tensors: Tensors,
        problem: Problem,
        ring: Ring,
        span: Span,
        warp: Int32,
        lane: Int32,
    ):
        """``silu(gate) * up`` of a pass, rounded and stored, and the magnitudes of its tokens."""
        cut = self.config.gate_up
        for share in cutlass.range_constexpr(self.shares(0)):
            i, token, block, _, inside = self._place(0, share, span, warp, lane)
            column = block * (BLOCK // 2) + lane // 4
            amax = Int32(0)
            if inside & (token < problem.m):
                of_token = ring.scales[0][token]
                gate = self._sum(acc, ring, cut, warp, lane, i) * of_token * channels[0, share]
                up = self._sum(acc, ring, cut, warp, lane, i + 2) * of_token * channels[1, share]
                value = (activate("silu", gate) * up).to(self.dtype)
                tensors.product[token, column] = value
                amax = value.to(Float32).bitcast(Int32) & ABS_MASK
                if cutlass.const_expr(self.config.own[1] > 0):
                    announce_product(tensors.workspace, token * problem.ffn + column, value)
            if cutlass.const_expr(self.config.own[1] == 0):
                self._note(amax, token, ring, lane)

    @cute.jit
    def _note(self, amax: Int32, token: Int32, ring: Ring, lane: Int32):
        """A lane's magnitude into its token's, of which every fourth lane has one."""
        for bit in cutlass.range_constexpr(2, 5):
            amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, 1 << bit))
        if lane < 4:
            word = ring.amax.iterator + token
            cute.arch.atomic_max(word, amax, sem="relaxed", scope="cta")

    @cute.jit
    def residual(
        self, tensors: Tensors, problem: Problem, span: Span, warp: Int32, lane: Int32
    ) -> cute.Tensor:
        """What is added to the outputs that a lane finishes; read before it is needed."""
        values = cute.make_rmem_tensor(cutlass.const_expr(self.shares(1)), self.dtype)
        values.fill(0.0)
        for share in cutlass.range_constexpr(self.shares(1)):
            _, token, block, half, inside = self._place(1, share, span, warp, lane)
            if inside & (token < problem.m):
                channel = block * BLOCK + lane // 4 + half * (BLOCK // 2)
                values[share] = tensors.x[token, channel]
        return values

    @cute.jit
    def finish_output(
        self,
        acc: cute.Tensor,
        channels: cute.Tensor,
        residual: cute.Tensor,
        tensors: Tensors,
        problem: Problem,
        ring: Ring,
        span: Span,
        warp: Int32,
        lane: Int32,
    ):
        """``down + x`` of a pass, rounded once."""
        for share in cutlass.range_constexpr(self.shares(1)):
            i, token, block, half, inside = self._place(1, share, span, warp, lane)
            if inside & (token < problem.m):
                channel = block * BLOCK + lane // 4 + half * (BLOCK // 2)
                total = self._sum(acc, ring, self.config.down, warp, lane, i)
                value = total * ring.scales[1][token] * channels[0, share]
                value = value + residual[share].to(Float32)
                tensors.out[token, channel] = value.to(self.dtype)
