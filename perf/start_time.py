"""How long a new process takes to its first kernel, compiled cold and loaded from disk.

    python -m perf.start_time [FILE]

Prints the seconds of each step, of a process that finds an empty cache and of the best of several
that find the kernel in it; a kernel that is compiled there fails the run. With a GPU the last step
is the first GEMM to its end; without one the kernel's function is there, ready to be called. FILE
gets the seconds as JSON. The cache is a temporary one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: What a process with all kernels on disk may take beyond importing torch and the DSL.
LIMIT = 1.0
WARM_RUNS = 2
STEPS = ("torch", "cuda", "cute_fp8", "dsl", "kernel")


def child(may_compile: bool) -> dict[str, float]:
    """The seconds of every step, in this process."""
    seconds: dict[str, float] = {}
    start = time.perf_counter()

    def lap(step: str) -> None:
        nonlocal start
        seconds[step] = time.perf_counter() - start
        start = time.perf_counter()

    import torch

    lap("torch")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        sizes = (16, 4096)
        xq, wq = (torch.ones((n, 4096), device="cuda").to(torch.float8_e4m3fn) for n in sizes)
        sx, sw = (torch.ones(n, device="cuda") for n in sizes)
        torch.cuda.synchronize()
        lap("cuda")
    import cute_fp8
    from cute_fp8.build import cache, compiler, shipped

    lap("cute_fp8")
    from cutlass import cute  # noqa: F401

    lap("dsl")
    if not may_compile:
        compiler.build = refuse  # type: ignore[assignment]
    if on_gpu:
        native = torch.cuda.get_device_capability()[0] == 12
        with cute_fp8.use(backend="cute" if native else "stand-in"), torch.no_grad():
            y = cute_fp8.gemm(xq, sx, wq, sw)
        assert (y == 4096).all()
    else:
        (config,) = shipped.shipped_configs("gemm_per_token-32x64*-bfloat16")
        assert compiler.get(config, "sm_120a") is not None
    lap("kernel")
    expected = cache.Stats(misses=1) if may_compile else cache.Stats(hits=1)
    assert cache.stats() == expected, cache.stats()
    return seconds


def refuse(*arguments: object) -> None:
    """In place of ``compiler.build``."""
    raise AssertionError(f"compiled, though it is on disk: {arguments}")


def in_a_process(folder: str, how: str) -> dict[str, float]:
    """What ``child`` returns in a process of its own."""
    command = [sys.executable, "-m", "perf.start_time", "--child", how]
    environment = {**os.environ, "CUTE_FP8_CACHE_DIR": folder}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def beyond(seconds: dict[str, float]) -> float:
    """What is left without torch, its CUDA context and the DSL."""
    return seconds["cute_fp8"] + seconds["kernel"]


def main() -> int:
    """Measure and print; 1 if the limit is not kept."""
    with tempfile.TemporaryDirectory() as folder:
        cold = in_a_process(folder, "cold")
        warm = min((in_a_process(folder, "warm") for _ in range(WARM_RUNS)), key=beyond)
    print(f"{'':10} {'cold':>8} {'cached':>8}   seconds")
    for step in STEPS:
        if step in cold:
            print(f"{step:10} {cold[step]:8.3f} {warm[step]:8.3f}")
    print(f"{'beyond':10} {beyond(cold):8.3f} {beyond(warm):8.3f}   limit {LIMIT}, for cached")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"cold": cold, "cached": warm}, indent=2) + "\n")
    return 0 if beyond(warm) <= LIMIT else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(may_compile=sys.argv[2] == "cold")))
    else:
        sys.exit(main())
