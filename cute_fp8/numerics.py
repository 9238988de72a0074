"""The reference FP8 numerics: what every kernel of this package must match bit for bit.

Two recipes, both with e4m3fn codes (largest finite value 448):

* *per row*: one fp32 scale per output channel of a weight, or per token of an activation,
  ``scale = amax(|row|) / 448``;
* *MXFP8*: one e8m0 scale (a power of two) per block of 32 elements along K, as in the OCP
  Microscaling format, but with the exponent rounded *up*, ``2**ceil(log2(amax / 448))``. The OCP
  rule ``2**(floor(log2(amax)) - 8)`` lets ``amax / scale`` approach 512 and so saturates block
  maxima.

All arithmetic is fp32 and division is IEEE division. The functions are plain torch, run on any
device and, :func:`quantize_fp8` apart, never look at values from the host.

Users call :func:`cute_fp8.quantize_fp8_activations` and :func:`cute_fp8.quantize_mxfp8` as
:mod:`cute_fp8.producers` has them: one kernel each where there is one, held to the bits that the
functions of these names give here.

One trap decides how divisions are written here: on CUDA, torch divides by a *host* scalar through
its reciprocal, which is not the IEEE quotient. Divisors are therefore always tensors on the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from cute_fp8.arguments import check_tensor, refuse_grad
from cute_fp8.capture import is_capturing
from cute_fp8.kernels.config import K_MULTIPLE
from cute_fp8.scales import blocked_numel, from_blocked, to_blocked

FP8_MAX = 448.0
"""Largest finite e4m3fn value, code 0x7E."""

MX_BLOCK = 32
"""Elements along K that share one e8m0 scale."""

_NAN_CODE = 0x7F
_E8M0_NAN = 0xFF
_MIN_SCALE = 2.0**-126  # smallest normal fp32
_MANTISSA_OF_448 = 0x600000  # 448 = 1.75 * 2**8
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHUNK = 1 << 25  # weight elements quantised at a time, so that fp32 temporaries stay near 256 MB


@torch.no_grad()
def quantize_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight with one scale per output channel. For build time: it inspects values.

    Args:
        w: ``[N, K]`` bf16, fp16 or fp32, any strides; K a positive multiple of 16.

    Returns:
        Codes ``[N, K]`` ``float8_e4m3fn`` and scales ``[N]`` fp32, so that row n of w is about
        ``codes[n] * scales[n]``.

    Raises:
        TypeError: another dtype.
        ValueError: not 2-D, K no multiple of 16, or a NaN or Inf in w.
        RuntimeError: called while a CUDA graph is being captured.
    """
    _refuse_capture("quantize_fp8")
    check_tensor("w", w)
    if w.dim() != 2:
        raise ValueError(f"w: got shape {tuple(w.shape)}, must be 2-D [N, K]")
    k = _check_input("w", w, K_MULTIPLE)
    codes = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device)
    scales = torch.empty(w.shape[0], dtype=torch.float32, device=w.device)
    step = max(1, _CHUNK // k)
    for first in range(0, w.shape[0], step):
        rows = slice(first, first + step)
        part, scales[rows] = _quantize_rows(w[rows])
        codes.view(torch.uint8)[rows] = part.view(torch.uint8)
    finite = torch.isfinite(scales)
    if not bool(finite.all()):
        channel = int((~finite).nonzero()[0])
        raise ValueError(f"w: got a NaN or Inf in output channel {channel}, must be finite")
    return codes, scales


def quantize_fp8_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise activations with one scale per token (row of ``x.reshape(-1, K)``): the reference.

    The scales always come from this call's values. A token with a NaN or Inf gets scale NaN
    (0x7FC00000) and code 0x7F everywhere; no other token changes. A zero token gets scale 1 and
    code 0x00 everywhere. A scale below 2**-126 becomes 2**-126.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, any strides; K a positive multiple of 16; M may be 0.

    Returns:
        Codes of x's shape, ``float8_e4m3fn``, and scales ``[M]`` fp32.

    Raises:
        TypeError: another dtype.
        ValueError: no dimension, or K no multiple of 16.
        RuntimeError: x requires grad while grad mode is on (a ``Parameter`` is taken as a weight).
    """
    k = _check_input("x", x, K_MULTIPLE)
    _refuse_grad("x", x)
    with torch.no_grad():
        codes, scales = _quantize_rows(x.reshape(-1, k))
        return codes.view(x.shape), scales


def quantize_mxfp8(x: Tensor, *, blocked: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise in blocks of 32 along K with e8m0 scales, weights and activations: the reference.

    A block with a NaN or Inf gets scale byte 0xFF and codes 0x7F; a zero block gets scale byte 0x00
    (2**-127) and codes 0x00.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, any strides; K a positive multiple of 32.
        blocked: return the scales in the 128x4 blocked order of :mod:`cute_fp8.scales`.

    Returns:
        Codes of x's shape, ``float8_e4m3fn``, and ``float8_e8m0fnu`` scales: ``[rows, K/32]``
        with the rows of ``x.reshape(-1, K)``, or 1-D of ``blocked_numel(rows, K/32)`` elements.

    Raises:
        TypeError: another dtype.
        ValueError: no dimension, or K no multiple of 32.
        RuntimeError: x requires grad while grad mode is on (a ``Parameter`` is taken as a weight).
    """
    k = _check_input("x", x, MX_BLOCK)
    _refuse_grad("x", x)
    with torch.no_grad():
        blocks = _fp32(x).view(-1, k // MX_BLOCK, MX_BLOCK)
        amax = blocks.abs().amax(dim=-1)
        exponent = _biased_mx_exponent(amax)
        # The exponent is in [-127, 120], so 2**-exponent is a *normal* fp32 number and one factor
        # is enough. The product is exact unless below 2**-126, where its code is a signed zero.
        factor = ((254 - exponent) << 23).view(torch.float32)
        codes = _round_e4m3(blocks * factor.unsqueeze(-1))
        finite = torch.isfinite(amax)
        _overwrite(codes, zero=amax == 0, bad=~finite)
        scale_bytes = exponent.masked_fill(~finite, _E8M0_NAN).to(torch.uint8)
        scales = scale_bytes.view(torch.float8_e8m0fnu)
        return codes.view(x.shape), to_blocked(scales) if blocked else scales


def encode_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """``rne_e4m3(clamp(x / scale, +-448))`` with scales that are given, not computed from x.

    Args:
        x: fp32.
        scale: fp32, broadcastable to x, positive.

    Returns:
        Codes of x's shape, ``float8_e4m3fn``. A NaN gives a NaN code, an Inf saturates.
    """
    return _round_e4m3(x / scale)


@torch.no_grad()
def dequantize_fp8(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``q * scale`` in fp32, rounded once to ``dtype``.

    Args:
        q: codes ``[..., K]`` ``float8_e4m3fn``; R rows of K.
        scale: fp32, one per row: ``(R,)``, ``(R, 1)``, ``(1, R)``, ``q.shape[:-1]`` or that plus
            ``(1,)``; or one element.
        dtype: bf16, fp16 or fp32.

    Returns:
        Tensor of q's shape.

    Raises:
        TypeError: another dtype of q, scale or result.
        ValueError: another shape of scale, or q without a dimension.
    """
    k = _check_codes(q, dtype)
    if scale.dtype != torch.float32:
        raise TypeError(f"scale: got {scale.dtype}, must be torch.float32")
    rows = q.shape[:-1].numel()
    shapes = ((rows,), (rows, 1), (1, rows), q.shape[:-1], (*q.shape[:-1], 1))
    if scale.numel() != 1 and scale.shape not in shapes:
        raise ValueError(f"scale: got shape {tuple(scale.shape)}, must be ({rows},) or one element")
    values = q.reshape(rows, k).to(torch.float32) * scale.reshape(-1, 1)
    return values.to(dtype).view(q.shape)


@torch.no_grad()
def dequantize_mxfp8(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``q * 2**exponent`` per block of 32, rounded once to ``dtype``.

    Args:
        q: codes ``[..., K]`` ``float8_e4m3fn``; R rows of K, K a multiple of 32.
        scale: ``float8_e8m0fnu``, row-major ``[R, K/32]`` or 1-D blocked.
        dtype: bf16, fp16 or fp32.

    Returns:
        Tensor of q's shape. Exact in fp32 unless beyond its range.

    Raises:
        TypeError: another dtype of q, scale or result.
        ValueError: another shape of scale, or K no multiple of 32.
    """
    k = _check_codes(q, dtype)
    _check_k("q", k, MX_BLOCK)
    if scale.dtype != torch.float8_e8m0fnu:
        raise TypeError(f"scale: got {scale.dtype}, must be torch.float8_e8m0fnu")
    rows, cols = q.shape[:-1].numel(), k // MX_BLOCK
    numel = blocked_numel(rows, cols)
    if scale.shape == (numel,):
        scale = from_blocked(scale, rows, cols)
    elif scale.shape != (rows, cols):
        got = tuple(scale.shape)
        raise ValueError(f"scale: got shape {got}, must be ({rows}, {cols}) or blocked ({numel},)")
    scale_bytes = scale.view(torch.uint8).to(torch.int32)
    exponent = scale_bytes - 127
    # Two factors of half the exponent: 2**-127 is denormal in fp32, its halves are not.
    half = exponent >> 1
    first = ((half + 127) << 23).view(torch.float32)
    second = ((exponent - half + 127) << 23).view(torch.float32)
    second = second.masked_fill(scale_bytes == _E8M0_NAN, float("nan"))
    values = q.reshape(rows, cols, MX_BLOCK).to(torch.float32) * first.unsqueeze(-1)
    return (values * second.unsqueeze(-1)).to(dtype).view(q.shape)


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[R, K]`` and fp32 scales ``[R]`` of ``x[R, K]``; non-finite rows become NaN."""
    values = _fp32(x)
    amax = values.abs().amax(dim=-1)  # torch's amax passes NaN on
    finite = torch.isfinite(amax)
    zero = amax == 0
    divisor = torch.full((), FP8_MAX, dtype=torch.float32, device=x.device)
    scale = (amax / divisor).clamp(min=_MIN_SCALE)
    scale = scale.masked_fill(zero, 1.0).masked_fill(~finite, float("nan"))
    codes = encode_fp8(values, scale.unsqueeze(-1))
    _overwrite(codes, zero=zero, bad=~finite)
    return codes, scale


def _fp32(x: Tensor) -> Tensor:
    """fp32 and contiguous, so that results are contiguous whatever the strides of x."""
    return x.to(torch.float32).contiguous()


def _round_e4m3(values: Tensor) -> Tensor:
    """Round fresh fp32 values (which are overwritten) to the nearest e4m3fn code, ties to even.

    The clamp comes first because releases of torch differ above 464: some give NaN, some 448.
    """
    return values.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _overwrite(codes: Tensor, *, zero: Tensor, bad: Tensor) -> None:
    """Set groups (all dimensions but the last) of codes: 0x00 where zero, 0x7F where not finite."""
    raw = codes.view(torch.uint8)
    raw.masked_fill_(zero.unsqueeze(-1), 0).masked_fill_(bad.unsqueeze(-1), _NAN_CODE)


def _biased_mx_exponent(amax: Tensor) -> Tensor:
    """``ceil(log2(amax / 448)) + 127`` clamped to [0, 254], int32, exact; for finite ``amax >= 0``.

    With ``amax = 1.f * 2**E`` and ``448 = 1.75 * 2**8`` the answer is E - 8, plus one if
    1.f > 1.75. Zero and denormals have a biased exponent of 0 and are clamped. Non-finite input
    gives a value in range, which the caller replaces.
    """
    bits = amax.view(torch.int32)
    above = ((bits & 0x7FFFFF) > _MANTISSA_OF_448).to(torch.int32)
    return (((bits >> 23) & 0xFF) - 8 + above).clamp(0, 254)


def _check_input(name: str, x: Tensor, multiple: int) -> int:
    check_tensor(name, x)
    if x.dtype not in _INPUT_DTYPES:
        raise TypeError(f"{name}: got {x.dtype}, must be bfloat16, float16 or float32")
    if x.dim() == 0:
        raise ValueError(f"{name}: got a tensor without dimensions, must be [..., K]")
    return _check_k(name, x.shape[-1], multiple)


def _check_k(name: str, k: int, multiple: int) -> int:
    if k == 0 or k % multiple:
        raise ValueError(f"{name}: got K = {k}, must be a positive multiple of {multiple}")
    return k


def _check_codes(q: Tensor, dtype: torch.dtype) -> int:
    check_tensor("q", q)
    if q.dtype != torch.float8_e4m3fn:
        raise TypeError(f"q: got {q.dtype}, must be torch.float8_e4m3fn")
    if dtype not in _INPUT_DTYPES:
        raise TypeError(f"dtype: got {dtype}, must be bfloat16, float16 or float32")
    if q.dim() == 0:
        raise ValueError("q: got a tensor without dimensions, must be [..., K]")
    return q.shape[-1]


def without_autocast(device: str) -> AbstractContextManager[None]:
    """A context in which products of fp32 matrices stay fp32, on that type of device."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def _refuse_capture(function: str) -> None:
    # A process that has not initialised CUDA cannot be capturing; asking would create a context.
    if is_capturing():
        raise RuntimeError(
            f"{function}: called during CUDA graph capture, must be called before it (reads values)"
        )


def _refuse_grad(name: str, x: Tensor) -> None:
    if not isinstance(x, torch.nn.Parameter):
        refuse_grad(name, x)
