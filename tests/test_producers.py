"""The producers' public API on the CPU: results, refusals, outputs, tracing, dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import cute_fp8
from cute_fp8 import numerics
from cute_fp8.kernels.row_config import RowConfig
from cute_fp8.rows import plan
from cute_fp8.rows.case import error, errors, row_case
from cute_fp8.rows.problem import OPS
from cute_fp8.testing import KINDS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
W = torch.rand(64, generator=torch.Generator().manual_seed(1)).to(BF16) + 0.5
VARIANTS: tuple[dict[str, Any], ...] = (
    {"variant": "per_token"},
    {"variant": "mxfp8"},
    {"variant": "mxfp8", "blocked": True},
)
#: Every producer, on its own kind of input of 64 columns of output.
CALLS: dict[str, Any] = {
    "rmsnorm_quantize": lambda x, **o: cute_fp8.rmsnorm_quantize(x, W, **o),
    "layernorm_quantize": lambda x, **o: cute_fp8.layernorm_quantize(x, W, W, **o),
    "silu_mul_quantize": cute_fp8.silu_mul_quantize,
    "gelu_mul_quantize": cute_fp8.gelu_mul_quantize,
    "gelu_tanh_mul_quantize": cute_fp8.gelu_tanh_mul_quantize,
}


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def given(op: str, x: Tensor = X) -> Tensor:
    return torch.cat([x, x.flip(0)], dim=-1) if "mul" in op else x


# ------------------------------------------------------------------------------------- results


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As Hugging Face's ``LlamaRMSNorm``."""
    hidden = x.to(FP32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return weight * hidden.to(x.dtype)


def gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As Hugging Face's ``GemmaRMSNorm``."""
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return (hidden * (1.0 + weight.float())).type_as(x)


def test_rmsnorm_rounds_as_the_module_that_it_replaces() -> None:
    hf = cute_fp8.rmsnorm_quantize(X, W, 1e-5, return_normed=True)
    assert same(hf[2], llama(X, W, 1e-5))
    fused = cute_fp8.rmsnorm_quantize(X, W, 1e-5, rounding="fused", return_normed=True)
    values = F.rms_norm(X.float(), (64,), W.float(), 1e-5).to(BF16)
    assert same(fused[2], values) and not same(fused[2], hf[2])
    offset = cute_fp8.rmsnorm_quantize(X, W, 1e-5, offset=1.0, return_normed=True)
    assert same(offset[2], gemma(X, W, 1e-5))


def test_residual_is_added_and_rounded_before_the_norm() -> None:
    residual = X.flip(0) * 3
    _, _, hidden, normed = cute_fp8.rmsnorm_quantize(
        X, W, 1e-5, residual=residual, return_normed=True
    )
    assert same(hidden, X + residual) and same(normed, llama(X + residual, W, 1e-5))
    results = cute_fp8.layernorm_quantize(X, W, residual=residual, return_normed=True)
    want = F.layer_norm((X + residual).float(), (64,), W.float()).to(BF16)
    assert same(results[2], X + residual)
    assert float((results[3].float() - want.float()).abs().max()) < 0.02


@pytest.mark.parametrize(
    ("op", "activation"),
    [
        ("silu_mul_quantize", F.silu),
        ("gelu_mul_quantize", F.gelu),
        ("gelu_tanh_mul_quantize", lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_gates(op: str, activation: Any) -> None:
    gate, up = X, X.flip(0)
    want = (activation(gate.float()) * up.float()).to(BF16)
    assert same(CALLS[op](torch.cat([gate, up], -1), return_product=True)[2], want)
    pairs = torch.stack([gate.view(6, 8, 8), up.view(6, 8, 8)], dim=2).view(6, 128)
    results = CALLS[op](pairs, layout="interleaved", return_product=True)
    assert same(results[2], want)


@pytest.mark.parametrize("options", VARIANTS)
def test_attention_outputs_are_rows_of_tokens(options: dict[str, Any]) -> None:
    o = torch.randn(2, 4, 5, 16)
    rows = o.transpose(1, 2).reshape(10, 64)
    got = cute_fp8.attention_out_quantize(o, **options)
    variant, blocked = options["variant"], options.get("blocked", False)
    want = (
        numerics.quantize_fp8_activations(rows)
        if variant == "per_token"
        else numerics.quantize_mxfp8(rows, blocked=blocked)
    )
    assert all(same(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_what_is_returned(op: str, kind: str) -> None:
    for options in VARIANTS:
        for dtype in (BF16, FP16, FP32):
            case = row_case(op, 5, 96, kind=kind, dtype=dtype, residual=True, **options).kept()
            assert errors(case, case.run()) == []


def test_a_wrong_result_is_found() -> None:
    case = row_case("rmsnorm_quantize", 4, 64, residual=True).kept()
    for wrong in range(4):
        results = [tensor.clone() for tensor in case.run()]
        results[wrong].view(torch.uint8)[..., 1] ^= 0x40
        assert errors(case, tuple(results))
    assert error(row_case("quantize", 4, 64), row_case("quantize", 4, 64).run()) < 0.03
    assert error(row_case("quantize", 4, 64, seed=5), row_case("quantize", 4, 64).run()) > 0.3
    with pytest.raises(ValueError, match="must do so"):
        errors(row_case("rmsnorm_quantize", 4, 64), row_case("rmsnorm_quantize", 4, 64).run())


def test_moved_bytes() -> None:
    assert row_case("quantize", 4, 64).moved_bytes() == 4 * 64 * 3 + 16
    case = row_case("rmsnorm_quantize", 4, 64, "mxfp8", residual=True, weight=FP32)
    assert case.moved_bytes() == 4 * 64 * (2 + 2 + 2 + 1) + 64 * 4 + 8


# ------------------------------------------------------------------------------------- refusals


def cpu_refusals() -> list[tuple[Any, str]]:
    norm = cute_fp8.rmsnorm_quantize
    return [
        (lambda: norm(X.int(), W), "x: got torch.int32, must be bfloat16, float16 or float32"),
        (lambda: norm([1], W), "x: got list, must be a torch.Tensor"),
        (lambda: norm(X.to_sparse(), W), "x: got layout torch.sparse_coo, must be torch.strided"),
        (lambda: norm(X[:, :24], W[:24]), "x: got K = 24, must be a positive multiple of 16"),
        (
            lambda: norm(X[:, :48], W[:48], variant="mxfp8"),
            "x: got K = 48, must be a positive multiple of 32",
        ),
        (lambda: norm(X, W[:32]), "weight: got shape (32,), must be (64,)"),
        (lambda: norm(X, W.repeat(2)[::2]), "weight: got stride 2, must be 1"),
        (lambda: norm(X, W.repeat(2)[1:65]), "weight: got an address 2 bytes past a multiple of"),
        (lambda: norm(X, W.to("meta")), "weight: got device meta, must be cpu as x is"),
        (lambda: norm(X, W, residual=X[:3]), "residual: got shape (3, 64), must be (6, 64)"),
        (lambda: norm(X, W, residual=X.float()), "residual: got torch.float32, must be torch.bfl"),
        (lambda: norm(X, W, float("nan")), "eps: got nan, must be finite and, for eps, at least 0"),
        (lambda: norm(X, W, -1.0), "eps: got -1.0, must be finite and, for eps, at least 0"),
        (lambda: norm(X, W, "1"), "eps: got str, must be a number"),
        (lambda: norm(X, W, rounding="up"), "rounding: got 'up', must be one of hf, fused"),
        (lambda: norm(X, W, variant="int8"), "variant: got 'int8', must be one of per_token, mx"),
        (lambda: norm(X, W, blocked=True), "blocked: got True with per-token scales, must be used"),
        (lambda: norm(X, W, blocked=1, variant="mxfp8"), "blocked: got int, must be a bool"),
        (lambda: norm(X, W, return_normed=1), "keep: got int, must be a bool"),
        (
            lambda: cute_fp8.silu_mul_quantize(X, layout="pairs"),
            "layout: got 'pairs', must be one of halves, interleaved",
        ),
        (
            lambda: cute_fp8.silu_mul_quantize(X[:, :33]),
            "gate_up: got 33 columns, must be an even number",
        ),
        (
            lambda: cute_fp8.attention_out_quantize(X),
            "o: got 2 dimensions, must be 4-D [B, H, S, D]",
        ),
        (
            lambda: cute_fp8.quantize_fp8_activations(torch.tensor(1.0)),
            "x: got a tensor without dimensions, must be [..., K]",
        ),
    ]


@pytest.mark.parametrize("number", range(len(cpu_refusals())))
def test_refusals_are_one_line_and_the_next_call_works(number: int) -> None:
    call, message = cpu_refusals()[number]
    with pytest.raises((TypeError, ValueError)) as refusal:
        call()
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)
    assert cute_fp8.rmsnorm_quantize(X, W)[0].shape == X.shape


def test_inference_only() -> None:
    x = X.float().requires_grad_()
    with pytest.raises(RuntimeError, match=r"x: got a tensor that requires grad, must be called"):
        cute_fp8.quantize_fp8_activations(x)
    weight = torch.nn.Parameter(W)
    with pytest.raises(RuntimeError, match=r"weight: got a tensor that requires grad"):
        cute_fp8.rmsnorm_quantize(X, weight)
    with torch.no_grad():
        cute_fp8.rmsnorm_quantize(X, weight)
        cute_fp8.quantize_fp8_activations(x)
    # A weight to be quantised.
    cute_fp8.quantize_mxfp8(torch.nn.Parameter(X))


# ---------------------------------------------------------------------------------------- out


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("op", CALLS)
def test_out_is_written_and_returned(op: str, options: dict[str, Any]) -> None:
    first = CALLS[op](given(op), **options)
    want = CALLS[op](given(op, X * 2 + 1), **options)
    got = CALLS[op](given(op, X * 2 + 1), **options, out=first)
    assert all(a is b for a, b in zip(got, first, strict=True))
    assert all(same(a, b) for a, b in zip(got, want, strict=True))


def test_out_of_the_plain_quantisers() -> None:
    for function in (cute_fp8.quantize_fp8_activations, cute_fp8.quantize_mxfp8):
        out = function(X)
        assert function(X * 3, out=out)[0] is out[0]
        assert all(same(a, b) for a, b in zip(out, function(X * 3), strict=True))


def test_outputs_that_do_not_fit() -> None:
    good = cute_fp8.rmsnorm_quantize(X, W, residual=X)
    codes, scales, hidden = good
    wide = torch.zeros(6, 68, dtype=torch.uint8).view(E4M3)[:, :64]
    whole = torch.zeros(2 * 6 * 64, dtype=BF16)
    refused: list[tuple[Any, str]] = [
        ((codes, scales), "out: got 2 tensors, must be 3: codes, scales, hidden"),
        (codes, "out: got Tensor, must be a tuple of tensors"),
        ((codes, scales, None), "out: got tuple, must be a tuple of tensors"),
        ((codes[:3], scales, hidden), "out[codes]: got shape (3, 64), must be (6, 64)"),
        ((wide, scales, hidden), "out[codes]: got a row stride of 68 bytes, must be a multiple"),
        ((codes, scales.double(), hidden), "out[scales]: got torch.float64, must be torch.float32"),
        ((codes, scales[:3], hidden), "out[scales]: got shape (3,), must be (6,)"),
        (
            (codes, torch.zeros(12)[::2], hidden),
            "out[scales]: got strides (2,), must be contiguous",
        ),
        ((codes, scales, X), "out[2]: got memory that overlaps x, must be separate"),
        (
            (whole.view(torch.uint8)[:384].view(E4M3).view(6, 64), scales, whole[:384].view(6, 64)),
            "out[2]: got memory that overlaps out[0], must be separate",
        ),
        ((codes.to("meta"), scales, hidden), "out[codes]: got device meta, must be cpu"),
    ]
    for out, message in refused:
        with pytest.raises((TypeError, ValueError)) as refusal:
            cute_fp8.rmsnorm_quantize(X, W, residual=X.clone(), out=out)
        assert str(refusal.value).startswith(message)
    cute_fp8.rmsnorm_quantize(X, W, residual=X.clone(), out=good)


# ------------------------------------------------------------------------------------- tracing


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("op", CALLS)
def test_compiled_once_for_every_number_of_rows(op: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    graphs = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(
        lambda x: CALLS[op](x, **options), backend=backend, fullgraph=True, dynamic=True
    )
    with torch.no_grad():
        for m in (2, 17, 300):
            x = given(op, X[:1].repeat(m, 1) * torch.arange(1, m + 1).view(-1, 1))
            got, want = compiled(x), CALLS[op](x, **options)
            assert all(same(a, b) for a, b in zip(got, want, strict=True))
    assert graphs == 1


def test_out_is_written_by_compiled_code() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, out: cute_fp8.rmsnorm_quantize(x, W, residual=x * 2, out=out),
        backend="aot_eager",
        fullgraph=True,
    )
    with torch.no_grad():
        out = cute_fp8.rmsnorm_quantize(X, W, residual=X)
        compiled(X * 3, out)
        want = cute_fp8.rmsnorm_quantize(X * 3, W, residual=X * 3 * 2)
    assert all(same(a, b) for a, b in zip(out, want, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str) -> None:
    for options in VARIANTS:
        case = row_case(op, 6, 64, residual=True, **options)
        o = case.options
        arguments = (
            *case.inputs, op, o.variant, o.blocked, o.eps, o.offset, o.rounding, o.layout, o.keep,
        )  # fmt: skip
        torch.library.opcheck(torch.ops.cute_fp8.quantize_rows, arguments)
        results = list(torch.ops.cute_fp8.quantize_rows(*arguments))
        results += [None] * (4 - len(results))
        torch.library.opcheck(torch.ops.cute_fp8.quantize_rows_out, (*arguments, *results))


def test_subclasses_keep_their_meaning() -> None:
    class Named(Tensor):
        pass

    got = cute_fp8.quantize_mxfp8(X.as_subclass(Named))
    want = cute_fp8.quantize_mxfp8(X)
    assert all(same(a.as_subclass(Tensor), b) for a, b in zip(got, want, strict=True))


# ------------------------------------------------------------------------------------ dispatch


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("variant", ["per_token", "mxfp8"])
def test_routes(op: str, variant: str) -> None:
    targets = {
        (8, 9): "sm_89",
        (9, 0): "sm_90a",
        (10, 0): "sm_100a",
        (12, 0): "sm_120a",
        (12, 1): "sm_121a",
    }
    for capability, target in targets.items():
        found = cute_fp8.explain(op, m=16, k=4096, variant=variant, capability=capability)
        assert found.route is not None and found.route.target == target
        assert found.route.entry.name == "cute:row_quantize"
        threads = 128 if "norm" in op else 256
        assert f"for {target}, {threads} threads a row, matrix" in str(found)
        config = found.route.rows
        assert isinstance(config, RowConfig) and config.pdl is (capability >= (9, 0))
    for pinned in ("stand-in", "cute", "auto"):
        found = cute_fp8.explain(op, m=16, k=64, variant=variant, capability=(9, 0), backend=pinned)
        assert found.route is not None and found.route.entry.backend == "cute"
    for kind in ({"backend": "torch"}, {"backend": "reference"}, {"capability": (8, 0)}):
        arguments: dict[str, Any] = {"capability": (9, 0), **kind}
        found = cute_fp8.explain(op, m=16, k=64, variant=variant, **arguments)
        assert found.route is not None and found.route.entry.name == "reference:rows"
    with pytest.raises(ValueError, match=r"m, k: got 16, 64 and n 8, must be sizes"):
        cute_fp8.explain(op, m=16, n=8, k=64)


def test_programmatic_launch_can_be_turned_off() -> None:
    with cute_fp8.use(pdl=False):
        found = cute_fp8.explain("quantize", m=1, k=64, capability=(9, 0))
    assert found.route is not None and isinstance(found.route.rows, RowConfig)
    assert not found.route.rows.pdl
    with pytest.raises(TypeError, match="pdl: got int, must be a bool"), cute_fp8.use(pdl=1):
        pass


def test_plans_are_kept_and_forgotten() -> None:
    plan.forget()
    for _ in range(3):
        cute_fp8.quantize_fp8_activations(X)
    assert len(plan._plans) == 1
    cute_fp8.quantize_fp8_activations(X[:3])
    assert len(plan._plans) == 2
    plan.forget()
    assert not plan._plans
