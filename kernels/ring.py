"""The ring of shared-memory stages between producer and MMA warps, and all barriers of a CTA."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .config import SCALE_BLOCK_BYTES, STAGE_ALIGNMENT, GemmConfig
from .scheduler import Answers


class Loads(NamedTuple):
    """The TMA copies of a stage: codes of both operands; scales where the MMA reads them."""

    a: cpasync.TmaInfo
    b: cpasync.TmaInfo
    scales_a: Any  # cpasync.TmaInfo or None
    scales_b: Any


class Ring(NamedTuple):
    """The ring of stages in shared memory and its barriers."""

    a: cute.Tensor  # (rows of A, k, stages)
    b: cute.Tensor
    scales_a: Any  # (blocks, 128 words, stages) or None
    scales_b: Any
    full: cute.Pointer
    empty: cute.Pointer
    turn: Any  # a barrier per ping-pong group: its turn to multiply; or None
    answers: Any  # Answers of a dynamic schedule, or None


@cute.jit
def make_ring(
    loads: Loads,
    config: cutlass.Constexpr[GemmConfig],
    warp: Int32,
    sharers: cutlass.Constexpr = 1,
) -> Ring:
    """Allocate the stages and barriers; initialise the barriers.

    Args:
        sharers: CTAs of the cluster, all of whose MMA warps release each one's stages.
    """
    tile = config.tile
    smem = SmemAllocator()
    codes = [
        smem.allocate_tensor(
            Float8E4M3FN,
            load.smem_layout.outer,
            byte_alignment=STAGE_ALIGNMENT,
            swizzle=load.smem_layout.inner,
        )
        for load in (loads.a, loads.b)
    ]
    scales = [
        None
        if load is None
        else smem.allocate_tensor(Int32, load.smem_layout, byte_alignment=SCALE_BLOCK_BYTES)
        for load in (loads.scales_a, loads.scales_b)
    ]
    answer = smem.allocate_array(Int32, 4, byte_alignment=16) if config.dynamic else None
    # Barriers, and how many arrivals complete a phase of each.
    counts = [1] * tile.stages + [sharers * tile.group_warps] * tile.stages
    counts += [tile.group_warps] * tile.groups if tile.pingpong else []
    counts += [1, tile.mma_warps + 1] if config.dynamic else []
    barriers = smem.allocate_array(Int64, config.barriers)
    if warp == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_init(barriers + i, counts[i])
        # TMA, another proxy, signals these barriers: it must see them initialised.
        cute.arch.mbarrier_init_fence()
    elif warp == tile.mma_warps:
        for load in loads:
            if cutlass.const_expr(load is not None):
                cpasync.prefetch_descriptor(load.atom)
    if cutlass.const_expr(sharers == 1):
        cute.arch.sync_threads()
    else:
        # The others' copies and arrivals come to these barriers, too.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    others = barriers + 2 * tile.stages
    return Ring(
        codes[0],
        codes[1],
        scales[0],
        scales[1],
        full=barriers,
        empty=barriers + tile.stages,
        turn=others if tile.pingpong else None,
        answers=Answers(answer, others, others + 1) if config.dynamic else None,
    )


@cute.jit
def advance(stage: Int32, phase: Int32, stages: cutlass.Constexpr):
    """The next stage of the ring; a barrier's phase flips once per round."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase


@cute.jit
def skip(stage: Int32, phase: Int32, count: Int32, stages: cutlass.Constexpr):
    """The stage ``count`` further on."""
    stage = stage + count
    rounds = stage // stages
    return stage - rounds * stages, phase ^ (rounds & 1)
