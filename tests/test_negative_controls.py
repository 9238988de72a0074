"""The near-lossless tier must let the right scales pass and must catch each known wrong one.

The layer: M = 64 tokens, N = 128 output channels, K = 1024, where the outlier kinds have the crest
factors of real layers (23-50); weights are normal. Everything in fp32, outputs rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cute_fp8.accuracy import Verdict, near_lossless
from cute_fp8.numerics import (
    MX_BLOCK,
    dequantize_fp8,
    dequantize_mxfp8,
    encode_fp8,
    quantize_fp8,
    quantize_fp8_activations,
    quantize_mxfp8,
)
from cute_fp8.testing import EDGE_KINDS, KINDS, TIER_KINDS, inputs

M, N, K = 64, 128, 1024
SEEDS = range(4)


class Layer(NamedTuple):
    x: Tensor
    w: Tensor
    ref: Tensor
    """The bf16 original's output."""


def layer(kind: str, seed: int) -> Layer:
    x = inputs(kind, M, K, seed=seed)
    w = (inputs("gaussian", N, K, seed=1000 + seed) * K**-0.5).bfloat16()
    return Layer(x, w, (x.float() @ w.float().T).bfloat16())


def judge(case: Layer, x: Tensor, w: Tensor) -> Verdict:
    return near_lossless((x @ w.T).bfloat16(), case.ref)


def weight(case: Layer, change: Callable[[Tensor], Tensor] = lambda scale: scale) -> Tensor:
    codes, scale = quantize_fp8(case.w)
    return dequantize_fp8(codes, change(scale), torch.float32)


def activation(case: Layer, change: Callable[[Tensor], Tensor] = lambda scale: scale) -> Tensor:
    codes, scale = quantize_fp8_activations(case.x)
    return dequantize_fp8(codes, change(scale), torch.float32)


def static_activation(case: Layer, earlier: Tensor) -> Tensor:
    """Quantised and dequantised with the scales of another draw, token by token."""
    scale = quantize_fp8_activations(earlier)[1]
    codes = encode_fp8(case.x.float(), scale.unsqueeze(1))
    return dequantize_fp8(codes, scale, torch.float32)


def ocp_floor(x: Tensor) -> Tensor:
    """MXFP8 with the OCP rule ``2**(floor(log2(amax)) - 8)``, quantised and dequantised."""
    blocks = x.float().reshape(len(x), -1, MX_BLOCK)
    exponent = torch.frexp(blocks.abs().amax(dim=-1, keepdim=True)).exponent - 1 - 8
    scale = torch.exp2(exponent.float())
    return (encode_fp8(blocks, scale).float() * scale).reshape(x.shape)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", TIER_KINDS)
def test_right_scales_pass(kind: str, seed: int) -> None:
    case = layer(kind, seed)
    verdict = judge(case, activation(case), weight(case))
    assert verdict.passed, verdict
    x_mx, w_mx = (dequantize_mxfp8(*quantize_mxfp8(t), torch.float32) for t in (case.x, case.w))
    verdict = judge(case, x_mx, w_mx)
    assert verdict.passed, verdict


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", TIER_KINDS)
def test_weight_scales_five_percent_off_fail(kind: str, seed: int) -> None:
    case = layer(kind, seed)
    verdict = judge(case, activation(case), weight(case, lambda scale: scale * 1.05))
    assert not verdict.passed, verdict


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", TIER_KINDS)
def test_neighbour_channels_scale_fails(kind: str, seed: int, step: int) -> None:
    case = layer(kind, seed)
    verdict = judge(case, activation(case), weight(case, lambda scale: scale.roll(step)))
    assert not verdict.passed, verdict


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", TIER_KINDS)
def test_first_tokens_scale_for_all_fails(kind: str, seed: int) -> None:
    case = layer(kind, seed)
    verdict = judge(case, activation(case, lambda scale: scale[:1]), weight(case))
    assert not verdict.passed, verdict


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["heavy_tailed", "outlier_token"])
def test_static_scales_of_an_earlier_draw_fail(kind: str, seed: int) -> None:
    case = layer(kind, seed)
    earlier = inputs(kind, M, K, seed=seed + 1)
    if kind == "outlier_token":
        outlier_rows = [int(x.abs().amax(dim=1).argmax()) for x in (earlier, case.x)]
        assert outlier_rows[0] != outlier_rows[1]
    verdict = judge(case, static_activation(case, earlier), weight(case))
    assert not verdict.passed, verdict
    # The control itself is sound: with the scales of this draw it is the right recipe.
    assert judge(case, static_activation(case, case.x), weight(case)).passed


@pytest.mark.parametrize("seed", SEEDS)
def test_ocp_floor_rule_fails(seed: int) -> None:
    case = layer("ocp_trap", seed)
    w_mx = dequantize_mxfp8(*quantize_mxfp8(case.w), torch.float32)
    for w in (ocp_floor(case.w), w_mx):
        verdict = judge(case, ocp_floor(case.x), w)
        assert not verdict.passed, verdict
        assert verdict.norm_ratio < 0.98  # saturated block maxima shrink the output


# --- the inputs are what they claim to be -------------------------------------------------------


def crest(x: Tensor) -> Tensor:
    x = x.double()
    return x.abs().amax(dim=1) / x.square().mean(dim=1).sqrt()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_reproducible(kind: str, dtype: torch.dtype) -> None:
    x = inputs(kind, 9, 64, seed=3, dtype=dtype)
    assert x.shape == (9, 64)
    assert x.dtype == dtype
    assert x.device.type == "cpu"
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    again = inputs(kind, 9, 64, seed=3, dtype=dtype)
    assert torch.equal(x.view(bits), again.view(bits))
    other = inputs(kind, 9, 64, seed=4, dtype=dtype)
    assert not torch.equal(x.view(bits), other.view(bits))
    assert inputs(kind, 0, 64, seed=3, dtype=dtype).shape == (0, 64)
    assert bool(x.isfinite().all()) is (kind != "nan_rows")


@pytest.mark.parametrize("seed", SEEDS)
def test_outliers_have_the_crest_of_real_layers(seed: int) -> None:
    outlier = crest(inputs("outlier_token", M, K, seed=seed))
    assert 23 < outlier[seed % M] < 50
    assert (outlier > 6).sum() == 1
    massive = inputs("massive_channel", M, K, seed=seed).double()
    assert 23 < crest(massive).max() < 50
    assert 0.3 < massive[:, seed % K].square().sum() / massive.square().sum() < 0.7
    trap = inputs("ocp_trap", M, K, seed=seed).float()
    assert torch.equal(trap.abs().argmax(dim=1), torch.full((M,), seed % K))
    mantissa = torch.frexp(trap[:, seed % K]).mantissa.abs() * 2
    assert mantissa.min() >= 1.79
    assert mantissa.max() < 2.0


def test_edge_kinds() -> None:
    x = {kind: inputs(kind, 10, 32, seed=0, dtype=torch.float32) for kind in EDGE_KINDS}
    assert torch.equal(x["all_equal"], x["all_equal"][:, :1].expand(10, 32))
    assert len(set(x["all_equal"][:, 0].tolist())) == 10
    assert not x["zeros"].any()
    assert 0 < x["zeros"].signbit().sum() < 320
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tiny = inputs("denormals", 10, 32, seed=0, dtype=dtype).double().abs()
        assert tiny.min() > 0
        assert tiny.max() < torch.finfo(dtype).smallest_normal
    codes, scale = quantize_fp8_activations(x["max_codes"])
    assert ((codes.view(torch.uint8) & 0x7F) == 0x7E).all()
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert len(set(scale.tolist())) == 8
    bad_rows = (~x["nan_rows"].isfinite()).sum(dim=1)
    assert bad_rows.tolist() == [1, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    with pytest.raises(ValueError, match="kind: got 'uniform', must be one of"):
        inputs("uniform", 1, 16, seed=0)
