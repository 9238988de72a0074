"""Plans: what a GEMM call has left to do once its like has been seen before.

The first call of a combination of shapes, strides, dtypes, devices and options checks everything,
picks a route and prepares it: a :class:`Plan`, kept under a key of all that was checked. A later
call finds the plan and checks the few things that no key holds: addresses, grad mode, overlap.

Reading all those properties takes longer than launching a kernel. A CuTe kernel checks its tensors
itself, in compiled code, so for it a second, short key of what decides *which* kernel runs is
enough. What such a kernel refuses goes through all checks, one of which says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_fp8 import settings
from cute_fp8.arguments import misaligned_by
from cute_fp8.dispatch import Route, select
from cute_fp8.gemms import reference, torch_backend
from cute_fp8.gemms.launch import CuteGemm, Launcher
from cute_fp8.gemms.problem import (
    E8M0,
    GemmProblem,
    Operands,
    check_gemm,
    check_grad,
    check_overlap,
)
from cute_fp8.gemms.reference import Output

#: Plans of each kind kept at most; past that, all are dropped and made again as they are met.
MAX_PLANS = 16_384

Run = Callable[[Operands], Output]


@dataclass(frozen=True)
class Plan:
    """A checked problem, the callable that runs it, and for a CuTe kernel its short way."""

    problem: GemmProblem
    run: Run
    launcher: Launcher | None = None


#: By the short key, which :func:`cute_fp8.gemm` looks up itself.
launchers: dict[Hashable, Launcher] = {}
_plans: dict[Hashable, Plan] = {}


def short_key(
    operands: Operands,
    activation: str | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    gated: bool = False,
) -> Hashable:
    """What decides which kernel runs, given that the kernel and its launcher check the rest."""
    xq, sx, wq, sw, bias, residual, _ = operands
    key = (
        xq.shape,
        sx.shape,
        wq.shape,
        sw.shape,
        sx.dtype,
        xq.get_device(),
        bias if bias is None else bias.dtype,
        residual if residual is None else residual.dtype,
        activation,
        out_dtype,
        fast_accum,
        settings.current(),
    )
    return (*key, "gated") if gated else key


def run_gemm(
    operands: Operands,
    activation: str | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    gated: bool = False,
) -> Output:
    """Run a GEMM eagerly, with every check; see :func:`cute_fp8.gemm` and ``gemm_gated``."""
    plan = _checked_plan(operands, activation, out_dtype, fast_accum, gated)
    if plan.launcher is not None:
        key = short_key(operands, activation, out_dtype, fast_accum, gated)
        _remember(launchers, key, plan.launcher)
    return plan.run(operands)


def _checked_plan(
    operands: Operands,
    activation: str | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    gated: bool,
) -> Plan:
    """The plan of a call whose every argument has been checked."""
    try:
        traits = tuple(None if t is None else _traits(t) for t in operands)
        key = (traits, activation, out_dtype, fast_accum, gated, settings.current())
        plan = _plans.get(key)
    except (AttributeError, RuntimeError, TypeError):
        plan = None  # no (strided) tensors, or options that do not hash: the check says which
    if plan is None or _misaligned(operands):
        plan = _make_plan(check_gemm(operands, activation, out_dtype, fast_accum, gated))
        _remember(_plans, key, plan)
    else:
        check_overlap(operands)
        check_grad(operands)
    return plan


def _traits(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _misaligned(operands: Operands) -> bool:
    aligned = [operands.xq, operands.wq, operands.residual, operands.out]
    aligned += [t for t in (operands.sx, operands.sw) if t.dtype is E8M0 and t.dim() == 1]
    return any(t is not None and misaligned_by(t) for t in aligned)


def _remember(store: dict[Hashable, Any], key: Hashable, value: object) -> None:
    if len(store) >= MAX_PLANS:
        store.clear()
    store[key] = value


def _make_plan(problem: GemmProblem) -> Plan:
    route = select(problem, settings.current())
    if problem.m == 0:
        return Plan(problem, partial(_no_tokens, problem))
    if route.pick is None:
        return Plan(problem, partial(_without_grad, function_of(route), problem))
    gemm = CuteGemm(problem, route)
    return Plan(problem, gemm.run, gemm.launcher())


def function_of(route: Route) -> Callable[[GemmProblem, Operands], Output]:
    """The torch function of a route that is no CuTe kernel."""
    module = torch_backend if route.entry.backend == "torch" else reference
    function: Callable[[GemmProblem, Operands], Output] = getattr(module, route.entry.kernel)
    return function


def _without_grad(
    function: Callable[[GemmProblem, Operands], Output], problem: GemmProblem, operands: Operands
) -> Output:
    with torch.no_grad():
        return function(problem, operands)


def _no_tokens(problem: GemmProblem, operands: Operands) -> Output:
    """No tokens, no launch: the epilogue of nothing has the right shape and dtype."""
    with torch.no_grad():
        acc = torch.empty((0, problem.n), dtype=torch.float32, device=problem.device)
        return reference.finish(problem, acc, operands)


def forget() -> None:
    """Drop every plan (for tests)."""
    _plans.clear()
    launchers.clear()
