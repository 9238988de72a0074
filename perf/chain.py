"""RMSNorm, quantisation and the GEMM that follows, in one CUDA graph and in two.

    python -m perf.chain
    python -m perf.chain --sizes 16x4096x4096 --out chain.json

``norm_gemm`` is a graph of (producer, GEMM) pairs, each on its own copy of the weight; ``norm`` and
``gemm`` are graphs of one of them alone, on the same data. The row of ``norm_gemm`` is faster than
the sum of the other two where launches and tails overlap. Each is timed with and without
programmatic dependent launch; what a GEMM makes of it depends on its route.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cute_fp8
from cute_fp8.environment import commit, environment
from cute_fp8.numerics import quantize_fp8
from cute_fp8.sweep import copies_of, rotated
from perf.producers import META
from perf.results_io import Row, save

#: M x N x K: decoding and prompts; a model's query, key and value projection, and its first half.
SIZES = ((16, 6144, 4096), (352, 6144, 4096), (16, 28672, 4096), (2048, 6144, 4096))
REPLAYS, WARM_UP = 15, 3


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls, captured one after the other, having run once."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    del kept
    return graph


def times(graphs: dict[str, torch.cuda.CUDAGraph], calls: int) -> dict[str, list[float]]:
    """Microseconds per call of every replay; the graphs take turns."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(-WARM_UP, REPLAYS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 0:
                found[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return found


def rows(m: int, n: int, k: int) -> Iterator[Row]:
    """The rows of one size."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn((rows, k), device="cuda", generator=generator) for rows in (m, n))
    x, gamma = x.bfloat16(), torch.rand(k, device="cuda", generator=generator).bfloat16()
    codes, scales = quantize_fp8(w / k**0.5)
    count = copies_of(codes)
    weights, factors = rotated(codes, count), rotated(scales, count)
    residual = torch.zeros_like(x)
    xq, sx, _ = cute_fp8.rmsnorm_quantize(x, gamma, residual=residual)

    def norm() -> tuple[Tensor, ...]:
        return cute_fp8.rmsnorm_quantize(x, gamma, residual=residual)

    def gemm(i: int) -> object:
        return cute_fp8.gemm(xq, sx, weights[i], factors[i])

    def both(i: int) -> object:
        a, b, _ = norm()
        return cute_fp8.gemm(a, b, weights[i], factors[i])

    rounds = range(max(1, 40 // count) * count)
    graphs = {}
    for pdl in (True, False):
        with cute_fp8.use(pdl=pdl):
            impl = "cute_fp8" if pdl else "cute_fp8_no_pdl"
            graphs[f"norm_gemm {impl}"] = graph_of([lambda i=i: both(i % count) for i in rounds])
            graphs[f"norm {impl}"] = graph_of([norm for _ in rounds])
            graphs[f"gemm {impl}"] = graph_of([lambda i=i: gemm(i % count) for i in rounds])
    for name, found in times(graphs, len(rounds)).items():
        op, impl = name.split()
        figures = (statistics.median(found), min(found), max(found))
        us = dict(zip(("us", "us_min", "us_max"), (round(f, 3) for f in figures), strict=True))
        yield {"op": op, "variant": "per_token", "impl": impl, "M": m, "N": n, "K": k, **us}


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 without a GPU."""
    p = argparse.ArgumentParser("python -m perf.chain")
    p.add_argument("--sizes", nargs="+", help="MxNxK")
    p.add_argument("--out", type=Path)
    args = p.parse_args(arguments)
    if not torch.cuda.is_available():
        print("perf.chain: got no CUDA GPU, must run on one", file=sys.stderr)
        return 2
    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes or ()] or SIZES
    found: list[Row] = []
    for m, n, k in sizes:
        fresh = list(rows(m, n, k))
        found += [{**row, "error": 0.0} for row in fresh]
        us = {(row["op"], row["impl"]): row["us"] for row in fresh}
        for impl in ("cute_fp8", "cute_fp8_no_pdl"):
            chain, norm, gemm = (us[op, impl] for op in ("norm_gemm", "norm", "gemm"))
            print(
                f"{m}x{n}x{k} {impl}: {chain:.2f} us, apart {norm:.2f} + {gemm:.2f} = "
                f"{norm + gemm:.2f}, saved {norm + gemm - chain:.2f}",
                flush=True,
            )
    if args.out is not None:
        meta: dict[str, Any] = {**environment(), "commit": commit()}
        meta["date"] = date.today().isoformat()
        save(args.out, {name: value for name, value in meta.items() if name in META}, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
