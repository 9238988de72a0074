"""What an MLP kernel (``mlp.py``) is specialised for, as plain data: no DSL, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config import MBARRIER_BYTES, MMA_M, SMEM_LIMIT_SM120, STAGE_ALIGNMENT, WARP_SIZE
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
#: What each of two CTAs may have of a Hopper multiprocessor's shared memory, 228 KB.
SMEM_HALF_SM90 = 114 * 1024 - 1024
#: Weights that a CTA has asked for at a time, at first and then. What the tokens wait for goes the
#: same way, and behind them.
FLYING_BYTES = (56 * 1024, 1 << 20)
#: Stages that are fetched to L2 while the kernel before ends.
AHEAD = 8
#: Bytes of weights up to which two kernels share Hopper's multiprocessors, of which no CTA waits
#: for other CTAs' codes.
FEW_BYTES = 1 << 25
#: Shared memory from which a stage may have 16 blocks.
LARGE = 128 * 1024
#: Words of the workspace: two barriers and the count of those that have gone, 32 bytes apart; then
#: what CTAs announce to each other: products, two to a word, or magnitudes of each CTA's tokens.
COUNTER_STEP, COUNTERS = 8, 3
ANNOUNCED_WORD, ANNOUNCED_WORDS = 32, (1 << 15) - 32
WORKSPACE_WORDS = ANNOUNCED_WORD + ANNOUNCED_WORDS
#: Rows of tokens for which a CTA may have room of its own.
OWN_ROWS = (1, 4, 8, 16)
#: Elements of all tokens up to which every CTA normalises them, and quantises their products.
OWN_HIDDEN, OWN_PRODUCT = 1 << 13, 1 << 14
#: The share of shared memory that own codes may have.
OWN_SHARE = 0.3


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
    def of(blocks: int, narrow: bool = False) -> Cut:
        """For as many blocks: as many warps side by side as there is work for.

        ``narrow``: one slab, for many tokens in little shared memory; some warps may have no work.
        """
        if narrow:
            return Cut(blocks, 1, MMA_WARPS)
        row_warps = next(n for n in (1, 2, 4, 8) if blocks <= n or n == MMA_WARPS)
        k_warps = MMA_WARPS // row_warps
        return Cut(blocks, k_warps, row_warps)


@dataclass(frozen=True)
class MlpConfig:
    """One compiled kernel.

    Attributes:
        dtype: of x, the product and the output, by torch's name: 16 bits.
        weight: of the norm's weight.
        tokens: rows of tokens that it takes at most, one of :data:`TOKENS`.
        norm_shape: how a row to be normalised is cut among threads.
        gate_up, down: the cuts of the two GEMMs.
        stages: of the ring.
        rows: for which a CTA has room of its own.
        own: of each GEMM, up to which K every CTA quantises all tokens for itself, into that room;
            0 where each quantises some for all. The second is never without the first.
        ctas: of a multiprocessor: 2 where the next kernel's begins before this one's has ended.
        flying: stages that are asked for at a time at most while the ring fills for the first time,
            and then.
        ahead: stages whose weights are fetched to L2 while the kernel before ends.
        pdl: programmatic dependent launch.
    """

    dtype: str
    weight: str
    tokens: int
    norm_shape: RowShape
    gate_up: Cut
    down: Cut
    stages: int
    rows: int = 0
    own: tuple[int, int] = (0, 0)
    ctas: int = 1
    flying: tuple[int, int] = (2, 2)
    ahead: int = 0
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
        """Of a stage: room for either GEMM's weights, and behind them its tokens."""
        return -(-max(map(self._bytes, range(2))) // UNIT_BYTES)

    def _bytes(self, gemm: int) -> int:
        cut, shared = self.cuts[gemm], not self.own[gemm]
        return cut.units * UNIT_BYTES + shared * cut.slabs * self.tokens * SLAB

    @property
    def barriers(self) -> int:
        """Of a stage: it is free, its weights are there, and where some are loaded its tokens."""
        return 2 if all(self.own) else 3

    @property
    def own_bytes(self) -> int:
        """Own codes: those of the second GEMM take the place of the first's."""
        return max(
            self.rows * SLAB * cut.slabs * -(-k // (SLAB * cut.slabs))
            for cut, k in zip(self.cuts, self.own, strict=True)
        )

    @property
    def product_shape(self) -> RowShape:
        """How a row of the product is cut among threads where every CTA quantises it."""
        return RowShape(MMA_THREADS, max(1, -(-self.own[1] // (CHUNK * MMA_THREADS))))

    @property
    def stage_bytes(self) -> int:
        """Codes of weights and of tokens."""
        return self.units * UNIT_BYTES

    @property
    def warp_blocks(self) -> int:
        """Blocks that a warp has sums for."""
        return max(cut.warp_blocks for cut in self.cuts)

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
        words = 2 * MMA_WARPS * max(1, self.rows) + 3 * self.tokens + self.sum_words
        fixed = 2 * STAGE_ALIGNMENT + self.own_bytes + 4 * words
        return fixed + self.stages * (self.stage_bytes + self.barriers * MBARRIER_BYTES)

    @property
    def norm(self) -> RowConfig:
        """The row kernel whose parts normalise a token."""
        return RowConfig(
            "rmsnorm",
            self.dtype,
            "per_token",
            self.norm_shape,
            weight=self.weight,
            round_twice=True,
        )

    @property
    def product(self) -> RowConfig:
        """The one whose parts quantise a row of the product."""
        return RowConfig("quantize", self.dtype, "per_token", self.product_shape)

    @property
    def name(self) -> str:
        ring = f"s{self.stages}_f{self.flying[0]}x{self.flying[1]}_l{self.ahead}"
        cuts = f"{self.gate_up.name}-{self.down.name}_{ring}"
        parts = [self.module, self.dtype, f"weight_{self.weight}", f"t{self.tokens}", cuts]
        parts += [f"n{self.norm_shape.name}"]
        if self.rows:
            parts += [f"own{self.rows}x{self.own[0]}x{self.own[1]}"]
        parts += ["two"] * (self.ctas > 1)
        return "-".join(parts + ["pdl"] * self.pdl)

    def check(self) -> MlpConfig:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        if self.dtype not in ("bfloat16", "float16"):
            raise ValueError(f"dtype: got {self.dtype}, must be bfloat16 or float16")
        if self.tokens not in TOKENS:
            raise ValueError(f"tokens: got {self.tokens}, must be one of {TOKENS}")
        threads = self.norm_shape.threads
        if MMA_THREADS % threads or (threads != MMA_THREADS and not self.rows):
            raise ValueError(f"norm_shape: got {self.norm_shape.name}, must be of {MMA_THREADS}")
        if (self.rows > 0) != (self.own[0] > 0) or (self.own[1] > 0) > (self.own[0] > 0):
            raise ValueError(f"own: got {self.rows} rows of {self.own}, must be room for some")
        if self.rows * self.own[1] > 2 * ANNOUNCED_WORDS:
            raise ValueError(f"own: got {self.rows} rows of {self.own}, must be few to announce")
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

    few = large and 3 * hidden * ffn <= FEW_BYTES
    shape = RowShape(MMA_THREADS, next(n for n in (1, 2, 4) if hidden <= n * CHUNK * MMA_THREADS))
    for narrow, ctas in ((False, 1 + few), (False, 1), (True, 1)):
        gate_up, down = (Cut.of(blocks(rows), narrow) for rows in (2 * ffn, hidden))
        config = MlpConfig(dtype, weight, tokens, shape, gate_up, down, 1, ctas=ctas, ahead=AHEAD)
        config = _with_own(config, m, hidden, ffn, smem_limit)
        limit = smem_limit if ctas == 1 else SMEM_HALF_SM90
        stage = config.stage_bytes + config.barriers * MBARRIER_BYTES
        stages = min((limit - config.smem_bytes) // stage + 1, MAX_STAGES)
        if stages >= FEW_STAGES and (ctas == 1 or config.own[1] > 0):
            break
    first, then = (min(stages, -(-size // config.stage_bytes)) for size in FLYING_BYTES)
    return replace(config, stages=stages, flying=(first, then))


def _with_own(config: MlpConfig, m: int, hidden: int, ffn: int, smem_limit: int) -> MlpConfig:
    """The same, with as much done by every CTA for itself as is worth it."""
    rows = next((n for n in OWN_ROWS if m <= n), None)
    plain = config
    if rows is None:
        return plain
    threads = min(MMA_THREADS, 1 << (-(-hidden // CHUNK) - 1).bit_length())
    own_shape = RowShape(max(WARP_SIZE, threads), -(-hidden // (CHUNK * threads)))
    config = replace(config, rows=rows, norm_shape=own_shape)
    fits = m * hidden <= OWN_HIDDEN
    for own, worth in (((hidden, ffn), fits and m * ffn <= OWN_PRODUCT), ((hidden, 0), fits)):
        found = replace(config, own=own)
        if worth and found.own_bytes <= OWN_SHARE * smem_limit:
            return found
    return plain


#: Hidden and FFN width of models.
SHAPES = ((4096, 14336), (1024, 4096))


def shipped_mlps(target: str | None) -> list[MlpConfig]:
    """The kernels that ``compile`` builds, for GPUs that are typical of a target."""
    hopper = target is not None and target.startswith("sm_90")
    sms = 132 if hopper else 48 if target == "sm_121a" else 170
    smem = SMEM_LIMIT_SM90 if hopper else SMEM_LIMIT_SM120
    found = [
        replace(mlp_config(m, hidden, ffn, sms=sms, smem_limit=smem), pdl=True).check()
        for hidden, ffn in SHAPES
        for m in sorted({*OWN_ROWS, *TOKENS})
        if m <= most_tokens(hopper)
    ]
    # Some numbers of tokens have the same one.
    return list(dict.fromkeys(found))


def most_tokens(hopper: bool) -> int:
    """Up to which one launch is the faster way.

    Hopper's ``mma.sync`` takes e4m3 apart into fp16: past a few tokens it binds.
    """
    return 16 if hopper else max(TOKENS)
