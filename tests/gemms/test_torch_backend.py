"""The routes through torch's scaled matmul, on the CPU: what they hand to it, and what they make of
its result. The matmul is emulated, and refuses what the real one does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8 import dispatch, from_blocked, quantize_mxfp8, reference_linear, to_blocked
from cute_fp8.gemms import plan
from cute_fp8.gemms.case import GemmCase, gemm_case
from cute_fp8.testing import inputs

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
ACTIVATIONS = (None, "relu", "silu", "gelu", "gelu_tanh")


class ScaledMatmul:
    """``torch._scaled_mm`` in float64, with the demands of the GPU's, that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        *,
        scale_a: Tensor,
        scale_b: Tensor,
        out_dtype: torch.dtype,
        bias: Tensor | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        assert a.dtype is E4M3 and b.dtype is E4M3 and b.shape[0] == k and m > 0
        assert k % 16 == 0 and n % 16 == 0
        assert a.stride(1) == 1 and a.stride(0) % 16 == 0, "row-major"
        assert b.stride(0) == 1 and b.stride(1) % 16 == 0, "column-major"
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
        kind = self.kind(m, n, k, scale_a, scale_b)
        assert bias is None or (kind == "row-wise" and bias.dtype is BF16 and bias.shape == (n,))
        assert kind != "row-wise" or out_dtype is BF16
        self.calls.append({"kind": kind, "fast": use_fast_accum, "out_dtype": out_dtype})
        left, right = a.double(), b.t().double()
        if kind == "mxfp8":
            left = left * self.factors(scale_a, m, k)
            right = right * self.factors(scale_b, n, k)
            return (left @ right.t()).to(FP32).to(out_dtype)
        y = left @ right.t() * scale_a.double() * scale_b.double()
        return (y if bias is None else y + bias.double()).to(FP32).to(out_dtype)

    @staticmethod
    def kind(m: int, n: int, k: int, scale_a: Tensor, scale_b: Tensor) -> str:
        if scale_a.dtype is E8M0 and scale_b.dtype is E8M0:
            for scale, rows in ((scale_a, m), (scale_b, n)):
                assert scale.shape == (-(-rows // 128) * -(-k // 128) * 512,)
            return "mxfp8"
        assert scale_a.dtype is FP32 and scale_b.dtype is FP32
        if scale_a.numel() == 1 and scale_b.numel() == 1:
            return "tensor-wise"
        assert scale_a.shape == (m, 1) and scale_b.shape == (1, n)
        return "row-wise"

    @staticmethod
    def factors(scale: Tensor, rows: int, k: int) -> Tensor:
        exponents = from_blocked(scale, rows, k // 32).view(torch.uint8).double() - 127
        return torch.exp2(exponents).repeat_interleave(32, dim=1)


@pytest.fixture(params=[(8, 9), (9, 0), (10, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
def capability(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture
def matmul(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[ScaledMatmul]:
    """The CPU poses as a GPU that has no kernel of ours."""
    emulated = ScaledMatmul()
    routes = tuple(entry for entry in dispatch.TABLE if not entry.targets)
    monkeypatch.setattr(dispatch, "TABLE", routes)
    monkeypatch.setattr(torch, "_scaled_mm", emulated)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for module in (dispatch, reference_linear):
        monkeypatch.setattr(module, "capability_of_device", lambda device: capability)
    plan.forget()
    yield emulated
    plan.forget()


only_blackwell = pytest.mark.parametrize("capability", [(10, 0), (12, 0)], ids=str, indirect=True)


@pytest.mark.parametrize("bias", [None, BF16], ids=str)
@pytest.mark.parametrize("fast", [False, True], ids=["precise", "fast"])
def test_rowwise(matmul: ScaledMatmul, bias: torch.dtype | None, fast: bool) -> None:
    for shape in ((1, 16, 16), (33, 48, 160), (130, 144, 512)):
        case = gemm_case(*shape, device="cpu", bias=bias)
        case = replace(case, options={"fast_accum": fast})
        case.check(case.run_guarded())
        case.check(case.run())
    assert matmul.calls == [{"kind": "row-wise", "fast": fast, "out_dtype": BF16}] * 6


TENSORWISE = [
    {"out_dtype": FP16},
    {"out_dtype": FP32},
    {"bias": FP16},
    {"bias": FP32},
    {"residual": BF16},
    {"residual": FP32},
    *({"activation": name} for name in ACTIVATIONS if name),
    {"out_dtype": FP16, "bias": BF16, "activation": "gelu", "residual": FP16},
    {"out_dtype": FP32, "bias": FP32, "activation": "silu", "residual": FP32},
]


@pytest.mark.parametrize("fast", [False, True], ids=["precise", "fast"])
@pytest.mark.parametrize("options", TENSORWISE, ids=lambda o: "-".join(map(str, o.values())))
def test_tensorwise(matmul: ScaledMatmul, options: dict[str, Any], fast: bool) -> None:
    """The real scales are applied in the fp32 epilogue, whatever row-wise cannot do."""
    for shape in ((1, 16, 16), (33, 48, 160), (130, 144, 512)):
        case = gemm_case(*shape, device="cpu", **options)
        case = replace(case, options={"fast_accum": fast})
        case.check(case.run_guarded())
        case.check(case.run())
    assert matmul.calls == [{"kind": "tensor-wise", "fast": fast, "out_dtype": FP32}] * 6


def variations(case: GemmCase) -> Iterator[GemmCase]:
    """The same problem with scales and rows in other shapes and strides."""
    m, n = case.m, case.n
    yield replace(case, sx=case.sx.view(m, 1), sw=case.sw.view(n, 1))
    yield replace(case, sw=case.sw.view(1, n))
    yield replace(case, sx=case.sx.repeat_interleave(3)[::3], sw=case.sw.repeat(2, 1).t()[:, 1])
    yield replace(case, sx=case.sx[:1].expand(m), sw=case.sw[:1].expand(n))
    yield replace(case, sx=case.sx[:1], sw=case.sw[0])
    yield replace(case, sx=case.sx[0])
    for name in ("xq", "wq"):
        codes = getattr(case, name).view(torch.uint8)
        wide = torch.nn.functional.pad(codes, (16, 32))[:, 16 : 16 + case.k]
        yield replace(case, **{name: wide.view(E4M3)})


@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=["row-wise", "tensor-wise"])
def test_scales_and_rows_in_every_layout(matmul: ScaledMatmul, out_dtype: torch.dtype) -> None:
    case = gemm_case(34, 48, 160, device="cpu", out_dtype=out_dtype)
    for variation in variations(case):
        variation.check(variation.run())
    y = cute_fp8.gemm(case.xq.view(2, 17, 160), case.sx, case.wq, case.sw, out_dtype=out_dtype)
    assert torch.equal(y.view(34, 48), case.run())
    y = cute_fp8.gemm(case.xq[3], case.sx[3], case.wq, case.sw, out_dtype=out_dtype)
    assert torch.equal(y, case.run()[3])
    assert {call["kind"] for call in matmul.calls} <= {"row-wise", "tensor-wise"}
    assert (matmul.calls[0]["kind"] == "row-wise") == (out_dtype is BF16)


def test_odd_widths_and_no_tokens_go_elsewhere(matmul: ScaledMatmul) -> None:
    for case in (gemm_case(5, 24, 32, device="cpu"), gemm_case(0, 32, 32, device="cpu")):
        case.check(case.run_guarded())
    assert matmul.calls == []


def mx_call(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    x, w = inputs("gaussian", m, k, seed=1), inputs("gaussian", n, k, seed=2)
    return *quantize_mxfp8(x), *quantize_mxfp8(w / k**0.5)


@only_blackwell
def test_mxfp8(matmul: ScaledMatmul) -> None:
    """Bit for bit the reference, with both layouts of the scales and every epilogue."""
    for shape in ((1, 32, 32), (33, 64, 160), (130, 160, 512)):
        xq, sx, wq, sw = mx_call(*shape)
        options: dict[str, Any] = {
            "bias": torch.linspace(-1, 1, shape[1]),
            "residual": torch.linspace(-2, 2, shape[0] * shape[1]).view(shape[:2]),
        }
        for a, b, activation, out_dtype in product(
            (sx, to_blocked(sx)), (sw, to_blocked(sw)), ACTIVATIONS, (BF16, FP16, FP32)
        ):
            options.update(activation=activation, out_dtype=out_dtype)
            with cute_fp8.use(backend="reference"):
                expected = cute_fp8.gemm(xq, a, wq, b, **options)
            out = torch.empty_like(expected)
            with cute_fp8.use(backend="torch"):
                assert torch.equal(cute_fp8.gemm(xq, a, wq, b, **options), expected)
                assert cute_fp8.gemm(xq, a, wq, b, **options, out=out) is out
            assert torch.equal(out, expected)
    assert matmul.calls == [{"kind": "mxfp8", "fast": False, "out_dtype": FP32}] * 3 * 4 * 15 * 2


@only_blackwell
def test_mxfp8_output_and_batches(matmul: ScaledMatmul) -> None:
    xq, sx, wq, sw = mx_call(34, 64, 160)
    with cute_fp8.use(backend="torch"):
        codes, scales = cute_fp8.gemm(xq.view(2, 17, 160), sx, wq, sw, out_dtype=E4M3)
        y, one = cute_fp8.gemm(xq, sx, wq, sw), cute_fp8.gemm(xq[3], to_blocked(sx[3:4]), wq, sw)
    expected = quantize_mxfp8(y, blocked=True)
    assert codes.shape == (2, 17, 64)
    assert torch.equal(codes.view(34, 64).view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scales.view(torch.uint8), expected[1].view(torch.uint8))
    assert torch.equal(one, y[3])
    assert [call["kind"] for call in matmul.calls] == ["mxfp8"] * 3


def test_linear_references_use_torch_where_it_serves(
    matmul: ScaledMatmul, capability: tuple[int, int]
) -> None:
    x = inputs("gaussian", 6, 96, seed=3).view(2, 3, 96)
    w = inputs("gaussian", 64, 96, seed=4)
    bias = inputs("gaussian", 1, 64, seed=5)[0]
    for quantize, run in (
        (cute_fp8.quantize_fp8, cute_fp8.fp8_w8a8_linear),
        (cute_fp8.quantize_mxfp8, cute_fp8.mxfp8_linear),
    ):
        y = run(x, *quantize(w), bias)
        assert y.shape == (2, 3, 64) and y.dtype is BF16
        exact = x.double() @ w.double().t() + bias.double()
        assert ((y.double() - exact).norm() / exact.norm()).item() < 0.06
    kinds = [call["kind"] for call in matmul.calls]
    assert kinds == (["row-wise", "mxfp8"] if capability == (10, 0) else ["row-wise"])
