"""The GEMMs of torch that ours are measured against; QuACK's is in ``perf/quack_peer.py``.

Those of the producers and the decoder block are Inductor's: ``inductor``, in ``perf/inductor.py``,
is timed by ``perf/producers.py``; ``inductor_bf16`` and ``inductor_w8a8`` by ``perf/decoder.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from perf import quack_peer
from perf.operands import Call, Operands


def rowwise(o: Operands, fast: bool) -> Call:
    """Row-wise ``torch._scaled_mm``. Views are made here: their host time is not its own."""
    rows, columns = o.sx.view(-1, 1), [scale.view(1, -1) for scale in o.scales]
    return _scaled_mm(o, rows, columns, fast)


def tensorwise(o: Operands, fast: bool) -> Call:
    """Tensor-wise ``torch._scaled_mm``."""
    return _scaled_mm(o, o.one_x, [o.one_w] * len(o.codes), fast)


def _scaled_mm(o: Operands, sx: Tensor, scales: Sequence[Tensor], fast: bool) -> Call:
    weights = [codes.t() for codes in o.codes]

    def call(i: int, bias: Tensor | None) -> Tensor:
        return torch._scaled_mm(
            o.xq,
            weights[i],
            scale_a=sx,
            scale_b=scales[i],
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    return call


def mxfp8(o: Operands) -> Call:
    """``F.scaled_mm`` with a scale for every 32 along K, in 128x4 blocks."""
    weights = [codes.t() for codes in o.codes]

    def call(i: int, bias: Tensor | None) -> Tensor:
        recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
        return F.scaled_mm(
            o.xq, weights[i], o.sx, recipe, o.scales[i], recipe, swizzle, swizzle, bias
        )

    return call


def names(variant: str) -> list[str]:
    """The peers' names in result files."""
    if variant == "mxfp8":
        return ["torch_bf16", "torch_mxfp8"]
    scaled = [f"torch_{kind}{fast}" for fast in ("", "_fast") for kind in ("rowwise", "tensorwise")]
    return ["torch_bf16", *scaled, *(["quack"] if quack_peer.installed() else [])]
