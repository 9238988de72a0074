"""The GEMM that users call."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_fp8.arguments import PLAIN as _PLAIN
from cute_fp8.arguments import PLAIN_OR_NONE as _PLAIN_OR_NONE
from cute_fp8.arguments import foreign_modes, is_plain
from cute_fp8.gemms import ops as _ops
from cute_fp8.gemms.plan import launchers, run_gemm, short_key
from cute_fp8.gemms.problem import E4M3, Operands, check_gemm, check_grad
from cute_fp8.settings import current as current_settings

_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active


def gemm(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``y = act(xq @ wq.T * sx * sw + bias) + residual``, accumulated in fp32 and rounded once.

    The scales choose the variant: fp32 for one scale per token and one per output channel,
    ``float8_e8m0fnu`` for MXFP8 (one per block of 32 along K, for both operands). Results are
    deterministic, but not batch-invariant unless ``use(config=...)`` pins a configuration.

    Args:
        xq: activation codes ``[..., K]`` float8_e4m3fn; M rows in all, M >= 0. Rows contiguous, at
            any one stride that is a multiple of 16 bytes; K a multiple of 16 (MXFP8: 32).
        sx: fp32 ``(M,)``, ``(M, 1)``, ``xq.shape[:-1]``, that plus ``(1,)``, or one element; or
            e8m0 ``[M, K/32]`` row-major (one launch more), or 1-D in ``to_blocked``'s order.
        wq: weight codes ``[N, K]`` float8_e4m3fn, as ``nn.Linear`` has them; N a multiple of 8.
        sw: fp32 ``(N,)``, ``(N, 1)``, ``(1, N)`` or one element; or e8m0, as with sx (no launch
            for row-major ones after ``freeze_scales``).
        bias: ``[N]`` bf16, fp16 or fp32.
        residual: of y's shape, in ``out_dtype`` or fp32 (in bf16 or fp32 for MXFP8 output).
        activation: None, ``relu``, ``silu``, ``gelu`` or ``gelu_tanh``.
        out_dtype: bf16, fp16 or fp32; with MXFP8 inputs also ``float8_e4m3fn``.
        out: written and returned, if given; its addresses must not meet those of an input.
        fast_accum: on Hopper, skip promoting partial sums to fp32 (as in torch).

    Returns:
        y ``[..., N]``; for ``out_dtype=float8_e4m3fn`` the pair (codes ``[..., N]``, blocked e8m0
        scales), equal to ``quantize_mxfp8`` of the bf16 result.

    Raises:
        TypeError, ValueError: an argument breaks a rule above; raised before any launch.
        RuntimeError: an input requires grad in grad mode, or the pinned backend cannot serve.
    """
    if (
        type(xq) in _PLAIN
        and type(sx) in _PLAIN
        and type(wq) in _PLAIN
        and type(sw) in _PLAIN
        and type(bias) in _PLAIN_OR_NONE
        and type(residual) in _PLAIN_OR_NONE
        and type(out) in _PLAIN_OR_NONE
        and not (_is_compiling() or _dispatch_modes() or _transforms())
        and not (_function_modes() and foreign_modes())
        and type(fast_accum) is bool  # 0 and 1 would look up the plans of False and True
    ):
        try:
            launch = launchers[
                # `plan.short_key`, written out: a call would cost a tenth of the whole.
                xq.shape,
                sx.shape,
                wq.shape,
                sw.shape,
                sx.dtype,
                xq.get_device(),
                bias if bias is None else bias.dtype,
                residual if residual is None else residual.dtype,
                activation,
                out_dtype,
                fast_accum,
                current_settings(),
            ]
            if _grad_enabled():
                check_grad((xq, sx, wq, sw, bias, residual, out))
            return launch(xq, sx, wq, sw, bias, residual, out)
        except (KeyError, TypeError, ValueError):
            run = run_gemm  # unseen, or refused before it ran: the long way, which says why
    else:
        run = _call_op
    return run(Operands(xq, sx, wq, sw, bias, residual, out), activation, out_dtype, fast_accum)


def gemm_gated(
    xq: Tensor,
    sx: Tensor,
    wq: Tensor,
    sw: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``y = act(gate) * up``: both projections of a gated MLP in one GEMM, rounded once.

    Gate and up are ``xq @ wq.T * sx * sw + bias`` in fp32, of channels that alternate in blocks of
    8: ``g0..7, u0..7, g8..15, u8..15, ...`` (:func:`cute_fp8.interleave_gate_up`; scales and bias
    likewise). Not batch-invariant unless ``use(config=...)`` pins a configuration.

    Args:
        xq, sx, wq, sw, bias: as in :func:`gemm`; N, gate and up together, a multiple of 16.
        activation: of the gate: None, ``relu``, ``silu``, ``gelu`` or ``gelu_tanh``.
        out_dtype, out, fast_accum: as in :func:`gemm`.

    Returns:
        y ``[..., N/2]``; for ``out_dtype=float8_e4m3fn`` the pair (codes ``[..., N/2]``, blocked
        e8m0 scales), equal to ``quantize_mxfp8`` of the bf16 result; N/2 a multiple of 32 then.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`gemm`.
    """
    operands = Operands(xq, sx, wq, sw, bias, None, out)
    if is_plain(operands) and type(fast_accum) is bool:
        try:
            launch = launchers[short_key(operands, activation, out_dtype, fast_accum, gated=True)]
            check_grad(operands)
            return launch(*operands)
        except (AttributeError, KeyError, TypeError, ValueError):
            return run_gemm(operands, activation, out_dtype, fast_accum, gated=True)
    return _call_op(operands, activation, out_dtype, fast_accum, gated=True)


def _call_op(
    operands: Operands,
    activation: str | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    gated: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Through ``torch.library``, for tracing, subclasses and modes."""
    out = operands.out
    if _is_compiling():
        # The ops' fake kernels check, on symbolic sizes, all that the ops are told.
        check_grad(operands)
        if out is not None and out.dtype is not out_dtype:
            raise TypeError(f"out: got {out.dtype}, must be {out_dtype}")
    else:
        check_gemm(operands, activation, out_dtype, fast_accum, gated)
    xq, sx, wq, sw = map(_ops.as_bytes, operands[:4])
    arguments = (xq, sx, wq, sw, operands.bias, operands.residual, activation, gated)
    if out is not None:
        torch.ops.cute_fp8.gemm_out(*arguments, fast_accum, out)
        return out
    if out_dtype is E4M3:
        codes, scales = torch.ops.cute_fp8.gemm_quantized(*arguments)
        return codes.view(E4M3), scales.view(torch.float8_e8m0fnu)
    y: Tensor = torch.ops.cute_fp8.gemm(*arguments, out_dtype, fast_accum)
    return y
