"""A linear layer's weight as codes and scales, in the forms that :class:`cute_fp8.Linear` has."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_fp8.arguments import misaligned_by
from cute_fp8.capture import is_capturing
from cute_fp8.gemms.problem import E8M0
from cute_fp8.numerics import MX_BLOCK, quantize_fp8
from cute_fp8.producers import quantize_mxfp8
from cute_fp8.scales import blocked_numel, from_blocked


def aligned(codes: Tensor) -> Tensor:
    """Codes at an address that a GEMM takes: as they are, or, from within a file, a copy."""
    return codes.clone() if misaligned_by(codes) else codes


def quantize_weight(weight: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    """Codes ``[N, K]``, and scales as :class:`Linear` has them. Reads values.

    Raises:
        TypeError: no bf16, fp16 or fp32 weight.
        ValueError: K no multiple, or a NaN or Inf in the weight.
        RuntimeError: called while a CUDA graph is being captured.
    """
    weight = weight.detach()
    if variant == "per_token":
        codes, scale = quantize_fp8(weight)
        return codes, scale.view(-1, 1)
    if is_capturing():
        raise RuntimeError(
            "from_linear: called during CUDA graph capture, must be called before it (reads values)"
        )
    codes, scale = quantize_mxfp8(weight)
    bad = (scale.view(torch.uint8) == 0xFF).any(dim=1)
    if bool(bad.any()):
        channel = int(bad.nonzero()[0])
        raise ValueError(f"w: got a NaN or Inf in output channel {channel}, must be finite")
    return codes, scale


def module_scale(scale: Tensor, n: int, k: int) -> Tensor:
    """Scales of ``[N, K]`` codes in the form that :class:`Linear` keeps, of their usual forms.

    Raises:
        TypeError: no fp32 or e8m0 scales.
        ValueError: a shape that does not belong to N and K.
    """
    got = f"scale: got shape {tuple(scale.shape)}"
    if scale.dtype is torch.float32:
        if scale.numel() == 1:
            return scale.reshape(1, 1).expand(n, 1).contiguous()
        if scale.shape not in ((n,), (n, 1), (1, n)):
            raise ValueError(f"{got}, must be ({n},), ({n}, 1), (1, {n}) or one element")
        return scale.reshape(n, 1)
    if scale.dtype is E8M0:
        columns = k // MX_BLOCK
        if scale.dim() == 1 and scale.numel() == blocked_numel(n, columns):
            return from_blocked(scale, n, columns)
        if scale.shape != (n, columns):
            raise ValueError(f"{got}, must be ({n}, {columns}) or blocked")
        return scale.contiguous()
    raise TypeError(f"scale: got {scale.dtype}, must be torch.float32 or torch.float8_e8m0fnu")
