"""``torch.library`` ops of the producers: one that returns new tensors, one that writes given ones.

As with the GEMM's ops (``gemms/ops.py``), float8 tensors are uint8 views. What a call returns
beyond codes and scales depends on its options, so the functional op returns a list.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_fp8.arguments import PLAIN_OR_NONE, watched
from cute_fp8.gemms.ops import as_bytes
from cute_fp8.gemms.problem import E4M3, E8M0
from cute_fp8.numerics import MX_BLOCK
from cute_fp8.rows.plan import Out, Results, run_rows
from cute_fp8.rows.problem import (
    RowInputs,
    RowOptions,
    RowProblem,
    as_outputs,
    check_out,
    check_rows,
    result_names,
)
from cute_fp8.scales import blocked_numel

_ARGUMENTS = (
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, str op, str variant, bool blocked, "
    "float eps, float offset, str rounding, str layout, bool keep"
)
_OUTPUTS = "Tensor(a!) codes, Tensor(b!) scales, Tensor(c!)? hidden, Tensor(d!)? kept"


@torch.library.custom_op(
    "cute_fp8::quantize_rows", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]"
)
def quantize_rows(*arguments: Any) -> list[Tensor]:
    """A producer: codes and scales as bytes, and what else its options ask for."""
    return [as_bytes(tensor) for tensor in run_rows(*_split(arguments), None)]


@quantize_rows.register_fake
def _(*arguments: Any) -> list[Tensor]:
    inputs, options = _split(arguments)
    problem = check_rows(inputs, options)
    x = inputs.x
    found = [x.new_empty(problem.shape, dtype=torch.uint8), _empty_scales(x, problem)]
    return found + [x.new_empty(problem.shape) for _ in result_names(problem)[2:]]


@torch.library.custom_op(
    "cute_fp8::quantize_rows_out",
    mutates_args=("codes", "scales", "hidden", "kept"),
    schema=f"({_ARGUMENTS}, {_OUTPUTS}) -> ()",
)
def quantize_rows_out(*arguments: Any) -> None:
    """A producer that writes the tensors given."""
    inputs, options = _split(arguments[:-4])
    run_rows(inputs, options, _seen(arguments[-4:]))


@quantize_rows_out.register_fake
def _(*arguments: Any) -> None:
    inputs, options = _split(arguments[:-4])
    check_out(check_rows(inputs, options), inputs, _seen(arguments[-4:]))


def run(inputs: RowInputs, options: RowOptions, out: Out) -> Results:
    """Run a producer, through ``torch.library`` for tracing, subclasses and modes."""
    tensors = inputs if out is None else (*inputs, *out)
    subclass = any(type(t) not in PLAIN_OR_NONE and isinstance(t, Tensor) for t in tensors)
    if subclass or watched():
        return call(inputs, options, out)
    return run_rows(inputs, options, out)


def call(inputs: RowInputs, options: RowOptions, out: Out) -> Results:
    """A call of a producer through the ops."""
    problem = check_rows(inputs, options)
    arguments = (
        *inputs,
        options.op,
        options.variant,
        options.blocked,
        float(options.eps),
        float(options.offset),
        options.rounding,
        options.layout,
        options.keep,
    )
    if out is not None:
        check_out(problem, inputs, out)
        codes, scales, hidden, kept = as_outputs(problem, out)
        torch.ops.cute_fp8.quantize_rows_out(
            *arguments, as_bytes(codes), as_bytes(scales), hidden, kept
        )
        return tuple(out)
    codes, scales, *others = torch.ops.cute_fp8.quantize_rows(*arguments)
    if options.variant == "mxfp8":
        scales = scales.view(E8M0)
    return (codes.view(E4M3), scales, *others)


def _split(arguments: tuple[Any, ...]) -> tuple[RowInputs, RowOptions]:
    return RowInputs(*arguments[:4]), RowOptions(*arguments[4:])


def _seen(tensors: tuple[Any, ...]) -> list[Tensor]:
    """Bytes as what they are; those that are there."""
    codes, scales, *others = tensors
    if scales.dtype is torch.uint8:
        scales = scales.view(E8M0)
    return [codes.view(E4M3), scales, *(tensor for tensor in others if tensor is not None)]


def _empty_scales(x: Tensor, problem: RowProblem) -> Tensor:
    """Their bytes; `RowProblem.scale_shape`, on symbolic sizes."""
    if problem.variant == "per_token":
        return x.new_empty((problem.m,), dtype=torch.float32)
    columns = problem.k // MX_BLOCK
    if not problem.options.blocked:
        return x.new_empty((problem.m, columns), dtype=torch.uint8)
    return x.new_empty(blocked_numel(problem.m, columns), dtype=torch.uint8)
