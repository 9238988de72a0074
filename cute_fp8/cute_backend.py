"""Launching compiled CuTe kernels: what depends on shapes alone is prepared once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cute_fp8 import compiler
from cute_fp8.dispatch import Route
from cute_fp8.kernels.config import K_MULTIPLE, N_MULTIPLE, EpilogueConfig, GemmConfig
from cute_fp8.problem import GemmProblem, check_overlap

#: ``f(xq, sx, wq, sw, bias, residual, out) -> y``
Launcher = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor
]


def config_of(problem: GemmProblem, route: Route) -> GemmConfig:
    """The kernel configuration of a problem on its route."""
    assert route.tile is not None
    epilogue = EpilogueConfig(
        out=_name(problem.out_dtype) or "",
        bias=_name(problem.bias),
        residual=_name(problem.residual),
        activation=problem.activation,
    )
    return GemmConfig(route.tile, epilogue)


class Launch:
    """A checked problem and its compiled kernel.

    The kernel takes matrices and vectors and checks their dtypes, sizes, strides, alignment and
    devices itself, in compiled code, before it launches. What is left here is to see the arguments
    as matrices and vectors, and to allocate the output.
    """

    def __init__(self, problem: GemmProblem, route: Route):
        assert route.target is not None
        self.kernel = compiler.get(config_of(problem, route), route.target)
        self.ctas = _sm_count(problem.device)
        self.problem = problem

    def launcher(self) -> Launcher:
        """A function that launches on the current stream.

        It raises, before anything runs, where an argument is not what the kernel takes.
        """
        p = self.problem
        launch = self._plain()
        if len(p.batch) != 1 or not (p.sx_is_vector and p.sw_is_vector):
            launch = self._reshaping(launch)
        # With one GPU the current device is always the tensors'.
        return launch if torch.cuda.device_count() == 1 else self._on_its_device(launch)

    def _plain(self) -> Launcher:
        """Matrices and vectors, as the kernel takes them."""
        p, kernel, ctas = self.problem, self.kernel, self.ctas
        empty_like = torch.empty_like
        # An output's metadata without its memory: `empty_like` of it is the cheapest allocation.
        template = torch.empty((p.m, p.n), dtype=p.out_dtype, device=p.device)
        template.untyped_storage().resize_(0)

        def launch(
            xq: Tensor,
            sx: Tensor,
            wq: Tensor,
            sw: Tensor,
            bias: Tensor | None,
            residual: Tensor | None,
            out: Tensor | None,
        ) -> Tensor:
            if out is None:
                out = empty_like(template)
            else:
                check_overlap(out, (xq, sx, wq, sw, bias, residual))
                if not out.is_contiguous():
                    raise ValueError("rows of out may overlap: for the full check to say")
            kernel(xq, sx, wq, sw, bias, residual, out, ctas)
            return out

        return launch

    def _reshaping(self, launch: Launcher) -> Launcher:
        """Any accepted shapes, seen as matrices and vectors; every view costs about 1 us."""
        p = self.problem
        batched = len(p.batch) != 1

        def reshaped(
            xq: Tensor,
            sx: Tensor,
            wq: Tensor,
            sw: Tensor,
            bias: Tensor | None,
            residual: Tensor | None,
            out: Tensor | None,
        ) -> Tensor:
            if not p.sx_is_vector:
                sx = sx.view(-1).expand(p.m)
            if not p.sw_is_vector:
                sw = sw.view(-1).expand(p.n)
            if not batched:
                return launch(xq, sx, wq, sw, bias, residual, out)
            rows = None if residual is None else residual.view(p.m, p.n)
            into = None if out is None else out.view(p.m, p.n)
            y = launch(xq.view(p.m, p.k), sx, wq, sw, bias, rows, into)
            return y.view(p.out_shape) if out is None else out

        return reshaped

    def _on_its_device(self, launch: Launcher) -> Launcher:
        """With the tensors' device made the current one, and the caller's restored."""
        index = self.problem.device.index

        def launch_there(*operands: Any) -> Tensor:
            if torch.cuda.current_device() == index:
                return launch(*operands)
            with torch.cuda.device(index):
                return launch(*operands)

        return launch_there

    def run_strided(
        self,
        xq: Tensor,
        sx: Tensor,
        wq: Tensor,
        sw: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """Launch with the strides of a checked problem, whatever torch calls them.

        The slow way, for what a launcher does not take: an ``out`` with gaps between its rows, a
        single token at an odd stride, batch dimensions that no ``view`` can join.
        """
        p = self.problem
        y = torch.empty(p.out_shape, dtype=p.out_dtype, device=p.device) if out is None else out
        with torch.cuda.device(p.device):
            self.kernel(
                xq.as_strided((p.m, p.k), (p.xq_stride, 1)),
                sx.as_strided((p.m,), (p.sx_stride,)),
                wq.as_strided((p.n, p.k), (p.wq_stride, 1)),
                sw.as_strided((p.n,), (p.sw_stride,)),
                bias,
                None
                if residual is None
                else residual.as_strided((p.m, p.n), (p.residual_stride, 1)),
                y.as_strided((p.m, p.n), (p.out_stride, 1)),
                self.ctas,
            )
        return y


def load(kernel: compiler.Kernel, config: GemmConfig, device: torch.device) -> None:
    """Run the kernel once on a tiny problem: the driver loads its code at the first launch."""
    n, k = N_MULTIPLE, K_MULTIPLE
    epilogue = config.epilogue
    with torch.cuda.device(device):
        codes = torch.zeros((n, k), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        ones = torch.ones(n, device=device)
        kernel(
            codes,
            ones,
            codes,
            ones,
            None if epilogue.bias is None else ones.to(getattr(torch, epilogue.bias)),
            None
            if epilogue.residual is None
            else torch.zeros((n, n), dtype=getattr(torch, epilogue.residual), device=device),
            torch.empty((n, n), dtype=getattr(torch, epilogue.out), device=device),
            1,
        )
        torch.cuda.current_stream(device).synchronize()


@cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
