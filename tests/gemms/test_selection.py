"""Which configuration a problem gets, how it is told, and what pinning one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_fp8
from cute_fp8 import dispatch, explain, gpus, settings
from cute_fp8.build import cache
from cute_fp8.gemms import selection, winners
from cute_fp8.gemms.choice import Choice
from cute_fp8.gemms.problem import GemmProblem
from cute_fp8.gemms.selection import Ranked, Selection, name_of, rank, select_config
from cute_fp8.kernels.config import TileConfig
from cute_fp8.kernels.tiles import TILES

BF16 = torch.bfloat16
SM120 = [gpu for gpu in gpus.GPUS if gpu.capability[0] == 12]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No winners but those of the test."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    winners.forget()
    yield tmp_path
    winners.forget()


def problem(m: int, n: int, k: int, variant: str = "per_token", **options: Any) -> GemmProblem:
    return explain(
        **{"op": "gemm", **options}, m=m, n=n, k=k, variant=variant, device="cpu"
    ).problem


def chosen(m: int, n: int, k: int, gpu: gpus.Gpu, variant: str = "per_token") -> Ranked:
    return select_config(problem(m, n, k, variant), gpu).chosen


@pytest.mark.parametrize("variant", TILES)
@pytest.mark.parametrize("gpu", gpus.GPUS, ids=lambda gpu: gpu.name)
def test_the_ranking_is_by_predicted_time_and_has_every_tile(gpu: gpus.Gpu, variant: str) -> None:
    for shape in ((1, 4096, 4096), (352, 1024, 4096), (4096, 4096, 4096), (1, 8, 32)):
        ranking = rank(problem(*shape, variant), gpu)
        plain = [ranked for ranked in ranking if ranked.pick.splits == 1]
        assert {ranked.pick.config.tile for ranked in plain} == {*TILES[variant]}
        times = [ranked.prediction.us for ranked in plain]
        assert times == sorted(times)
        assert len({ranked.pick for ranked in ranking}) == len(ranking)
        for ranked in ranking:
            assert ranked.pick.config.split_k is (ranked.pick.splits > 1)
            assert not (ranked.pick.config.dynamic or ranked.pick.config.pdl)
            ranked.pick.config.check()


@pytest.mark.parametrize("gpu", SM120, ids=lambda gpu: gpu.name)
def test_few_tokens_swap_the_operands_where_the_waste_would_cost(gpu: gpus.Gpu) -> None:
    for m in (1, 2, 8, 16):
        best = chosen(m, 28672, 4096, gpu)
        assert best.pick.config.tile.m <= 32
        assert best.prediction.limit == "DRAM"


@pytest.mark.parametrize("gpu", SM120, ids=lambda gpu: gpu.name)
def test_many_tokens_take_a_large_tile_and_no_split(gpu: gpus.Gpu) -> None:
    best = chosen(8192, 8192, 8192, gpu)
    tile = best.pick.config.tile
    assert tile.m * tile.n >= 128 * 128 and best.pick.splits == 1


def test_a_grid_that_leaves_most_sms_idle_is_split() -> None:
    for gpu in (gpus.RTX_5090, gpus.RTX_PRO_6000):
        best = chosen(128, 1024, 16384, gpu)
        assert best.pick.splits > 1
        plain = [r for r in rank(problem(128, 1024, 16384), gpu) if r.pick.splits == 1]
        assert best.prediction.us < 0.8 * plain[0].prediction.us


def test_a_split_has_to_be_worth_it() -> None:
    """Where DRAM is what is waited for, splitting may look better by a hair: it is not taken."""
    for shape in ((16, 4096, 4096), (1, 28672, 4096), (16, 4096, 14336)):
        for gpu in SM120:
            ranking = rank(problem(*shape), gpu)
            best = ranking[0].prediction.us
            plain = min(r.prediction.us for r in ranking if r.pick.splits == 1)
            if ranking[0].pick.splits > 1:
                assert best * (1 + selection.SPLIT_MARGIN) < plain


def test_splits_leave_every_split_work_and_every_sm_at_most_two_units() -> None:
    for shape in ((16, 64, 256), (16, 1024, 16384), (352, 1024, 4096)):
        for ranked in rank(problem(*shape), gpus.RTX_5090):
            if ranked.pick.splits > 1:
                assert ranked.prediction.units <= 2 * gpus.RTX_5090.sms
                k_tiles = shape[2] // ranked.pick.config.tile.k
                assert k_tiles // ranked.pick.splits >= selection.SPLIT_K_TILES


def test_a_tile_that_the_epilogue_cannot_be_added_to_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = rank(problem(352, 4096, 4096), gpus.RTX_5090)[0].pick.config.tile
    check = selection.Choice.pick

    def refuse(self: Choice, *arguments: Any) -> Any:
        if self.tile == first:
            raise ValueError("not this one")
        return check(self, *arguments)

    monkeypatch.setattr(selection.Choice, "pick", refuse)
    tiles = {r.pick.config.tile for r in rank(problem(352, 4096, 4096), gpus.RTX_5090)}
    assert tiles == {*TILES["per_token"]} - {first}


def test_a_ranking_predicts_no_more_than_a_first_call_can_spare() -> None:
    """A prediction takes some 5 us."""
    longest = max(
        len(rank(problem(m, n, 16384), gpu))
        for gpu in gpus.GPUS
        for m in (1, 16, 64, 352)
        for n in (64, 1024, 8192)
    )
    assert longest <= 160


def test_names_of_problems_tell_them_apart() -> None:
    problems = [
        problem(1, 64, 64),
        problem(2, 64, 64),
        problem(1, 128, 64),
        problem(1, 64, 128),
        problem(1, 64, 64, "mxfp8"),
        problem(1, 64, 64, bias=BF16),
        problem(1, 64, 64, residual=BF16),
        problem(1, 64, 64, activation="gelu"),
        problem(1, 64, 64, out_dtype=torch.float32),
    ]
    assert len({name_of(p) for p in problems}) == len(problems)


# ------------------------------------------------------------------------------------- explain


def test_explain_shows_the_pick_its_time_and_the_runners_up() -> None:
    found = explain(m=352, n=1024, k=4096, gpu="RTX 5070 Ti")
    assert found.route is not None and found.route.selection is not None
    _, taken, head, columns, first, *others = str(found).splitlines()
    ranking = found.route.selection.ranking
    assert taken == f"  takes   cute:gemm_sm120 for sm_120a, config {ranking[0].pick.name}"
    assert head.strip().startswith("first by the performance model; predicted times")
    assert head.endswith("RTX 5070 Ti:")
    assert columns.split()[:3] == ["config", "us", "limit"]
    assert len(others) == selection.RUNNERS_UP
    for ranked, line in zip(ranking, (first, *others), strict=False):
        assert line.split()[:2] == [ranked.pick.name, f"{ranked.prediction.us:.1f}"]


def test_explain_takes_a_gpu_by_name_or_a_typical_one_of_the_capability() -> None:
    def gpu_of(**where: Any) -> str:
        found = explain(m=16, n=4096, k=4096, **where)
        assert found.route is not None and found.route.selection is not None
        return found.route.selection.gpu.name

    assert gpu_of(gpu="5080") == "RTX 5080"
    assert gpu_of(gpu="NVIDIA GB10", capability=(12, 1)) == "DGX Spark"
    assert gpu_of(capability=(12, 1)) == "DGX Spark"
    assert gpu_of(capability=(9, 0), backend="stand-in") == "H200"
    with pytest.raises(
        ValueError, match=r"capability: got \(12, 0\), must be \(9, 0\), the H200's"
    ):
        explain(m=1, n=64, k=64, gpu="H200", capability=(12, 0))
    with pytest.raises(ValueError, match="gpu: got 'RTX 1', must be one of "):
        explain(m=1, n=64, k=64, gpu="RTX 1")


# ------------------------------------------------------------------------------------- pinning


@pytest.mark.parametrize(
    ("config", "variant", "reason"),
    [
        ("128x128x128_s4_w2x2", "per_token", "per_token needs 1[0-9]+ bytes of shared memory"),
        ("128x128x128_s3_w2x2", "mxfp8", "mxfp8 needs 1[0-9]+ bytes of shared memory"),
        ("64x96x128_s2_w2x1", "mxfp8", "m and n must divide 128 or be multiples of it"),
        ("128x64x128_s3_w2x2/split2/dynamic", "mxfp8", "must be cooperative, without split-K"),
        ("128x128x64_s5_w2x2/split2", "mxfp8", "split-K must have warp tiles of less than 4096"),
        (
            "128x64x128_s4_w2x2/split9",
            "per_token",
            "got 9 splits, must be at most 8 for M, N, K",
        ),
    ],
)
def test_a_pinned_config_that_cannot_serve_is_refused_with_the_reason(
    config: str, variant: str, reason: str
) -> None:
    with cute_fp8.use(config=config):
        found = explain(m=352, n=1024, k=1024, variant=variant, capability=(12, 0))
    assert found.route is None and found.refusal is not None
    with pytest.raises(ValueError, match=reason) as caught:
        select_config(problem(352, 1024, 1024, variant), gpus.RTX_5090, settings.choice_of(config))
    assert str(caught.value) == found.refusal and "\n" not in found.refusal
    assert str(found).splitlines()[-2:] == [f"  refused the pinned {found.refusal}", "  no route"]


def test_gemm_raises_what_explain_says_of_a_pinned_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "capability_of_device", lambda device: (12, 0))
    monkeypatch.setattr(dispatch.gpus, "of_device", lambda device: gpus.RTX_5090)
    pinned = settings.Settings("auto", Choice(TileConfig(128, 128, 128, 2, 2, 4)))
    with pytest.raises(ValueError, match="must be at most 101376"):
        dispatch.select(problem(352, 1024, 1024), pinned)
    route = dispatch.select(problem(352, 1024, 1024), settings.Settings("auto", None))
    assert (
        route.pick is not None
        and route.pick == rank(problem(352, 1024, 1024), gpus.RTX_5090)[0].pick
    )


def test_dynamic_scheduling_wants_a_gpu_that_has_it() -> None:
    choice = Choice(TILES["per_token"][0], dynamic=True)
    reason = r"must be 12.x \(cluster launch control\)"
    with pytest.raises(ValueError, match=reason):
        select_config(problem(352, 1024, 1024), gpus.H200, choice)


def test_a_pinned_config_serves_whatever_m_is() -> None:
    for tile in TILES["per_token"]:
        for m in (1, 17, 4096):
            with cute_fp8.use(config=tile):
                route = explain(m=m, n=4096, k=4096, capability=(12, 0)).route
            assert route is not None and route.pick is not None and route.selection is not None
            assert (route.pick.config.tile, route.selection.reason) == (tile, "pinned")
            assert route.selection.ranking == ()


def test_mxfp8_output_takes_a_tile_whose_warps_have_whole_blocks() -> None:
    quantized = problem(352, 1024, 1024, "mxfp8", out_dtype=torch.float8_e4m3fn, op="gemm_gated")
    tiles = {ranked.pick.config.tile for ranked in rank(quantized, gpus.RTX_5090)}
    assert tiles == {tile for tile in TILES["mxfp8"] if tile.warp_n >= 64}


# ------------------------------------------------------------------------------------- winners


def kept(gpu: gpus.Gpu, p: GemmProblem, choice: Choice) -> Selection:
    winners.keep(gpu.name, {name_of(p): (choice, 12.3)})
    return select_config(p, gpu)


def test_a_winner_is_taken_on_its_gpu_for_its_problem_alone() -> None:
    p, gpu = problem(352, 1024, 4096), gpus.RTX_5090
    last = rank(p, gpu)[-1].pick
    found = kept(gpu, p, last.choice)
    assert (found.reason, found.chosen.pick) == ("tuned", last)
    assert found.lines()[0].startswith("fastest when autotuned")
    assert found.ranking == tuple(rank(p, gpu))
    assert select_config(p, gpus.RTX_5080).reason == "predicted"
    assert select_config(problem(353, 1024, 4096), gpu).reason == "predicted"
    pinned = Choice(TILES["per_token"][0])
    assert select_config(p, gpu, pinned).chosen.pick.choice == pinned


def test_a_winner_that_can_no_longer_serve_is_passed_over() -> None:
    p, gpu = problem(352, 1024, 1024), gpus.RTX_5090
    found = kept(gpu, p, Choice(TileConfig(128, 128, 128, 2, 2, 4)))
    assert (found.reason, found.chosen) == ("predicted", rank(p, gpu)[0])
