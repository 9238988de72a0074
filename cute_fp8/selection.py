"""Which kernel configuration a problem gets."""

from __future__ import annotations

import torch

from cute_fp8.kernels.config import TILES, EpilogueConfig, GemmConfig, TileConfig
from cute_fp8.problem import GemmProblem

#: Up to this many tokens the weights are what is moved: more, smaller tiles keep more SMs reading.
FEW_TOKENS = 64


def pick_config(problem: GemmProblem, tile: TileConfig | None = None) -> GemmConfig:
    """The configuration for a problem; ``tile`` is a pinned one.

    Raises:
        ValueError: a pinned tile that the problem's variant cannot have.
    """
    if tile is None:
        large, small = TILES[problem.variant]
        tile = small if problem.m <= FEW_TOKENS else large
    epilogue = EpilogueConfig(
        out=dtype_name(problem.out_dtype),
        bias=None if problem.bias is None else dtype_name(problem.bias),
        residual=None if problem.residual is None else dtype_name(problem.residual),
        activation=problem.activation,
    )
    return GemmConfig(tile, epilogue, problem.variant).check()


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``: configurations know no torch."""
    return str(dtype).removeprefix("torch.")
