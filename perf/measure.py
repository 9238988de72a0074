"""The rows of one shape: every contender checked, timed in turns, checked again; host time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cute_fp8.dispatch import TABLE, explain
from cute_fp8.timing import Contender, graph_times, rates, time_contenders
from perf import roofs
from perf.eager import host_rows
from perf.gemm_problem import Wanted, Weight
from perf.results_io import Row
from perf.shapes import Shape

#: A replay lasts about this long; with 17 replays, 35 ms for each implementation and shape.
REPLAY_US = 2000.0
#: Bytes that the dry run rotates.
DRY_BYTES = 6_000


def ours(device: str, variant: str, stand_in: bool) -> list[str]:
    """The backends to time: what a plain call takes, unless that is the reference; and, where it
    is asked for, the stand-in of the sm_120 kernel.
    """
    route = explain(
        "gemm", m=64, n=256, k=256, variant=variant, device=device, backend="auto"
    ).route
    found = []
    if device == "cpu" or (route is not None and route.entry.backend != "reference"):
        found.append("auto")
    if device != "cpu" and stand_in:
        capability = torch.cuda.get_device_capability()
        entries = (e for e in TABLE if e.backend == "stand-in" and e.variant == variant)
        found += ["stand-in"] if any(entry.serves(capability) for entry in entries) else []
    return found


def variants_here(device: str) -> list[str]:
    """The variants that something but the reference serves here."""
    return [v for v in ("per_token", "mxfp8") if ours(device, v, False)]


@dataclass
class Bench:
    """How to measure.

    Attributes:
        device: ``cuda``; ``cpu`` for the dry run, whose times are made up.
        roofs: of this GPU, as in a result's meta.
        eager: also the host time.
        peer_seconds: what a peer may spend on its first calls, over all shapes; then it is out.
        spent: what it has.
    """

    device: str
    roofs: dict[str, Any]
    eager: bool = False
    peer_seconds: float = 120.0
    spent: dict[str, float] = field(default_factory=dict)

    def weight(self, variant: str, epilogue: str, shape: Shape) -> Weight:
        """A weight, with as many tokens as the largest shape has."""
        return Weight(variant, epilogue, shape, self.device, DRY_BYTES if self.dry else None)

    @property
    def tuning(self) -> float:
        """Seconds of all first calls so far, which most shapes do not have again."""
        return sum(self.spent.values())

    @property
    def dry(self) -> bool:
        """Whether there is no GPU, and no time is real."""
        return self.device == "cpu"

    def synchronize(self) -> None:
        """Wait for the GPU.

        Raises:
            RuntimeError: it has failed.
        """
        if not self.dry:
            torch.cuda.synchronize()

    def rows(self, weight: Weight, m: int, wanted: Wanted) -> Iterator[Row]:
        """A row for every contender."""
        shape = (m, weight.case.n, weight.case.k)
        found, late = [], {}
        for c in weight.contenders(m, wanted):
            if (reason := self._prepare(c)) is not None:
                late[c.impl] = reason
            else:
                found.append(c)
        head: Row = {"op": "gemm", "variant": weight.variant, "epilogue": weight.epilogue}
        head |= dict(zip("MNK", shape, strict=True))
        rows = list(time_contenders(found, fake_times if self.dry else paced_times))
        host: dict[str, Row] = {}
        if self.eager:
            us = {row["impl"]: row["us"] for row in rows if "us" in row}
            host = host_rows(found, us, weight, m, None if self.dry else self.synchronize)
        for c, row in zip(found, rows, strict=True):
            row = {**head, **row, **rates(row, shape, c.operand_bytes)}
            if "us" in row and (share := roofs.share(row, c.operand_bytes, self.roofs)):
                row["roofline"] = share
            yield row | host.get(c.impl, {})
        for impl, reason in late.items():
            yield {**head, "impl": impl, "failed": reason}

    def _prepare(self, c: Contender) -> str | None:
        """Let a contender compile and tune; why it is left out, if it takes too long for that.

        What it raises it will raise again when it is checked.
        """
        peer = not c.impl.startswith("cute_fp8")
        if peer and self.spent.get(c.impl, 0.0) > self.peer_seconds:
            return f"left out: its tuning took {self.spent[c.impl]:.0f} s for the shapes before"
        start = time.perf_counter()
        with suppress(Exception):
            c.call(0)
            self.synchronize()
        self.spent[c.impl] = self.spent.get(c.impl, 0.0) + time.perf_counter() - start
        return None


Times = dict[str, tuple[list[float], list[Tensor]]]


def paced_times(found: Sequence[Contender]) -> Times:
    """Graph times of few milliseconds each."""
    return graph_times(found, replay_us=REPLAY_US)


def fake_times(found: Sequence[Contender]) -> Times:
    """Made-up times, of real results."""
    return {
        c.impl: ([10.0 + i, 9.0 + i, 12.0 + i], [c.call(copy) for copy in range(c.copies)])
        for i, c in enumerate(found)
    }
