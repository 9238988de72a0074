"""The MLP half of a decoder layer in one launch, for few tokens; kernel: ``kernels/mlp.py``."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_fp8 import compiler, settings
from cute_fp8.api import _is_plain as is_plain
from cute_fp8.cute_backend import _sm_count
from cute_fp8.decoder_weights import DecoderWeights
from cute_fp8.dispatch import select
from cute_fp8.fused import MOST_TOKENS, mlp_problem
from cute_fp8.kernels.mlp_config import WORKSPACE_WORDS
from cute_fp8.ops import as_bytes
from cute_fp8.problem import E4M3
from cute_fp8.workspace import unshared, workspace


class MlpResult(NamedTuple):
    """What the kernel writes: the output, and what it has made on the way."""

    y: Tensor  # [M, hidden]
    codes: Tensor  # of the norm
    scales: Tensor
    product: Tensor  # [M, ffn]
    product_codes: Tensor
    product_scales: Tensor


def one_launch(rows: Tensor, weights: DecoderWeights) -> MlpResult | None:
    """The MLP half of rows ``[M, hidden]``; None where it is to be launched in parts.

    A pinned configuration is one of GEMMs: it is obeyed in parts.
    """
    if not rows.is_cuda or weights.config.variant != "per_token":
        return None
    if not 0 < rows.shape[0] <= MOST_TOKENS or settings.current().choice is not None:
        return None
    kernel = _kernel(rows, weights)
    if kernel is None:
        return None
    gate_up, down = weights.gate_up, weights.down
    operands = (
        rows,
        weights.mlp_norm,
        as_bytes(gate_up.codes),
        gate_up.scales,
        as_bytes(down.codes),
        down.scales,
        weights.config.eps,
    )
    if is_plain((rows, *operands[1:6])):
        return MlpResult(*_launch(kernel, *operands))
    y, codes, scales, product, product_codes, product_scales = torch.ops.cute_fp8.mlp(*operands)
    codes, product_codes = (t.view(E4M3) for t in (codes, product_codes))
    return MlpResult(y, codes, scales, product, product_codes, product_scales)


#: By what decides them; None where the launch is in parts.
_kernels: dict[Hashable, compiler.Kernel | None] = {}


def _kernel(rows: Tensor, weights: DecoderWeights) -> compiler.Kernel | None:
    c = weights.config
    bias = weights.gate_up.bias is not None or weights.down.bias is not None
    norm = weights.mlp_norm.dtype
    return _found(rows.shape[0], c.hidden, c.ffn, rows.dtype, norm, bias, rows.device)


def _found(
    m: int,
    hidden: int,
    ffn: int,
    dtype: torch.dtype,
    norm: torch.dtype,
    bias: bool,
    device: torch.device,
) -> compiler.Kernel | None:
    key = (m, hidden, ffn, dtype, norm, bias, device, settings.current())
    if key not in _kernels:
        problem = mlp_problem(m, hidden, ffn, device, dtype=dtype, weight=norm, bias=bias)
        route, found = select(problem, settings.current()), None
        if route.fused is not None and route.target is not None:
            found = compiler.get(route.fused, route.target, device)
        _kernels[key] = found
    return _kernels[key]


def _launch(
    kernel: compiler.Kernel,
    x: Tensor,
    norm: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    eps: float,
) -> tuple[Tensor, ...]:
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
            _sm_count(device),
        )
    return y, *made


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
    (m, hidden), ffn = x.shape, down.shape[1]
    kernel = _found(m, hidden, ffn, x.dtype, norm.dtype, False, x.device)
    assert kernel is not None
    with unshared():
        made = _launch(kernel, x, norm, gate_up, gate_up_scales, down, down_scales, eps)
    return [as_bytes(t) if t.dtype is E4M3 else t for t in made]


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
