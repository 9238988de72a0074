"""RMSNorm, quantisation and the GEMM that follows, in one CUDA graph and in two.

    python -m perf.chain
    python -m perf.chain --sizes 16x4096x4096 --out chain.json

``norm_gemm`` is a graph of (producer, GEMM) pairs; ``norm`` and ``gemm`` are graphs of one of them
alone. The row of ``norm_gemm`` is faster than the sum of the other two where launches and tails
overlap. Each kernel finds its data where it finds it in a model and in all three graphs: weights,
activations and the residual stream come from memory (they are rotated over more than any L2 holds),
the codes from L2, as they have just been written. ``cute_fp8_no_pdl`` launches the producer after
the kernel before it; the GEMM is the same in both. The very results that were timed are checked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cute_fp8
from cute_fp8.environment import commit, environment
from cute_fp8.numerics import quantize_fp8
from cute_fp8.rows.case import RowCase, error, row_case
from cute_fp8.timing import LIMIT, copies_of, gpu_us, rotated
from perf import producers
from perf.results_io import Row, save

#: M x N x K: decoding and prompts; a model's query, key and value projection, and its first half.
SIZES = ((16, 6144, 4096), (352, 6144, 4096), (16, 28672, 4096), (2048, 6144, 4096))
#: Pairs of a graph, at least; timed replays, after some that warm up.
PAIRS, REPLAYS, WARM_UP = 40, 15, 3
PARTS = ("norm_gemm", "norm", "gemm")


@dataclass(frozen=True)
class Pair:
    """Data of one size: calls of the producer, copies of the weight, codes of the first call."""

    cases: Sequence[RowCase]
    weights: Sequence[Tensor]
    factors: Sequence[Tensor]
    codes: Tensor
    scales: Tensor

    def norm(self, i: int) -> tuple[Tensor, ...]:
        """Codes, scales and the residual stream of the i-th call."""
        return self.cases[i % len(self.cases)].run()

    def gemm(self, i: int) -> Any:
        """The first call's codes times the i-th weight."""
        return self._times(self.codes, self.scales, i)

    def norm_gemm(self, i: int) -> tuple[Tensor, ...]:
        """Both, the GEMM on what the producer has just written."""
        codes, scales, hidden = self.norm(i)
        return codes, scales, hidden, self._times(codes, scales, i)

    def _times(self, codes: Tensor, scales: Tensor, i: int) -> Any:
        number = i % len(self.weights)
        return cute_fp8.gemm(codes, scales, self.weights[number], self.factors[number])

    def error(self, part: str, i: int, result: Any) -> float:
        """Of a call's result: the producer's relative L2 error, or the GEMM's on its own codes.

        Infinite where either is more than it may be.
        """
        codes, scales = self.codes, self.scales
        if part != "gemm":
            codes, scales = result[:2]
            quantised = error(self.cases[i % len(self.cases)], result[:3])
            if quantised > producers.LIMIT:
                return float("inf")
            if part == "norm":
                return quantised
        y = result if part == "gemm" else result[3]
        number = i % len(self.weights)
        factors = self.factors[number].view(-1, 1)
        exact = (codes.float() * scales.view(-1, 1)) @ (self.weights[number].float() * factors).T
        off = float((y.float() - exact).norm() / exact.norm())
        return off if off <= LIMIT else float("inf")


def pair_of(m: int, n: int, k: int) -> Pair:
    """Random data of one size."""
    first = row_case(
        "rmsnorm_quantize", m, k, residual=True, rounding="hf", device="cuda", seed=m + n
    )
    cases = producers.copies_of(first, producers.ROTATED_BYTES)
    cases = [
        replace(c, inputs=c.inputs._replace(residual=c.inputs.residual.clone()))  # type: ignore[union-attr]
        for c in cases
    ]
    generator = torch.Generator("cuda").manual_seed(0)
    w = torch.randn((n, k), device="cuda", generator=generator)
    codes, scales = quantize_fp8(w / k**0.5)
    count = copies_of(codes)
    xq, sx, _ = first.run()
    return Pair(cases, rotated(codes, count), rotated(scales, count), xq, sx)


def rows(m: int, n: int, k: int) -> Iterator[Row]:
    """The rows of one size."""
    pair = pair_of(m, n, k)
    graphs: dict[tuple[str, str], tuple[torch.cuda.CUDAGraph, list[Any]]] = {}
    for pdl in (True, False):
        impl = "cute_fp8" if pdl else "cute_fp8_no_pdl"
        with cute_fp8.use(pdl=pdl):
            for part in PARTS:
                # A round of the norm alone goes over all of its data: nothing else evicts it.
                calls = max(PAIRS, len(pair.cases)) if part == "norm" else PAIRS
                graphs[part, impl] = graph_of(getattr(pair, part), calls)
    times = timed({key: (graph.replay, len(found)) for key, (graph, found) in graphs.items()})
    for (part, impl), us in times.items():
        results = graphs[part, impl][1]
        wrong = max(pair.error(part, i, results[i]) for i in (0, len(results) - 1))
        row: Row = {"op": part, "variant": "per_token", "impl": impl, "M": m, "N": n, "K": k}
        if wrong == float("inf"):
            yield {**row, "failed": "wrong after the timing"}
            continue
        figures = (statistics.median(us), min(us), max(us))
        row |= zip(("us", "us_min", "us_max"), (round(f, 3) for f in figures), strict=True)
        yield {**row, "error": float(f"{wrong:.3g}")}


def graph_of(call: Callable[[int], Any], calls: int) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """The calls 0, 1, ... captured one after the other, having run once; and their results."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(i) for i in range(calls)]
    return graph, results


def timed(
    works: dict[tuple[str, str], tuple[Callable[[], None], int]],
) -> dict[tuple[str, str], list[float]]:
    """Microseconds per call of every replay; the graphs take turns."""
    found: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    for turn in range(-WARM_UP, REPLAYS):
        for key, (replay, calls) in works.items():
            us = gpu_us(replay) / calls
            if turn >= 0:
                found[key].append(us)
    return found


def summary(found: Sequence[Row]) -> Iterator[str]:
    """A line for every way to launch."""
    us = {(row["op"], row["impl"]): row["us"] for row in found if "us" in row}
    m, n, k = (found[0][size] for size in "MNK")
    for impl in dict.fromkeys(row["impl"] for row in found):
        if all((part, impl) in us for part in PARTS):
            chain, norm, gemm = (us[part, impl] for part in PARTS)
            yield (
                f"{m}x{n}x{k} {impl}: {chain:.2f} us, apart {norm:.2f} + {gemm:.2f} = "
                f"{norm + gemm:.2f}, saved {norm + gemm - chain:.2f}"
            )
    yield from (f"{row['op']} {row['impl']}: {row['failed']}" for row in found if "failed" in row)


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 if a result is wrong; 2 without a GPU."""
    p = argparse.ArgumentParser("python -m perf.chain")
    p.add_argument("--sizes", nargs="+", help="MxNxK")
    p.add_argument("--out", type=Path)
    args = p.parse_args(arguments)
    if not torch.cuda.is_available():
        print("perf.chain: got no CUDA GPU, must run on one", file=sys.stderr)
        return 2
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes or ()] or SIZES
    meta: dict[str, Any] = {**environment(), "commit": commit(), "date": date.today().isoformat()}
    meta = {name: value for name, value in meta.items() if name in producers.META}
    found: list[Row] = []
    for m, n, k in sizes:
        fresh = list(rows(m, n, k))
        found += fresh
        for line in summary(fresh):
            print(line, flush=True)
        if args.out is not None:
            save(args.out, meta, found)
        torch.cuda.empty_cache()
    return int(any("failed" in row for row in found))


if __name__ == "__main__":
    sys.exit(main())
