"""A picture of a producers' result file: everyone's time over that of a copy of as many bytes.

python -m perf.plot_producers RESULT.json [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

from perf.plot import FONT
from perf.report import NAMES
from perf.results_io import Row, load

#: Implementations beside the copy: colour and marker, as in ``perf.plot``.
STYLES = {
    "cute_fp8": ("#D55E00", "o"),
    "cute_fp8_no_pdl": ("#E69F00", "D"),
    "inductor": ("#0072B2", "^"),
}
TITLES = {
    ("quantize", "per_token"): "quantise, per token",
    ("quantize", "mxfp8"): "quantise, MXFP8",
    ("rmsnorm_quantize", "per_token"): "RMSNorm, per token",
    ("silu_mul_quantize", "per_token"): "SiLU(gate) * up, per token",
}
Op = tuple[str, str]
Size = tuple[int, int]


def main(arguments: list[str] | None = None) -> int:
    """Draw; 2 if the file cannot be read or has no producers in it."""
    p = argparse.ArgumentParser("python -m perf.plot_producers")
    p.add_argument("result", type=Path)
    p.add_argument("--out", type=Path, help="folder; by default the result's")
    args = p.parse_args(arguments)
    try:
        data = load(args.result)
        ratios = over_copy(data["rows"])
    except ValueError as error:
        print(f"perf.plot_producers: {error}", file=sys.stderr)
        return 2
    folder = args.out or args.result.parent
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(FONT):
        figure = draw(ratios, f"{data['meta']['gpu']}, {data['meta']['date']}")
        path = folder / f"{args.result.stem}-copy.png"
        figure.savefig(path, bbox_inches="tight", facecolor="white")
        plt.close(figure)
    print(f"wrote {path}")
    return 0


def over_copy(rows: list[Row]) -> dict[Op, dict[Size, dict[str, float]]]:
    """Each time over the copy's, by op, size and implementation.

    Raises:
        ValueError: no copy was timed.
    """
    copies = {_key(row): row["us"] for row in rows if row["impl"] == "copy" and "us" in row}
    if not copies:
        raise ValueError("no timed copy in the file: not a result of perf.producers")
    found: dict[Op, dict[Size, dict[str, float]]] = {}
    for row in rows:
        op, size = _key(row)
        if "us" in row and row["impl"] in STYLES and (op, size) in copies:
            sizes = found.setdefault(op, {}).setdefault(size, {})
            sizes[row["impl"]] = row["us"] / copies[op, size]
    return found


def _key(row: Row) -> tuple[Op, Size]:
    return (row["op"], row["variant"]), (row["M"], row["K"])


def draw(ratios: dict[Op, dict[Size, dict[str, float]]], where: str) -> Figure:
    """A panel for every op."""
    figure, axes = plt.subplots(
        1, len(ratios), figsize=(3.4 * len(ratios), 4.2), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, (op, sizes) in zip(axes[0], ratios.items(), strict=True):
        axis.set_title(TITLES.get(op, " ".join(op)))
        _panel(axis, sizes)
    axes[0][0].set_ylabel("time / time of a copy of as many bytes")
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        drawn, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles),
        frameon=False,
    )  # fmt: skip
    figure.suptitle(f"Quantising producers: {where}", fontsize=14)
    return figure


def _panel(axis: Axes, sizes: dict[Size, dict[str, float]]) -> None:
    for impl, (colour, marker) in STYLES.items():
        points = [(i, by[impl]) for i, by in enumerate(sizes.values()) if impl in by]
        if points:
            axis.plot(*zip(*points, strict=True), marker, color=colour, label=NAMES[impl], ms=8)
    axis.axhline(1.0, color="#444444", linewidth=1.2, label="the copy")
    axis.set_xticks(range(len(sizes)), ["{}\nx {}".format(*size) for size in sizes], fontsize=9)
    axis.set_xlim(-0.5, len(sizes) - 0.5)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_locator(FixedLocator([0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8]))
    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("rows x K")


if __name__ == "__main__":
    sys.exit(main())
