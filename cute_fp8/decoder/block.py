"""A decoder layer on FP8 weights, many tokens at a time: ten launches, with MXFP8 nine.

    1  rmsnorm_quantize        6   gemm (o, + residual)
    2  gemm (q|k|v)            7   rmsnorm_quantize
    3  rope_append             8   gemm_gated (gate|up); MXFP8: codes and scales, too
    4  attention               9   quantize, not with MXFP8
    5  attention_out_quantize  10  gemm (down, + residual)

Attention is torch's. Each of the others is launched while the one before ends, where the GPU can do
that. With few tokens, where there are kernels for that, it is five launches: 1 and 2 are one, as
are 5 and 6 (:mod:`cute_fp8.decoder.projection`), and the last four
(:mod:`cute_fp8.decoder.mlp`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_fp8.arguments import check_aligned, check_tensor, refuse_grad
from cute_fp8.decoder import mlp, projection
from cute_fp8.decoder.kv_cache import KVCache
from cute_fp8.decoder.projection import Projected
from cute_fp8.decoder.rope import Heads, RopeInputs, check_rotation, rope_append
from cute_fp8.decoder.weights import DecoderWeights
from cute_fp8.gemms.problem import OUT_DTYPES
from cute_fp8.producers import attention_out_quantize

Quantised = tuple[Tensor, Tensor]
#: Tokens of a sequence up to which the heads of a group attend together.
MOST_GROUPED = 32


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
    # `reshape` would keep a view of wider rows, which no residual of a GEMM can be.
    rows = x.contiguous().view(batch * tokens, hidden)
    first = projection.norm_project(
        rows, weights.input_norm, config.eps, weights.qkv, config.variant
    )
    qkv = first.y.view(batch, tokens, config.columns.columns)
    inputs = RopeInputs(qkv, cos, sin, weights.q_norm, weights.k_norm)
    slots = cache.slots(tokens) if isinstance(cache, KVCache) else None
    grouped = not config.causal and cache is None and attention_mask is None
    # What is exported for any number of tokens would be fixed to a few by asking.
    grouped = grouped and isinstance(tokens, int) and 1 < tokens <= MOST_GROUPED
    q, k, v = rope_append(inputs, config.columns, config.eps, slots, grouped)
    keys, values = k, v
    if isinstance(cache, KVCache):
        keys, values = cache.filled(tokens)
    elif cache is not None:
        keys, values = _updated(cache, k, v, layer, attention_mask)
    if grouped:
        attended = group_attention(q, keys, values)
    else:
        attended = attention(q, keys, values, config.causal, attention_mask)
    second = _output(attended, rows, weights)
    y, made = _mlp(second.y, weights)
    y = y.view(x.shape)
    if isinstance(cache, KVCache):
        cache.length += tokens  # now that nothing has failed
    if not return_intermediates:
        return y
    if grouped:
        q = _of_heads(q, config.columns, tokens).transpose(1, 2)
        attended = _of_heads(attended, config.columns, tokens)
    normed, codes = first[1:], second[1:]
    return y, Intermediates(normed, qkv, q, k, v, attended, codes, second.y, made)


def decoder_mlp(x: Tensor, weights: DecoderWeights, *, return_intermediates: bool = False) -> Any:
    """The second half of a decoder layer: norm, gated MLP, added to x ``[..., hidden]``.

    Args:
        return_intermediates: return :class:`MlpIntermediates`, too.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`decoder_block`.
    """
    _check_weights(weights)
    _check_x(x, weights)
    y, made = _mlp(x.contiguous().view(-1, weights.config.hidden), weights)
    y = y.view(x.shape)
    return (y, made) if return_intermediates else y


def _mlp(rows: Tensor, weights: DecoderWeights) -> tuple[Tensor, MlpIntermediates]:
    m = mlp.mlp(rows, weights)
    made = ((m.codes, m.scales), m.product, (m.product_codes, m.product_scales))
    return m.y, MlpIntermediates(*made)


def _updated(
    cache: Any, k: Tensor, v: Tensor, layer: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Append to a cache of transformers; returns the keys and values that are attended to.

    One of a fixed size gives all its room back, filled or not. With several tokens and no mask,
    transformers means that it was empty, and attention among these tokens.
    """
    keys, values = cache.update(k, v, layer)
    tokens = k.shape[2]
    if mask is None and tokens > 1 and getattr(cache, "is_compileable", False):
        return keys[:, :, :tokens], values[:, :, :tokens]
    return keys, values


def _output(attended: Tensor, rows: Tensor, weights: DecoderWeights) -> Projected:
    """The projection of attention's output ``[B, H, S, D]``, added to rows ``[B * S, hidden]``."""
    variant, w = weights.config.variant, weights.o
    if projection.few(rows, variant):
        merged = attended.transpose(1, 2)
        if merged.is_contiguous():
            return projection.project(merged.reshape(rows.shape[0], -1), w, rows)
    codes, scales = attention_out_quantize(attended, variant=variant, blocked=variant == "mxfp8")
    return projection.multiplied(codes, scales, w, rows, rows.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of q ``[B, S, H, D]`` to k and v ``[B, heads of keys, L, D]``.

    If causal, the S queries are the last of the L tokens.

    Returns:
        ``[B, H, S, D]``.
    """
    tokens, heads = q.shape[1:3]
    keys, length = k.shape[1], k.shape[2]
    grouped = heads != keys
    q = q.transpose(1, 2)
    if mask is not None:
        return _masked(q, k, v, mask)
    if tokens == 1:
        causal = False  # the last token attends to all
    if not causal or tokens == length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    # Its import takes a second.
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(tokens, length)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)


def group_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of all tokens to all, of grouped q ``[B, heads of keys, S * heads of a group, D]``.

    All that a group of heads attends to is the same: they are a group of queries. A kernel of
    attention takes 64 queries or more at a time, of which short sequences fill few.

    Returns:
        ``[B, heads of keys, S, heads of a group * D]``; a copy where attention does not leave its
        output as its queries were.
    """
    o = F.scaled_dot_product_attention(q, k, v)
    return o.unflatten(2, (k.shape[2], -1)).flatten(3)  # type: ignore[no-untyped-call]


def _of_heads(grouped: Tensor, heads: Heads, tokens: int) -> Tensor:
    """``[B, H, S, D]`` of what is grouped by heads of keys."""
    parts = grouped.reshape(grouped.shape[0], heads.keys, tokens, -1, heads.dim)
    return parts.transpose(2, 3).flatten(1, 2)


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
        _check_mask(mask, x, weights, cache)
    return rotation


def _check_mask(mask: Tensor, x: Tensor, weights: DecoderWeights, cache: Any) -> None:
    """What ``scaled_dot_product_attention`` would refuse only after the cache has been written."""
    check_tensor("attention_mask", mask)
    if mask.dtype not in (torch.bool, x.dtype):
        raise TypeError(f"attention_mask: got {mask.dtype}, must be torch.bool or {x.dtype}")
    if mask.device != x.device:
        raise ValueError(f"attention_mask: got device {mask.device}, must be {x.device} as x is")
    if torch.compiler.is_compiling():
        return  # comparing sizes would fix them
    batch, tokens, _ = x.shape
    length: int | None = tokens
    if isinstance(cache, KVCache):
        length = cache.length + tokens
    elif cache is not None:
        length = None  # which its update says
    fits = 2 <= mask.dim() <= 4
    wanted = (batch, weights.config.heads, tokens, length)[4 - mask.dim() :] if fits else ()
    pairs = zip(mask.shape, wanted, strict=fits)
    if not fits or any(w is not None and have not in (1, w) for have, w in pairs):
        text = f"[{batch}, {weights.config.heads}, {tokens}, {length or 'tokens of the cache'}]"
        raise ValueError(f"attention_mask: got shape {tuple(mask.shape)}, must broadcast to {text}")


def _check_weights(weights: DecoderWeights) -> None:
    if not isinstance(weights, DecoderWeights):
        raise TypeError(f"weights: got {type(weights).__name__}, must be DecoderWeights")


def _check_x(x: Tensor, weights: DecoderWeights) -> None:
    check_tensor("x", x)
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
