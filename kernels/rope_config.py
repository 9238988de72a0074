"""What a RoPE kernel (``rope_append.py``) is specialised for, as plain data: no DSL, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .row_config import CHUNK

#: Halves of a head are whole chunks.
HEAD_MULTIPLE = 2 * CHUNK
#: More lanes than a warp's are none that shuffles reach.
MAX_HEAD_DIM = 32 * HEAD_MULTIPLE
THREADS = 128


@dataclass(frozen=True)
class RopeConfig:
    """One compiled RoPE kernel.

    Attributes:
        dtype: of everything, by torch's name.
        head_dim: elements of a head.
        norm: RMSNorm of each head of queries and keys first.
        values: copy the values, too.
        pdl: launched while the kernel before it ends (programmatic dependent launch).
    """

    dtype: str
    head_dim: int
    norm: bool = False
    values: bool = True
    pdl: bool = False

    #: As ``RowConfig`` has them.
    module = "rope_append"
    multiplies = False
    stages = 0
    smem_bytes = 0

    @property
    def chunks(self) -> int:
        """Of half a head: as many threads rotate it."""
        return self.head_dim // HEAD_MULTIPLE

    @property
    def group(self) -> int:
        """Neighbouring lanes that have one head: a power of two."""
        return 1 << (self.chunks - 1).bit_length()

    @property
    def heads(self) -> int:
        """Heads of a CTA."""
        return THREADS // self.group

    @property
    def name(self) -> str:
        parts = [self.module, self.dtype, str(self.head_dim)]
        return "-".join(parts + [p for p in ("norm", "values", "pdl") if getattr(self, p)])

    def check(self) -> RopeConfig:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        if self.head_dim % HEAD_MULTIPLE or not 0 < self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim: got {self.head_dim}, must be a multiple of {HEAD_MULTIPLE} "
                f"up to {MAX_HEAD_DIM}"
            )
        return self


def shipped_ropes(pdl: bool = True) -> list[RopeConfig]:
    """The RoPE kernels that ``compile`` builds; others are compiled at their first call."""
    bf16 = "bfloat16"
    found = [RopeConfig(bf16, d, norm, True, pdl) for d in (64, 128) for norm in (False, True)]
    return [*found, RopeConfig(bf16, 128, True, False, pdl)]
