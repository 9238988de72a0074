"""Tensors that stand in for arguments while a kernel is compiled: of any size, with the alignment
that the kernel needs. The compiled function checks what it is called with against them.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float8E8M0FNU, cute
from cutlass.cute.runtime import make_fake_tensor

from .config import SCALE_BLOCK_BYTES

#: Bytes that addresses and row strides are multiples of.
ALIGNED = 16


def row_stride(element: Any) -> object:
    """Any that keeps rows aligned, in elements."""
    return cute.sym_int64(divisibility=8 * ALIGNED // element.width)


def matrix(element: Any, rows: object, columns: object) -> object:
    """Rows of consecutive elements, each of them aligned."""
    shape, strides = (rows, columns), (row_stride(element), 1)
    return make_fake_tensor(element, shape, strides, assumed_align=ALIGNED)


def vector(element: Any, count: object, *, stride: object = 1, aligned: bool = False) -> object:
    """Elements, or None where there is no element type.

    Args:
        aligned: to 16 bytes; else to an element.
    """
    if element is None:
        return None
    align = ALIGNED if aligned else element.width // 8
    return make_fake_tensor(element, (count,), (stride,), assumed_align=align)


def blocked_scales() -> object:
    """e8m0 scales in the blocked layout; how many is the caller's to check."""
    length = cute.sym_int64(divisibility=SCALE_BLOCK_BYTES)
    return vector(Float8E8M0FNU, length, aligned=True)
