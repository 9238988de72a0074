"""The reference GEMM in plain torch: what every route computes, on any device, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_fp8.gating import split_gate_up
from cute_fp8.gemms.problem import E4M3, GemmProblem, Operands
from cute_fp8.numerics import MX_BLOCK, quantize_mxfp8, without_autocast
from cute_fp8.scales import from_blocked

Output = Tensor | tuple[Tensor, Tensor]
#: Every activation that a GEMM has; all pass NaN on.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def gemm(problem: GemmProblem, operands: Operands) -> Output:
    """The whole GEMM of a checked problem."""
    xq, sx, wq, sw = operands[:4]
    codes = xq.reshape(problem.m, problem.k)
    if problem.variant == "mxfp8":
        acc = accumulate_mxfp8(codes, sx, wq, sw)
        return finish(problem, acc, operands)
    # e4m3 codes are exact in tf32 too, so torch's tf32 switch cannot change the products; autocast
    # would round their sum.
    with without_autocast(problem.device.type):
        acc = codes.to(torch.float32) @ wq.to(torch.float32).t()
    return finish(problem, acc, operands)


def accumulate_mxfp8(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor) -> Tensor:
    """``sum_k xq * 2^ex * wq * 2^ew`` as fp32 ``[M, N]``.

    In float64, because the operands with their scales span 2^-136 to 2^136, past what fp32 holds.
    """
    return (_float64(xq, sx) @ _float64(wq, sw).t()).to(torch.float32)


def finish(problem: GemmProblem, acc: Tensor, operands: Operands) -> Output:
    """The epilogue in fp32: ``act(acc * sx * sw + bias) + residual``, rounded once.

    Gated: ``act(gate) * up``, of channels that come in blocks of 8, gate and up in turn.

    Args:
        acc: fp32 ``[M, N]``; consumed. With MXFP8 it carries the scales already.
    """
    _, sx, _, sw, bias, residual, out = operands
    y = acc
    if problem.variant == "per_token":
        y = y.mul_(sx.reshape(-1, 1)).mul_(sw.reshape(1, -1))
    if bias is not None:
        y = y.add_(bias.to(torch.float32))
    if problem.gated:
        gate, up = split_gate_up(y)
        y = activate(problem.activation, gate) * up
    else:
        y = activate(problem.activation, y)
    y = y.reshape(problem.out_shape)
    if residual is not None:
        y = y + residual.to(torch.float32)
    if problem.out_dtype is E4M3:
        return quantize_mxfp8(y.to(torch.bfloat16), blocked=True)
    return y.to(problem.out_dtype) if out is None else out.copy_(y)


def activate(name: str | None, y: Tensor) -> Tensor:
    """The activation ``name`` in fp32; every one passes NaN on."""
    return y if name is None else _ACTIVATIONS[name](y)


def _float64(codes: Tensor, scale: Tensor) -> Tensor:
    (rows, k), columns = codes.shape, codes.shape[1] // MX_BLOCK
    if scale.dim() == 1:
        scale = from_blocked(scale, rows, columns)
    factors = scale.reshape(rows, columns, 1).to(torch.float64)
    return (codes.to(torch.float64).view(rows, columns, MX_BLOCK) * factors).view(rows, k)
