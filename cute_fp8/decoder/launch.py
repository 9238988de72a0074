"""Finding the decoder's own kernels, and launching each once."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from cute_fp8 import settings
from cute_fp8.build import compiler
from cute_fp8.decoder.problem import BlockProblem
from cute_fp8.dispatch import select
from cute_fp8.kernels.configs import FusedConfig
from cute_fp8.kernels.mlp_config import HIDDEN_MULTIPLE, WORKSPACE_WORDS, MlpConfig
from cute_fp8.kernels.projection_config import ProjectionConfig

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


def launch_once(kernel: Callable[..., None], config: FusedConfig, device: torch.device) -> None:
    """Run the kernel on one token: the driver loads its code at the first launch."""
    if isinstance(config, MlpConfig):
        _launch_mlp(kernel, config, device)
        return
    if isinstance(config, ProjectionConfig):
        _launch_projection(kernel, config, device)
        return
    dtype, d = getattr(torch, config.dtype), config.head_dim

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    norm = ones(d) if config.norm else None
    v = ones(1, 1, 1, d) if config.values else None
    qkv, rotation = ones(1, 3 * d), ones(1, 1, d)
    kernel(qkv, rotation, rotation, norm, norm, ones(1, 1, 1, d), ones(1, 1, 1, d), v, 1.0)


def _launch_mlp(kernel: Callable[..., None], config: MlpConfig, device: torch.device) -> None:
    """By one CTA."""
    dtype, n = getattr(torch, config.dtype), HIDDEN_MULTIPLE

    def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device).to(dtype)

    e4m3, fp32 = torch.float8_e4m3fn, torch.float32
    kernel(
        zeros(dtype, 1, n),
        zeros(getattr(torch, config.weight), n),
        zeros(e4m3, 2 * n, n),
        zeros(fp32, 2 * n),
        zeros(e4m3, n, n),
        zeros(fp32, n),
        zeros(e4m3, 1, n),
        zeros(fp32, 1),
        zeros(dtype, 1, n),
        zeros(e4m3, 1, n),
        zeros(fp32, 1),
        zeros(dtype, 1, n),
        zeros(torch.int32, WORKSPACE_WORDS),
        1.0,
        1,
    )


def _launch_projection(
    kernel: Callable[..., None], config: ProjectionConfig, device: torch.device
) -> None:
    """By one CTA. K is the kernel's."""
    dtype, k, n = getattr(torch, config.dtype), config.least_k, HIDDEN_MULTIPLE
    e4m3, fp32 = torch.float8_e4m3fn, torch.float32

    def zeros(dtype: torch.dtype | str | None, *shape: int) -> Tensor | None:
        if dtype is None:
            return None
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return torch.zeros(shape, dtype=torch.uint8, device=device).to(dtype)

    kernel(
        zeros(dtype, 1, k),
        zeros(config.weight, k),
        zeros(e4m3, n, k),
        zeros(fp32, n),
        zeros(config.bias, n),
        zeros(dtype, 1, n) if config.residual else None,
        zeros(e4m3, 1, k),
        zeros(fp32, 1),
        zeros(dtype, 1, n),
        1.0,
        1,
    )
