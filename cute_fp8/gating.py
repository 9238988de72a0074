"""Gate and up projections of a gated MLP as one weight: channels alternate in blocks of 8.

``g0..7, u0..7, g8..15, u8..15, ...``: the order in which one GEMM kernel, normal or swapped, has a
gate and its up in the same lane's registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_fp8.arguments import check_tensor
from cute_fp8.kernels.config import PIECE

#: Consecutive channels that are gate, then up.
GATE_BLOCK = PIECE


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """The weight of :func:`cute_fp8.gemm_gated` from those of its two projections.

    Scales and biases, which also have a row per channel, are interleaved by the same call;
    e8m0 scales while they are row-major, before :func:`cute_fp8.to_blocked`.

    Args:
        gate, up: ``[channels, ...]`` each, of one shape, dtype and device; channels a multiple of
            8.

    Returns:
        ``[2 * channels, ...]``.

    Raises:
        TypeError: no tensors, or two dtypes.
        ValueError: two shapes or devices, or a number of channels that is no multiple of 8.
    """
    for name, tensor in (("gate", gate), ("up", up)):
        check_tensor(name, tensor)
    if up.dtype != gate.dtype:
        raise TypeError(f"up: got {up.dtype}, must be {gate.dtype} as gate is")
    if up.shape != gate.shape:
        raise ValueError(f"up: got shape {tuple(up.shape)}, must be {tuple(gate.shape)} as in gate")
    if up.device != gate.device:
        raise ValueError(f"up: got device {up.device}, must be {gate.device} as gate is")
    if gate.dim() == 0 or gate.shape[0] % GATE_BLOCK:
        raise ValueError(
            f"gate: got shape {tuple(gate.shape)}, must have a multiple of {GATE_BLOCK} channels"
        )
    # Bytes, because not every torch operation is defined for float8 on every device.
    is_float8 = gate.element_size() == 1
    blocks = [
        (t.view(torch.uint8) if is_float8 else t).reshape(-1, GATE_BLOCK, *t.shape[1:])
        for t in (gate, up)
    ]
    return torch.stack(blocks, dim=1).flatten(0, 2).view(gate.dtype)


def split_gate_up(y: Tensor) -> tuple[Tensor, Tensor]:
    """The gate and up columns ``[M, N/2]`` of interleaved ones ``[M, N]``."""
    blocks = y.shape[-1] // (2 * GATE_BLOCK)
    gate, up = y.reshape(*y.shape[:-1], blocks, 2, GATE_BLOCK).unbind(-2)
    return gate.flatten(-2), up.flatten(-2)
