"""Plans: what a GEMM call has left to do once its like has been seen before.

The first call of a combination of shapes, strides, dtypes, devices and options checks everything,
picks a route and prepares it: a :class:`Plan`, kept under a key of all that was checked. A later
call finds the plan and checks the few things that no key holds: addresses, grad mode, overlap.

Reading all those properties takes longer than launching a kernel. A CuTe kernel checks its tensors
itself, in compiled code, so for it a second, short key of what decides *which* kernel runs is
enough. Whatever such a kernel refuses goes the long way, which finds the words for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_fp8 import reference, settings, torch_backend
from cute_fp8.cute_backend import Launch, Launcher
from cute_fp8.dispatch import Route, select
from cute_fp8.problem import ALIGNMENT, GemmProblem, check_gemm, check_grad, check_overlap
from cute_fp8.reference import Output

#: Plans of each kind kept at most; then all are dropped. Serving that sees every M still fits.
MAX_PLANS = 16_384

Run = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Output
]


@dataclass(frozen=True)
class Plan:
    """A checked problem, the callable that runs it, and for a CuTe kernel its short way."""

    problem: GemmProblem
    run: Run
    launch: Launcher | None


#: By :func:`cute_fp8.gemm`'s short key, which the fast path looks up itself.
launchers: dict[Hashable, Launcher] = {}
_plans: dict[Hashable, Plan] = {}


def short_key(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Hashable:
    """What decides which kernel runs, given that the kernel checks the rest."""
    return (
        xq.shape,
        sx.shape,
        wq.shape,
        sw.shape,
        xq.get_device(),
        bias if bias is None else bias.dtype,
        residual if residual is None else residual.dtype,
        activation,
        out_dtype,
        fast_accum,
        settings.current(),
    )


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
    """Run a GEMM eagerly, with every check; see :func:`cute_fp8.gemm`."""
    plan = _checked_plan(xq, sx, wq, sw, bias, residual, activation, out_dtype, out, fast_accum)
    if plan.launch is not None:
        key = short_key(xq, sx, wq, sw, bias, residual, activation, out_dtype, fast_accum)
        _remember(launchers, key, plan.launch)
    return plan.run(xq, sx, wq, sw, bias, residual, out)


def _checked_plan(
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
    """The plan of a call whose every argument has been checked."""
    tensors = (xq, sx, wq, sw, bias, residual, out)
    try:
        traits = tuple(None if t is None else _traits(t) for t in tensors)
        key = (traits, activation, out_dtype, fast_accum, settings.current())
        plan = _plans.get(key)
    except (AttributeError, RuntimeError, TypeError):
        plan = None
    if plan is None or any(
        t is not None and t.data_ptr() % ALIGNMENT for t in (xq, wq, residual, out)
    ):
        arguments = (xq, sx, wq, sw, bias, residual, activation, out_dtype, out, fast_accum)
        problem = check_gemm(*arguments)
        plan = _make_plan(problem)
        _remember(_plans, key, plan)
        return plan
    if out is not None:
        check_overlap(out, tensors[:-1])
    check_grad(tensors)
    return plan


def _traits(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _remember(store: dict[Hashable, Any], key: Hashable, value: object) -> None:
    if len(store) >= MAX_PLANS:
        store.clear()
    store[key] = value


def _make_plan(problem: GemmProblem) -> Plan:
    route = select(problem, settings.current())
    if problem.m == 0:
        return Plan(problem, _no_tokens(problem), None)
    if route.target is None:
        return Plan(problem, _bind(function_of(route), problem), None)
    launch = Launch(problem, route)
    return Plan(problem, launch.run_strided, launch.launcher())


def function_of(route: Route) -> Callable[..., Output]:
    """The torch function of a route that is no CuTe kernel.

    Called as ``f(problem, xq, sx, wq, sw, bias, residual, out)``.
    """
    module = torch_backend if route.entry.backend == "torch" else reference
    function: Callable[..., Output] = getattr(module, route.entry.kernel)
    return function


def _bind(function: Callable[..., Output], problem: GemmProblem) -> Run:
    def run(*tensors: Tensor | None) -> Output:
        with torch.no_grad():
            return function(problem, *tensors)

    return run


def _no_tokens(problem: GemmProblem) -> Run:
    """No tokens, no launch."""

    def run(*tensors: Tensor | None) -> Output:
        acc = torch.empty((0, problem.n), dtype=torch.float32, device=problem.device)
        return reference.finish(problem, acc, None, None, None, None, tensors[-1])

    return run


def forget() -> None:
    """Drop every plan (for tests)."""
    _plans.clear()
    launchers.clear()
