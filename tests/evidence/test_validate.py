"""``validate`` without a GPU: its parts on made-up results, and all of it with runners replaced."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_fp8 import cli
from cute_fp8.build import kernel_sources
from cute_fp8.evidence import archs, gpu_tests, sweep, validate
from cute_fp8.evidence.files import load


def timing(impl: str = "cute_fp8", **changes: Any) -> dict[str, Any]:
    row = {"op": "gemm", "variant": "per_token", "impl": impl, "M": 16, "N": 64, "K": 32}
    times = {"us": 2.0, "us_min": 1.9, "us_max": 2.5, "tflops": 40.0, "error": 0.002}
    route = {"route": "cute:gemm_sm120"} if impl == "cute_fp8" else {}
    return {**row, **times, **route, **changes}


def verdict(**changes: Any) -> dict[str, Any]:
    row = {"op": "gemm", "variant": "per_token", "route": "cute:gemm_sm120", "kind": "gaussian"}
    figures = {"seed": 0, "M": 64, "N": 128, "K": 1024, "rel_l2": 0.04, "element_ratio": 0.5}
    return {**row, **figures, "passed": True, **changes}


def good() -> dict[str, Any]:
    return {
        "tests": {"tests.kernels.test_gemm_sm120": {"passed": 9, "skipped": 9}},
        "tier": [verdict(), verdict(kind="heavy_tailed")],
        "rows": [timing(), timing("torch_rowwise", failed="RuntimeError: not supported")],
        "sanitizer": {"memcheck": {"clean": True, "summary": "0 errors"}},
    }


# ----------------------------------------------------------------------------------------- tests


def test_sanitizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate.shutil, "which", lambda name: None)
    assert [found["clean"] for found in validate.run_sanitizers().values()] == [None] * 3
    commands = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        bad = "racecheck" in command and command[-1] == "1/2"
        text = (
            f"========= X SUMMARY: {9 * bad} hazards\n" if "racecheck" in command else "nothing\n"
        )
        return subprocess.CompletedProcess(command, 9 * bad, stdout=text, stderr="")

    monkeypatch.setattr(validate.shutil, "which", lambda name: name)
    monkeypatch.setattr(validate.subprocess, "run", run)
    monkeypatch.setattr(gpu_tests, "workers", lambda: 7)
    found = validate.run_sanitizers()
    assert found["racecheck"] == {
        "clean": False,
        "summary": "1 x X SUMMARY: 0 hazards; 1 x X SUMMARY: 9 hazards",
    }
    assert found["memcheck"] == {"clean": True, "summary": "2 x exit status 0, no summary"}
    assert sorted(command[-1] for command in commands) == ["0/2"] * 3 + ["1/2"] * 3
    for option, tool in (("--report-api-errors", "memcheck"), ("--num-cuda-barriers", "synccheck")):
        assert {command[2] for command in commands if option in command} == {tool}


# -------------------------------------------------------------------------------------- verdicts


def test_nothing_is_missed_in_a_good_run() -> None:
    assert validate.misses(good()) == []
    assert validate.covers(good()) == [
        {"op": "gemm", "variant": "per_token", "route": "cute:gemm_sm120"}
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tests": {"a": {"passed": 8, "failed": 1, "error": 1}}}, "2 of 10 GPU tests"),
        ({"tests": {"a": {"skipped": 8}}}, "no GPU test ran"),
        ({"tests": {"a": {"passed": 8}, "b": {"missing": 2}}}, "2 GPU tests are in no report"),
        ({"tests": {}}, "no GPU test ran"),
        ({"errors": {"tier": "RuntimeError: x"}}, "tier broke off: RuntimeError: x"),
        ({"tier": [verdict(passed=False)]}, "tier: per_token 64x128x1024 cute:gemm_sm120, gaus"),
        ({"rows": [timing(failed="wrong: ...")]}, "sweep: per_token 16x64x32 cute_fp8: wrong: "),
        ({"sanitizer": {"racecheck": {"clean": False, "summary": "1 hazard"}}}, "racecheck: 1 haz"),
    ],
)
def test_misses(changes: dict[str, Any], words: str) -> None:
    (miss,) = validate.misses({**good(), **changes})
    assert miss.startswith(words)


def test_steps_about_nothing_we_compute_may_break_off() -> None:
    assert validate.misses({**good(), "errors": {"host_us": "KeyError: x"}}) == []


def test_covers_no_route_with_anything_wrong() -> None:
    for changes in (
        {"tier": [verdict(), verdict(passed=False)]},
        {"rows": [timing(), timing(failed="wrong after the timing: ...")]},
        {"tier": []},
    ):
        assert validate.covers({**good(), **changes}) == []
    other = verdict(route="stand-in:gemm_sm120")
    both = validate.covers({**good(), "tier": [verdict(passed=False), other]})
    assert [cover["route"] for cover in both] == ["stand-in:gemm_sm120"]


def test_file_name() -> None:
    assert validate.file_name("NVIDIA GeForce RTX 5070 Ti", "2027-01-02") == (
        "cute_fp8-validation-geforce_rtx_5070_ti-2027-01-02.json"
    )
    assert "/" not in validate.file_name("NVIDIA A/B (C)", "2027-01-02")


def test_lines() -> None:
    assert validate.row_line(timing()) == (
        "per_token 16x64x32 cute_fp8: 2.0 us (1.9-2.5), 40 TFLOP/s"
    )
    control = verdict(control="weight scales x 1.05")
    assert "weight scales x 1.05: relative L2 0.04" in validate.tier_line(control)
    assert validate.tier_line(control).endswith(", as it must be")


# ----------------------------------------------------------------------------------- all of it


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A made-up RTX 5090 whose tests, tier and sweep go well; the working folder is returned."""
    facts = {"gpu": "NVIDIA GeForce RTX 5090", "capability": "12.0", "driver": "1", "torch": "2"}
    facts["kernels"] = kernel_sources.as_line()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(validate, "obstacle", lambda: None)
    monkeypatch.setattr(validate, "environment", lambda: dict(facts))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (12, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu_tests, "run_tests", lambda data, quick: good()["tests"])
    clean = dict.fromkeys(validate.TOOLS, good()["sanitizer"]["memcheck"])
    monkeypatch.setattr(validate, "run_sanitizers", lambda: clean)
    monkeypatch.setattr(validate, "machine_facts", lambda: {"read_gbps": 1700.0})
    monkeypatch.setattr(validate, "host_times", lambda backend: {"cute_fp8": 9.0})
    monkeypatch.setattr(sweep, "tier", lambda uses: iter(good()["tier"]))
    monkeypatch.setattr(sweep, "sweep", lambda uses, shapes: iter(good()["rows"]))
    return tmp_path


def test_a_run_is_evidence(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "--sanitize"]) == 0
    (file,) = gpu.glob("cute_fp8-validation-geforce_rtx_5090-*.json")
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["kind"] == "validation" and data["passed"] is True and data["missed"] == []
    assert data["backend"] == "cute"
    assert data["meta"]["read_gbps"] == 1700.0 and data["meta"]["capability"] == "12.0"
    assert data["sanitizer"].keys() == set(validate.TOOLS)
    (evidence,) = load(gpu)
    row = archs.Row("gemm", "per_token", "gemm_sm120")
    assert archs.cell(row, (12, 0), [evidence]) == archs.MEASURED
    out = capsys.readouterr().out
    assert "[1/6] the GPU tests" in out and "cute_fp8: 2.0 us" in out
    assert out.splitlines()[-1].startswith("Please send this file to the project's issue tracker")


def test_a_quick_run_is_a_first_look(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.run("look.json", quick=True) == 0
    assert load(gpu) == []
    data = json.loads((gpu / "look.json").read_text())
    assert data["quick"] and "host_us" not in data and "sanitizer" not in data
    assert "without --quick" in capsys.readouterr().out.splitlines()[-1]


def test_a_step_that_breaks_off(
    gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is still done, and the file says what happened."""

    def tier(uses: Any) -> Any:
        yield verdict()
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    monkeypatch.setattr(sweep, "tier", tier)
    assert validate.run("x.json") == 1
    data = json.loads((gpu / "x.json").read_text())
    assert data["errors"] == {"tier": "RuntimeError: CUDA error: an illegal memory access"}
    assert data["passed"] is False and data["covers"] == [] and data["rows"]
    assert archs.cell(archs.Row("gemm", "per_token", "gemm_sm120"), (12, 0), load(gpu)) in (
        archs.NO_EVIDENCE,
        archs.INSPECTED,
    )
    assert "NOT PASSED: tier broke off" in capsys.readouterr().out


def test_a_folder_that_is_not_there(gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "--out", "no/file.json"]) == 2
    assert capsys.readouterr().err == (
        "cute_fp8 validate: --out: got no/file.json, must be in a folder that exists\n"
    )


@pytest.mark.parametrize(
    ("replace", "words"),
    [
        ({"available": False}, "got no CUDA GPU, must run on the GPU that it is to say"),
        ({"root": "/nowhere"}, "got an installed package, must run in a checkout of the sources"),
        ({"missing": "pytest_timeout"}, "got no pytest-timeout, must be installed: pip install"),
    ],
)
def test_obstacles(
    replace: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: replace.get("available", True))
    monkeypatch.setattr(validate, "ROOT", Path(replace.get("root", validate.ROOT)))
    find = lambda name: None if name == replace.get("missing") else name  # noqa: E731
    monkeypatch.setattr(validate.importlib.util, "find_spec", find)
    assert cli.main(["validate"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"cute_fp8 validate: {words}")


def test_a_gpu_without_kernels_checks_torch() -> None:
    assert sweep.uses_of((8, 9)) == [("torch", "per_token")]
    assert ("cute", "per_token") in sweep.uses_of((12, 1))
    assert ("stand-in", "per_token") in sweep.uses_of((9, 0))
    assert sweep.impl_of("stand-in") != sweep.impl_of("cute") == "cute_fp8"
