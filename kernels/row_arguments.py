"""What a row kernel is compiled with: tensors of any size with the alignment that it needs."""

from __future__ import annotations

from typing import Any

from cutlass import Float8E4M3FN, Float8E8M0FNU, Float32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .config import SCALE_BLOCK_BYTES
from .epilogue import DTYPES
from .row_config import RowConfig


def fake_arguments(config: RowConfig) -> list[object]:
    """Arguments to compile with: tensors of any size with the alignment the kernel needs."""
    rows, k = cute.sym_int(), cute.sym_int(divisibility=16)
    dtype = DTYPES[config.dtype]

    def matrix(element: Any, present: bool = True) -> object:
        if not present:
            return None
        stride = cute.sym_int64(divisibility=16 * 8 // element.width)
        return make_fake_tensor(element, (rows, k), (stride, 1), assumed_align=16)

    def vector(name: str | None) -> object:
        if name is None:
            return None
        return make_fake_tensor(DTYPES[name], (k,), (1,), assumed_align=16)

    return [
        _fake_x(config, dtype),
        vector(config.weight),
        vector(config.bias),
        matrix(dtype, config.residual),
        matrix(Float8E4M3FN),
        _fake_scales(config, rows),
        matrix(dtype, config.residual),
        matrix(dtype, config.keep),
        Float32(0.0),
        Float32(0.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


def _fake_x(config: RowConfig, dtype: Any) -> object:
    aligned = 16 * 8 // dtype.width
    if config.view == "matrix":
        shape = cute.sym_int(), cute.sym_int()
        strides = cute.sym_int64(divisibility=aligned), 1
        return make_fake_tensor(dtype, shape, strides, assumed_align=16)
    shape = tuple(cute.sym_int() for _ in range(4))
    if config.view == "heads":
        strides = (*(cute.sym_int64(divisibility=aligned) for _ in range(3)), 1)
        return make_fake_tensor(dtype, shape, strides, assumed_align=16)
    strides = tuple(cute.sym_int64() for _ in range(4))
    return make_fake_tensor(dtype, shape, strides, assumed_align=dtype.width // 8)


def _fake_scales(config: RowConfig, rows: object) -> object:
    if config.variant == "per_token":
        return make_fake_tensor(Float32, (rows,), (1,), assumed_align=4)
    if config.blocked:
        length = cute.sym_int64(divisibility=SCALE_BLOCK_BYTES)
        return make_fake_tensor(Float8E8M0FNU, (length,), (1,), assumed_align=16)
    shape, stride = (rows, cute.sym_int()), (cute.sym_int64(), 1)
    return make_fake_tensor(Float8E8M0FNU, shape, stride, assumed_align=1)
