"""The scales of one warpgroup's outputs, fetched under the main loop and left in shared memory.

The epilogue reads 32 and more scales a thread, where registers are full of accumulators; from
global memory, after the last MMA, that takes as long as several k-tiles. So each thread fetches a
few before the main loop, holds them, and puts them down behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from .config_sm90 import WARPGROUP
from .epilogue import EpilogueOperands

#: The first of the named barriers, one per warpgroup; 0 is the whole CTA's.
FIRST_BARRIER = 1


class Vector(NamedTuple):
    """A thread's part of ``count`` consecutive scales from ``first`` on."""

    values: cute.Tensor
    first: Int32


@cute.jit
def fetch(
    scales: cute.Tensor, first: Int32, count: cutlass.Constexpr, size: Int32, thread: Int32
) -> Vector:
    """Start to load scales ``first`` to ``first + count`` of ``size``, dealt out to a warpgroup."""
    values = cute.make_rmem_tensor(-(-count // WARPGROUP), Float32)
    for i in cutlass.range_constexpr(-(-count // WARPGROUP)):
        # Clamped: what is past the end belongs to outputs that are not stored.
        values[i] = scales[cutlass.min(first + i * WARPGROUP + thread, size - 1)]
    return Vector(values, first)


@cute.jit
def put_down(
    tokens: Vector,
    token_count: cutlass.Constexpr,
    channels: Vector,
    channel_count: cutlass.Constexpr,
    memory: cute.Pointer,
    operands: EpilogueOperands,
    group: Int32,
    thread: Int32,
) -> EpilogueOperands:
    """The operands with shared-memory scales in place of global ones, under the same indices.

    Args:
        memory: of this warpgroup, ``token_count + channel_count`` fp32.
    """
    barrier = FIRST_BARRIER + group
    # The epilogue of the last tile has read them.
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    _write(tokens, token_count, memory, thread)
    _write(channels, channel_count, memory + token_count, thread)
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
    everything = cute.make_layout(1 << 30)
    return EpilogueOperands(
        out=operands.out,
        out_scales=operands.out_scales,
        sx=cute.make_tensor(memory - tokens.first, everything),
        sw=cute.make_tensor(memory + (token_count - channels.first), everything),
        bias=operands.bias,
        residual=operands.residual,
    )


@cute.jit
def _write(vector: Vector, count: cutlass.Constexpr, memory: cute.Pointer, thread: Int32):
    target = cute.make_tensor(memory, cute.make_layout(count))
    for i in cutlass.range_constexpr(-(-count // WARPGROUP)):
        if i * WARPGROUP + thread < count:
            target[i * WARPGROUP + thread] = vector.values[i]
