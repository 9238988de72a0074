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
    def stage_bytes(self) -> int:
        """Bytes that TMA brings per stage: the tiles of A and of B, one byte a code."""
        return (self.m + self.n) * self.k

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA: the ring, and a full and an empty barrier per stage."""
        return self.stages * (self.stage_bytes + 2 * MBARRIER_BYTES)

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
        if self.smem_bytes > SMEM_LIMIT_SM120:
            raise ValueError(
                f"tile {self.name}: needs {self.smem_bytes} bytes of shared memory, "
                f"must be at most {SMEM_LIMIT_SM120}"
            )
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
    """One compiled GEMM: tile and epilogue."""

    tile: TileConfig
    epilogue: EpilogueConfig

    @property
    def name(self) -> str:
        return f"gemm_per_token-{self.tile.name}-{self.epilogue.name}"


#: 64x64 warp tiles: the least shared-memory traffic per MMA, and what fits 128 accumulators a
#: thread.
TILE_128x128 = TileConfig(128, 128, 128, warps_m=2, warps_n=2, stages=3).check()
#: For few tokens: the weight tile is what counts, so the ring is deep and the token tile is small.
TILE_32x64 = TileConfig(32, 64, 128, warps_m=2, warps_n=2, stages=8).check()
TILES = (TILE_128x128, TILE_32x64)
