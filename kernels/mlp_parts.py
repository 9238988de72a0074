"""What the roles of the MLP kernel share: tensors, the ring, and the walk through the work.

Both GEMMs are one sequence of stages: a CTA's blocks of a weight in passes (``weight_blocks.py``),
each by steps of as many slabs (128) of K as a stage has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .config import STAGE_ALIGNMENT, WARP_SIZE
from .mlp_config import (
    ANNOUNCED_WORD,
    BLOCK,
    COUNTER_STEP,
    MMA_THREADS,
    MMA_WARPS,
    SLAB,
    UNIT_BYTES,
    MlpConfig,
)

#: The named barrier of the warps that multiply.
MMA_BARRIER = 1


class Tensors(NamedTuple):
    """Global memory. The first index of pairs is the GEMM: gate|up, then down."""

    x: cute.Tensor  # (m, hidden): normalised, and added at the end
    norm: cute.Tensor  # (hidden,)
    codes: Any  # pair of (m, k): what each GEMM reads
    scales: Any  # pair of (m,)
    weight_scales: Any  # pair of (n,)
    product: cute.Tensor  # (m, ffn)
    out: cute.Tensor  # (m, hidden)
    workspace: cute.Tensor


class Loads(NamedTuple):
    """TMA copies of a slab of weights (all blocks of a pass), and of tokens; pairs."""

    weights: Any
    tokens: Any


class Problem(NamedTuple):
    """Sizes."""

    m: Int32
    hidden: Int32
    ffn: Int32
    eps: Float32
    inverse: Float32  # 1 / hidden


class Ring(NamedTuple):
    """Stages in shared memory, their barriers, and what the warps tell each other."""

    weights: Any  # pair of (rows, 128, where it begins, in blocks of 16 rows)
    tokens: Any  # pair of (tokens, 128, (slabs, stages))
    own: Any  # address of this CTA's own codes, or None
    full: cute.Pointer  # weights
    filled: Any  # tokens, or None
    empty: cute.Pointer
    words: Any  # of reductions
    amax: cute.Tensor  # of this CTA's part of every token
    scales: Any  # pair: of every token, for each GEMM
    sums: Any  # fp32, or None


@cute.jit
def make_ring(loads: Loads, config: cutlass.Constexpr[MlpConfig], warp: Int32) -> Ring:
    """Allocate everything; initialise the barriers."""
    smem = SmemAllocator()
    tma = loads.weights[0].smem_layout
    own = None
    if cutlass.const_expr(config.rows > 0):
        own = smem.allocate_array(Float8E4M3FN, config.own_bytes, byte_alignment=STAGE_ALIGNMENT)
        own = own.toint()
    count = config.units * config.stages
    memory = smem.allocate_tensor(
        Float8E4M3FN,
        cute.make_layout((BLOCK, SLAB, count), stride=(SLAB, 1, UNIT_BYTES)),
        byte_alignment=STAGE_ALIGNMENT,
        swizzle=tma.inner,
    )
    # A copy may begin at any block: of either GEMM's rows, seen from there. Tokens lie behind them.
    weights = [
        cute.make_tensor(
            memory.iterator,
            cute.make_layout((BLOCK * cut.blocks, SLAB, count), stride=(SLAB, 1, UNIT_BYTES)),
        )
        for cut in config.cuts
    ]
    box = config.tokens * SLAB
    tokens = [
        cute.make_tensor(
            memory.iterator + cut.units * UNIT_BYTES,
            cute.make_layout(
                (config.tokens, SLAB, (cut.slabs, config.stages)),
                stride=(SLAB, 1, (box, config.stage_bytes)),
            ),
        )
        for cut in config.cuts
    ]
    barriers = smem.allocate_array(Int64, config.barriers * config.stages)
    words = smem.allocate_tensor(Int32, cute.make_layout(2 * MMA_WARPS * max(1, config.rows)))
    amax = smem.allocate_tensor(Int32, cute.make_layout(config.tokens))
    scales = [smem.allocate_tensor(Float32, cute.make_layout(config.tokens)) for _ in range(2)]
    sums = None
    if cutlass.const_expr(config.sum_words > 0):
        sums = smem.allocate_tensor(Float32, cute.make_layout(config.sum_words))
    if warp == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(config.stages):
                # One warp loads weights, one tokens; all MMA warps release a stage.
                cute.arch.mbarrier_init(barriers + i, 1)
                cute.arch.mbarrier_init(barriers + config.stages + i, MMA_WARPS)
                if cutlass.const_expr(config.barriers > 2):
                    cute.arch.mbarrier_init(barriers + 2 * config.stages + i, 1)
        cute.arch.mbarrier_init_fence()
    elif warp == MMA_WARPS:
        for load in (*loads.weights, *(load for load in loads.tokens if load is not None)):
            cpasync.prefetch_descriptor(load.atom)
    thread, _, _ = cute.arch.thread_idx()
    if thread < config.tokens:
        amax[thread] = Int32(0)
    cute.arch.sync_threads()
    empty, filled = barriers + config.stages, None
    if cutlass.const_expr(config.barriers > 2):
        filled = barriers + 2 * config.stages
    return Ring(weights, tokens, own, barriers, filled, empty, words, amax, scales, sums)


@cute.jit
def steps_of(k: Int32, cut: cutlass.Constexpr) -> Int32:
    """Stages of a pass."""
    return cute.ceil_div(k, SLAB * cut.slabs)


def sizes_of(problem: Problem, gemm: int) -> tuple[Int32, Int32]:
    """Rows and K of a weight. Python, run at trace time."""
    if gemm == 0:
        return problem.ffn * 2, problem.hidden
    return problem.hidden, problem.ffn


@cute.jit
def counter(workspace: cute.Tensor, number: cutlass.Constexpr) -> cute.Pointer:
    """A counter of the grid."""
    return workspace.iterator + number * COUNTER_STEP


@cute.jit
def announced(workspace: cute.Tensor, byte: Int32) -> Int64:
    """Address of a byte of what CTAs announce to each other."""
    return (workspace.iterator + ANNOUNCED_WORD).toint() + byte


@cute.jit
def sync_mma_warps():
    """All warps that multiply, and no others."""
    cute.arch.barrier(barrier_id=MMA_BARRIER, number_of_threads=MMA_THREADS)


@cute.jit
def place() -> Any:
    """Warp and lane of a thread."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    thread, _, _ = cute.arch.thread_idx()
    return warp, thread % WARP_SIZE, thread
