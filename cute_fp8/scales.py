"""Host-side knowledge of where an MX scale byte lives: the 128x4 blocked order.

Block-scaled MMAs read their e8m0 scales in the order that cuBLASLt calls the "128x4 tile" layout
of 1-D block scaling factors (cuBLAS documentation, section "1D Block Scaling Factors Layout") and
PyTorch calls ``SwizzleType.SWIZZLE_32_4_4``. The row-major matrix ``[rows, cols]`` (``cols`` is
K/32) is cut into tiles of 128 rows x 4 columns, padded with 0x00 up to whole tiles; the tiles
follow each other along a row of tiles first, 512 bytes each. Inside a tile, the byte offset of
row r, column c is::

    offset(r, c) = (r % 32) * 16 + (r // 32) * 4 + c

              c = 0    1    2    3
    row   0 |   0    1    2    3 |    row  32 |   4    5    6    7 |
    row   1 |  16   17   18   19 |    row  33 |  20   21   22   23 |
     ...    |                    |     ...    |                    |
    row  31 | 496  497  498  499 |    row  63 | 500  501  502  503 |

    row  64 |   8    9   10   11 |    row  96 |  12   13   14   15 |
     ...    |                    |     ...    |                    |
    row  95 | 504  505  506  507 |    row 127 | 508  509  510  511 |

So four consecutive bytes are the four scales of one row, and 16 consecutive bytes are rows r, r+32,
r+64 and r+96. As an example, 130 rows of five scales occupy 2 x 2 tiles:

>>> import torch
>>> row_major = torch.arange(130 * 5).remainder(251).to(torch.uint8).view(130, 5)
>>> blocked = to_blocked(row_major)
>>> blocked.numel() == blocked_numel(130, 5) == 2 * 2 * 512
True
>>> blocked[16:20].tolist() == row_major[1, 0:4].tolist()         # row 1 of the first tile
True
>>> blocked[512].item() == row_major[0, 4].item()                 # the fifth column: second tile
True
>>> blocked[513:516].tolist()                                     # its columns 5, 6, 7 are padding
[0, 0, 0]
>>> torch.equal(from_blocked(blocked, 130, 5), row_major)
True
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_fp8.arguments import check_tensor
from cute_fp8.kernels.config import SCALE_BLOCK_BYTES, SCALE_BLOCK_ROWS

TILE_ROWS = SCALE_BLOCK_ROWS
_TILE_BYTES = SCALE_BLOCK_BYTES
TILE_COLS = _TILE_BYTES // TILE_ROWS
_SCALE_DTYPES = (torch.float8_e8m0fnu, torch.uint8)


def blocked_numel(rows: int, cols: int) -> int:
    """Number of bytes of the blocked form of ``[rows, cols]`` scales, padding included.

    Raises:
        ValueError: a negative count.
    """
    for name, count in (("rows", rows), ("cols", cols)):
        if count < 0:
            raise ValueError(f"{name}: got {count}, must be >= 0")
    return _tiles(rows, TILE_ROWS) * _tiles(cols, TILE_COLS) * _TILE_BYTES


def to_blocked(scales: Tensor) -> Tensor:
    """Re-lay row-major scales in the 128x4 blocked order.

    Args:
        scales: ``[rows, cols]``, ``float8_e8m0fnu`` (or its bytes as ``uint8``), any strides.

    Returns:
        1-D tensor of ``blocked_numel(rows, cols)`` elements, same dtype and device. Padding is
        0x00, a finite scale, so that no reader can meet the NaN of uninitialised bytes.

    Raises:
        TypeError: another dtype.
        ValueError: not 2-D.
    """
    _check_dtype("scales", scales)
    if scales.dim() != 2:
        raise ValueError(f"scales: got shape {tuple(scales.shape)}, must be 2-D [rows, cols]")
    rows, cols = scales.shape
    row_tiles, col_tiles = _tiles(rows, TILE_ROWS), _tiles(cols, TILE_COLS)
    # Bytes, because not every torch operation is defined for float8_e8m0fnu on every device.
    padded = torch.zeros(
        (row_tiles * TILE_ROWS, col_tiles * TILE_COLS), dtype=torch.uint8, device=scales.device
    )
    padded[:rows, :cols] = scales.view(torch.uint8)
    tiled = padded.view(row_tiles, 4, 32, col_tiles, TILE_COLS)  # [tile, r // 32, r % 32, tile, c]
    return tiled.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def from_blocked(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Inverse of :func:`to_blocked`; padding bytes are dropped whatever they hold.

    Args:
        blocked: 1-D, ``blocked_numel(rows, cols)`` elements, ``float8_e8m0fnu`` or ``uint8``.
        rows: rows of the result.
        cols: columns of the result (K/32).

    Returns:
        Contiguous ``[rows, cols]``, same dtype and device.

    Raises:
        TypeError: another dtype.
        ValueError: a negative count, not 1-D, or a size that does not belong to ``[rows, cols]``.
    """
    _check_dtype("blocked", blocked)
    expected = blocked_numel(rows, cols)
    if blocked.shape != (expected,):
        raise ValueError(
            f"blocked: got shape {tuple(blocked.shape)}, must be ({expected},) for "
            f"{rows} rows x {cols} scales"
        )
    row_tiles, col_tiles = _tiles(rows, TILE_ROWS), _tiles(cols, TILE_COLS)
    tiled = blocked.view(torch.uint8).reshape(row_tiles, col_tiles, 32, 4, TILE_COLS)
    padded = tiled.permute(0, 3, 2, 1, 4).reshape(row_tiles * TILE_ROWS, col_tiles * TILE_COLS)
    return padded[:rows, :cols].contiguous().view(blocked.dtype)


def _tiles(count: int, tile: int) -> int:
    # In these words, which the ops' fake kernels use too: tracing compares expressions of sizes.
    return (count + tile - 1) // tile


def _check_dtype(name: str, scales: Tensor) -> None:
    check_tensor(name, scales)
    if scales.dtype not in _SCALE_DTYPES:
        raise TypeError(f"{name}: got {scales.dtype}, must be torch.float8_e8m0fnu or torch.uint8")
