"""Which tile a problem gets."""

from __future__ import annotations

from cute_fp8.kernels.config import TILE_32x64, TILE_128x128, TileConfig

#: Up to this many tokens the weights are what is moved, and more, smaller tiles keep more SMs
#: reading them.
FEW_TOKENS = 64


def pick_tile(m: int, n: int, k: int) -> TileConfig:
    """The tile for an ``m x n x k`` problem."""
    return TILE_32x64 if m <= FEW_TOKENS else TILE_128x128
