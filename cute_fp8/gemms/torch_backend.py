"""GEMM through torch's own FP8 matmul (cuBLASLt, CUTLASS): where no CuTe kernel serves the GPU.

Three routes, each with a predicate that says in words why it does not serve a problem. All keep the
numerics contract: one rounding, after everything that is fused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_fp8.frozen import frozen_blocks
from cute_fp8.gemms import reference
from cute_fp8.gemms.problem import GemmProblem, Operands
from cute_fp8.numerics import MX_BLOCK
from cute_fp8.scales import to_blocked

#: torch's scaled matmuls want N and K to be multiples of this.
TORCH_MULTIPLE = 16


def _refuse_sizes(problem: GemmProblem) -> str | None:
    if problem.n % TORCH_MULTIPLE:
        return f"N = {problem.n} is no multiple of {TORCH_MULTIPLE}"
    return None


def rowwise_refusal(problem: GemmProblem) -> str | None:
    """Why row-wise ``_scaled_mm`` does not serve ``problem``; None if it does."""
    if problem.out_dtype is not torch.bfloat16:
        return f"output is {problem.out_dtype}, row-wise gives bf16 only"
    if problem.activation or problem.residual or problem.gated:
        return "activation, gate or residual would be rounded twice"
    if problem.bias not in (None, torch.bfloat16):
        return f"bias is {problem.bias}, row-wise takes bf16 only"
    return _refuse_sizes(problem)


def tensorwise_refusal(problem: GemmProblem) -> str | None:
    """Why unit-scale tensor-wise ``_scaled_mm`` does not serve ``problem``; None if it does."""
    return _refuse_sizes(problem)


def mxfp8_refusal(problem: GemmProblem) -> str | None:
    """Why torch's MXFP8 matmul does not serve ``problem``; None if it does."""
    return _refuse_sizes(problem)


def rowwise(problem: GemmProblem, operands: Operands) -> Tensor:
    """Row-wise scales, bf16 output, rounded once by the library's epilogue."""
    xq, sx, wq, sw = operands[:4]
    y = torch._scaled_mm(
        xq.reshape(problem.m, problem.k).contiguous(),
        wq.contiguous().t(),
        scale_a=sx.reshape(-1, 1).expand(problem.m, 1).contiguous(),
        scale_b=sw.reshape(1, -1).expand(1, problem.n).contiguous(),
        bias=operands.bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=problem.fast_accum,
    )
    y = y.view(problem.out_shape)
    return y if operands.out is None else operands.out.copy_(y)


def tensorwise(problem: GemmProblem, operands: Operands) -> reference.Output:
    """Unit scales to an fp32 accumulator, then the fp32 epilogue in torch."""
    xq, wq = operands.xq, operands.wq
    # Made anew: a kept tensor's fill would be ordered on the first caller's stream alone, and in a
    # graph capture it would not run at all.
    one = torch.ones((), dtype=torch.float32, device=problem.device)
    acc = torch._scaled_mm(
        xq.reshape(problem.m, problem.k).contiguous(),
        wq.contiguous().t(),
        scale_a=one,
        scale_b=one,
        out_dtype=torch.float32,
        use_fast_accum=problem.fast_accum,
    )
    return reference.finish(problem, acc, operands)


def mxfp8(problem: GemmProblem, operands: Operands) -> reference.Output:
    """MXFP8 block scales to an fp32 accumulator, then the fp32 epilogue in torch."""
    xq, sx, wq, sw = operands[:4]
    acc = torch._scaled_mm(
        xq.reshape(problem.m, problem.k).contiguous(),
        wq.contiguous().t(),
        scale_a=_blocked(sx, problem.m, problem.k),
        scale_b=_blocked(sw, problem.n, problem.k),
        out_dtype=torch.float32,
    )
    return reference.finish(problem, acc, operands)


def _blocked(scale: Tensor, rows: int, k: int) -> Tensor:
    if scale.dim() == 1:
        return scale
    frozen = frozen_blocks(scale)
    return to_blocked(scale.reshape(rows, k // MX_BLOCK)) if frozen is None else frozen
