"""What ``gemm`` refuses, in which words, and everything that it allows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8 import plan, quantize_mxfp8, to_blocked
from cute_fp8.gemm_case import exact_case

M, N, K = 6, 64, 96
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
Arguments = dict[str, Any]
#: Every refusal: the argument, what it got, what it must be; in one line.
REFUSAL = re.compile(r"(xq|sx|wq|sw|bias|residual|activation|out_dtype|out|fast_accum): got .+, must be .+")
A16 = "must be 16-byte aligned"
NO_GRAD = "got a tensor that requires grad, must be called under torch.no_grad() (inference only)"
SCALES = "must be torch.float32 or torch.float8_e8m0fnu"
ACTIVATIONS = "must be None or one of relu, silu, gelu, gelu_tanh"
OUT_DTYPES = (
    "must be torch.bfloat16, torch.float16, torch.float32 "
    "(or torch.float8_e4m3fn with MXFP8 inputs)"
)


def per_token() -> Arguments:
    """A good call, exact in fp32, so that any route and any strides give the same bits."""
    case = exact_case(M, N, K, device="cpu", bias=BF16, residual=BF16)
    names = ("xq", "sx", "wq", "sw", "bias", "residual")
    return {name: getattr(case, name) for name in names}


def mxfp8() -> Arguments:
    """A good MXFP8 call, exact too, with row-major scales."""
    call = per_token()
    for name, rows in (("sx", M), ("sw", N)):
        scale_bytes = 125 + torch.arange(rows * K // 32) % 5
        call[name] = scale_bytes.to(torch.uint8).view(rows, K // 32).view(E8M0)
    return call


def bits(y: Any) -> bytes:
    return b"".join(t.view(torch.uint8).numpy().tobytes() for t in (y if type(y) is tuple else [y]))


def strided(tensor: Tensor, stride: int, offset: int = 0) -> Tensor:
    """The same matrix with another row stride and address, both in elements."""
    rows, columns = tensor.shape
    buffer = torch.zeros(rows * stride + offset + columns, dtype=tensor.dtype)
    view = buffer[offset:].as_strided((rows, columns), (stride, 1))
    view.view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))
    return view


def uneven(tensor: Tensor) -> Tensor:
    """``[6, C]`` as ``[2, 3, C]`` whose rows are not at one stride."""
    view = torch.zeros((2, 4, tensor.shape[-1]), dtype=tensor.dtype)[:, :3]
    view.view(torch.uint8).copy_(tensor.reshape(2, 3, -1).view(torch.uint8))
    return view


def in_one_buffer(tensor: Tensor, gap: int) -> tuple[Tensor, Tensor]:
    """A copy of ``tensor`` and an ``out`` that begins ``gap`` bytes after its end, 16-aligned."""
    begin = (tensor.nbytes + 15) // 16 * 16 + gap
    buffer = torch.zeros(begin + M * N * 2, dtype=torch.uint8)
    copy = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return copy, buffer[begin:].view(BF16).view(M, N)


def overlapping(name: str) -> Callable[[Arguments], Arguments]:
    """``out`` shares the last bytes of an input."""

    def change(a: Arguments) -> Arguments:
        return dict(zip((name, "out"), in_one_buffer(a[name], -16), strict=True))

    return change


def needs_grad(name: str) -> Callable[[Arguments], Arguments]:
    def change(a: Arguments) -> Arguments:
        tensor = a[name] if name in a else torch.empty((M, N), dtype=BF16)
        return {name: tensor.detach().clone().requires_grad_()}

    return change


def sparse(*shape: int, dtype: torch.dtype) -> Tensor:
    indices = torch.zeros((len(shape), 1), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.zeros(1, dtype=dtype), shape, check_invariants=True)


@dataclass(frozen=True)
class Bad:
    """A call that is refused: what is changed in a good one, and the message."""

    id: str
    error: type[Exception]
    message: str
    change: Callable[[Arguments], Arguments]
    mx: bool = False


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


TYPES = [
    Bad("xq-list", TypeError, "xq: got list, must be a torch.Tensor", lambda a: {"xq": [1.0]}),
    Bad("sx-float", TypeError, "sx: got float, must be a torch.Tensor", lambda a: {"sx": 1.0}),
    Bad("wq-none", TypeError, "wq: got NoneType, must be a torch.Tensor", lambda a: {"wq": None}),
    Bad("sw-array", TypeError, "sw: got ndarray, must be a torch.Tensor", lambda a: {"sw": a["sw"].numpy()}),
    Bad("bias-list", TypeError, "bias: got list, must be a torch.Tensor", lambda a: {"bias": [0.0] * N}),
    Bad("residual-int", TypeError, "residual: got int, must be a torch.Tensor", lambda a: {"residual": 0}),
    Bad("out-str", TypeError, "out: got str, must be a torch.Tensor", lambda a: {"out": "y"}),
    Bad("xq-bf16", TypeError, "xq: got torch.bfloat16, must be torch.float8_e4m3fn", lambda a: {"xq": zeros(M, K)}),
    Bad("xq-bytes", TypeError, "xq: got torch.uint8, must be torch.float8_e4m3fn", lambda a: {"xq": a["xq"].view(torch.uint8)}),
    Bad("wq-e5m2", TypeError, "wq: got torch.float8_e5m2, must be torch.float8_e4m3fn", lambda a: {"wq": a["wq"].view(torch.float8_e5m2)}),
    Bad("sx-int64", TypeError, f"sx: got torch.int64, {SCALES}", lambda a: {"sx": a["sx"].long()}),
    Bad("sx-fp64", TypeError, f"sx: got torch.float64, {SCALES}", lambda a: {"sx": a["sx"].double()}),
    Bad("sw-bf16", TypeError, f"sw: got torch.bfloat16, {SCALES}", lambda a: {"sw": a["sw"].bfloat16()}),
    Bad("sw-bytes", TypeError, f"sw: got torch.uint8, {SCALES}", lambda a: {"sw": a["sw"].view(torch.uint8)}, mx=True),
    Bad("bias-fp64", TypeError, "bias: got torch.float64, must be torch.bfloat16, torch.float16 or torch.float32", lambda a: {"bias": zeros(N, dtype=FP64)}),
    Bad("residual-fp16", TypeError, "residual: got torch.float16, must be torch.bfloat16 or torch.float32", lambda a: {"residual": zeros(M, N, dtype=FP16)}),
    Bad("residual-bf16-to-fp32", TypeError, "residual: got torch.bfloat16, must be torch.float32", lambda a: {"out_dtype": FP32}),
    Bad("residual-fp16-to-e4m3", TypeError, "residual: got torch.float16, must be torch.bfloat16 or torch.float32", lambda a: {"out_dtype": E4M3, "residual": zeros(M, N, dtype=FP16)}, mx=True),
    Bad("out-fp16", TypeError, "out: got torch.float16, must be torch.bfloat16", lambda a: {"out": zeros(M, N, dtype=FP16)}),
    Bad("xq-sparse", TypeError, "xq: got layout torch.sparse_coo, must be torch.strided", lambda a: {"xq": sparse(M, K, dtype=E4M3)}),
    Bad("bias-sparse", TypeError, "bias: got layout torch.sparse_coo, must be torch.strided", lambda a: {"bias": sparse(N, dtype=BF16)}),
    Bad("residual-sparse", TypeError, "residual: got layout torch.sparse_coo, must be torch.strided", lambda a: {"residual": sparse(M, N, dtype=BF16)}),
]  # fmt: skip
SIZES = [
    Bad("xq-0d", ValueError, "xq: got 0 dimensions, must be [..., K]", lambda a: {"xq": a["xq"][0, 0]}),
    Bad("wq-1d", ValueError, "wq: got 1 dimensions, must be 2-D [N, K]", lambda a: {"wq": a["wq"][0]}),
    Bad("wq-3d", ValueError, "wq: got 3 dimensions, must be 2-D [N, K]", lambda a: {"wq": a["wq"][None]}),
    Bad("k-0", ValueError, "xq: got K = 0, must be a positive multiple of 16", lambda a: {"xq": a["xq"][:, :0]}),
    Bad("k-88", ValueError, "xq: got K = 88, must be a positive multiple of 16", lambda a: {"xq": a["xq"][:, :88]}),
    Bad("mx-k-80", ValueError, "xq: got K = 80, must be a positive multiple of 32", lambda a: {"xq": a["xq"][:, :80]}, mx=True),
    Bad("n-0", ValueError, "wq: got N = 0, must be a positive multiple of 8", lambda a: {"wq": a["wq"][:0]}),
    Bad("n-60", ValueError, "wq: got N = 60, must be a positive multiple of 8", lambda a: {"wq": a["wq"][:60]}),
    Bad("mx-n-60", ValueError, "wq: got N = 60, must be a positive multiple of 8", lambda a: {"wq": a["wq"][:60]}, mx=True),
    Bad("k-differs", ValueError, "wq: got K = 80, must be 96 as in xq", lambda a: {"wq": a["wq"][:, :80]}),
    Bad("sx-short", ValueError, "sx: got shape (5,), must be (6,) or (6, 1) or one element", lambda a: {"sx": a["sx"][:5]}),
    Bad("sx-row", ValueError, "sx: got shape (1, 6), must be (6,) or (6, 1) or one element", lambda a: {"sx": a["sx"][None]}),
    Bad("sx-as-sw", ValueError, "sx: got shape (64,), must be (6,) or (6, 1) or one element", lambda a: {"sx": a["sw"]}),
    Bad("sx-batch", ValueError, "sx: got shape (3, 2), must be (6,) or (6, 1) or (2, 3) or (2, 3, 1) or one element", lambda a: {"xq": a["xq"].view(2, 3, K), "sx": a["sx"].view(3, 2)}),
    Bad("sw-long", ValueError, "sw: got shape (128,), must be (64,) or (64, 1) or (1, 64) or one element", lambda a: {"sw": a["sw"].repeat(2)}),
    Bad("sw-3d", ValueError, "sw: got shape (64, 1, 1), must be (64,) or (64, 1) or (1, 64) or one element", lambda a: {"sw": a["sw"][:, None, None]}),
    Bad("sx-empty", ValueError, "sx: got shape (0,), must be (6,) or (6, 1) or one element", lambda a: {"sx": a["sx"][:0]}),
    Bad("mx-sx-short", ValueError, "sx: got shape (5, 3), must be (6, 3) row-major or (512,) in 128x4 blocks", lambda a: {"sx": a["sx"][:5]}, mx=True),
    Bad("mx-sw-blocks", ValueError, "sw: got shape (1024,), must be (64, 3) row-major or (512,) in 128x4 blocks", lambda a: {"sw": to_blocked(a["sw"]).repeat(2)}, mx=True),
    Bad("mx-sw-one", ValueError, "sw: got shape (1,), must be (64, 3) row-major or (512,) in 128x4 blocks", lambda a: {"sw": a["sw"].flatten()[:1]}, mx=True),
    Bad("mx-sx-1d", ValueError, "sx: got shape (3,), must be (1, 3) row-major or (512,) in 128x4 blocks", lambda a: {"xq": a["xq"][0], "sx": a["sx"][0]}, mx=True),
    Bad("bias-row", ValueError, "bias: got shape (1, 64), must be (64,)", lambda a: {"bias": a["bias"][None]}),
    Bad("bias-short", ValueError, "bias: got shape (56,), must be (64,)", lambda a: {"bias": a["bias"][:56]}),
    Bad("bias-one", ValueError, "bias: got shape (1,), must be (64,)", lambda a: {"bias": a["bias"][:1]}),
    Bad("residual-wide", ValueError, "residual: got shape (6, 72), must be (6, 64)", lambda a: {"residual": zeros(M, 72)}),
    Bad("residual-row", ValueError, "residual: got shape (64,), must be (6, 64)", lambda a: {"residual": zeros(N)}),
    Bad("residual-batch", ValueError, "residual: got shape (6, 64), must be (2, 3, 64)", lambda a: {"xq": a["xq"].view(2, 3, K)}),
    Bad("out-short", ValueError, "out: got shape (5, 64), must be (6, 64)", lambda a: {"out": zeros(5, N)}),
    Bad("out-flat", ValueError, "out: got shape (384,), must be (6, 64)", lambda a: {"out": zeros(M * N)}),
    Bad("e4m3-n-40", ValueError, "wq: got N = 40, must be a multiple of 32 for MXFP8 output", lambda a: {"wq": a["wq"][:40], "out_dtype": E4M3}, mx=True),
]  # fmt: skip
STRIDES = [
    Bad("xq-columns", ValueError, "xq: got stride 6 in the last dimension, must be 1", lambda a: {"xq": a["xq"].t().contiguous().t()}),
    Bad("wq-every-second", ValueError, "wq: got stride 2 in the last dimension, must be 1", lambda a: {"wq": a["wq"].repeat(1, 2)[:, ::2]}),
    Bad("xq-8-bytes-on", ValueError, f"xq: got an address 8 bytes past a multiple of 16, {A16}", lambda a: {"xq": strided(a["xq"], K, 8)}),
    Bad("wq-8-bytes-on", ValueError, f"wq: got an address 8 bytes past a multiple of 16, {A16}", lambda a: {"wq": strided(a["wq"], K, 8)}),
    Bad("residual-2-bytes-on", ValueError, f"residual: got an address 2 bytes past a multiple of 16, {A16}", lambda a: {"residual": strided(a["residual"], N, 1)}),
    Bad("out-8-bytes-on", ValueError, f"out: got an address 8 bytes past a multiple of 16, {A16}", lambda a: {"out": strided(a["residual"], N, 4)}),
    Bad("xq-rows-of-104", ValueError, "xq: got a row stride of 104 bytes, must be a multiple of 16", lambda a: {"xq": strided(a["xq"], 104)}),
    Bad("wq-rows-of-100", ValueError, "wq: got a row stride of 100 bytes, must be a multiple of 16", lambda a: {"wq": strided(a["wq"], 100)}),
    Bad("residual-rows-of-136", ValueError, "residual: got a row stride of 136 bytes, must be a multiple of 16", lambda a: {"residual": strided(a["residual"], 68)}),
    Bad("out-rows-of-136", ValueError, "out: got a row stride of 136 bytes, must be a multiple of 16", lambda a: {"out": strided(a["residual"], 68)}),
    Bad("xq-uneven", ValueError, "xq: got strides (384, 96, 1), must be rows at one stride", lambda a: {"xq": uneven(a["xq"])}),
    Bad("residual-uneven", ValueError, "residual: got strides (256, 64, 1), must be rows at one stride", lambda a: {"xq": a["xq"].view(2, 3, K), "residual": uneven(a["residual"])}),
    Bad("residual-columns", ValueError, "residual: got stride 6 in the last dimension, must be 1", lambda a: {"residual": zeros(N, M).t()}),
    Bad("sx-uneven", ValueError, "sx: got strides (4, 1), must be one stride between its values", lambda a: {"xq": a["xq"].view(2, 3, K), "sx": torch.ones(2, 4)[:, :3]}),
    Bad("mx-sx-columns", ValueError, "sx: got strides (1, 6), must be contiguous", lambda a: {"sx": a["sx"].t().contiguous().t()}, mx=True),
    Bad("mx-sw-every-second", ValueError, "sw: got strides (2,), must be contiguous", lambda a: {"sw": to_blocked(a["sw"]).repeat(2)[::2]}, mx=True),
    Bad("bias-every-second", ValueError, "bias: got stride 2, must be 1", lambda a: {"bias": zeros(2 * N)[::2]}),
    Bad("bias-expanded", ValueError, "bias: got stride 0, must be 1", lambda a: {"bias": zeros(1).expand(N)}),
    Bad("out-columns", ValueError, "out: got stride 6 in the last dimension, must be 1", lambda a: {"out": zeros(N, M).t()}),
    Bad("out-rows-overlap", ValueError, "out: got row stride 16, must be at least 64 (rows overlap)", lambda a: {"out": zeros(M * N).as_strided((M, N), (16, 1))}),
    Bad("out-expanded", ValueError, "out: got row stride 0, must be at least 64 (rows overlap)", lambda a: {"out": zeros(1, N).expand(M, N)}),
    *(Bad(f"out-on-{name}", ValueError, f"out: got memory that overlaps {name}, must be separate", overlapping(name)) for name in per_token()),
    *(Bad(f"mx-out-on-{name}", ValueError, f"out: got memory that overlaps {name}, must be separate", overlapping(name), mx=True) for name in ("sx", "sw")),
]  # fmt: skip
OPTIONS = [
    *(Bad(f"{name}-meta", ValueError, f"{name}: got device meta, must be cpu as xq is", lambda a, name=name: {name: a[name].to("meta")}) for name in ("sx", "wq", "sw", "bias", "residual")),
    Bad("xq-meta", ValueError, "sx: got device cpu, must be meta as xq is", lambda a: {"xq": a["xq"].to("meta")}),
    Bad("out-meta", ValueError, "out: got device meta, must be cpu as xq is", lambda a: {"out": torch.empty((M, N), dtype=BF16, device="meta")}),
    Bad("kinds-fp32-mx", ValueError, "sw: got torch.float8_e8m0fnu, must be torch.float32 as sx is (scales of one kind)", lambda a: {"sw": mxfp8()["sw"]}),
    Bad("kinds-mx-fp32", ValueError, "sw: got torch.float32, must be torch.float8_e8m0fnu as sx is (scales of one kind)", lambda a: {"sw": per_token()["sw"]}, mx=True),
    Bad("activation-swish", ValueError, f"activation: got 'swish', {ACTIVATIONS}", lambda a: {"activation": "swish"}),
    Bad("activation-empty", ValueError, f"activation: got '', {ACTIVATIONS}", lambda a: {"activation": ""}),
    Bad("activation-list", ValueError, f"activation: got ['relu'], {ACTIVATIONS}", lambda a: {"activation": ["relu"]}),
    Bad("activation-int", ValueError, f"activation: got 3, {ACTIVATIONS}", lambda a: {"activation": 3}),
    Bad("out-dtype-fp64", TypeError, f"out_dtype: got torch.float64, {OUT_DTYPES}", lambda a: {"out_dtype": FP64}),
    Bad("out-dtype-str", TypeError, f"out_dtype: got bfloat16, {OUT_DTYPES}", lambda a: {"out_dtype": "bfloat16"}),
    Bad("out-dtype-list", TypeError, f"out_dtype: got [1], {OUT_DTYPES}", lambda a: {"out_dtype": [1]}),
    Bad("out-dtype-e5m2", TypeError, f"out_dtype: got torch.float8_e5m2, {OUT_DTYPES}", lambda a: {"out_dtype": torch.float8_e5m2}, mx=True),
    Bad("e4m3-per-token", ValueError, "out_dtype: got torch.float8_e4m3fn with fp32 scales, must be used with MXFP8 (float8_e8m0fnu) scales", lambda a: {"out_dtype": E4M3}),
    Bad("e4m3-with-out", ValueError, "out: got a tensor with out_dtype torch.float8_e4m3fn, must be None", lambda a: {"out_dtype": E4M3, "out": zeros(M, N, dtype=E4M3)}, mx=True),
    Bad("fast-accum-0", TypeError, "fast_accum: got int, must be a bool", lambda a: {"fast_accum": 0}),
    Bad("fast-accum-1", TypeError, "fast_accum: got int, must be a bool", lambda a: {"fast_accum": 1}),
    Bad("fast-accum-none", TypeError, "fast_accum: got NoneType, must be a bool", lambda a: {"fast_accum": None}),
    *(Bad(f"grad-{name}", RuntimeError, f"{name}: {NO_GRAD}", needs_grad(name)) for name in (*per_token(), "out")),
    *(Bad(f"mx-grad-{name}", RuntimeError, f"{name}: {NO_GRAD}", needs_grad(name), mx=True) for name in ("xq", "sx")),
]  # fmt: skip
BAD = [*TYPES, *SIZES, *STRIDES, *OPTIONS]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_refusal(bad: Bad) -> None:
    """Whether or not its like has been seen before, and without a trace in the next call."""
    good = mxfp8() if bad.mx else per_token()
    before = bits(cute_fp8.gemm(**good))
    changes = bad.change(good)
    messages = []
    for forget in (False, True):
        if forget:
            plan.forget()
        with pytest.raises(bad.error) as caught:
            cute_fp8.gemm(**{**good, **changes})
        assert type(caught.value) is bad.error
        messages.append(str(caught.value))
    assert messages == [bad.message, bad.message]
    assert REFUSAL.fullmatch(bad.message), "one line, with the argument, got and must be"
    assert bits(cute_fp8.gemm(**good)) == before
