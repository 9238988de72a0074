"""What a row kernel is compiled with: tensors of any size with the alignment that it needs."""

from __future__ import annotations

from typing import Any

from cutlass import Float8E4M3FN, Float8E8M0FNU, Float32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .arguments import ALIGNED, blocked_scales, matrix, row_stride, vector
from .epilogue import DTYPES
from .row_config import RowConfig


def fake_arguments(config: RowConfig) -> list[object]:
    """Arguments to compile with: tensors of any size with the alignment the kernel needs."""
    rows, k = cute.sym_int(), cute.sym_int(divisibility=16)
    dtype = DTYPES[config.dtype]

    def rows_of(element: Any, present: bool = True) -> object:
        return matrix(element, rows, k) if present else None

    def columns_of(name: str | None) -> object:
        return vector(None if name is None else DTYPES[name], k, aligned=True)

    return [
        _fake_x(config, dtype),
        columns_of(config.weight),
        columns_of(config.bias),
        rows_of(dtype, config.residual),
        rows_of(Float8E4M3FN),
        _fake_scales(config, rows),
        rows_of(dtype, config.residual),
        rows_of(dtype, config.keep),
        Float32(0.0),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


def _fake_x(config: RowConfig, dtype: Any) -> object:
    if config.view == "matrix":
        return matrix(dtype, cute.sym_int(), cute.sym_int())
    shape = tuple(cute.sym_int() for _ in range(4))
    if config.view == "heads":
        strides = (*(row_stride(dtype) for _ in range(3)), 1)
        return make_fake_tensor(dtype, shape, strides, assumed_align=ALIGNED)
    strides = tuple(cute.sym_int64() for _ in range(4))
    return make_fake_tensor(dtype, shape, strides, assumed_align=dtype.width // 8)


def _fake_scales(config: RowConfig, rows: object) -> object:
    if config.variant == "per_token":
        return vector(Float32, rows)
    if config.blocked:
        return blocked_scales()
    shape, stride = (rows, cute.sym_int()), (cute.sym_int64(), 1)
    return make_fake_tensor(Float8E8M0FNU, shape, stride, assumed_align=1)
