"""What a conversion did to each layer: as text, as JSON and as a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cute_fp8.accuracy import MAX_REL_L2, Verdict
from cute_fp8.models.fusing import Fused
from cute_fp8.numerics import MX_BLOCK
from cute_fp8.scales import blocked_numel


@dataclass(frozen=True)
class LayerReport:
    """One linear layer.

    Attributes:
        name: in the model.
        n, k: output and input channels.
        bytes_before, bytes_after: of its weight with all that belongs to it, without the bias.
        variant: how it was quantised; None if it stays as it is.
        reason: why it stays; None if it was quantised.
        weight_rel_l2, worst_channel_rel_l2: error of the weight, and of its worst channel.
        m: tokens of the sample inputs that it was judged on; None without any.
        activation_rel_l2, activation_crest: error of the quantised input, and the largest ratio of
            a token's amax to its RMS.
        verdict: the near-lossless tier's, of the output against the layer's own.
        notes: whatever else there is to say.
    """

    name: str
    n: int
    k: int
    bytes_before: int
    bytes_after: int
    variant: str | None = None
    reason: str | None = None
    weight_rel_l2: float | None = None
    worst_channel_rel_l2: float | None = None
    m: int | None = None
    activation_rel_l2: float | None = None
    activation_crest: float | None = None
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()

    @property
    def quantised(self) -> bool:
        """Whether it is in FP8 now."""
        return self.variant is not None

    def as_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {**asdict(self), "quantised": self.quantised, "notes": list(self.notes)}


@dataclass(frozen=True)
class Report:
    """All layers of a model, in order.

    Attributes:
        layers: one for every linear layer that was looked at.
        fused: names of projections that are one GEMM now.
        blocks: names of decoder layers that run as decoder blocks now.
        no_blocks: names of decoder layers that do not, each with the reason.
        notes: what concerns no single layer.
    """

    layers: tuple[LayerReport, ...]
    fused: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    blocks: tuple[str, ...] = ()
    no_blocks: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, layers: Iterable[LayerReport], fused: Fused, notes: tuple[str, ...] = ()) -> Report:
        """Of layers, and of what :func:`cute_fp8.models.fusing.fuse` did."""
        inside = tuple(f"{name}." for name in fused.blocks)
        layers = [_in_block(x) if x.name.startswith(inside) else x for x in layers]
        return cls(tuple(layers), fused.projections, notes, fused.blocks, fused.refused)

    @property
    def quantised(self) -> tuple[LayerReport, ...]:
        """The layers that are in FP8 now."""
        return tuple(layer for layer in self.layers if layer.quantised)

    @property
    def kept(self) -> tuple[LayerReport, ...]:
        """The layers that stay as they were."""
        return tuple(layer for layer in self.layers if not layer.quantised)

    @property
    def bytes_before(self) -> int:
        """Of all these layers' weights."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Likewise."""
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        before, after = (round(n / 2**20, 1) for n in (self.bytes_before, self.bytes_after))
        return (
            f"{len(self.quantised)} of {len(self.layers)} linear layers in FP8, "
            f"{before} MiB of weights became {after} MiB"
        )

    def table(self) -> str:
        """One line a layer, then what stays as it is and why."""
        judged = any(layer.verdict for layer in self.layers)
        head = ["layer", "N x K", "MiB", "now", "weight err", "worst"]
        head += ["M", "act. err", "crest", "cosine", "rel. L2", "tier"] if judged else []
        rows = [head, *(_row(layer, judged) for layer in self.layers)]
        lines = [str(self), "", *_aligned(rows)]
        if self.kept:
            lines += ["", "not quantised:"]
            lines += [f"  {layer.name}: {layer.reason}" for layer in self.kept]
        if self.fused:
            lines += ["", f"one GEMM each: {', '.join(self.fused)}"]
        if self.blocks:
            lines += ["", f"decoder blocks: {', '.join(self.blocks)}"]
        lines += self._titled("no decoder blocks:", [f"{n}: {why}" for n, why in self.no_blocks])
        notes = [f"{layer.name}: {note}" for layer in self.layers for note in layer.notes]
        return "\n".join([*lines, *self._titled("notes:", [*self.notes, *notes])])

    @staticmethod
    def _titled(title: str, lines: Sequence[str]) -> list[str]:
        return ["", title, *(f"  {line}" for line in lines)] if lines else []

    def as_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {
            "quantised": len(self.quantised),
            "layers": [layer.as_dict() for layer in self.layers],
            "fused": list(self.fused),
            "blocks": list(self.blocks),
            "no_blocks": dict(self.no_blocks),
            "notes": list(self.notes),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`as_dict` to a file."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw every layer's errors into a PNG. Needs matplotlib, of the extra ``perf``.

        Raises:
            ModuleNotFoundError: it is not installed.
            ValueError: there is no layer.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        if not self.layers:
            raise ValueError("plot: got a report of no layers, must have one")
        figure = Figure(figsize=(max(6.0, 0.16 * len(self.layers)), 5.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        errors = {
            "weight": [layer.weight_rel_l2 for layer in self.layers],
            "input": [layer.activation_rel_l2 for layer in self.layers],
            "output": [v.rel_l2 if (v := layer.verdict) else None for layer in self.layers],
        }
        for (name, values), marker in zip(errors.items(), "o^s", strict=True):
            points = [(i, v) for i, v in enumerate(values) if v is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker, label=name, markersize=4)
        for i, layer in enumerate(self.layers):
            if not layer.quantised:
                axes.axvspan(i - 0.5, i + 0.5, color="0.88", label="_stays as it is")
        axes.axhline(MAX_REL_L2, color="0.4", linewidth=0.8, linestyle="--", label="tier's limit")
        axes.set_xticks(range(len(self.layers)), [layer.name for layer in self.layers])
        axes.tick_params(axis="x", labelrotation=90, labelsize=6)
        axes.set_ylabel("relative L2 error")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{self}; grey: stays as it is", fontsize=9)
        axes.legend(fontsize=8)
        figure.savefig(path, format="png", dpi=110)


def _in_block(layer: LayerReport) -> LayerReport:
    """Of MXFP8 scales a decoder block keeps one form."""
    if layer.variant != "mxfp8":
        return layer
    scales = blocked_numel(layer.n, layer.k // MX_BLOCK)
    return replace(layer, bytes_after=layer.n * layer.k + scales)


def _row(layer: LayerReport, judged: bool) -> list[str]:
    before, after = layer.bytes_before / 2**20, layer.bytes_after / 2**20
    row = [
        layer.name,
        f"{layer.n} x {layer.k}",
        f"{before:.2f} -> {after:.2f}" if layer.quantised else f"{before:.2f}",
        layer.variant or "as it was",
        _number(layer.weight_rel_l2, ".4f"),
        _number(layer.worst_channel_rel_l2, ".4f"),
    ]
    verdict = layer.verdict
    if judged:
        row += [
            _number(layer.m, "d"),
            _number(layer.activation_rel_l2, ".4f"),
            _number(layer.activation_crest, ".1f"),
            _number(verdict.cosine if verdict else None, ".5f"),
            _number(verdict.rel_l2 if verdict else None, ".4f"),
            "-" if verdict is None else "pass" if verdict.passed else "FAIL",
        ]
    return row


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as they need; the first one to the left, numbers to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
