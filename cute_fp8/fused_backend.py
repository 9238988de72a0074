"""Launching, once each, the kernels that are no GEMM and no producer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_fp8.kernels.configs import FusedConfig


def launch_once(kernel: Callable[..., None], config: FusedConfig, device: torch.device) -> None:
    """Run the kernel on one token with one head of each: the driver loads code at its first use."""
    dtype, d = getattr(torch, config.dtype), config.head_dim

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    norm = ones(d) if config.norm else None
    v = ones(1, 1, 1, d) if config.values else None
    qkv, rotation = ones(1, 3 * d), ones(1, 1, d)
    kernel(qkv, rotation, rotation, norm, norm, ones(1, d), ones(1, 1, 1, d), v, 1.0)
