"""Host time of the eager calls of one shape, and what ours is made of.

Batches of all contenders take turns, as replays of graphs do, and the best one counts: hosts drift
by more than the differences that matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

import cute_fp8
from cute_fp8.timing import Contender
from perf.gemm_problem import Weight, take
from perf.host_time import bare_call, host_us
from perf.results_io import Row

#: Batches; calls of one at most, and about how much work of the GPU they make.
BATCHES, CALLS, BATCH_US = 10, 100, 20_000.0
TOTAL = "total"

Work = Callable[[], object]


def host_rows(
    found: Sequence[Contender],
    us: Mapping[str, float],
    weight: Weight,
    m: int,
    synchronize: Work | None,
) -> dict[str, Row]:
    """``host_us`` of each contender, and ``host_parts`` of ours, by implementation.

    Args:
        us: on the GPU, of those that were timed; the others are left out.
        synchronize: waits for the GPU; None for one call each, where there is none.
    """
    calls = {
        (c.impl, part): call
        for c in found
        if c.impl in us
        for part, call in _calls(c, weight, m, synchronize)
    }
    best = dict.fromkeys(calls, float("inf"))
    with torch.no_grad():
        for _ in range(BATCHES if synchronize else 1):
            for (impl, part), call in calls.items():
                count = max(5, min(CALLS, int(BATCH_US / us[impl]))) if synchronize else 1
                with cute_fp8.use(backend=_backend(impl)):
                    once = host_us(call, 1, count, synchronize or (lambda: None))
                best[impl, part] = min(best[impl, part], once)
    rows: dict[str, Row] = {}
    for impl in us:
        parts = {part: round(best[i, part], 3) for i, part in best if i == impl}
        total = parts.pop(TOTAL)
        rows[impl] = {"host_us": total}
        if parts:
            rest = {"rest": round(total - sum(parts.values()), 3)}
            rows[impl]["host_parts"] = parts | rest
    return rows


def _backend(impl: str) -> str | None:
    return "stand-in" if impl == "cute_fp8_stand_in" else None


def _calls(
    c: Contender, weight: Weight, m: int, synchronize: Work | None
) -> Iterator[tuple[str, Work]]:
    """A contender's call as users write it, and the parts of ours."""
    if not c.impl.startswith("cute_fp8"):
        yield TOTAL, lambda: c.call(0)
        return
    call = weight.our_call(m, c.impl == "cute_fp8_fast")
    yield TOTAL, lambda: call(0)
    size, device = (m, weight.case.n), weight.device
    yield "allocation", lambda: torch.empty(size, dtype=torch.bfloat16, device=device)
    backend = _backend(c.impl) or "cute"
    if c.extra.get("route", "").startswith(backend) and weight.epilogue == "none":
        case = take(weight.case, slice(0, m))
        case = replace(case, sx=weight.kernel_scale(case.sx), sw=weight.scales[0])
        out = torch.empty(size, dtype=torch.bfloat16, device=device)
        with cute_fp8.use(backend=backend):
            launch = bare_call(case, out)
        yield "launch", launch
