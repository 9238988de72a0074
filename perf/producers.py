"""Time the quantising producers beside Inductor and a copy of as many bytes.

    python -m perf.producers        # or: python -m perf.sweep producers
    python -m perf.producers --ops rmsnorm_quantize --sizes 16x4096 --no-peers

Each call reads its own copy of the input and writes its own output; together the copies are more
than any L2 holds. ``inductor`` is the same math through ``torch.compile`` (``inductor.py``),
compiled and tuned beforehand. ``copy`` is an elementwise kernel that reads and writes half of the
bytes each. Every result is checked, those of the timed buffers again.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cute_fp8.dispatch import explain
from cute_fp8.environment import commit, environment
from cute_fp8.rows.case import RowCase, error, errors, row_case
from cute_fp8.settings import use
from cute_fp8.timing import Contender, time_contenders
from perf import inductor as peer
from perf import roofs
from perf.measure import Times, fake_times, paced_times
from perf.report import geomean
from perf.results_io import Row, save

#: Op and variant, as the dispatch table has them.
OPS = (
    ("quantize", "per_token"),
    ("quantize", "mxfp8"),
    ("rmsnorm_quantize", "per_token"),
    ("silu_mul_quantize", "per_token"),
)
SIZES = ((16, 4096), (352, 1024), (352, 4096), (4096, 4096), (8192, 14336))
#: Bytes that the calls of one round read and write in all, and calls of a round at most.
ROTATED_BYTES, MOST_COPIES, DRY_BYTES = 160_000_000, 800, 40_000
#: Rows that are drawn; more are these again.
DRAWN_ROWS = 1024
#: Largest relative L2 error of dequantised codes: e4m3's own is 0.024 to 0.028.
LIMIT = 0.03


@dataclass(frozen=True)
class Result:
    """What a producer returned."""

    tensors: tuple[Tensor, ...]


class Producer(Contender):
    """A contender whose results are judged against the reference."""

    cases: Sequence[RowCase]
    exact_bits: bool

    def error(self, y: Any, copy: int = 0) -> float:
        """Relative L2 error of what the codes stand for; infinite if a bit of ours is wrong."""
        case = self.cases[copy]
        if self.exact_bits and case.options.op == "quantize" and errors(case, y.tensors):
            return float("inf")
        worst = error(case, y.tensors)
        # `time_contenders` knows the limit of GEMMs only.
        return worst * 1e-3 if worst <= LIMIT else float("inf")


class Copy(Contender):
    """An elementwise kernel; nothing that it returns is judged."""

    def error(self, y: Any, copy: int = 0) -> float:
        return 0.0


def producer(
    impl: str, call: Callable[[int], Any], cases: Sequence[RowCase], **extra: str
) -> Producer:
    """A contender on these cases."""
    found = Producer(impl, call, len(cases), torch.empty(0), extra)
    object.__setattr__(found, "cases", cases)
    object.__setattr__(found, "exact_bits", impl.startswith("cute_fp8"))
    return found


def copies_of(case: RowCase, rotated: int) -> list[RowCase]:
    """The case, and others whose x has its rows moved on; of its own memory each."""
    count = max(2, min(MOST_COPIES, -(-rotated // case.moved_bytes())))
    x = case.inputs.x
    return [
        case if i == 0 else replace(case, inputs=case.inputs._replace(x=x.roll(i, 0)))
        for i in range(count)
    ]


def ours(cases: Sequence[RowCase], pdl: bool) -> Callable[[int], Result]:
    """A call, with or without programmatic dependent launch."""

    def call(i: int) -> Result:
        with use(pdl=pdl):
            return Result(cases[i].run())

    return call


def copy(case: RowCase, copies: int, device: str) -> Contender:
    """As many bytes, half read and half written, by a kernel that does nothing else."""
    words = -(-case.moved_bytes() // 8)
    sources = [torch.randint(1 << 30, (words,), device=device).int() for _ in range(copies)]

    def call(i: int) -> Tensor:
        return torch.bitwise_not(sources[i])

    return Copy("copy", call, copies, torch.empty(0))


def case_of(op: str, variant: str, m: int, k: int, device: str) -> RowCase:
    """The call to time: rows drawn, and the same again as often as it takes."""
    options: dict[str, Any] = {"rounding": "hf"} if op == "rmsnorm_quantize" else {}
    case = row_case(op, min(m, DRAWN_ROWS), k, variant, device=device, **options)
    x = case.inputs.x
    return replace(case, inputs=case.inputs._replace(x=x.repeat(m // x.shape[0], 1)))


def compile_only(op: str, variant: str, m: int, k: int) -> None:
    """Have Inductor and ourselves compile what such a row times, into their caches on disk."""
    case = case_of(op, variant, m, k, "cuda")
    case.run()
    inductor([case])(0)
    torch.cuda.synchronize()


def inductor(cases: Sequence[RowCase]) -> Callable[[int], Result]:
    """The same math, compiled for these sizes."""
    options = cases[0].options
    compiled = peer.compiled(options.op, options.variant, options.eps)

    def call(i: int) -> Result:
        x, weight, _, _ = cases[i].inputs
        codes, scales = compiled(x, weight)
        if options.variant == "mxfp8":
            scales = scales.view(torch.float8_e8m0fnu)
        return Result((codes, scales))

    return call


def rows(
    op: str, variant: str, m: int, k: int, *, device: str, peers: bool, plain: bool
) -> Iterator[Row]:
    """A row for every contender of one size."""
    dry = device == "cpu"
    case = case_of(op, variant, m, k, device)
    cases = copies_of(case, DRY_BYTES if dry else ROTATED_BYTES)
    route = explain(op, m=m, k=k, variant=variant, device=device).route
    assert route is not None
    found: list[Contender] = [
        producer("cute_fp8", ours(cases, True), cases, route=route.entry.name),
        copy(case, len(cases), device),
    ]
    if plain:
        call = ours(cases, False)
        found.append(producer("cute_fp8_no_pdl", call, cases, route=route.entry.name))
    if peers:
        found.append(producer("inductor", inductor(cases), cases))
    timer: Callable[[Sequence[Contender]], Times] = fake_times if dry else paced_times
    head: Row = {"op": op, "variant": variant, "M": m, "K": k}
    for row in time_contenders(found, timer):
        if "us" in row:
            row["gbps"] = round(1e-3 * case.moved_bytes() / row["us"], 1)
            row["error"] = float(f"{row['error'] * 1e3:.3g}")
        yield {**head, **row}


def summary(found: Sequence[Row], copy_gbps: float | None) -> Iterator[str]:
    """The figures that count, in lines."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in found:
        key = (row["op"], row["variant"], row["M"], row["K"])
        groups.setdefault(key, {})[row["impl"]] = row
    speedups = []
    for (op, variant, m, k), impls in groups.items():
        us = {impl: row["us"] for impl, row in impls.items() if "us" in row}
        text = ", ".join(f"{impl} {value:.2f}" for impl, value in us.items())
        if "cute_fp8" in us:
            if copy_gbps:
                text += f"; {impls['cute_fp8']['gbps'] / copy_gbps:.0%} of the copy bandwidth"
            if "copy" in us:
                text += f", {us['cute_fp8'] / us['copy']:.2f}x the copy"
            if "inductor" in us:
                speedups.append(us["inductor"] / us["cute_fp8"])
                text += f", Inductor {speedups[-1]:.2f}x"
        failed = [f"{impl}: {row['failed']}" for impl, row in impls.items() if "failed" in row]
        yield f"{op} {variant} {m}x{k} us: {'; '.join([text, *failed])}"
    if speedups:
        worst = min(speedups)
        yield f"over Inductor: geometric mean {geomean(speedups):.2f}x, worst {worst:.2f}x"


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 if a result of ours is wrong; 2 if nothing can be measured so."""
    begun = time.perf_counter()
    p = argparse.ArgumentParser("python -m perf.producers")
    p.add_argument("--ops", nargs="+", help=f"by default {', '.join(f'{o}:{v}' for o, v in OPS)}")
    p.add_argument("--sizes", nargs="+", help="MxK, by default the five of the notes")
    p.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--plain", action="store_true", help="also launched after the kernel before")
    p.add_argument("--out", type=Path, help="of the result, written anew after every size")
    p.add_argument("--compile-only", action="store_true", help="fill the caches on disk")
    p.add_argument("--dry-run", action="store_true", help="on the CPU, times made up")
    args = p.parse_args(arguments)
    if not args.dry_run and not torch.cuda.is_available():
        print("perf.producers: got no CUDA GPU, must run on one, or --dry-run", file=sys.stderr)
        return 2
    if args.out is not None and importlib.util.find_spec("jsonschema") is None:
        print("perf.producers: got no jsonschema, must be there for --out", file=sys.stderr)
        return 2
    device = "cpu" if args.dry_run else "cuda"
    ops = [tuple(op.split(":")) if ":" in op else (op, "per_token") for op in args.ops or ()] or OPS
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes or ()] or SIZES
    jobs = [(op, variant, m, k) for op, variant in ops for m, k in sizes]
    if args.compile_only:
        for job in jobs:
            compile_only(*job)
        return 0
    if args.peers and not args.dry_run:
        print(f"compiled in {peer.compile_all(jobs):.1f} s", flush=True)
    meta: dict[str, Any] = {**environment(), "commit": commit(), "date": date.today().isoformat()}
    meta |= {"gpu": "dry run"} if args.dry_run else roofs.bandwidths()
    meta = {name: value for name, value in meta.items() if name in META}
    found: list[Row] = []
    for op, variant, m, k in jobs:
        if args.dry_run:
            m, k = min(m, 8), min(k, 64)
        start = time.perf_counter()
        fresh = list(rows(op, variant, m, k, device=device, peers=args.peers, plain=args.plain))
        found += fresh
        for line in summary(fresh, meta.get("copy_gbps")):
            print(f"{line} ({time.perf_counter() - start:.1f} s)", flush=True)
        if args.out is not None:
            seconds = round(time.perf_counter() - begun, 1)
            save(args.out, {**meta, "seconds": seconds}, found)
        if not args.dry_run:
            torch.cuda.empty_cache()
    print(list(summary(found, meta.get("copy_gbps")))[-1])
    wrong = any("failed" in row and row["impl"].startswith("cute_fp8") for row in found)
    return int(wrong)


#: What a result file's meta may hold.
META = (
    "gpu", "driver", "torch", "dsl", "cute_fp8", "kernels", "commit", "date", "read_gbps",
    "copy_gbps",
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
