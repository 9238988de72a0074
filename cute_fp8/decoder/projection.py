"""The projections of a decoder layer's attention half: for few tokens one launch each, of
``kernels/projection.py``, else two.

    q|k|v    RMSNorm and quantisation, GEMM (+ bias)
    o        quantisation of attention's output, GEMM (+ residual)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_fp8 import gpus, settings
from cute_fp8.api import gemm
from cute_fp8.arguments import is_plain
from cute_fp8.build import compiler
from cute_fp8.decoder.lookup import kernel_of
from cute_fp8.decoder.problem import MOST_PROJECTED, may_be_few, projection_problem
from cute_fp8.decoder.weights import Projection
from cute_fp8.gemms.ops import as_bytes
from cute_fp8.gemms.problem import E4M3
from cute_fp8.producers import quantize_input, rmsnorm_quantize
from cute_fp8.workspace import unshared


class Projected(NamedTuple):
    """The output ``[M, N]``, and the codes and scales that were multiplied."""

    y: Tensor
    codes: Tensor
    scales: Tensor


def norm_project(rows: Tensor, norm: Tensor, eps: float, w: Projection, variant: str) -> Projected:
    """``rmsnorm(rows) @ w.T + bias`` of rows ``[M, K]``."""
    return _project(rows, norm, eps, w, None, variant)


def few(rows: Tensor, variant: str) -> bool:
    """Whether there may be a kernel for rows ``[M, K]``, as far as tracing can know."""
    return rows.is_cuda and variant == "per_token" and may_be_few(rows.shape[0], MOST_PROJECTED)


def project(rows: Tensor, w: Projection, residual: Tensor) -> Projected:
    """``rows @ w.T + residual`` of few rows ``[M, K]``, quantised per token."""
    return _project(rows, None, 0.0, w, residual, "per_token")


def _project(
    rows: Tensor,
    norm: Tensor | None,
    eps: float,
    w: Projection,
    residual: Tensor | None,
    variant: str,
) -> Projected:
    """In one launch where there is a kernel, or in two.

    A pinned configuration is one of GEMMs: it is obeyed in two.
    """
    if not few(rows, variant):
        return in_parts(rows, norm, eps, w, residual, variant)
    plain = is_plain((rows, norm, *w, residual))
    operands = (rows, norm, as_bytes(w.codes), w.scales, w.bias, residual, eps)
    if plain:
        kernel = _kernel(*operands[:6])
        if kernel is None:
            return in_parts(rows, norm, eps, w, residual, variant)
        return _launch(kernel, *operands)
    # Under tracing nobody knows the kernel; the op finds it when it runs.
    y, codes, scales = torch.ops.cute_fp8.projection(*operands)
    return Projected(y, codes.view(E4M3), scales)


def in_parts(
    rows: Tensor,
    norm: Tensor | None,
    eps: float,
    w: Projection,
    residual: Tensor | None,
    variant: str,
) -> Projected:
    """The same in two launches."""
    if norm is None:
        codes, scales = quantize_input(rows, variant)
    else:
        mx = variant == "mxfp8"
        codes, scales = rmsnorm_quantize(rows, norm, eps, variant=variant, blocked=mx)
    return multiplied(codes, scales, w, residual, rows.dtype)


def multiplied(
    codes: Tensor, scales: Tensor, w: Projection, residual: Tensor | None, dtype: torch.dtype
) -> Projected:
    """The GEMM of what has been quantised."""
    y = gemm(codes, scales, w.codes, w.scales, w.bias, residual=residual, out_dtype=dtype)
    assert isinstance(y, Tensor)  # no pair: dtype is none of MXFP8 outputs
    return Projected(y, codes, scales)


def _kernel(
    rows: Tensor,
    norm: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
) -> compiler.Kernel | None:
    if settings.current().choice is not None:
        return None
    (m, k), n, device = rows.shape, codes.shape[0], rows.device
    dtypes = [None if t is None else t.dtype for t in (norm, bias)]
    added = residual is not None
    return kernel_of(
        "projection",
        (m, n, k, rows.dtype, *dtypes, added, device),
        lambda: projection_problem(m, n, k, device, rows.dtype, *dtypes, residual=added),
    )


def _launch(
    kernel: compiler.Kernel,
    rows: Tensor,
    norm: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
) -> Projected:
    m, device = rows.shape[0], rows.device
    y = torch.empty((m, codes.shape[0]), dtype=rows.dtype, device=device)
    made = (
        torch.empty(rows.shape, dtype=E4M3, device=device),
        torch.empty(m, dtype=torch.float32, device=device),
    )
    with torch.cuda.device(device):
        kernel(
            rows,
            norm,
            codes.view(E4M3),
            scales,
            bias,
            residual,
            *made,
            y,
            eps,
            gpus.sm_count(device),
        )
    return Projected(y, *made)


@torch.library.custom_op(
    "cute_fp8::projection",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor? norm, Tensor codes, Tensor scales, Tensor? bias, Tensor? residual, "
        "float eps) -> (Tensor, Tensor, Tensor)"
    ),
)
def _op(
    x: Tensor,
    norm: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A projection of few tokens; codes as bytes."""
    operands = (x, norm, codes, scales, bias, residual)
    kernel = _kernel(*operands) if x.is_cuda else None
    if kernel is not None:
        made = _launch(kernel, *operands, eps)
    else:
        w = Projection(codes.view(E4M3), scales, bias)
        with unshared():  # as the GEMM's own op
            made = in_parts(x, norm, eps, w, residual, "per_token")
    return made.y, as_bytes(made.codes), made.scales


@_op.register_fake
def _(x: Tensor, norm: Tensor | None, codes: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape
    return (
        x.new_empty((m, codes.shape[0])),
        x.new_empty((m, k), dtype=torch.uint8),
        x.new_empty(m, dtype=torch.float32),
    )
