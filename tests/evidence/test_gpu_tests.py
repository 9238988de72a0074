"""Outcomes of the GPU tests: how they are run, counted, and taken from earlier reports."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cute_fp8.build import kernel_sources
from cute_fp8.dispatch import TABLE
from cute_fp8.evidence import archs, gpu_tests

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites name="pytest tests"><testsuite name="pytest" tests="6">
<properties>
<property name="gpu" value="A GPU"/><property name="kernels" value="KERNELS"/>
</properties>
<testcase classname="tests.kernels.test_gemm_sm120" name="test_a[cute]" time="1"/>
<testcase classname="tests.kernels.test_gemm_sm120" name="test_a[stand-in]" time="0">
  <skipped type="pytest.skip" message="needs compute capability 9.x">x.py:1: skipped</skipped>
</testcase>
<testcase classname="tests.kernels.test_gemm_sm120" name="test_b[cute]" time="1">
  <properties><property name="a" value="b"/></properties>
  <failure message="AssertionError: 3 of 9 elements differ&#10;assert 3 == 0">trace</failure>
</testcase>
<testcase classname="tests.test_gpu_integration" name="test_c" time="1">
  <error message="failed on setup">trace</error>
</testcase>
<testcase classname="tests.test_gpu_integration" name="test_d" time="1"><system-out>hi</system-out>
</testcase>
<testcase classname="" name="tests.test_broken" time="0"><error message="collection failure"/>
</testcase>
</testsuite></testsuites>
"""


def test_junit() -> None:
    data: dict[str, Any] = {}
    cases, made = gpu_tests.parse_junit(ET.fromstring(JUNIT))
    assert made["gpu"] == "A GPU"
    assert gpu_tests.outcomes(data, cases) == {
        "tests.kernels.test_gemm_sm120": {"passed": 1, "skipped": 1, "failed": 1},
        "tests.test_broken": {"error": 1},
        "tests.test_gpu_integration": {"error": 1, "passed": 1},
    }
    assert data["failures"] == [
        "tests.kernels.test_gemm_sm120::test_b[cute]: AssertionError: 3 of 9 elements differ",
        "tests.test_gpu_integration::test_c: failed on setup",
        "tests.test_broken::tests.test_broken: collection failure",
    ]


def test_pytest_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = gpu_tests.pytest_command(tmp_path / "r.xml", quick=False, processes=1)
    assert command[:3] == [sys.executable, "-m", "pytest"]
    assert command[command.index("-m", 3) + 1] == "gpu or needs_cc" and "-n" not in command
    monkeypatch.setattr(gpu_tests.importlib.util, "find_spec", lambda name: name == "xdist")
    command = gpu_tests.pytest_command(tmp_path / "r.xml", quick=True, processes=4)
    assert command[command.index("-m", 3) + 1] == "(gpu or needs_cc) and not slow"
    assert command[command.index("-n") + 1 :] == ["4", "--dist", "loadgroup", "tests"]
    monkeypatch.setattr(gpu_tests.importlib.util, "find_spec", lambda name: None)
    assert "-n" not in gpu_tests.pytest_command(tmp_path / "r.xml", quick=True, processes=4)


def test_the_gpu_tests_are_found_and_no_others(tmp_path: Path) -> None:
    """The command itself, on this machine: what needs a GPU, and each kernel's tests among it."""
    command = [*gpu_tests.pytest_command(tmp_path / "r.xml", False, 1), "--collect-only"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=gpu_tests.ROOT, capture_output=True, text=True
    )
    modules = {line.split("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert "tests/test_gpu_integration.py" in modules, done.stdout + done.stderr
    assert "tests/test_numerics.py" not in modules
    kernels = {entry.kernel for entry in TABLE if entry.targets}
    owners = {
        archs.kernel_of_tests(m.removesuffix(".py").replace("/", "."), kernels) for m in modules
    }
    assert kernels <= owners, "ARCHS.md looks for tests/kernels/test_<kernel>*.py"


def test_run_tests_reads_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        (report,) = [a.partition("=")[2] for a in command if a.startswith("--junitxml=")]
        Path(report).write_text(JUNIT, encoding="utf-8")
        assert options["env"]["PYTHONPATH"].startswith(str(gpu_tests.ROOT))
        assert Path(options["env"]["CUTE_FP8_CACHE_DIR"]).is_dir()
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.delenv("CUTE_FP8_CACHE_DIR", raising=False)
    monkeypatch.setattr(gpu_tests, "workers", lambda: 1)
    monkeypatch.setattr(gpu_tests.subprocess, "run", run)
    data: dict[str, Any] = {}
    assert gpu_tests.run_tests(data, quick=False)["tests.test_broken"] == {"error": 1}
    assert len(data["failures"]) == 3


def test_run_tests_without_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    done: Callable[..., Any] = lambda command, **_: subprocess.CompletedProcess(command, 4)  # noqa: E731
    monkeypatch.setattr(gpu_tests, "workers", lambda: 1)
    monkeypatch.setattr(gpu_tests.subprocess, "run", done)
    with pytest.raises(RuntimeError, match="pytest ended with status 4 and no report"):
        gpu_tests.run_tests({}, quick=False)


# -------------------------------------------------------------------------------- earlier reports


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., str]:
    """Writes one: made with these kernels but for what is replaced."""

    def write(name: str, text: str = JUNIT, **changed: str) -> str:
        line = kernel_sources.as_line({**kernel_sources.digests(), **changed})
        path = tmp_path / name
        path.write_text(text.replace("KERNELS", line), encoding="utf-8")
        return str(path)

    return write


def meta(gpu: str = "A GPU") -> dict[str, str]:
    return {"gpu": gpu, "kernels": kernel_sources.as_line()}


def test_of_a_test_in_several_reports_the_last_counts(report) -> None:
    again = JUNIT.replace("failure", "system-out")
    cases = gpu_tests.read_reports([report("a"), report("b", again)], meta())
    assert cases["tests.kernels.test_gemm_sm120", "test_b[cute]"][0] == "passed"
    assert cases["tests.test_gpu_integration", "test_c"][0] == "error"


def test_a_test_without_an_outcome_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = (
        "\n".join(f"tests/kernels/test_mlp.py::test_{i}[a::b]" for i in range(3)) + "\n\n3 tests"
    )
    done = subprocess.CompletedProcess([], 0, listed, "")
    monkeypatch.setattr(gpu_tests.subprocess, "run", lambda *a, **o: done)
    module = "tests.kernels.test_mlp"
    assert gpu_tests.with_missing({module: {"passed": 1}}) == {module: {"passed": 1, "missing": 2}}
    assert gpu_tests.with_missing({}) == {module: {"missing": 3}}
    whole = {module: {"passed": 1, "skipped": 2}}
    assert gpu_tests.with_missing(dict(whole)) == whole
    done.returncode = 2
    with pytest.raises(RuntimeError, match="--collect-only ended with status 2"):
        gpu_tests.with_missing({})


def test_no_option_from_outside_leaves_tests_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k one")
    assert "PYTEST_ADDOPTS" not in gpu_tests.child_variables()


def test_what_is_said_of_earlier_sources_is_left_out(report) -> None:
    """And with them what is said of no kernel in particular."""
    cases = gpu_tests.read_reports([report("a", gemm_sm90="0")], meta())
    assert {module for module, _ in cases} == {"tests.kernels.test_gemm_sm120"}
    with pytest.raises(ValueError, match=r"^--reports: got .*a of other kernels, must be of gemm"):
        gpu_tests.read_reports([report("a", gemm_sm120="0")], meta())


def test_a_report_of_something_else_is_refused(report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--reports: got .*a of A GPU, must be Another$"):
        gpu_tests.read_reports([report("a")], meta("Another"))
    with pytest.raises(ValueError, match=r"^--reports: got .*none.xml \(.*\), must be a JUnit"):
        gpu_tests.read_reports([str(tmp_path / "none.xml")], meta())
    with pytest.raises(ValueError, match=r"^--reports: got .*cut \(.*\), must be a JUnit file"):
        gpu_tests.read_reports([report("cut", JUNIT[:300])], meta())


def test_a_report_says_what_it_is_of(tmp_path: Path) -> None:
    """What tests/conftest.py adds, in a run of one test."""
    path = tmp_path / "r.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={path}", "-p", "no:cacheprovider"]
    subprocess.run(
        [*command, "tests/test_gpus.py", "-k", "nothing"], cwd=gpu_tests.ROOT, check=False
    )
    made = gpu_tests.parse_junit(ET.parse(path).getroot())[1]
    assert made["kernels"] == kernel_sources.as_line() and made["gpu"]
