"""Launching compiled CuTe kernels: everything that depends on shapes alone is packed once, per plan."""

from __future__ import annotations

from array import array
from functools import cache

import torch
from torch import Tensor

from cute_fp8 import compiler
from cute_fp8.dispatch import Route
from cute_fp8.kernels.config import EpilogueConfig, GemmConfig
from cute_fp8.problem import GemmProblem

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


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
    """One problem's launch: the compiled kernel and its packed sizes; called with tensors only."""

    __slots__ = ("_device", "_guard", "_index", "_kernel", "_sizes", "_sizes_address", "_template")

    def __init__(self, problem: GemmProblem, route: Route):
        assert route.target is not None
        config = config_of(problem, route)
        self._kernel = compiler.get(config, route.target)
        self._device = problem.device
        self._index = problem.device.index
        # With one GPU the current device is always the tensors'.
        self._guard = torch.cuda.device_count() > 1
        self._sizes = array("q", _sizes(problem))
        self._sizes_address = self._sizes.buffer_info()[0]
        # One element seen as the whole output: `empty_like` of it is the cheapest way to allocate one.
        one = torch.empty((), dtype=problem.out_dtype, device=problem.device)
        self._template = one.expand(problem.out_shape)

    def __call__(
        self,
        xq: Tensor,
        sx: Tensor,
        wq: Tensor,
        sw: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        if self._guard and torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self._launch(xq, sx, wq, sw, bias, residual, out)
        return self._launch(xq, sx, wq, sw, bias, residual, out)

    def _launch(
        self,
        xq: Tensor,
        sx: Tensor,
        wq: Tensor,
        sw: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        if out is None:
            out = torch.empty_like(self._template, memory_format=torch.contiguous_format)
        self._kernel(
            xq.data_ptr(),
            wq.data_ptr(),
            out.data_ptr(),
            sx.data_ptr(),
            sw.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            self._sizes_address,
            _raw_stream(self._index),
        )
        return out


def _sizes(problem: GemmProblem) -> list[int]:
    """In the order of ``kernels.gemm_sm120.SIZES``."""
    return [
        problem.m,
        problem.n,
        problem.k,
        problem.xq_stride,
        problem.wq_stride,
        problem.out_stride,
        problem.residual_stride,
        problem.sx_stride,
        problem.sw_stride,
        _sm_count(problem.device),
    ]


def load(kernel: compiler.Kernel, config: GemmConfig, device: torch.device) -> None:
    """Run the kernel once on a tiny problem: the driver loads its code at the first launch."""
    n, k = 8, 16
    with torch.cuda.device(device):
        dtypes = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
        codes = torch.zeros((n, k), dtype=torch.uint8, device=device)
        values = torch.zeros(n, dtype=torch.float32, device=device)
        out = torch.empty((1, n), dtype=dtypes[config.epilogue.out], device=device)
        sizes = array("q", [1, n, k, k, k, n, n, 0, 1, 1])
        address = codes.data_ptr()
        scale = values.data_ptr()
        stream = torch.cuda.current_stream(device)
        kernel(
            address, address, out.data_ptr(), scale, scale, scale, scale, sizes.buffer_info()[0], stream.cuda_stream
        )
        stream.synchronize()


@cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
