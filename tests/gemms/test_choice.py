"""Names of configurations, read and written."""

from __future__ import annotations

import pytest

from cute_fp8.gemms.choice import Choice, Pick, choice_of, parse
from cute_fp8.kernels.config import EpilogueConfig, TileConfig
from cute_fp8.kernels.tiles import TILES, TILE_64x64

TILE = TileConfig(128, 128, 128, 2, 2, 3)
EVERY = list(dict.fromkeys(tile for tiles in TILES.values() for tile in tiles))


@pytest.mark.parametrize("tile", EVERY, ids=lambda tile: tile.name)
def test_names_lead_back_to_what_they_name(tile: TileConfig) -> None:
    for choice in (Choice(tile), Choice(tile, 4), Choice(tile, 2, dynamic=True, pdl=True)):
        assert parse(choice.name) == choice
        assert choice_of(choice.name) == choice_of(choice) == choice
    assert choice_of(tile) == Choice(tile)


def test_names_are_as_documented() -> None:
    assert Choice(TILE, 4).name == "128x128x128_s3_w2x2/split4"
    assert parse("16x64x128_s9_w1x2_swap").tile == TileConfig(16, 64, 128, 1, 2, 9, swap_ab=True)
    pingpong = parse("128x128x64_s6_w2x2_pingpong/dynamic")
    assert pingpong.tile.pingpong and pingpong.dynamic and pingpong.splits == 1


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nonsense",
        "128x128x128",
        "128x128x128_s3_w2x2_",
        "0128x128x128_s3_w2x2",
        "128x128x128_s3_w0x2",
        "128x128x128_s3_w2x2/split1",
        "128x128x128_s3_w2x2/split04",
        "128x128x128_s3_w2x2/split4/split4",
        "128x128x128_s3_w2x2/pdl/dynamic",
        "128x128x128_s3_w2x2/fast",
        "128x128x128_s3_w2x2/",
        " 128x128x128_s3_w2x2",
    ],
)
def test_what_is_no_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=r"^config: got ") as caught:
        parse(name)
    assert repr(name) in str(caught.value) and "must be" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_of_a_tile_that_cannot_be_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="k is 32, must be 64 or 128"):
        parse("128x128x32_s3_w2x2")
    with pytest.raises(ValueError, match="splits is 0, must be at least 1"):
        choice_of(Choice(TILE, 0))


def test_a_pick_is_a_kernel_and_its_splits() -> None:
    small = TILE_64x64
    pick = Choice(small, 4).pick(EpilogueConfig(activation="gelu"), "per_token")
    assert isinstance(pick, Pick) and pick.splits == 4 and pick.config.split_k
    assert pick.choice == Choice(small, 4) == choice_of(pick)
    assert pick.name == "64x64x128_s6_w2x2/split4"
    assert not Choice(TILE).pick(EpilogueConfig(), "per_token").config.split_k
    with pytest.raises(ValueError, match="mxfp8 needs"):
        Choice(TILE).pick(EpilogueConfig(), "mxfp8")
