"""A projection of few tokens in one launch: normalise, quantise, multiply, add.

``out = (quantised(rmsnorm(x) or x) @ weight.T) * scales + bias + residual``, in e4m3, per token x
per channel: q|k|v of a decoder layer, or the projection of attention's output.

Every CTA normalises and quantises all tokens for itself, into its own shared memory
(``own_rows.py``), and multiplies them with some of the channels, all of K. No CTA waits for
another. Meanwhile the weights are on their way, each read once, through a ring of stages that holds
most of what a CTA reads in all: the tokens are ready before the weights have come.

Warp roles
    =======  =====  =======================  ==========================  ====================
    role     warps  waits on                 arrives on                  of a stage
    =======  =====  =======================  ==========================  ====================
    math     0-7    full[stage]              empty[stage]                1 per warp beside it
    weights  8      empty[stage]             full[stage] (+ tx bytes)    1
    =======  =====  =======================  ==========================  ====================

Constraints: M at most ``ProjectionConfig.rows``; K a multiple of 16, as the slabs say; N a multiple
of 8; the codes of M rows fit into shared memory beside the ring.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float8E4M3FN, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from .arguments import matrix, vector
from .barriers import wait
from .config import WARP_SIZE
from .epilogue import DTYPES
from .mlp_config import BLOCK, MMA_WARPS, SLAB
from .mlp_parts import MMA_BARRIER, place, sync_mma_warps
from .mma import Instruction
from .own_rows import OwnRows
from .prefetch import tma_prefetch
from .projection_config import MOST_CHUNKS, WARPS, ProjectionConfig
from .projection_math import ProjectionMath
from .projection_parts import Problem, Ring, Tensors, make_ring
from .ring import advance
from .row_parts import Norm, Operands
from .smem import tma_load, tma_load_atom
from .weight_blocks import boxes_of, pass_of, passes_of, span_of


class Projection:
    """One specialisation of the kernel: a :class:`ProjectionConfig` and the MMA of the target."""

    def __init__(self, config: ProjectionConfig, instruction: Instruction):
        self.config = config.check()
        self.rows = OwnRows(
            config.row_config, config.rows, MMA_WARPS, MMA_BARRIER, most=MOST_CHUNKS
        )
        self.math = ProjectionMath(config, instruction)

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        norm: Any,
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        bias: Any,
        residual: Any,
        codes: cute.Tensor,
        scales: cute.Tensor,
        out: cute.Tensor,
        eps: Float32,
        ctas: Int32,
        stream: CUstream,
    ):
        """Launch on ``stream``; tensors as in ``fake_arguments``."""
        config = self.config
        weights = tma_load_atom(weight, BLOCK * config.blocks, SLAB, 1)
        tensors = Tensors(x, norm, weight_scales, bias, residual, codes, scales, out)
        m, k = x.shape
        problem = Problem(m, weight.shape[0], k, eps, Float32(1.0) / k.to(Float32))
        blocks = cute.ceil_div(weight.shape[0], BLOCK)
        self.kernel(weights, tensors, problem).launch(
            grid=(cutlass.min(ctas, blocks), 1, 1),
            block=(WARP_SIZE * WARPS, 1, 1),
            smem=config.smem_bytes,
            min_blocks_per_mp=1,
            use_pdl=config.pdl,
            stream=stream,
        )

    # ------------------------------------------------------------------ device

    @cute.kernel
    def kernel(self, weights: cpasync.TmaInfo, tensors: Tensors, problem: Problem):
        warp, lane, thread = place()
        ring = make_ring(weights, self.config, warp)
        if cutlass.const_expr(self.config.pdl):
            if warp == MMA_WARPS:
                self.prefetch_weights(weights, problem, ring)
            # Nothing that an earlier kernel wrote, or still reads, is touched before this.
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if warp == MMA_WARPS:
            self.load_weights(weights, problem, ring)
        else:
            self.compute(tensors, problem, ring, warp, lane, thread)

    @cute.jit
    def prefetch_weights(self, weights: cpasync.TmaInfo, problem: Problem, ring: Ring):
        """One warp: the first stages to L2, while the kernel before still runs.

        Not yet to shared memory: should it be that kernel which writes them, L2 has what it wrote.
        """
        span = span_of(problem.n)
        part = pass_of(span, Int32(0), self.config.blocks)
        tiles = boxes_of(weights, part.first, self.config.blocks)
        for slab in cutlass.range(self.config.early, unroll=1):
            tma_prefetch(weights, tiles[None, None, slab], ring.weights[None, None, 0])

    @cute.jit
    def load_weights(self, weights: cpasync.TmaInfo, problem: Problem, ring: Ring):
        """One warp: every slab of every pass, as soon as its stage is free."""
        span = span_of(problem.n)
        # A fresh barrier counts as having completed phase 1.
        stage, phase = Int32(0), Int32(1)
        for number in cutlass.range(passes_of(span, self.config.blocks), unroll=1):
            part = pass_of(span, number, self.config.blocks)
            tiles = boxes_of(weights, part.first, self.config.blocks)
            for slab in cutlass.range(self.config.slabs, unroll=1):
                wait(ring.empty + stage, phase)
                full = ring.full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.config.stage_bytes)
                target = ring.weights[None, None, stage * self.config.blocks]
                tma_load(weights, tiles[None, None, slab], target, full)
                stage, phase = advance(stage, phase, self.config.stages)

    @cute.jit
    def compute(
        self,
        tensors: Tensors,
        problem: Problem,
        ring: Ring,
        warp: Int32,
        lane: Int32,
        thread: Int32,
    ):
        """Eight warps: normalise and quantise, multiply, finish."""
        span = span_of(problem.n)
        acc = self.math.registers()
        norm = Norm(Float32(0.0), Float32(1.0), problem.inverse, problem.eps, Float32(0.0))
        operands = Operands(
            tensors.x, tensors.norm, None, None, tensors.codes, tensors.scales, None, None
        )
        self.rows.quantise(
            operands, ring.own, problem.m, problem.k, Int32(self.config.slabs), norm, thread
        )
        sync_mma_warps()
        for number in cutlass.range(passes_of(span, self.config.blocks), unroll=1):
            part = pass_of(span, number, self.config.blocks)
            outputs = self.math.outputs(tensors, problem, part, warp, lane)
            self.math.multiply(acc, ring, ring.own.address, part.count, number, warp, lane)
            self.math.finish(acc, outputs, tensors, ring, warp, lane)


def fake_arguments(config: ProjectionConfig) -> list[object]:
    """Arguments to compile with: any sizes, contiguous rows, 16-byte aligned."""
    m = cute.sym_int()
    k, n = cute.sym_int(divisibility=16), cute.sym_int(divisibility=8)
    dtype = DTYPES[config.dtype]

    def vector_of(name: str | None, count: object, *, aligned: bool = False) -> object:
        return vector(None if name is None else DTYPES[name], count, aligned=aligned)

    return [
        matrix(dtype, m, k),  # x
        vector_of(config.weight, k, aligned=True),
        matrix(Float8E4M3FN, n, k),
        vector(Float32, n),
        vector_of(config.bias, n),
        matrix(dtype, m, n) if config.residual else None,
        matrix(Float8E4M3FN, m, k),  # codes
        vector(Float32, m),
        matrix(dtype, m, n),  # out
        Float32(0.0),
        Int32(1),  # ctas
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


def make(config: ProjectionConfig, target: str) -> tuple[Projection, list[object]]:
    """The kernel for ``target``, and what to compile it with."""
    return Projection(config, Instruction.of(target)), fake_arguments(config)
