"""What a few-token projection (``projection.py``) is specialised for, as plain data: no DSL, no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config import MBARRIER_BYTES, MMA_N, SMEM_LIMIT_SM120, STAGE_ALIGNMENT
from .config_sm90 import SMEM_LIMIT_SM90
from .mlp_config import BLOCK, LARGE, MMA_WARPS, SLAB, UNIT_BYTES
from .row_config import RowConfig, RowShape, shape_of

#: Warps that normalise and multiply, and one that loads weights.
WARPS = MMA_WARPS + 1
#: Rows of tokens that a kernel may have room for.
ROWS = (1, 2, 4, 8, 16)
#: Elements of the longest row.
MAX_K = 8192
#: Blocks of 16 channels that a warp has sums for, at most, and that a CTA takes at a time.
WARP_BLOCKS, MOST_BLOCKS = 4, 8
#: Chunks of tokens' rows that a thread holds, of as many rows as that makes.
MOST_CHUNKS = 8
#: Past this, more stages only lengthen the fill; fewer than these hide no latency.
MAX_STAGES, FEW_STAGES = 48, 4
#: On Hopper: bytes of a weight, and elements of all tokens, up to which one launch is faster.
HOPPER_WEIGHT, HOPPER_TOKENS = 1 << 22, 1 << 12
#: What is fetched into L2 while the kernel before still runs; all of it goes through TMA twice.
EARLY_BYTES = 32 * 1024
#: Shared memory that is not the tokens', at least.
OTHER_BYTES = 28 * 1024


@dataclass(frozen=True)
class ProjectionConfig:
    """One compiled kernel. Dtypes by torch's names; None leaves a part out.

    Attributes:
        dtype: of x, of the residual and of the output: 16 bits.
        weight: of the norm's weight; without one x is quantised as it is.
        bias: of the bias.
        residual: whether something is added at the end.
        rows: of tokens, at most; one of :data:`ROWS`.
        shape: of a row's cut among threads.
        slabs: of 128 of K.
        blocks: of 16 channels that a stage has, at most; a CTA with more of them passes over K
            again.
        row_warps: warps side by side, each with every ``row_warps``-th block; the others have other
            slabs.
        stages: of the ring, each a slab of the blocks; a multiple of the warps that share K.
        pdl: programmatic dependent launch.
    """

    dtype: str
    weight: str | None
    bias: str | None
    residual: bool
    rows: int
    shape: RowShape
    slabs: int
    blocks: int
    row_warps: int
    stages: int
    pdl: bool = False

    #: As ``GemmConfig`` has them.
    module = "projection"
    multiplies = True

    @property
    def k_warps(self) -> int:
        """Warps whose sums are added up."""
        return MMA_WARPS // self.row_warps

    @property
    def warp_blocks(self) -> int:
        """Blocks of a warp."""
        return -(-self.blocks // self.row_warps)

    @property
    def groups(self) -> int:
        """Of 8 tokens, which are an MMA's."""
        return -(-self.rows // MMA_N)

    @property
    def warp_sums(self) -> int:
        """Of a lane."""
        return 4 * self.groups * self.warp_blocks

    @property
    def stage_bytes(self) -> int:
        """Codes of a stage."""
        return self.blocks * UNIT_BYTES

    @property
    def early(self) -> int:
        """Stages that are fetched into L2 while the kernel before still runs."""
        return max(1, min(self.stages, self.slabs, EARLY_BYTES // self.stage_bytes))

    @property
    def least_k(self) -> int:
        """The smallest K that it takes."""
        return self.shape.elements if self.shape.full else (self.slabs - 1) * SLAB + 16

    @property
    def row_config(self) -> RowConfig:
        """The row kernel whose work is done first."""
        op = "quantize" if self.weight is None else "rmsnorm"
        norm = self.weight is not None
        return RowConfig(
            op, self.dtype, "per_token", self.shape, weight=self.weight, round_twice=norm
        )

    @property
    def row_words(self) -> int:
        """Words of that work's reductions: two, of every warp, for the rows of a thread."""
        return 2 * MMA_WARPS * max(ROWS)

    @property
    def smem_bytes(self) -> int:
        """Ring, barriers, codes of the tokens; sums, scales and words."""
        words = MMA_WARPS * self.warp_sums * 32 + max(ROWS) + self.row_words
        codes = self.slabs * self.rows * SLAB
        stages = self.stages * (self.stage_bytes + 2 * MBARRIER_BYTES)
        return 2 * STAGE_ALIGNMENT + stages + codes + 4 * words

    @property
    def name(self) -> str:
        parts = [self.module, self.dtype, f"m{self.rows}", f"k{self.slabs * SLAB}"]
        parts += [self.shape.name, f"{self.blocks}x{self.row_warps}_s{self.stages}"]
        parts += [f"norm_{self.weight}"] if self.weight else []
        parts += [f"bias_{self.bias}"] if self.bias else []
        return "-".join(parts + [p for p in ("residual", "pdl") if getattr(self, p)])

    def check(self) -> ProjectionConfig:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype: got {self.dtype}, must be bfloat16 or float16")
        if self.rows not in ROWS:
            raise ValueError(f"rows: got {self.rows}, must be one of {ROWS}")
        if self.shape.threads > 32 * MMA_WARPS or self.shape.streams:
            raise ValueError(f"shape: got {self.shape.name}, must be held by {MMA_WARPS} warps")
        if self.row_warps not in (1, 2, 4, 8) or self.warp_blocks > WARP_BLOCKS:
            raise ValueError(
                f"row_warps: got {self.row_warps} for {self.blocks} blocks, must be 1, 2, 4 or 8, "
                f"of at most {WARP_BLOCKS} blocks each"
            )
        if not 0 < self.stages <= 32 * WARPS or self.stages % self.k_warps:
            raise ValueError(
                f"stages: got {self.stages}, must be a multiple of {self.k_warps} "
                f"up to {32 * WARPS}"
            )
        self.row_config.check()
        return self


def projection_config(
    m: int,
    n: int,
    k: int,
    *,
    sms: int,
    smem_limit: int,
    dtype: str = "bfloat16",
    weight: str | None = None,
    bias: str | None = None,
    residual: bool = False,
) -> ProjectionConfig:
    """The kernel for a problem on a GPU with that many multiprocessors.

    ``room_for`` says whether there is one.
    """
    whole = -(-n // (BLOCK * sms))
    op = "quantize" if weight is None else "rmsnorm"
    shape = shape_of(k, op, "per_token", dtype, weight)
    rows = next(count for count in ROWS if m <= count)
    # Few sums where there is little room for them, in registers or shared memory.
    most = 1 if smem_limit <= LARGE else WARP_BLOCKS if rows <= MMA_N else WARP_BLOCKS // 2
    found = None
    # In as few passes as there can be with stages enough, of one size.
    for passes in range(-(-whole // MOST_BLOCKS), whole + 1):
        blocks = -(-whole // passes)
        row_warps = next(n for n in (1, 2, 4, 8) if -(-blocks // n) <= most)
        config = ProjectionConfig(
            dtype, weight, bias, residual, rows, shape, -(-k // SLAB), blocks, row_warps, 0
        )
        stages = (smem_limit - config.smem_bytes) // (config.stage_bytes + 2 * MBARRIER_BYTES)
        stages = min(stages, MAX_STAGES, passes * config.slabs + config.k_warps - 1)
        found = replace(config, stages=max(0, stages // config.k_warps * config.k_warps))
        if found.stages >= FEW_STAGES:
            break
    assert found is not None
    return found


def room_for(m: int, k: int, smem_limit: int) -> bool:
    """Whether the codes of all rows leave room for weights on their way."""
    rows = next((count for count in ROWS if m <= count), 0)
    return 0 < rows * -(-k // SLAB) * SLAB <= smem_limit - OTHER_BYTES


def faster_on_hopper(m: int, n: int, k: int) -> bool:
    """Whether one launch is the faster way there.

    ``mma.sync`` takes e4m3 apart into fp16 there, weights come so fast that normalising all tokens
    in every CTA takes as long, and with large ones no CTA of the next kernel fits beside.
    """
    return n * k <= HOPPER_WEIGHT and m * k <= HOPPER_TOKENS


#: Models' projections: outputs, K, whether normalised first.
SHAPES = (
    (6144, 4096, True),
    (4096, 4096, False),
    (2560, 1024, True),
    (1024, 2048, False),
)


def shipped_projections(target: str | None) -> list[ProjectionConfig]:
    """The kernels that ``compile`` builds, for GPUs that are typical of a target."""
    hopper = target is not None and target.startswith("sm_90")
    sms = 132 if hopper else 48 if target == "sm_121a" else 170
    smem = SMEM_LIMIT_SM90 if hopper else SMEM_LIMIT_SM120
    found = []
    for n, k, norm in SHAPES:
        for m in (m for m in ROWS if not hopper or faster_on_hopper(m, n, k)):
            weight = "bfloat16" if norm else None
            config = projection_config(
                m, n, k, sms=sms, smem_limit=smem, weight=weight, residual=not norm
            )
            found.append(replace(config, pdl=True).check())
    return list(dict.fromkeys(found))
