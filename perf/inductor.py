"""The producers' math as people write it, through ``torch.compile`` (max-autotune).

Less the rules for zeros, NaN and tiny rows; without CUDA graphs of its own, as the harness captures
everyone. Every size is compiled and tuned for itself, which takes many seconds a size: so processes
do it for all sizes at once, and the one that measures finds the code and what tuning chose on disk.
Their kernels take turns on the GPU meanwhile; the tuner goes by the shortest of its times.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

#: Seconds that one process may take.
COMPILE_SECONDS = 90.0
Math = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


def compiled(op: str, variant: str, eps: float) -> Math:
    """The math of an op, compiled at its first call for the sizes of that."""
    torch._dynamo.reset()
    function = partial(MATH[op], variant=variant, eps=eps)
    compiled: Math = torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)
    return compiled


def compile_all(jobs: Sequence[tuple[str, str, int, int]]) -> float:
    """Compile (op, variant, M, K) in processes of their own; the seconds that it took.

    What one of them does not finish is compiled by whoever needs it.
    """
    start = time.perf_counter()
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}

    def run(job: tuple[str, str, int, int]) -> None:
        op, variant, m, k = job
        what = ["--compile-only", "--ops", f"{op}:{variant}", "--sizes", f"{m}x{k}"]
        command = [sys.executable, "-m", "perf.producers", *what]
        try:
            done = subprocess.run(
                command, env=environment, timeout=COMPILE_SECONDS, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            print(f"perf.inductor: {job} took more than {COMPILE_SECONDS:.0f} s", file=sys.stderr)
            return
        if done.returncode:
            print(f"perf.inductor: {job}: {done.stderr.strip()[-300:]}", file=sys.stderr)

    # Each waits for the disk and the GPU, too.
    with ThreadPoolExecutor(2 * len(os.sched_getaffinity(0))) as threads:
        list(threads.map(run, jobs))
    return time.perf_counter() - start


def _quantised(y: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    """What people write, with one rounding rule more: MXFP8's exponent is rounded up."""
    if variant == "per_token":
        values = y.float()
        scale = values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448.0
        return (values / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale.squeeze(-1)
    blocks = y.float().unflatten(-1, (-1, 32))
    bits = (blocks.abs().amax(dim=-1, keepdim=True) / 448.0).view(torch.int32)
    exponent = ((bits + 0x7FFFFF) >> 23).clamp(0, 254)
    factor = ((254 - exponent) << 23).view(torch.float32)
    codes = (blocks * factor).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.flatten(-2), exponent.squeeze(-1).to(torch.uint8)


def _plain(x: Tensor, weight: Tensor | None, variant: str, eps: float) -> tuple[Tensor, Tensor]:
    return _quantised(x, variant)


def _rmsnorm(x: Tensor, weight: Tensor | None, variant: str, eps: float) -> tuple[Tensor, Tensor]:
    assert weight is not None
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return _quantised(values.to(x.dtype) * weight, variant)


def _silu_mul(x: Tensor, weight: Tensor | None, variant: str, eps: float) -> tuple[Tensor, Tensor]:
    gate, up = x.float().chunk(2, dim=-1)
    return _quantised((F.silu(gate) * up).to(x.dtype), variant)


MATH: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "quantize": _plain,
    "rmsnorm_quantize": _rmsnorm,
    "silu_mul_quantize": _silu_mul,
}
