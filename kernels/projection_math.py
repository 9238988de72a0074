"""What the MMA warps of a few-token projection do: the sums, and what is made of them.

Weights are the MMA's A operand, tokens its B: a lane has, of a block of 16 channels, those numbered
``lane/4`` and ``lane/4 + 8``, and of every 8 tokens two.

The warps share K: each has slabs of its own, whose sums are added up through shared memory in the
order of the warps. There a sum is a *slot* of the lanes, and the warps take slots in turn: all of
them add up and write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, cute

from .barriers import wait
from .config import MMA_K, MMA_N, WARP_SIZE
from .epilogue import DTYPES
from .mlp_config import BLOCK, MMA_WARPS, SLAB, UNIT_BYTES
from .mlp_parts import sync_mma_warps
from .mma import UNIT_SCALES, Instruction, mma_m16n8k32, unit_scales
from .projection_config import ProjectionConfig
from .projection_parts import Problem, Ring, Tensors
from .registers import kept
from .ring import skip
from .smem import fragment_address, line_address, load_fragments
from .weight_blocks import Span


class Outputs(NamedTuple):
    """What a lane writes at the end of a pass: registers, one for each of its slots."""

    tokens: cute.Tensor
    channels: cute.Tensor  # -1 where there is nothing to write
    scales: cute.Tensor  # of channels
    bias: Any
    residual: Any


class ProjectionMath:
    """Specialised by :class:`ProjectionConfig` and the MMA of the target."""

    def __init__(self, config: ProjectionConfig, instruction: Instruction):
        self.config, self.instruction = config, instruction
        self.dtype = DTYPES[config.dtype]
        #: Sums that leave the warps which have them, and how many of them a warp takes.
        self.slots = config.row_warps * config.warp_sums
        self.own_slots = -(-self.slots // MMA_WARPS)
        #: K-blocks that are loaded together: all of a slab, if there are registers for it.
        self.together = SLAB // MMA_K if config.groups == 1 else 2

    @cute.jit
    def registers(self) -> cute.Tensor:
        """A lane's sums: of channels and tokens, of groups of 8 tokens, of blocks."""
        return cute.make_rmem_tensor((4, self.config.groups, self.config.warp_blocks), Float32)

    @cute.jit
    def multiply(
        self,
        acc: cute.Tensor,
        ring: Ring,
        codes: Int32,
        blocks: Int32,
        number: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """One pass over this warp's slabs.

        Args:
            codes: address of the tokens'.
            blocks: of the pass, the ``number``-th.
        """
        acc.fill(0.0)
        config = self.config
        row_warp, k_warp = warp % config.row_warps, warp // config.row_warps
        # Of all slabs of all passes, a warp has every so many: then a stage is always the same
        # warps', who cannot take an earlier phase of its barrier for the one that they wait for.
        before = number * config.slabs
        first = (before + config.k_warps - 1 - k_warp) // config.k_warps * config.k_warps + k_warp
        stage, phase = skip(Int32(0), Int32(0), first, config.stages)
        a = fragment_address(ring.weights, SLAB, Int32(0), lane % 16, lane // 16)
        b = self._token_address(codes, lane)
        slab = first - before
        for _ in cutlass.range(cute.ceil_div(config.slabs - slab, config.k_warps), unroll=1):
            wait(ring.full + stage, phase)
            self._multiply_slab(
                acc,
                a + stage * self.config.stage_bytes,
                b + slab * (self.config.rows * SLAB),
                blocks,
                row_warp,
            )
            # All lanes have read before one of them says so.
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.empty + stage)
            stage, phase = skip(stage, phase, Int32(self.config.k_warps), self.config.stages)
            slab += self.config.k_warps

    @cute.jit
    def _token_address(self, codes: Int32, lane: Int32) -> Int32:
        """What this lane feeds to ``ldmatrix`` of slab 0: of 16 tokens, or of 8 twice. Where there
        is room for fewer, the same ones again: what comes of them is not written.
        """
        row, half = lane % MMA_N, lane // MMA_N % 2
        if cutlass.const_expr(self.config.groups > 1):
            row = lane // 16 * MMA_N + row
        row = row % self.config.rows
        return line_address(codes, SLAB, row, half)

    @cute.jit
    def _multiply_slab(self, acc: cute.Tensor, a: Int32, b: Int32, blocks: Int32, row_warp: Int32):
        unit = unit_scales(self.instruction, kept(UNIT_SCALES))
        config, steps = self.config, self.together
        for first in cutlass.range_constexpr(0, SLAB // MMA_K, steps):
            shape = (16, -(-config.groups // 2), steps)
            tokens = cute.make_rmem_tensor(shape, Float8E4M3FN)
            for i in cutlass.range_constexpr(steps):
                load_fragments(tokens[None, None, i], b, first + i, SLAB)
            halves = cute.logical_divide(tokens, (8, None, None))
            for j in cutlass.range_constexpr(config.warp_blocks):
                block = row_warp + j * config.row_warps
                if block < blocks:
                    rows = cute.make_rmem_tensor((16, 1, steps), Float8E4M3FN)
                    for i in cutlass.range_constexpr(steps):
                        load_fragments(rows[None, None, i], a + block * UNIT_BYTES, first + i, SLAB)
                    for i in cutlass.range_constexpr(steps):
                        for n in cutlass.range_constexpr(self.config.groups):
                            mma_m16n8k32(
                                self.instruction,
                                rows[None, 0, i],
                                halves[(None, n % 2), n // 2, i],
                                acc[None, n, j],
                                unit,
                                unit,
                            )

    # ------------------------------------------------------------------ outputs

    @cute.jit
    def outputs(
        self, tensors: Tensors, problem: Problem, span: Span, warp: Int32, lane: Int32
    ) -> Outputs:
        """Where a lane's outputs of a pass go, and what they are made with; read before they are
        needed.
        """
        count = self.own_slots
        tokens, channels = (cute.make_rmem_tensor(count, Int32) for _ in range(2))
        scales, bias, residual = (cute.make_rmem_tensor(count, Float32) for _ in range(3))
        for i in cutlass.range_constexpr(count):
            slot = warp + i * MMA_WARPS
            row_warp, number = slot // self.config.warp_sums, slot % self.config.warp_sums
            block = row_warp + number // (4 * self.config.groups) * self.config.row_warps
            group, part = number // 4 % self.config.groups, number % 4
            token = group * MMA_N + lane % 4 * 2 + part % 2
            channel = (span.first + block) * BLOCK + lane // 4 + part // 2 * (BLOCK // 2)
            tokens[i], channels[i], scales[i] = token, Int32(-1), Float32(0.0)
            exists = (slot < self.slots) & (block < span.count)
            if exists & (token < problem.m) & (channel < problem.n):
                channels[i] = channel
                scales[i] = tensors.weight_scales[channel]
                if cutlass.const_expr(self.config.bias is not None):
                    bias[i] = tensors.bias[channel].to(Float32)
                if cutlass.const_expr(self.config.residual):
                    residual[i] = tensors.residual[token, channel].to(Float32)
        return Outputs(tokens, channels, scales, bias, residual)

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,
        outputs: Outputs,
        tensors: Tensors,
        ring: Ring,
        warp: Int32,
        lane: Int32,
    ):
        """Add up, apply scales, bias and residual, round once."""
        count = self.config.warp_sums
        flat = cute.make_tensor(acc.iterator, cute.make_layout(count))
        # What the pass before left has been read.
        sync_mma_warps()
        for i in cutlass.range_constexpr(count):
            ring.sums[(warp * count + i) * WARP_SIZE + lane] = flat[i]
        sync_mma_warps()
        for i in cutlass.range_constexpr(self.own_slots):
            if outputs.channels[i] >= 0:
                slot = warp + i * MMA_WARPS
                # A slot of the same number, of every warp with the same blocks.
                step = self.config.row_warps * count
                value = Float32(0.0)
                for other in cutlass.range_constexpr(self.config.k_warps):
                    part = ring.sums[(slot + other * step) * WARP_SIZE + lane]
                    value = part if other == 0 else value + part
                token, channel = outputs.tokens[i], outputs.channels[i]
                value = value * ring.scales[token] * outputs.scales[i]
                if cutlass.const_expr(self.config.bias is not None):
                    value = value + outputs.bias[i]
                if cutlass.const_expr(self.config.residual):
                    value = value + outputs.residual[i]
                tensors.out[token, channel] = value.to(self.dtype)
