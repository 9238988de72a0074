"""The proof of the kernels' PTX, and that the proof would notice what it is there to notice."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest

from cute_fp8 import cli
from cute_fp8.build import shipped
from cute_fp8.evidence import verify
from cute_fp8.evidence.verify import build_ptx, check_ptx, launch_of, verify_kernel
from cute_fp8.kernels.config import EpilogueConfig, GemmConfig, RelayoutConfig, TileConfig
from cute_fp8.kernels.projection_config import ProjectionConfig
from cute_fp8.kernels.row_config import RowShape
from cute_fp8.kernels.tiles import TILE_64x64

#: Two stages: the same code as any number of them, checked in seconds.
QUICK = GemmConfig(TileConfig(32, 64, 128, 2, 2, stages=2), EpilogueConfig())
QUICK_MX = GemmConfig(QUICK.tile, QUICK.epilogue, "mxfp8")
PINGPONG = GemmConfig(TileConfig(32, 32, 128, 1, 1, stages=2, pingpong=True), EpilogueConfig())
SWAPPED = GemmConfig(TileConfig(8, 64, 128, 1, 2, stages=2, swap_ab=True), EpilogueConfig())
#: A warp's rows in several rounds, a weight's in several passes, all stages used again.
PROJECTION = ProjectionConfig(
    "bfloat16", None, None, True, 2, RowShape(64, 1), slabs=3, blocks=1, row_warps=1, stages=8
)
#: A wait for a phase of a barrier, in PTX.
WAIT = re.compile(r"\t\{\n\t?\.reg \.pred done;.*?\n\t?\}\n", re.DOTALL)
BOTH = pytest.mark.parametrize("config", [QUICK, QUICK_MX], ids=lambda config: config.variant)


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    """PTX of the quick kernels, by variant."""
    return {config.variant: build_ptx(config, "sm_120a") for config in (QUICK, QUICK_MX)}


def check(config: GemmConfig, text: str) -> tuple[str, str]:
    return check_ptx(text, launch_of(config))


@pytest.mark.parametrize(
    "config",
    [
        PINGPONG,
        replace(PINGPONG, variant="mxfp8"),
        replace(PINGPONG, split_k=True),
        SWAPPED,
        replace(SWAPPED, variant="mxfp8", split_k=True),
        replace(QUICK_MX, tile=replace(QUICK.tile, k=64)),
        replace(QUICK_MX, tile=replace(QUICK.tile, k=64), split_k=True),
        GemmConfig(TILE_64x64, EpilogueConfig()),
        PROJECTION,
        replace(PROJECTION, weight="bfloat16", bias="bfloat16", residual=False),
    ],
    ids=lambda config: config.name,
)
def test_kernels_of_every_kind_are_proved(config: GemmConfig | ProjectionConfig) -> None:
    """With few stages, but for one; `cute_fp8 verify` checks all that is shipped."""
    proof = verify_kernel(config, "sm_120a")
    assert proof.proved, proof


def test_what_is_checked_is_all_that_is_shipped_but_for_epilogues_and_rows() -> None:
    checked = verify.verified_configs()
    for config in shipped.shipped_configs():
        if isinstance(config, ProjectionConfig) and config.rows > verify.MOST_ROWS:
            continue
        if isinstance(config, GemmConfig):
            config = replace(config, epilogue=EpilogueConfig())
        assert config in checked


def test_stages_that_go_from_warp_to_warp_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another warp's older round of a stage is taken for one's own."""
    monkeypatch.setattr(ProjectionConfig, "check", lambda config: config)
    proof = verify_kernel(replace(PROJECTION, stages=2), "sm_120a")
    assert proof.result == "not_wellsynced", proof


def test_ping_pong_without_turns_is_reported() -> None:
    """A group that does not wait takes an older round of a stage for its own."""
    text = build_ptx(PINGPONG, "sm_120a")
    waits = list(WAIT.finditer(text))
    results = []
    for wait in waits:
        broken = text[: wait.start()] + text[wait.end() :]
        results.append(check_ptx(broken, launch_of(PINGPONG))[0])
    assert len(waits) == 4, "empty; turn; a stage's first and later ones"
    assert "race_free" not in results, results


@BOTH
def test_quick_kernels_are_proved(config: GemmConfig, ptx: dict[str, str]) -> None:
    assert check(config, ptx[config.variant]) == ("race_free", "")


@BOTH
def test_a_release_without_its_warp_sync_is_reported(
    config: GemmConfig, ptx: dict[str, str]
) -> None:
    """Then the next load may overwrite what a slower lane still reads."""
    broken, count = re.subn(
        r"\tbar\.warp\.sync \t-1;\n(\telect\.sync)", r"\1", ptx[config.variant], count=1
    )
    assert count == 1
    result, details = check(config, broken)
    assert result != "race_free", details


@BOTH
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_missing_wait_is_reported(config: GemmConfig, which: int, ptx: dict[str, str]) -> None:
    """The producer's wait for an empty stage; the MMA warps' first, and their later ones."""
    waits = list(WAIT.finditer(ptx[config.variant]))
    assert len(waits) == 3
    begin, end = waits[which].span()
    result, details = check(config, ptx[config.variant][:begin] + ptx[config.variant][end:])
    assert result != "race_free", details


@BOTH
@pytest.mark.parametrize("off", [-16, 16])
def test_a_wrong_byte_count_is_reported(config: GemmConfig, off: int, ptx: dict[str, str]) -> None:
    broken, count = re.subn(
        rf"(mov\.b32 \t%r\d+, ){config.stage_bytes};",
        rf"\g<1>{config.stage_bytes + off};",
        ptx[config.variant],
    )
    assert count == 1
    result, details = check(config, broken)
    assert result != "race_free", details


@BOTH
def test_the_description_must_be_that_of_the_code(config: GemmConfig, ptx: dict[str, str]) -> None:
    other = QUICK_MX if config is QUICK else QUICK
    with pytest.raises(RuntimeError, match=r"verify: got parameters of \[.*\] bytes, must be \["):
        check(other, ptx[config.variant])


def test_what_cannot_be_checked_is_no_proof() -> None:
    proof = verify_kernel(RelayoutConfig(), "sm_120a")
    assert proof.result == "unsupported"
    assert not proof.proved


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fake(config: GemmConfig, target: str) -> verify.Proof:
        result = "race" if config.variant == "mxfp8" else "race_free"
        result = "unsupported" if config.split_k else result
        return verify.Proof(config.name, target, result, 1.0, "why")

    monkeypatch.setattr(verify, "verify_kernel", fake)
    command = ["verify", "--arch", "sm_120a", "--json", "--ops"]
    assert cli.main([*command, "gemm_per_token-64x64x128_s6_w2x2-*"]) == 0
    captured = capsys.readouterr()
    assert [proof["result"] for proof in json.loads(captured.out)["proofs"]] == [
        "race_free",
        "unsupported",
    ]
    name = "gemm_per_token-64x64x128_s6_w2x2-bfloat16-split"
    assert f"not proved: sm_120a {name}: unsupported, why" in captured.err.splitlines()
    assert cli.main([*command, "gemm_mxfp8-64x64x128_*"]) == 1


def test_missing_tool_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify.sysconfig, "get_path", lambda name: "/nowhere")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"^sentryward: got nothing on PATH, must be installed"):
        check_ptx(".entry k(\n.param .u32 k_param_0\n)", launch_of(QUICK))
