"""What the command line prints: tables and progress, by rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from cute_fp8.demo.run import LayerResult, Similarities, Timing
    from cute_fp8.evidence.inspection import Inspection
    from cute_fp8.evidence.verify import Proof

T = TypeVar("T")


def track(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yield ``items`` under a progress bar with an ETA, on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(items, total=total, description=what)


def print_table(table: Table) -> None:
    """Print to stdout, as wide as the terminal; never cut when it is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def inspection_table(found: Iterable[Inspection]) -> Table:
    """One row per compiled kernel."""
    table = Table(title="compiled and inspected (static facts, not measurements)")
    table.add_column("arch")
    table.add_column("kernel", overflow="fold")
    table.add_column("MMA", overflow="fold")
    for name in ("regs", "smem", "stages", "local", "spills", "others/MMA", "s"):
        table.add_column(name, justify="right")
    table.add_column("gates")
    for i in found:
        table.add_row(
            i.target,
            i.kernel,
            ", ".join(i.code.mma),
            str(i.code.registers),
            f"{i.smem_bytes:,}",
            str(i.stages),
            str(i.code.local + i.code.stack),
            str(i.code.spills),
            f"{i.code.others_per_mma:.2f}" if i.code.loop_mma else "-",
            f"{i.seconds:.1f}",
            "[red]FAIL[/]" if i.failures else "pass",
        )
    return table


def print_all(*parts: Table | str) -> None:
    """Print tables and plain lines to stdout, as :func:`print_table` does."""
    for part in parts:
        if isinstance(part, Table):
            print_table(part)
        else:
            print(part)


def layer_table(layers: Iterable[LayerResult]) -> Table:
    """One row per linear layer: what FP8 costs it, or why it stays as it is."""
    table = Table(
        title="linear layers in FP8: one scale per output channel, one per token",
        caption=(
            "errors of the codes; then of the FP8 output against the bf16 layer's "
            "(element: the worst one's share of its allowance)"
        ),
    )
    table.add_column("layer", overflow="fold")
    table.add_column("M x N x K", justify="right")
    table.add_column("route", overflow="fold")
    for name in ("weight err", "act. err", "crest", "cosine", "rel. L2", "element"):
        table.add_column(name, justify="right")
    table.add_column("near-lossless")
    for i in layers:
        shape = f"{i.m}x{i.n}x{i.k}"
        if i.error is None or i.verdict is None:
            table.add_row(i.layer, shape, *["-"] * 7, escape(f"not quantised: {i.reason}"))
            continue
        table.add_row(
            i.layer,
            shape,
            i.route,
            f"{i.error['rel_l2']:.4f}",
            f"{i.error['activation_rel_l2']:.4f}",
            f"{i.error['activation_crest']:.1f}",
            f"{i.verdict.cosine:.5f}",
            f"{i.verdict.rel_l2:.4f}",
            f"{i.verdict.element_ratio:.2f}",
            "pass" if i.verdict.passed else "[red]FAIL[/]",
        )
    return table


def similarity_table(found: Similarities) -> Table:
    """Similarity of each related pair before and after, and how far all pairs moved."""
    table = Table(
        title="sentence similarities before and after",
        caption=(
            f"all {found.compared} pairs, FP8 against bf16: |difference| <= "
            f"{found.largest_difference:.4f}, Spearman {found.spearman:.5f} (bf16 against fp32: "
            f"{found.bf16_largest_difference:.4f}, {found.bf16_spearman:.5f})"
        ),
    )
    table.add_column("sentences")
    for name in ("fp32", "bf16", "FP8", "FP8 - bf16"):
        table.add_column(name, justify="right")
    for pair in found.pairs:
        table.add_row(
            escape(f"{pair['a']}\n{pair['b']}"),
            *(f"{pair[name]:.4f}" for name in ("fp32", "bf16", "fp8")),
            f"{pair['difference']:+.4f}",
        )
    return table


def timing_table(timings: Iterable[Timing], calls: int) -> Table:
    """One row per GEMM: microseconds of each implementation, and ours against the others."""
    table = Table(
        title="GEMM alone, activations already quantised: median microseconds",
        caption=f"CUDA graphs of {calls} calls; operands in L2, as this small model's weights stay",
    )
    table.add_column("M x N x K", justify="right")
    for name in (
        "cute_fp8",
        "bf16 F.linear",
        "row-wise _scaled_mm",
        "bf16 / ours",
        "row-wise / ours",
    ):
        table.add_column(name, justify="right")
    shapes: dict[str, dict[str, float | None]] = {}
    for i in timings:
        shapes.setdefault(f"{i.M}x{i.N}x{i.K}", {})[i.impl] = i.us
    for shape, us in shapes.items():
        ours, bf16, rowwise = (us.get(n) for n in ("cute_fp8", "torch_bf16", "torch_rowwise"))
        ratios = [f"{t / ours:.2f}" if t and ours else "-" for t in (bf16, rowwise)]
        table.add_row(shape, *(f"{t:.1f}" if t else "-" for t in (ours, bf16, rowwise)), *ratios)
    return table


def proof_table(proofs: Iterable[Proof]) -> Table:
    """One row per verified kernel."""
    table = Table(title="races and deadlocks, in every schedule of one small launch")
    table.add_column("arch")
    table.add_column("kernel", overflow="fold")
    table.add_column("verdict")
    table.add_column("s", justify="right")
    for proof in proofs:
        verdict = proof.result if proof.proved else f"[red]{proof.result}[/]"
        table.add_row(proof.target, proof.kernel, verdict, f"{proof.seconds:.0f}")
    return table
