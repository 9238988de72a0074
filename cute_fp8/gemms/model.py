"""How long a configuration of the sm_120 GEMM takes on a GPU, worked out, not measured.

    time = launch + first loads + overlap(compute, L2, DRAM)

*compute*: each SM takes its share of the tiles, one after the other. A tile is its k-tiles' MMAs,
what of other instructions and of waiting the MMAs do not hide, and an epilogue, which only a
ping-pong schedule hides. With split-K the units are ranges of a tile's k-tiles; their partial sums
go through L2, and the unit that comes last adds them and runs the epilogue.

*L2*: every stage that every tile loads, and the output. *DRAM*: each operand once, or oftener where
what a band of tiles needs does not stay in L2, and the output.

Whichever takes longest sets the time; a second resource that is nearly as busy adds to it.

The constants were written down before the model was run against kernels that were measured
(tests/gemms/test_model.py); perf/NOTES.md says with what in view, and what came of it. All are of
the kind that can be read off a kernel's machine code or a chip's data sheet. They rank
configurations; a time on a GPU that nobody has measured is called *predicted*.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_fp8.gpus import Gpu
from cute_fp8.kernels.config import MMA_K, MMA_M, GemmConfig

#: From one kernel's end to the next one's first instruction in a CUDA graph, and a block's set-up.
LAUNCH_US = 1.2
#: Until the first stage has come from DRAM.
FIRST_LOAD_US = 0.6
#: How much of its pin rate DRAM reaches in writing; reading is the GPU's own ``read_share``.
WRITE_SHARE = 0.79
#: How much of L2 holds what is read again; the rest is being streamed through.
L2_SHARE = 0.6
#: What one SM takes from L2 per clock at most.
SM_BYTES_PER_CLK = 64.0
#: What shared memory delivers and takes per clock.
SMEM_BYTES_PER_CLK = 128.0
#: One ``ldmatrix.x4``: a fragment of 16 rows by 32 codes.
LDMATRIX_BYTES = 512
#: Clocks from one MMA's issue to the issue of one that adds to its result.
MMA_LATENCY_CLK = 35.0
#: A k-tile begins with a barrier and fragments that are not there yet: clocks without an MMA.
K_TILE_STALL_CLK = 100.0
#: Instructions per k-tile besides MMAs and ``ldmatrix``, and those that MXFP8 adds for its scales:
#: 0.53 and 3.00 others per MMA were read off the machine code of 128x128x128 and 32x64x128.
K_TILE_INSTRUCTIONS, SCALE_INSTRUCTIONS = 36, 30
#: An epilogue's latency, and its instructions per output: two scales, rounding, store; more for an
#: activation, a bias, a residual.
EPILOGUE_CLK = 500.0
OUTPUT_INSTRUCTIONS, ACTIVATION_INSTRUCTIONS, EXTRA_INSTRUCTIONS = 4, 10, 2
#: Partial sums written, made visible, counted.
SPLIT_SYNC_CLK = 1500.0
#: How badly resources that are both busy get in each other's way: the exponent of the norm that
#: puts them together. Two equally busy ones take 12 % longer than one.
OVERLAP = 6
#: Rows of tiles that a persistent grid walks together (kernels/scheduler.py).
RASTER_ROWS = 8

#: Warp schedulers, each with its own MMA unit.
SCHEDULERS = 4
#: One MMA, m16n8k32.
MMA_FLOPS = 2 * 16 * 8 * 32
PARTIAL_BYTES = 4
OUT_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "float8_e4m3fn": 1.0 + 1 / 32}


@dataclass(frozen=True)
class Prediction:
    """A predicted time, in microseconds, and what it is made of.

    Attributes:
        us: the whole.
        start_us: launch and first loads.
        compute_us, l2_us, dram_us: what each resource is busy for.
        split_us: what of ``compute_us`` goes into split-K's partial sums.
        units: tiles, or ranges of a tile's k-tiles.
        rounds: units that the busiest SM takes.
    """

    us: float
    start_us: float
    compute_us: float
    l2_us: float
    dram_us: float
    split_us: float
    units: int
    rounds: int

    @property
    def limit(self) -> str:
        """The busiest resource: ``compute``, ``L2`` or ``DRAM``."""
        busy = {"compute": self.compute_us, "L2": self.l2_us, "DRAM": self.dram_us}
        return max(busy, key=lambda name: busy[name])


class TileCosts:
    """What a configuration costs on a GPU per k-tile and per tile, in clocks of an SM."""

    def __init__(self, config: GemmConfig, gpu: Gpu, others_per_mma: float | None = None):
        """``others_per_mma``: another kernel's instructions per MMA; by default those of ours."""
        self.gpu, self.tile = gpu, config.tile
        self.stage_bytes = config.stage_bytes
        epilogue = config.epilogue
        self.out_bytes = OUT_BYTES[epilogue.out]
        self.residual_bytes = OUT_BYTES[epilogue.residual] if epilogue.residual else 0.0
        self.k_tile_clk = _k_tile_clk(config, gpu, others_per_mma)

        tile = self.tile
        # Gated, each pair of channels is one output.
        self.columns_per_channel = 0.5 if epilogue.gated else 1.0
        instructions = OUTPUT_INSTRUCTIONS + ACTIVATION_INSTRUCTIONS * bool(epilogue.activation)
        instructions += EXTRA_INSTRUCTIONS * (bool(epilogue.bias) + bool(epilogue.residual))
        outputs_per_scheduler = tile.m * tile.n / min(tile.group_warps, SCHEDULERS)
        self.epilogue_clk = EPILOGUE_CLK + outputs_per_scheduler * instructions / 32

    def predict(self, m: int, n: int, k: int, splits: int = 1) -> Prediction:
        """The time of ``[m, k]`` times ``[n, k]`` transposed."""
        tile, gpu = self.tile, self.gpu
        tiles_m, k_tiles = -(-m // tile.m), -(-k // tile.k)
        tiles = tiles_m * -(-n // tile.n)
        units = tiles * splits
        rounds = -(-units // gpu.sms)

        mainloop = -(-k_tiles // splits) * self.k_tile_clk
        split_clk = self._split_clk(splits, rounds)
        if splits > 1:
            clocks = rounds * mainloop + split_clk + self.epilogue_clk
        elif tile.pingpong:
            # Each of the two groups is done with a tile once in two main loops.
            busy = max(mainloop, (mainloop + self.epilogue_clk) / 2)
            clocks = rounds * busy + self.epilogue_clk
        else:
            clocks = rounds * (mainloop + self.epilogue_clk)

        outputs = m * n * self.columns_per_channel
        out_bytes = outputs * self.out_bytes
        through_l2 = tiles * k_tiles * self.stage_bytes + out_bytes
        if splits > 1:
            through_l2 += 2 * units * tile.m * tile.n * PARTIAL_BYTES
        reads = self._dram_reads(m, n, k, tiles_m) + outputs * self.residual_bytes
        compute_us = clocks / gpu.clock_mhz
        l2_us = through_l2 * 1e-3 / gpu.l2_gbps
        dram_us = (reads / gpu.read_share + out_bytes / WRITE_SHARE) * 1e-3 / gpu.dram_gbps
        busiest = max(compute_us, l2_us, dram_us)
        # Without tokens there is nothing to do.
        shares = (compute_us, l2_us, dram_us)
        powers = sum((us / busiest) ** OVERLAP for us in shares) if busiest else 0.0
        start_us = LAUNCH_US + FIRST_LOAD_US
        return Prediction(
            us=start_us + busiest * powers ** (1 / OVERLAP),
            start_us=start_us,
            compute_us=compute_us,
            l2_us=l2_us,
            dram_us=dram_us,
            split_us=split_clk / gpu.clock_mhz,
            units=units,
            rounds=rounds,
        )

    def _split_clk(self, splits: int, rounds: int) -> float:
        """Partial sums: each unit writes its own, the last of a tile reads all of them."""
        if splits == 1:
            return 0.0
        write = self.tile.m * self.tile.n * PARTIAL_BYTES / SM_BYTES_PER_CLK
        return rounds * (write + SPLIT_SYNC_CLK) + splits * write

    def _dram_reads(self, m: int, n: int, k: int, tiles_m: int) -> float:
        """Bytes of the operands that come from DRAM.

        A band of tile rows is walked to its end before the next begins: its rows of A stay in L2,
        and all of B passes through, once per band unless it stays as well.
        """
        band = min(m, RASTER_ROWS * self.tile.m) * k
        stays = n * k + band <= self.gpu.l2_bytes * L2_SHARE
        return m * k + n * k * (1 if stays else -(-tiles_m // RASTER_ROWS))


def _k_tile_clk(config: GemmConfig, gpu: Gpu, others_per_mma: float | None) -> float:
    """Clocks per k-tile: of the MMAs, of shared memory or of the loads, whichever are most."""
    tile = config.tile
    k_blocks = tile.k // MMA_K
    # A fragment of the MMA's M side is one ``ldmatrix.x4``; of its N side half of one.
    loads = k_blocks * (tile.warp_a + tile.warp_b) / MMA_M
    others: float = loads + K_TILE_INSTRUCTIONS + SCALE_INSTRUCTIONS * config.block_scaled
    if others_per_mma is not None:
        others = others_per_mma * tile.mmas_per_k_tile

    warps = tile.group_warps  # ping-pong groups multiply in turns
    per_scheduler = -(-warps // SCHEDULERS)
    mma_clk = MMA_FLOPS / (gpu.mma_flops / SCHEDULERS)
    mmas = max(per_scheduler * tile.mmas_per_k_tile * mma_clk, k_blocks * MMA_LATENCY_CLK)
    # While one of several warps waits, another one's MMAs fill the unit.
    compute = mmas + (K_TILE_STALL_CLK + others) / per_scheduler

    smem = (config.stage_bytes + warps * loads * LDMATRIX_BYTES) / SMEM_BYTES_PER_CLK
    # The ring is what can be under way at a time.
    in_flight = config.stages * config.stage_bytes / (FIRST_LOAD_US * gpu.clock_mhz)
    fill = config.stage_bytes / min(SM_BYTES_PER_CLK, in_flight)
    return max(compute, smem, fill)
