"""The launches of ``gemm_sm120.GemmSm120`` and ``projection.Projection`` as plain data: no DSL, no
torch.

What tools need that look at a kernel from outside: its grid, its shared memory, its TMA
descriptors, and the compiled kernel's parameters in order, with the bytes that each takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .config import (
    MMA_K,
    MX_BLOCK,
    SCALE_BLOCK_BYTES,
    SCALE_BLOCK_K,
    SCALE_BLOCK_ROWS,
    WARP_SIZE,
    GemmConfig,
    workspace_words,
)
from .mlp_config import BLOCK, SLAB
from .projection_config import WARPS, ProjectionConfig

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


@dataclass(frozen=True)
class Float:
    """An fp32."""

    value: float
    size: int = 4


Parameter = Descriptor | Pointer | Integers | Float


@dataclass(frozen=True)
class Launch:
    """Grid and block of one launch, its dynamic shared memory, its kernel's parameters."""

    ctas: int
    threads: int
    smem_bytes: int
    parameters: tuple[Parameter, ...]


def describe(config: GemmConfig, m: int, n: int, k: int, max_ctas: int, splits: int = 1) -> Launch:
    """The launch of one problem, all tensors contiguous."""
    tile = config.tile
    tiles_m, tiles_n, k_tiles = -(-m // tile.m), -(-n // tile.n), -(-k // tile.k)
    parameters: list[Parameter] = []
    for descriptor in _descriptors(config, m, n, k):
        # A TMA descriptor is followed by the shape of its coordinate tensor, outermost size first.
        parameters += [descriptor, Integers(descriptor.shape[::-1])]
    columns = n // 2 if config.epilogue.gated else n
    parameters += [_matrix("out", m, columns)]
    if config.epilogue.mx:
        blocks = -(-columns // (MX_BLOCK * SCALE_BLOCK_BYTES // SCALE_BLOCK_ROWS))
        numel = -(-m // SCALE_BLOCK_ROWS) * blocks * SCALE_BLOCK_BYTES
        parameters.append(Pointer("out_scales", ((8, "u32", numel),), 16))
    if not config.block_scaled:
        parameters += [_vector("sx", m), _vector("sw", n)]
    if config.epilogue.bias:
        parameters.append(Pointer("bias", ((8, "u32", n),), 16))
    if config.epilogue.residual:
        parameters.append(_matrix("residual", m, columns))
    if config.split_k:
        words = workspace_words(config, m, n, splits)
        parameters.append(Pointer("workspace", ((8, "u32", words),), 16))
    sizes = [tiles_m, tiles_n, k_tiles, -(-k // MMA_K)]
    sizes += [splits] if config.split_k else []
    parameters += [Integers((size,)) for size in (*sizes, m, n)]
    ctas = min(tiles_m * tiles_n * splits, max_ctas)
    return Launch(ctas, tile.threads, config.smem_bytes, tuple(parameters))


def describe_projection(config: ProjectionConfig, n: int, max_ctas: int) -> Launch:
    """The launch of a projection of as many tokens as there is room for, of the smallest K, all
    tensors contiguous.
    """
    m, k = config.rows, config.least_k
    box = (SLAB, BLOCK * config.blocks)
    parameters: list[Parameter] = [
        Descriptor("weight", "u8", (k, n), k, box, "128B"),
        Integers((n, k)),
        _matrix("x", m, k),
    ]
    if config.weight:
        parameters.append(Pointer("norm", ((8, "u32", k),), 16))
    parameters.append(Pointer("weight_scales", ((8, "u32", n),), 16))
    if config.bias:
        parameters.append(Pointer("bias", ((8, "u32", n),), 16))
    if config.residual:
        parameters.append(_matrix("residual", m, n))
    parameters += [_matrix("codes", m, k), Pointer("scales", ((8, "u32", m),), 16)]
    parameters.append(_matrix("out", m, n))
    parameters += [Integers((size,)) for size in (m, n, k)] + [Float(1e-6), Float(1 / k)]
    ctas = min(-(-n // BLOCK), max_ctas)
    return Launch(ctas, WARP_SIZE * WARPS, config.smem_bytes, tuple(parameters))


def _descriptors(config: GemmConfig, m: int, n: int, k: int) -> Iterator[Descriptor]:
    tile = config.tile
    swizzle = f"{tile.k}B"
    codes = [("xq", m, tile.m), ("wq", n, tile.n)]
    scales = [("sx", m), ("sw", n)]
    if tile.swap_ab:
        codes, scales = codes[::-1], scales[::-1]
    for operand, rows, tile_rows in codes:
        yield Descriptor(operand, "u8", (k, rows), k, (tile.k, tile_rows), swizzle)
    if not config.block_scaled:
        return
    words = SCALE_BLOCK_BYTES // 4
    row_words = -(-k // SCALE_BLOCK_K) * words
    all_blocks = (config.scale_blocks_a, config.scale_blocks_b)
    for (operand, rows), blocks in zip(scales, all_blocks, strict=True):
        shape = (row_words, -(-rows // SCALE_BLOCK_ROWS))
        yield Descriptor(operand, "s32", shape, 4 * row_words, (words, blocks), "none")


def _matrix(operand: str, rows: int, columns: int) -> Pointer:
    fields = ((8, "u32", rows), (12, "u32", columns), (16, "u64", columns))
    return Pointer(operand, fields, 24)


def _vector(operand: str, count: int) -> Pointer:
    return Pointer(operand, ((8, "u32", count), (16, "u64", 1)), 24)
