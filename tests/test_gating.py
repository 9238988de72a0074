"""Gate and up rows in blocks of 8, and the gated GEMM on a CPU."""

from __future__ import annotations

import pytest
import torch

import cute_fp8
from cute_fp8.gating import split_gate_up
from cute_fp8.gemms.launch import CuteGemm
from cute_fp8.gemms.problem import Operands, check_gemm
from cute_fp8.numerics import quantize_fp8, quantize_fp8_activations, quantize_mxfp8
from cute_fp8.testing import inputs

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
M, CHANNELS, K = 21, 96, 128


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@pytest.mark.parametrize("dtype", [FP32, BF16, E4M3, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("shape", [(16,), (24, 4), (8, 3, 5)], ids=str)
def test_blocks_of_eight(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate = torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).reshape(shape)
    up = gate + 100
    gate, up = (
        t.view(dtype) if dtype in (E4M3, torch.float8_e8m0fnu) else t.to(dtype) for t in (gate, up)
    )
    both = cute_fp8.interleave_gate_up(gate, up)
    assert both.dtype is dtype and both.shape == (2 * shape[0], *shape[1:])
    for block in range(shape[0] // 8):
        rows = slice(8 * block, 8 * block + 8)
        assert torch.equal(bits(both)[16 * block : 16 * block + 8], bits(gate)[rows])
        assert torch.equal(bits(both)[16 * block + 8 : 16 * block + 16], bits(up)[rows])


def test_splitting_undoes_it() -> None:
    gate, up = torch.randn(40, 3), torch.randn(40, 3)
    columns = cute_fp8.interleave_gate_up(gate, up).t()
    assert all(map(torch.equal, split_gate_up(columns), (gate.t(), up.t())))


@pytest.mark.parametrize(
    ("gate", "up", "error", "message"),
    [
        (torch.zeros(12, 4), torch.zeros(12, 4), ValueError, "gate: got shape (12, 4), must have"),
        (torch.zeros(()), torch.zeros(()), ValueError, "gate: got shape (), must have"),
        (
            torch.zeros(8, 4),
            torch.zeros(16, 4),
            ValueError,
            "up: got shape (16, 4), must be (8, 4)",
        ),
        (
            torch.zeros(8),
            torch.zeros(8).half(),
            TypeError,
            "up: got torch.float16, must be torch.f",
        ),
        (torch.zeros(8), torch.zeros(8, device="meta"), ValueError, "up: got device meta, must be"),
        ([0.0] * 8, torch.zeros(8), TypeError, "gate: got list, must be a torch.Tensor"),
    ],
)
def test_refusals(gate: object, up: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        cute_fp8.interleave_gate_up(gate, up)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def projections() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = inputs("gaussian", M, K, seed=1, dtype=FP32)
    gate, up = (inputs("gaussian", CHANNELS, K, seed=s, dtype=FP32) / K**0.5 for s in (2, 3))
    return x, gate, up


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("variant", ["per_token", "mxfp8"])
def test_it_equals_the_two_projections(variant: str, activation: str | None) -> None:
    x, gate, up = projections()
    bias = torch.randn(2, CHANNELS)
    if variant == "per_token":
        (xq, sx), weights = quantize_fp8_activations(x), [quantize_fp8(w) for w in (gate, up)]
    else:
        (xq, sx), weights = quantize_mxfp8(x), [quantize_mxfp8(w) for w in (gate, up)]
    (gq, gs), (uq, us) = weights
    g = cute_fp8.gemm(xq, sx, gq, gs, bias[0], activation=activation, out_dtype=FP32)
    u = cute_fp8.gemm(xq, sx, uq, us, bias[1], out_dtype=FP32)
    both = [cute_fp8.interleave_gate_up(*pair) for pair in ((gq, uq), (gs, us), tuple(bias))]
    y = cute_fp8.gemm_gated(xq, sx, *both, activation=activation, out_dtype=FP32)
    assert y.shape == (M, CHANNELS)
    assert torch.equal(y, g * u)
    out = torch.empty((M, CHANNELS), dtype=BF16)
    assert cute_fp8.gemm_gated(xq, sx, *both, activation=activation, out=out) is out
    assert torch.equal(out, (g * u).to(BF16))


def test_mxfp8_output_is_the_quantised_bf16_result() -> None:
    x, gate, up = projections()
    xq, sx = quantize_mxfp8(x)
    wq, sw = quantize_mxfp8(cute_fp8.interleave_gate_up(gate, up))
    codes, scales = cute_fp8.gemm_gated(xq, sx, wq, sw, out_dtype=E4M3)
    expected = quantize_mxfp8(cute_fp8.gemm_gated(xq, sx, wq, sw), blocked=True)
    assert torch.equal(bits(codes), bits(expected[0]))
    assert torch.equal(bits(scales), bits(expected[1]))


def test_what_it_refuses() -> None:
    x, gate, up = projections()
    xq, sx = quantize_fp8_activations(x)
    wq, sw = quantize_fp8(cute_fp8.interleave_gate_up(gate, up))
    with pytest.raises(ValueError, match="wq: got N = 184, must be a positive multiple of 16"):
        cute_fp8.gemm_gated(xq, sx, wq[:184], sw[:184])
    with pytest.raises(ValueError, match="activation: got 'swish', must be None or one of relu"):
        cute_fp8.gemm_gated(xq, sx, wq, sw, activation="swish")
    with pytest.raises(ValueError, match=r"out: got shape \(21, 192\), must be \(21, 96\)"):
        cute_fp8.gemm_gated(xq, sx, wq, sw, out=torch.empty((M, 2 * CHANNELS), dtype=BF16))
    assert cute_fp8.gemm_gated(xq, sx, wq, sw).shape == (M, CHANNELS)


def test_no_tokens() -> None:
    _, gate, up = projections()
    wq, sw = quantize_fp8(cute_fp8.interleave_gate_up(gate, up))
    xq = torch.zeros((0, K)).to(E4M3)
    assert cute_fp8.gemm_gated(xq, torch.zeros(0), wq, sw).shape == (0, CHANNELS)


def test_under_torch_compile() -> None:
    x, gate, up = projections()
    xq, sx = quantize_fp8_activations(x)
    wq, sw = quantize_fp8(cute_fp8.interleave_gate_up(gate, up))
    compiled = torch.compile(cute_fp8.gemm_gated, fullgraph=True, backend="eager")
    assert torch.equal(compiled(xq, sx, wq, sw), cute_fp8.gemm_gated(xq, sx, wq, sw))


def test_a_launcher_refuses_an_output_of_another_width() -> None:
    """Neither its key nor its kernel knows what a gated output's width must be."""
    x, gate, up = projections()
    xq, sx = quantize_fp8_activations(x)
    wq, sw = quantize_fp8(cute_fp8.interleave_gate_up(gate, up))
    problem = check_gemm(Operands(xq, sx, wq, sw), "silu", BF16, False, gated=True)
    launcher = object.__new__(CuteGemm)
    launcher.problem = problem
    good, bad = torch.empty((M, CHANNELS), dtype=BF16), torch.empty((M, 8), dtype=BF16)
    launcher._check_out(Operands(xq, sx, wq, sw, out=good))
    with pytest.raises(ValueError, match="for the full check to say"):
        launcher._check_out(Operands(xq, sx, wq, sw, out=bad))
