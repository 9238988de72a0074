"""Run everything that needs a GPU and write down how it went.

    python -m perf.gpu_evidence [FOLDER]

The GPU tests (counted per file), compute-sanitizer's three tools where it is installed, and the
host time of a call. The result is ``FOLDER/<gpu>/sm120-<backend>-<date>.json``, by default below
``perf/results``; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import torch

from cute_fp8.environment import environment
from perf import host_time

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/kernels", "tests/test_gpu_integration.py")
TOOLS = ("memcheck", "racecheck", "synccheck")


def run_tests() -> dict[str, dict[str, int]]:
    """Per test file: how many passed, failed, were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "8", f"--junitxml={report}", *TESTS]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        print(done.stdout[-3000:], flush=True)
        counts: dict[str, Counter[str]] = {}
        for case in ET.parse(report).iter("testcase"):
            outcome = next(
                (c.tag for c in case if c.tag in ("failure", "error", "skipped")), "passed"
            )
            counts.setdefault(case.get("classname", "?"), Counter())[outcome] += 1
    return {name: dict(count) for name, count in counts.items()}


def run_sanitizer(tool: str) -> dict[str, object]:
    """One compute-sanitizer tool over ``tests/sanitize.py``."""
    if shutil.which("compute-sanitizer") is None:
        return {"clean": None, "summary": "compute-sanitizer is not installed"}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    if tool == "memcheck":
        # Probing for optional driver functions is an API error to the tool only.
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "tests/sanitize.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    summaries = re.findall(r"=+ (.*SUMMARY.*)", done.stdout)
    print(f"{tool}: exit status {done.returncode}; {'; '.join(summaries)}", flush=True)
    return {"clean": done.returncode == 0, "summary": "; ".join(summaries)}


def commit() -> str:
    """The commit of the source tree, if git or the variable ``GIT_COMMIT`` knows it."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or os.environ.get("GIT_COMMIT", "unknown")


def main() -> int:
    """Collect, print, write."""
    facts = environment()
    gpu = torch.cuda.get_device_name()
    backend = host_time.backend_here()
    tests = run_tests()
    sanitizer = {tool: run_sanitizer(tool) for tool in TOOLS}
    times = host_time.measure(backend)
    host_time.report(times)
    date = datetime.date.today().isoformat()
    meta = {**facts, "gpu": gpu, "driver": host_time.driver(), "commit": commit(), "date": date}
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "perf" / "results")
    file = folder / gpu.removeprefix("NVIDIA ").lower().replace(" ", "_")
    file.mkdir(parents=True, exist_ok=True)
    file /= f"sm120-{backend}-{date}.json"
    data = {
        "meta": meta,
        "backend": backend,
        "tests": tests,
        "sanitizer": sanitizer,
        "host_us": {name: round(us, 2) for name, us in times.items()},
    }
    file.write_text(json.dumps(data, indent=2) + "\n")
    print(f"wrote {file}")
    failed = any(count.keys() & {"failure", "error"} for count in tests.values())
    dirty = any(result["clean"] is False for result in sanitizer.values())
    return int(failed or dirty or not tests)


if __name__ == "__main__":
    sys.exit(main())
