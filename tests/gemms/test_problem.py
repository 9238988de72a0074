"""What ``gemm`` refuses, in which words, and everything that it allows."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8 import to_blocked
from cute_fp8.gemms import plan
from cute_fp8.gemms.case import exact_case

M, N, K = 6, 64, 96
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
INPUTS = ("xq", "sx", "wq", "sw", "bias", "residual")
Arguments = dict[str, Any]
Change = Callable[[Arguments], Any]

REFUSAL = re.compile(r"[a-z_]+: got .+, must be .+")
CODES = "must be torch.float8_e4m3fn"
SCALES = "must be torch.float32 or torch.float8_e8m0fnu"
DENSE = "must be torch.strided"
ACTIVATIONS = "must be None or one of relu, silu, gelu, gelu_tanh"
FLOATS = "must be torch.bfloat16, torch.float16"
OUT_DTYPES = f"{FLOATS}, torch.float32 (or torch.float8_e4m3fn with MXFP8 inputs)"
SX = "must be (6,) or (6, 1) or one element"
SW = "must be (64,) or (64, 1) or (1, 64) or one element"
BLOCKS = "row-major or (512,) in 128x4 blocks"
LAST = "in the last dimension, must be 1"
ROWS = "bytes, must be a multiple of 16"
ALIGNED = "bytes past a multiple of 16, must be 16-byte aligned"


def per_token() -> Arguments:
    """A good call, exact in fp32: any strides give the same bits."""
    case = exact_case(M, N, K, device="cpu", bias=BF16, residual=BF16)
    return {name: getattr(case, name) for name in INPUTS}


def mxfp8() -> Arguments:
    """A good MXFP8 call, exact too, with row-major scales."""
    call = per_token()
    for name, rows in (("sx", M), ("sw", N)):
        exponents = 125 + torch.arange(rows * K // 32) % 5
        call[name] = exponents.to(torch.uint8).view(rows, K // 32).view(E8M0)
    return call


def bits(y: Tensor) -> bytes:
    return y.view(torch.uint8).numpy().tobytes()


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def sparse(*shape: int, dtype: torch.dtype) -> Tensor:
    indices, values = zeros(len(shape), 1, dtype=torch.int64), zeros(1, dtype=dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def columns(tensor: Tensor) -> Tensor:
    """The same matrix with contiguous columns."""
    return tensor.t().contiguous().t()


def strided(tensor: Tensor, stride: int, offset: int = 0) -> Tensor:
    """The same matrix with another row stride and address, both in elements."""
    rows, width = tensor.shape
    buffer = torch.zeros(rows * stride + offset + width, dtype=tensor.dtype)
    return buffer[offset:].as_strided((rows, width), (stride, 1)).copy_(tensor)


def uneven(tensor: Tensor) -> Tensor:
    """``[6, C]`` as ``[2, 3, C]`` whose rows are not at one stride."""
    return zeros(2, 4, tensor.shape[1], dtype=tensor.dtype)[:, :3].copy_(tensor.view(2, 3, -1))


def batched(call: Arguments, batch: tuple[int, ...]) -> Arguments:
    return {name: call[name].view(*batch, call[name].shape[-1]) for name in ("xq", "residual")}


def in_one_buffer(tensor: Tensor, gap: int) -> tuple[Tensor, Tensor]:
    """A copy of ``tensor``, and an ``out`` that begins ``gap`` bytes after its end, aligned."""
    begin = (tensor.nbytes + 15) // 16 * 16 + gap
    buffer = zeros(begin + M * N * 2, dtype=torch.uint8)
    copy = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return copy, buffer[begin:].view(BF16).view(M, N)


def overlapping(name: str) -> Change:
    """``out`` shares the last bytes of an input."""
    return lambda call: dict(zip((name, "out"), in_one_buffer(call[name], -16), strict=True))


def needs_grad(name: str) -> Change:
    return lambda call: call.get(name, zeros(M, N)).clone().requires_grad_()


#: Cases are (name, change, message): how to change a good call, and what is said then. A change
#: that returns no dict is a new value for the argument that the name begins with.
# fmt: off
TYPES = [
    ("xq-none", lambda a: None, "xq: got NoneType, must be a torch.Tensor"),
    ("sw-array", lambda a: a["sw"].numpy(), "sw: got ndarray, must be a torch.Tensor"),
    *((f"{name}-list", lambda a: [0.0], f"{name}: got list, must be a torch.Tensor")
      for name in (*INPUTS, "out")),
    ("xq-bf16", lambda a: zeros(M, K), f"xq: got torch.bfloat16, {CODES}"),
    ("xq-bytes", lambda a: a["xq"].view(torch.uint8), f"xq: got torch.uint8, {CODES}"),
    ("wq-e5m2", lambda a: a["wq"].view(E5M2), f"wq: got torch.float8_e5m2, {CODES}"),
    ("sx-int64", lambda a: a["sx"].long(), f"sx: got torch.int64, {SCALES}"),
    ("sx-fp64", lambda a: a["sx"].double(), f"sx: got torch.float64, {SCALES}"),
    ("sw-bf16", lambda a: a["sw"].bfloat16(), f"sw: got torch.bfloat16, {SCALES}"),
    ("bias-fp64", lambda a: a["bias"].double(), f"bias: got {FP64}, {FLOATS} or torch.float32"),
    ("residual-fp16", lambda a: zeros(M, N, dtype=FP16),
     "residual: got torch.float16, must be torch.bfloat16 or torch.float32"),
    ("residual-bf16-to-fp32", lambda a: {"out_dtype": FP32},
     "residual: got torch.bfloat16, must be torch.float32"),
    ("out-fp16", lambda a: zeros(M, N, dtype=FP16),
     "out: got torch.float16, must be torch.bfloat16"),
    ("xq-sparse", lambda a: sparse(M, K, dtype=E4M3), f"xq: got layout torch.sparse_coo, {DENSE}"),
    ("residual-csr", lambda a: a["residual"].to_sparse_csr(),
     f"residual: got layout torch.sparse_csr, {DENSE}"),
    ("out_dtype-fp64", lambda a: FP64, f"out_dtype: got torch.float64, {OUT_DTYPES}"),
    ("out_dtype-str", lambda a: "bfloat16", f"out_dtype: got bfloat16, {OUT_DTYPES}"),
    ("out_dtype-list", lambda a: [1], f"out_dtype: got [1], {OUT_DTYPES}"),
    *((f"fast_accum-{bad}", lambda a, bad=bad: bad,
       f"fast_accum: got {type(bad).__name__}, must be a bool") for bad in (0, 1, None, "yes")),
]
MX_TYPES = [
    ("sw-bytes", lambda a: a["sw"].view(torch.uint8), f"sw: got torch.uint8, {SCALES}"),
    ("out_dtype-e5m2", lambda a: E5M2, f"out_dtype: got torch.float8_e5m2, {OUT_DTYPES}"),
    ("residual-fp16-to-e4m3",
     lambda a: {"out_dtype": E4M3, "residual": zeros(M, N, dtype=FP16)},
     "residual: got torch.float16, must be torch.bfloat16 or torch.float32"),
]
VALUES = [
    ("xq-0d", lambda a: a["xq"][0, 0], "xq: got 0 dimensions, must be [..., K]"),
    ("xq-k-0", lambda a: a["xq"][:, :0], "xq: got K = 0, must be a positive multiple of 16"),
    ("xq-k-88", lambda a: a["xq"][:, :88], "xq: got K = 88, must be a positive multiple of 16"),
    ("wq-n-60", lambda a: a["wq"][:60], "wq: got N = 60, must be a positive multiple of 8"),
    ("wq-k-80", lambda a: a["wq"][:, :80], "wq: got K = 80, must be 96 as in xq"),
    ("sx-short", lambda a: a["sx"][:5], f"sx: got shape (5,), {SX}"),
    ("sx-row", lambda a: a["sx"][None], f"sx: got shape (1, 6), {SX}"),
    ("sx-batch", lambda a: {"xq": a["xq"].view(2, 3, K), "sx": a["sx"].view(3, 2)},
     "sx: got shape (3, 2), must be (6,) or (6, 1) or (2, 3) or (2, 3, 1) or one element"),
    ("sw-long", lambda a: a["sw"].repeat(2), f"sw: got shape (128,), {SW}"),
    ("sw-3d", lambda a: a["sw"][:, None, None], f"sw: got shape (64, 1, 1), {SW}"),
    ("sw-mixed", lambda a: mxfp8()["sw"],
     "sw: got torch.float8_e8m0fnu, must be torch.float32 as sx is (scales of one kind)"),
    ("bias-row", lambda a: a["bias"][None], "bias: got shape (1, 64), must be (64,)"),
    ("bias-short", lambda a: a["bias"][:56], "bias: got shape (56,), must be (64,)"),
    ("residual-wide", lambda a: zeros(M, 72), "residual: got shape (6, 72), must be (6, 64)"),
    ("residual-batch", lambda a: {"xq": a["xq"].view(2, 3, K)},
     "residual: got shape (6, 64), must be (2, 3, 64)"),
    ("out-short", lambda a: zeros(5, N), "out: got shape (5, 64), must be (6, 64)"),
    ("out_dtype-e4m3", lambda a: E4M3,
     "out_dtype: got torch.float8_e4m3fn with fp32 scales, "
     "must be used with MXFP8 (float8_e8m0fnu) scales"),
    *((f"activation-{bad}", lambda a, bad=bad: bad, f"activation: got {bad!r}, {ACTIVATIONS}")
      for bad in ("swish", "", ["relu"], 3)),
    ("xq-columns", lambda a: columns(a["xq"]), f"xq: got stride 6 {LAST}"),
    ("wq-every-second", lambda a: a["wq"].repeat(1, 2)[:, ::2], f"wq: got stride 2 {LAST}"),
    ("residual-columns", lambda a: columns(a["residual"]), f"residual: got stride 6 {LAST}"),
    ("xq-8-bytes-on", lambda a: strided(a["xq"], K, 8), f"xq: got an address 8 {ALIGNED}"),
    ("wq-8-bytes-on", lambda a: strided(a["wq"], K, 8), f"wq: got an address 8 {ALIGNED}"),
    ("residual-2-bytes-on", lambda a: strided(a["residual"], N, 1),
     f"residual: got an address 2 {ALIGNED}"),
    ("out-8-bytes-on", lambda a: strided(a["residual"], N, 4), f"out: got an address 8 {ALIGNED}"),
    ("xq-rows-of-104", lambda a: strided(a["xq"], 104), f"xq: got a row stride of 104 {ROWS}"),
    ("residual-rows-of-136", lambda a: strided(a["residual"], 68),
     f"residual: got a row stride of 136 {ROWS}"),
    ("out-rows-of-136", lambda a: strided(a["residual"], 68),
     f"out: got a row stride of 136 {ROWS}"),
    ("xq-uneven", lambda a: uneven(a["xq"]),
     "xq: got strides (384, 96, 1), must be rows at one stride"),
    ("residual-uneven",
     lambda a: {"xq": a["xq"].view(2, 3, K), "residual": uneven(a["residual"])},
     "residual: got strides (256, 64, 1), must be rows at one stride"),
    ("sx-uneven", lambda a: {"xq": a["xq"].view(2, 3, K), "sx": torch.ones(2, 4)[:, :3]},
     "sx: got strides (4, 1), must be one stride between its values"),
    ("bias-every-second", lambda a: zeros(2 * N)[::2], "bias: got stride 2, must be 1"),
    ("bias-expanded", lambda a: zeros(1).expand(N), "bias: got stride 0, must be 1"),
    ("out-rows-meet", lambda a: zeros(M * N).as_strided((M, N), (16, 1)),
     "out: got row stride 16, must be at least 64 (rows overlap)"),
    ("out-expanded", lambda a: zeros(1, N).expand(M, N),
     "out: got row stride 0, must be at least 64 (rows overlap)"),
    ("xq-meta", lambda a: a["xq"].to("meta"), "sx: got device cpu, must be meta as xq is"),
    ("out-meta", lambda a: zeros(M, N).to("meta"), "out: got device meta, must be cpu as xq is"),
    *((f"{name}-meta", lambda a, name=name: a[name].to("meta"),
       f"{name}: got device meta, must be cpu as xq is") for name in INPUTS[1:]),
    *((f"out-on-{name}", overlapping(name),
       f"out: got memory that overlaps {name}, must be separate") for name in INPUTS),
]
MX_VALUES = [
    ("xq-k-80", lambda a: a["xq"][:, :80], "xq: got K = 80, must be a positive multiple of 32"),
    ("wq-n-60", lambda a: a["wq"][:60], "wq: got N = 60, must be a positive multiple of 8"),
    ("wq-n-40-to-e4m3", lambda a: {"wq": a["wq"][:40], "out_dtype": E4M3},
     "wq: got 40 output columns, must be a multiple of 32 for MXFP8 output"),
    ("out-with-e4m3", lambda a: {"out_dtype": E4M3, "out": zeros(M, N, dtype=E4M3)},
     "out: got a tensor with out_dtype torch.float8_e4m3fn, must be None"),
    ("sx-short", lambda a: a["sx"][:5], f"sx: got shape (5, 3), must be (6, 3) {BLOCKS}"),
    ("sx-1d", lambda a: {"xq": a["xq"][0], "sx": a["sx"][0]},
     f"sx: got shape (3,), must be (1, 3) {BLOCKS}"),
    ("sw-blocks", lambda a: to_blocked(a["sw"]).repeat(2),
     f"sw: got shape (1024,), must be (64, 3) {BLOCKS}"),
    ("sw-mixed", lambda a: per_token()["sw"],
     "sw: got torch.float32, must be torch.float8_e8m0fnu as sx is (scales of one kind)"),
    ("sx-columns", lambda a: columns(a["sx"]), "sx: got strides (1, 6), must be contiguous"),
    ("sw-every-second", lambda a: to_blocked(a["sw"]).repeat(2)[::2],
     "sw: got strides (2,), must be contiguous"),
    *((f"out-on-{name}", overlapping(name),
       f"out: got memory that overlaps {name}, must be separate") for name in ("sx", "sw")),
]
GRADS = [
    (f"{name}-grad", needs_grad(name),
     f"{name}: got a tensor that requires grad, must be called under torch.no_grad() "
     "(inference only)") for name in (*INPUTS, "out")
]
# fmt: on
BAD = [
    pytest.param(error, mx, change, message, id=f"mx-{name}" if mx else name)
    for error, mx, cases in (
        (TypeError, False, TYPES),
        (TypeError, True, MX_TYPES),
        (ValueError, False, VALUES),
        (ValueError, True, MX_VALUES),
        (RuntimeError, False, GRADS),
        (RuntimeError, True, GRADS),
    )
    for name, change, message in cases
]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("error", "mx", "change", "message"), BAD)
def test_refusal(
    error: type[Exception], mx: bool, change: Change, message: str, request: pytest.FixtureRequest
) -> None:
    """Whether or not its like has been seen before, and without a trace in the next good call."""
    good = mxfp8() if mx else per_token()
    before = bits(cute_fp8.gemm(**good))
    changes = change(good)
    if not isinstance(changes, dict):
        changes = {request.node.callspec.id.removeprefix("mx-").split("-")[0]: changes}
    assert REFUSAL.fullmatch(message), "the argument, what it got, what it must be, in one line"
    for prepare in (lambda: None, plan.forget):
        prepare()
        with pytest.raises(error) as caught:
            cute_fp8.gemm(**{**good, **changes})
        assert type(caught.value) is error
        assert str(caught.value) == message
    assert bits(cute_fp8.gemm(**good)) == before


@pytest.mark.parametrize("name", INPUTS)
def test_a_known_plan_still_checks_what_its_key_does_not_hold(name: str) -> None:
    call = per_token()
    cute_fp8.gemm(**call, out=zeros(M, N))
    call.update(overlapping(name)(call))
    with pytest.raises(ValueError, match=f"^out: got memory that overlaps {name}, must be sep"):
        cute_fp8.gemm(**call)


SCALES_ALLOWED = {
    "sx-column": lambda a: {"sx": a["sx"].view(M, 1)},
    "sx-every-second": lambda a: {"sx": a["sx"].repeat_interleave(2)[::2]},
    "sx-of-a-matrix": lambda a: {"sx": a["sx"][:, None].repeat(1, 5)[:, 3]},
    "sw-column": lambda a: {"sw": a["sw"].view(N, 1)},
    "sw-row": lambda a: {"sw": a["sw"].view(1, N)},
    "sw-every-second": lambda a: {"sw": a["sw"].repeat_interleave(2)[::2]},
}
ALLOWED = {
    "xq-rows-of-112": lambda a: {"xq": strided(a["xq"], 112)},
    "wq-rows-of-128": lambda a: {"wq": strided(a["wq"], 128, 16)},
    "residual-rows-of-72": lambda a: {"residual": strided(a["residual"], 72)},
    "residual-fp32": lambda a: {"residual": a["residual"].float()},
    "bias-fp32": lambda a: {"bias": a["bias"].float()},
    "bias-2-bytes-on": lambda a: {"bias": a["bias"].repeat(2)[1:65].copy_(a["bias"].clone())},
    "out": lambda a: {"out": zeros(M, N)},
    "out-rows-of-80": lambda a: {"out": zeros(M, 80)[:, 8:72]},
    "out-after-xq": lambda a: dict(zip(("xq", "out"), in_one_buffer(a["xq"], 0), strict=True)),
    "fast-accum": lambda a: {"fast_accum": True},
    "parameters": lambda a: {n: torch.nn.Parameter(t, requires_grad=False) for n, t in a.items()},
    "batch": lambda a: batched(a, (2, 3)),
    "batch-3d": lambda a: batched(a, (3, 1, 2)),
    "batch-strided": lambda a: {
        "xq": strided(a["xq"], 112).as_strided((2, 3, K), (336, 112, 1)),
        "residual": strided(a["residual"], 72).as_strided((2, 3, N), (216, 72, 1)),
    },
    "batch-odd-unit-stride": lambda a: {
        name: a[name].as_strided((1, 6, a[name].shape[1]), (13, a[name].shape[1], 1))
        for name in ("xq", "residual")
    },
}


LAYOUTS = [
    pytest.param(mx, change, id=f"mx-{name}" if mx else name)
    for mx, table in ((False, SCALES_ALLOWED), (False, ALLOWED), (True, ALLOWED))
    for name, change in table.items()
]


@pytest.mark.parametrize(("mx", "change"), LAYOUTS)
def test_allowed(mx: bool, change: Change) -> None:
    """Layouts that mean the same give the same bits."""
    call = mxfp8() if mx else per_token()
    expected = cute_fp8.gemm(**call)
    changes = change(call)
    for _ in range(2):  # unseen, then from its plan
        y = cute_fp8.gemm(**{**call, **changes})
        assert y.shape == (*changes.get("xq", call["xq"]).shape[:-1], N)
        assert bits(y.contiguous()) == bits(expected)


def test_scales_of_the_batch_shape() -> None:
    call = per_token()
    expected = bits(cute_fp8.gemm(**call))
    for batch, ones in product(((2, 3), (6, 1)), ((), (1,))):
        call.update(batched(call, batch), sx=call["sx"].view(*batch, *ones))
        assert bits(cute_fp8.gemm(**call)) == expected


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["sx", "sw"])
def test_one_scale_for_all(name: str, shape: tuple[int, ...]) -> None:
    call = per_token()
    one = torch.full((), 0.25)
    expected = cute_fp8.gemm(**{**call, name: one.expand(call[name].shape).contiguous()})
    assert bits(cute_fp8.gemm(**{**call, name: one.view(shape)})) == bits(expected)
    assert bits(cute_fp8.gemm(**{**call, name: one.expand(call[name].shape)})) == bits(expected)


def test_mx_scales() -> None:
    """Row-major, blocked, or one of each."""
    call = mxfp8()
    expected = bits(cute_fp8.gemm(**call))
    sx, sw = ((call[name], to_blocked(call[name])) for name in ("sx", "sw"))
    for batch, call["sx"], call["sw"] in product(((6,), (2, 3)), sx, sw):
        call.update(batched(call, batch))
        assert bits(cute_fp8.gemm(**call)) == expected


@pytest.mark.parametrize("mx", [False, True], ids=["per-token", "mx"])
def test_one_token(mx: bool) -> None:
    """1-D, a row at an odd stride, its scale at an odd stride."""
    call = mxfp8() if mx else per_token()
    expected = cute_fp8.gemm(**call)[2]
    one = {**call, "xq": call["xq"][2], "sx": call["sx"][2:3], "residual": call["residual"][2]}
    y = cute_fp8.gemm(**one)
    assert y.shape == (N,)
    assert bits(y) == bits(expected)
    odd = {
        name: one[name].as_strided((1, one[name].numel()), (7, 1)) for name in ("xq", "residual")
    }
    odd["sx"] = one["sx"] if mx else one["sx"].as_strided((1, 1), (5, 3))
    odd["out"] = zeros(N).as_strided((1, N), (3, 1))
    assert bits(cute_fp8.gemm(**{**one, **odd})) == bits(expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_grad(mode: type) -> None:
    call = per_token()
    expected = bits(cute_fp8.gemm(**call))
    call = {name: torch.nn.Parameter(tensor) for name, tensor in call.items()}
    with mode():
        y = cute_fp8.gemm(**call)
    assert not y.requires_grad
    assert bits(y) == expected
    with pytest.raises(RuntimeError, match="xq: got a tensor that requires grad"):
        cute_fp8.gemm(**call)


@pytest.mark.parametrize("batch", [(0,), (0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("mx", [False, True], ids=["per-token", "mx"])
def test_no_tokens(mx: bool, batch: tuple[int, ...]) -> None:
    """With every option, the result is there and empty."""
    call = mxfp8() if mx else per_token()
    call["xq"] = zeros(*batch, K, dtype=E4M3)
    call["sx"] = call["sx"][:0]
    dtypes = (BF16, FP16, FP32, E4M3) if mx else (BF16, FP16, FP32)
    for out_dtype, activation in product(dtypes, (None, "relu", "silu", "gelu", "gelu_tanh")):
        call.update(out_dtype=out_dtype, activation=activation)
        call["residual"] = zeros(*batch, N, dtype=FP32)
        y = cute_fp8.gemm(**call)
        if out_dtype is E4M3:
            y, scales = y
            assert scales.shape == (0,) and scales.dtype is E8M0
        else:
            out = torch.empty_like(y)
            assert cute_fp8.gemm(**call, out=out) is out
        assert y.shape == (*batch, N) and y.dtype is out_dtype
