"""A decoder layer on FP8 weights, many tokens at a time: ten launches, with MXFP8 nine.

    1  rmsnorm_quantize        6   gemm (o, + residual)
    2  gemm (q|k|v)            7   rmsnorm_quantize
    3  rope_append             8   gemm_gated (gate|up); MXFP8: codes and scales, too
    4  attention               9   quantize, not with MXFP8
    5  attention_out_quantize  10  gemm (down, + residual)

Attention is torch's. Each of the others is launched while the one before ends, where the GPU can do
that. With few tokens the last four are one launch (:mod:`cute_fp8.decoder.mlp`), where there is a
kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_fp8.api import gemm
from cute_fp8.arguments import check_aligned, refuse_grad
from cute_fp8.decoder import mlp
from cute_fp8.decoder.kv_cache import KVCache
from cute_fp8.decoder.rope import RopeInputs, check_rotation, rope_append
from cute_fp8.decoder.weights import DecoderWeights, Projection
from cute_fp8.problem import OUT_DTYPES
from cute_fp8.producers import attention_out_quantize, rmsnorm_quantize

Quantised = tuple[Tensor, Tensor]


class MlpIntermediates(NamedTuple):
    """What the MLP half made: codes and scales of the norm and of the product, and the product in
    x's dtype (None where it exists as codes only).
    """

    normed: Quantised
    product: Tensor | None
    product_quantised: Quantised


class Intermediates(NamedTuple):
    """What a decoder block made, in the order in which it did."""

    normed: Quantised
    qkv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attention: Tensor
    attention_quantised: Quantised
    hidden: Tensor
    mlp: MlpIntermediates


def decoder_block(
    x: Tensor,
    weights: DecoderWeights,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any = None,
    *,
    attention_mask: Tensor | None = None,
    layer: int = 0,
    return_intermediates: bool = False,
) -> Any:
    """One pre-norm decoder layer: attention and a gated MLP, each added to x.

    Norms, rotation and attention round as Hugging Face's Llama and Qwen do; a residual is added
    in fp32 before a GEMM's one rounding.

    Args:
        x: ``[B, S, hidden]`` bf16, fp16 or fp32; copied first if it is not contiguous.
        weights: from :class:`DecoderBlock` or :class:`DecoderWeights`.
        position_embeddings: cos and sin of the S tokens, ``[B or 1, S, head_dim]``, in x's dtype.
        cache: a :class:`KVCache`, which is appended to; or a cache of transformers, whose
            ``update`` is called; or None for attention among the S tokens.
        attention_mask: as ``scaled_dot_product_attention`` takes it; then nothing else decides
            what is attended to. By default what ``weights.config.causal`` says.
        layer: the number that a cache of transformers knows the layer by.
        return_intermediates: return :class:`Intermediates`, too.

    Returns:
        ``[B, S, hidden]`` in x's dtype.

    Raises:
        TypeError, ValueError: an argument breaks a rule above, or the cache is too small; raised
            before any launch, and the cache is as it was.
        RuntimeError: an input requires grad while grad mode is on.
    """
    cos, sin = _check(x, weights, position_embeddings, cache, attention_mask)
    config = weights.config
    batch, tokens, hidden = x.shape
    rows = x.reshape(batch * tokens, hidden)
    normed = _normed(rows, weights.input_norm, weights)
    qkv = _gemm(normed, weights.qkv, x.dtype).view(batch, tokens, config.columns.columns)
    inputs = RopeInputs(qkv, cos, sin, weights.q_norm, weights.k_norm)
    slots = cache.slots(tokens) if isinstance(cache, KVCache) else None
    q, k, v = rope_append(inputs, config.columns, config.eps, slots)
    keys, values = k, v
    if isinstance(cache, KVCache):
        keys, values = cache.filled(tokens)
        cache.length += tokens
    elif cache is not None:
        keys, values = cache.update(k, v, layer)
    attended = attention(q, keys, values, config.causal, attention_mask)
    codes = attention_out_quantize(attended, **_kind(weights))
    after = _gemm(codes, weights.o, x.dtype, rows)
    y, made = _mlp(after, weights)
    y = y.view(x.shape)
    if not return_intermediates:
        return y
    return y, Intermediates(normed, qkv, q, k, v, attended, codes, after, made)


def decoder_mlp(x: Tensor, weights: DecoderWeights, *, return_intermediates: bool = False) -> Any:
    """The second half of a decoder layer: norm, gated MLP, added to x ``[..., hidden]``.

    Args:
        return_intermediates: return :class:`MlpIntermediates`, too.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`decoder_block`.
    """
    _check_weights(weights)
    _check_x(x, weights)
    y, made = _mlp(x.reshape(-1, weights.config.hidden), weights)
    y = y.view(x.shape)
    return (y, made) if return_intermediates else y


def _mlp(rows: Tensor, weights: DecoderWeights) -> tuple[Tensor, MlpIntermediates]:
    m = mlp.mlp(rows, weights)
    made = ((m.codes, m.scales), m.product, (m.product_codes, m.product_scales))
    return m.y, MlpIntermediates(*made)


def _gemm(
    x: Quantised, w: Projection, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    y = gemm(*x, w.codes, w.scales, w.bias, residual=residual, out_dtype=dtype)
    assert isinstance(y, Tensor)
    return y


def _kind(weights: DecoderWeights) -> dict[str, Any]:
    """How a producer quantises for these weights."""
    if weights.config.variant == "mxfp8":
        return {"variant": "mxfp8", "blocked": True}
    return {}


def _normed(rows: Tensor, norm: Tensor, weights: DecoderWeights) -> Quantised:
    codes, scales = rmsnorm_quantize(rows, norm, weights.config.eps, **_kind(weights))
    return codes, scales


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of q ``[B, S, H, D]`` to k and v ``[B, heads of keys, L, D]``.

    If causal, the S queries are the last of the L tokens.

    Returns:
        ``[B, H, S, D]``.
    """
    batch, tokens, heads, dim = q.shape
    keys, length = k.shape[1], k.shape[2]
    if tokens == 1 and mask is None:
        # All that a group of heads attends to is the same: they are a group of queries.
        o = F.scaled_dot_product_attention(q.view(batch, keys, heads // keys, dim), k, v)
        return o.reshape(batch, heads, 1, dim)
    grouped = heads != keys
    q = q.transpose(1, 2)
    if mask is not None:
        return _masked(q, k, v, mask)
    if not causal or length == tokens:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    # Its import takes a second.
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(tokens, length)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of ``[B, heads, tokens, D]`` under a mask, with which no fast kernel has groups."""
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.shape[2] == 1 and mask.dim() == 4 and mask.shape[1] == 1:
        # All that a group of heads attends to is the same: they are a group of queries.
        queries = q.reshape(q.shape[0], k.shape[1], group, q.shape[3])
        o = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)
        return o.reshape(q.shape)
    k, v = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


# ------------------------------------------------------------------------------------- checks


def _check(
    x: Tensor,
    weights: DecoderWeights,
    embeddings: tuple[Tensor, Tensor],
    cache: Any,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Everything that a later launch might refuse; returns cos and sin as they are read."""
    _check_weights(weights)
    _check_x(x, weights)
    if x.dim() != 3:
        raise ValueError(f"x: got {x.dim()} dimensions, must be 3-D [B, S, hidden]")
    config, (batch, tokens, _) = weights.config, x.shape
    for name in ("q_norm", "k_norm"):
        norm = getattr(weights, name)
        if norm is not None and norm.dtype != x.dtype:
            raise TypeError(f"{name}: got {norm.dtype}, must be {x.dtype} as x is")
    rotation = check_rotation(embeddings, batch, tokens, config.head_dim, x)
    if isinstance(cache, KVCache):
        cache.check(x, config.columns)
    elif cache is not None and not callable(getattr(cache, "update", None)):
        got = type(cache).__name__
        raise TypeError(f"cache: got {got}, must be a KVCache, or have an update method")
    if mask is not None:
        if not isinstance(mask, Tensor):
            got = type(mask).__name__  # type: ignore[unreachable]
            raise TypeError(f"attention_mask: got {got}, must be a torch.Tensor")
        if mask.device != x.device:
            raise ValueError(
                f"attention_mask: got device {mask.device}, must be {x.device} as x is"
            )
    return rotation


def _check_weights(weights: DecoderWeights) -> None:
    if not isinstance(weights, DecoderWeights):
        raise TypeError(f"weights: got {type(weights).__name__}, must be DecoderWeights")


def _check_x(x: Tensor, weights: DecoderWeights) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, must be a torch.Tensor")
    if x.dtype not in OUT_DTYPES:
        raise TypeError(f"x: got {x.dtype}, must be bfloat16, float16 or float32")
    hidden = weights.config.hidden
    if x.dim() == 0 or x.shape[-1] != hidden:
        raise ValueError(f"x: got shape {tuple(x.shape)}, must be [..., {hidden}]")
    if x.device != weights.device:
        raise ValueError(f"x: got device {x.device}, must be {weights.device} as the weights are")
    if x.is_contiguous():  # else it is copied
        check_aligned("x", x)
    refuse_grad("x", x)
