"""Which kernel configuration a problem gets."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_fp8.kernels.config import EpilogueConfig, GemmConfig, TileConfig
from cute_fp8.kernels.tiles import TILES
from cute_fp8.problem import GemmProblem


class Pick(NamedTuple):
    """A compiled kernel and, with split-K, among how many CTAs a tile's K is shared."""

    config: GemmConfig
    splits: int = 1

    @property
    def name(self) -> str:
        """The tile's name, with the number of splits if there are any."""
        return self.config.tile.name + (f"/split{self.splits}" if self.splits > 1 else "")


def pick_config(problem: GemmProblem, tile: TileConfig | None = None) -> Pick:
    """The configuration for a problem; ``tile`` is a pinned one.

    Raises:
        ValueError: a pinned tile that the problem cannot have.
    """
    epilogue = epilogue_of(problem)
    if tile is not None:
        return Pick(GemmConfig(tile, epilogue, problem.variant).check())
    tiles = TILES[problem.variant]
    few = [t for t in tiles if t.swap_ab and t.m >= problem.m]
    tile = min(few, key=lambda t: t.m) if few else tiles[0]
    return Pick(GemmConfig(tile, epilogue, problem.variant).check())


def epilogue_of(problem: GemmProblem) -> EpilogueConfig:
    """The epilogue that a problem asks for."""
    return EpilogueConfig(
        out=dtype_name(problem.out_dtype),
        bias=None if problem.bias is None else dtype_name(problem.bias),
        residual=None if problem.residual is None else dtype_name(problem.residual),
        activation=problem.activation,
        gated=problem.gated,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``: configurations know no torch."""
    return str(dtype).removeprefix("torch.")
