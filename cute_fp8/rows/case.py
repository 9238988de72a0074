"""A producer's call with its data, and the check of its result: for tests and measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_fp8.kernels.row_config import GATES, NORMS
from cute_fp8.numerics import dequantize_fp8, dequantize_mxfp8
from cute_fp8.rows import ops, reference
from cute_fp8.rows.plan import Out
from cute_fp8.rows.problem import (
    KERNEL_OPS,
    RowInputs,
    RowOptions,
    RowOutputs,
    RowProblem,
    as_outputs,
    check_rows,
)
from cute_fp8.testing import inputs

#: Elements of what is quantised that may differ from the reference's, by one step of its dtype.
MAX_DIFFERING = 1e-4
#: Error of what is computed in fp32, relative to the value and to its row's root mean square: what
#: another order of a sum makes, in a difference of nearly equal numbers too.
FP32_ERROR = 4e-6


@dataclass(frozen=True)
class RowCase:
    """One call."""

    inputs: RowInputs
    options: RowOptions

    @property
    def problem(self) -> RowProblem:
        """The checked call."""
        return check_rows(self.inputs, self.options)

    def run(self, out: Out = None) -> tuple[Tensor, ...]:
        """Call it."""
        return ops.run(self.inputs, self.options, out)

    def kept(self) -> RowCase:
        """The same call, that also returns what it quantises."""
        return replace(self, options=replace(self.options, keep=True))

    def moved_bytes(self) -> int:
        """What the call has to read and write, each once."""
        read = sum(t.numel() * t.element_size() for t in self.inputs if t is not None)
        p = self.problem
        size = self.inputs.x.element_size() * (p.residual + self.options.keep)
        scales = math.prod(p.scale_shape) * p.scale_dtype.itemsize
        return read + p.m * p.k * (1 + size) + scales


def row_case(
    op: str,
    m: int,
    k: int,
    variant: str = "per_token",
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight: torch.dtype | None = None,
    residual: bool = False,
    kind: str = "gaussian",
    seed: int = 0,
    device: torch.device | str = "cpu",
    **options: object,
) -> RowCase:
    """A call of ``op``, as the dispatch table has it, with ``k`` columns of output.

    Args:
        weight: dtype of a norm's weight and bias; by default x's.
        kind: of x, as in :func:`cute_fp8.testing.inputs`.
        options: as in :class:`cute_fp8.rows.problem.RowOptions`.
    """
    kernel_op = KERNEL_OPS[op]
    columns = 2 * k if kernel_op in GATES else k
    x = inputs(kind, m, columns, seed=seed, dtype=dtype, device=device)
    given = RowInputs(x)
    if op == "attention_out_quantize":
        given = RowInputs(_attention_output(x))
    if kernel_op in NORMS:
        w = inputs("gaussian", 1, k, seed=seed + 1, dtype=weight or dtype, device=device)[0]
        b = inputs("gaussian", 1, k, seed=seed + 2, dtype=weight or dtype, device=device)[0]
        r = inputs("gaussian", m, k, seed=seed + 3, dtype=dtype, device=device)
        bias = b if kernel_op == "layernorm" else None
        given = RowInputs(x, w, bias, r if residual else None)
        options.setdefault("eps", 1e-5)
    return RowCase(given, RowOptions(op, variant, **options))  # type: ignore[arg-type]


def _attention_output(x: Tensor) -> Tensor:
    """Rows ``[B * S, H * D]`` seen as ``[B, H, S, D]``, as attention kernels leave them."""
    m, k = x.shape
    batch = 2 if m % 2 == 0 else 1
    width = next(d for d in (128, 64, 48, 16) if k % d == 0)
    return x.view(batch, m // batch, k // width, width).transpose(1, 2)


def errors(case: RowCase, results: tuple[Tensor, ...]) -> list[str]:
    """What is wrong with a call's result, in words; empty if nothing is.

    Codes and scales have to be bit-identical to the quantiser of what was quantised, which the case
    has to return unless it is its input; that has to be the reference's but for a few roundings.
    """
    p = case.problem
    found = as_outputs(p, results)
    with torch.no_grad():
        kept, hidden = reference.computed(p, case.inputs)
    wrong = []
    if hidden is not None:
        assert found.hidden is not None
        wrong += _differ("hidden", found.hidden, hidden)
    if found.kept is not None:
        wrong += _near(found.kept, kept)
        kept = found.kept
    elif KERNEL_OPS[p.op] != "quantize":
        raise ValueError("case: got one that does not return what it quantises, must do so")
    codes, scales = reference.quantised(case.options, kept)
    wrong += _differ("scales", found.scales, scales)
    wrong += _differ("codes", found.codes.reshape(-1), codes.reshape(-1))
    return wrong


def error(case: RowCase, results: tuple[Tensor, ...]) -> float:
    """Relative L2 error of the dequantised result against what the reference quantises.

    For results of any implementation. About 0.026 is the quantisation's own.
    """
    p = case.problem
    found: RowOutputs = as_outputs(p, results)
    kept, _ = reference.computed(p, case.inputs)
    dequantize = dequantize_fp8 if p.variant == "per_token" else dequantize_mxfp8
    values = dequantize(found.codes, found.scales, torch.float32).reshape(-1)
    exact = kept.reshape(-1).to(torch.float32)
    return float((values - exact).norm() / exact.norm())


def _differ(name: str, got: Tensor, want: Tensor) -> list[str]:
    if got.dtype != want.dtype or got.shape != want.shape:
        text = f"{got.dtype} {tuple(got.shape)}, must be {want.dtype} {tuple(want.shape)}"
        return [f"{name}: {text}"]
    # Bits: NaN equals itself, and -0 is not 0.
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    kind = sizes[got.element_size()]
    unequal = got.contiguous().view(kind) != want.contiguous().view(kind)
    # Of the residual stream, NaN is NaN.
    if got.element_size() > 1 and name == "hidden":
        unequal &= ~(got.isnan() & want.isnan())
    count = int(unequal.sum())
    if not count:
        return []
    first = unequal.reshape(-1).nonzero()[0, 0]
    a, b = (t.contiguous().view(kind).reshape(-1)[first].item() for t in (got, want))
    return [f"{name}: {count} of {got.numel()} differ, first at {int(first)}: {a}, must be {b}"]


def _near(got: Tensor, want: Tensor) -> list[str]:
    """Whether ``got`` is ``want`` but for the roundings that another order of sums may flip."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return [f"kept: {got.dtype} {tuple(got.shape)}"]
    nan = got.isnan() != want.isnan()
    if int(nan.sum()):
        return [f"kept: {int(nan.sum())} of {got.numel()} are NaN, or should be"]
    finite = torch.isfinite(want)
    exact = want.to(torch.float32).where(finite, 0.0)
    allowed = FP32_ERROR * (exact.abs() + exact.square().mean(dim=-1, keepdim=True).sqrt())
    off = ((got.to(torch.float32) - exact).abs() > allowed) & finite
    if got.dtype == torch.float32:
        count = int(off.sum())
        return [f"kept: {count} of {got.numel()} are off"] if count else []
    steps = (_ordered(got) - _ordered(want)).abs().where(off, 0)
    differing, most = int((steps > 0).sum()), int(steps.max()) if steps.numel() else 0
    if most > 1 or differing > 2 + MAX_DIFFERING * got.numel():
        return [f"kept: {differing} of {got.numel()} differ, by up to {most} steps"]
    return []


def _ordered(values: Tensor) -> Tensor:
    """16-bit floats as integers in their order."""
    bits = values.contiguous().view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)
