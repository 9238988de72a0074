"""The tiles that selection may pick for the sm_120 GEMM, per variant: plain data.

Stages are not chosen but follow: as many as fit in 99 KB. Scales of the MXFP8 variant take room of
their own, so that some tiles have a stage less there.
"""

from __future__ import annotations

from dataclasses import replace

from .config import MBARRIER_BYTES, SMEM_LIMIT_SM120, EpilogueConfig, GemmConfig, TileConfig

#: Past this, more stages only lengthen the fill.
MAX_STAGES = 12


def filled(tile: TileConfig, variant: str, smem_limit: int = SMEM_LIMIT_SM120) -> TileConfig:
    """The tile with as many stages as shared memory holds."""
    one = GemmConfig(replace(tile, stages=1), EpilogueConfig(), variant)
    fixed = one.smem_bytes - one.stage_bytes - 2 * MBARRIER_BYTES
    stages = (smem_limit - fixed) // (one.stage_bytes + 2 * MBARRIER_BYTES)
    return replace(tile, stages=min(stages, MAX_STAGES)).check()


def _space(variant: str) -> tuple[TileConfig, ...]:
    def tile(m: int, n: int, k: int, warps: tuple[int, int], **how: bool) -> TileConfig:
        return filled(TileConfig(m, n, k, *warps, stages=2, **how), variant)

    return (
        # 64x64 warp tiles: the least shared-memory traffic per MMA, and 128 accumulators a thread.
        tile(128, 128, 128, (2, 2)),
        tile(128, 128, 64, (2, 2)),
        # The deeper ring for MXFP8, whose scales leave two stages of 128.
        tile(128, 128, 128 if variant == "per_token" else 64, (2, 2), pingpong=True),
        tile(256, 128, 64, (4, 2)),
        tile(128, 256, 64, (2, 4)),
        # For few tiles, and problems with tails: smaller.
        tile(128, 64, 128, (2, 2)),
        tile(64, 128, 128, (2, 2)),
        tile(64, 64, 128, (2, 2)),
        # Few tokens: the weights stream through a deep ring, on the MMA's M side.
        tile(64, 64, 128, (2, 2), swap_ab=True),
        tile(32, 64, 128, (1, 2), swap_ab=True),
        tile(16, 64, 128, (1, 2), swap_ab=True),
        tile(8, 64, 128, (1, 2), swap_ab=True),
        tile(16, 128, 128, (1, 2), swap_ab=True),
    )


TILES = {variant: _space(variant) for variant in ("per_token", "mxfp8")}
TILE_128x128, TILE_64x64 = TILES["per_token"][0], TILES["per_token"][7]
