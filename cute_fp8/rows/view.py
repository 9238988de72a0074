"""How a row kernel addresses x."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_fp8.arguments import ALIGNMENT
from cute_fp8.kernels.row_config import CHUNK, GATES, NORMS
from cute_fp8.rows.problem import KERNEL_OPS, RowInputs, RowOptions, RowProblem, check_rows


def without_data(op: str, m: int, k: int, variant: str, residual: bool) -> RowProblem:
    """The call on contiguous bf16 rows that have no memory: for ``explain``.

    As it is made where nothing is said: RMSNorm rounds as Hugging Face's.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    kernel_op = KERNEL_OPS[op]
    weight = empty(k) if kernel_op in NORMS else None
    x = empty(m, 2 * k if kernel_op in GATES else k)
    if op == "attention_out_quantize":
        x = empty(1, 1, m, k)
    added = empty(m, k) if residual and weight is not None else None
    rounding = "hf" if op == "rmsnorm_quantize" else "fused"
    options = RowOptions(op, variant, rounding=rounding)
    problem = check_rows(RowInputs(x, weight, residual=added), options)
    return replace(problem, view=view_of(x, problem))


@dataclass(frozen=True)
class View:
    """x as a row kernel addresses it: see ``kernels/row_inputs.py``.

    Attributes:
        name: ``matrix``, ``heads`` or ``scattered``.
        shape, strides: of x seen so.
        copy: no such view exists; x has to be made contiguous first.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    copy: bool = False


def view_of(x: Tensor, problem: RowProblem) -> View:
    """How x is addressed, whatever its strides."""
    if problem.op == "attention_out_quantize":
        (b, h, s, d), (sb, sh, ss, sd) = x.shape, x.stride()
        rows, columns = _merged([(b, sb), (s, ss)]), _merged([(h, sh), (d, sd)])
    else:
        rows = _merged(list(zip(x.shape[:-1], x.stride()[:-1], strict=True)))
        columns = [(x.shape[-1], x.stride(-1))]
    width = problem.k * (2 if problem.options.op.removesuffix("_quantize") in GATES else 1)
    if len(rows) > 2:
        return View("matrix", (problem.m, width), (width, 1), copy=True)
    per_access = ALIGNMENT // x.element_size()
    aligned = x.data_ptr() % ALIGNMENT == 0 and columns[-1][1] == 1
    outer = [stride for _, stride in (*rows, *columns[:-1])]
    aligned = aligned and not any(stride % per_access for stride in outer)
    if aligned and len(rows) < 2 and len(columns) == 1:
        return View("matrix", (problem.m, width), (rows[0][1] if rows else width, 1))
    # One row or column of a size that is not there: any stride will do.
    rows, columns = ([(1, 0)] * (2 - len(dims)) + dims for dims in (rows, columns))
    sizes, strides = zip(*rows, *columns, strict=True)
    vectors = aligned and columns[-1][0] % CHUNK == 0
    return View("heads" if vectors else "scattered", sizes, strides)


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sizes and strides with neighbours that one stride walks as one, and none of size 1."""
    found: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found
