"""ARCHS.md, what has been shown per kernel and architecture, from the dispatch table and evidence.

    python -m cute_fp8.evidence.archs        # or: make archs

Evidence is what ``cute_fp8/evidence/files.py`` finds in ``perf/results``.

A kernel counts as run on an architecture if one validation on a GPU of that very compute capability
has its tests passing (``tests/kernels/test_<kernel>*.py``), no other test failing but another
kernel's or a layer's that is built on it (:data:`LAYERS`), no complaint of the sanitizer, and the
tier's checks passing through the kernel's own route. Natively it is *measured* if the sweep also
timed it there and found the result right, else it is *run natively*.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cute_fp8.build.shipped import shipped_configs
from cute_fp8.decoder.problem import OPS as BLOCK_OPS
from cute_fp8.dispatch import TABLE, Entry
from cute_fp8.environment import ROOT
from cute_fp8.evidence import predictions
from cute_fp8.evidence.files import (
    INSPECTION,
    VALIDATION,
    Evidence,
    load,
    sources_of,
    summary,
    where,
)
from cute_fp8.targets import Capability, target_of

ARCHS = ROOT / "ARCHS.md"
Data = dict[str, Any]

MEASURED = "measured"
RUN = "run natively"
STAND_IN = "run through the stand-in"
INSPECTED = "compiled and inspected"
#: A CuTe kernel serves the GPU and nothing of the above is shown: never to be committed.
NO_EVIDENCE = "no evidence"

COLUMNS: tuple[tuple[str, Capability | None], ...] = (
    ("sm_120a (RTX 50, RTX PRO)", (12, 0)),
    ("sm_121a (DGX Spark)", (12, 1)),
    ("sm_90a (H100, H200)", (9, 0)),
    ("sm_100 (B200)", (10, 0)),
    ("sm_89 (RTX 40, L40)", (8, 9)),
    ("others, CPU", None),
)
VARIANTS = {"per_token": "per token x per channel", "mxfp8": "MXFP8"}
#: Said of what was run with other kernel sources than this tree's.
EARLIER = ", earlier sources"
#: Ops whose routes the tier checks of ``validate`` take.
CHECKED_OPS = ("gemm",)
#: Folders of tests about what is built on kernels, and the kernels that are theirs alone.
LAYERS = ("decoder", "models")
LAYER_KERNELS = {entry.kernel for entry in TABLE if entry.op in BLOCK_OPS and entry.targets}
#: Parts of a validation that must not have broken off.
CRUCIAL = ("tests", "tier", "rows", "sanitizer")

TEXT = """\
# What has been shown, per kernel and architecture

Written by `make archs` from the dispatch table and the evidence listed below; not by hand. Exactly
one of these words per cell:

* **measured**: run natively on that architecture, correctness and speed, by a `python -m cute_fp8
  validate` whose tests passed: the kernel's own, and all others but other kernels' and those of the
  decoder block and of models, which count for the decoder's kernels. What failed is listed below.
  Timings alone, of checked results, are listed, too, and fill no cell.
* **run natively**: the same without the speed; `validate` times GEMMs.
* **run through the stand-in**: the kernel's own code compiled for sm_90a with one instruction
  replaced, and tested on a Hopper GPU: loads, barriers, `ldmatrix`, schedule, epilogue. Not shown
  by it: the block-scaled instruction's numerics, and any speed.
* **compiled and inspected**: machine code for that target, read by `python -m cute_fp8 compile`:
  of a GEMM only the target's own MMA (block-scaled on sm_120a and sm_121a, wgmma on sm_90a), and
  TMA loads; no spills, no local memory, no stack, shared memory within the target's limit (101,376
  bytes on sm_120 and sm_89).
* **falls back to**: another implementation serves the GPU.

*Earlier sources*: shown of other sources of this kernel than those in `kernels/` now.

{matrix}

On sm_90a the stand-in runs only when it is asked for, with `use(backend="stand-in")`. Problems that
torch does not serve (N no multiple of 16) take the reference where torch is named. torch's MXFP8
matmul exists on no GPU that this has run on; its glue is tested against an emulation on the CPU.

## Predicted

Microseconds that the performance model (`cute_fp8/gemms/model.py`) gives for the configuration that
it picks; bf16 output, operands out of L2. Nobody has measured them. The same model gives ten
published times of other kernels on an RTX 5070 Ti, which were known when it was made, within 15 %
(`tests/gemms/test_model.py`). Through the stand-in on an H200, whose MMA is another, it gave 45
times of two tiles within 15 %, of a kernel since changed; of other tiles it is up to 45 % short
(`perf/NOTES.md`). Most clocks are the rated ones, which many cards exceed; no power limit is
modelled, which large shapes on large cards meet. `python -m cute_fp8 explain M N K --gpu NAME`
shows the configurations and what limits them.

Per token x per channel:

{predicted}

MXFP8, scales in blocks:

{predicted_mxfp8}

## Evidence

{evidence}

*Kernel sources*: whether the sources of the kernels were then what they are now, whatever else has
changed since.

To add a GPU: run `python -m cute_fp8 validate` on it, from a checkout, and send the file that it
writes to the project's issue tracker. It goes to `perf/results/<gpu>/`, and `make archs` reads it.
"""


@dataclass(frozen=True)
class Row:
    """A kernel in one of its uses; no kernel where libraries and the reference do it all."""

    op: str
    variant: str
    kernel: str | None

    def __str__(self) -> str:
        variant = VARIANTS.get(self.variant, self.variant)
        if self.variant == "per_token" and not self.op.startswith("gemm"):
            variant = "per token"
        label = f"{self.op}, {variant}"
        return label if self.kernel is None else f"{label}: `{self.kernel}`"


def rows(table: Sequence[Entry] = TABLE) -> list[Row]:
    """One row for each CuTe kernel of each op and variant, or one without if there is none."""
    uses = dict.fromkeys((entry.op, entry.variant) for entry in table)
    found = []
    for op, variant in uses:
        entries = [e for e in table if (e.op, e.variant) == (op, variant) and e.targets]
        kernels: list[str | None] = list(dict.fromkeys(e.kernel for e in entries))
        found += [Row(op, variant, kernel) for kernel in kernels or [None]]
    return found


def cell(
    row: Row,
    capability: Capability | None,
    evidence: Iterable[Evidence],
    table: Sequence[Entry] = TABLE,
) -> str:
    """What has been shown of a row on GPUs of one compute capability (None: no CUDA GPU)."""
    evidence = list(evidence)
    serving = [
        e for e in table if (e.op, e.variant) == (row.op, row.variant) and e.serves(capability)
    ]
    own = [e for e in serving if e.targets and e.kernel == row.kernel]
    if not own or capability is None:
        return f"falls back to {_fallback(row, serving)}"
    native = [entry for entry in own if entry.backend != "stand-in"]
    kernels = {entry.kernel for entry in table if entry.targets}
    for entry in native:
        right = [e for e in evidence if all(_is_right(row) for row in _timings(e, entry))]
        timed = [e for e in right if _timings(e, entry)]
        if found := _validated(timed, entry, capability, kernels):
            return MEASURED + found.suffix
        if found := _validated(right, entry, capability, kernels):
            return RUN + found.suffix
    for entry in own:
        if entry not in native and (found := _validated(evidence, entry, capability, kernels)):
            return STAND_IN + found.suffix
    if not native:
        # A stand-in that nothing has run is no more than a wish.
        return f"falls back to {_fallback(row, serving)}"
    for entry in native:
        if which := [e for e in evidence if is_inspected(e, entry, capability)]:
            return INSPECTED + _age(which, entry)
    return NO_EVIDENCE


class Found(NamedTuple):
    """That there is a validation, and what is to be said of it."""

    suffix: str


def _age(which: Iterable[Evidence], entry: Entry) -> str:
    """What is to be said of evidence about earlier sources of an entry's kernel."""
    return "" if any(e.is_current(entry.kernel) for e in which) else EARLIER


def _validated(
    evidence: Iterable[Evidence], entry: Entry, capability: Capability, kernels: set[str]
) -> Found | None:
    """Whether an entry has been validated, with these kernel sources or with earlier ones."""
    which = [e for e in evidence if is_validated(e, entry, capability, kernels)]
    if not which:
        return None
    return Found(_age(which, entry))


def is_validated(
    evidence: Evidence, entry: Entry, capability: Capability, kernels: set[str]
) -> bool:
    """Whether a validation ran an entry's kernel on such a GPU, and everything about it passed."""
    if evidence.kind != VALIDATION:
        return False
    if any(part in evidence.get("errors", dict) for part in CRUCIAL):
        return False
    if evidence.get("meta", dict).get("capability") != "{}.{}".format(*capability):
        return False
    own, shared = 0, 0
    for module, counts in evidence.get("tests", dict).items():
        owner = kernel_of_tests(module, kernels)
        in_layer = module.startswith(tuple(f"tests.{layer}." for layer in LAYERS))
        concerns = not in_layer or entry.kernel in LAYER_KERNELS
        if owner == entry.kernel or (owner is None and concerns):
            shared += sum(counts.get(bad, 0) for bad in ("failed", "error", "missing"))
        if owner == entry.kernel:
            own += counts.get("passed", 0)
    dirty = any(tool.get("clean") is False for tool in evidence.get("sanitizer", dict).values())
    if own == 0 or shared or dirty:
        return False
    if entry.op not in CHECKED_OPS:
        # Tests alone speak for it: those of this tree.
        return evidence.is_current(entry.kernel)
    taken = {"op": entry.op, "variant": entry.variant, "route": entry.name}
    return taken in evidence.get("covers", list)


def is_inspected(evidence: Evidence, entry: Entry, capability: Capability) -> bool:
    """Whether all shipped kernels of an entry, compiled for the GPU's target, passed the gates."""
    target = target_of(capability)
    if evidence.kind != INSPECTION or target not in entry.targets:
        return False
    found = {
        inspection["kernel"]: not inspection["failures"]
        for inspection in evidence.get("inspections", list)
        if inspection["target"] == target and is_of(inspection["kernel"], entry)
    }
    shipped = [c for c in shipped_configs(target=target) if c.module == entry.kernel]
    wanted = {c.name for c in shipped if is_of(c.name, entry)}
    return bool(found) and all(found.values()) and wanted <= found.keys()


def is_of(name: str, entry: Entry) -> bool:
    """Whether a compiled kernel of that name serves an entry's op and variant."""
    if entry.op == "gemm_gated":
        return name.startswith(f"gemm_{entry.variant}-") and "-gated-" in name
    if entry.op == "gemm" and "-gated-" in name:
        return False
    return name.startswith((f"{entry.op}_{entry.variant}-", f"{entry.kernel}-"))


def kernel_of_tests(module: str, kernels: Iterable[str]) -> str | None:
    """The kernel that a test module, named as pytest does, is about; None: about no single one."""
    stem = next((part for part in module.split(".") if part.startswith("test_")), "")
    owners = [k for k in kernels if f"{stem}_".startswith(f"test_{k}_")]
    return max(owners, key=len, default=None)


def render(evidence: Sequence[Evidence] | None = None, table: Sequence[Entry] = TABLE) -> str:
    """The text of ARCHS.md."""
    evidence = load() if evidence is None else evidence
    matrix = [("kernel", *(name for name, _ in COLUMNS))]
    for row in rows(table):
        cells = [cell(row, capability, evidence, table) for _, capability in COLUMNS]
        matrix.append((str(row), *cells))
    matrix += list(_outside(table))
    listed = [("file", "on", "kernel sources", "found")]
    listed += [
        (f"[{e.name}](perf/results/{e.name})", where(e), sources_of(e), summary(e))
        for e in evidence
    ]
    return TEXT.format(
        matrix=_markdown(matrix),
        predicted=_markdown([*predictions.rows("per_token")]),
        predicted_mxfp8=_markdown([*predictions.rows("mxfp8")]),
        evidence=_markdown(listed),
    )


def main() -> int:
    """Rewrite ARCHS.md."""
    if not (ROOT / "pyproject.toml").is_file():
        text = "cute_fp8.evidence.archs: got an installed package, must be a checkout"
        print(text, file=sys.stderr)
        return 2
    ARCHS.write_text(render(), encoding="utf-8")
    print(f"wrote {ARCHS.name}")
    return 0


def _timings(evidence: Evidence, entry: Entry) -> list[Data]:
    """What the sweep found of an entry."""
    own = (entry.op, entry.variant, entry.name)
    rows = evidence.get("rows", list)
    return [row for row in rows if (row.get("op"), row.get("variant"), row.get("route")) == own]


def _is_right(timing: Data) -> bool:
    """Whether there is a time, and the result was right every time."""
    return "us" in timing and "failed" not in timing


def _fallback(row: Row, serving: Sequence[Entry]) -> str:
    """What serves instead, by default; the stand-in never does."""
    for entry in serving:
        if entry.backend == "stand-in" or (entry.targets and entry.kernel == row.kernel):
            continue
        if entry.backend == "torch":
            return "torch `_scaled_mm`" if entry.op == "gemm" else "torch"
        if entry.kernel == "separate_launches":
            return "separate launches"
        return "the reference" if entry.backend == "reference" else f"`{entry.kernel}`"
    return "nothing"


def _outside(table: Sequence[Entry]) -> Iterator[tuple[str, ...]]:
    """Rows for what the dispatch table has no entry for yet."""
    if not any(entry.op.startswith("quantize") for entry in table):
        yield ("quantisers", *("falls back to the reference" for _ in COLUMNS))


def _markdown(table: Sequence[Sequence[str]]) -> str:
    head, *body = ["| " + " | ".join(line) + " |" for line in table]
    return "\n".join([head, "|" + "---|" * len(table[0]), *body])


if __name__ == "__main__":
    sys.exit(main())
