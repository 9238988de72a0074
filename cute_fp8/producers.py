"""The quantising producers: what makes a GEMM's activations writes their codes and scales itself.

On GPUs of compute capability 8.9, 9.0, 10.0 and 12.x they are one kernel each; elsewhere plain
torch. Results are bit-identical to :mod:`cute_fp8.numerics` applied to what was computed, which the
functions return where they are asked to; they do not depend on the other rows of the call.

All of them share these arguments:

* ``variant``: ``per_token`` (fp32 scales ``[M]``) or ``mxfp8`` (e8m0 ``[M, K/32]``);
* ``blocked``: scales of ``mxfp8`` 1-D, in the 128x4 blocks that :func:`cute_fp8.gemm` reads;
* ``out``: the tensors to write, in the order in which they are returned (an earlier call's result
  will do): codes and what else has x's shape at any one row stride of a multiple of 16 bytes,
  scales contiguous. None may share memory with an input or with one another.
"""

from __future__ import annotations

from torch import Tensor

from cute_fp8.rows.ops import run
from cute_fp8.rows.plan import Out, Results
from cute_fp8.rows.problem import LAYOUTS, RowInputs, RowOptions


def quantize_fp8_activations(x: Tensor, *, out: Out = None) -> tuple[Tensor, Tensor]:
    """Quantise activations with one scale per token (row of ``x.reshape(-1, K)``).

    The scales always come from this call's values. A token with a NaN or Inf gets scale NaN
    (0x7FC00000) and code 0x7F everywhere; no other token changes. A zero token gets scale 1 and
    code 0x00 everywhere. A scale below 2**-126 becomes 2**-126.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, any strides; K a positive multiple of 16; M may be 0.
        out: see :mod:`cute_fp8.producers`.

    Returns:
        Codes of x's shape, ``float8_e4m3fn``, and scales ``[M]`` fp32.

    Raises:
        TypeError: another dtype.
        ValueError: no dimension, or K no multiple of 16; or an ``out`` that does not fit.
        RuntimeError: x requires grad while grad mode is on (a ``Parameter`` is taken as a weight).
    """
    codes, scales = run(RowInputs(x), RowOptions("quantize"), out)
    return codes, scales


def quantize_mxfp8(x: Tensor, *, blocked: bool = False, out: Out = None) -> tuple[Tensor, Tensor]:
    """Quantise in blocks of 32 along K with e8m0 scales; for weights and activations alike.

    A block with a NaN or Inf gets scale byte 0xFF and codes 0x7F; a zero block gets scale byte 0x00
    (2**-127) and codes 0x00.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, any strides; K a positive multiple of 32.
        blocked: return the scales in the 128x4 blocked order of :mod:`cute_fp8.scales`.
        out: see :mod:`cute_fp8.producers`.

    Returns:
        Codes of x's shape, ``float8_e4m3fn``, and ``float8_e8m0fnu`` scales: ``[rows, K/32]``
        with the rows of ``x.reshape(-1, K)``, or 1-D of ``blocked_numel(rows, K/32)`` elements.

    Raises:
        TypeError: another dtype.
        ValueError: no dimension, or K no multiple of 32; or an ``out`` that does not fit.
        RuntimeError: x requires grad while grad mode is on (a ``Parameter`` is taken as a weight).
    """
    codes, scales = run(RowInputs(x), RowOptions("quantize", "mxfp8", blocked), out)
    return codes, scales


def quantize_input(x: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    """A layer's input as codes and scales, in the form that costs a GEMM no further launch."""
    if variant == "mxfp8":
        return quantize_mxfp8(x, blocked=True)
    return quantize_fp8_activations(x)


def rmsnorm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
    rounding: str = "hf",
    return_normed: bool = False,
    variant: str = "per_token",
    blocked: bool = False,
    out: Out = None,
) -> Results:
    """RMSNorm, and the quantisation of its result: ``h / sqrt(mean(h^2) + eps) * weight``.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, any strides; K a multiple of 16 (MXFP8: 32).
        weight: ``[K]`` bf16, fp16 or fp32.
        eps: added to the mean of the squares.
        residual: of x's shape and dtype; then ``h = x + residual``, rounded, and is returned.
        offset: with 1.0 the weight is ``1 + weight``, in fp32, and the result rounded once: Gemma.
        rounding: ``hf`` rounds before the weight is applied, too, as Hugging Face's Llama does;
            ``fused`` rounds once, as ``torch.nn.RMSNorm`` does.
        return_normed: return what was quantised, too, in x's dtype.
        variant, blocked, out: see :mod:`cute_fp8.producers`.

    Returns:
        Codes, scales, then h if there is a residual, then the norm if it is asked for.

    Raises:
        TypeError, ValueError: an argument breaks a rule above; raised before any launch.
        RuntimeError: an input requires grad while grad mode is on.
    """
    options = RowOptions(
        "rmsnorm_quantize",
        variant,
        blocked,
        eps,
        offset,
        rounding,
        keep=return_normed,
    )
    return run(RowInputs(x, weight, None, residual), options, out)


def layernorm_quantize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    return_normed: bool = False,
    variant: str = "per_token",
    blocked: bool = False,
    out: Out = None,
) -> Results:
    """LayerNorm, rounded once as ``torch.nn.LayerNorm`` is, and the quantisation of its result.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, any strides; K a multiple of 16 (MXFP8: 32).
        weight: ``[K]`` bf16, fp16 or fp32.
        bias: likewise.
        eps: added to the variance.
        residual: of x's shape and dtype; then the norm is that of ``x + residual``, rounded, which
            is returned.
        return_normed: return what was quantised, too, in x's dtype.
        variant, blocked, out: see :mod:`cute_fp8.producers`.

    Returns:
        Codes, scales, then the sum if there is a residual, then the norm if it is asked for.

    Raises:
        TypeError, ValueError: an argument breaks a rule above; raised before any launch.
        RuntimeError: an input requires grad while grad mode is on.
    """
    options = RowOptions("layernorm_quantize", variant, blocked, eps, keep=return_normed)
    return run(RowInputs(x, weight, bias, residual), options, out)


def silu_mul_quantize(
    gate_up: Tensor,
    *,
    layout: str = "halves",
    return_product: bool = False,
    variant: str = "per_token",
    blocked: bool = False,
    out: Out = None,
) -> Results:
    """``silu(gate) * up`` in fp32, rounded once, and its quantisation: the SwiGLU of Llama.

    Args:
        gate_up: ``[..., 2K]`` bf16, fp16 or fp32, any strides; K a multiple of 16 (MXFP8: 32).
        layout: ``halves`` (gate, then up) or ``interleaved`` in blocks of 8 columns (g0..7, u0..7,
            g8..15, ...), as a GEMM writes it whose weight's rows are interleaved so.
        return_product: return what was quantised, too, in gate_up's dtype.
        variant, blocked, out: see :mod:`cute_fp8.producers`.

    Returns:
        Codes ``[..., K]``, scales, then the product if it is asked for.

    Raises:
        TypeError, ValueError: an argument breaks a rule above; raised before any launch.
        RuntimeError: an input requires grad while grad mode is on.
    """
    return _gated("silu", gate_up, layout, return_product, variant, blocked, out)


def gelu_mul_quantize(
    gate_up: Tensor,
    *,
    layout: str = "halves",
    return_product: bool = False,
    variant: str = "per_token",
    blocked: bool = False,
    out: Out = None,
) -> Results:
    """``gelu(gate) * up``, with the exact GELU; the rest as :func:`silu_mul_quantize`."""
    return _gated("gelu", gate_up, layout, return_product, variant, blocked, out)


def gelu_tanh_mul_quantize(
    gate_up: Tensor,
    *,
    layout: str = "halves",
    return_product: bool = False,
    variant: str = "per_token",
    blocked: bool = False,
    out: Out = None,
) -> Results:
    """``gelu(gate) * up``, with GELU's tanh form; the rest as :func:`silu_mul_quantize`."""
    return _gated("gelu_tanh", gate_up, layout, return_product, variant, blocked, out)


def attention_out_quantize(
    o: Tensor, *, variant: str = "per_token", blocked: bool = False, out: Out = None
) -> tuple[Tensor, Tensor]:
    """Quantise what attention returns as the rows that the output projection reads.

    No transposed copy is made.

    Args:
        o: ``[B, H, S, D]`` bf16, fp16 or fp32, any strides; H * D a multiple of 16 (MXFP8: 32).
        variant, blocked, out: see :mod:`cute_fp8.producers`.

    Returns:
        Codes ``[B * S, H * D]`` and scales: those of ``o.transpose(1, 2).reshape(B * S, H * D)``.

    Raises:
        TypeError, ValueError: an argument breaks a rule above; raised before any launch.
        RuntimeError: o requires grad while grad mode is on.
    """
    options = RowOptions("attention_out_quantize", variant, blocked)
    codes, scales = run(RowInputs(o), options, out)
    return codes, scales


def _gated(
    activation: str,
    gate_up: Tensor,
    layout: str,
    keep: bool,
    variant: str,
    blocked: bool,
    out: Out,
) -> Results:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, must be one of {', '.join(LAYOUTS)}")
    op = f"{activation}_mul_quantize"
    return run(RowInputs(gate_up), RowOptions(op, variant, blocked, layout=layout, keep=keep), out)
