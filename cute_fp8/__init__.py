"""FP8 W8A8 matrix multiplication for PyTorch at the full tensor-core rate of sm_120 and sm_121.

Importing this package initialises no CUDA context and imports no compiler; both happen at first
use. What is not needed to run a layer is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cute_fp8.accuracy import Verdict, fp8_w8a8_error, near_lossless, smoothquant_factors
from cute_fp8.api import gemm, gemm_gated
from cute_fp8.build.compiler import compile
from cute_fp8.dispatch import dispatch_table, explain
from cute_fp8.frozen import freeze_scales
from cute_fp8.gating import interleave_gate_up
from cute_fp8.gemms import ops as _ops  # noqa: F401  (registers torch.ops.cute_fp8)
from cute_fp8.models.linear import Linear
from cute_fp8.numerics import (
    FP8_MAX,
    dequantize_fp8,
    dequantize_mxfp8,
    quantize_fp8,
)
from cute_fp8.producers import (
    attention_out_quantize,
    gelu_mul_quantize,
    gelu_tanh_mul_quantize,
    layernorm_quantize,
    quantize_fp8_activations,
    quantize_mxfp8,
    rmsnorm_quantize,
    silu_mul_quantize,
)
from cute_fp8.reference_linear import fp8_w8a8_linear, mxfp8_linear
from cute_fp8.rows import ops as _row_ops  # noqa: F401
from cute_fp8.scales import from_blocked, to_blocked
from cute_fp8.settings import use

if TYPE_CHECKING:
    from cute_fp8.decoder.block import decoder_block, decoder_mlp
    from cute_fp8.decoder.kv_cache import KVCache
    from cute_fp8.decoder.module import DecoderBlock
    from cute_fp8.decoder.weights import DecoderConfig, DecoderWeights, Projection
    from cute_fp8.gemms.tuning import autotune
    from cute_fp8.models.checkpoint import load_checkpoint, save_checkpoint
    from cute_fp8.models.conversion import convert

__version__ = "0.1.0"

#: Where what is imported late comes from.
_LATE = {
    "DecoderBlock": "cute_fp8.decoder.module",
    "DecoderConfig": "cute_fp8.decoder.weights",
    "DecoderWeights": "cute_fp8.decoder.weights",
    "KVCache": "cute_fp8.decoder.kv_cache",
    "Projection": "cute_fp8.decoder.weights",
    "autotune": "cute_fp8.gemms.tuning",
    "convert": "cute_fp8.models.conversion",
    "decoder_block": "cute_fp8.decoder.block",
    "decoder_mlp": "cute_fp8.decoder.block",
    "load_checkpoint": "cute_fp8.models.checkpoint",
    "save_checkpoint": "cute_fp8.models.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LATE[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "FP8_MAX",
    "DecoderBlock",
    "DecoderConfig",
    "DecoderWeights",
    "KVCache",
    "Linear",
    "Projection",
    "Verdict",
    "attention_out_quantize",
    "autotune",
    "compile",
    "convert",
    "decoder_block",
    "decoder_mlp",
    "dequantize_fp8",
    "dequantize_mxfp8",
    "dispatch_table",
    "explain",
    "fp8_w8a8_error",
    "fp8_w8a8_linear",
    "freeze_scales",
    "from_blocked",
    "gelu_mul_quantize",
    "gelu_tanh_mul_quantize",
    "gemm",
    "gemm_gated",
    "interleave_gate_up",
    "layernorm_quantize",
    "load_checkpoint",
    "mxfp8_linear",
    "near_lossless",
    "quantize_fp8",
    "quantize_fp8_activations",
    "quantize_mxfp8",
    "rmsnorm_quantize",
    "save_checkpoint",
    "silu_mul_quantize",
    "smoothquant_factors",
    "to_blocked",
    "use",
]
