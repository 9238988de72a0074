"""How long a configuration of the Hopper GEMM takes, worked out: what ranks them.

    time = start + overlap(compute, DRAM) + splits

*compute*: the busiest SM's rounds of tiles, each its k-tiles and an epilogue, which in ping-pong is
seen once. A k-tile takes its MMAs at a share of the tensor core's rate, or an SM's loads, or the
least that a warpgroup needs to get through one; beside that, all SMs' loads from L2. Under load
the chip is limited by power, not by its clock: the shares are what that leaves, and what differs
between tiles is how much of their promotion and their loads other warpgroups hide. *DRAM*: each
operand once.

The constants were fitted to one run on an H200 (perf/NOTES.md, "Hopper"). They rank
configurations; between those within a few per cent of each other they are no better than a guess.
"""

from __future__ import annotations

from cute_fp8.gemms.model import OUT_BYTES, OVERLAP, Prediction
from cute_fp8.gpus import Gpu
from cute_fp8.kernels.config import WARP_SIZE
from cute_fp8.kernels.config_sm90 import WGMMA_M, HopperConfig

#: Launch, set-up, first loads.
START_US = 0.97
#: Dense e4m3 operations per clock of an SM.
FLOPS_PER_CLK = 8192.0
#: What of them MMAs reach under load, at the rated clock: with promotion, by warpgroups and sets of
#: partial sums; without; without in ping-pong.
PRECISE_SHARE = {(1, 2): 0.55, (2, 2): 0.685, (2, 1): 0.65, (3, 1): 0.66}
FAST_SHARE, PINGPONG_SHARE = 0.693, 0.705
#: A k-tile of one CTA takes this long at least, however small.
K_TILE_CLK = 220.0
#: What an SM can load from L2 per clock, and its share of what all can.
SM_BYTES_PER_CLK, L2_BYTES_PER_CLK, L2_OVERLAP = 64.0, 72.0, 3.4
#: Of a tile; and per output of a thread, through boxes and from registers.
EPILOGUE_CLK, BOXED_CLK, OUTPUT_CLK = 1065.0, 6.0, 19.5
#: What CTAs that split a tile spend on starting, meeting and exchanging sums: they do not stay for
#: a second tile.
SPLIT_US = 1.8
#: What a k-tile takes of what it would without, where CTAs share loads: they wait for each other,
#: which pays where operands and output are so large that L2 holds little of them.
SHARED, SHARED_LARGE, LARGE_BYTES = 1.05, 1.01, 150e6


def predict_hopper(config: HopperConfig, gpu: Gpu, m: int, n: int, k: int) -> Prediction:
    """The time of ``[m, k]`` times ``[n, k]`` transposed."""
    tile, clock = config.tile, gpu.clock_mhz
    tiles = -(-m // (tile.m * tile.sharers_m)) * -(-n // (tile.n * tile.sharers_n))
    units = tiles * tile.cluster
    rounds = -(-units // gpu.sms)
    k_tiles = -(-k // (tile.k * tile.splits))
    columns = n // 2 if config.epilogue.gated else n
    moved = (m + n) * k + m * columns * OUT_BYTES[config.epilogue.out]

    k_tile = _k_tile_clk(config, min(1.0, units / gpu.sms))
    if tile.sharers > 1:
        k_tile *= SHARED_LARGE if moved > LARGE_BYTES else SHARED
    outputs = tile.m * tile.n / (tile.group_warps * WARP_SIZE)
    epilogue = EPILOGUE_CLK + (BOXED_CLK if config.boxes else OUTPUT_CLK) * outputs
    seen = 1 if tile.pingpong else rounds
    compute_us = (rounds * k_tiles * k_tile + seen * epilogue) / clock
    split_us = rounds * SPLIT_US if tile.splits > 1 else 0.0

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


def _k_tile_clk(config: HopperConfig, active: float) -> float:
    """Clocks of one CTA for a k-tile, with that share of the SMs at work."""
    tile = config.tile
    # An instruction of fewer than 64 columns is held up by its operands from shared memory.
    columns = max(tile.part, WGMMA_M) * (tile.rows_b // tile.part)
    flops = 2.0 * tile.rows_a * columns * tile.k
    if config.fast_accum:
        share = PINGPONG_SHARE if tile.pingpong else FAST_SHARE
    else:
        # Of a tile that is pinned, not of the space, the least.
        least = min(PRECISE_SHARE.values())
        share = PRECISE_SHARE.get((tile.warpgroups, tile.sets(fast_accum=False)), least)
    own = max(K_TILE_CLK, flops / FLOPS_PER_CLK / share, config.stage_bytes / SM_BYTES_PER_CLK)
    # What CTAs share L2 delivers once.
    shared = max(tile.m, tile.n) * tile.k * (tile.sharers - 1) / tile.sharers
    loads = (config.stage_bytes - shared) * active / L2_BYTES_PER_CLK
    return float((own**L2_OVERLAP + loads**L2_OVERLAP) ** (1 / L2_OVERLAP))
