"""The ring of shared-memory stages between producer and MMA warps, and its barriers."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .config import SCALE_BLOCK_BYTES, STAGE_ALIGNMENT


class Loads(NamedTuple):
    """The TMA copies of a stage: codes of both operands; scales where the MMA reads them."""

    a: cpasync.TmaInfo
    b: cpasync.TmaInfo
    scales_a: Any  # cpasync.TmaInfo or None
    scales_b: Any


class Ring(NamedTuple):
    """The ring of stages in shared memory and its barriers."""

    a: cute.Tensor  # (tile m, tile k, stages)
    b: cute.Tensor
    scales_a: Any  # (blocks, 128 words, stages) or None
    scales_b: Any
    full: cute.Pointer
    empty: cute.Pointer


@cute.jit
def make_ring(loads: Loads, tile: cutlass.Constexpr, warp: Int32) -> Ring:
    """Allocate the stages and barriers; initialise the barriers."""
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
        for load in loads:
            if cutlass.const_expr(load is not None):
                cpasync.prefetch_descriptor(load.atom)
    cute.arch.sync_threads()
    return Ring(codes[0], codes[1], scales[0], scales[1], full, empty)


@cute.jit
def advance(stage: Int32, phase: Int32, stages: cutlass.Constexpr):
    """The next stage of the ring; a barrier's phase flips once per round."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase
