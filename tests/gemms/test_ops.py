"""What tracing, modes, transforms and subclasses see of a GEMM: the same result as eager calls."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from counting import Counting
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cute_fp8
from cute_fp8 import quantize_mxfp8
from cute_fp8.gemms import ops
from cute_fp8.gemms.case import gemm_case
from cute_fp8.testing import inputs

M, N, K = 5, 64, 96
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
#: M of successive calls of one compiled function.
TOKENS = (2, 17, 64, 300)
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def per_token(m: int = M) -> Operands:
    case = gemm_case(m, N, K, device="cpu")
    return case.xq, case.sx, case.wq, case.sw


def mxfp8(m: int = M, blocked: bool = False, n: int = N) -> Operands:
    x, w = inputs("gaussian", m, K, seed=1), inputs("gaussian", n, K, seed=2)
    return *quantize_mxfp8(x, blocked=blocked), *quantize_mxfp8(w, blocked=blocked)


def as_bytes(operands: Operands) -> tuple[Tensor, ...]:
    return tuple(map(ops.as_bytes, operands))


def bias_and_residual(m: int = M, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    bias, residual = (torch.randn(shape, generator=generator) for shape in ((N,), (m, N)))
    return bias.to(dtype), residual.to(dtype)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


# ---------------------------------------------------------------------------- the ops themselves


@pytest.mark.parametrize("variant", [per_token, mxfp8])
@pytest.mark.parametrize("options", ["plain", "bias", "residual", "everything"])
def test_opcheck(variant: Callable[..., Operands], options: str) -> None:
    """Schema, fake kernel, autograd registration, under static and symbolic shapes."""
    bias, residual = bias_and_residual(dtype=BF16)
    extras = {
        "plain": (None, None, None),
        "bias": (bias, None, None),
        "residual": (None, residual, None),
        "everything": (bias, residual, "silu"),
    }[options]
    arguments = (*as_bytes(variant()), *extras, False)
    torch.library.opcheck(torch.ops.cute_fp8.gemm, (*arguments, BF16, False))
    out = torch.empty((M, N), dtype=BF16)
    torch.library.opcheck(torch.ops.cute_fp8.gemm_out, (*arguments, False, out))
    if variant is mxfp8:
        torch.library.opcheck(torch.ops.cute_fp8.gemm_quantized, arguments)


def test_the_ops_equal_the_function() -> None:
    bias, residual = bias_and_residual()
    for operands in (per_token(), mxfp8(), mxfp8(blocked=True)):
        arguments = (*as_bytes(operands), bias, residual, "gelu", False)
        options = {"residual": residual, "activation": "gelu"}
        expected = cute_fp8.gemm(*operands, bias, **options, out_dtype=FP32)
        assert same(torch.ops.cute_fp8.gemm(*arguments, FP32, False), expected)
        out = torch.empty_like(expected)
        assert torch.ops.cute_fp8.gemm_out(*arguments, False, out) is None
        assert same(out, expected)
    codes, scales = torch.ops.cute_fp8.gemm_quantized(*arguments)
    expected = cute_fp8.gemm(*operands, bias, **options, out_dtype=E4M3)
    assert same((codes, scales), as_bytes(expected))


# ---------------------------------------------------------------------------- torch.compile


def functional(m: int) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    _, _, wq, sw = per_token()
    bias, residual = bias_and_residual(m)

    def layer(xq: Tensor, sx: Tensor, residual: Tensor) -> Tensor:
        y = cute_fp8.gemm(
            xq, sx, wq, sw, bias, residual=residual, activation="gelu", out_dtype=FP32
        )
        return y * 2

    return layer, (*per_token(m)[:2], residual)


def into_out(m: int) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    _, _, wq, sw = per_token()

    def layer(xq: Tensor, sx: Tensor, out: Tensor) -> Tensor:
        assert cute_fp8.gemm(xq, sx, wq, sw, out=out) is out
        return out + 1

    return layer, (*per_token(m)[:2], torch.full((m, N), float("nan"), dtype=BF16))


def mx_row_major(m: int) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    _, _, wq, sw = mxfp8()
    return lambda xq, sx: cute_fp8.gemm(xq, sx, wq, sw, activation="relu"), mxfp8(m)[:2]


def mx_blocked(m: int) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    # More weight rows than one block has: torch takes equal sizes of a first call for one size.
    _, _, wq, sw = mxfp8(blocked=True, n=136)
    return lambda xq, sx: cute_fp8.gemm(xq, sx, wq, sw, activation="relu"), mxfp8(m, True)[:2]


def mx_output(m: int) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    _, _, wq, sw = mxfp8()
    return lambda xq, sx: cute_fp8.gemm(xq, sx, wq, sw, out_dtype=E4M3), mxfp8(m)[:2]


@pytest.mark.parametrize("form", [functional, into_out, mx_row_major, mx_blocked, mx_output])
def test_one_graph_serves_any_number_of_tokens(form: Callable[..., Any]) -> None:
    """M >= 2: torch specialises on 0 and 1."""
    backend = Counting()
    compiled = torch.compile(form(2)[0], fullgraph=True, dynamic=True, backend=backend)
    for m in TOKENS:
        layer, arguments = form(m)
        expected = layer(*(argument.clone() for argument in arguments))
        assert same(compiled(*arguments), expected), m
        if form is into_out:
            assert same(arguments[2] + 1, expected)
    assert backend.graphs == 1


@pytest.mark.parametrize("form", [functional, into_out, mx_row_major, mx_blocked, mx_output])
def test_through_aot_autograd(form: Callable[..., Any]) -> None:
    """Where graphs are made functional: ``out`` is a mutation."""
    layer, arguments = form(M)
    expected = layer(*(argument.clone() for argument in arguments))
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        assert same(compiled(*arguments), expected)
    if form is into_out:
        assert same(arguments[2] + 1, expected)


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_linear_functions_inside_compile(name: str) -> None:
    quantize, linear = {
        "fp8": (cute_fp8.quantize_fp8, cute_fp8.fp8_w8a8_linear),
        "mxfp8": (cute_fp8.quantize_mxfp8, cute_fp8.mxfp8_linear),
    }[name]
    q, scale = quantize(inputs("gaussian", N, K, seed=4))
    bias = inputs("gaussian", 1, N, seed=5)[0]
    backend = Counting()

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def layer(x: Tensor) -> Tensor:
        return torch.relu(linear(x, q, scale, bias))

    for m in TOKENS:
        x = inputs("gaussian", m, K, seed=m)
        assert same(layer(x), torch.relu(linear(x, q, scale, bias)))
    # Up to 128 tokens the blocked scales are one tile, a size of 1 for torch to specialise on.
    assert backend.graphs <= {"fp8": 1, "mxfp8": 2}[name]


def raised(call: Callable[[], Any]) -> str:
    """The message of an error, which is the tracer's own around ours, with those of its causes."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return "".join(traceback.format_exception(caught.value))


def test_refusals_while_tracing() -> None:
    xq, sx, wq, sw = per_token()

    def traced(**options: Any) -> Callable[[], Any]:
        def layer(xq: Tensor) -> Any:
            return cute_fp8.gemm(xq, sx, wq, sw, **options)

        return lambda: torch.compile(layer, fullgraph=True, backend="eager")(xq)

    assert "activation: got 'swish', must be" in raised(traced(activation="swish"))
    out = torch.empty((M, N), dtype=FP16)
    assert "out: got torch.float16, must be torch.bfloat16" in raised(traced(out=out))
    assert "out: got torch.float16, must be torch.float8" in raised(traced(out=out, out_dtype=E4M3))
    bias = torch.zeros(N, requires_grad=True)
    assert "bias: got a tensor that requires grad, must be" in raised(traced(bias=bias))
    with torch.no_grad():
        assert traced(bias=bias)().shape == (M, N)


def test_a_graph_break_leaves_the_eager_message() -> None:
    """Without ``fullgraph``, the caller of a compiled function sees what an eager call says."""
    xq, sx, wq, sw = per_token()
    bias = torch.zeros(N, requires_grad=True)
    layer = torch.compile(lambda x: cute_fp8.gemm(x, sx, wq, sw, bias), backend="eager")
    with pytest.raises(RuntimeError, match=r"^bias: got a tensor that requires grad, must"):
        layer(xq)


def test_export() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            _, _, wq, sw = per_token()
            self.register_buffer("wq", wq)
            self.register_buffer("sw", sw)

        def forward(self, x: Tensor) -> Tensor:
            codes, scales = cute_fp8.quantize_fp8_activations(x)
            return cute_fp8.gemm(codes, scales, self.wq, self.sw, activation="silu")

    layer, tokens = Layer(), torch.export.Dim("tokens", min=2, max=4096)
    x = inputs("gaussian", 9, K, seed=6)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: tokens},))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.cute_fp8.gemm.default) == 1
    for m in TOKENS:
        x = inputs("gaussian", m, K, seed=m)
        assert same(program.module()(x), layer(x))


# ---------------------------------------------------------------------------- modes and subclasses


def test_fake_tensors() -> None:
    """Shapes, dtypes, devices and refusals, without a result."""
    real = per_token()
    with FakeTensorMode() as mode:
        xq, sx, wq, sw = (mode.from_tensor(t) for t in real)
        for out_dtype in (BF16, FP16, FP32):
            y = cute_fp8.gemm(xq, sx, wq, sw, out_dtype=out_dtype)
            assert isinstance(y, FakeTensor) and y.shape == (M, N) and y.dtype is out_dtype
        out = mode.from_tensor(torch.empty((M, N), dtype=BF16))
        assert cute_fp8.gemm(xq, sx, wq, sw, out=out) is out
        with pytest.raises(ValueError, match=r"^wq: got K = 80, must be 96 as in xq$"):
            cute_fp8.gemm(xq, sx, wq[:, :80], sw)


@pytest.mark.parametrize(("m", "n"), [(2, 32), (5, 64), (128, 128), (129, 160), (300, 288)])
def test_fake_mx_outputs(m: int, n: int) -> None:
    """As many blocks of scales as a result has."""
    real = mxfp8(m, n=n)
    expected = cute_fp8.gemm(*real, out_dtype=E4M3)
    with FakeTensorMode() as mode:
        got = cute_fp8.gemm(*(mode.from_tensor(t) for t in real), out_dtype=E4M3)
    for fake, tensor in zip(got, expected, strict=True):
        assert fake.shape == tensor.shape and fake.dtype is tensor.dtype
        assert fake.stride() == tensor.stride()


class Dispatches(TorchDispatchMode):
    """Remembers the ops of this package that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "cute_fp8":
            self.seen.append(func._opname)
        return func(*args, **kwargs or {})


class Functions(TorchFunctionMode):
    """The same for functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("cute_fp8."):
            self.seen.append(str(func).split(".")[1])
        return func(*args, **kwargs or {})


class Spy(Tensor):
    """A subclass that remembers the ops that it goes through."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("mode", [Dispatches, Functions])
def test_modes_see_the_ops(mode: Callable[[], Any]) -> None:
    bias, residual = bias_and_residual()
    options = {"residual": residual, "activation": "silu"}
    out = torch.empty((M, N), dtype=BF16)
    for operands in (per_token(), mxfp8()):
        expected = cute_fp8.gemm(*operands, bias, **options)
        with mode() as active:
            y = cute_fp8.gemm(*operands, bias, **options)
            assert cute_fp8.gemm(*operands, bias, **options, out=out) is out
        assert same(y, expected) and same(out, expected)
        assert active.seen == ["gemm", "gemm_out"]
    expected = cute_fp8.gemm(*operands, bias, **options, out_dtype=E4M3)
    with mode() as active:
        assert same(cute_fp8.gemm(*operands, bias, **options, out_dtype=E4M3), expected)
    assert active.seen == ["gemm_quantized"]


@pytest.mark.parametrize("position", range(6))
def test_a_subclass_goes_through_the_op(position: int) -> None:
    """Whichever argument it is."""
    arguments = [*per_token(), *bias_and_residual()]
    expected = cute_fp8.gemm(*arguments[:5], residual=arguments[5])
    arguments[position] = arguments[position].as_subclass(Spy)
    Spy.seen.clear()
    y = cute_fp8.gemm(*arguments[:5], residual=arguments[5])
    assert Spy.seen.count("cute_fp8.gemm") == 1
    assert isinstance(y, Spy) and same(y.as_subclass(Tensor), expected)
    out = torch.empty_like(expected).as_subclass(Spy)
    assert cute_fp8.gemm(*per_token(), out=out) is out
    assert Spy.seen.count("cute_fp8.gemm_out") == 1


# ---------------------------------------------------------------------------- torch.func


def test_vmap() -> None:
    """Over a batch of bias vectors, and of activations."""
    xq, sx, wq, sw = per_token(6)
    biases = torch.stack([torch.zeros(N), torch.ones(N)])
    y = torch.func.vmap(lambda b: cute_fp8.gemm(xq, sx, wq, sw, b))(biases)
    assert same(y, torch.stack([cute_fp8.gemm(xq, sx, wq, sw, b) for b in biases]))
    expected = cute_fp8.gemm(xq, sx, wq, sw).view(2, 3, N)
    batches = xq.view(2, 3, K), sx.view(2, 3)
    try:
        torch.func.vmap(lambda x: x.view(torch.uint8))(batches[0])
    except RuntimeError as error:
        pytest.skip(f"this torch has no batch of codes: {error}")
    y = torch.func.vmap(lambda x, s: cute_fp8.gemm(x, s, wq, sw))(*batches)
    assert same(y, expected)


def test_functionalize_and_functional_call() -> None:
    xq, sx, wq, sw = per_token()
    expected = cute_fp8.gemm(xq, sx, wq, sw)
    assert same(torch.func.functionalize(lambda x: cute_fp8.gemm(x, sx, wq, sw))(xq), expected)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sw = torch.nn.Parameter(torch.ones(N), requires_grad=False)

        def forward(self, xq: Tensor) -> Tensor:
            return cute_fp8.gemm(xq, sx, wq, self.sw)

    assert same(torch.func.functional_call(Layer(), {"sw": sw}, (xq,)), expected)


def test_gradients_are_refused() -> None:
    xq, sx, wq, sw = per_token()
    with pytest.raises(RuntimeError, match=r"^sx: got a tensor that requires grad, must be"):
        torch.func.grad(lambda s: cute_fp8.gemm(xq, s, wq, sw).float().sum())(sx)


def test_a_compiled_chain() -> None:
    """Two GEMMs, the first one's MX output the second one's input."""
    xq, sx, wq, sw = mxfp8()
    w2, s2 = quantize_mxfp8(inputs("gaussian", 32, N, seed=7))

    def chain(xq: Tensor, sx: Tensor) -> Tensor:
        codes, scales = cute_fp8.gemm(xq, sx, wq, sw, activation="relu", out_dtype=E4M3)
        return cute_fp8.gemm(codes, scales, w2, s2)

    assert same(torch.compile(chain, fullgraph=True, backend="eager")(xq, sx), chain(xq, sx))
