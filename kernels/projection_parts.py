"""What the roles of a few-token projection share: tensors, shared memory, a CTA's channels."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .config import STAGE_ALIGNMENT, WARP_SIZE
from .mlp_config import BLOCK, MMA_WARPS, SLAB, UNIT_BYTES
from .own_rows import OwnCodes
from .projection_config import ROWS, ProjectionConfig


class Tensors(NamedTuple):
    """Global memory; a part that the configuration leaves out is None."""

    x: cute.Tensor  # (m, k)
    norm: Any  # (k,)
    weight_scales: cute.Tensor  # (n,)
    bias: Any  # (n,)
    residual: Any  # (m, n)
    codes: cute.Tensor  # (m, k): what was multiplied
    scales: cute.Tensor  # (m,)
    out: cute.Tensor  # (m, n)


class Problem(NamedTuple):
    """Sizes."""

    m: Int32
    n: Int32
    k: Int32
    eps: Float32
    inverse: Float32  # 1 / k


class Ring(NamedTuple):
    """Stages in shared memory, their barriers; the tokens; sums of the warps."""

    weights: cute.Tensor  # (rows, 128, where it begins, in blocks of 16 rows)
    full: cute.Pointer
    empty: cute.Pointer
    own: OwnCodes
    scales: cute.Tensor  # of every token
    sums: cute.Tensor


@cute.jit
def make_ring(
    weights: cpasync.TmaInfo, config: cutlass.Constexpr[ProjectionConfig], warp: Int32
) -> Ring:
    """Allocate everything; initialise the barriers."""
    smem = SmemAllocator()
    units = config.blocks * config.stages
    memory = smem.allocate_tensor(
        Float8E4M3FN,
        cute.make_layout((BLOCK, SLAB, units), stride=(SLAB, 1, UNIT_BYTES)),
        byte_alignment=STAGE_ALIGNMENT,
        swizzle=weights.smem_layout.inner,
    )
    # A stage begins at any of its blocks: their rows, seen from there.
    stages = cute.make_tensor(
        memory.iterator,
        cute.make_layout((BLOCK * config.blocks, SLAB, units), stride=(SLAB, 1, UNIT_BYTES)),
    )
    codes = smem.allocate_array(
        Int32, config.slabs * config.rows * SLAB // 4, byte_alignment=STAGE_ALIGNMENT
    )
    barriers = smem.allocate_array(Int64, 2 * config.stages)
    scales = smem.allocate_tensor(Float32, cute.make_layout(max(ROWS)))
    words = smem.allocate_tensor(Int32, cute.make_layout(config.row_words))
    count = MMA_WARPS * config.warp_sums * WARP_SIZE
    sums = smem.allocate_tensor(Float32, cute.make_layout(count))
    thread, _, _ = cute.arch.thread_idx()
    if thread < config.stages:
        cute.arch.mbarrier_init(barriers + thread, 1)
        # A slab is read by the warps that share its K.
        cute.arch.mbarrier_init(barriers + config.stages + thread, config.row_warps)
        cute.arch.mbarrier_init_fence()
    if warp == MMA_WARPS:
        cpasync.prefetch_descriptor(weights.atom)
    cute.arch.sync_threads()
    own = OwnCodes(codes.toint(), scales, words)
    return Ring(stages, barriers, barriers + config.stages, own, scales, sums)
