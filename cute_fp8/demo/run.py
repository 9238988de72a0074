"""The demo: a real model's linear layers in FP8, judged, and their kernels, inspected.

No part of it needs a GPU. With one, the layers' GEMMs also run and are timed there.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from cute_fp8 import settings, tables
from cute_fp8.accuracy import Verdict, fp8_w8a8_error, near_lossless
from cute_fp8.api import gemm
from cute_fp8.demo.encoder import (
    MODEL,
    PAIRS,
    SENTENCES,
    Call,
    Encoder,
    capture,
    embed,
    in_fp8,
    load,
)
from cute_fp8.dispatch import Explanation, walk
from cute_fp8.environment import environment
from cute_fp8.evidence.inspection import Inspection, inspect_kernel
from cute_fp8.gemms.problem import GemmProblem, Operands, check_gemm
from cute_fp8.numerics import quantize_fp8, quantize_fp8_activations
from cute_fp8.targets import capability_of_device, capability_of_target
from cute_fp8.timing import gpu_us

#: What the layers' kernels are compiled for and inspected.
TARGETS = ("sm_120a", "sm_121a")
#: Calls in one CUDA graph, and timed replays of it.
CALLS, REPLAYS = 20, 21


@dataclass(frozen=True)
class LayerResult:
    """One linear layer in FP8 on its real input.

    Attributes:
        layer: its name in the model.
        m, n, k: tokens, output channels, input channels.
        reason: why it stays as it is; None if it was quantised, and then the rest is not None.
        problem: the GEMM, checked.
        explanation: the walk through the dispatch table; says the route.
        error: what ``fp8_w8a8_error`` returns.
        verdict: the tier's, of the FP8 output against the bf16 layer's own.
    """

    layer: str
    m: int
    n: int
    k: int
    reason: str | None = None
    problem: GemmProblem | None = None
    explanation: Explanation | None = None
    error: dict[str, float] | None = None
    verdict: Verdict | None = None

    @property
    def route(self) -> str | None:
        """The entry that serves it, with the tile of a CuTe kernel."""
        route = self.explanation.route if self.explanation else None
        if route is None:
            return None
        return route.entry.name + (f" {route.pick.name}" if route.pick else "")

    def as_dict(self) -> dict[str, object]:
        """As JSON-ready data."""
        return {
            "layer": self.layer,
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "quantised": self.reason is None,
            "reason": self.reason,
            "route": self.route,
            "error": self.error,
            "verdict": None if self.verdict is None else asdict(self.verdict),
        }


@dataclass(frozen=True)
class Similarities:
    """Cosine similarities of sentence embeddings, of the model in three forms.

    Attributes:
        pairs: of each related pair: ``a``, ``b``, the similarity in ``fp32``, ``bf16`` and
            ``fp8``, and the ``difference`` fp8 - bf16.
        compared: number of pairs in what follows: every sentence with every other.
        largest_difference: of |fp8 - bf16|.
        spearman: rank correlation of fp8 with bf16.
        bf16_largest_difference, bf16_spearman: the same of bf16 with fp32, as a yardstick.
    """

    pairs: list[dict[str, Any]]
    compared: int
    largest_difference: float
    spearman: float
    bf16_largest_difference: float
    bf16_spearman: float


@dataclass(frozen=True)
class Timing:
    """Microseconds of one GEMM: median, least and most of the replays. Named as in result files.

    ``error`` is the relative L2 distance of the timed buffer from the bf16 layer's output. ``us``
    is None where torch refuses the call.
    """

    impl: str
    M: int
    N: int
    K: int
    us: float | None = None
    us_min: float | None = None
    us_max: float | None = None
    error: float | None = None
    op: str = "gemm"
    variant: str = "per_token"


def run(json_path: str | None) -> int:
    """Run the demo; tables go to stdout, progress to stderr.

    Args:
        json_path: also write all data as JSON to this file; ``-`` prints it to stdout instead of
            tables.

    Returns:
        0, or 1 if a kernel fails a gate. A layer that misses the near-lossless tier is a finding
        about that layer, which a deployment would keep in bf16; it is listed, not a failure.

    Raises:
        ValueError: a file in a folder that does not exist.
        RuntimeError: transformers or the model's package is missing, or a pinned backend serves no
            layer here.
    """
    start = time.perf_counter()
    # Said now, not after all the work.
    if json_path not in (None, "-") and not Path(str(json_path)).resolve().parent.is_dir():
        raise ValueError(f"--json: got {json_path!r}, must be in a folder that exists")
    show: Callable[..., None] = _nothing if json_path == "-" else tables.print_all
    device = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    )
    _say(f"loading {MODEL}")
    encoder = load(device or torch.device("cpu"))
    fp32 = embed(encoder.model, encoder)
    encoder.model.to(torch.bfloat16)
    calls = capture(encoder.model, encoder)

    layers = [study_layer(call) for call in tables.track(calls, "linear layers", len(calls))]
    show(tables.layer_table(layers), *_explanations(layers))
    similarities = compare_similarities(encoder, fp32, layers)
    show(tables.similarity_table(similarities))
    missed = [
        f"misses the tier, better kept in bf16: {layer.layer}: {layer.verdict}"
        for layer in layers
        if layer.verdict is not None and not layer.verdict.passed
    ]
    show(*missed)
    inspections, failures = inspect_layers(layers)
    if inspections:
        show(tables.inspection_table(inspections))
    timings = list(time_layers(calls, layers)) if device else []
    show(tables.timing_table(timings, CALLS) if device else "No GPU here, so nothing is timed.")

    seconds = time.perf_counter() - start
    show(_summary(layers, similarities, inspections, seconds))
    data = {
        "environment": environment(),
        "model": {
            "name": MODEL,
            "sentences": len(SENTENCES),
            "tokens": int(encoder.mask.sum()),
        },
        "layers": [layer.as_dict() for layer in layers],
        "similarities": asdict(similarities),
        "inspections": [inspection.as_dict() for inspection in inspections],
        "timings": [asdict(timing) for timing in timings],
        "missed": missed,
        "failures": failures,
        "seconds": round(seconds, 2),
    }
    _write(json_path, data)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


@torch.no_grad()
def study_layer(call: Call) -> LayerResult:
    """Quantise a layer and its input, run the GEMM by the best route here, judge the output."""
    weight, bias = call.linear.weight.detach(), call.linear.bias
    m, n, k = len(call.x), *weight.shape
    try:
        wq, sw = quantize_fp8(weight)
        xq, sx = quantize_fp8_activations(call.x)
        problem = check_gemm(Operands(xq, sx, wq, sw, bias))
    except ValueError as error:
        return LayerResult(call.name, m, n, k, reason=str(error))
    y = gemm(xq, sx, wq, sw, bias)
    assert isinstance(y, Tensor)
    return LayerResult(
        call.name,
        m,
        n,
        k,
        problem=problem,
        explanation=walk(problem, capability_of_device(problem.device), settings.current()),
        error=fp8_w8a8_error(weight, wq, sw, call.x),
        verdict=near_lossless(y, call.y),
    )


def compare_similarities(
    encoder: Encoder, fp32: Tensor, layers: Sequence[LayerResult]
) -> Similarities:
    """Sentence similarities of the bf16 model and of its copy with every quantised layer in FP8.

    Args:
        encoder: with its model in bf16.
        fp32: embeddings ``[S, hidden]`` of the fp32 model.
        layers: says which layers are quantised.
    """
    _say("sentence similarities")
    quantised = in_fp8(encoder.model, [i.layer for i in layers if i.reason is None])
    embeddings = {
        "fp32": fp32,
        "bf16": embed(encoder.model, encoder),
        "fp8": embed(quantised, encoder),
    }
    matrices = {name: (e @ e.T).cpu() for name, e in embeddings.items()}
    pairs: list[dict[str, Any]] = []
    for i, (a, b) in enumerate(PAIRS):
        values = {name: float(matrix[2 * i, 2 * i + 1]) for name, matrix in matrices.items()}
        pairs.append({"a": a, "b": b, **values, "difference": values["fp8"] - values["bf16"]})
    upper = torch.triu_indices(len(fp32), len(fp32), offset=1)
    every = {name: matrix[upper[0], upper[1]] for name, matrix in matrices.items()}
    return Similarities(
        pairs=pairs,
        compared=upper.shape[1],
        largest_difference=float((every["fp8"] - every["bf16"]).abs().max()),
        spearman=spearman(every["fp8"], every["bf16"]),
        bf16_largest_difference=float((every["bf16"] - every["fp32"]).abs().max()),
        bf16_spearman=spearman(every["bf16"], every["fp32"]),
    )


def spearman(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation of two vectors without ties."""
    ranks = torch.stack([a.argsort().argsort(), b.argsort().argsort()])
    return float(torch.corrcoef(ranks.to(torch.float64))[0, 1])


def inspect_layers(layers: Sequence[LayerResult]) -> tuple[list[Inspection], list[str]]:
    """Compile and inspect the kernels that these layers take on each of :data:`TARGETS`.

    Returns:
        The inspections, and in words what failed. What cannot be compiled or read has failed.
    """
    wanted: dict[tuple[str, Any], None] = {}  # a set that keeps its order
    for target in TARGETS:
        for problem in (i.problem for i in layers if i.problem):
            auto = settings.Settings("auto", None)
            route = walk(problem, capability_of_target(target), auto).route
            if route is not None and route.pick is not None:
                wanted[target, route.pick.config] = None
    found: list[Inspection] = []
    try:
        for target, config in tables.track(wanted, "compiling kernels", len(wanted)):
            found.append(inspect_kernel(config, target))
    except RuntimeError as error:
        return found, [f"not inspected: {error}"]
    return found, [
        f"gate failed: {i.target} {i.kernel}: {why}" for i in found for why in i.failures
    ]


@torch.no_grad()
def time_layers(calls: Sequence[Call], layers: Sequence[LayerResult]) -> Iterator[Timing]:
    """Time each distinct GEMM of the quantised layers on the GPU: ours, bf16, row-wise FP8."""
    distinct: dict[tuple[int, int, int], Call] = {}
    for call, layer in zip(calls, layers, strict=True):
        if layer.problem is not None:
            distinct.setdefault((layer.m, layer.n, layer.k), call)
    for size, call in tables.track(distinct.items(), "timing", len(distinct)):
        for impl, (times, y) in _measure(_implementations(call)).items():
            if y is None:
                yield Timing(impl, *size)
                continue
            error = near_lossless(y, call.y).rel_l2
            yield Timing(impl, *size, statistics.median(times), min(times), max(times), error)


def _implementations(call: Call) -> dict[str, Callable[[], Any]]:
    """The GEMM of a layer alone, on activations that are already quantised, by name."""
    weight, bias = call.linear.weight.detach(), call.linear.bias
    wq, sw = quantize_fp8(weight)
    xq, sx = quantize_fp8_activations(call.x)
    row, column = sx[:, None], sw[None, :]
    bf16 = torch.bfloat16
    return {
        "cute_fp8": lambda: gemm(xq, sx, wq, sw, bias),
        "torch_bf16": lambda: torch.nn.functional.linear(call.x, weight, bias),
        "torch_rowwise": lambda: torch._scaled_mm(
            xq, wq.t(), scale_a=row, scale_b=column, bias=bias, out_dtype=bf16
        ),
    }


def _measure(
    implementations: dict[str, Callable[[], Tensor]],
) -> dict[str, tuple[list[float], Tensor | None]]:
    """Microseconds per call of each replay, and the result that was timed; None if torch refuses.

    Replays take turns, so that a drift of clocks meets all implementations alike.
    """
    graphs = {}
    results: dict[str, tuple[list[float], Tensor | None]] = {}
    for name, function in implementations.items():
        results[name] = [], None
        try:
            function()  # compiles, and makes what cannot be made during a capture
        except RuntimeError:
            continue
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS):
                y = function()
        results[name] = [], y
    for replay in range(-3, REPLAYS):  # the first three warm up
        for name, graph in graphs.items():
            us = gpu_us(graph.replay)
            if replay >= 0:
                results[name][0].append(us / CALLS)
    return results


def _explanations(layers: Sequence[LayerResult]) -> list[str]:
    """Once for each route that was taken, how the dispatch table came to it."""
    texts: dict[str, str] = {}
    for layer in layers:
        if layer.route is not None:
            texts.setdefault(layer.route, str(layer.explanation))
    return list(texts.values())


def _summary(
    layers: Sequence[LayerResult],
    similarities: Similarities,
    inspections: Sequence[Inspection],
    seconds: float,
) -> str:
    judged = [i.verdict.passed for i in layers if i.verdict is not None]
    passed = sum(not i.failures for i in inspections)
    return (
        f"{sum(judged)} of {len(judged)} FP8 layers near-lossless, "
        f"{len(layers) - len(judged)} not quantised; "
        f"similarities within {similarities.largest_difference:.4f}; "
        f"{passed} of {len(inspections)} kernels pass all gates; {seconds:.0f} s"
    )


def _write(json_path: str | None, data: dict[str, object]) -> None:
    if json_path is None:
        return
    text = json.dumps(data, indent=2)
    if json_path == "-":
        print(text)
    else:
        Path(json_path).write_text(text + "\n", encoding="utf-8")


def _say(what: str) -> None:
    """One line of progress, on stderr."""
    Console(stderr=True).print(f"[dim]{what} ...[/]")


def _nothing(*_: object) -> None:
    """Show nothing."""
