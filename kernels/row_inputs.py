"""How a row kernel reads its rows: chunks of 8 elements, whatever the strides of x.

* ``matrix``: ``x[row, column]``, rows at one stride: one or two 16-byte loads a chunk;
* ``heads``: ``x[outer row, inner row, outer column, inner column]``, as attention leaves its output
  ``[B, H, S, D]`` (rows are B, S; columns H, D): the same loads, with D a multiple of 8;
* ``scattered``: the same four dimensions at any strides, element by element.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from .row_config import CHUNK
from .row_values import chunk_words

_BYTES_PER_ACCESS = 16


@cute.jit
def row_offset(x: cute.Tensor, row: Int32, view: cutlass.Constexpr) -> Int64:
    """Where a row of x begins, in elements. 64-bit: it passes 2^31 in large inputs."""
    if cutlass.const_expr(view == "matrix"):
        return Int64(row) * x.stride[0]
    inner = x.shape[1]
    return Int64(row // inner) * x.stride[0] + Int64(row % inner) * x.stride[1]


@cute.jit
def load_chunk(
    target: cute.Tensor, x: cute.Tensor, first: Int64, column: Int32, view: cutlass.Constexpr
):
    """Read the words of 8 elements of x, from ``column`` of the row that begins at ``first``."""
    if cutlass.const_expr(view == "matrix"):
        load_vector(target, x, first + column)
    elif cutlass.const_expr(view == "heads"):
        width = x.shape[3]
        load_vector(target, x, first + Int64(column // width) * x.stride[2] + column % width)
    else:
        width = x.shape[3]
        elements = cute.recast_tensor(target, x.element_type)
        for i in cutlass.range_constexpr(CHUNK):
            outer, inner = (column + i) // width, (column + i) % width
            offset = Int64(outer) * x.stride[2] + Int64(inner) * x.stride[3]
            source = cute.make_tensor(x.iterator + (first + offset), cute.make_layout(1))
            elements[i] = source[0]


@cute.jit
def load_vector(words: cute.Tensor, source: cute.Tensor, offset: Int64):
    """Read the words of 8 consecutive, 16-byte aligned elements from ``offset`` on."""
    cute.autovec_copy(_vector(source, offset, _BYTES_PER_ACCESS), words)


@cute.jit
def store_vector(words: cute.Tensor, target: cute.Tensor, offset: Int64):
    """Write the words of 8 elements of 16 bits or more to ``offset`` on."""
    cute.autovec_copy(words, _vector(target, offset, _BYTES_PER_ACCESS))


@cute.jit
def store_codes(words: cute.Tensor, codes: cute.Tensor, offset: Int64):
    """Write the two words of 8 codes to element ``offset`` of ``codes``."""
    cute.autovec_copy(words, _vector(codes, offset, CHUNK))


@cute.jit
def _vector(tensor: cute.Tensor, offset: Int64, align: cutlass.Constexpr) -> cute.Tensor:
    """The words of 8 elements in global memory."""
    pointer = cute.make_ptr(
        Int32,
        (tensor.iterator + offset).toint(),
        cute.AddressSpace.gmem,
        assumed_align=align,
    )
    return cute.make_tensor(pointer, cute.make_layout(chunk_words(tensor.element_type)))
