"""What a row kernel is specialised for, as plain data: no DSL, no torch.

A *row kernel* reads rows of activations, computes something with each (nothing, a norm, a gated
activation), and writes e4m3 codes and scales. See ``row_quantize.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

#: Elements that a thread handles at a time: two 16-byte loads of fp32, or one of half of it; a
#: quarter of a block of MXFP8.
CHUNK = 8
#: What is computed before the quantisation.
NORMS, GATES = ("rmsnorm", "layernorm"), ("silu_mul", "gelu_mul", "gelu_tanh_mul")
ROW_OPS = ("quantize", *NORMS, *GATES)
#: How x is addressed: rows at one 16-byte aligned stride; rows and columns in two parts each, the
#: columns' inner part contiguous and aligned; the same with any strides, element by element.
VIEWS = ("matrix", "heads", "scattered")


@dataclass(frozen=True)
class RowShape:
    """How a row is cut among threads.

    ``threads`` share a row, each with ``chunks`` chunks of it in registers. A row longer than that
    is read again for every pass (``streams``). Of a ``full`` one it is known that the row fills the
    registers exactly: nothing is compared with its length.
    """

    threads: int
    chunks: int
    streams: bool = False
    full: bool = False

    @property
    def rows(self) -> int:
        """Rows of a CTA: of short rows as many as make four warps."""
        return max(1, 128 // self.threads)

    @property
    def cta_threads(self) -> int:
        """Threads of a CTA."""
        return self.rows * self.threads

    @property
    def elements(self) -> int:
        """Elements of a row that are in registers at a time."""
        return self.threads * self.chunks * CHUNK

    @property
    def name(self) -> str:
        kind = "_streams" if self.streams else "_full" if self.full else ""
        return f"{self.threads}x{self.chunks}{kind}"


STREAMS = RowShape(512, 2, streams=True)


def shape_of(k: int, op: str, variant: str, *dtypes: str | None, keep: bool = False) -> RowShape:
    """The shape for rows of ``k``; the rest as in :class:`RowConfig`.

    By the length of the row alone, never by the number of rows: a row's sum is then added up in the
    same order in every batch. As few threads as hold the row, so that few of them idle; for norms
    few with much, as each has to take part in two reductions.
    """
    norm, narrow = op in NORMS, "float32" not in dtypes
    # 1024 threads have 64 registers each: too few for a norm, and for anything in fp32.
    most = 512 if norm or keep or not narrow else 1024
    chunks = 1 if k <= 1024 else 2 if k <= (2048 if norm else 4096) else 4
    if k > 8192 and op == "rmsnorm" and variant == "per_token" and narrow:
        eight = _of_chunks(k, 8)
        if eight.full and eight.threads <= most // 2:
            return eight
    shape = _of_chunks(k, chunks)
    return shape if shape.threads <= most else STREAMS


def _of_chunks(k: int, chunks: int) -> RowShape:
    threads = -(-k // (chunks * CHUNK * 32)) * 32
    return RowShape(threads, chunks, full=threads * chunks * CHUNK == k)


@dataclass(frozen=True)
class RowConfig:
    """One compiled row kernel. Dtypes by torch's names; None leaves a part out.

    Attributes:
        op: one of :data:`ROW_OPS`.
        dtype: of the input, of what is computed, and of what is returned of it.
        variant: ``per_token`` or ``mxfp8``.
        shape: of the rows' cut.
        view: one of :data:`VIEWS`.
        weight, bias: of a norm.
        residual: whether a residual is added before the norm, and the sum written.
        round_twice: round the normalised value before the weight is applied, too.
        offset: add a number to the weight.
        interleaved: gate and up in blocks of 8, not in halves.
        keep: write what is quantised, too.
        blocked: scales of MXFP8 in 128x4 blocks.
        pdl: launched while the kernel before it ends (programmatic dependent launch).
    """

    op: str
    dtype: str
    variant: str
    shape: RowShape
    view: str = "matrix"
    weight: str | None = None
    bias: str | None = None
    residual: bool = False
    round_twice: bool = False
    offset: bool = False
    interleaved: bool = False
    keep: bool = False
    blocked: bool = False
    pdl: bool = False

    #: The module of this package that has the kernel; whether it is made of MMAs fed by TMA.
    module = "row_quantize"
    multiplies = False
    stages = 0

    @property
    def warps(self) -> int:
        """Warps of a row."""
        return self.shape.threads // 32

    @property
    def ctas(self) -> int:
        """CTAs that one multiprocessor is to hold, which limits a thread's registers.

        As many as measured best, where that spills none.
        """
        threads, chunks = self.shape.cta_threads, self.shape.chunks
        heavy = self.keep or self.op == "layernorm" or self.shape.streams
        heavy |= self.residual and self.variant == "mxfp8" and chunks > 2 and not self.shape.full
        if heavy or self.view == "scattered" or "float32" in (self.dtype, self.weight):
            return max(1, 512 // threads)
        if chunks > 4:
            return max(1, 672 // threads)
        if chunks > 2:
            return max(1, {"quantize": 1344, "rmsnorm": 1024}.get(self.op, 896) // threads)
        many = self.op == "rmsnorm" and self.variant == "per_token" and not self.residual
        return (2048 if self.op == "quantize" else 1536 if many else 1280) // threads

    @property
    def smem_bytes(self) -> int:
        """A word per warp for each reduction, where a row has several warps."""
        sums = {"rmsnorm": 1, "layernorm": 2}.get(self.op, 0)
        reductions = sums + (self.variant == "per_token")
        return 4 * reductions * self.warps * self.shape.rows if self.warps > 1 else 0

    @property
    def name(self) -> str:
        parts = [self.dtype, self.variant, self.shape.name]
        parts += [] if self.view == "matrix" else [self.view]
        parts += [f"weight_{self.weight}"] if self.weight else []
        parts += [f"bias_{self.bias}"] if self.bias else []
        flags = ("residual", "round_twice", "offset", "interleaved", "keep", "blocked", "pdl")
        parts += [flag for flag in flags if getattr(self, flag)]
        return f"{self.module}-{self.op}-{'-'.join(parts)}"

    def check(self) -> RowConfig:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        if self.op not in ROW_OPS:
            raise ValueError(f"op: got {self.op!r}, must be one of {', '.join(ROW_OPS)}")
        if self.view not in VIEWS:
            raise ValueError(f"view: got {self.view!r}, must be one of {', '.join(VIEWS)}")
        if (self.op in NORMS) != (self.weight is not None):
            raise ValueError(f"weight: got {self.weight} for {self.op}, must be there for norms")
        if self.residual and self.op not in NORMS:
            raise ValueError(f"residual: got one for {self.op}, must be for a norm")
        return self


def rows_of(k: int) -> Iterator[RowConfig]:
    """The usual kernels for contiguous bf16 rows of ``k`` elements."""
    bf16 = "bfloat16"
    for variant, blocked in (("per_token", False), ("mxfp8", True)):
        for op in ("quantize", "rmsnorm", "silu_mul"):
            config = RowConfig(op, bf16, variant, shape_of(k, op, variant, bf16), blocked=blocked)
            if op == "rmsnorm":
                config = replace(config, weight=bf16, round_twice=True)
                yield replace(config, residual=True)
            yield config


def shipped_rows(pdl: bool = True) -> list[RowConfig]:
    """The row kernels that ``compile`` builds; others are compiled at their first call.

    For bf16: the usual ops at every usual length of a row, and of everything else one.
    """
    bf16 = "bfloat16"
    found = [config for k in (1024, 4096, 8192, 14336) for config in rows_of(k)]
    norm = next(config for config in found if config.op == "rmsnorm")
    plain, gate = (next(c for c in found if c.op == op) for op in ("quantize", "silu_mul"))
    for dtype in ("float16", "float32"):
        found += [replace(config, dtype=dtype) for config in (plain, norm, gate)]
    # Rows that leave something of the registers empty.
    part = [replace(config, shape=replace(config.shape, full=False)) for config in found[:4]]
    found += part
    found += [replace(plain, view=view) for view in VIEWS[1:]]
    found += [replace(plain, variant="mxfp8"), replace(gate, interleaved=True)]
    found += [replace(gate, op=op) for op in GATES[1:]]
    found += [replace(norm, op="layernorm", bias=bf16, residual=True, round_twice=False)]
    found += [replace(config, keep=True) for config in (norm, gate)]
    found += [replace(config, shape=STREAMS) for config in (plain, norm, gate)]
    return [replace(config, pdl=pdl) for config in found]
