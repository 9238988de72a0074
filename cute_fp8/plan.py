"""Plans: what a GEMM call has left to do once its arguments have been seen before.

The first call of a combination of shapes, dtypes, strides and options checks everything, picks a route and
prepares it; the result is kept under a key that holds all that was checked. A later call looks the plan up,
checks the few things that a key cannot hold (addresses, grad mode, overlap) and runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_fp8 import reference, settings, torch_backend
from cute_fp8.dispatch import Route, select
from cute_fp8.problem import ALIGNMENT, GemmProblem, check_gemm, check_grad, check_overlap
from cute_fp8.reference import Output

#: Plans kept at most; then all are dropped. A serving process that sees every M still fits.
MAX_PLANS = 16_384

Run = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    Output,
]


@dataclass(frozen=True)
class Plan:
    """A checked problem and the callable that runs it."""

    problem: GemmProblem
    route: Route
    run: Run


_plans: dict[Hashable, Plan] = {}


def run_gemm(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
    fast_accum: bool,
) -> Output:
    """Run a GEMM eagerly; see :func:`cute_fp8.gemm`."""
    try:
        key: Any = (
            xq.shape,
            wq.shape,
            sx.shape,
            sw.shape,
            # A contiguous tensor's strides follow from its shape.
            None if xq.is_contiguous() else xq.stride(),
            None if wq.is_contiguous() else wq.stride(),
            None if sx.is_contiguous() else sx.stride(),
            None if sw.is_contiguous() else sw.stride(),
            xq.dtype,
            wq.dtype,
            sx.dtype,
            sw.dtype,
            xq.get_device(),
            wq.get_device(),
            sx.get_device(),
            sw.get_device(),
            None if bias is None else _traits(bias),
            None if residual is None else _traits(residual),
            None if out is None else _traits(out),
            activation,
            out_dtype,
            fast_accum,
            settings.current(),
        )
        plan = _plans.get(key)
    except (AttributeError, TypeError):
        # Not tensors, or unhashable options: the full check says which.
        key = plan = None
    if plan is None:
        plan = _make_plan(key, xq, sx, wq, sw, bias, residual, activation, out_dtype, out, fast_accum)
    elif (
        (xq.data_ptr() | wq.data_ptr()) % ALIGNMENT
        or bias is not None
        or residual is not None
        or out is not None
        or torch.is_grad_enabled()
    ):
        _check_again(plan, xq, sx, wq, sw, bias, residual, out)
    return plan.run(xq, sx, wq, sw, bias, residual, out)


def _traits(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _make_plan(
    key: Hashable,
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
    fast_accum: bool,
) -> Plan:
    problem = check_gemm(xq, sx, wq, sw, bias, residual, activation, out_dtype, out, fast_accum)
    route = select(problem, settings.current())
    plan = Plan(problem, route, _runner(problem, route))
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _check_again(
    plan: Plan,
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
) -> None:
    """What the key does not hold: addresses, overlap, grad mode. The full check words the refusal."""
    misaligned = any(t is not None and t.data_ptr() % ALIGNMENT for t in (xq, wq, residual, out))
    if misaligned:
        p = plan.problem
        check_gemm(xq, sx, wq, sw, bias, residual, p.activation, p.out_dtype, out, p.fast_accum)
    if out is not None:
        check_overlap(out, (xq, sx, wq, sw, bias, residual))
    check_grad((xq, sx, wq, sw, bias, residual, out))


def _runner(problem: GemmProblem, route: Route) -> Run:
    """The callable of a route, with the problem bound."""
    if problem.m == 0:
        return _empty(problem)
    if route.target is not None:
        from cute_fp8.cute_backend import Launch

        return Launch(problem, route)
    function = function_of(route)

    def run(*tensors: Tensor | None) -> Output:
        with torch.no_grad():
            return function(problem, *tensors)

    return run


def function_of(route: Route) -> Callable[..., Output]:
    """The torch function of a route that is no CuTe kernel: ``f(problem, xq, sx, wq, sw, bias, residual, out)``."""
    module = torch_backend if route.entry.backend == "torch" else reference
    function: Callable[..., Output] = getattr(module, route.entry.kernel)
    return function


def _empty(problem: GemmProblem) -> Run:
    """No tokens, no launch."""

    def run(*tensors: Tensor | None) -> Output:
        acc = torch.empty((0, problem.n), dtype=torch.float32, device=problem.device)
        return reference.finish(problem, acc, None, None, None, None, tensors[-1])

    return run


def forget() -> None:
    """Drop every plan (for tests)."""
    _plans.clear()
