"""What the MMA warps of the MLP kernel do: both GEMMs' sums, and what is made of them.

Weights are the MMA's A operand, tokens its B: a lane has, of a block of 16 rows, rows ``lane/4``
and ``lane/4 + 8``, which are a gate and its up, and of every 8 tokens two.
"""

from __future__ import annotations

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, cute

from .barriers import wait
from .config import MMA_K, MMA_N, WARP_SIZE
from .epilogue import DTYPES, activate
from .floats import ABS_MASK
from .mlp_config import BLOCK, SLAB, UNIT_BYTES, Cut, MlpConfig
from .mlp_parts import Problem, Ring, Span, Tensors, amax_word, steps_of, sync_mma_warps
from .mma import UNIT_SCALES, Instruction, mma_m16n8k32, unit_scales
from .registers import kept
from .ring import advance
from .smem import fragment_address, load_fragments


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
        cut: cutlass.Constexpr[Cut],
        blocks: Int32,
        k: Int32,
        stage: Int32,
        phase: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """One pass over K; the ring's position after it."""
        acc.fill(0.0)
        config = self.config
        row_warp, k_warp = warp % cut.row_warps, warp // cut.row_warps
        row_b = lane % 8 if config.tokens == MMA_N else lane // 16 * 8 + lane % 8
        a = fragment_address(ring.weights[0], SLAB, Int32(0), lane % 16, lane // 16)
        b = fragment_address(ring.tokens, SLAB, Int32(0), row_b, lane // 8 % 2)
        for _ in cutlass.range(steps_of(k, cut), unroll=1):
            wait(ring.full + stage, phase)
            for i in cutlass.range_constexpr(cut.warp_slabs):
                slab = k_warp + i * cut.k_warps
                a_slab = a + (stage * config.units + slab * cut.blocks) * UNIT_BYTES
                b_slab = b + (stage * config.slabs + slab) * (config.tokens * SLAB)
                self._multiply_slab(acc, a_slab, b_slab, cut, blocks, row_warp)
            # As in the GEMM: all lanes have read before one of them says so.
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.empty + stage)
            stage, phase = advance(stage, phase, self.config.stages)
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
            for j in cutlass.range_constexpr(cut.warp_blocks):
                block = row_warp + j * cut.row_warps
                if block < blocks:
                    rows = cute.make_rmem_tensor((16, 1, self.together), Float8E4M3FN)
                    for i in cutlass.range_constexpr(self.together):
                        address = a + block * UNIT_BYTES
                        load_fragments(rows[None, None, i], address, first + i, SLAB)
                    for i in cutlass.range_constexpr(self.together):
                        for n in cutlass.range_constexpr(self.groups):
                            mma_m16n8k32(
                                self.instruction,
                                rows[None, 0, i],
                                pairs[(None, n % 2), n // 2, i],
                                acc[None, n, j],
                                unit,
                                unit,
                            )

    @cute.jit
    def add_up(
        self, acc: cute.Tensor, ring: Ring, cut: cutlass.Constexpr[Cut], warp: Int32, lane: Int32
    ):
        """Where warps have shares of the same blocks: the first gets the sum, in their order."""
        if cutlass.const_expr(cut.k_warps > 1):
            count = self.block_sums * cut.warp_blocks
            flat = cute.make_tensor(acc.iterator, cute.make_layout(count))
            # What the pass before left has been read.
            sync_mma_warps()
            for i in cutlass.range_constexpr(count):
                ring.sums[(warp * count + i) * WARP_SIZE + lane] = flat[i]
            sync_mma_warps()
            if warp < cut.row_warps:
                for other in cutlass.range_constexpr(1, cut.k_warps):
                    first = (warp + other * cut.row_warps) * count
                    for i in cutlass.range_constexpr(count):
                        flat[i] = flat[i] + ring.sums[(first + i) * WARP_SIZE + lane]

    @cute.jit
    def channel_scales(
        self,
        tensors: Tensors,
        span: Span,
        gemm: cutlass.Constexpr,
        warp: Int32,
        lane: Int32,
    ) -> cute.Tensor:
        """Of a lane's rows in each of its blocks; read before they are needed."""
        cut = self.config.cuts[gemm]
        scales = cute.make_rmem_tensor((2, cut.warp_blocks), Float32)
        scales.fill(0.0)
        for j in cutlass.range_constexpr(cut.warp_blocks):
            block = warp % cut.row_warps + j * cut.row_warps
            if block < span.count:
                row = (span.first + block) * BLOCK + lane // 4
                for half in cutlass.range_constexpr(2):
                    scales[half, j] = tensors.weight_scales[gemm][row + half * (BLOCK // 2)]
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
        amax = cute.make_rmem_tensor((2, self.groups), Int32)
        amax.fill(0)
        for j in cutlass.range_constexpr(cut.warp_blocks):
            block = warp + j * cut.row_warps
            if (block < span.count) & (warp < cut.row_warps):
                column = (span.first + block) * (BLOCK // 2) + lane // 4
                for n in cutlass.range_constexpr(self.groups):
                    for e in cutlass.range_constexpr(2):
                        token = n * MMA_N + lane % 4 * 2 + e
                        if token < problem.m:
                            of_token = ring.scales[0][token]
                            gate = acc[e, n, j] * of_token * channels[0, j]
                            up = acc[2 + e, n, j] * of_token * channels[1, j]
                            value = (activate("silu", gate) * up).to(self.dtype)
                            tensors.product[token, column] = value
                            bits = value.to(Float32).bitcast(Int32) & ABS_MASK
                            amax[e, n] = cutlass.max(amax[e, n], bits)
        if warp < cut.row_warps:
            for n in cutlass.range_constexpr(self.groups):
                for e in cutlass.range_constexpr(2):
                    most = amax[e, n]
                    for bit in cutlass.range_constexpr(2, 5):
                        most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, 1 << bit))
                    if lane < 4:
                        word = ring.amax.iterator + (n * MMA_N + lane * 2 + e)
                        cute.arch.atomic_max(word, most, sem="relaxed", scope="cta")

    @cute.jit
    def publish(self, tensors: Tensors, problem: Problem, ring: Ring, thread: Int32):
        """The magnitudes of this CTA's part of the product, to all."""
        if thread < problem.m:
            word = amax_word(tensors.workspace, thread)
            cute.arch.atomic_max(word, ring.amax[thread], sem="relaxed", scope="gpu")

    @cute.jit
    def finish_output(
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
        """``down + x`` of a pass, rounded once."""
        cut = self.config.down
        for j in cutlass.range_constexpr(cut.warp_blocks):
            block = warp + j * cut.row_warps
            if (block < span.count) & (warp < cut.row_warps):
                for half in cutlass.range_constexpr(2):
                    channel = (span.first + block) * BLOCK + lane // 4 + half * (BLOCK // 2)
                    for n in cutlass.range_constexpr(self.groups):
                        for e in cutlass.range_constexpr(2):
                            token = n * MMA_N + lane % 4 * 2 + e
                            if token < problem.m:
                                of_token = ring.scales[1][token]
                                value = acc[2 * half + e, n, j] * of_token * channels[half, j]
                                value = value + tensors.x[token, channel].to(Float32)
                                tensors.out[token, channel] = value.to(self.dtype)
