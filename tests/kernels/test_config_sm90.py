"""Hopper's tiles: names, rules, predicted ranking, and what the compiler made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_fp8 import gpus
from cute_fp8.build import compiler
from cute_fp8.dispatch import explain
from cute_fp8.evidence import sass
from cute_fp8.gemms import choice
from cute_fp8.gemms.model_sm90 import predict_hopper
from cute_fp8.kernels.config import EpilogueConfig
from cute_fp8.kernels.config_sm90 import SMEM_LIMIT_SM90, HopperConfig, HopperTile
from cute_fp8.kernels.tiles_sm90 import TILES_SM90

TILE = HopperTile(128, 128, 128, warpgroups=2, stages=4)


@pytest.mark.parametrize("tile", TILES_SM90, ids=lambda tile: tile.name)
@pytest.mark.parametrize("pdl", [False, True])
def test_a_name_is_read_back(tile: HopperTile, pdl: bool) -> None:
    made = choice.Choice(tile, pdl=pdl)
    assert choice.parse(made.name) == made
    assert made.pick(EpilogueConfig(), "per_token", fast_accum=True).choice == made


@pytest.mark.parametrize("tile", TILES_SM90, ids=lambda tile: tile.name)
def test_shared_memory_is_full(tile: HopperTile) -> None:
    config = HopperConfig(tile, EpilogueConfig(), fast_accum=True).check()
    room = SMEM_LIMIT_SM90 - config.smem_bytes
    assert room >= 0 and (room < config.stage_bytes + 16 or tile.stages == 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m": 96}, "m must be a multiple of warpgroups * 64"),
        ({"part": 96}, "n must be a multiple of part"),
        ({"part": 16}, "part must be a multiple of 32"),
        ({"n": 512}, "a TMA box side is at most 256"),
        ({"stages": 1}, "stages is 1, must be at least 2"),
        ({"stages": 12}, "bytes of shared memory, must be at most 232448"),
        ({"splits": 2, "sharers": 2}, "with splits or swap_ab there are no sharers"),
        ({"pingpong": True, "warpgroups": 3, "m": 192}, "ping-pong is of 2 warpgroups, without"),
        ({"pingpong": True}, "ping-pong is for fast_accum alone"),
        ({"dynamic": True, "splits": 2}, "a dynamic one has no cluster and no ping-pong"),
        ({"dynamic": True, "sharers": 2}, "a dynamic one has no cluster and no ping-pong"),
        ({"dynamic": True, "pingpong": True}, "a dynamic one has no cluster and no ping-pong"),
        (
            {"m": 256, "part": 64, "stages": 2, "n": 256},
            "a thread's sums, totals and partial ones, must be at most 208",
        ),
    ],
)
def test_rules(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=r"^tile ") as refusal:
        HopperConfig(replace(TILE, **changes), EpilogueConfig()).check()
    assert message in str(refusal.value)


def test_narrow_parts_make_room_for_two_sets() -> None:
    wide = HopperTile(256, 128, 128, warpgroups=2, stages=4)
    narrow = replace(wide, part=64)
    assert (wide.sets(False), narrow.sets(False)) == (1, 2)
    # As many MMAs in flight as with one part of a k-tile, however many parts there are.
    assert narrow.links(False) == (4, 2, 1) and replace(TILE, n=128).links(False) == (16, 8, 1)
    assert HopperConfig(replace(narrow, dynamic=True), EpilogueConfig()).barriers == 2 * 4 + 2


def test_shared_loads_are_cheaper() -> None:
    """Where L2 is what limits."""
    alone = HopperTile(64, 96, 96, warpgroups=1, stages=11)
    shared = replace(alone, sharers=2)
    alone_us, shared_us = (
        predict_hopper(HopperConfig(tile, EpilogueConfig()), gpus.H200, 128, 6144, 4096).us
        for tile in (alone, shared)
    )
    assert shared_us < alone_us


def test_a_tile_of_another_kernel_is_refused() -> None:
    problem = explain(m=64, n=128, k=128, gpu="H200").problem
    from cute_fp8.gemms.selection import select_config

    with pytest.raises(ValueError, match=r"^config 128x128.*got a tile of gemm_sm90, must be one"):
        select_config(problem, gpus.H200, choice.choice_of(TILE), "gemm_sm120")


def test_predictions_grow_and_rank() -> None:
    config = HopperConfig(TILE, EpilogueConfig())
    times = [predict_hopper(config, gpus.H200, m, 4096, 4096).us for m in (0, 128, 4096, 8192)]
    assert times == sorted(times) and times[0] < times[-1]
    few = explain(m=16, n=4096, k=4096, gpu="H200", backend="cute").route
    many = explain(m=4096, n=4096, k=4096, gpu="H200", backend="cute").route
    assert few is not None and few.pick is not None and few.pick.config.tile.swap_ab
    assert many is not None and many.pick is not None and not many.pick.config.tile.swap_ab
    fast = explain(m=4096, n=4096, k=4096, gpu="H200", backend="cute", fast_accum=True).route
    assert fast is not None and fast.pick is not None and fast.pick.config.tile.pingpong


@pytest.mark.parametrize(
    ("epilogue", "part_boxes"),
    [
        (EpilogueConfig(), 2),
        (EpilogueConfig(bias="bfloat16", activation="gelu"), 2),
        (EpilogueConfig(activation="silu", gated=True), 1),
        (EpilogueConfig(out="float32"), 0),
        (EpilogueConfig(residual="bfloat16"), 0),
    ],
)
def test_what_is_stored_through_boxes(epilogue: EpilogueConfig, part_boxes: int) -> None:
    config = HopperConfig(replace(TILE, stages=6), epilogue).check()
    assert config.part_boxes == config.boxes == part_boxes
    assert config.smem_bytes <= SMEM_LIMIT_SM90
    full = HopperConfig(replace(TILE, stages=7), epilogue).check()
    assert full.boxes == 0, "a ring that leaves no room for one"


@pytest.mark.parametrize("tile", TILES_SM90, ids=lambda tile: tile.name)
def test_a_tile_fills_all_boxes_in_turn(tile: HopperTile) -> None:
    """The next tile then starts with the box whose store is the oldest."""
    config = HopperConfig(tile, EpilogueConfig(), fast_accum=True)
    assert config.boxes == 0 or config.part_boxes * tile.parts % config.boxes == 0


@pytest.mark.parametrize("tile", TILES_SM90, ids=lambda tile: tile.name)
def test_mmas_are_not_serialised(tile: HopperTile, tmp_path: Path) -> None:
    """One wait for each group of four MMAs at most; no spills."""
    if sass.find_tool("nvdisasm") is None:
        pytest.skip("needs nvdisasm")
    config = HopperConfig(tile, EpilogueConfig(), fast_accum=not tile.fits(fast_accum=False))
    compiler.build(config, "sm_90a", options=f"--keep-cubin --dump-dir {tmp_path}")
    (cubin,) = tmp_path.rglob("*.cubin")
    code = sass.read_cubin(cubin)
    assert code.spills == code.stack == code.local == 0
    listing = sass._run("nvdisasm", "-c", str(cubin))
    mmas, waits = listing.count(" QGMMA."), listing.count("WARPGROUP.DEPBAR")
    assert mmas and waits <= mmas // 4 + 1
