"""Named sets of GEMM shapes: what models run, and what is usually compared."""

from __future__ import annotations

#: M x N x K.
Shape = tuple[int, int, int]

TEN = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: N x K of linear layers.
LLAMA8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
QWEN27B = ((34816, 5120), (5120, 17408), (14336, 5120), (5120, 6144))

SETS: dict[str, tuple[Shape, ...]] = {
    "locdit": ((352, 2560, 1024), (352, 1024, 2048), (352, 8192, 1024), (352, 1024, 4096)),
    "llama8b": tuple((m, n, k) for n, k in LLAMA8B for m in TEN),
    "qwen27b": tuple((m, n, k) for n, k in QWEN27B for m in TEN),
    "square": tuple((size, size, size) for size in (4096, 8192)),
    "host": ((16, 4096, 4096), (352, 4096, 4096)),
    "decode": tuple((m, n, k) for n, k in (*LLAMA8B, *QWEN27B) for m in (1, 2, 4, 8, 16, 32, 64)),
}
