"""The tables of predicted times in ARCHS.md: the performance model on every sm_120 GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cute_fp8.dispatch import explain
from cute_fp8.gpus import GPUS, Gpu
from cute_fp8.shapes import SETS, Shape

#: Tokens of the decoding rows.
FEW = (1, 16, 64)
SHAPES: tuple[Shape, ...] = (
    *SETS["locdit"],
    *SETS["square"],
    *(shape for shape in SETS["llama8b"] if shape[0] in FEW),
)
SM120 = tuple(gpu for gpu in GPUS if gpu.capability[0] == 12)


def predicted_us(shape: Shape, variant: str, gpu: Gpu) -> float:
    """The predicted time of what the model picks, bf16 output without extras."""
    m, n, k = shape
    route = explain(m=m, n=n, k=k, variant=variant, gpu=gpu.name, backend="cute").route
    assert route is not None and route.selection is not None
    return route.selection.ranking[0].prediction.us


def rows(
    variant: str, shapes: Sequence[Shape] = SHAPES, gpus: Sequence[Gpu] = SM120
) -> Iterator[tuple[str, ...]]:
    """A table: its head, and a row per shape with microseconds per GPU."""
    yield ("M x N x K", *(gpu.name for gpu in gpus))
    for shape in shapes:
        times = (predicted_us(shape, variant, gpu) for gpu in gpus)
        yield (" x ".join(map(str, shape)), *(f"{us:.{1 if us < 100 else 0}f}" for us in times))
