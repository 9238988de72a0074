"""Run all that needs a GPU on the one at hand, and write one file that says how it went.

    python -m cute_fp8 validate [--out FILE] [--quick] [--sanitize] [--reports XML ...]

The GPU tests that this GPU can run (natively on sm_120; on a Hopper GPU the same tests, through the
stand-in), the near-lossless tier through our routes, a short sweep beside torch, the host time of a
call. The file is evidence for ARCHS.md: see ``cute_fp8/evidence/archs.py``.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import torch

from cute_fp8 import timing
from cute_fp8.environment import ROOT, commit, environment, nvidia_smi
from cute_fp8.evidence import gpu_tests, sweep
from cute_fp8.evidence.archs import CRUCIAL, Data
from cute_fp8.evidence.gpu_tests import child_variables

#: compute-sanitizer's tools, and what each is told.
OPTIONS = {
    # Probing for optional driver functions is an API error to the tool only.
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": (),
    # By itself it follows fewer barriers than a long ring has, and then takes good ones for bad.
    "synccheck": ("--num-cuda-barriers", "4096"),
}
TOOLS = tuple(OPTIONS)
#: By the key of the file that it fills: what a step is, in words, and its function.
Steps = dict[str, tuple[str, Callable[[], Any]]]


def run(
    out: str | None = None,
    *,
    quick: bool = False,
    sanitize: bool = False,
    reports: Sequence[str] | None = None,
) -> int:
    """Validate, and write the file.

    Args:
        out: its path; by default ``cute_fp8-validation-<gpu>-<date>.json`` in the working folder.
        quick: a first look: no slow tests, three shapes, no host time. Not taken as evidence.
        sanitize: also run compute-sanitizer's tools.
        reports: what ``pytest --junitxml`` wrote of the GPU tests, in any number of parts, on such
            a GPU; then no tests are run. What a report says of kernels that were others then is
            left out; of a test that is in several the last counts, and one that is in none is
            missed.

    Returns:
        0 if everything passed, 1 if not, 2 if it cannot run here.

    Raises:
        ValueError: ``out`` is in no folder; a report is of something else.
    """
    reason = obstacle()
    if reason is not None:
        print(f"cute_fp8 validate: {reason}", file=sys.stderr)
        return 2
    capability = torch.cuda.get_device_capability()
    uses = sweep.uses_of(capability)
    meta = {**environment(), "commit": commit(), "date": date.today().isoformat()}
    data: Data = {"kind": "validation", "passed": False, "meta": meta, "backend": uses[0][0]}
    if quick:
        data["quick"] = True
    path = Path(out or file_name(meta["gpu"], meta["date"]))
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out: got {out}, must be in a folder that exists")
    print(f"{meta['gpu']} ({meta['capability']}): {', '.join(' '.join(use) for use in uses)}")
    ran = None
    if reports is not None:
        cases = gpu_tests.read_reports(reports, meta)
        ran = gpu_tests.with_missing(gpu_tests.outcomes(data, cases))
    perform(data, steps(data, uses, quick, sanitize, ran), path)
    missed = data["missed"] = misses(data)
    data["passed"] = not missed
    data["covers"] = covers(data)
    write(path, data)
    for miss in missed:
        print(f"NOT PASSED: {miss}")
    print(f"wrote {path}: {'NOT passed' if missed else 'everything passed'}")
    if quick:
        print("This was a first look; without --quick the file is evidence for this GPU.")
    else:
        print(
            "Please send this file to the project's issue tracker, in an issue named 'validation "
            f"on {meta['gpu']}', passed or not: it is how we learn about GPUs that we have not."
        )
    return 1 if missed else 0


def obstacle() -> str | None:
    """Why nothing can be validated here, in one line; None if it can."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "got no CUDA GPU, must run on the GPU that it is to say something about"
    if not (ROOT / "tests" / "conftest.py").is_file():
        return (
            "got an installed package, must run in a checkout of the sources, whose tests it runs"
        )
    missing = [p for p in ("pytest", "pytest_timeout") if importlib.util.find_spec(p) is None]
    if missing:
        names = ", ".join(name.replace("_", "-") for name in missing)
        return f"got no {names}, must be installed: pip install -e '.[test]'"
    return None


def steps(
    data: Data,
    uses: list[sweep.Use],
    quick: bool,
    sanitize: bool,
    ran: dict[str, dict[str, int]] | None = None,
) -> Steps:
    """What is done, in order; ``ran``: the outcome of the tests, if it is known."""
    shapes = sweep.QUICK_SHAPES if quick else sweep.SHAPES
    todo: Steps = {
        "tests": (
            "the GPU tests",
            lambda: gpu_tests.run_tests(data, quick) if ran is None else ran,
        ),
        "tier": ("the near-lossless tier", lambda: noted(sweep.tier(uses), tier_line)),
        "meta": ("bandwidth and clocks", lambda: {**data["meta"], **machine_facts()}),
        "rows": ("GEMMs beside torch", lambda: noted(sweep.sweep(uses, shapes), row_line)),
    }
    if not quick and uses[0][0] in ("cute", "stand-in"):
        todo["host_us"] = ("host time of a call", lambda: host_times(uses[0][0]))
    if sanitize:
        todo["sanitizer"] = ("compute-sanitizer", run_sanitizers)
    return todo


def perform(data: Data, todo: Steps, path: Path) -> None:
    """Fill ``data`` step by step, and the file with it. A step that breaks off is noted."""
    for number, (key, (what, step)) in enumerate(todo.items(), start=1):
        print(f"[{number}/{len(todo)}] {what}", flush=True)
        start = time.perf_counter()
        try:
            data[key] = step()
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            data.setdefault("errors", {})[key] = f"{type(error).__name__}: {text}"
            print(f"  broke off: {data['errors'][key]}")
        data.setdefault("seconds", {})[key] = round(time.perf_counter() - start, 1)
        torch.cuda.empty_cache()  # room for the processes that a step starts
        write(path, data)


def misses(data: Data) -> list[str]:
    """What did not pass, in words; empty if everything did. What torch refuses of its own is no
    miss, nor is a step that says nothing about results.
    """
    errors = data.get("errors", {})
    found = [f"{key} broke off: {errors[key]}" for key in CRUCIAL if key in errors]
    tests = data.get("tests", {})
    counts = sum((Counter(module) for module in tests.values()), Counter())
    if "tests" in data and not counts["passed"]:
        found.append("no GPU test ran")
    if bad := counts["failed"] + counts["error"]:
        found.append(f"{bad} of {bad + counts['passed']} GPU tests")
    if counts["missing"]:
        found.append(f"{counts['missing']} GPU tests are in no report")
    for check in data.get("tier", []):
        if not check["passed"]:
            found.append(f"tier: {tier_line(check)}")
    for row in data.get("rows", []):
        if "failed" in row and row["impl"].startswith("cute_fp8"):
            found.append(f"sweep: {row_line(row)}")
    for tool, result in data.get("sanitizer", {}).items():
        if result["clean"] is False:
            found.append(f"{tool}: {result['summary']}")
    return found


def covers(data: Data) -> list[dict[str, str]]:
    """The routes whose every tier check passed, and no result of which was wrong in the sweep."""
    keys = ("op", "variant", "route")
    checked, wrong = dict.fromkeys(_pick(row, keys) for row in data.get("tier", [])), set()
    for row in [*data.get("tier", []), *data.get("rows", [])]:
        if not row.get("passed", True) or "failed" in row:
            wrong.add(_pick(row, keys))
    return [dict(zip(keys, key, strict=True)) for key in checked if key not in wrong]


def _pick(row: Data, keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(row.get(key, "") for key in keys)


def file_name(gpu: str, day: str) -> str:
    """The file's default name."""
    slug = re.sub(r"[^a-z0-9]+", "_", gpu.removeprefix("NVIDIA ").lower()).strip("_")
    return f"cute_fp8-validation-{slug}-{day}.json"


def write(path: Path, data: Data) -> None:
    """Write the file."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------ sanitizers


def run_sanitizers() -> dict[str, dict[str, Any]]:
    """All tools, each in several processes at the same time: one is busy on one CPU."""
    if shutil.which("compute-sanitizer") is None:
        missing = {"clean": None, "summary": "compute-sanitizer is not installed"}
        return {tool: dict(missing) for tool in TOOLS}
    shares = max(1, gpu_tests.workers() // len(TOOLS))
    pairs = [(tool, f"{i}/{shares}") for i in range(shares) for tool in TOOLS]
    with ThreadPoolExecutor(len(pairs)) as pool:
        parts = list(zip(pairs, pool.map(lambda pair: sanitize(*pair), pairs), strict=True))
    found = {}
    for tool in TOOLS:
        results = [result for (name, _), result in parts if name == tool]
        summaries = Counter(summary for _, summary in results)
        summary = "; ".join(f"{count} x {text}" for text, count in summaries.items())
        found[tool] = {"clean": all(clean for clean, _ in results), "summary": summary}
    return found


def sanitize(tool: str, share: str) -> tuple[bool, str]:
    """One compute-sanitizer tool over a share of ``tests/sanitize.py``: clean, and its summary."""
    command = ["compute-sanitizer", "--tool", tool, *OPTIONS[tool], "--error-exitcode", "9"]
    command += [sys.executable, str(ROOT / "tests" / "sanitize.py"), share]
    done = subprocess.run(
        command, cwd=ROOT, env=child_variables(), capture_output=True, text=True, check=False
    )
    summaries = re.findall(r"=+ (.*SUMMARY.*)", done.stdout)
    summary = "; ".join(summaries) or f"exit status {done.returncode}, no summary"
    print(f"  {tool} {share}: {summary}", flush=True)
    return done.returncode == 0, summary


# -------------------------------------------------------------------------------------- measures


def noted(rows: Iterator[Data], line: Callable[[Data], str]) -> list[Data]:
    """The rows, each printed as it comes."""
    found = []
    for row in rows:
        print(f"  {line(row)}", flush=True)
        found.append(row)
    return found


def tier_line(row: Data) -> str:
    """A tier check in one line."""
    what = row.get("control", f"{row['kind']} {row['seed']}")
    figures = f"relative L2 {row['rel_l2']}, element ratio {row['element_ratio']}"
    verdict = "as it must be" if row["passed"] else "NOT as it must be"
    return f"{_shape(row)} {row['route']}, {what}: {figures}, {verdict}"


def row_line(row: Data) -> str:
    """A timing in one line, or why there is none."""
    head = f"{_shape(row)} {row['impl']}"
    if "failed" in row:
        return f"{head}: {row['failed']}"
    spread = f"{row['us_min']:.1f}-{row['us_max']:.1f}"
    return f"{head}: {row['us']:.1f} us ({spread}), {row['tflops']:.0f} TFLOP/s"


def _shape(row: Data) -> str:
    return f"{row['variant']} {row['M']}x{row['N']}x{row['K']}"


def host_times(backend: str) -> dict[str, float]:
    """Microseconds of host time of a call; the script is in the checkout only."""
    spec = importlib.util.spec_from_file_location("host_time", ROOT / "perf" / "host_time.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    times = module.measure(backend)
    module.report(times)
    return {name: round(us, 2) for name, us in times.items()}


def machine_facts() -> dict[str, float]:
    """Read bandwidth and bf16 matrix rate, which other figures are to be seen against; and the
    power and clock under load.
    """
    data = torch.randn(1 << 28, device="cuda")  # 1 GiB
    a, b = (torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    read, multiply = gpu_seconds(lambda: data.sum()), gpu_seconds(lambda: a @ b)
    facts = {
        "read_gbps": round(data.numel() * 4e-9 / read, 1),
        "matmul_tflops": round(2e-12 * 8192**3 / multiply, 1),
    }
    fields = {
        "power.draw": "power_w",
        "power.limit": "power_limit_w",
        "clocks.sm": "sm_mhz",
        "clocks.max.sm": "sm_mhz_max",
    }
    for _ in range(int(2 / multiply)):  # two seconds of load, queued
        a @ b
    for field, value in nvidia_smi(*fields).items():
        facts[fields[field]] = float(value)
    torch.cuda.synchronize()
    return facts


def gpu_seconds(call: Callable[[], object]) -> float:
    """Median duration on the GPU."""
    times = [timing.gpu_us(call) for _ in range(timing.WARM_UP + 15)]
    return statistics.median(times[timing.WARM_UP :]) * 1e-6
