"""What a GEMM kernel is specialised for, as plain data: no DSL, no torch, usable anywhere.

A :class:`GemmConfig` is everything that one compilation is keyed by besides the target: the tile,
how the warps divide it, and the epilogue. Problem sizes and strides are run-time values and not in
here.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP_SIZE = 32
#: The MMA that both the native instruction and its stand-in compute: m16n8k32.
MMA_M, MMA_N, MMA_K = 16, 8, 32
#: Shared memory that one block may use on sm_120 and sm_121 (99 KB); sm_90 has more.
SMEM_LIMIT_SM120 = 101_376
#: A 128x4 block of e8m0 scales serves 128 rows and 128 of K, a byte for each 32: see
#: ``cute_fp8/scales.py`` for its order.
SCALE_BLOCK_ROWS, SCALE_BLOCK_K, SCALE_BLOCK_BYTES = 128, 128, 512
#: Codes along K, or output columns, that share one e8m0 scale.
MX_BLOCK = 32
VARIANTS = ("per_token", "mxfp8")
#: 64x64: 128 of a thread's 255 registers are accumulators.
MAX_WARP_TILE = 64 * 64
#: Output columns that the four lanes of a quad store together.
STORE_COLUMNS = 32
MAX_MMA_WARPS = 8
#: ``setmaxnreg`` moves registers between aligned groups of four warps: from the producer's to the
#: two of MMA warps. Together at most 512 per quarter of the SM.
REGISTER_GROUP, PRODUCER_REGISTERS, MMA_REGISTERS = 4, 40, 232
#: One 64-bit mbarrier.
MBARRIER_BYTES = 8
#: Split-K counts arrivals per output tile and warp. The counters have the first words of every
#: workspace to themselves: they are 0 between launches, the parts of tiles after them are not. So
#: is what the MLP kernel has there.
WORKSPACE_COUNTERS = 1 << 15
#: What cluster launch control writes: 16 bytes.
CLC_ANSWER_BYTES = 16
#: A 128-byte swizzle repeats every 8 rows: each operand's stages start on a multiple of this.
STAGE_ALIGNMENT = 1024

#: What N and K must be multiples of: the epilogue's 8 columns a lane, TMA's 16 bytes.
N_MULTIPLE, K_MULTIPLE = 8, 16
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
OUT_DTYPES = ("bfloat16", "float16", "float32")
#: The output of the MXFP8 epilogue: codes, and e8m0 scales in 128x4 blocks.
MX_OUT = "float8_e4m3fn"
#: Columns and rows of an 8x8 piece of accumulator, the unit in which the epilogue works.
PIECE = 8


@dataclass(frozen=True)
class TileConfig:
    """How one CTA computes output tiles: their size, warps, stages and schedule.

    A tile has ``m`` tokens and ``n`` output channels; ``warps_m x warps_n`` MMA warps share it. K
    advances ``k`` codes at a time through a ring of ``stages`` shared-memory buffers.

    Attributes:
        swap_ab: weight rows on the MMA's M side: ``out^T = W x^T``. Tiles may then have as few as 8
            tokens.
        pingpong: two groups of MMA warps, each with an output tile of its own: one group's epilogue
            runs under the other's main loop. Otherwise (cooperative) all share one tile.
    """

    m: int
    n: int
    k: int
    warps_m: int
    warps_n: int
    stages: int
    swap_ab: bool = False
    pingpong: bool = False

    @property
    def warp_m(self) -> int:
        """Tokens of the tile that one MMA warp computes."""
        return self.m // self.warps_m

    @property
    def warp_n(self) -> int:
        """Output channels of the tile that one MMA warp computes."""
        return self.n // self.warps_n

    @property
    def rows_a(self) -> int:
        """Rows of the operand on the MMA's M side: tokens, or with ``swap_ab`` channels."""
        return self.n if self.swap_ab else self.m

    @property
    def rows_b(self) -> int:
        """Rows of the operand on the MMA's N side."""
        return self.m if self.swap_ab else self.n

    @property
    def warp_a(self) -> int:
        """Rows of A that one MMA warp multiplies."""
        return self.warp_n if self.swap_ab else self.warp_m

    @property
    def warp_b(self) -> int:
        """Rows of B that one MMA warp multiplies."""
        return self.warp_m if self.swap_ab else self.warp_n

    @property
    def groups(self) -> int:
        """Groups of MMA warps with a tile each."""
        return 2 if self.pingpong else 1

    @property
    def group_warps(self) -> int:
        """MMA warps that share one output tile."""
        return self.warps_m * self.warps_n

    @property
    def mma_warps(self) -> int:
        return self.groups * self.group_warps

    @property
    def moves_registers(self) -> bool:
        """Whether the producer gives up registers for the MMA warps to have more.

        Registers belong to each of the SM's four quarters, and are moved between groups of four
        warps. 4 MMA warps can have 255 each anyway; 8 of them, two to a quarter, only if what runs
        beside them has next to none.
        """
        return self.mma_warps > REGISTER_GROUP

    @property
    def threads(self) -> int:
        """MMA warps plus one producer warp, or where registers are moved four: three idle."""
        others = REGISTER_GROUP if self.moves_registers else 1
        return (self.mma_warps + others) * WARP_SIZE

    @property
    def mmas_per_k_tile(self) -> int:
        """MMA instructions of one warp for one stage."""
        return (self.warp_a // MMA_M) * (self.warp_b // MMA_N) * (self.k // MMA_K)

    @property
    def name(self) -> str:
        name = f"{self.m}x{self.n}x{self.k}_s{self.stages}_w{self.warps_m}x{self.warps_n}"
        return name + "_swap" * self.swap_ab + "_pingpong" * self.pingpong

    def check(self) -> TileConfig:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        # Two at a time: an even number of k-blocks keeps the fragments' double buffer in step.
        if self.k not in (64, 128):
            raise ValueError(
                f"tile {self.name}: k is {self.k}, must be 64 or 128 (one swizzle row)"
            )
        if min(self.m, self.n, self.warps_m, self.warps_n) < 1:
            raise ValueError(f"tile {self.name}: sizes and warps must be positive")
        rules = (("m", self.warps_m), ("n", self.warps_n))
        (a, warps_a), (b, warps_b) = rules[::-1] if self.swap_ab else rules
        if self.rows_a % (warps_a * MMA_M):
            raise ValueError(f"tile {self.name}: {a} must be a multiple of warps_{a} * {MMA_M}")
        if self.warp_b not in (8, 16) and self.rows_b % (warps_b * 2 * MMA_N):
            # One ldmatrix.x4 reads two 8-column tiles of B.
            raise ValueError(f"tile {self.name}: {b} must be a multiple of warps_{b} * {2 * MMA_N}")
        if self.rows_b % (warps_b * MMA_N):
            raise ValueError(f"tile {self.name}: {b} must be a multiple of warps_{b} * {MMA_N}")
        if self.warp_n % STORE_COLUMNS:
            # The epilogue turns four 8x8 pieces side by side into one 16-byte store per lane.
            raise ValueError(f"tile {self.name}: n must be a multiple of warps_n * {STORE_COLUMNS}")
        if self.warp_m * self.warp_n > MAX_WARP_TILE:
            raise ValueError(
                f"tile {self.name}: a warp tile of {self.warp_m}x{self.warp_n}, "
                f"must be at most {MAX_WARP_TILE} outputs"
            )
        if max(self.m, self.n) > 256:
            raise ValueError(f"tile {self.name}: a TMA box side is at most 256")
        if min(self.m, self.n) * self.k % STAGE_ALIGNMENT:
            raise ValueError(
                f"tile {self.name}: m * k and n * k must be multiples of {STAGE_ALIGNMENT}"
            )
        if self.stages < 2:
            raise ValueError(f"tile {self.name}: stages is {self.stages}, must be at least 2")
        if self.mma_warps > MAX_MMA_WARPS:
            raise ValueError(
                f"tile {self.name}: {self.mma_warps} MMA warps, must be at most {MAX_MMA_WARPS}"
            )
        if self.moves_registers and self.mma_warps % REGISTER_GROUP:
            # `setmaxnreg` is one for each aligned group of four warps.
            raise ValueError(
                f"tile {self.name}: {self.mma_warps} MMA warps, must be at most {REGISTER_GROUP} "
                f"or a multiple of it"
            )
        return self


@dataclass(frozen=True)
class EpilogueConfig:
    """Which optional parts the fused epilogue has.

    Dtypes by torch's names; ``None`` leaves a part out.

    Attributes:
        out: output dtype; :data:`MX_OUT` for codes and e8m0 scales.
        gated: channels come in blocks of 8, gate and up in turn: ``y = activation(gate) * up``, of
            half as many columns.
    """

    out: str = "bfloat16"
    bias: str | None = None
    residual: str | None = None
    activation: str | None = None
    gated: bool = False

    @property
    def mx(self) -> bool:
        """Whether the output is MXFP8."""
        return self.out == MX_OUT

    @property
    def name(self) -> str:
        parts = ["gated", self.out] if self.gated else [self.out]
        if self.bias:
            parts.append(f"bias_{self.bias}")
        if self.activation:
            parts.append(self.activation)
        if self.residual:
            parts.append(f"residual_{self.residual}")
        return "-".join(parts)


@dataclass(frozen=True)
class GemmConfig:
    """One compiled GEMM: variant, tile, epilogue, and how its work is handed out.

    ``per_token`` has fp32 scales, applied in the epilogue; ``mxfp8`` has e8m0 scales per block of
    32 along K, applied by the MMA: the tiles of both operands' scales travel with the codes.

    Attributes:
        split_k: an output tile's k-tiles are shared among several CTAs, as many as the launch says:
            each leaves its sums in a workspace, the last to arrive adds them up, in order.
        dynamic: CTAs take their next tile from the hardware (cluster launch control; sm_100 and up)
            in place of a fixed list.
        pdl: programmatic dependent launch: may begin before the kernel ahead of it has ended, and
            waits for that one's results before it reads or writes anything.
        fix_up: for the prover, which does not model atomics: False leaves out the addition of
            split sums, and with it the output.
    """

    tile: TileConfig
    epilogue: EpilogueConfig
    variant: str = "per_token"
    split_k: bool = False
    dynamic: bool = False
    pdl: bool = False
    fix_up: bool = True

    #: The module of this package that has the kernel; whether it is made of MMAs fed by TMA.
    module = "gemm_sm120"
    multiplies = True

    @property
    def block_scaled(self) -> bool:
        """Whether scales are read by the MMA."""
        return self.variant == "mxfp8"

    @property
    def scale_blocks_a(self) -> int:
        """128x4 blocks of A's scales per stage; a smaller tile still takes a whole block."""
        return -(-self.tile.rows_a // SCALE_BLOCK_ROWS) if self.block_scaled else 0

    @property
    def scale_blocks_b(self) -> int:
        """128x4 blocks of B's scales per stage."""
        return -(-self.tile.rows_b // SCALE_BLOCK_ROWS) if self.block_scaled else 0

    @property
    def k_granule(self) -> int:
        """K-tiles that stay together: where they share a block of scales, 128 of K."""
        return SCALE_BLOCK_K // self.tile.k if self.block_scaled else 1

    def max_splits(self, m: int, n: int, k: int) -> int:
        """Into how many parts the K of a problem can be split; 1 if there are too many tiles."""
        tile = self.tile
        tiles = -(-m // tile.m) * -(-n // tile.n)
        if tiles * tile.group_warps > WORKSPACE_COUNTERS:
            return 1
        return -(-k // (tile.k * self.k_granule))

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return self.tile.stages

    @property
    def stage_bytes(self) -> int:
        """Bytes that TMA brings per stage: codes, one byte each, and blocks of scales."""
        codes = (self.tile.m + self.tile.n) * self.tile.k
        return codes + (self.scale_blocks_a + self.scale_blocks_b) * SCALE_BLOCK_BYTES

    @property
    def barriers(self) -> int:
        """Full and empty, per stage; whose turn it is, per ping-pong group; the next tile."""
        turns = self.tile.groups if self.tile.pingpong else 0
        return 2 * self.tile.stages + turns + (2 if self.dynamic else 0)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA: the ring, its barriers, a dynamic schedule's answer."""
        answer = CLC_ANSWER_BYTES if self.dynamic else 0
        return self.tile.stages * self.stage_bytes + self.barriers * MBARRIER_BYTES + answer

    @property
    def name(self) -> str:
        name = f"gemm_{self.variant}-{self.tile.name}-{self.epilogue.name}"
        return name + "-split" * self.split_k + "-dynamic" * self.dynamic + "-pdl" * self.pdl

    def check(self, smem_limit: int = SMEM_LIMIT_SM120) -> GemmConfig:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        tile = self.tile.check()
        if self.variant not in VARIANTS:
            raise ValueError(f"variant: got {self.variant!r}, must be one of {', '.join(VARIANTS)}")
        if self.block_scaled and not self._fits_scale_blocks():
            raise ValueError(
                f"tile {tile.name}: m and n must divide {SCALE_BLOCK_ROWS} or be multiples of "
                "it, a warp tile's sides powers of two, for MXFP8 (128x4 blocks of scales)"
            )
        out_columns = tile.warp_n // (2 if self.epilogue.gated else 1)
        if self.epilogue.mx and out_columns % MX_BLOCK:
            raise ValueError(
                f"tile {tile.name}: a warp has {out_columns} output columns, must be a multiple of "
                f"{MX_BLOCK} for MXFP8 output"
            )
        if self.split_k and tile.warp_m * tile.warp_n == MAX_WARP_TILE:
            # Accumulators leave too few registers for the addition of parts.
            raise ValueError(
                f"tile {tile.name}: split-K must have warp tiles of less than {MAX_WARP_TILE} "
                "outputs (registers)"
            )
        if self.epilogue.gated and tile.warp_n > STORE_COLUMNS and out_columns % STORE_COLUMNS:
            raise ValueError(
                f"tile {tile.name}: a warp has {tile.warp_n} channels, must have {STORE_COLUMNS} "
                f"or a multiple of {2 * STORE_COLUMNS} for gated output"
            )
        if self.dynamic and self.epilogue.mx:
            # Each CTA of the grid clears a share of the scales' padding, and not all of them run.
            raise ValueError(f"tile {tile.name}: a dynamic schedule must have no MXFP8 output")
        if self.dynamic and (tile.pingpong or self.split_k):
            raise ValueError(
                f"tile {tile.name}: a dynamic schedule must be cooperative, without split-K"
            )
        if self.smem_bytes > smem_limit:
            raise ValueError(
                f"tile {tile.name}: {self.variant} needs {self.smem_bytes} bytes of shared "
                f"memory, must be at most {smem_limit}"
            )
        return self

    def _fits_scale_blocks(self) -> bool:
        """Whether no tile straddles a block, nor a warp tile's words of scales an aligned load."""
        tile = self.tile
        whole = all(
            SCALE_BLOCK_ROWS % side == 0 or side % SCALE_BLOCK_ROWS == 0
            for side in (tile.m, tile.n)
        )
        return whole and all(side & (side - 1) == 0 for side in (tile.warp_m, tile.warp_n))


def workspace_words(config: GemmConfig, m: int, n: int, splits: int) -> int:
    """32-bit words of workspace that a split-K launch needs: counters, then parts of tiles."""
    tile = config.tile
    tiles = -(-m // tile.m) * -(-n // tile.n)
    return WORKSPACE_COUNTERS + tiles * splits * tile.m * tile.n


@dataclass(frozen=True)
class RelayoutConfig:
    """The kernel that re-lays row-major e8m0 scales in 128x4 blocks."""

    module = "relayout"
    multiplies = False
    name = "relayout_scales"
    stages = 0
    smem_bytes = 0
