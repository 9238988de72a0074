"""A decoder block's shape and weights: what fits together, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_fp8.decoder.case import decoder_case
from cute_fp8.decoder.weights import DecoderConfig, DecoderWeights, Projection, gated, project
from cute_fp8.numerics import quantize_fp8

CONFIG = DecoderConfig(64, 96, 4, 2, 32)
VARIANTS = ("per_token", "mxfp8")


@pytest.fixture(scope="module")
def weights() -> DecoderWeights:
    return decoder_case(CONFIG, norms=True, biases=True).weights


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_back(variant: str) -> None:
    made = decoder_case(replace(CONFIG, variant=variant), norms=True, biases=True).weights
    tensors = dict(made.tensors())
    assert {"input_norm", "k_norm", "qkv_codes", "qkv_bias", "gate_up_scales"} <= set(tensors)
    again = DecoderWeights.of(made.config, tensors)
    for (name, a), (other, b) in zip(made.tensors(), again.tensors(), strict=True):
        assert name == other and a is b


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "int8"}, "variant: got 'int8', must be one of per_token, mxfp8"),
        ({"hidden": 72}, "hidden: got 72, must be a positive multiple of 16"),
        ({"ffn": 48, "variant": "mxfp8"}, "ffn: got 48, must be a positive multiple of 32"),
        ({"eps": float("nan")}, "eps: got nan, must be finite and at least 0"),
        ({"kv_heads": 3}, "heads: got 4 of queries and 3 of keys, must be a multiple of them"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        replace(CONFIG, **change).check()
    assert str(caught.value) == message


def test_weights_that_do_not_fit(weights: DecoderWeights) -> None:
    o = weights.o
    for change, message in (
        ({"q_norm": None}, "q_norm: got one of q_norm and k_norm, must be both or none"),
        ({"mlp_norm": torch.ones(32)}, "mlp_norm: got shape (32,), must be (64,)"),
        ({"down": o}, "down.codes: got shape (64, 128), must be (64, 96)"),
        (
            {"o": Projection(o.codes.float(), o.scales)},
            "o.codes: got torch.float32, must be torch.float8_e4m3fn",
        ),
        (
            {"o": Projection(o.codes, o.scales.double())},
            "o.scales: got torch.float64, must be torch.float32",
        ),
        (
            {"o": Projection(o.codes, o.scales, torch.ones(8))},
            "o.bias: got shape (8,), must be (64,)",
        ),
        (
            {"o": Projection(o.codes.to("meta"), o.scales)},
            "o.codes: got device meta, must be cpu as input_norm is",
        ),
        (
            {"mlp_norm": torch.ones(128)[::2]},
            "mlp_norm: got strides (2,), must be contiguous",
        ),
        ({"mlp_norm": 1.0}, "mlp_norm: got float, must be a torch.Tensor"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            replace(weights, **change).check()
        assert str(caught.value) == message


def test_gate_and_up_alternate() -> None:
    gate, up = torch.randn(16, 32), torch.randn(16, 32)
    made = gated((gate, torch.zeros(16)), (up, torch.ones(16)), "per_token")
    assert made.bias is not None and made.bias.tolist() == ([0.0] * 8 + [1.0] * 8) * 2
    for first, part in ((0, gate), (8, up)):
        rows = torch.cat([torch.arange(first, first + 8), torch.arange(first + 16, first + 24)])
        assert torch.equal(made.codes[rows].float(), quantize_fp8(part)[0].float())
    with pytest.raises(ValueError, match="bias: got one of gate's and up's, must be both or none"):
        gated((gate, None), (up, torch.ones(16)), "per_token")


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_must_be_finite(variant: str) -> None:
    weight = torch.ones(16, 32)
    weight[3, 4] = float("inf")
    with pytest.raises(ValueError, match="finite"):
        project(weight, None, variant)
