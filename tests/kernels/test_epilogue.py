"""How the epilogue cuts a warp's part of a tile into groups of pieces."""

from __future__ import annotations

import itertools

import pytest

from cute_fp8.kernels.config import PIECE, EpilogueConfig
from cute_fp8.kernels.config_sm90 import HopperTile
from cute_fp8.kernels.tiles import TILES
from cute_fp8.kernels.tiles_sm90 import TILES_SM90

epilogue = pytest.importorskip("cute_fp8.kernels.epilogue", reason="needs the CuTe DSL")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "tile", dict.fromkeys([*TILES_SM90, *itertools.chain(*TILES.values())]), ids=lambda t: t.name
)
def test_every_piece_of_output_is_in_one_group(tile, gated: bool) -> None:
    part = tile.warp_share if isinstance(tile, HopperTile) else tile
    config = EpilogueConfig(gated=gated, activation="silu" if gated else None)
    made = epilogue.Epilogue(part, config, scaled=True)
    pieces = [
        (i + piece // made.across, j + piece % made.across)
        for i, j in made.groups
        for piece in range(epilogue.GROUP)
    ]
    rows, columns = part.warp_m // PIECE, part.warp_n // PIECE // (2 if gated else 1)
    # A group may reach past the last row, where nothing is stored; never past the last column.
    assert {column for _, column in pieces} == set(range(columns))
    stored = [piece for piece in pieces if piece[0] < rows]
    assert sorted(stored) == list(itertools.product(range(rows), range(columns)))
