"""QuACK's GEMM as a peer, its autotuner on and affordable.

QuACK 0.6.5 compiles each of its configurations once for all shapes, in processes of its own, and
then times all that suit the GPU for every shape: 44 on Hopper, each of them warmed up for 200 ms
and called 250 times or more, 25 s a shape. Here it gets a process for every core, and its timing
function is replaced by one that does the same (a CUDA graph of calls over as many copies of the
operands as outgrow the L2) in milliseconds. Which configurations there are, and that the fastest is
taken, stays QuACK's. The choices are not kept on disk, where they would pass for its own.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from cute_fp8.timing import gpu_us
from perf.operands import Call, Operands

#: A configuration is timed by replays of about this long, of whole rounds over the copies.
TUNE_US = 1000.0
#: Such rounds at most; replays, of which the fastest counts.
ROUNDS, REPLAYS = 4, 2


def installed() -> bool:
    """Whether there is a QuACK."""
    return importlib.util.find_spec("quack") is not None


def version() -> str:
    """For the result's meta."""
    try:
        return metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return "not installed"


def quack(o: Operands) -> Call:
    """QuACK's GEMM of the same codes with one scale in all; the first call of a shape tunes it."""
    weights = [codes.t() for codes in o.codes]
    alpha = float(o.one_x * o.one_w)

    def call(i: int, bias: Tensor | None) -> Tensor:
        y: Tensor = _gemm()(
            o.xq, weights[i], bias=bias, alpha=alpha, out_dtype=torch.bfloat16, tuned=True
        )
        return y

    return call


@functools.cache
def _gemm() -> Callable[..., Tensor]:
    """QuACK's function, once its tuner is set up."""
    os.environ.setdefault("QUACK_COMPILE_WORKERS", str(len(os.sched_getaffinity(0))))
    from quack import autotuner, gemm_interface

    autotuner._bench_cuda_graph_l2_rotate = brief_times
    gemm_interface.gemm_tuned.cache_results = False
    function: Callable[..., Tensor] = gemm_interface.gemm
    return function


def brief_times(
    fn: Callable[..., Any],
    arg_sets: Sequence[tuple[Any, ...]],
    kwarg_sets: Sequence[Mapping[str, Any]],
    extra_kwargs: Mapping[str, Any],
    quantiles: Sequence[float] = (0.5,),
) -> list[float]:
    """Milliseconds of a call, in place of QuACK's ``_bench_cuda_graph_l2_rotate``.

    Its first call may raise what QuACK's tuner waits for, that the kernel is still being compiled.
    """

    def call(i: int) -> None:
        fn(*arg_sets[i], **kwarg_sets[i], **extra_kwargs)

    def round_over_copies() -> None:
        for i in range(len(arg_sets)):
            call(i)

    call(0)
    rounds = max(1, min(ROUNDS, round(TUNE_US / max(1.0, gpu_us(round_over_copies)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            round_over_copies()
    us = min(gpu_us(graph.replay) for _ in range(REPLAYS))
    return [1e-3 * us / (rounds * len(arg_sets))] * len(quantiles)
