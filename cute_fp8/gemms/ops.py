"""``torch.library`` ops: what ``torch.compile``, ``torch.export`` and dispatch modes see of a GEMM.

Three ops, because a schema has one kind of result: ``gemm`` (functional), ``gemm_out`` (writes
``out``) and ``gemm_quantized`` (MXFP8 output: codes and scales). They take uint8 views of float8
tensors: schema checks do arithmetic on their arguments, which float8 has not. The scales' dtype
tells the variant: uint8 are e8m0 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_fp8.gemms.plan import run_gemm
from cute_fp8.gemms.problem import E4M3, E8M0, Operands, batch_size, check_gemm
from cute_fp8.numerics import MX_BLOCK
from cute_fp8.scales import blocked_numel
from cute_fp8.workspace import unshared

#: The arguments that all three ops begin with, in order.
_ARGUMENTS = (
    "Tensor xq, Tensor sx, Tensor wq, Tensor sw, Tensor? bias, Tensor? residual, str? activation, "
    "bool gated"
)


def as_bytes(tensor: Tensor) -> Tensor:
    """A uint8 view of a float8 tensor; any other as it is."""
    return tensor.view(torch.uint8) if tensor.dtype in (E4M3, E8M0) else tensor


def _operands(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Operands:
    """Bytes seen as what they are: codes as e4m3, scales (where they are no fp32) as e8m0."""

    def seen(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.view(dtype) if tensor.dtype is torch.uint8 else tensor

    codes = seen(xq, E4M3), seen(wq, E4M3)
    scales = seen(sx, E8M0), seen(sw, E8M0)
    return Operands(codes[0], scales[0], codes[1], scales[1], bias, residual)


def _run(*arguments: Any) -> Any:
    """``run_gemm``, keeping nothing of whatever pool the call allocates from."""
    with unshared():
        return run_gemm(*arguments)


@torch.library.custom_op(
    "cute_fp8::gemm",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, ScalarType out_dtype, bool fast_accum) -> Tensor",
)
def gemm(*arguments: Any) -> Tensor:
    """``cute_fp8.gemm`` on uint8 codes; see there."""
    *tensors, activation, gated, out_dtype, fast_accum = arguments
    y = _run(_operands(*tensors), activation, out_dtype, fast_accum, gated)
    assert isinstance(y, Tensor)
    return y


@gemm.register_fake
def _(*arguments: Any) -> Tensor:
    *tensors, activation, gated, out_dtype, fast_accum = arguments
    problem = check_gemm(_operands(*tensors), activation, out_dtype, fast_accum, gated)
    return tensors[0].new_empty(problem.out_shape, dtype=out_dtype)


@torch.library.custom_op(
    "cute_fp8::gemm_out",
    mutates_args=("out",),
    schema=f"({_ARGUMENTS}, bool fast_accum, Tensor(a!) out) -> ()",
)
def gemm_out(*arguments: Any) -> None:
    """``cute_fp8.gemm(..., out=out)`` on uint8 codes; the output's dtype is ``out``'s."""
    *tensors, activation, gated, fast_accum, out = arguments
    _run(_operands(*tensors)._replace(out=out), activation, out.dtype, fast_accum, gated)


@gemm_out.register_fake
def _(*arguments: Any) -> None:
    *tensors, activation, gated, fast_accum, out = arguments
    check_gemm(_operands(*tensors)._replace(out=out), activation, out.dtype, fast_accum, gated)


@torch.library.custom_op(
    "cute_fp8::gemm_quantized", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def gemm_quantized(*arguments: Any) -> tuple[Tensor, Tensor]:
    """``gemm`` with ``out_dtype=torch.float8_e4m3fn``: uint8 codes and blocked scale bytes."""
    *tensors, activation, gated = arguments
    codes, scales = _run(_operands(*tensors), activation, E4M3, False, gated)
    return as_bytes(codes), as_bytes(scales)


@gemm_quantized.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, activation, gated = arguments
    problem = check_gemm(_operands(*tensors), activation, E4M3, False, gated)
    xq = tensors[0]
    rows = batch_size(tuple(xq.shape[:-1]))
    scales = xq.new_empty(blocked_numel(rows, problem.out_columns // MX_BLOCK))
    return xq.new_empty(problem.out_shape), scales
