"""The launch of ``gemm_sm120.GemmSm120`` as plain data: no DSL, no torch.

What tools need that look at a kernel from outside: its grid, its shared memory, its TMA
descriptors, and the compiled kernel's parameters in order, with the bytes that each takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .config import MMA_K, SCALE_BLOCK_BYTES, SCALE_BLOCK_K, SCALE_BLOCK_ROWS, GemmConfig

TMA_DESCRIPTOR_BYTES = 128


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor: a global matrix and the box that one copy takes. Innermost sizes first."""

    operand: str
    element: str
    shape: tuple[int, int]
    stride_bytes: int
    box: tuple[int, int]
    swizzle: str
    size: int = TMA_DESCRIPTOR_BYTES


@dataclass(frozen=True)
class Pointer:
    """A tensor by value: its address, then the fields of its layout as (offset, type, value)."""

    operand: str
    fields: tuple[tuple[int, str, int], ...]
    size: int


@dataclass(frozen=True)
class Integers:
    """Consecutive 32-bit integers."""

    values: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return 4 * len(self.values)


Parameter = Descriptor | Pointer | Integers


@dataclass(frozen=True)
class Launch:
    """Grid and block of one launch, its dynamic shared memory, its kernel's parameters."""

    ctas: int
    threads: int
    smem_bytes: int
    parameters: tuple[Parameter, ...]


def describe(config: GemmConfig, m: int, n: int, k: int, max_ctas: int) -> Launch:
    """The launch of one problem, all tensors contiguous."""
    tile = config.tile
    tiles_m, tiles_n, k_tiles = -(-m // tile.m), -(-n // tile.n), -(-k // tile.k)
    parameters: list[Parameter] = []
    for descriptor in _descriptors(config, m, n, k):
        # A TMA descriptor is followed by the shape of its coordinate tensor, outermost size first.
        parameters += [descriptor, Integers(descriptor.shape[::-1])]
    parameters += [_matrix("out", m, n)]
    if not config.block_scaled:
        parameters += [_vector("sx", m), _vector("sw", n)]
    if config.epilogue.bias:
        parameters.append(Pointer("bias", ((8, "u32", n),), 16))
    if config.epilogue.residual:
        parameters.append(_matrix("residual", m, n))
    sizes = (tiles_m, tiles_n, k_tiles, -(-k // MMA_K), m, n)
    parameters += [Integers((size,)) for size in sizes]
    ctas = min(tiles_m * tiles_n, max_ctas)
    return Launch(ctas, tile.threads, config.smem_bytes, tuple(parameters))


def _descriptors(config: GemmConfig, m: int, n: int, k: int) -> Iterator[Descriptor]:
    tile = config.tile
    swizzle = f"{tile.k}B"
    for operand, rows, tile_rows in (("xq", m, tile.m), ("wq", n, tile.n)):
        yield Descriptor(operand, "u8", (k, rows), k, (tile.k, tile_rows), swizzle)
    if not config.block_scaled:
        return
    words = SCALE_BLOCK_BYTES // 4
    row_words = -(-k // SCALE_BLOCK_K) * words
    for operand, rows, blocks in (
        ("sx", m, config.scale_blocks_a),
        ("sw", n, config.scale_blocks_b),
    ):
        shape = (row_words, -(-rows // SCALE_BLOCK_ROWS))
        yield Descriptor(operand, "s32", shape, 4 * row_words, (words, blocks), "none")


def _matrix(operand: str, rows: int, columns: int) -> Pointer:
    fields = ((8, "u32", rows), (12, "u32", columns), (16, "u64", columns))
    return Pointer(operand, fields, 24)


def _vector(operand: str, count: int) -> Pointer:
    return Pointer(operand, ((8, "u32", count), (16, "u64", 1)), 24)
