"""Configurations of some shapes timed beside their predicted times: what the ranking is worth.

    python -m perf.configs 1x4096x4096 352x1024x4096 --backend stand-in --best 4

For each shape the model's best few and the plain tile (cooperative, not swapped, not split), on the
same rotated weights, in turns. The ratio between configurations counts: through the stand-in the
absolute times say nothing about the chip that the kernel is for. With ``--pdl`` each is also timed
launched while the call before it ends (programmatic dependent launch), for which the model has no
figure of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

from cute_fp8.environment import commit, environment
from cute_fp8.evidence.sweep import impl_of
from cute_fp8.gemms import tuning
from cute_fp8.gemms.choice import Choice
from cute_fp8.gemms.selection import Ranked
from cute_fp8.gemms.tuning import Problem, Shape
from cute_fp8.kernels.tiles import TILES
from cute_fp8.timing import Timer, graph_times, rates, time_contenders
from perf.results_io import Row, save


def candidates(problem: Problem, best: int) -> list[Ranked]:
    """The model's best few, and the plain tile if it is not among them."""
    ranking = problem.selection.ranking
    plain = Choice(TILES[problem.variant][0])
    others = (ranked for ranked in ranking[best:] if ranked.pick.choice == plain)
    return [*ranking[:best], *others]


def measure(problem: Problem, best: int, timer: Timer, pdl: bool = False) -> Iterator[Row]:
    """A row per configuration, in the model's order; ``pdl``: two, the second launched early."""
    found = [
        (ranked, replace(ranked.pick.choice, pdl=early))
        for ranked in candidates(problem, best)
        for early in sorted({ranked.pick.choice.pdl, pdl})
    ]
    contenders = tuning.contenders(problem, [choice for _, choice in found])
    m, n, k = problem.shape
    head = {"op": "gemm", "variant": problem.variant, "impl": impl_of(problem.backend)}
    head |= {"M": m, "N": n, "K": k}
    for (ranked, choice), row in zip(found, time_contenders(contenders, timer), strict=True):
        facts = {"tile": choice.name, "predicted_us": round(ranked.prediction.us, 2)}
        yield {**row, **head, **facts, **rates(row, problem.shape, 1)}


def summary(rows: Sequence[Row]) -> str:
    """One shape: each configuration, and what picking as the model does gains and leaves."""
    shape = "{M} x {N} x {K}".format(**rows[0])
    lines = [f"{shape}, {rows[0]['variant']}, {rows[0]['impl']}"]
    for row in rows:
        measured = f"{row['us']:9.2f}" if "us" in row else row["failed"]
        lines.append(
            f"  {row['tile']:38} predicted {row['predicted_us']:9.2f}  measured {measured}"
        )
    times = [row["us"] for row in rows if "us" in row]
    plain = TILES[rows[0]["variant"]][0].name
    if "us" in rows[0]:
        first = rows[0]["us"]
        base = [row["us"] for row in rows if row["tile"] == plain and "us" in row]
        gain = f"{base[0] / first:.2f}x the plain tile's speed, " if base else ""
        lines.append(f"  the pick: {gain}{min(times) / first:.2f} of the fastest one's")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, timer: Timer | None = None) -> int:
    """Measure, print, write; 1 if a configuration failed or was wrong."""
    parser = argparse.ArgumentParser(prog="python -m perf.configs", description=__doc__)
    parser.add_argument("shapes", nargs="+", type=_shape, metavar="MxNxK")
    parser.add_argument("--variant", default="per_token", choices=tuple(TILES))
    parser.add_argument("--backend", help="as in cute_fp8.use")
    parser.add_argument("--best", type=int, default=tuning.BEST)
    parser.add_argument("--pdl", action="store_true", help="also under dependent launch")
    parser.add_argument("--out", type=Path, help="a result file")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    clock = timer or partial(graph_times, replay_us=tuning.REPLAY_US)
    try:
        problems = [
            tuning.problem_of(shape, options.variant, options.backend, {})
            for shape in options.shapes
        ]
        for _ in tuning.compile_ahead(problems, options.best):
            pass
        for problem in problems:
            found = list(measure(problem, options.best, clock, options.pdl))
            print(summary(found), flush=True)
            rows += found
    except ValueError as error:
        print(f"perf.configs: {error}", file=sys.stderr)
        return 2
    if options.out is not None:
        meta = {**environment(), "commit": commit(), "date": date.today().isoformat()}
        save(options.out, meta, rows)
    return int(any("failed" in row for row in rows))


def _shape(text: str) -> Shape:
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be like 16x4096x4096")
    m, n, k = map(int, sizes)
    return m, n, k


if __name__ == "__main__":
    sys.exit(main())
