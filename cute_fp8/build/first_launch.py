"""The first launch of a compiled kernel, on a tiny problem: with it the driver loads its code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_fp8.gemms.problem import E4M3, E8M0
from cute_fp8.kernels.config import MMA_K, RelayoutConfig
from cute_fp8.kernels.config_sm90 import HopperTile
from cute_fp8.kernels.configs import AnyGemm, Config
from cute_fp8.kernels.mlp_config import HIDDEN_MULTIPLE, WORKSPACE_WORDS, MlpConfig
from cute_fp8.kernels.projection_config import ProjectionConfig
from cute_fp8.kernels.rope_config import RopeConfig
from cute_fp8.kernels.row_config import GATES, RowConfig
from cute_fp8.scales import blocked_numel
from cute_fp8.workspace import scratch_words

if TYPE_CHECKING:
    from cute_fp8.build.compiler import Kernel

Arguments = tuple[Tensor | float | None, ...]
FP32 = torch.float32


class Zeros:
    """Tensors of zeros on a device."""

    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self, dtype: torch.dtype | str, *shape: int) -> Tensor:
        """One of a dtype or its name."""
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        if dtype.itemsize == 1:
            return torch.zeros(shape, dtype=torch.uint8, device=self.device).view(dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def maybe(self, dtype: str | None, *shape: int) -> Tensor | None:
        """None without a dtype."""
        return None if dtype is None else self(dtype, *shape)

    def blocks(self, rows: int) -> Tensor:
        """MX scales of some rows, blocked."""
        return self(E8M0, blocked_numel(rows, 1))


def _gemm(config: AnyGemm, zeros: Zeros) -> Arguments:
    m, n, k, epilogue = 1, config.tile.n, MMA_K, config.epilogue
    columns = n // 2 if epilogue.gated else n
    words = scratch_words(config, m, n, 1)
    return (
        zeros(E4M3, m, k),
        zeros.blocks(m) if config.block_scaled else zeros(FP32, m),
        zeros(E4M3, n, k),
        zeros.blocks(n) if config.block_scaled else zeros(FP32, n),
        zeros.maybe(epilogue.bias, n),
        zeros.maybe(epilogue.residual, m, columns),
        zeros(epilogue.out, m, columns),
        zeros.blocks(m) if epilogue.mx else None,
        zeros(torch.int32, words) if words else None,
        1 if config.split_k else None,
        # Multiprocessors: as many as a cluster takes.
        config.tile.cluster if isinstance(config.tile, HopperTile) else 1,
    )


def _relayout(config: RelayoutConfig, zeros: Zeros) -> Arguments:
    return zeros(E8M0, 8, 1), zeros.blocks(8)


def _rows(config: RowConfig, zeros: Zeros) -> Arguments:
    k = 32
    x = zeros(config.dtype, 1, 2 * k if config.op in GATES else k)
    scales = zeros(FP32, 1)
    if config.variant == "mxfp8":
        scales = zeros.blocks(1) if config.blocked else zeros(E8M0, 1, 1)
    return (
        x if config.view == "matrix" else x.view(1, 1, 1, -1),
        zeros.maybe(config.weight, k),
        zeros.maybe(config.bias, k),
        zeros(config.dtype, 1, k) if config.residual else None,
        zeros(E4M3, 1, k),
        scales,
        zeros(config.dtype, 1, k) if config.residual else None,
        zeros(config.dtype, 1, k) if config.keep else None,
        1.0,
        0.0,
    )


def _mlp(config: MlpConfig, zeros: Zeros) -> Arguments:
    dtype, n = config.dtype, HIDDEN_MULTIPLE
    return (
        zeros(dtype, 1, n),
        zeros(config.weight, n),
        zeros(E4M3, 2 * n, n),
        zeros(FP32, 2 * n),
        zeros(E4M3, n, n),
        zeros(FP32, n),
        zeros(E4M3, 1, n),
        zeros(FP32, 1),
        zeros(dtype, 1, n),
        zeros(E4M3, 1, n),
        zeros(FP32, 1),
        zeros(dtype, 1, n),
        zeros(torch.int32, WORKSPACE_WORDS),
        1.0,
        1,
    )


def _projection(config: ProjectionConfig, zeros: Zeros) -> Arguments:
    """K is the kernel's."""
    dtype, k, n = config.dtype, config.least_k, HIDDEN_MULTIPLE
    return (
        zeros(dtype, 1, k),
        zeros.maybe(config.weight, k),
        zeros(E4M3, n, k),
        zeros(FP32, n),
        zeros.maybe(config.bias, n),
        zeros(dtype, 1, n) if config.residual else None,
        zeros(E4M3, 1, k),
        zeros(FP32, 1),
        zeros(dtype, 1, n),
        1.0,
        1,
    )


def _rope(config: RopeConfig, zeros: Zeros) -> Arguments:
    dtype, d = config.dtype, config.head_dim
    norm = zeros(dtype, d) if config.norm else None
    rotation, cache = zeros(dtype, 1, 1, d), zeros(dtype, 1, 1, 1, d)
    values = zeros(dtype, 1, 1, 1, d) if config.values else None
    qkv, q = zeros(dtype, 1, 3 * d), zeros(dtype, 1, 1, 1, d)
    return qkv, rotation, rotation, norm, norm, q, cache, values, 1.0


#: By a configuration's ``module``: what its kernel takes, one CTA's work.
ARGUMENTS: dict[str, Callable[[Any, Zeros], Arguments]] = {
    "gemm_sm120": _gemm,
    "gemm_sm90": _gemm,
    "relayout": _relayout,
    "row_quantize": _rows,
    "mlp": _mlp,
    "projection": _projection,
    "rope_append": _rope,
}


def launch_once(kernel: Kernel, config: Config, device: torch.device) -> None:
    """Run a kernel on a tiny problem, and wait for it."""
    with torch.cuda.device(device):
        kernel(*ARGUMENTS[config.module](config, Zeros(device)))
        torch.cuda.current_stream(device).synchronize()
