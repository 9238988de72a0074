"""What the command line prints: tables and progress, by rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from cute_fp8.inspection import Inspection

T = TypeVar("T")


def track(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yield ``items`` under a progress bar with an ETA, on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
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
            f"{i.code.others_per_mma:.2f}",
            f"{i.seconds:.1f}",
            "[red]FAIL[/]" if i.failures else "pass",
        )
    return table
