"""Timing GEMMs and other calls on a GPU: CUDA graphs of back-to-back calls, in turns.

Each contender is checked before it is timed, and the very buffers that were timed are checked
again: a result that is wrong makes a row that says so. Weights are rotated out of L2.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cute_fp8.shapes import Shape

#: Copies of the weight are rotated over this much memory, more than any L2 holds.
ROTATED_BYTES = 150_000_000
#: Calls in one CUDA graph, at least; timed replays of it, after some that warm up.
CALLS, REPLAYS, WARM_UP = 20, 21, 4
#: The same where a replay is to last so and so long: calls at most, unless there are more copies.
MOST_CALLS, PACED_REPLAYS, PACED_WARM_UP = 40, 15, 2
#: Largest relative L2 error of a bf16 output. Rounding makes 0.0017; the short accumulator of
#: Hopper's FP8 tensor cores adds up to 0.003.
LIMIT = 0.006


@dataclass(frozen=True)
class Contender:
    """One implementation on one shape.

    Attributes:
        impl: its name in result files.
        call: ``call(i)`` multiplies by the i-th copy of the weight.
        copies: how many there are; copy i holds the weight's rows rotated by i.
        exact: ``[M, N]`` in float64 for copy 0; that of copy i is rotated by i along N.
        extra: further keys of its row, such as the route.
        operand_bytes: per element of the operands; outputs have two.
        rows: which rows of the result ``exact`` holds; None for all.
        m: how many rows the result has, if ``rows`` names some.
    """

    impl: str
    call: Callable[[int], Tensor]
    copies: int
    exact: Tensor
    extra: Mapping[str, str] = field(default_factory=dict)
    operand_bytes: int = 1
    rows: Tensor | None = None
    m: int = 0

    def error(self, y: Tensor, copy: int = 0) -> float:
        """Relative L2 error of a result; infinite if its shape or any one element is far off."""
        if self.rows is not None:
            if y.shape != (self.m, self.exact.shape[1]):
                return float("inf")
            y = y[self.rows]
        if y.shape != self.exact.shape:
            return float("inf")
        exact = self.exact.roll(copy, 1)
        difference = (y.double() - exact).abs()
        allowed = exact.abs() * 2.0**-7 + exact.square().mean().sqrt() * 0.05
        if not bool((difference <= allowed).all()):
            return float("inf")
        return float(difference.norm() / exact.norm())


#: Runs contenders in turns. For each: microseconds per call of every replay, and the last result
#: with each copy. One that cannot be timed is left out.
Timer = Callable[[Sequence[Contender]], dict[str, tuple[list[float], list[Tensor]]]]


def rates(row: Mapping[str, Any], shape: Shape, operand_bytes: int) -> dict[str, float]:
    """What a row's time comes to; nothing if it has none."""
    if "us" not in row:
        return {}
    m, n, k = shape
    moved = operand_bytes * k * (m + n) + 2 * m * n
    tflops, gbps = 2e-6 * m * n * k / row["us"], 1e-3 * moved / row["us"]
    return {"tflops": float(f"{tflops:.4g}"), "gbps": float(f"{gbps:.4g}")}


def time_contenders(found: Sequence[Contender], timer: Timer) -> Iterator[dict[str, Any]]:
    """Check, time, check again; a row for each, with ``failed`` where it says why there is no time.

    The rows hold the keys that differ between contenders.
    """
    rows: dict[str, dict[str, Any]] = {
        c.impl: {"impl": c.impl, **c.extra, **_refused(c)} for c in found
    }
    sound = [c for c in found if "failed" not in rows[c.impl]]
    timed = timer(sound)
    for c in sound:
        row = rows[c.impl]
        if c.impl not in timed:
            row["failed"] = "cannot be captured in a CUDA graph"
            continue
        times, results = timed[c.impl]
        error = max(c.error(y, copy) for copy, y in enumerate(results))
        if not error <= LIMIT:
            row["failed"] = f"wrong after the timing: {_wrong(error)}"
            continue
        row["us"] = round(statistics.median(times), 3)
        row["us_min"], row["us_max"] = round(min(times), 3), round(max(times), 3)
        row["error"] = float(f"{error:.3g}")
    yield from rows.values()


def _refused(c: Contender) -> dict[str, str]:
    """``failed``, in words, if a contender refuses its first call or gets it wrong."""
    try:
        error = c.error(c.call(0))
    except Exception as refusal:  # other packages raise what they like
        text = (str(refusal).strip().splitlines() or [""])[0][:200]
        return {"failed": f"{type(refusal).__name__}: {text}"}
    return {} if error <= LIMIT else {"failed": f"wrong: {_wrong(error)}"}


def _wrong(error: float) -> str:
    return f"relative L2 error {error:.3g}" if error < float("inf") else "an element is far off"


def graph_times(
    found: Sequence[Contender], *, replay_us: float | None = None
) -> dict[str, tuple[list[float], list[Tensor]]]:
    """Time contenders by CUDA graphs of back-to-back calls, one call after the other.

    Replays take turns, so that a drift of clocks meets all alike.

    Args:
        replay_us: about how long a replay is to last, in whole rounds over the copies; by default
            it has a fixed number of calls.
    """
    graphs: dict[str, tuple[Any, int]] = {}
    timed: dict[str, tuple[list[float], list[Tensor]]] = {}
    for c in found:
        results: dict[int, Tensor] = {}
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            calls = c.copies * _rounds(c, replay_us)
            with torch.cuda.graph(graph):
                for i in range(calls):
                    results[i % c.copies] = c.call(i % c.copies)
        except Exception:  # as in `_refused`
            continue
        graphs[c.impl] = graph, calls
        timed[c.impl] = [], list(results.values())
    paced = replay_us is not None
    for turn in range(-(PACED_WARM_UP if paced else WARM_UP), PACED_REPLAYS if paced else REPLAYS):
        for impl, (graph, calls) in graphs.items():
            us = gpu_us(graph.replay)
            if turn >= 0:
                timed[impl][0].append(us / calls)
    return timed


def gpu_us(work: Callable[[], object]) -> float:
    """Microseconds from the start of some work on the GPU to its end."""
    event: Any = torch.cuda.Event  # untyped in torch
    begin, end = (event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) * 1e3)


def _rounds(c: Contender, replay_us: float | None) -> int:
    """How many rounds over the copies make a graph; at least one."""
    if replay_us is None:
        return -(-CALLS // c.copies)
    us = gpu_us(lambda: [c.call(i) for i in range(c.copies)])
    rounds = replay_us / max(1e-3, us)
    return max(1, min(round(rounds), MOST_CALLS // c.copies))


def copies_of(weight: Tensor, rotated_bytes: int | None = None) -> int:
    """How many copies of a weight to rotate."""
    size = weight.numel() * weight.element_size()
    return max(2, -(-(rotated_bytes or ROTATED_BYTES) // size))


def rotated(tensor: Tensor, copies: int) -> list[Tensor]:
    """Copies of a tensor, the i-th with its rows moved on by i."""
    raw = tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)
    return [raw.roll(i, 0).view(tensor.dtype) for i in range(copies)]
