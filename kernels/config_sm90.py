"""What a Hopper GEMM kernel is specialised for, as plain data: no DSL, no torch.

``config.py`` has what all kernels share, the epilogue among it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import MBARRIER_BYTES, PIECE, STORE_COLUMNS, WARP_SIZE, EpilogueConfig

#: ``wgmma`` is issued by four warps together; its M is 64, 16 rows to a warp.
WARPGROUP_WARPS, WGMMA_M, WARP_ROWS = 4, 64, 16
WARPGROUP = WARPGROUP_WARPS * WARP_SIZE
#: A tile's row is a 128-byte swizzle row: four instructions of 32 along K, the most that may go
#: into one partial sum.
WGMMA_K, TILE_K = 32, 128
SMEM_LIMIT_SM90 = 232_448
#: Shared memory for the next tile of a dynamic schedule.
ANSWER_BYTES = 16
#: Registers of an SM, per thread of one warpgroup; what the producer's keep; most of a thread.
SM_REGISTERS, PRODUCER_REGISTERS, MOST_REGISTERS = 512, 24, 240
#: Registers of an MMA thread that are not accumulators.
OTHER_REGISTERS = 32
#: Groups of MMAs whose partial sums overlap before the tensor core is waited for: chains of the
#: first length as long as there are k-tiles for one, then of the next. Only large tiles have the
#: longest: their code takes a while to fetch.
LINKS, LARGE = (16, 8, 1), 128 * 128
#: What is stored at once, through shared memory: a row of 128 bytes, the widest swizzle row. A
#: warpgroup has two such boxes where there is room.
BOX_ROWS, BOX_COLUMNS, BOX_BYTES, MOST_BOXES = WGMMA_M, 64, 8192, 2


@dataclass(frozen=True)
class WarpShare:
    """``warp_m`` tokens and ``warp_n`` channels of one warp."""

    warp_m: int
    warp_n: int
    swap_ab: bool


@dataclass(frozen=True)
class HopperTile:
    """How one CTA computes output tiles: their size, warpgroups, stages.

    A tile has ``m`` tokens and ``n`` output channels. The rows of the operand on the MMA's M side
    (tokens, or with ``swap_ab`` channels) are shared out among ``warpgroups``, and each share is
    computed in *parts* of 64 rows and ``part`` rows of the other operand: one instruction's sums.
    In ping-pong each of two warpgroups has a tile of its own, and they take turns with the tensor
    core: one's epilogue runs under the other's main loop.

    Attributes:
        part: see above; 8 to 256.
        warpgroups: of MMA warps.
        stages: of the ring.
        swap_ab: weight rows on the MMA's M side: ``out^T = W x^T``. Tiles may then have as few as 8
            tokens.
        splits: a cluster of this many CTAs shares the k-tiles of an output tile.
        sharers: a cluster of this many CTAs works on neighbouring tiles, and loads the operand that
            they share, the larger one, once for all (TMA multicast).
        pingpong: see above. Without promotion only: one warpgroup keeps the tensor core busy.
        dynamic: a CTA takes its next tile when it is done with one, from a counter in global
            memory. With a fixed list of them the SMs that L2 serves last end last.
    """

    m: int
    n: int
    part: int
    warpgroups: int
    stages: int
    swap_ab: bool = False
    splits: int = 1
    sharers: int = 1
    pingpong: bool = False
    dynamic: bool = False

    #: As ``TileConfig`` has it.
    k = TILE_K

    @property
    def groups(self) -> int:
        """Groups of MMA warps with a tile each."""
        return 2 if self.pingpong else 1

    @property
    def tile_warpgroups(self) -> int:
        """Warpgroups that share one output tile."""
        return self.warpgroups // self.groups

    @property
    def rows_a(self) -> int:
        """Rows of the operand on the MMA's M side: tokens, or with ``swap_ab`` channels."""
        return self.n if self.swap_ab else self.m

    @property
    def rows_b(self) -> int:
        """Rows of the operand on the MMA's N side."""
        return self.m if self.swap_ab else self.n

    @property
    def sharers_m(self) -> int:
        """Tiles of a cluster below each other, which share the weights."""
        return self.sharers if self.n > self.m else 1

    @property
    def sharers_n(self) -> int:
        """Tiles of a cluster side by side, which share the tokens."""
        return self.sharers // self.sharers_m

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.splits * self.sharers

    @property
    def warpgroup_rows(self) -> int:
        """Rows of A that one warpgroup multiplies."""
        return self.rows_a // self.tile_warpgroups

    @property
    def parts_a(self) -> int:
        """Parts of a warpgroup along A's rows."""
        return self.warpgroup_rows // WGMMA_M

    @property
    def parts(self) -> int:
        """Parts of a warpgroup."""
        return self.parts_a * (self.rows_b // self.part)

    @property
    def part_sums(self) -> int:
        """Accumulators of a thread for one part."""
        return self.part // 2

    @property
    def owners(self) -> int:
        """CTAs of a cluster that each finish a share of the tile's columns of B."""
        least = PIECE if self.swap_ab else STORE_COLUMNS
        return min(self.splits, max(1, self.part // least))

    @property
    def share(self) -> int:
        """Rows of B of one part that one CTA finishes."""
        return self.part // self.owners

    @property
    def share_sums(self) -> int:
        """Accumulators of a thread for a part's share."""
        return self.share // 2

    @property
    def warp_share(self) -> WarpShare:
        """What one warp has of a part's share, for the epilogue."""
        if self.swap_ab:
            return WarpShare(self.share, WARP_ROWS, True)
        return WarpShare(WARP_ROWS, self.share, False)

    @property
    def exchange_bytes(self) -> int:
        """Shared memory for what a cluster's CTAs give to one of them, which reuses the ring."""
        sums = self.splits * self.parts * self.share_sums
        return 4 * sums * self.warpgroups * WARPGROUP if self.splits > 1 else 0

    @property
    def staged_scales(self) -> int:
        """Scales that each warpgroup keeps in shared memory for its epilogue."""
        return self.warpgroup_rows + self.rows_b

    @property
    def group_warps(self) -> int:
        """MMA warps that share one output tile."""
        return WARPGROUP_WARPS * self.tile_warpgroups

    @property
    def mma_warps(self) -> int:
        return WARPGROUP_WARPS * self.warpgroups

    @property
    def mma_registers(self) -> int:
        """Registers of an MMA thread, with those that the producer's give up."""
        share = (SM_REGISTERS - PRODUCER_REGISTERS) // self.warpgroups
        return min(MOST_REGISTERS, share // 8 * 8)

    @property
    def threads(self) -> int:
        """MMA warps, and four of the producer's: three are idle, but have registers to give up."""
        return (self.mma_warps + WARPGROUP_WARPS) * WARP_SIZE

    @property
    def name(self) -> str:
        name = f"{self.m}x{self.n}x{self.k}_s{self.stages}_g{self.warpgroups}p{self.part}"
        name += "_swap" * self.swap_ab
        name += f"_split{self.splits}" if self.splits > 1 else ""
        name += f"_shared{self.sharers}" if self.sharers > 1 else ""
        return name + "_pingpong" * self.pingpong + "_dynamic" * self.dynamic

    def fits(self, fast_accum: bool) -> bool:
        """Whether a thread has registers for its sums, and the mode is one of the tile's."""
        if self.pingpong and not fast_accum:
            return False
        sums = self.part_sums * (self.parts + self.sets(fast_accum))
        return sums + OTHER_REGISTERS <= self.mma_registers

    def sets(self, fast_accum: bool) -> int:
        """Sets of partial sums: while one is added to the totals, another may be at work.

        None in fast mode, which adds in the tensor core; two where there are registers for them.
        """
        if fast_accum:
            return 0
        free = self.mma_registers - OTHER_REGISTERS - self.parts * self.part_sums
        return 2 if free >= 2 * self.part_sums else 1

    def links(self, fast_accum: bool) -> tuple[int, ...]:
        """K-tiles of each kind of chain; without a second set of partial sums, nothing overlaps."""
        if self.sets(fast_accum) < 2:
            return LINKS[-1:]
        groups = LINKS if self.m * self.n >= LARGE else LINKS[1:]
        return tuple(dict.fromkeys(max(1, count // self.parts) for count in groups))

    def check(self) -> HopperTile:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        a, b = ("n", "m") if self.swap_ab else ("m", "n")
        if self.pingpong and (self.warpgroups != 2 or self.splits > 1 or self.swap_ab):
            raise ValueError(
                f"tile {self.name}: ping-pong is of 2 warpgroups, without splits or swap_ab"
            )
        if self.rows_a % (self.tile_warpgroups * WGMMA_M):
            raise ValueError(f"tile {self.name}: {a} must be a multiple of warpgroups * {WGMMA_M}")
        if self.part % PIECE or self.rows_b % self.part:
            raise ValueError(
                f"tile {self.name}: {b} must be a multiple of part, and part of {PIECE}"
            )
        if not self.swap_ab and self.share % STORE_COLUMNS:
            # The epilogue turns four 8x8 pieces side by side into one 16-byte store per lane.
            raise ValueError(f"tile {self.name}: part must be a multiple of {STORE_COLUMNS}")
        if self.part % (self.owners * PIECE):
            raise ValueError(f"tile {self.name}: part must be a multiple of {PIECE} * owners")
        if self.sharers > 1 and (self.splits > 1 or self.swap_ab):
            raise ValueError(f"tile {self.name}: with splits or swap_ab there are no sharers")
        if self.dynamic and (self.cluster > 1 or self.pingpong):
            raise ValueError(f"tile {self.name}: a dynamic one has no cluster and no ping-pong")
        if max(self.m, self.n) > 256:
            raise ValueError(f"tile {self.name}: a TMA box side is at most 256")
        if self.stages < 2:
            raise ValueError(f"tile {self.name}: stages is {self.stages}, must be at least 2")
        return self


@dataclass(frozen=True)
class HopperConfig:
    """One compiled Hopper GEMM: tile, epilogue, mode of accumulation.

    Attributes:
        fast_accum: sums stay in the tensor core's short accumulator, over the whole of K.
        pdl: programmatic dependent launch, as in ``GemmConfig``.
    """

    tile: HopperTile
    epilogue: EpilogueConfig
    fast_accum: bool = False
    pdl: bool = True

    #: The module of this package that has the kernel; whether it is made of MMAs fed by TMA.
    module = "gemm_sm90"
    multiplies = True
    #: As ``GemmConfig`` has them.
    variant, block_scaled, split_k, k_granule = "per_token", False, False, 1

    @property
    def dynamic(self) -> bool:
        """The tile's."""
        return self.tile.dynamic

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return self.tile.stages

    @property
    def stage_bytes(self) -> int:
        """Bytes of codes that TMA brings per stage."""
        return (self.tile.m + self.tile.n) * self.tile.k

    @property
    def barriers(self) -> int:
        """Full and empty, per stage; a turn for each ping-pong group; the next tile's, likewise."""
        turns = self.tile.groups if self.tile.pingpong else 0
        return 2 * self.tile.stages + turns + (2 if self.dynamic else 0)

    @property
    def part_boxes(self) -> int:
        """Boxes of output that a part makes; 0 if it is stored from registers.

        Those are sums that are transposed, outputs of 32 bits, a residual, which is read in the
        layout of such stores, and parts that are no whole boxes.
        """
        epilogue = self.epilogue
        columns = self.tile.share // (2 if epilogue.gated else 1)
        if self.tile.swap_ab or epilogue.out == "float32" or epilogue.residual is not None:
            return 0
        return 0 if columns % BOX_COLUMNS else columns // BOX_COLUMNS

    @property
    def boxes(self) -> int:
        """Boxes in shared memory, of each warpgroup: as many as fit and a tile fills in turn."""
        room = SMEM_LIMIT_SM90 - self._bytes_without_boxes
        made = self.part_boxes * self.tile.parts
        fit = max(0, min(MOST_BOXES, made, room // (BOX_BYTES * self.tile.warpgroups)))
        return fit if fit == 0 or made % fit == 0 else 1

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA: ring, barriers, scales and boxes for the epilogue."""
        return self._bytes_without_boxes + self.boxes * BOX_BYTES * self.tile.warpgroups

    @property
    def _bytes_without_boxes(self) -> int:
        scales = 4 * self.tile.warpgroups * self.tile.staged_scales
        answer = ANSWER_BYTES if self.dynamic else 0
        barriers = self.barriers * MBARRIER_BYTES
        return self.tile.stages * self.stage_bytes + barriers + answer + scales

    @property
    def name(self) -> str:
        name = f"gemm_{self.variant}-sm90-{self.tile.name}-{self.epilogue.name}"
        return name + "-fast" * self.fast_accum + "-pdl" * self.pdl

    def check(self) -> HopperConfig:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        tile = self.tile.check()
        if self.smem_bytes > SMEM_LIMIT_SM90:
            raise ValueError(
                f"tile {tile.name}: needs {self.smem_bytes} bytes of shared memory, must be at "
                f"most {SMEM_LIMIT_SM90}"
            )
        if tile.exchange_bytes > tile.stages * self.stage_bytes:
            raise ValueError(
                f"tile {tile.name}: a cluster exchanges {tile.exchange_bytes} bytes, must be at "
                f"most {tile.stages * self.stage_bytes} (the ring)"
            )
        if tile.pingpong and not self.fast_accum:
            raise ValueError(f"tile {tile.name}: ping-pong is for fast_accum alone")
        if not tile.fits(self.fast_accum):
            raise ValueError(
                f"tile {tile.name}: a thread's sums, totals and partial ones, must be at most "
                f"{tile.mma_registers - OTHER_REGISTERS}"
            )
        return self
