"""Plans: what a call of a producer has left to do once its like has been seen before.

The first call of a combination of shapes, strides, dtypes, devices, alignments and options is
checked and routed, and what it comes to is kept under a key of all of these. A later call finds it
and checks the few things that no key holds: grad mode, the tensors to write, overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from cute_fp8 import settings
from cute_fp8.arguments import ALIGNMENT
from cute_fp8.dispatch import select
from cute_fp8.gemms.plan import MAX_PLANS
from cute_fp8.rows import reference
from cute_fp8.rows.launch import RowKernel
from cute_fp8.rows.problem import (
    RowInputs,
    RowOptions,
    RowProblem,
    check_out,
    check_row_grad,
    check_row_overlap,
    check_rows,
)
from cute_fp8.rows.view import view_of

Out = Sequence[Tensor] | None
Results = tuple[Tensor, ...]
Run = Callable[[RowInputs, Out], Results]

_plans: dict[Hashable, tuple[RowProblem, Run]] = {}


def run_rows(inputs: RowInputs, options: RowOptions, out: Out) -> Results:
    """Run a producer eagerly, with every check."""
    try:
        key = (options, settings.current(), *map(_traits, inputs))
        plan = _plans.get(key)
    except (AttributeError, RuntimeError, TypeError):
        # No (strided) tensors, or options that do not hash: the check says which.
        check_rows(inputs, options)
        raise
    if plan is None:
        plan = _plan(inputs, options)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    problem, launch = plan
    check_row_grad(inputs, options)
    if out is not None:
        check_out(problem, inputs, out)
        check_row_overlap(inputs, out)
    return launch(inputs, out)


def _traits(tensor: Tensor | None) -> Hashable:
    """What decides the kernel: addresses too, as far as they decide how it may read."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % ALIGNMENT


def _plan(inputs: RowInputs, options: RowOptions) -> tuple[RowProblem, Run]:
    problem = check_rows(inputs, options)
    if problem.m and inputs.x.is_cuda:
        problem = replace(problem, view=view_of(inputs.x, problem))
        route = select(problem, settings.current())
        if route.rows is not None:
            return problem, RowKernel(problem, route).run
    return problem, partial(reference.rows, problem)


def forget() -> None:
    """Drop every plan (for tests)."""
    _plans.clear()
