"""What the parts of a row kernel hand each other: its tensors, a thread's place, statistics."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from .row_config import CHUNK


class Operands(NamedTuple):
    """Global tensors; a part that the configuration leaves out is None."""

    x: cute.Tensor  # (rows, k or 2k); or (rows, rows, columns, columns)
    weight: Any  # (k,)
    bias: Any  # (k,)
    residual: Any  # (rows, k)
    codes: cute.Tensor  # (rows, k)
    scales: cute.Tensor  # (rows,), (rows, k / 32) or blocked
    hidden: Any  # (rows, k): x + residual
    kept: Any  # (rows, k): what is quantised


class Row(NamedTuple):
    """This thread's row: whether there is one, its place in it, and its length in elements."""

    index: Int32
    inside: Boolean
    thread: Int32
    first: Int64
    k: Int32


class Norm(NamedTuple):
    """A row's statistics; 1 / k; what is added to the mean square, and to the weight."""

    mean: Float32
    rstd: Float32
    inverse: Float32
    eps: Float32
    offset: Float32


@cute.jit
def chunk_of(row: Row, panel: Int32, number: cutlass.Constexpr, shape: cutlass.Constexpr):
    """The number in the row of a thread's chunk, and whether there is such a one."""
    chunk = (panel * shape.chunks + number) * shape.threads + row.thread
    inside = row.inside
    if cutlass.const_expr(not shape.full):
        inside = inside & (chunk * CHUNK < row.k)
    return chunk, inside


@cute.jit
def panels_of(row: Row, shape: cutlass.Constexpr) -> Int32:
    """How many times a row that is not held fills the registers."""
    return cute.ceil_div(row.k, shape.elements)
