"""Launching compiled CuTe kernels: what depends on shapes alone is prepared once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_fp8 import gpus
from cute_fp8.build import compiler
from cute_fp8.dispatch import Route
from cute_fp8.frozen import frozen_blocks
from cute_fp8.gemms.problem import E8M0, GemmProblem, Operands, check_overlap
from cute_fp8.kernels.config import MX_BLOCK, RelayoutConfig
from cute_fp8.scales import blocked_numel
from cute_fp8.workspace import is_unshared, scratch_words, workspace

#: ``f(xq, sx, wq, sw, bias, residual, out) -> y``
Launcher = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Any
]


class CuteGemm:
    """A checked problem bound to its compiled kernel.

    The kernel takes matrices and vectors and checks their dtypes, sizes, strides, alignment and
    devices itself, in compiled code, before it launches. What is left here is to see the arguments
    as matrices and vectors, and to allocate the output.
    """

    def __init__(self, problem: GemmProblem, route: Route):
        assert route.target is not None and route.pick is not None
        self.pick = route.pick
        self.kernel = compiler.get(self.pick.config, route.target, problem.device)
        self.ctas = gpus.sm_count(problem.device)
        self.problem = problem
        config, splits = self.pick.config, self.pick.splits
        self.workspace_words = scratch_words(config, problem.m, problem.n, splits)
        self.submit = self._submit()
        self.blocks: ScaleBlocks | None = None
        if problem.variant == "mxfp8" and not (problem.sx_blocked and problem.sw_blocked):
            self.blocks = ScaleBlocks(route.target, problem.device)

    def launcher(self) -> Launcher:
        """A function that launches on the current stream.

        It raises ``ValueError`` or ``TypeError``, before anything runs, where an argument is not
        what the kernel takes; that need not mean that the call is wrong.
        """
        p = self.problem
        launcher = self._plain()
        if self.blocks is not None:
            launcher = self._blocking(launcher)
        if len(p.batch) != 1 or not (p.sx_is_vector and p.sw_is_vector):
            launcher = self._reshaping(launcher)
        # With one GPU the current device is always the tensors'.
        return launcher if torch.cuda.device_count() == 1 else self._on_its_device(launcher)

    def _plain(self) -> Launcher:
        """Matrices and vectors, as the kernel takes them."""
        p, kernel, ctas = self.problem, self.kernel, self.ctas
        # Scales to write or a workspace to find: the longer way to the launch.
        more = self.workspace_words > 0 or self.pick.config.epilogue.mx
        submit = self.submit
        empty_like, contiguous = torch.empty_like, torch.contiguous_format
        # One element seen as a whole output: `empty_like` of it is the cheapest allocation.
        template: Tensor | None = None

        def launch(
            xq: Tensor,
            sx: Tensor,
            wq: Tensor,
            sw: Tensor,
            bias: Tensor | None,
            residual: Tensor | None,
            out: Tensor | None,
        ) -> Tensor | tuple[Tensor, Tensor]:
            nonlocal template
            if out is None and template is not None:
                out = empty_like(template, memory_format=contiguous)
            elif out is None:
                out = torch.empty((p.m, p.out_columns), dtype=p.out_dtype, device=p.device)
                if not is_unshared():
                    one = torch.empty((), dtype=p.out_dtype, device=p.device)
                    template = one.expand(p.m, p.out_columns)
            else:
                self._check_out(Operands(xq, sx, wq, sw, bias, residual, out))
            if more:
                return submit(xq, sx, wq, sw, bias, residual, out)
            kernel(xq, sx, wq, sw, bias, residual, out, None, None, None, ctas)
            return out

        return launch

    def _check_out(self, operands: Operands) -> None:
        """What neither the key of a launcher nor the kernel knows of ``out``: where it is, whether
        its rows are apart, and for a gated one how wide it is.
        """
        out = operands.out
        assert out is not None
        check_overlap(operands)
        if not out.is_contiguous() or out.shape != (self.problem.m, self.problem.out_columns):
            raise ValueError("another shape, or rows that may overlap: for the full check to say")

    def _submit(self) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
        """Launches on matrices and vectors, the output among them."""
        p, kernel, ctas, words = self.problem, self.kernel, self.ctas, self.workspace_words
        splits = self.pick.splits if self.pick.splits > 1 else None
        numel = blocked_numel(p.m, p.out_columns // MX_BLOCK) if self.pick.config.epilogue.mx else 0

        def submit(*matrices: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
            scratch = workspace(p.device, words) if words else None
            scales = torch.empty(numel, dtype=E8M0, device=p.device) if numel else None
            kernel(*matrices, scales, scratch, splits, ctas)
            y = matrices[-1]
            assert y is not None
            return y if scales is None else (y, scales)

        return submit

    def _reshaping(self, launch: Launcher) -> Launcher:
        """Any accepted shapes, seen as matrices and vectors; every view costs about 1 us."""
        p = self.problem
        batched = len(p.batch) != 1

        def rows(tensor: Tensor | None, columns: int) -> Tensor | None:
            if tensor is None:
                return None
            # A view of as many elements would take any shape.
            if tensor.shape != (*p.batch, columns) or not tensor.is_contiguous():
                raise ValueError("rows of another shape, or with gaps: for the full check to say")
            return tensor.view(p.m, columns)

        def reshape(
            xq: Tensor,
            sx: Tensor,
            wq: Tensor,
            sw: Tensor,
            bias: Tensor | None,
            residual: Tensor | None,
            out: Tensor | None,
        ) -> Tensor | tuple[Tensor, Tensor]:
            if not p.sx_is_vector:
                sx = sx.reshape(-1).expand(p.m)
            if not p.sw_is_vector:
                sw = sw.reshape(-1).expand(p.n)
            if not batched:
                return launch(xq, sx, wq, sw, bias, residual, out)
            matrix = rows(xq, p.k)
            assert matrix is not None
            columns = p.out_columns
            y = launch(matrix, sx, wq, sw, bias, rows(residual, columns), rows(out, columns))
            if isinstance(y, tuple):
                return y[0].view(p.out_shape), y[1]
            return y.view(p.out_shape) if out is None else out

        return reshape

    def _blocking(self, launch: Launcher) -> Launcher:
        """Row-major e8m0 scales brought into 128x4 blocks, one launch each, at every call.

        But for a weight's that their owner has frozen: no one else can tell when they are written
        to (through ``.data``, say, or by a graph).
        """

        def launch_blocked(
            xq: Tensor,
            sx: Tensor,
            wq: Tensor,
            sw: Tensor,
            bias: Tensor | None,
            residual: Tensor | None,
            out: Tensor | None,
        ) -> Tensor:
            sx, sw = self._in_blocks(sx, sw)
            return launch(xq, sx, wq, sw, bias, residual, out)

        return launch_blocked

    def _in_blocks(self, sx: Tensor, sw: Tensor) -> tuple[Tensor, Tensor]:
        """Both operands' e8m0 scales in 128x4 blocks."""
        p, blocks = self.problem, self.blocks
        if blocks is None:
            return sx, sw
        if not p.sx_blocked:
            sx = blocks.of(sx, p.m)
        if not p.sw_blocked:
            frozen = frozen_blocks(sw)
            sw = blocks.of(sw, p.n) if frozen is None else frozen
        return sx, sw

    def _on_its_device(self, launch: Launcher) -> Launcher:
        """With the tensors' device made the current one, and the caller's restored."""
        index = self.problem.device.index

        def launch_there(*operands: Any) -> Tensor:
            if torch.cuda.current_device() == index:
                return launch(*operands)
            with torch.cuda.device(index):
                return launch(*operands)

        return launch_there

    def run(self, operands: Operands) -> Tensor | tuple[Tensor, Tensor]:
        """Launch with the strides of the checked problem, whatever torch calls them.

        The slow way, for what a launcher does not take: rows with gaps under batch dimensions or in
        ``out``, a single token at an odd stride.
        """
        p, (xq, sx, wq, sw, bias, residual, out) = self.problem, operands
        y = torch.empty(p.out_shape, dtype=p.out_dtype, device=p.device) if out is None else out
        if residual is not None:
            residual = residual.as_strided((p.m, p.out_columns), (p.residual_stride, 1))
        with torch.cuda.device(p.device), torch.no_grad():
            if p.variant == "per_token":
                sx = sx.as_strided((p.m,), (p.sx_stride,))
                sw = sw.as_strided((p.n,), (p.sw_stride,))
            else:
                sx, sw = self._in_blocks(sx, sw)
            done = self.submit(
                xq.as_strided((p.m, p.k), (p.xq_stride, 1)),
                sx,
                wq.as_strided((p.n, p.k), (p.wq_stride, 1)),
                sw,
                bias,
                residual,
                y.as_strided((p.m, p.out_columns), (p.out_stride, 1)),
            )
        return (y, done[1]) if isinstance(done, tuple) else y


class ScaleBlocks:
    """Row-major e8m0 scales to 128x4 blocks on the GPU, one launch each."""

    def __init__(self, target: str, device: torch.device):
        self._kernel = compiler.get(RelayoutConfig(), target, device)

    def of(self, scale: Tensor, rows: int) -> Tensor:
        """The blocked form of ``[..., columns]`` scales of ``rows`` rows."""
        if not scale.is_contiguous():
            raise ValueError("scales with gaps: for the full check to say")
        columns = scale.shape[-1]
        blocked = scale.new_empty(blocked_numel(rows, columns))
        self._kernel(scale.view(rows, columns), blocked)
        return blocked
