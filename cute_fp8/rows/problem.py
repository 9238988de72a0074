"""Argument checks of the quantising producers, and what remains of a call: a :class:`RowProblem`.

A producer computes something with rows of activations (nothing, a norm, a gated activation, the
re-ordering of attention's output) and quantises the result. A refusal is one line: the argument,
what it got, what it must be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cute_fp8.arguments import check_aligned, check_tensor, refuse_grad
from cute_fp8.gemms.problem import (
    E4M3,
    E8M0,
    OUT_DTYPES,
    Operands,
    batch_size,
    check_matrix,
    check_overlap,
)
from cute_fp8.kernels.config import K_MULTIPLE, VARIANTS
from cute_fp8.kernels.row_config import GATES, NORMS, ROW_OPS
from cute_fp8.numerics import MX_BLOCK
from cute_fp8.scales import blocked_numel

if TYPE_CHECKING:
    from cute_fp8.rows.view import View

#: What the dispatch table calls them, and what the kernel does for them.
KERNEL_OPS = {
    "quantize": "quantize",
    "attention_out_quantize": "quantize",
    **{f"{op}_quantize": op for op in (*NORMS, *GATES)},
}
OPS = tuple(KERNEL_OPS)
ROUNDINGS = ("hf", "fused")
LAYOUTS = ("halves", "interleaved")

assert set(KERNEL_OPS.values()) == set(ROW_OPS)


class RowInputs(NamedTuple):
    """The tensors that a producer reads."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None


class RowOutputs(NamedTuple):
    """The tensors that a producer writes; None for what is not asked for."""

    codes: Tensor
    scales: Tensor
    hidden: Tensor | None = None
    kept: Tensor | None = None


@dataclass(frozen=True)
class RowOptions:
    """The options of a call. ``keep``: what is quantised is returned, too."""

    op: str
    variant: str = "per_token"
    blocked: bool = False
    eps: float = 0.0
    offset: float = 0.0
    rounding: str = "fused"
    layout: str = "halves"
    keep: bool = False

    @property
    def round_twice(self) -> bool:
        """Whether the normalised value is rounded before the weight is applied.

        Hugging Face's Llama does so; its Gemma, the one with an offset, does not.
        """
        return self.rounding == "hf" and self.offset == 0.0


@dataclass(frozen=True)
class RowProblem:
    """A checked call without its data.

    Attributes:
        m, k: rows, and elements of a row of the output.
        shape: of the codes.
        weight, bias: their dtypes.
        view: how a kernel addresses x; None while tracing.
    """

    options: RowOptions
    m: int
    k: int
    shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None
    residual: bool = False
    view: View | None = None

    @property
    def op(self) -> str:
        """The name that the dispatch table knows it by."""
        return self.options.op

    @property
    def variant(self) -> str:
        """``per_token`` or ``mxfp8``."""
        return self.options.variant

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Of the scales."""
        if self.variant == "per_token":
            return (self.m,)
        columns = self.k // MX_BLOCK
        return (blocked_numel(self.m, columns),) if self.options.blocked else (self.m, columns)

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of the scales."""
        return torch.float32 if self.variant == "per_token" else E8M0


def check_rows(inputs: RowInputs, options: RowOptions) -> RowProblem:
    """Check the arguments of a producer, its ``out`` apart.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, stride, alignment, device or option.
        RuntimeError: an input requires grad while grad mode is on.
    """
    _check_tensors(inputs)
    if KERNEL_OPS[options.op] in NORMS:
        check_tensor("weight", inputs.weight)
    _check_options(options)
    x, weight, bias, residual = inputs
    shape = _shape(x, options)
    k = shape[-1]
    if k == 0 or k % (multiple := MX_BLOCK if options.variant == "mxfp8" else K_MULTIPLE):
        raise ValueError(f"x: got K = {k}, must be a positive multiple of {multiple}")
    m = batch_size(shape[:-1])
    problem = RowProblem(options, m, k, shape, x.device, x.dtype)
    if weight is not None:
        problem = replace(problem, weight=_check_vector("weight", weight, k))
    if bias is not None:
        problem = replace(problem, bias=_check_vector("bias", bias, k))
    if residual is not None:
        check_matrix("residual", residual, shape, (x.dtype,))
        problem = replace(problem, residual=True)
    check_row_grad(inputs, options)
    return problem


def check_out(problem: RowProblem, inputs: RowInputs, out: Sequence[Tensor] | None) -> None:
    """Check ``out``, the tensors that a call is to write, in the order in which it returns them.

    Raises:
        TypeError: no sequence of tensors, or one of another dtype.
        ValueError: too many or too few; a wrong shape, stride, alignment or device; an overlap.
    """
    if out is None:
        return
    names = result_names(problem)
    if not isinstance(out, tuple | list) or not all(isinstance(t, Tensor) for t in out):
        raise TypeError(f"out: got {type(out).__name__}, must be a tuple of tensors")
    if len(out) != len(names):
        raise ValueError(f"out: got {len(out)} tensors, must be {len(names)}: {', '.join(names)}")
    for name, tensor in zip(names, out, strict=True):
        label = f"out[{name}]"
        if tensor.device != problem.device:
            raise ValueError(f"{label}: got device {tensor.device}, must be {problem.device}")
        if name == "scales":
            _check_scales_out(label, tensor, problem)
            continue
        dtype = E4M3 if name == "codes" else problem.dtype
        check_matrix(label, tensor, problem.shape, (dtype,), own_rows=True)
    check_row_overlap(inputs, out)


def check_row_overlap(inputs: RowInputs, out: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if a tensor of ``out`` meets an input or another of them in memory."""
    for i, tensor in enumerate(out):
        others: list[Any] = [*inputs, *out[:i]]
        names = [*inputs._fields, *(f"out[{j}]" for j in range(i))]
        for name, other in zip(names, others, strict=True):
            if other is None:
                continue
            try:
                check_overlap(Operands(other, other, other, other, out=tensor))
            except ValueError:
                text = f"out[{i}]: got memory that overlaps {name}, must be separate"
                raise ValueError(text) from None


def check_row_grad(inputs: RowInputs, options: RowOptions) -> None:
    """Raise ``RuntimeError`` if an input requires grad in grad mode: inference only.

    A ``Parameter`` that is quantised as it is is taken as a weight.
    """
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        weight = options.op == "quantize" and isinstance(tensor, torch.nn.Parameter)
        if tensor is not None and not weight:
            refuse_grad(name, tensor)


def result_names(problem: RowProblem) -> tuple[str, ...]:
    """What a call returns, in order."""
    names = ["codes", "scales"]
    names += ["hidden"] if problem.residual else []
    names += ["kept"] if problem.options.keep else []
    return tuple(names)


def as_outputs(problem: RowProblem, tensors: Sequence[Tensor]) -> RowOutputs:
    """The tensors of ``out`` or of a result by name."""
    return RowOutputs(**dict(zip(result_names(problem), tensors, strict=True)))


def _check_tensors(inputs: RowInputs) -> None:
    x = inputs.x
    for name, given in zip(inputs._fields, inputs, strict=True):
        if given is None and name != "x":
            continue
        tensor = check_tensor(name, given)
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: got layout {tensor.layout}, must be torch.strided")
        if tensor.dtype not in OUT_DTYPES:
            raise TypeError(f"{name}: got {tensor.dtype}, must be bfloat16, float16 or float32")
        if tensor.device != x.device:
            raise ValueError(f"{name}: got device {tensor.device}, must be {x.device} as x is")


def _check_options(options: RowOptions) -> None:
    for name, allowed in (("variant", VARIANTS), ("rounding", ROUNDINGS), ("layout", LAYOUTS)):
        value = getattr(options, name)
        if value not in allowed:
            raise ValueError(f"{name}: got {value!r}, must be one of {', '.join(allowed)}")
    for name in ("blocked", "keep"):
        if not isinstance(getattr(options, name), bool):
            got = type(getattr(options, name)).__name__
            raise TypeError(f"{name}: got {got}, must be a bool")
    for name in ("eps", "offset"):
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}: got {type(value).__name__}, must be a number")
        # Not `isfinite`: a traced number has none.
        if not -math.inf < value < math.inf or (name == "eps" and value < 0):
            raise ValueError(f"{name}: got {value}, must be finite and, for eps, at least 0")
    if options.blocked and options.variant != "mxfp8":
        raise ValueError("blocked: got True with per-token scales, must be used with mxfp8")


def _shape(x: Tensor, options: RowOptions) -> tuple[int, ...]:
    """The shape of the codes."""
    if options.op == "attention_out_quantize":
        if x.dim() != 4:
            raise ValueError(f"o: got {x.dim()} dimensions, must be 4-D [B, H, S, D]")
        batch, heads, tokens, width = x.shape
        return (batch * tokens, heads * width)
    if x.dim() == 0:
        raise ValueError("x: got a tensor without dimensions, must be [..., K]")
    if options.op.removesuffix("_quantize") not in GATES:
        return tuple(x.shape)
    if x.shape[-1] % 2:
        raise ValueError(f"gate_up: got {x.shape[-1]} columns, must be an even number")
    return (*x.shape[:-1], x.shape[-1] // 2)


def _check_vector(name: str, tensor: Tensor, k: int) -> torch.dtype:
    if tuple(tensor.shape) != (k,):
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, must be ({k},)")
    if tensor.stride(0) != 1:
        raise ValueError(f"{name}: got stride {tensor.stride(0)}, must be 1")
    check_aligned(name, tensor)
    return tensor.dtype


def _check_scales_out(label: str, tensor: Tensor, problem: RowProblem) -> None:
    if tensor.dtype != problem.scale_dtype:
        raise TypeError(f"{label}: got {tensor.dtype}, must be {problem.scale_dtype}")
    if tuple(tensor.shape) != problem.scale_shape:
        got = tuple(tensor.shape)
        raise ValueError(f"{label}: got shape {got}, must be {problem.scale_shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{label}: got strides {tuple(tensor.stride())}, must be contiguous")
    if problem.options.blocked:
        check_aligned(label, tensor)
