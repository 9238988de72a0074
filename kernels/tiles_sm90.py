"""The tiles that selection may pick for the Hopper GEMM: plain data. Stages fill shared memory."""

from __future__ import annotations

from dataclasses import replace

from .config import MBARRIER_BYTES, EpilogueConfig
from .config_sm90 import BOX_BYTES, SMEM_LIMIT_SM90, HopperConfig, HopperTile

#: Past this, more stages only lengthen the fill.
MAX_STAGES = 12


def filled(tile: HopperTile) -> HopperTile:
    """The tile with as many stages as shared memory holds, beside a box of output where it may
    have some.
    """
    one = HopperConfig(replace(tile, stages=1), EpilogueConfig())
    stage = one.stage_bytes + 2 * MBARRIER_BYTES
    least = one.smem_bytes - max(0, one.boxes - 1) * BOX_BYTES * tile.warpgroups
    stages = (SMEM_LIMIT_SM90 - least + stage) // stage
    return replace(tile, stages=min(stages, MAX_STAGES)).check()


def _tile(
    m: int,
    n: int,
    part: int,
    warpgroups: int,
    splits: int = 1,
    sharers: int = 1,
    pingpong: bool = False,
    dynamic: bool = False,
) -> HopperTile:
    tile = HopperTile(m, n, part, warpgroups, 2, False, splits, sharers, pingpong, dynamic)
    return filled(tile)


def _few(m: int, splits: int = 1) -> HopperTile:
    """For few tokens: 64 channels on the MMA's M side, and as many stages of weights as fit."""
    return filled(HopperTile(m, 64, m, 1, stages=2, swap_ab=True, splits=splits))


TILES_SM90 = (
    _tile(128, 128, 128, 2),
    _tile(256, 128, 128, 2),
    # Half the columns at a time: two sets of partial sums then fit beside 128 totals.
    _tile(256, 128, 64, 2, dynamic=True),
    _tile(192, 128, 128, 3),
    _tile(192, 128, 128, 3, sharers=2),
    _tile(128, 192, 192, 2),
    # For few hundred tokens: enough tiles for every SM.
    _tile(64, 64, 64, 1),
    _tile(64, 96, 96, 1, sharers=2),
    _tile(128, 64, 64, 2),
    _tile(128, 96, 96, 2),
    _tile(128, 64, 64, 2, splits=2),
    _tile(128, 128, 128, 2, splits=2),
    *(_few(tokens) for tokens in (8, 16, 32, 64, 128)),
    *(_few(tokens, splits=2) for tokens in (8, 16, 32, 64, 128)),
    # Without promotion only.
    _tile(128, 128, 128, 2, pingpong=True),
    _tile(128, 128, 128, 2, sharers=2, pingpong=True),
    _tile(128, 192, 192, 2, pingpong=True),
)
