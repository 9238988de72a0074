"""What all GEMMs of a shape read, and how a peer is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

#: ``call(i, bias)`` multiplies by copy i of the weight.
Call = Callable[[int, Tensor | None], Tensor]


@dataclass(frozen=True)
class Operands:
    """What all GEMMs of a shape read. Lists are by copy of the weight.

    Attributes:
        xq, sx: activation codes and their scales (MXFP8: blocked).
        codes, scales: of the weight, ``[N, K]`` row-major.
        biases, residuals: of the epilogue, or None.
        activation: its name, or None.
        one_x, one_w: the scales of tensor-wise calls, one element each.
    """

    xq: Tensor
    sx: Tensor
    codes: Sequence[Tensor]
    scales: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    residuals: Sequence[Tensor | None]
    activation: str | None
    one_x: Tensor
    one_w: Tensor
