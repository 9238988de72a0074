"""What moved between two result files.

    python -m perf.compare A.json B.json [--threshold PERCENT]

B's time over A's for every row of both, and for ours also relative to a peer of the same run, since
the same call can move by 15 % from one machine to another. Exits with 1 if one of ours became
slower by more than the threshold, or fails now, or is gone; with 2 if a file cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from perf.report import NAMES, geomean, head
from perf.results_io import KEY, Key, Row, key_of, load

#: Percent that two runs on one machine may differ by.
THRESHOLD = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Compare and print."""
    p = argparse.ArgumentParser(
        "python -m perf.compare", description=(__doc__ or "").split("\n")[0]
    )
    p.add_argument("a", type=Path)
    p.add_argument("b", type=Path)
    p.add_argument("--threshold", type=float, default=THRESHOLD, help="percent (default: 5)")
    p.add_argument(
        "--relative-to", choices=NAMES, help="times over this peer's of the same run and shape"
    )
    p.add_argument("--all", action="store_true", help="peers past the threshold count too")
    args = p.parse_args(arguments)
    try:
        before, after = load(args.a), load(args.b)
    except ValueError as error:
        print(f"perf.compare: {error}", file=sys.stderr)
        return 2
    print(f"A: {head(before['meta'])}\nB: {head(after['meta'])}")
    for name in ("gpu", "driver", "torch", "dsl", "commit", "kernels"):
        had, have = (data["meta"].get(name) for data in (before, after))
        if had != have:
            print(f"{name}: {had} -> {have}")
    found = Comparison(before["rows"], after["rows"], args.threshold / 100, args.relative_to)
    found.report()
    bad = [key for key in found.worse() if args.all or key[KEY.index("impl")].startswith("cute")]
    print(
        f"{len(bad)} past the threshold of {args.threshold:g} %" if bad else "within the threshold"
    )
    return 1 if bad else 0


class Comparison:
    """Two results, row by row.

    Attributes:
        ratios: B's time over A's, by row.
        broken: rows with a time in A and none in B, and why.
        repaired: rows with a time in B only.
    """

    def __init__(self, a: list[Row], b: list[Row], threshold: float, peer: str | None = None):
        self.threshold, self.peer = threshold, peer
        before, after = _times(a, peer), _times(b, peer)
        rows = {key_of(row): row for row in b}
        self.ratios = {key: after[key] / us for key, us in before.items() if key in after}
        self.broken: dict[Key, str] = {}
        for key in before:
            if key not in after:
                self.broken[key] = rows.get(key, {}).get("failed", "no time in B")
        self.repaired = [key for key in after if key not in before]

    def worse(self) -> list[Key]:
        """Rows that became slower, or have no time any more."""
        slower = [key for key, ratio in self.ratios.items() if ratio > 1 + self.threshold]
        return [*self.broken, *slower]

    def report(self) -> None:
        """What moved, the worst first; and each implementation's mean."""
        from cute_fp8.tables import print_table

        limit = self.threshold
        moved = {k: r for k, r in self.ratios.items() if r > 1 + limit or r < 1 / (1 + limit)}
        if moved:
            title = "moved: time in B over A" + (f", over {self.peer}" if self.peer else "")
            table = Table(title=title)
            for name in ("impl", "what", "B / A"):
                table.add_column(name, justify="right" if name == "B / A" else "left")
            for key, ratio in sorted(moved.items(), key=lambda item: -item[1]):
                colour = "red" if ratio > 1 else "green"
                table.add_row(*_words(key), f"[{colour}]{ratio:.3f}[/]")
            print_table(table)
        for key, why in self.broken.items():
            print(f"{' '.join(_words(key))}: no longer timed: {why}")
        for key in self.repaired:
            print(f"{' '.join(_words(key))}: timed in B only")
        by_impl: dict[str, list[float]] = {}
        for key, ratio in self.ratios.items():
            by_impl.setdefault(key[KEY.index("impl")], []).append(ratio)
        for impl, ratios in by_impl.items():
            print(f"{NAMES.get(impl, impl)}: B / A {geomean(ratios):.3f} over {len(ratios)} rows")


def _times(rows: list[Row], peer: str | None) -> dict[Key, float]:
    times = {key_of(row): row["us"] for row in rows if "us" in row}
    if peer is None:
        return times
    shares = {}
    for key, us in times.items():
        base = times.get(_replaced(key, peer))
        if base is not None:
            shares[key] = us / base
    return shares


def _replaced(key: Key, impl: str) -> Key:
    parts: list[Any] = list(key)
    parts[KEY.index("impl")] = impl
    return tuple(parts)


def _words(key: Key) -> tuple[str, str]:
    op, variant, impl, m, n, k, epilogue = key
    sizes = "x".join(str(size) for size in (m, n, k) if size is not None)
    return str(NAMES.get(impl, impl)), f"{op} {variant} {epilogue} {sizes}"


if __name__ == "__main__":
    sys.exit(main())
