"""Which kernel configuration a problem gets."""

from __future__ import annotations

import torch

from cute_fp8.kernels.config import (
    EpilogueConfig,
    GemmConfig,
    TILE_32x64,
    TILE_128x128,
    TileConfig,
)
from cute_fp8.problem import GemmProblem

#: Up to this many tokens the weights are what is moved: more, smaller tiles keep more SMs reading.
FEW_TOKENS = 64


def pick_config(problem: GemmProblem, tile: TileConfig | None = None) -> GemmConfig:
    """The configuration for a problem; ``tile`` is a pinned one."""
    if tile is None:
        tile = TILE_32x64 if problem.m <= FEW_TOKENS else TILE_128x128
    epilogue = EpilogueConfig(
        out=dtype_name(problem.out_dtype),
        bias=None if problem.bias is None else dtype_name(problem.bias),
        residual=None if problem.residual is None else dtype_name(problem.residual),
        activation=problem.activation,
    )
    return GemmConfig(tile, epilogue)


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``: configurations know no torch."""
    return str(dtype).removeprefix("torch.")
