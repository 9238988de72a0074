"""The GEMMs that ours are measured against. Producers and decoder parts have no peers here yet:
Inductor's (``inductor``, ``inductor_bf16``, ``inductor_w8a8``) come with the first of ours.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

import torch
from torch import Tensor
from torch.nn import functional as F

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


def rowwise(o: Operands, fast: bool) -> Call:
    """Row-wise ``torch._scaled_mm``. Views are made here: their host time is not its own."""
    rows, columns = o.sx.view(-1, 1), [scale.view(1, -1) for scale in o.scales]
    return _scaled_mm(o, rows, columns, fast)


def tensorwise(o: Operands, fast: bool) -> Call:
    """Tensor-wise ``torch._scaled_mm``."""
    return _scaled_mm(o, o.one_x, [o.one_w] * len(o.codes), fast)


def _scaled_mm(o: Operands, sx: Tensor, scales: Sequence[Tensor], fast: bool) -> Call:
    weights = [codes.t() for codes in o.codes]

    def call(i: int, bias: Tensor | None) -> Tensor:
        return torch._scaled_mm(
            o.xq,
            weights[i],
            scale_a=sx,
            scale_b=scales[i],
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    return call


def mxfp8(o: Operands) -> Call:
    """``F.scaled_mm`` with a scale for every 32 along K, in 128x4 blocks."""
    weights = [codes.t() for codes in o.codes]

    def call(i: int, bias: Tensor | None) -> Tensor:
        recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
        return F.scaled_mm(
            o.xq, weights[i], o.sx, recipe, o.scales[i], recipe, swizzle, swizzle, bias
        )

    return call


def quack(o: Operands) -> Call | None:
    """QuACK's GEMM of the same codes with one scale in all, autotuned; None if not installed.

    Its first call of a shape compiles and times all its configurations.
    """
    if importlib.util.find_spec("quack") is None:
        return None
    weights = [codes.t() for codes in o.codes]
    alpha = float(o.one_x * o.one_w)

    def call(i: int, bias: Tensor | None) -> Tensor:
        from quack.gemm_interface import gemm

        y: Tensor = gemm(
            o.xq, weights[i], bias=bias, alpha=alpha, out_dtype=torch.bfloat16, tuned=True
        )
        return y

    return call


def quack_version() -> str:
    """For the result's meta."""
    try:
        return metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return "not installed"


def names(variant: str) -> list[str]:
    """The peers' names in result files."""
    if variant == "mxfp8":
        return ["torch_bf16", "torch_mxfp8"]
    scaled = [f"torch_{kind}{fast}" for fast in ("", "_fast") for kind in ("rowwise", "tensorwise")]
    quack_here = importlib.util.find_spec("quack") is not None
    return ["torch_bf16", *scaled, *(["quack"] if quack_here else [])]
