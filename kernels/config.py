"""What a GEMM kernel is specialised for, as plain data: no DSL, no torch, usable anywhere.

A :class:`GemmConfig` is everything that one compilation is keyed by besides the target: the tile,
how the warps divide it, and the epilogue. Problem sizes and strides are run-time values and not in
here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

WARP_SIZE = 32
#: The MMA that both the native instruction and its stand-in compute: m16n8k32.
MMA_M, MMA_N, MMA_K = 16, 8, 32
#: Shared memory that one block may use on sm_120 and sm_121 (99 KB); sm_90 has more.
SMEM_LIMIT_SM120 = 101_376
#: A 128x4 block of e8m0 scales serves 128 rows and 128 of K, a byte for each 32: see
#: ``cute_fp8/scales.py`` for its order.
SCALE_BLOCK_ROWS, SCALE_BLOCK_K, SCALE_BLOCK_BYTES = 128, 128, 512
VARIANTS = ("per_token", "mxfp8")
#: 64x64: 128 of a thread's 255 registers are accumulators.
MAX_WARP_TILE = 64 * 64
#: One 64-bit mbarrier.
MBARRIER_BYTES = 8
#: A 128-byte swizzle repeats every 8 rows: each operand's stages start on a multiple of this.
STAGE_ALIGNMENT = 1024

#: What N and K must be multiples of: the epilogue's 8 columns a lane, TMA's 16 bytes.
N_MULTIPLE, K_MULTIPLE = 8, 16
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
OUT_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class TileConfig:
    """How one CTA tile is cut into warps and stages.

    The CTA computes ``m x n`` outputs, ``k`` codes of the reduction at a time; ``warps_m x
    warps_n`` MMA warps share the tile. K advances through a ring of ``stages`` shared-memory
    buffers.
    """

    m: int
    n: int
    k: int
    warps_m: int
    warps_n: int
    stages: int

    @property
    def warp_m(self) -> int:
        """Rows of the tile that one MMA warp computes."""
        return self.m // self.warps_m

    @property
    def warp_n(self) -> int:
        """Columns of the tile that one MMA warp computes."""
        return self.n // self.warps_n

    @property
    def mma_warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def threads(self) -> int:
        """MMA warps plus one producer warp."""
        return (self.mma_warps + 1) * WARP_SIZE

    @property
    def mmas_per_k_tile(self) -> int:
        """MMA instructions of one warp for one stage."""
        return (self.warp_m // MMA_M) * (self.warp_n // MMA_N) * (self.k // MMA_K)

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}_s{self.stages}_w{self.warps_m}x{self.warps_n}"

    def check(self) -> TileConfig:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        # Two at a time: an even number of k-blocks keeps the fragments' double buffer in step.
        if self.k not in (64, 128):
            raise ValueError(
                f"tile {self.name}: k is {self.k}, must be 64 or 128 (one swizzle row)"
            )
        if self.m % (self.warps_m * MMA_M):
            raise ValueError(f"tile {self.name}: m must be a multiple of warps_m * {MMA_M}")
        if self.n % (self.warps_n * 4 * MMA_N):
            # The epilogue turns four 8-column MMA tiles into one 16-byte store per lane.
            raise ValueError(f"tile {self.name}: n must be a multiple of warps_n * {4 * MMA_N}")
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
        return self


@dataclass(frozen=True)
class EpilogueConfig:
    """Which optional parts the fused epilogue has.

    Dtypes by torch's names; ``None`` leaves a part out.
    """

    out: str = "bfloat16"
    bias: str | None = None
    residual: str | None = None
    activation: str | None = None

    @property
    def name(self) -> str:
        parts = [self.out]
        if self.bias:
            parts.append(f"bias_{self.bias}")
        if self.activation:
            parts.append(self.activation)
        if self.residual:
            parts.append(f"residual_{self.residual}")
        return "-".join(parts)


@dataclass(frozen=True)
class GemmConfig:
    """One compiled GEMM: variant, tile and epilogue.

    ``per_token`` has fp32 scales, applied in the epilogue; ``mxfp8`` has e8m0 scales per block of
    32 along K, applied by the MMA: the tiles of both operands' scales travel with the codes.
    """

    tile: TileConfig
    epilogue: EpilogueConfig
    variant: str = "per_token"

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
        return -(-self.tile.m // SCALE_BLOCK_ROWS) if self.block_scaled else 0

    @property
    def scale_blocks_b(self) -> int:
        """128x4 blocks of B's scales per stage."""
        return -(-self.tile.n // SCALE_BLOCK_ROWS) if self.block_scaled else 0

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
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA: the ring, and a full and an empty barrier per stage."""
        return self.tile.stages * (self.stage_bytes + 2 * MBARRIER_BYTES)

    @property
    def name(self) -> str:
        return f"gemm_{self.variant}-{self.tile.name}-{self.epilogue.name}"

    def check(self, smem_limit: int = SMEM_LIMIT_SM120) -> GemmConfig:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        self.tile.check()
        if self.variant not in VARIANTS:
            raise ValueError(f"variant: got {self.variant!r}, must be one of {', '.join(VARIANTS)}")
        if self.block_scaled and self.tile.k != SCALE_BLOCK_K:
            raise ValueError(
                f"tile {self.tile.name}: k is {self.tile.k}, must be {SCALE_BLOCK_K} for MXFP8 "
                "(one 128x4 block of scales)"
            )
        if self.block_scaled and not self._fits_scale_blocks():
            raise ValueError(
                f"tile {self.tile.name}: m and n must divide {SCALE_BLOCK_ROWS} or be multiples of "
                "it, a warp tile's sides powers of two, for MXFP8 (128x4 blocks of scales)"
            )
        if self.smem_bytes > smem_limit:
            raise ValueError(
                f"tile {self.tile.name}: {self.variant} needs {self.smem_bytes} bytes of shared "
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


@dataclass(frozen=True)
class RelayoutConfig:
    """The kernel that re-lays row-major e8m0 scales in 128x4 blocks."""

    module = "relayout"
    multiplies = False
    name = "relayout_scales"
    stages = 0
    smem_bytes = 0


#: Any kernel's configuration.
Config = GemmConfig | RelayoutConfig


#: 64x64 warp tiles: the least shared-memory traffic per MMA, and what fits 128 accumulators a
#: thread.
TILE_128x128 = TileConfig(128, 128, 128, warps_m=2, warps_n=2, stages=3).check()
#: For few tokens: the weight tile is what counts, so the ring is deep and the token tile is small.
TILE_32x64 = TileConfig(32, 64, 128, warps_m=2, warps_n=2, stages=8).check()
#: Each variant's tiles, the large one first; scales take the room of a stage.
TILES = {
    "per_token": (TILE_128x128, TILE_32x64),
    "mxfp8": (replace(TILE_128x128, stages=2), replace(TILE_32x64, stages=7)),
}
