"""``torch.library`` ops: what ``torch.compile``, ``torch.export`` and dispatch modes see of a GEMM.

Three ops, because a schema has one kind of result: ``gemm`` (functional), ``gemm_out`` (writes
``out``) and ``gemm_quantized`` (MXFP8 output: codes and scales). They take uint8 views of float8
tensors: schema checks do arithmetic on their arguments, which float8 has not. The scales' dtype
tells the variant: uint8 are e8m0 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_fp8.plan import run_gemm
from cute_fp8.problem import E4M3, E8M0, batch_size, check_gemm
from cute_fp8.scales import TILE_COLS, TILE_ROWS

_FLOAT8 = (E4M3, E8M0)


def as_bytes(tensor: Tensor) -> Tensor:
    """A uint8 view of a float8 tensor; any other as it is."""
    return tensor.view(torch.uint8) if tensor.dtype in _FLOAT8 else tensor


def _codes(tensor: Tensor) -> Tensor:
    return tensor.view(E4M3) if tensor.dtype is torch.uint8 else tensor


def _scale(tensor: Tensor) -> Tensor:
    return tensor.view(E8M0) if tensor.dtype is torch.uint8 else tensor


@torch.library.custom_op("cute_fp8::gemm", mutates_args=())
def gemm(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """``cute_fp8.gemm`` on uint8 codes; see there."""
    y = run_gemm(
        _codes(xq),
        _scale(sx),
        _codes(wq),
        _scale(sw),
        bias,
        residual,
        activation,
        out_dtype,
        None,
        fast_accum,
    )
    assert isinstance(y, Tensor)
    return y


@gemm.register_fake
def _(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    _check_fake(xq, sx, wq, sw, bias, residual, activation, out_dtype, fast_accum)
    return xq.new_empty((*xq.shape[:-1], wq.shape[0]), dtype=out_dtype)


@torch.library.custom_op("cute_fp8::gemm_out", mutates_args=("out",))
def gemm_out(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    fast_accum: bool,
    out: Tensor,
) -> None:
    """``cute_fp8.gemm(..., out=out)`` on uint8 codes; the output's dtype is ``out``'s."""
    run_gemm(
        _codes(xq),
        _scale(sx),
        _codes(wq),
        _scale(sw),
        bias,
        residual,
        activation,
        out.dtype,
        out,
        fast_accum,
    )


@gemm_out.register_fake
def _(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    fast_accum: bool,
    out: Tensor,
) -> None:
    _check_fake(xq, sx, wq, sw, bias, residual, activation, out.dtype, fast_accum)


@torch.library.custom_op("cute_fp8::gemm_quantized", mutates_args=())
def gemm_quantized(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """``cute_fp8.gemm(..., out_dtype=torch.float8_e4m3fn)`` on uint8 codes: uint8 codes and blocked
    scales.
    """
    y = run_gemm(
        _codes(xq),
        _scale(sx),
        _codes(wq),
        _scale(sw),
        bias,
        residual,
        activation,
        E4M3,
        None,
        False,
    )
    assert isinstance(y, tuple)
    return as_bytes(y[0]), as_bytes(y[1])


@gemm_quantized.register_fake
def _(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    _check_fake(xq, sx, wq, sw, bias, residual, activation, E4M3, False)
    n = wq.shape[0]
    row_tiles = (batch_size(tuple(xq.shape[:-1])) + TILE_ROWS - 1) // TILE_ROWS
    column_tiles = (n // 32 + TILE_COLS - 1) // TILE_COLS
    scales = xq.new_empty(row_tiles * column_tiles * TILE_ROWS * TILE_COLS)
    return xq.new_empty((*xq.shape[:-1], n)), scales


def _check_fake(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> None:
    check_gemm(
        _codes(xq),
        _scale(sx),
        _codes(wq),
        _scale(sw),
        bias,
        residual,
        activation,
        out_dtype,
        None,
        fast_accum,
    )
