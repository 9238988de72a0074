"""Evidence files: what runs on GPUs, compilations and proofs have shown of the kernels.

Every JSON file below ``perf/results`` whose ``kind`` is one of these:

* ``validation``, written by ``python -m cute_fp8 validate`` on a GPU;
* ``inspection``, written by ``python -m cute_fp8 compile --arch TARGET --json``;
* ``verification``, written by ``python -m cute_fp8 verify --arch TARGET --json``;

and those of none, with timings that checked their results, of kernels of ours on a GPU.

Each holds for a kernel for as long as the kernel's own sources are what they were.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cute_fp8.build import kernel_sources
from cute_fp8.environment import ROOT, commit, environment

if TYPE_CHECKING:
    from cute_fp8.evidence.inspection import Inspection
    from cute_fp8.evidence.verify import Proof

RESULTS = ROOT / "perf" / "results"
VALIDATION, INSPECTION, VERIFICATION = "validation", "inspection", "verification"
#: Of files without a kind: the sweeps of ``perf/``.
TIMINGS = "timings"
#: Lists of what was compiled and of what was checked, by kind.
LISTS = {INSPECTION: "inspections", VERIFICATION: "proofs"}


@dataclass(frozen=True)
class Evidence:
    """One evidence file: its path below ``perf/results``, and what it holds."""

    name: str
    data: dict[str, Any]

    def about(self) -> tuple[str, ...]:
        """What it says something about; newer evidence about the same takes its place."""
        if self.kind == VALIDATION:
            meta = self.get("meta", dict)
            return self.kind, str(meta.get("gpu")), str(self.data.get("backend"))
        return self.kind, *(self.targets() if self.kind in LISTS else [self.name])

    @property
    def kind(self) -> str:
        """One of the kinds."""
        return str(self.data.get("kind", TIMINGS))

    def timed(self) -> dict[str, int]:
        """Timings by kernel: of our own, native or not, whose results were right."""
        routes = (str(row.get("route", "")) for row in self.get("rows", list) if "us" in row)
        ours = (route.rpartition(":")[2] for route in routes)
        return dict(Counter(kernel for kernel in ours if kernel in kernel_sources.digests()))

    def targets(self) -> list[str]:
        """What was compiled for."""
        listed = self.get(LISTS.get(self.kind, ""), list)
        return sorted({entry["target"] for entry in listed})

    def kernels(self) -> dict[str, bool]:
        """Of the kernels whose sources it recorded, whether they are still those of this tree."""
        line = str(self.get("meta", dict).get("kernels", ""))
        now = kernel_sources.digests()
        then = kernel_sources.recorded(line)
        about = self.timed() if self.kind == TIMINGS else then
        return {k: now.get(k) == d for k, d in then.items() if k in about}

    def is_current(self, kernel: str) -> bool:
        """Whether it is about a kernel's sources as they are in this tree."""
        return self.kernels().get(kernel, False)

    def date(self) -> str:
        """ISO date, empty if it has none."""
        return str(self.get("meta", dict).get("date", ""))

    def get(self, key: str, kind: type) -> Any:
        """A value of the expected kind, or an empty one: files come from strangers, too."""
        value = self.data.get(key)
        return value if isinstance(value, kind) else kind()


def load(folder: Path = RESULTS) -> list[Evidence]:
    """The evidence below ``folder``: of each GPU, and of each target, the newest.

    A quick validation is a first look, and none.
    """
    found: dict[tuple[str, ...], Evidence] = {}
    for path in sorted(folder.rglob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("quick"):
            continue
        evidence = Evidence(path.relative_to(folder).as_posix(), data)
        if evidence.kind in (VALIDATION, *LISTS) or (evidence.kind == TIMINGS and evidence.timed()):
            about = evidence.about()
            if about not in found or found[about].date() <= evidence.date():
                found[about] = evidence
    return sorted(found.values(), key=lambda evidence: evidence.name)


def sources_of(evidence: Evidence) -> str:
    """Whether evidence is about the kernel sources of this tree, in a few words."""
    if "kernels" not in evidence.get("meta", dict):
        return "not recorded"
    kernels = evidence.kernels()
    changed = [kernel for kernel, same in kernels.items() if not same]
    if len(changed) == len(kernels):
        return "others"
    return "these" if not changed else f"these, but of {', '.join(changed)}"


def summary(evidence: Evidence) -> str:
    """One evidence file's outcome, in words."""
    if evidence.kind == VERIFICATION:
        results = Counter(proof["result"] for proof in evidence.get("proofs", list))
        return ", ".join(f"{count} kernels {result}" for result, count in sorted(results.items()))
    if evidence.kind == INSPECTION:
        found = evidence.get("inspections", list)
        bad = sum(bool(inspection["failures"]) for inspection in found)
        outcome = f"{bad} fail a gate" if bad else "all gates pass"
        return f"{len(found)} kernels, {outcome}"
    if evidence.kind == TIMINGS:
        return ", ".join(f"{count} timings of {k}" for k, count in evidence.timed().items())
    tests = evidence.get("tests", dict).values()
    passed, failed = (
        sum(counts.get(name, 0) for counts in tests for name in names)
        for names in (("passed",), ("failed", "error"))
    )
    parts = [f"{evidence.data.get('backend')}: {passed} tests passed, {failed} failed"]
    tier = evidence.get("tier", list)
    if tier:
        parts.append(f"{sum(bool(check['passed']) for check in tier)} of {len(tier)} tier checks")
    timed = sum("us" in timing for timing in evidence.get("rows", list))
    if timed:
        parts.append(f"{timed} timings")
    tools = {name: tool.get("clean") for name, tool in evidence.get("sanitizer", dict).items()}
    for word, clean in (("clean", True), ("with findings", False)):
        if names := [name for name, value in tools.items() if value is clean]:
            parts.append(f"{', '.join(names)} {word}")
    if errors := evidence.get("errors", dict):
        parts.append(f"broke off in: {', '.join(errors)}")
    return "; ".join(parts)


def where(evidence: Evidence) -> str:
    """What ran and compiled, and when."""
    meta = evidence.get("meta", dict)
    if evidence.kind in LISTS:
        parts = [f"compiled for {', '.join(evidence.targets())}", f"DSL {meta.get('dsl')}"]
    else:
        parts = [
            f"{meta.get('gpu')} ({meta['capability']})"
            if "capability" in meta
            else meta.get("gpu"),
            *(f"{name} {meta.get(name)}" for name in ("driver", "torch")),
            f"DSL {meta.get('dsl')}",
        ]
    return ", ".join([*parts, f"commit {meta.get('commit')}", str(meta.get("date"))])


def inspection_evidence(found: Iterable[Inspection]) -> dict[str, Any]:
    """What ``compile --json`` prints: an evidence file."""
    return _compiled(INSPECTION, [i.as_dict() | {"seconds": round(i.seconds, 1)} for i in found])


def verification_evidence(found: Iterable[Proof]) -> dict[str, Any]:
    """What ``verify --json`` prints: an evidence file."""
    return _compiled(VERIFICATION, [asdict(p) | {"seconds": round(p.seconds, 1)} for p in found])


def _compiled(kind: str, listed: list[dict[str, Any]]) -> dict[str, Any]:
    facts = environment()
    meta = {name: facts[name] for name in ("dsl", "cute_fp8", "kernels")}
    meta |= {"commit": commit(), "date": date.today().isoformat()}
    return {"kind": kind, "meta": meta, LISTS[kind]: listed}
