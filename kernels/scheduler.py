"""Static persistent schedule: CTA ``i`` of ``g`` takes tiles ``i, i + g, i + 2g, ...``."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

#: Tile rows that advance together. A wave of CTAs then touches a near-square patch of the output,
#: so that both operands' tiles are found in L2.
RASTER_ROWS = 8


@cute.jit
def tile_coordinate(index: Int32, tiles_m: Int32, tiles_n: Int32):
    """The (row, column) of tile ``index``: bands of ``RASTER_ROWS`` rows, down, then right."""
    band_tiles = RASTER_ROWS * tiles_n
    band = index // band_tiles
    first_row = band * RASTER_ROWS
    rows = cutlass.min(tiles_m - first_row, Int32(RASTER_ROWS))
    within = index - band * band_tiles
    return first_row + within % rows, within // rows
