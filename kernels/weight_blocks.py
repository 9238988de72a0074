"""A weight by blocks of 16 rows: which of them a CTA has, and the passes that it takes them in.

A pass is of as many blocks as a stage has room for, at most, and goes over K once.
"""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from .mlp_config import BLOCK, SLAB


class Span(NamedTuple):
    """The blocks of a CTA, or of one of its passes."""

    first: Int32
    count: Int32


@cute.jit
def span_of(rows: Int32) -> Span:
    """This CTA's blocks of a weight of so many rows: neighbours, one more or less than others."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return _part(Span(Int32(0), cute.ceil_div(rows, BLOCK)), cta, ctas)


@cute.jit
def passes_of(span: Span, most: int) -> Int32:
    """How many passes a CTA makes, with ``most`` blocks in one."""
    return cute.ceil_div(span.count, most)


@cute.jit
def pass_of(span: Span, number: Int32, most: int) -> Span:
    """The blocks of one pass: all passes have as many, but for one."""
    return _part(span, number, passes_of(span, most))


@cute.jit
def _part(span: Span, number: Int32, parts: Int32) -> Span:
    first = span.count * number // parts
    return Span(span.first + first, span.count * (number + 1) // parts - first)


@cute.jit
def boxes_of(weights: cpasync.TmaInfo, block: Int32, most: int) -> cute.Tensor:
    """What TMA copies for a pass that begins at a block: slabs along K, of ``most`` blocks each.

    What is too much is the next CTA's, who reads it at about the same time.
    """
    rows = cute.domain_offset((block * BLOCK, 0), weights.tma_tensor)
    return cute.local_tile(rows, (BLOCK * most, SLAB), (0, None))
