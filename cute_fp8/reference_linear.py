"""Linear layers on quantised weights, in reference form."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_fp8.dispatch import walk
from cute_fp8.gemms.plan import function_of
from cute_fp8.gemms.problem import Operands, check_gemm
from cute_fp8.numerics import quantize_fp8_activations, quantize_mxfp8
from cute_fp8.settings import Settings
from cute_fp8.targets import capability_of_device


def fp8_w8a8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ W.T + bias`` with per-channel e4m3 weights and activations quantised per token now.

    Goes through torch's FP8 matmul where the dispatch table has one for the GPU, else fp32 math:
    never through this package's kernels, which are measured against it.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32.
        q, scale: weight codes ``[N, K]`` and scales ``[N]``, as ``quantize_fp8`` gives them.
        bias: ``[N]`` bf16, fp16 or fp32.

    Returns:
        ``[..., N]`` in x's dtype.

    Raises:
        TypeError, ValueError: as in ``quantize_fp8_activations`` and ``gemm``.
    """
    codes, scales = quantize_fp8_activations(x)
    return _reference_gemm(codes, scales, q, scale, bias, x.dtype)


def mxfp8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ W.T + bias`` with MXFP8 weights and activations quantised in blocks of 32 now.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32.
        q, scale: weight codes ``[N, K]`` and e8m0 scales, as ``quantize_mxfp8`` gives them, blocked
            or not.
        bias: ``[N]`` bf16, fp16 or fp32.

    Returns:
        ``[..., N]`` in x's dtype. Routed as ``fp8_w8a8_linear``.

    Raises:
        TypeError, ValueError: as in ``quantize_mxfp8`` and ``gemm``.
    """
    codes, scales = quantize_mxfp8(x, blocked=True)
    return _reference_gemm(codes, scales, q, scale, bias, x.dtype)


@torch.no_grad()
def _reference_gemm(
    xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    operands = Operands(xq, sx, wq, sw, bias)
    problem = check_gemm(operands, out_dtype=out_dtype)
    capability = capability_of_device(xq.device)
    route = walk(problem, capability, Settings("torch", None)).route
    if route is None or problem.m == 0:
        route = walk(problem, capability, Settings("reference", None)).route
    assert route is not None
    y = function_of(route)(problem, operands)
    assert isinstance(y, Tensor)
    return y
