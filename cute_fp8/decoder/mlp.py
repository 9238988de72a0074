"""The MLP half of a decoder layer: for few tokens one launch of ``kernels/mlp.py``, else four."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_fp8 import gpus, settings
from cute_fp8.api import gemm_gated
from cute_fp8.arguments import is_plain
from cute_fp8.build import compiler
from cute_fp8.decoder.lookup import kernel_of
from cute_fp8.decoder.problem import MOST_TOKENS, may_be_few, mlp_problem
from cute_fp8.decoder.projection import multiplied
from cute_fp8.decoder.weights import DecoderWeights, Projection
from cute_fp8.gemms.ops import as_bytes
from cute_fp8.gemms.problem import E4M3
from cute_fp8.kernels.mlp_config import WORKSPACE_WORDS
from cute_fp8.producers import quantize_input, rmsnorm_quantize
from cute_fp8.workspace import unshared, workspace


class MlpResult(NamedTuple):
    """The output ``[M, hidden]``, and what was made on the way."""

    y: Tensor
    codes: Tensor  # of the norm
    scales: Tensor
    product: Tensor | None  # [M, ffn]; None where it exists as codes only
    product_codes: Tensor
    product_scales: Tensor


def mlp(rows: Tensor, weights: DecoderWeights) -> MlpResult:
    """The MLP half of rows ``[M, hidden]``: in one launch where there is a kernel, or in parts.

    A pinned configuration is one of GEMMs: it is obeyed in parts.
    """
    c, gate_up, down = weights.config, weights.gate_up, weights.down
    parts = (weights.mlp_norm, c.eps, gate_up, down, c.variant)
    biased = gate_up.bias is not None or down.bias is not None
    if biased or c.variant != "per_token" or not _few(rows):
        return in_parts(rows, *parts)
    plain = is_plain((rows, weights.mlp_norm, *gate_up, *down))
    kernel = _kernel(rows, weights.mlp_norm, c.ffn) if plain else None
    if plain and kernel is None:
        return in_parts(rows, *parts)
    operands = (
        rows,
        weights.mlp_norm,
        as_bytes(gate_up.codes),
        gate_up.scales,
        as_bytes(down.codes),
        down.scales,
        c.eps,
    )
    if kernel is not None:
        return _launch(kernel, *operands)
    # Under tracing nobody knows the kernel; the op finds it when it runs.
    y, codes, scales, product, product_codes, product_scales = torch.ops.cute_fp8.mlp(*operands)
    codes, product_codes = (t.view(E4M3) for t in (codes, product_codes))
    return MlpResult(y, codes, scales, product, product_codes, product_scales)


def in_parts(
    rows: Tensor, norm: Tensor, eps: float, gate_up: Projection, down: Projection, variant: str
) -> MlpResult:
    """The same in four launches; with MXFP8 in three."""
    kind: dict[str, Any] = {"variant": variant, "blocked": variant == "mxfp8"}
    xq, sx = rmsnorm_quantize(rows, norm, eps, **kind)
    operands = (xq, sx, gate_up.codes, gate_up.scales, gate_up.bias)
    product: Any = None
    if variant == "mxfp8" and rows.dtype is torch.bfloat16:
        codes: Any = gemm_gated(*operands, out_dtype=E4M3)
    else:
        product = gemm_gated(*operands, out_dtype=rows.dtype)
        codes = quantize_input(product, variant)
    q, s = codes
    y = multiplied(q, s, down, rows, rows.dtype).y
    return MlpResult(y, xq, sx, product, q, s)


def _few(rows: Tensor) -> bool:
    """Whether there may be a kernel, as far as tracing can know."""
    return rows.is_cuda and may_be_few(rows.shape[0], MOST_TOKENS)


def _kernel(rows: Tensor, norm: Tensor, ffn: int) -> compiler.Kernel | None:
    (m, hidden), dtype, device = rows.shape, rows.dtype, rows.device
    if settings.current().choice is not None:
        return None
    return kernel_of(
        "decoder_mlp",
        (m, hidden, ffn, dtype, norm.dtype, device),
        lambda: mlp_problem(m, hidden, ffn, device, dtype=dtype, weight=norm.dtype),
    )


def _launch(
    kernel: compiler.Kernel,
    x: Tensor,
    norm: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    eps: float,
) -> MlpResult:
    m, hidden, ffn, device = *x.shape, down.shape[1], x.device

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    made = (
        empty(E4M3, m, hidden),
        empty(torch.float32, m),
        empty(x.dtype, m, ffn),
        empty(E4M3, m, ffn),
        empty(torch.float32, m),
    )
    y = torch.empty_like(x)
    with torch.cuda.device(device):
        kernel(
            x,
            norm,
            gate_up.view(E4M3),
            gate_up_scales,
            down.view(E4M3),
            down_scales,
            *made,
            y,
            workspace(device, WORKSPACE_WORDS),
            eps,
            gpus.sm_count(device),
        )
    return MlpResult(y, *made)


@torch.library.custom_op(
    "cute_fp8::mlp",
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor norm, Tensor gate_up, Tensor gate_up_scales, Tensor down, "
        "Tensor down_scales, float eps) -> Tensor[]"
    ),
)
def _op(
    x: Tensor,
    norm: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    eps: float,
) -> list[Tensor]:
    """The MLP half; codes as bytes."""
    kernel = _kernel(x, norm, down.shape[1]) if x.is_cuda else None
    with unshared():
        if kernel is not None:
            made = _launch(kernel, x, norm, gate_up, gate_up_scales, down, down_scales, eps)
        else:
            first = Projection(gate_up.view(E4M3), gate_up_scales)
            second = Projection(down.view(E4M3), down_scales)
            made = in_parts(x, norm, eps, first, second, "per_token")
    return [as_bytes(t) if t.dtype is E4M3 else t for t in made if t is not None]


@_op.register_fake
def _(x: Tensor, norm: Tensor, gate_up: Tensor, _: Any, down: Tensor, *__: Any) -> list[Tensor]:
    (m, hidden), ffn = x.shape, down.shape[1]
    scales = [x.new_empty(m, dtype=torch.float32) for _ in range(2)]
    return [
        torch.empty_like(x),
        x.new_empty((m, hidden), dtype=torch.uint8),
        scales[0],
        x.new_empty((m, ffn)),
        x.new_empty((m, ffn), dtype=torch.uint8),
        scales[1],
    ]
