"""A result as tables in the terminal. Losses stay in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Table

#: Implementations in the order of columns, and what they are called in tables and plots.
NAMES = {
    "cute_fp8": "ours",
    "cute_fp8_fast": "ours fast",
    "torch_bf16": "bf16",
    "torch_rowwise": "row-wise",
    "torch_rowwise_fast": "row-wise fast",
    "torch_tensorwise": "tensor-wise",
    "torch_tensorwise_fast": "tensor-wise fast",
    "torch_mxfp8": "torch MXFP8",
    "quack": "QuACK",
    "inductor": "Inductor",
    "inductor_bf16": "Inductor bf16",
    "inductor_w8a8": "Inductor W8A8",
    "cute_fp8_stand_in": "stand-in",
    "cute_fp8_no_pdl": "ours, no PDL",
    "copy": "copy",
}
#: Ours, the speed of which is this GPU's.
OURS = ("cute_fp8", "cute_fp8_fast")
Row = dict[str, Any]
Group = tuple[Any, ...]


def by_shape(rows: Iterable[Row]) -> dict[Group, dict[str, Row]]:
    """Rows by what was computed, ``(op, variant, epilogue, M, N, K)``, and implementation."""
    found: dict[Group, dict[str, Row]] = {}
    for row in rows:
        epilogue = row.get("epilogue", "none")
        group = (row["op"], row["variant"], epilogue, row["M"], row.get("N"), row["K"])
        found.setdefault(group, {})[row["impl"]] = row
    return found


def impls_of(rows: Iterable[Row]) -> list[str]:
    """The implementations, in the order of columns."""
    there = {row["impl"] for row in rows}
    return [impl for impl in NAMES if impl in there]


def speedups(rows: Iterable[Row], peer: str, ours: str = "cute_fp8") -> dict[Group, float]:
    """The peer's time over ours, for every shape that both have."""
    return {
        group: found[peer]["us"] / found[ours]["us"]
        for group, found in by_shape(rows).items()
        if "us" in found.get(peer, {}) and "us" in found.get(ours, {})
    }


def geomean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def head(meta: dict[str, Any]) -> str:
    """What was measured on, in one line."""
    text = f"{meta['gpu']}, driver {meta['driver']}, torch {meta['torch']}, {meta['date']}"
    roofs = {
        "read_gbps": "read {:.0f} GB/s",
        "copy_gbps": "copy {:.0f} GB/s",
        "matmul_tflops": "bf16 {:.0f} TFLOP/s",
        "fp8_tflops": "FP8 {:.0f} TFLOP/s",
    }
    measured = [form.format(meta[name]) for name, form in roofs.items() if name in meta]
    return text + (f"; measured: {', '.join(measured)}" if measured else "")


def times_table(rows: list[Row]) -> Table:
    """One line for each shape: median microseconds of everyone, the fastest in bold."""
    impls = impls_of(rows)
    table = Table(
        title="median microseconds",
        caption="fastest in bold; roof: ours as a share of the roofline; failed: see below",
    )
    for name in ("variant", "epilogue", "M x N x K"):
        table.add_column(name, no_wrap=True)
    for impl in impls:
        table.add_column(NAMES[impl], justify="right")
    table.add_column("roof", justify="right")
    for (_, variant, epilogue, m, n, k), found in by_shape(rows).items():
        timed = [row["us"] for impl, row in found.items() if "us" in row and "stand" not in impl]
        best = min(timed, default=0.0)
        cells = [_cell(found.get(impl), best) for impl in impls]
        roof = found.get("cute_fp8", {}).get("roofline")
        share = "-" if roof is None else f"{100 * roof:.0f} %"
        sizes = " x ".join(str(size) for size in (m, n, k) if size is not None)
        table.add_row(variant, epilogue, sizes, *cells, share)
    return table


def _cell(row: Row | None, best: float) -> str:
    if row is None:
        return "-"
    if "failed" in row:
        return "[red]failed[/]"
    text = f"{row['us']:.1f}"
    return f"[bold]{text}[/]" if row["us"] == best else text


def speedup_table(rows: list[Row]) -> Table | None:
    """Ours against each peer: the geometric mean, the worst and the best shape, the losses."""
    table = Table(title="ours over each peer (above 1: ours is faster)")
    for name in ("ours", "peer", "shapes", "geomean", "worst", "best", "losses"):
        table.add_column(name, justify="left" if name in ("ours", "peer") else "right")
    for ours in OURS:
        for peer in impls_of(rows):
            ratios = list(speedups(rows, peer, ours).values())
            if peer.startswith("cute_fp8") or not ratios:
                continue
            losses = sum(ratio < 1 for ratio in ratios)
            figures = [f"{f(ratios):.2f}" for f in (geomean, min, max)]
            table.add_row(NAMES[ours], NAMES[peer], str(len(ratios)), *figures, str(losses))
    return table if table.row_count else None


def host_table(rows: list[Row]) -> Table | None:
    """Host time of eager calls, by implementation: the median over shapes, and its parts."""
    table = Table(title="host time of an eager call, median microseconds over the shapes")
    for name in ("impl", "shapes", "total", "of which"):
        table.add_column(name, justify="left" if name in ("impl", "of which") else "right")
    for impl in impls_of(rows):
        mine = [row for row in rows if row["impl"] == impl and "host_us" in row]
        if not mine:
            continue
        parts = mine[0].get("host_parts", {})
        texts = []
        for part in parts:
            values = (row["host_parts"][part] for row in mine if part in row.get("host_parts", {}))
            texts.append(f"{part} {median(values):.1f}")
        total = median(row["host_us"] for row in mine)
        table.add_row(NAMES[impl], str(len(mine)), f"{total:.1f}", ", ".join(texts))
    return table if table.row_count else None


def failures(rows: Iterable[Row]) -> list[str]:
    """Who failed, and why, in words; the same reason once, with the number of its shapes."""
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        if "failed" in row:
            key = (row["impl"], row["failed"])
            found[key] = found.get(key, 0) + 1
    return [
        escape(f"{NAMES[impl]} failed on {count} shapes: {why}")
        for (impl, why), count in found.items()
    ]


def print_result(meta: dict[str, Any], rows: list[Row]) -> None:
    """All of it, to stdout."""
    from cute_fp8.tables import print_all

    tables = [times_table(rows), speedup_table(rows), host_table(rows)]
    print_all(head(meta), *(table for table in tables if table is not None))
    print_all(*failures(rows), *(f"note: {note}" for note in meta.get("notes", [])))
