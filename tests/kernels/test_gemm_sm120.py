"""The sm_120 GEMM kernel against float64: natively on sm_120, through the stand-in on Hopper."""

from __future__ import annotations

import pytest
from gemm_bodies import *  # noqa: F403

import cute_fp8
from cute_fp8.kernels.tiles import TILES, TILE_64x64

pytestmark = pytest.mark.gpu


@pytest.fixture(params=TILES["per_token"], ids=lambda tile: tile.name)
def tile(request):
    """Every tile serves every problem: each is forced on all of them."""
    with cute_fp8.use(config=request.param):
        yield request.param


@pytest.fixture
def large_tile():
    """The one of the most outputs."""
    return TILES["per_token"][0]


@pytest.fixture
def small_tile():
    """One that compiles fast."""
    return TILE_64x64
