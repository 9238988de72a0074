"""Pictures of a result file.

    python -m perf.plot RESULT.json [--out FOLDER]

``<name>-tflops.png``: TFLOP/s over M, one panel per weight; ``<name>-speedup.png``: ours against
each peer, shape by shape, losses too; ``<name>-roofline.png``: what is reached of what this GPU can
do, as measured in the same run. Each for the first variant of the file without an epilogue, unless
``--variant`` and ``--epilogue`` say otherwise.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from perf.report import NAMES, geomean, impls_of, speedups
from perf.results_io import Row, load

#: Okabe and Ito's colours, which colour-blind people tell apart; a marker each besides.
STYLES: dict[str, tuple[Any, Any, Any]] = {
    "cute_fp8": ("#D55E00", "o", "-"),
    "cute_fp8_fast": ("#E69F00", "D", "-"),
    "torch_bf16": ("#000000", "s", "--"),
    "torch_rowwise": ("#0072B2", "^", "-"),
    "torch_rowwise_fast": ("#56B4E9", "v", "--"),
    "torch_tensorwise": ("#009E73", "P", "-"),
    "torch_tensorwise_fast": ("#6FCBAE", "X", "--"),
    "torch_mxfp8": ("#009E73", "P", "-"),
    "quack": ("#CC79A7", "*", "-"),
    "cute_fp8_stand_in": ("#999999", ".", ":"),
}
FONT: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "savefig.dpi": 130,
}
STAND_IN = "cute_fp8_stand_in"


def main(arguments: list[str] | None = None) -> int:
    """Draw; 2 if the file cannot be read or has nothing to draw."""
    p = argparse.ArgumentParser("python -m perf.plot", description=(__doc__ or "").split("\n")[0])
    p.add_argument("result", type=Path)
    p.add_argument("--out", type=Path, help="folder; by default the result's")
    p.add_argument("--variant")
    p.add_argument("--epilogue", default="none")
    args = p.parse_args(arguments)
    try:
        data = load(args.result)
        rows = chosen(data["rows"], args.variant, args.epilogue)
    except ValueError as error:
        print(f"perf.plot: {error}", file=sys.stderr)
        return 2
    folder = args.out or args.result.parent
    folder.mkdir(parents=True, exist_ok=True)
    where = f"{data['meta']['gpu']}, {rows[0]['variant']}, {data['meta']['date']}"
    figures = {"tflops": tflops_over_m, "speedup": speedup_dots, "roofline": roofline}
    with plt.rc_context(FONT):
        for name, draw in figures.items():
            figure = draw(rows, where, data["meta"])
            path = folder / f"{args.result.stem}-{name}.png"
            figure.savefig(path, bbox_inches="tight", facecolor="white")
            plt.close(figure)
            print(f"wrote {path}")
    return 0


def chosen(rows: list[Row], variant: str | None, epilogue: str) -> list[Row]:
    """The timed GEMMs of one variant and epilogue.

    Raises:
        ValueError: there are none.
    """
    timed = [r for r in rows if "us" in r and r["op"] == "gemm"]
    timed = [r for r in timed if r.get("epilogue", "none") == epilogue]
    variant = variant or next((row["variant"] for row in timed), None)
    timed = [row for row in timed if row["variant"] == variant]
    if not timed:
        raise ValueError(f"no timed GEMM of variant {variant}, epilogue {epilogue} in the file")
    return timed


def tflops_over_m(rows: list[Row], where: str, meta: dict[str, Any]) -> Figure:
    """One panel for each weight with several M; the others' shapes share the last panel."""
    weights: dict[tuple[int, int], set[int]] = {}
    for row in rows:
        weights.setdefault((row["N"], row["K"]), set()).add(row["M"])
    lines = [weight for weight, ms in weights.items() if len(ms) > 1]
    single = [(min(ms), *weight) for weight, ms in weights.items() if len(ms) == 1]
    panels = len(lines) + bool(single)
    columns = min(2, panels)
    height = math.ceil(panels / columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(6.6 * columns, 4.6 * height), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for axis, (n, k) in zip(flat, lines, strict=False):
        mine = [row for row in rows if (row["N"], row["K"]) == (n, k)]
        _lines(axis, mine)
        axis.set_title(f"N = {n}, K = {k}")
    if single:
        _points(flat[len(lines)], rows, sorted(single))
    for axis in flat[panels:]:
        axis.set_visible(False)
    _legend(figure, impls_of(rows))
    figure.suptitle(f"GEMM speed: {where}", fontsize=14)
    return figure


def _root(y: Any) -> Any:
    return np.sqrt(np.maximum(y, 0))


def _square(y: Any) -> Any:
    return np.square(y)


def _lines(axis: Axes, rows: list[Row]) -> None:
    ms = sorted({row["M"] for row in rows})
    for impl in impls_of(rows):
        points = sorted((ms.index(row["M"]), row["tflops"]) for row in rows if row["impl"] == impl)
        colour, marker, line = STYLES.get(impl, ("#777777", ".", ":"))
        width, order = (2.4, 5) if impl == "cute_fp8" else (1.4, 3)
        axis.plot(
            *zip(*points, strict=True),
            color=colour, marker=marker, linestyle=line, linewidth=width, zorder=order,
        )  # fmt: skip
    axis.set_xticks(range(len(ms)), [str(m) for m in ms], fontsize=10)
    # Between linear and logarithmic: both few and many tokens can be read off.
    axis.set_yscale("function", functions=(_root, _square))
    top = 1.05 * max(row["tflops"] for row in rows)
    axis.set_ylim(0, top)
    steps = (5, 20, 50, 100, 200, 400, 600, 800, 1000, 1200, 1400, 1600, 2000, 3000, 4000)
    axis.yaxis.set_major_locator(FixedLocator([0, *(step for step in steps if step < top)]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("M (tokens)")
    axis.set_ylabel("TFLOP/s (root scale)")


def _points(axis: Axes, rows: list[Row], shapes: list[tuple[int, int, int]]) -> None:
    places = {shape: i for i, shape in enumerate(shapes)}
    impls = impls_of(rows)
    for j, impl in enumerate(impls):
        mine = [r for r in rows if r["impl"] == impl and (r["M"], r["N"], r["K"]) in places]
        shift = 0.6 * (j / max(1, len(impls) - 1) - 0.5)
        x = [places[(r["M"], r["N"], r["K"])] + shift for r in mine]
        colour, marker, _ = STYLES.get(impl, ("#777777", ".", ":"))
        axis.plot(x, [r["tflops"] for r in mine], marker, color=colour, markersize=7)
    axis.set_xticks(range(len(shapes)), ["{}\nx {}\nx {}".format(*s) for s in shapes], fontsize=9.5)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("TFLOP/s")
    axis.set_title("other shapes, M x N x K (linear scale)")


def speedup_dots(rows: list[Row], where: str, meta: dict[str, Any]) -> Figure:
    """A panel for each peer, a bar from 1.0 for each shape; blue wins, orange losses."""
    peers = [impl for impl in impls_of(rows) if not impl.startswith("cute_fp8")]
    found = {peer: speedups(rows, peer) for peer in peers}
    peers = [peer for peer in peers if found[peer]]
    groups = list(dict.fromkeys(group for peer in peers for group in found[peer]))[::-1]
    if not peers:
        figure, axis = plt.subplots(figsize=(7, 2))
        axis.text(0.5, 0.5, "nothing of ours was timed beside a peer", ha="center")
        axis.set_axis_off()
        return figure
    figure, axes = plt.subplots(
        1, len(peers), figsize=(2.2 + 2.3 * len(peers), 1.9 + 0.2 * len(groups)), sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    most = max(max(abs(math.log2(r)) for r in found[p].values()) for p in peers)
    limit = 2 ** min(3.0, max(0.35, most * 1.12))
    for axis, peer in zip(axes[0], peers, strict=True):
        _bars(axis, peer, found[peer], groups, limit)
    labels = ["{} x {} x {}".format(*group[3:]) for group in groups]
    axes[0][0].set_yticks(range(len(groups)), labels, fontsize=9)
    axes[0][0].set_ylabel("M x N x K")
    figure.suptitle(f"cute_fp8 against each peer: {where}", fontsize=13)
    figure.supxlabel("peer's time / ours: right of 1 (blue) ours is faster, left (orange) slower")
    return figure


def _bars(axis: Axes, peer: str, ratios: dict[Any, float], groups: list[Any], limit: float) -> None:
    for i, group in enumerate(groups):
        if (ratio := ratios.get(group)) is None:
            continue
        end = min(max(ratio, 1 / limit), limit)
        colour = "#0072B2" if ratio >= 1 else "#D55E00"
        axis.plot([1, end], [i, i], color=colour, linewidth=2.2, solid_capstyle="butt")
        axis.plot(end, i, "o" if end == ratio else ">" if ratio > 1 else "<", color=colour, ms=4.5)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_xlim(1 / limit / 1.05, limit * 1.05)
    wanted = (0.25, 0.5, 0.7, 1, 1.4, 2, 3) if limit < 4 else (0.125, 0.5, 1, 2, 4, 8)
    ticks = [tick for tick in wanted if 1 / limit <= tick <= limit]
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_ylim(-0.8, len(groups) - 0.2)
    axis.grid(axis="y", visible=False)
    losses = sum(ratio < 1 for ratio in ratios.values())
    mean = geomean(ratios.values())
    axis.set_title(f"{NAMES[peer]}\n{mean:.2f}x, {losses} losses", fontsize=10.5)


def roofline(rows: list[Row], where: str, meta: dict[str, Any]) -> Figure:
    """TFLOP/s over operations per byte, below the measured roofs."""
    figure, axis = plt.subplots(figsize=(9.5, 6), layout="constrained")
    shown = [impl for impl in impls_of(rows) if impl != STAND_IN]
    for impl in shown[::-1]:
        mine = [row for row in rows if row["impl"] == impl]
        x = [1e3 * row["tflops"] / row["gbps"] for row in mine]
        colour, marker, _ = STYLES.get(impl, ("#777777", ".", ":"))
        size, order = (8, 5) if impl == "cute_fp8" else (5.5, 3)
        axis.plot(
            x, [row["tflops"] for row in mine], marker, color=colour, markersize=size, alpha=0.85,
            zorder=order, markeredgecolor="white", markeredgewidth=0.5,
        )  # fmt: skip
    timed = [row for row in rows if row["impl"] in shown]
    reach = [1e3 * row["tflops"] / row["gbps"] for row in timed]
    low, high = min(reach) / 1.5, max(reach) * 1.5
    for name, label, line in (
        ("fp8_tflops", "FP8 matmul", "-"),
        ("matmul_tflops", "bf16 matmul", "--"),
    ):
        if name in meta and "read_gbps" in meta:
            peak, slope = meta[name], 1e-3 * meta["read_gbps"]
            x = [min(low, peak / slope), peak / slope, max(high, peak / slope)]
            axis.plot(x, [x[0] * slope, peak, peak], color="#444444", linestyle=line, linewidth=1.6)
            axis.annotate(
                f"{label} {peak:.0f} TFLOP/s", (x[1], peak), (-8, 0), textcoords="offset points",
                ha="right", va="center", color="#222222",
            )  # fmt: skip
    if "read_gbps" in meta:
        slope = 1e-3 * meta["read_gbps"]
        axis.annotate(
            f"read bandwidth {meta['read_gbps']:.0f} GB/s", (low * 12, low * 12 * slope), (-10, 4),
            textcoords="offset points", ha="right", color="#222222",
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    _plain(axis)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("arithmetic intensity: operations per byte of operands and result")
    axis.set_ylabel("TFLOP/s")
    _legend(figure, shown)
    figure.suptitle(f"Roofline: {where}", fontsize=14)
    return figure


def _plain(axis: Axes) -> None:
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, impls: list[str]) -> None:
    handles = []
    for impl in impls:
        colour, marker, line = STYLES.get(impl, ("#777777", ".", ":"))
        label = "stand-in (sm_120 code, not its speed)" if impl == STAND_IN else NAMES[impl]
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle=line, label=label))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False
    )


if __name__ == "__main__":
    sys.exit(main())
