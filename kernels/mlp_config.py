"""What an MLP kernel (``mlp.py``) is specialised for, as plain data: no DSL, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config import MBARRIER_BYTES, MMA_M, SMEM_LIMIT_SM120, STAGE_ALIGNMENT
from .config_sm90 import SMEM_LIMIT_SM90
from .row_config import CHUNK, RowConfig, RowShape

#: Warps that multiply; then one that loads weights and one that loads tokens.
MMA_WARPS, WARPS = 8, 10
MMA_THREADS = 32 * MMA_WARPS
#: A *block* is 16 rows of a weight, an MMA's; a *slab* 128 of K, a swizzle row.
BLOCK, SLAB = MMA_M, 128
UNIT_BYTES = BLOCK * SLAB
#: Rows of tokens that a kernel may be made for.
TOKENS = (8, 16, 32, 64)
#: Elements of the longest row that is normalised.
MAX_HIDDEN = 4 * CHUNK * MMA_THREADS
#: What a GEMM needs of K, and two blocks of 8 channels.
HIDDEN_MULTIPLE = 16
#: Past this, more stages only lengthen the fill.
MAX_STAGES = 12
#: Fewer stages than these hide no latency.
FEW_STAGES = 3
#: Shared memory from which a stage may have 16 blocks.
LARGE = 128 * 1024
#: Words of the workspace: three barriers and the count of those that have gone, 32 bytes apart;
#: then the largest magnitudes of tokens.
COUNTER_STEP, COUNTERS, MOST_CTAS = 8, 4, 1 << 20
AMAX_WORD = 64
WORKSPACE_WORDS = AMAX_WORD + max(TOKENS)


@dataclass(frozen=True)
class Cut:
    """How a GEMM's stage is cut among the warps.

    Attributes:
        blocks: of a stage at most; a CTA with more of them passes over K again.
        slabs: of a stage.
        row_warps: warps side by side, each with every ``row_warps``-th block; the others have other
            slabs.
    """

    blocks: int
    slabs: int
    row_warps: int

    @property
    def k_warps(self) -> int:
        """Warps whose sums are added up."""
        return MMA_WARPS // self.row_warps

    @property
    def warp_blocks(self) -> int:
        """Blocks of a warp."""
        return -(-self.blocks // self.row_warps)

    @property
    def warp_slabs(self) -> int:
        """Slabs of a warp."""
        return self.slabs // self.k_warps

    @property
    def units(self) -> int:
        """Blocks times slabs."""
        return self.blocks * self.slabs

    @property
    def name(self) -> str:
        return f"{self.blocks}x{self.slabs}"

    @staticmethod
    def of(blocks: int, narrow: bool = False, large: bool = False) -> Cut:
        """For as many blocks: as many warps side by side as there is work for.

        ``narrow``: one slab, for many tokens in little shared memory; some warps may have no work.
        ``large``: with shared memory for stages that keep DRAM busy while the grid meets.
        """
        if narrow:
            return Cut(blocks, 1, MMA_WARPS)
        row_warps = next(n for n in (1, 2, 4, 8) if blocks <= n or n == MMA_WARPS)
        k_warps = MMA_WARPS // row_warps
        return Cut(blocks, 2 * k_warps if large and blocks == 2 else k_warps, row_warps)


@dataclass(frozen=True)
class MlpConfig:
    """One compiled kernel.

    Attributes:
        dtype: of x, the product and the output, by torch's name: 16 bits.
        weight: of the norm's weight.
        tokens: rows of tokens that it takes at most, one of :data:`TOKENS`.
        chunks: of a row to be normalised that a thread has.
        gate_up, down: the cuts of the two GEMMs.
        stages: of the ring.
        pdl: programmatic dependent launch.
    """

    dtype: str
    weight: str
    tokens: int
    chunks: int
    gate_up: Cut
    down: Cut
    stages: int
    pdl: bool = False

    #: As ``GemmConfig`` has them.
    module = "mlp"
    multiplies = True

    @property
    def cuts(self) -> tuple[Cut, Cut]:
        """In their order."""
        return self.gate_up, self.down

    @property
    def units(self) -> int:
        """Room for weights in a stage."""
        return max(cut.units for cut in self.cuts)

    @property
    def slabs(self) -> int:
        """Room for tokens in a stage."""
        return max(cut.slabs for cut in self.cuts)

    @property
    def warp_blocks(self) -> int:
        """Blocks that a warp has sums for."""
        return max(cut.warp_blocks for cut in self.cuts)

    @property
    def stage_bytes(self) -> int:
        """Codes of weights and of tokens."""
        return self.units * UNIT_BYTES + self.slabs * self.tokens * SLAB

    @property
    def sum_words(self) -> int:
        """fp32 that the warps leave for each other, where several share a block."""
        return max(
            MMA_WARPS * cut.warp_blocks * BLOCK * self.tokens if cut.k_warps > 1 else 0
            for cut in self.cuts
        )

    @property
    def smem_bytes(self) -> int:
        """Ring, barriers, sums; words of two reductions, magnitudes and scales of tokens."""
        words = 2 * MMA_WARPS + 3 * self.tokens + self.sum_words
        return STAGE_ALIGNMENT + self.stages * (self.stage_bytes + 2 * MBARRIER_BYTES) + 4 * words

    @property
    def norm(self) -> RowConfig:
        """The row kernel whose parts normalise a token."""
        shape = RowShape(MMA_THREADS, self.chunks)
        return RowConfig(
            "rmsnorm", self.dtype, "per_token", shape, weight=self.weight, round_twice=True
        )

    @property
    def name(self) -> str:
        cuts = f"{self.gate_up.name}-{self.down.name}_s{self.stages}"
        parts = [self.module, self.dtype, f"weight_{self.weight}", f"t{self.tokens}", cuts]
        return "-".join([*parts, f"c{self.chunks}"] + ["pdl"] * self.pdl)

    def check(self) -> MlpConfig:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype: got {self.dtype}, must be bfloat16 or float16")
        if self.tokens not in TOKENS:
            raise ValueError(f"tokens: got {self.tokens}, must be one of {TOKENS}")
        if self.chunks not in (1, 2, 4):
            raise ValueError(f"chunks: got {self.chunks}, must be 1, 2 or 4")
        if self.stages < 2:
            raise ValueError(f"stages: got {self.stages}, must be at least 2")
        for cut in self.cuts:
            if cut.warp_blocks > 2 or cut.slabs % cut.k_warps:
                raise ValueError(f"cut: got {cut.name}, must be of at most 2 blocks a warp")
        self.norm.check()
        return self


def mlp_config(
    m: int,
    hidden: int,
    ffn: int,
    *,
    sms: int,
    smem_limit: int,
    dtype: str = "bfloat16",
    weight: str = "bfloat16",
) -> MlpConfig:
    """The kernel for a problem on a GPU with that many multiprocessors."""
    large = smem_limit > LARGE
    most = 2 * MMA_WARPS if large else MMA_WARPS
    tokens = next(n for n in TOKENS if m <= n)

    def blocks(rows: int) -> int:
        """Of a pass: in as few passes as there can be, of one size."""
        whole = -(-rows // (BLOCK * sms))
        return -(-whole // -(-whole // most))

    chunks = next(n for n in (1, 2, 4) if hidden <= n * CHUNK * MMA_THREADS)
    found = []
    for narrow in (False, True):
        gate_up, down = (Cut.of(blocks(rows), narrow, large) for rows in (2 * ffn, hidden))
        config = MlpConfig(dtype, weight, tokens, chunks, gate_up, down, stages=1)
        fixed = config.smem_bytes - config.stage_bytes - 2 * MBARRIER_BYTES
        stages = (smem_limit - fixed) // (config.stage_bytes + 2 * MBARRIER_BYTES)
        found.append(replace(config, stages=min(stages, MAX_STAGES)))
    return found[0] if found[0].stages >= FEW_STAGES else found[1]


#: Hidden and FFN width of models.
SHAPES = ((4096, 14336), (1024, 4096))


def shipped_mlps(target: str | None) -> list[MlpConfig]:
    """The kernels that ``compile`` builds, for GPUs that are typical of a target."""
    hopper = target is not None and target.startswith("sm_90")
    sms = 132 if hopper else 48 if target == "sm_121a" else 170
    smem = SMEM_LIMIT_SM90 if hopper else SMEM_LIMIT_SM120
    return [
        replace(mlp_config(m, hidden, ffn, sms=sms, smem_limit=smem), pdl=True).check()
        for hidden, ffn in SHAPES
        for m in TOKENS
        if m <= most_tokens(hopper)
    ]


def most_tokens(hopper: bool) -> int:
    """Up to which one launch is the faster way.

    Hopper's ``mma.sync`` takes e4m3 apart into fp16: past a few tokens it binds.
    """
    return 16 if hopper else max(TOKENS)
