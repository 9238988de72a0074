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


class Exchange(NamedTuple):
    """Where the warps of several rows side by side, each thread with several rows, meet.

    Attributes:
        words: Int32, ``(warps of the CTA that take part, rows of a thread)``.
        warps: of a row; all_warps: that take part; barrier: the number of one for them alone.
            Trace-time constants.
        thread: of those that take part.
    """

    words: cute.Tensor
    warps: int
    all_warps: int
    barrier: int
    thread: Int32


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


@cute.jit
def all_max(values: cute.Tensor, exchange: Exchange):
    """``row_max`` of each of a thread's rows, in place, with one barrier for all of them."""
    count = cute.size(values)
    for i in cutlass.range_constexpr(count):
        values[i] = cute.arch.warp_redux_sync(values[i], "max")
    if cutlass.const_expr(exchange.warps > 1):
        _exchange_all(values, exchange, 32)
        for i in cutlass.range_constexpr(count):
            values[i] = cute.arch.warp_redux_sync(values[i], "max")


@cute.jit
def all_sums(values: cute.Tensor, exchange: Exchange):
    """``row_sum`` of each of a thread's rows, in place and in the same order."""
    count = cute.size(values)
    for i in cutlass.range_constexpr(count):
        values[i] = cute.arch.warp_reduction_sum(values[i])
    if cutlass.const_expr(exchange.warps > 1):
        group = 1 << (exchange.warps - 1).bit_length()
        _exchange_all(cute.recast_tensor(values, Int32), exchange, group)
        for i in cutlass.range_constexpr(count):
            values[i] = cute.arch.warp_reduction_sum(values[i], threads_in_group=group)


@cute.jit
def _exchange_all(values: cute.Tensor, exchange: Exchange, group: cutlass.Constexpr):
    """``_exchanged`` of several rows."""
    warp, lane = exchange.thread // WARP_SIZE, exchange.thread % WARP_SIZE
    count = cute.size(values)
    if lane == 0:
        for i in cutlass.range_constexpr(count):
            exchange.words[warp, i] = values[i]
    cute.arch.barrier(barrier_id=exchange.barrier, number_of_threads=WARP_SIZE * exchange.all_warps)
    # The first warp of this one's row.
    first, other = warp // exchange.warps * exchange.warps, lane % group
    for i in cutlass.range_constexpr(count):
        at = first + cutlass.min(other, Int32(exchange.warps - 1))
        # Warps that have no row read something that is there.
        word = exchange.words[cutlass.min(at, Int32(exchange.all_warps - 1)), i]
        values[i] = Int32(select_(other < exchange.warps, word, Int32(0)))
