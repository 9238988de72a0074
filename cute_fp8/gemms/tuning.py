"""Timing the model's best few configurations on the GPU at hand, and keeping the fastest.

Nothing here runs unless it is asked for. Every candidate is compiled, checked against float64 and
then timed as the sweeps do it: CUDA graphs of back-to-back calls, weights rotated out of L2, the
candidates' replays in turns, and the results checked again. What wins is kept on disk
(``winners.py``), and every later call of that very problem on such a GPU takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_fp8 import settings
from cute_fp8.build import compiler
from cute_fp8.capture import is_capturing
from cute_fp8.dispatch import explain
from cute_fp8.gemms import plan, winners
from cute_fp8.gemms.case import GemmCase, is_mx, quantized_case, sample, take
from cute_fp8.gemms.choice import Choice
from cute_fp8.gemms.problem import E4M3, GemmProblem
from cute_fp8.gemms.selection import Selection, name_of
from cute_fp8.kernels.configs import AnyGemm
from cute_fp8.progress import watched
from cute_fp8.scales import to_blocked
from cute_fp8.timing import Contender, Timer, copies_of, graph_times, rotated, time_contenders

Shape = tuple[int, int, int]

#: About how long one replay of a candidate's graph lasts.
REPLAY_US = 2000.0
#: Candidates by default.
BEST = 6


@dataclass(frozen=True)
class Timed:
    """One candidate on one shape.

    Attributes:
        us: measured; None if ``failed`` says why not.
        kept: whether it is what calls take from now on.
    """

    m: int
    n: int
    k: int
    config: str
    predicted_us: float
    us: float | None = None
    failed: str | None = None
    kept: bool = False

    def __str__(self) -> str:
        shape = f"{self.m} x {self.n} x {self.k}"
        measured = "-" if self.us is None else f"{self.us:.1f}"
        note = self.failed or ("kept" if self.kept else "")
        text = f"{shape:22} {self.config:36} predicted {self.predicted_us:8.1f} us"
        return f"{text}  measured {measured:>8} us  {note}".rstrip()


class TuningReport(list[Timed]):
    """Every candidate of every shape; prints as lines."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


@dataclass(frozen=True)
class Problem:
    """What is to be tuned: a shape's candidates, and what its epilogue is made of.

    Attributes:
        selection: what it gets now, and the ranking.
        key: its name among the winners.
        target: what its kernels are compiled for.
    """

    shape: Shape
    variant: str
    selection: Selection
    key: str
    target: str
    backend: str
    epilogue: dict[str, Any]


def autotune(
    shapes: Shape | Iterable[Shape],
    *,
    variant: str = "per_token",
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.dtype | None = None,
    residual: torch.dtype | None = None,
    activation: str | None = None,
    backend: str | None = None,
    best: int = BEST,
    timer: Timer | None = None,
) -> TuningReport:
    """Time the best few configurations of some GEMMs on the current GPU, and keep the fastest.

    Takes seconds per shape, most of them to compile; with a terminal and ``rich`` there is a
    progress bar. The GPU should have nothing else to do. Kernels that a CUDA graph holds already
    stay what they are. As every selection, it makes results depend on M: see ``use``.

    Args:
        shapes: ``(M, N, K)``, or several.
        variant: ``per_token`` or ``mxfp8``.
        out_dtype, bias, residual, activation: as in ``gemm``; bias and residual by dtype.
        backend: as in ``use``; by default the current one.
        best: how many configurations of the model's ranking to time.
        timer: times them, by default with CUDA graphs; see ``cute_fp8.timing``.

    Returns:
        What was timed, the winners marked.

    Raises:
        RuntimeError: inside a CUDA graph capture or a trace, or no candidate is right.
        ValueError: a GPU, an output or a number that cannot be tuned, or what ``gemm`` refuses.
    """
    _refuse_tracing()
    if out_dtype is E4M3:
        raise ValueError(
            f"out_dtype: got {E4M3}, must be torch.bfloat16, torch.float16 or torch.float32 to tune"
        )
    if best < 1:
        raise ValueError(f"best: got {best}, must be at least 1")
    epilogue = {
        "out_dtype": out_dtype,
        "bias": bias,
        "residual": residual,
        "activation": activation,
    }
    problems = [problem_of(shape, variant, backend, epilogue) for shape in _listed(shapes)]
    picks = {problem.shape: problem.selection.ranking[:best] for problem in problems}
    kernels = {ranked.pick.config: None for ranking in picks.values() for ranked in ranking}
    total = len(kernels) + sum(map(len, picks.values()))
    steps = _tune(problems, best, timer or partial(graph_times, replay_us=REPLAY_US))
    return TuningReport(step for step in watched(steps, "tuning", total) if step is not None)


def _refuse_tracing() -> None:
    tracing = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if tracing or is_capturing():
        where = "a trace" if tracing else "a CUDA graph capture"
        raise RuntimeError(f"autotune: got a call inside {where}, must be called before it")


def _listed(shapes: Shape | Iterable[Shape]) -> list[Shape]:
    """The shapes, each once.

    Raises:
        ValueError: something that is no ``(M, N, K)``.
    """
    items: list[Any] = list(shapes)
    if len(items) == 3 and all(isinstance(size, int) for size in items):
        items = [items]
    for shape in items:
        if not (isinstance(shape, tuple | list) and len(shape) == 3 and min(shape) > 0):
            raise ValueError(f"shapes: got {shape!r}, must be (M, N, K), all positive")
    return list(dict.fromkeys((m, n, k) for m, n, k in items))


def problem_of(
    shape: Shape, variant: str, backend: str | None, epilogue: dict[str, Any]
) -> Problem:
    """A shape on the GPU at hand, whatever is pinned.

    Raises:
        ValueError: no CuTe kernel serves it here, or ``gemm`` refuses it.
    """
    m, n, k = shape
    with settings.unpinned():
        explanation = explain(
            "gemm", m=m, n=n, k=k, variant=variant, backend=backend, device=_device(), **epilogue
        )
    route = explanation.route
    if route is None or route.selection is None or route.target is None:
        took = "no route" if route is None else route.entry.name
        raise ValueError(
            f"autotune: got {m}x{n}x{k} on {explanation.problem.device} ({took}), must be a GPU "
            "whose gemm is a CuTe kernel"
        )
    assert isinstance(explanation.problem, GemmProblem)
    key = name_of(explanation.problem)
    backend = route.entry.backend
    return Problem(shape, variant, route.selection, key, route.target, backend, epilogue)


def _tune(problems: Sequence[Problem], best: int, timer: Timer) -> Iterator[Timed | None]:
    """Yield None for each kernel that is compiled, then each candidate once its shape is timed.

    Each shape's winner is kept at once.
    """
    yield from compile_ahead(problems, best)
    for problem in problems:
        gpu = problem.selection.gpu
        candidates = problem.selection.ranking[:best]
        found = contenders(problem, [ranked.pick.choice for ranked in candidates])
        rows = list(time_contenders(found, timer))
        timed = [i for i, row in enumerate(rows) if "us" in row]
        if not timed:
            reasons = "; ".join(f"{row['impl']}: {row['failed']}" for row in rows)
            raise RuntimeError(f"autotune: got no candidate that works ({reasons})")
        fastest = min(timed, key=lambda i: rows[i]["us"])  # of equals the model's first
        choice = candidates[fastest].pick.choice
        winners.keep(gpu.name, {problem.key: (choice, rows[fastest]["us"])})
        plan.forget()
        for i, (ranked, row) in enumerate(zip(candidates, rows, strict=True)):
            name, predicted = ranked.pick.name, round(ranked.prediction.us, 1)
            us, failed = row.get("us"), row.get("failed")
            yield Timed(*problem.shape, name, predicted, us, failed, i == fastest)


def contenders(problem: Problem, choices: Sequence[Choice]) -> list[Contender]:
    """Every choice as a contender on the same data, with the weight's rotated copies shared."""
    m, n, k = problem.shape
    case = quantized_case(problem.variant, m, n, k, device=_device(), **problem.epilogue)
    rows = sample(m, case.xq.device)
    exact = (case if rows is None else take(case, rows)).exact()[0]
    copies = copies_of(case.wq)
    weights = _rotated_cases(case, copies)
    return [
        Contender(
            choice.name, _pinned(problem.backend, choice, weights), copies, exact, rows=rows, m=m
        )
        for choice in choices
    ]


def compile_ahead(problems: Sequence[Problem], best: int) -> Iterator[None]:
    """Compile the best few kernels of all problems, in parallel where the disk takes them.

    Yields None for each. What does not compile now will say why when it is checked.
    """
    by_target: dict[str, dict[AnyGemm, None]] = {}
    for problem in problems:
        kernels = by_target.setdefault(problem.target, {})
        kernels.update((ranked.pick.config, None) for ranked in problem.selection.ranking[:best])
    for target, kernels in by_target.items():
        with suppress(RuntimeError):
            for _ in compiler.fill_disk([*kernels], target):
                yield None


def _rotated_cases(case: GemmCase, copies: int) -> list[GemmCase]:
    """The case with its output channels moved on by i, for each copy i."""
    scales = rotated(case.sw, copies)
    sx = case.sx
    if is_mx(sx):
        sx, scales = to_blocked(sx), [to_blocked(scale) for scale in scales]
    return [
        replace(
            case,
            sx=sx,
            wq=wq,
            sw=scales[i],
            bias=None if case.bias is None else case.bias.roll(i, 0),
            residual=None if case.residual is None else case.residual.roll(i, 1),
        )
        for i, wq in enumerate(rotated(case.wq, copies))
    ]


def _pinned(backend: str, choice: Choice, weights: Sequence[GemmCase]) -> Callable[[int], Tensor]:
    def call(i: int) -> Tensor:
        with settings.use(backend=backend, config=choice):
            return weights[i].run()

    return call


def _device() -> torch.device:
    here = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if here else torch.device("cpu")
