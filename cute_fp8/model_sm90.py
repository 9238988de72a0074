"""How long a configuration of the Hopper GEMM takes, worked out: what ranks them.

    time = start + overlap(compute, DRAM) + splits

*compute*: the busiest SM's rounds of tiles, each its k-tiles and an epilogue. A k-tile takes its
MMAs at a share of the tensor core's rate, or its loads at what an SM can have under way. Under load
the chip is limited by power, not by its clock: the shares are what that leaves, and what differs
between tiles is how much of their promotion and their loads other warpgroups hide. *DRAM*: each
operand once.

The constants were fitted to one sweep on an H200 (perf/NOTES.md, "Hopper"). They rank
configurations; between those within a few per cent of each other they are no better than a guess.
"""

from __future__ import annotations

from cute_fp8.gpus import Gpu
from cute_fp8.kernels.config_sm90 import WGMMA_M, HopperConfig
from cute_fp8.model import OUT_BYTES, OVERLAP, Prediction

#: Launch, set-up, first loads, last epilogue.
START_US = 1.2
#: Dense e4m3 operations per clock of an SM.
FLOPS_PER_CLK = 8192.0
#: What of them MMAs reach under load, at the rated clock: with promotion, by warpgroups and sets of
#: partial sums; without.
PRECISE_SHARE = {(1, 2): 0.57, (2, 2): 0.645, (2, 1): 0.645, (3, 1): 0.652}
FAST_SHARE = 0.683
#: A k-tile of one CTA takes this long at least, however small.
K_TILE_CLK = 250.0
#: Of a tile, and per output of a thread.
EPILOGUE_CLK, OUTPUT_CLK = 900.0, 15.0
#: What CTAs that split a tile spend on starting, meeting and exchanging sums: they do not stay for
#: a second tile.
SPLIT_US = 2.6
#: Clusters of four find fewer SMs: they must lie within one of the chip's clusters of SMs.
SMS_OF_FOUR = 96
#: What sharing loads saves and what waiting for each other costs, per k-tile.
SHARED_SAVING, SHARED_CLK = 0.012, 20.0
#: From a load's issue to its arrival; what an SM takes from L2 per clock.
LATENCY_US, SM_BYTES_PER_CLK = 1.0, 55.0


def predict_hopper(config: HopperConfig, gpu: Gpu, m: int, n: int, k: int) -> Prediction:
    """The time of ``[m, k]`` times ``[n, k]`` transposed."""
    tile, clock = config.tile, gpu.clock_mhz
    tiles = -(-m // (tile.m * tile.sharers_m)) * -(-n // (tile.n * tile.sharers_n))
    units = tiles * tile.cluster
    rounds = -(-units // (SMS_OF_FOUR if tile.cluster > 2 else gpu.sms))
    k_tiles = -(-k // (tile.k * tile.splits))

    k_tile = _k_tile_clk(config)
    under_way = config.stages * config.stage_bytes / (LATENCY_US * clock)
    fill = config.stage_bytes / min(SM_BYTES_PER_CLK, under_way)
    if tile.sharers > 1:
        k_tile = k_tile * (1 - SHARED_SAVING) + SHARED_CLK
    epilogue = EPILOGUE_CLK + OUTPUT_CLK * tile.m * tile.n / (tile.group_warps * 32)
    compute_us = rounds * (k_tiles * max(k_tile, fill) + epilogue) / clock
    split_us = rounds * SPLIT_US if tile.splits > 1 else 0.0

    columns = n // 2 if config.epilogue.gated else n
    moved = (m + n) * k + m * columns * OUT_BYTES[config.epilogue.out]
    dram_us = moved * 1e-3 / (gpu.dram_gbps * gpu.read_share)
    busiest = max(compute_us, dram_us)
    busy = busiest and sum((us / busiest) ** OVERLAP for us in (compute_us, dram_us))
    return Prediction(
        us=START_US + busiest * busy ** (1 / OVERLAP) + split_us,
        start_us=START_US,
        compute_us=compute_us,
        l2_us=0.0,
        dram_us=dram_us,
        split_us=split_us,
        units=units,
        rounds=rounds,
    )


def _k_tile_clk(config: HopperConfig) -> float:
    """Clocks of one CTA for the MMAs of a k-tile."""
    tile = config.tile
    # An instruction of fewer than 64 columns is held up by its operands from shared memory.
    columns = max(tile.part, WGMMA_M) * (tile.rows_b // tile.part)
    flops = 2.0 * tile.rows_a * columns * tile.k
    sets = tile.sets(config.fast_accum)
    # Of a tile that is pinned, not of the space, the least.
    precise = PRECISE_SHARE.get((tile.warpgroups, sets), min(PRECISE_SHARE.values()))
    share = precise if sets else FAST_SHARE
    return max(K_TILE_CLK, flops / FLOPS_PER_CLK / share)
