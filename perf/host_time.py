"""Host time of an eager GEMM call: ours, the bare compiled kernel, row-wise ``torch._scaled_mm``.

    python -m perf.host_time [FILE]

The GPU work is small, and the queue is drained between batches, so that what is timed is the CPU's
part of a call. Prints microseconds per call, the best of many batches; FILE gets them as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import cute_fp8
from cute_fp8 import settings
from cute_fp8.dispatch import select
from cute_fp8.gemms.case import GemmCase, gemm_case
from cute_fp8.gemms.launch import CuteGemm
from cute_fp8.gemms.problem import Operands, check_gemm
from cute_fp8.workspace import workspace

BATCHES, CALLS = 30, 200


def host_us(
    call: Callable[[], object],
    batches: int = BATCHES,
    calls: int = CALLS,
    synchronize: Callable[[], object] = torch.cuda.synchronize,
) -> float:
    """Microseconds of host time per call: the best batch's mean."""
    for _ in range(calls):
        call()
    best = float("inf")
    for _ in range(batches):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    synchronize()
    return best * 1e6


def bare_call(case: GemmCase, out: torch.Tensor) -> Callable[[], object]:
    """The compiled kernel's own call, all arguments ready."""
    xq, sx, wq, sw = case.xq, case.sx, case.wq, case.sw
    problem = check_gemm(Operands(xq, sx, wq, sw, out=out))
    gemm = CuteGemm(problem, select(problem, settings.current()))
    kernel, ctas, splits = gemm.kernel, gemm.ctas, gemm.pick.splits
    scratch = None if splits == 1 else workspace(problem.device, gemm.workspace_words)
    shares = None if splits == 1 else splits
    return lambda: kernel(xq, sx, wq, sw, None, None, out, None, scratch, shares, ctas)


def measure(backend: str) -> dict[str, float]:
    """All host times, for 16 x 4096 x 4096, by name."""
    case = gemm_case(16, 4096, 4096)
    xq, sx, wq, sw = case.xq, case.sx, case.wq, case.sw
    out = torch.empty((16, 4096), dtype=torch.bfloat16, device="cuda")
    sx_column, sw_row, wq_t = sx.view(-1, 1), sw.view(1, -1), wq.t()
    xq_3d = xq.view(2, 8, 4096)
    bias = torch.zeros(4096, dtype=torch.bfloat16, device="cuda")
    calls: dict[str, Callable[[], object]] = {
        "cute_fp8": lambda: cute_fp8.gemm(xq, sx, wq, sw),
        "cute_fp8_out": lambda: cute_fp8.gemm(xq, sx, wq, sw, out=out),
        "cute_fp8_bias": lambda: cute_fp8.gemm(xq, sx, wq, sw, bias),
        "cute_fp8_3d": lambda: cute_fp8.gemm(xq_3d, sx, wq, sw),
        "torch_rowwise": lambda: torch._scaled_mm(
            xq, wq_t, scale_a=sx_column, scale_b=sw_row, out_dtype=torch.bfloat16
        ),
        "torch_rowwise_views": lambda: torch._scaled_mm(
            xq,
            wq.t(),
            scale_a=sx.view(-1, 1),
            scale_b=sw.view(1, -1),
            out_dtype=torch.bfloat16,
        ),
        "torch_empty": lambda: torch.empty((16, 4096), dtype=torch.bfloat16, device=xq.device),
    }
    with cute_fp8.use(backend=backend), torch.no_grad():
        times = {"bare_kernel": host_us(bare_call(case, out))}
        for name, call in calls.items():
            try:
                times[name] = host_us(call)
            except (RuntimeError, ValueError):
                # Some GPUs have no row-wise _scaled_mm.
                if not name.startswith("torch"):
                    raise
    return times


def report(times: dict[str, float]) -> None:
    """Print them, and what they come to."""
    for name, us in times.items():
        print(f"{name:20} {us:7.2f} us")
    text = f"cute_fp8 is the bare call + {times['cute_fp8'] - times['bare_kernel']:.2f} us"
    if "torch_rowwise" in times:
        text += f", and {times['cute_fp8'] / times['torch_rowwise']:.2f} of row-wise _scaled_mm"
    print(text)


def backend_here() -> str:
    """The backend that reaches the sm_120 kernel on this GPU."""
    return "cute" if torch.cuda.get_device_capability()[0] == 12 else "stand-in"


def main() -> int:
    """Measure and print."""
    times = measure(backend_here())
    report(times)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(times, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
