"""The producers in plain torch: what every route computes, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_fp8.gemms.reference import activate
from cute_fp8.numerics import quantize_fp8_activations, quantize_mxfp8
from cute_fp8.rows.problem import (
    KERNEL_OPS,
    RowInputs,
    RowOptions,
    RowOutputs,
    RowProblem,
    as_outputs,
)

#: Elements of an interleaved gate and up that follow each other.
_INTERLEAVE = 8


def rows(
    problem: RowProblem, inputs: RowInputs, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """The whole of a checked call: codes, scales, and what else is asked for."""
    with torch.no_grad():
        kept, hidden = computed(problem, inputs)
        codes, scales = quantised(problem.options, kept)
        found = RowOutputs(
            codes.view(problem.shape), scales, hidden, kept if problem.options.keep else None
        )
        results = tuple(tensor for tensor in found if tensor is not None)
        if out is None:
            return results
        for target, result in zip(as_outputs(problem, out), found, strict=True):
            if target is not None and result is not None:
                _bytes(target).copy_(_bytes(result))
    return tuple(out)


def quantised(options: RowOptions, values: Tensor) -> tuple[Tensor, Tensor]:
    """The quantiser of ``options`` applied to values."""
    if options.variant == "per_token":
        return quantize_fp8_activations(values)
    return quantize_mxfp8(values, blocked=options.blocked)


def computed(problem: RowProblem, inputs: RowInputs) -> tuple[Tensor, Tensor | None]:
    """What is quantised, in x's dtype, and the updated residual stream where there is one."""
    kernel_op = KERNEL_OPS[problem.op]
    if kernel_op in ("rmsnorm", "layernorm"):
        return _normalised(problem, inputs)
    if kernel_op != "quantize":
        return _gated(problem.options, inputs.x, kernel_op), None
    if problem.op == "attention_out_quantize":
        return inputs.x.transpose(1, 2).reshape(problem.shape), None
    return inputs.x.detach(), None


def _normalised(problem: RowProblem, inputs: RowInputs) -> tuple[Tensor, Tensor | None]:
    x, weight, bias, residual = inputs
    assert weight is not None
    hidden = None
    if residual is not None:
        hidden = x = (x.to(torch.float32) + residual.to(torch.float32)).to(x.dtype)
    values, options = x.to(torch.float32), problem.options
    factor = weight.to(torch.float32)
    if problem.op == "layernorm_quantize":
        values = values - values.mean(dim=-1, keepdim=True)
    else:
        factor = factor + options.offset
    variance = values.square().mean(dim=-1, keepdim=True)
    values = values * torch.rsqrt(variance + options.eps)
    if options.round_twice:
        values = values.to(x.dtype).to(torch.float32)
    values = values * factor
    if bias is not None:
        values = values + bias.to(torch.float32)
    return values.to(x.dtype), hidden


def _gated(options: RowOptions, gate_up: Tensor, kernel_op: str) -> Tensor:
    if options.layout == "interleaved":
        pairs = gate_up.reshape(*gate_up.shape[:-1], -1, 2, _INTERLEAVE)
        gate, up = (pairs.select(-2, i).flatten(-2) for i in range(2))
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    name = kernel_op.removesuffix("_mul")
    values = activate(name, gate.to(torch.float32)) * up.to(torch.float32)
    return values.to(gate_up.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
