"""Finding the decoder's own kernels: which one a call takes, looked up once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from cute_fp8 import settings
from cute_fp8.build import compiler
from cute_fp8.decoder.problem import BlockProblem
from cute_fp8.dispatch import select

#: By what decides them, the op first, the settings last; None where something else serves.
_kernels: dict[Hashable, compiler.Kernel | None] = {}


def kernel_of(
    op: str, traits: tuple[Hashable, ...], problem: Callable[[], BlockProblem]
) -> compiler.Kernel | None:
    """The compiled kernel of a call; None where something else serves it.

    Args:
        traits: what decides the problem, which is made when they are met for the first time.
    """
    key = (op, *traits, settings.current())
    if key not in _kernels:
        _kernels[key] = _select(problem())
    return _kernels[key]


def _select(problem: BlockProblem) -> compiler.Kernel | None:
    route = select(problem, settings.current())
    if route.block is None or route.target is None:
        return None
    return compiler.get(route.block, route.target, problem.device)
