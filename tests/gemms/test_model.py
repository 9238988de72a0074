"""The performance model against kernels that were measured, and against what must be so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cute_fp8 import explain, gpus
from cute_fp8.gemms import model
from cute_fp8.gemms.model import TileCosts
from cute_fp8.gpus import H200, RTX_5070_TI
from cute_fp8.kernels.config import EpilogueConfig, GemmConfig, TileConfig
from cute_fp8.kernels.tiles import TILES

ROOT = Path(__file__).resolve().parents[2]
BF16 = EpilogueConfig()

#: What cuBLASLt and CUTLASS ran on an RTX 5070 Ti: tiles, not ours.
NVJET_128 = GemmConfig(TileConfig(128, 128, 64, 2, 2, 6), BF16)
NVJET_64 = GemmConfig(TileConfig(128, 64, 64, 2, 2, 8), BF16)
MXFP8 = GemmConfig(TileConfig(128, 128, 128, 2, 2, 2), BF16, "mxfp8")
ROW_WISE = GemmConfig(TileConfig(128, 128, 128, 2, 2, 3), BF16)
#: Which tile was taken for few tokens is not known; what moves is the weight.
FEW_TOKENS = GemmConfig(TileConfig(32, 64, 128, 2, 2, 8), BF16)

#: Other instructions per MMA of CUTLASS's MXFP8 main loop, read off its machine code.
CUTLASS_MXFP8_OTHERS = 2.4
HALF_RATE = replace(RTX_5070_TI, mma_flops=RTX_5070_TI.plain_mma_flops)

#: Microseconds, measured by others: graph-timed, out of L2.
PUBLISHED = [
    (NVJET_128, RTX_5070_TI, None, (4096, 4096, 4096), (423, 423)),
    (NVJET_64, RTX_5070_TI, None, (352, 8192, 1024), (29.5, 30.2)),
    (NVJET_64, RTX_5070_TI, None, (352, 2560, 1024), (10.6, 10.9)),
    (FEW_TOKENS, RTX_5070_TI, None, (16, 12288, 2048), (31.9, 32.8)),
    (FEW_TOKENS, RTX_5070_TI, None, (22, 8192, 1024), (12.0, 12.0)),
    (MXFP8, RTX_5070_TI, CUTLASS_MXFP8_OTHERS, (8192, 8192, 8192), (3436, 3479)),
    (MXFP8, RTX_5070_TI, CUTLASS_MXFP8_OTHERS, (352, 8192, 1024), (24.7, 24.7)),
    (MXFP8, RTX_5070_TI, CUTLASS_MXFP8_OTHERS, (352, 2560, 1024), (9.3, 9.3)),
    (ROW_WISE, HALF_RATE, None, (4096, 4096, 4096), (713, 713)),
    (ROW_WISE, HALF_RATE, None, (352, 8192, 1024), (41.5, 41.5)),
]


@pytest.mark.parametrize(("config", "gpu", "others", "shape", "measured"), PUBLISHED)
def test_published_kernels_of_an_rtx_5070_ti_within_15_percent(
    config: GemmConfig,
    gpu: gpus.Gpu,
    others: float | None,
    shape: tuple[int, int, int],
    measured: tuple[float, float],
) -> None:
    us = TileCosts(config, gpu, others).predict(*shape).us
    assert measured[0] * 0.85 < us < measured[1] * 1.15


def test_the_stand_in_on_an_h200_within_15_percent() -> None:
    """Our own kernel, measured; only its MMA's rate was taken from one of these rows."""
    path = ROOT / "perf" / "results" / "h200" / "stand-in-2026-11-30.json"
    rows = json.loads(path.read_text())["rows"]
    tiles = {tile.name: tile for tile in (ROW_WISE.tile, FEW_TOKENS.tile)}
    ours = [row for row in rows if row["impl"] == "cute_fp8_stand_in"]
    assert len(ours) == 45
    ratios = []
    for row in ours:
        costs = TileCosts(GemmConfig(tiles[row["tile"]], BF16), H200)
        ratios.append(costs.predict(row["M"], row["N"], row["K"]).us / row["us"])
    assert min(ratios) > 0.85 and max(ratios) < 1.15


@pytest.mark.parametrize(
    ("tile", "others"), [((128, 128, 128, 2, 2, 3), 0.53), ((32, 64, 128, 2, 2, 8), 3.0)]
)
def test_other_instructions_are_those_of_the_machine_code(
    tile: tuple[int, ...], others: float
) -> None:
    config = GemmConfig(TileConfig(*tile), BF16)
    by_default = TileCosts(config, RTX_5070_TI).k_tile_clk
    assert by_default == pytest.approx(TileCosts(config, RTX_5070_TI, others).k_tile_clk, rel=0.01)


def every_config() -> list[GemmConfig]:
    return [GemmConfig(t, BF16, variant) for variant, tiles in TILES.items() for t in tiles]


@pytest.mark.parametrize("config", every_config(), ids=lambda c: c.name)
def test_no_prediction_beats_the_roofs(config: GemmConfig) -> None:
    for gpu in gpus.GPUS:
        peak = gpu.sms * gpu.mma_flops * gpu.clock_mhz * 1e-3  # operations per ns
        for m, n, k in ((1, 4096, 4096), (352, 1024, 4096), (4096, 4096, 4096)):
            for splits in (1, 4):
                us = TileCosts(config, gpu).predict(m, n, k, splits).us
                assert us > 2e-3 * m * n * k / peak
                assert us > (k * (m + n) + 2 * m * n) * 1e-3 / gpu.dram_gbps


@pytest.mark.parametrize("config", every_config(), ids=lambda c: c.name)
def test_more_work_never_takes_less_time(config: GemmConfig) -> None:
    costs = TileCosts(config, gpus.RTX_5090)
    for sizes in (
        [(m, 4096, 4096) for m in (1, 16, 64, 65, 352, 4096)],
        [(352, n, 4096) for n in (8, 1024, 8192)],
        [(352, 4096, k) for k in (128, 1024, 8192)],
    ):
        times = [costs.predict(*shape).us for shape in sizes]
        assert times == sorted(times)


def test_a_tile_that_fills_the_sms_once_or_twice_is_what_it_takes() -> None:
    """Wave quantisation: 70 tiles take as long as 1, 71 as long as 140."""
    costs = TileCosts(NVJET_128, RTX_5070_TI)
    compute = [costs.predict(128, 128 * tiles, 4096).compute_us for tiles in (1, 70, 71, 140)]
    assert compute[0] == compute[1] and compute[2] == compute[3] == 2 * compute[0]


def test_splitting_pays_where_sms_idle_and_costs_where_they_do_not() -> None:
    costs = TileCosts(ROW_WISE, gpus.RTX_5090)
    few = [costs.predict(352, 1024, 4096, splits).us for splits in (1, 4)]
    many = [costs.predict(4096, 4096, 4096, splits).us for splits in (1, 4)]
    assert few[1] < 0.8 * few[0] and many[1] > many[0]
    assert costs.predict(352, 1024, 4096, 4).split_us > 0 == costs.predict(352, 1024, 4096).split_us


def test_ping_pong_hides_every_epilogue_but_the_last() -> None:
    plain = TileCosts(NVJET_128, RTX_5070_TI)
    pingpong = TileCosts(
        replace(NVJET_128, tile=replace(NVJET_128.tile, pingpong=True)), RTX_5070_TI
    )
    shape = (4096, 4096, 512)
    rounds = plain.predict(*shape).rounds
    assert rounds == 15
    saved = plain.predict(*shape).compute_us - pingpong.predict(*shape).compute_us
    epilogue_us = plain.epilogue_clk / RTX_5070_TI.clock_mhz
    assert saved == pytest.approx((rounds - 1) * epilogue_us)


def test_a_weight_that_does_not_stay_in_l2_is_read_once_per_band() -> None:
    costs = TileCosts(NVJET_128, RTX_5070_TI)
    m = model.RASTER_ROWS * 128 * 3
    small, large = costs.predict(m, 1024, 8192), costs.predict(m, 8192, 8192)
    read = large.dram_us - small.dram_us
    out_us = 2 * m * 7168 / model.WRITE_SHARE * 1e-3 / RTX_5070_TI.dram_gbps
    weights = (3 * 8192 - 1024) * 8192 / RTX_5070_TI.read_share * 1e-3 / RTX_5070_TI.dram_gbps
    assert read == pytest.approx(out_us + weights)


def test_the_limit_is_what_is_busiest() -> None:
    assert TileCosts(FEW_TOKENS, RTX_5070_TI).predict(16, 12288, 2048).limit == "DRAM"
    assert TileCosts(ROW_WISE, HALF_RATE).predict(4096, 4096, 4096).limit == "compute"


def test_the_raster_is_the_kernels() -> None:
    source = (ROOT / "kernels" / "scheduler.py").read_text()
    assert f"RASTER_ROWS = {model.RASTER_ROWS}\n" in source


def test_no_tokens_take_the_start_alone() -> None:
    """Of weights larger than L2, too."""
    for gpu in gpus.GPUS:
        found = explain("gemm", m=0, n=28672, k=4096, gpu=gpu.name)
        assert found.route is not None
