"""Launching compiled row kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_fp8.build import compiler
from cute_fp8.dispatch import Route
from cute_fp8.rows.problem import RowInputs, RowOutputs, RowProblem, as_outputs


class RowKernel:
    """A checked problem bound to its compiled kernel: ``run`` launches on the current stream."""

    def __init__(self, problem: RowProblem, route: Route):
        assert route.target is not None and route.rows is not None and problem.view is not None
        self.problem, self.view = problem, problem.view
        self.kernel = compiler.get(route.rows, route.target, problem.device)

    def run(self, inputs: RowInputs, out: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """Launch; returns what the call returns."""
        p, view = self.problem, self.view
        results = self._allocated() if out is None else tuple(out)
        named = as_outputs(p, results)
        x = inputs.x.contiguous() if view.copy else inputs.x
        with torch.cuda.device(p.device), torch.no_grad():
            self.kernel(
                x.as_strided(view.shape, view.strides),
                inputs.weight,
                inputs.bias,
                self._matrix(inputs.residual),
                self._matrix(named.codes),
                named.scales,
                self._matrix(named.hidden),
                self._matrix(named.kept),
                p.options.eps,
                p.options.offset,
            )
        return results

    def _allocated(self) -> tuple[Tensor, ...]:
        p, options = self.problem, self.problem.options
        found = RowOutputs(
            torch.empty(p.shape, dtype=torch.float8_e4m3fn, device=p.device),
            torch.empty(p.scale_shape, dtype=p.scale_dtype, device=p.device),
            torch.empty(p.shape, dtype=p.dtype, device=p.device) if p.residual else None,
            torch.empty(p.shape, dtype=p.dtype, device=p.device) if options.keep else None,
        )
        return tuple(tensor for tensor in found if tensor is not None)

    def _matrix(self, tensor: Tensor | None) -> Tensor | None:
        """Rows of K, which the checks have found at one stride."""
        if tensor is None:
            return None
        p = self.problem
        if tensor.is_contiguous():
            return tensor.view(p.m, p.k)
        # Of the last dimension with more than one row in it; a single row has any.
        strides = [s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
        return tensor.as_strided((p.m, p.k), (strides[-1] if strides else p.k, 1))
