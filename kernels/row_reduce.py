"""Reductions over the threads of a row: one warp, or several through shared memory.

A sum is added up in an order that the shape of the row's cut fixes. Each reduction of a kernel has
its own words of shared memory, so that one barrier is enough for each.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cutlass_dsl import select_

from .config import WARP_SIZE


class RowThreads(NamedTuple):
    """Where a thread is in its row.

    Attributes:
        warps: of a row; a trace-time constant.
        first: this row's first word in the words of one reduction.
        warp, lane: of the thread, in the row and in the warp.
        barrier: the number of one for the row's threads alone; by default all of the CTA meet.
    """

    warps: int
    first: Int32
    warp: Int32
    lane: Int32
    barrier: int | None = None


@cute.jit
def row_max(value: Int32, words: cute.Tensor, threads: RowThreads) -> Int32:
    """The row's largest ``value``, in every thread."""
    value = cute.arch.warp_redux_sync(value, "max")
    if cutlass.const_expr(threads.warps > 1):
        value = _exchanged(value, words, threads, 32)
        value = cute.arch.warp_redux_sync(value, "max")
    return value


@cute.jit
def row_sum(value: Float32, words: cute.Tensor, threads: RowThreads) -> Float32:
    """The row's sum of ``value``, in every thread."""
    value = cute.arch.warp_reduction_sum(value)
    if cutlass.const_expr(threads.warps > 1):
        # Of groups of lanes, each of which has the sums of all warps.
        group = 1 << (threads.warps - 1).bit_length()
        value = _exchanged(value.bitcast(Int32), words, threads, group).bitcast(Float32)
        value = cute.arch.warp_reduction_sum(value, threads_in_group=group)
    return value


@cute.jit
def _exchanged(
    value: Int32, words: cute.Tensor, threads: RowThreads, group: cutlass.Constexpr
) -> Int32:
    """The value of warp ``lane % group``, or 0 if there is no such warp."""
    if threads.lane == 0:
        words[threads.first + threads.warp] = value
    if cutlass.const_expr(threads.barrier is None):
        cute.arch.sync_threads()
    else:
        cute.arch.barrier(barrier_id=threads.barrier, number_of_threads=WARP_SIZE * threads.warps)
    warp = threads.lane % group
    other = words[threads.first + cutlass.min(warp, Int32(threads.warps - 1))]
    return Int32(select_(warp < threads.warps, other, Int32(0)))
