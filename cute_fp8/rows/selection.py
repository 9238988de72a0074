"""Which kernel a call of a producer gets."""

from __future__ import annotations

from cute_fp8.dtypes import dtype_name
from cute_fp8.kernels.row_config import RowConfig, shape_of
from cute_fp8.rows.problem import KERNEL_OPS, RowProblem


def config_of(problem: RowProblem, pdl: bool) -> RowConfig:
    """The kernel of a problem that has a view."""
    options, view = problem.options, problem.view
    assert view is not None
    op = KERNEL_OPS[problem.op]
    dtype, weight, bias = map(dtype_name, (problem.dtype, problem.weight, problem.bias))
    assert dtype is not None
    return RowConfig(
        op=op,
        dtype=dtype,
        variant=options.variant,
        shape=shape_of(problem.k, op, options.variant, dtype, weight, keep=options.keep),
        view=view.name,
        weight=weight,
        bias=bias,
        residual=problem.residual,
        round_twice=options.round_twice and op == "rmsnorm" and dtype != "float32",
        offset=options.offset != 0.0,
        interleaved=options.layout == "interleaved",
        keep=options.keep,
        blocked=options.blocked,
        pdl=pdl,
    ).check()
