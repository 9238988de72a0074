"""Rotary embedding of a fused q|k|v projection, and the append to a KV cache: one launch.

Between a decoder block's first GEMM and its attention: queries and keys get their norm, if they
have one, and are rotated; keys and values go to the cache's next slots. Elsewhere than on GPUs that
row kernels serve it is plain torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_fp8.arguments import ALIGNMENT, is_plain, misaligned_by
from cute_fp8.build import compiler
from cute_fp8.decoder.lookup import kernel_of
from cute_fp8.decoder.problem import BlockProblem, rope_problem
from cute_fp8.dtypes import dtype_name
from cute_fp8.kernels.rope_config import HEAD_MULTIPLE, MAX_HEAD_DIM, RopeConfig


class Heads(NamedTuple):
    """How the columns of a fused projection divide: queries, keys, values, ``dim`` each."""

    queries: int
    keys: int
    dim: int

    @property
    def columns(self) -> int:
        """Of q|k|v."""
        return (self.queries + 2 * self.keys) * self.dim


class RopeInputs(NamedTuple):
    """What the kernel reads: q|k|v ``[B, S, columns]``, cos and sin ``[B or 1, S, dim]``, norms."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


def rope_append(
    inputs: RopeInputs,
    heads: Heads,
    eps: float,
    slots: tuple[Tensor, Tensor] | None,
    grouped: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys; put keys and values where attention reads them.

    Arguments are checked by the caller (:mod:`cute_fp8.decoder.block`).

    Args:
        eps: of the norms.
        slots: views ``[B, keys, S, dim]`` of a cache, which are written.
        grouped: have the heads of queries that share one of keys side by side, for every token;
            without slots.

    Returns:
        q ``[B, S, queries, dim]``, or grouped ``[B, keys, S * queries / keys, dim]``; k and v
        ``[B, keys, S, dim]``: the slots, or without any new keys, and the values where they are.
    """
    plain = is_plain((*inputs, *(slots or ())))
    if slots is None:
        rope = _rope if plain else torch.ops.cute_fp8.rope
        q, k = rope(*inputs, eps, *heads, grouped)
        return q, k, split(inputs.qkv, heads)[2].transpose(1, 2)
    append = _rope_append if plain else torch.ops.cute_fp8.rope_append
    return append(*inputs, eps, *heads, *slots), *slots


def split(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[B, S, heads, dim]``, as views."""
    counts = (heads.queries, heads.keys, heads.keys)
    parts = torch.split(qkv, [n * heads.dim for n in counts], dim=-1)
    q, k, v = (
        part.view(*qkv.shape[:2], count, heads.dim)
        for part, count in zip(parts, counts, strict=True)
    )
    return q, k, v


_ARGUMENTS = (
    "Tensor qkv, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, float eps, "
    "int queries, int keys, int dim"
)


def _rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    queries: int,
    keys: int,
    dim: int,
    grouped: bool,
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys."""
    k = qkv.new_empty((qkv.shape[0], keys, qkv.shape[1], dim))
    heads = Heads(queries, keys, dim)
    return _run(RopeInputs(qkv, cos, sin, q_norm, k_norm), heads, eps, k, None, grouped), k


@torch.library.custom_op(
    "cute_fp8::rope",
    _rope,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, bool grouped) -> (Tensor, Tensor)",
).register_fake
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    queries: int,
    keys: int,
    dim: int,
    grouped: bool,
) -> tuple[Tensor, Tensor]:
    batch, tokens = qkv.shape[:2]
    shape = (batch, tokens, queries, dim)
    if grouped:
        shape = (batch, keys, tokens * (queries // keys), dim)
    return qkv.new_empty(shape), qkv.new_empty((batch, keys, tokens, dim))


def _rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    queries: int,
    keys: int,
    dim: int,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Rotated queries; k and v are written."""
    heads = Heads(queries, keys, dim)
    return _run(RopeInputs(qkv, cos, sin, q_norm, k_norm), heads, eps, k, v)


@torch.library.custom_op(
    "cute_fp8::rope_append",
    _rope_append,
    mutates_args=("k", "v"),
    schema=f"({_ARGUMENTS}, Tensor(a!) k, Tensor(b!) v) -> Tensor",
).register_fake
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    queries: int,
    keys: int,
    dim: int,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    return qkv.new_empty((*qkv.shape[:2], queries, dim))


def _run(
    inputs: RopeInputs,
    heads: Heads,
    eps: float,
    k: Tensor,
    v: Tensor | None,
    grouped: bool = False,
) -> Tensor:
    qkv = inputs.qkv
    batch, tokens = qkv.shape[:2]
    of_group = heads.queries // heads.keys
    # As the kernel writes it: under the head of keys that they share.
    if grouped:
        q = qkv.new_empty((batch, heads.keys, tokens * of_group, heads.dim))
        places = q.view(batch, heads.keys, tokens, of_group * heads.dim)
    else:
        q = qkv.new_empty((batch, tokens, heads.queries, heads.dim))
        places = q.view(batch, tokens, heads.keys, of_group * heads.dim).transpose(1, 2)
    if q.numel() == 0:
        return q
    kernel = _kernel(inputs, heads, v is not None)
    if kernel is None:
        rotated = reference(inputs, heads, eps)
        places.copy_(rotated[0].view(batch, tokens, heads.keys, -1).transpose(1, 2))
        for place, values in zip((k, v), rotated[1:], strict=True):
            if place is not None:
                place.copy_(values)
        return q
    cos, sin = (t.expand(batch, -1, -1) for t in (inputs.cos, inputs.sin))
    with torch.cuda.device(qkv.device):
        kernel(qkv.view(batch * tokens, -1), cos, sin, *inputs[3:], places, k, v, eps)
    return q


def _kernel(inputs: RopeInputs, heads: Heads, values: bool) -> compiler.Kernel | None:
    qkv, norm = inputs.qkv, inputs.q_norm is not None

    def problem() -> BlockProblem:
        config = RopeConfig(dtype_name(qkv.dtype), heads.dim, norm, values)
        return rope_problem(qkv.shape[0] * qkv.shape[1], qkv.shape[2], config, qkv.device)

    return kernel_of("rope_append", (qkv.device, qkv.dtype, heads.dim, norm, values), problem)


def reference(inputs: RopeInputs, heads: Heads, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q ``[B, S, queries, dim]``, rotated k and v ``[B, keys, S, dim]``, in plain torch."""
    q, k, v = split(inputs.qkv, heads)
    if inputs.q_norm is not None and inputs.k_norm is not None:
        q, k = normalised(q, inputs.q_norm, eps), normalised(k, inputs.k_norm, eps)
    cos, sin = inputs.cos.unsqueeze(2), inputs.sin.unsqueeze(2)
    q, k = (t * cos + rotated_half(t) * sin for t in (q, k))
    return q, k.transpose(1, 2), v.transpose(1, 2)


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the last dimension in plain torch, rounded as Hugging Face's Llama rounds it."""
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return weight * values.to(x.dtype)


def rotated_half(x: Tensor) -> Tensor:
    """``(-high, low)`` of the halves ``(low, high)`` of the last dimension."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def check_heads(heads: Heads) -> None:
    """Raise ``ValueError`` for a head size that the kernel has no lanes for."""
    if heads.dim % HEAD_MULTIPLE or not 0 < heads.dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim: got {heads.dim}, must be a multiple of {HEAD_MULTIPLE} up to {MAX_HEAD_DIM}"
        )
    if heads.keys <= 0 or heads.queries % heads.keys:
        raise ValueError(
            f"heads: got {heads.queries} of queries and {heads.keys} of keys, "
            "must be a multiple of them"
        )


def check_rotation(
    embeddings: Any, batch: int, tokens: int, dim: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Cos and sin as ``[B or 1, S, dim]``.

    Raises:
        TypeError: no pair of tensors, or another dtype than x's.
        ValueError: a wrong shape, stride, alignment or device.
    """
    if not isinstance(embeddings, tuple | list) or len(embeddings) != 2:
        got = type(embeddings).__name__
        raise TypeError(f"position_embeddings: got {got}, must be the pair (cos, sin)")
    found = []
    for name, tensor in zip(("cos", "sin"), embeddings, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, must be a torch.Tensor")
        if tensor.dtype != like.dtype:
            raise TypeError(f"{name}: got {tensor.dtype}, must be {like.dtype} as x is")
        if tensor.device != like.device:
            raise ValueError(f"{name}: got device {tensor.device}, must be {like.device} as x is")
        shape: tuple[int, ...] = tuple(tensor.shape)
        if shape not in ((tokens, dim), (1, tokens, dim), (batch, tokens, dim)):
            wanted = f"({batch}, {tokens}, {dim}), (1, {tokens}, {dim}) or ({tokens}, {dim})"
            raise ValueError(f"{name}: got shape {shape}, must be {wanted}")
        if tensor.stride(-1) != 1 or not aligned(tensor):
            strides = tuple(tensor.stride())
            raise ValueError(f"{name}: got strides {strides}, must be 16-byte aligned rows")
        found.append(tensor.view(1, tokens, dim) if tensor.dim() == 2 else tensor)
    return found[0], found[1]


def aligned(tensor: Tensor) -> bool:
    """Whether every row of a tensor begins at a multiple of 16 bytes, its last stride being 1."""
    per_access = ALIGNMENT // tensor.element_size()
    strides = (stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    rows = [stride % per_access for stride in list(strides)[:-1]]
    return not any(rows) and not misaligned_by(tensor)
