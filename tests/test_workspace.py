"""Which launches share a workspace, with streams and captures that are only named."""

from __future__ import annotations

import pytest
import torch

from cute_fp8 import workspace as module
from cute_fp8.kernels.config import WORKSPACE_COUNTERS, EpilogueConfig, GemmConfig, workspace_words
from cute_fp8.kernels.tiles import TILES
from cute_fp8.workspace import workspace

CPU = torch.device("cpu", 0)


class World:
    """The current stream and capture."""

    stream, capture = 1, 0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    module.forget()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: world.capture != 0)
    monkeypatch.setattr(module, "_capture_id", lambda stream: world.capture)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: world.stream, raising=False
    )
    return world


def test_one_per_stream(world: World) -> None:
    first = workspace(CPU, 100_000)
    assert first.dtype is torch.int32 and first.numel() >= 100_000
    assert not first[:WORKSPACE_COUNTERS].any()
    assert workspace(CPU, 50_000) is first
    world.stream = 2
    assert workspace(CPU, 100_000) is not first
    world.stream = 1
    assert workspace(CPU, 100_000) is first


def test_it_grows(world: World) -> None:
    first = workspace(CPU, 100_000)
    larger = workspace(CPU, first.numel() + 1)
    assert larger.numel() > first.numel() and not larger[:WORKSPACE_COUNTERS].any()
    assert workspace(CPU, 1) is larger


def test_a_capture_has_its_own(world: World) -> None:
    eager = workspace(CPU, 1000)
    world.capture = 7
    captured = workspace(CPU, 1000)
    assert captured is not eager and workspace(CPU, 1000) is captured
    world.stream = 2
    assert workspace(CPU, 1000) is not captured, "a graph's branches may overlap"
    world.stream, world.capture = 1, 8
    assert workspace(CPU, 1000) is not captured
    assert all(key[2] == 8 for key in module._of_capture), "those of ended captures are dropped"
    world.capture = 0
    assert workspace(CPU, 1000) is eager


def test_words_hold_counters_and_every_part() -> None:
    for variant, tiles in TILES.items():
        for tile in tiles:
            config = GemmConfig(tile, EpilogueConfig(), variant, split_k=True)
            m, n, splits = 3 * tile.m + 1, 2 * tile.n, 5
            assert 8 * tile.group_warps <= WORKSPACE_COUNTERS
            parts = workspace_words(config, m, n, splits) - WORKSPACE_COUNTERS
            assert parts == 4 * 2 * splits * tile.m * tile.n


def test_no_more_tiles_than_counters() -> None:
    config = GemmConfig(TILES["per_token"][0], EpilogueConfig(), split_k=True)
    tiles = WORKSPACE_COUNTERS // config.tile.group_warps
    assert config.max_splits(128, 128 * tiles, 4096) == 32
    assert config.max_splits(128, 128 * (tiles + 1), 4096) == 1


def test_calls_of_ops_keep_nothing(world: World) -> None:
    kept = workspace(CPU, 1000)
    with module.unshared():
        first, second = workspace(CPU, 1000), workspace(CPU, 1000)
    assert first is not second and first is not kept
    assert not first[:WORKSPACE_COUNTERS].any()
    assert workspace(CPU, 1000) is kept
