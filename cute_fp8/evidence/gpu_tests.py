"""The tests that need a GPU: run, or read from reports of earlier runs, and counted."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from cute_fp8.build import cache
from cute_fp8.build.kernel_sources import recorded
from cute_fp8.environment import ROOT
from cute_fp8.evidence.archs import Data, kernel_of_tests

#: What a test of a GPU is marked with; see ``tests/conftest.py``.
MARKERS = "gpu or needs_cc"
#: GPU memory that one process of the tests may need.
BYTES_PER_WORKER = 4 << 30
MOST_WORKERS = 14
#: Outcomes by the names of JUnit's elements.
OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}
#: Failures that are kept in words.
KEPT_FAILURES = 40
#: What tests/conftest.py has a report say of itself.
MADE_WITH = ("gpu", "kernels")

#: A test, by its module and name.
Case = tuple[str, str]


def run_tests(data: Data, quick: bool) -> dict[str, dict[str, int]]:
    """The outcome of the GPU tests, counted per module; failures in words go to ``data``.

    Raises:
        RuntimeError: pytest did not get as far as a report.
    """
    with tempfile.TemporaryDirectory(prefix="cute_fp8_") as folder:
        report = Path(folder) / "report.xml"
        command = pytest_command(report, quick, workers())
        done = subprocess.run(command, cwd=ROOT, env=child_variables(), check=False)
        if not report.is_file():
            raise RuntimeError(f"pytest ended with status {done.returncode} and no report")
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest broke off with status {done.returncode}")
        return outcomes(data, parse_junit(ET.parse(report).getroot())[0])


def outcomes(data: Data, cases: Mapping[Case, tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Per test module, how many tests had which outcome; failures in words go to ``data``."""
    counts: dict[str, Counter[str]] = {}
    failures = []
    for (module, name), (outcome, why) in cases.items():
        counts.setdefault(module, Counter())[outcome] += 1
        if outcome in ("failed", "error"):
            failures.append(f"{module}::{name}: {why}")
    if failures:
        data["failures"] = failures[:KEPT_FAILURES]
    return {module: dict(count) for module, count in sorted(counts.items())}


def with_missing(counts: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The same, and per module how many of the tests that there are have no outcome.

    Raises:
        RuntimeError: pytest could not collect them.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", MARKERS, "tests"]
    done = subprocess.run(
        command, cwd=ROOT, env=child_variables(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"pytest --collect-only ended with status {done.returncode}")
    lines = (line.partition("::") for line in done.stdout.splitlines())
    there = Counter(
        path.removesuffix(".py").replace("/", ".") for path, colons, _ in lines if colons
    )
    for module, count in there.items():
        found = counts.setdefault(module, {})
        if missing := max(0, count - sum(found.values())):
            found["missing"] = missing
    return counts


def pytest_command(report: Path, quick: bool, processes: int) -> list[str]:
    """The command that runs the GPU tests, in parallel where there is pytest-xdist."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}"]
    command += ["-m", f"({MARKERS}) and not slow" if quick else MARKERS]
    if processes > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(processes), "--dist", "loadgroup"]
    return [*command, "tests"]


def workers() -> int:
    """As many test processes as CPUs, busy with compiling, and the GPU's memory have room for."""
    free, _ = torch.cuda.mem_get_info()
    cpus = len(os.sched_getaffinity(0))
    return max(1, min(MOST_WORKERS, cpus - 2, free // BYTES_PER_WORKER))


def parse_junit(root: ET.Element) -> tuple[dict[Case, tuple[str, str]], dict[str, str]]:
    """Of every test its outcome, and the first line why if it failed; and what the whole was made
    with. A module that could not be imported is a case with its own name.
    """
    cases = {}
    for case in root.iter("testcase"):
        module = case.get("classname") or case.get("name") or "?"
        mark = next((part for part in case if part.tag in OUTCOMES), None)
        outcome = "passed" if mark is None else OUTCOMES[mark.tag]
        message = "" if mark is None else (mark.get("message") or "").strip()
        why = (message.splitlines() or [""])[0][:200]
        cases[module, case.get("name") or "?"] = outcome, why
    made = {p.get("name", ""): p.get("value", "") for p in root.iter("property")}
    return cases, made


def read_reports(paths: Sequence[str], meta: Mapping[str, str]) -> dict[Case, tuple[str, str]]:
    """All reports as one: of each what it says of kernels whose sources are still ``meta``'s.

    Raises:
        ValueError: one is no report, is of another GPU, or says nothing of these kernels.
    """
    cases = {}
    for path in paths:
        try:
            found, made = parse_junit(ET.parse(path).getroot())
        except (OSError, ET.ParseError) as error:
            raise ValueError(f"--reports: got {path} ({error}), must be a JUnit file") from error
        if made.get("gpu") != meta["gpu"]:
            raise ValueError(f"--reports: got {path} of {made.get('gpu')}, must be {meta['gpu']}")
        now, then = recorded(meta["kernels"]), recorded(made.get("kernels", ""))
        same = {kernel for kernel, digest in now.items() if then.get(kernel) == digest}
        kept = {}
        for case, outcome in found.items():
            kernel = kernel_of_tests(case[0], now)
            if kernel in same or (kernel is None and same == now.keys()):
                kept[case] = outcome
        if not kept:
            raise ValueError(
                f"--reports: got {path} of other kernels, must be of {meta['kernels']}"
            )
        cases.update(kept)
    return cases


def child_variables() -> dict[str, str]:
    """The environment of a process that imports this checkout. What one compiles, the others
    find on disk, for as long as this process lasts.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {cache.VARIABLE: _compiled().name, **os.environ, "PYTHONPATH": path}
    variables.pop("PYTEST_ADDOPTS", None)  # which may leave tests out
    return variables


@functools.cache
def _compiled() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="cute_fp8_")
