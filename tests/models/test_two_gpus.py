"""Models on another GPU than the current one, and tensors on the wrong one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import cute_fp8
from cute_fp8.decoder.case import decoder_case
from cute_fp8.decoder.weights import DecoderConfig
from cute_fp8.models.linear import VARIANTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
BF16 = torch.bfloat16


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_model_on_another_gpu(variant: str) -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)).to("cuda:0", BF16)
    there = copy.deepcopy(here).to("cuda:1")
    x = torch.randn(40, 256, device="cuda:0", dtype=BF16)
    for model in (here, there):
        cute_fp8.convert(model, variant=variant)
    with torch.cuda.device(0):
        y = there(x.to("cuda:1"))
        assert torch.cuda.current_device() == 0
    assert {t.device for t in (y, *there.parameters())} == {torch.device("cuda:1")}
    assert torch.equal(y.to("cuda:0"), here(x))
    assert torch.equal(here.to("cuda:1")(x.to("cuda:1")), y), "moved after conversion"
    with pytest.raises(ValueError, match=r": got device cuda:1, must be cuda:0"):
        there(x)
    assert torch.equal(there(x.to("cuda:1")), y), "the next good call works"


@pytest.mark.parametrize("tokens", [2, 40])
@torch.no_grad()
def test_a_decoder_block_on_another_gpu(tokens: int) -> None:
    config = DecoderConfig(hidden=256, ffn=512, heads=4, kv_heads=2, head_dim=64)
    here, there = (decoder_case(config, device=f"cuda:{i}") for i in range(2))
    x = here.x(1, tokens)
    for (_, a), (_, b) in zip(here.weights.tensors(), there.weights.tensors(), strict=True):
        b.copy_(a)
    y = cute_fp8.decoder_block(x, here.weights, here.at(0, tokens))
    with torch.cuda.device(0):
        other = cute_fp8.decoder_block(x.to("cuda:1"), there.weights, there.at(0, tokens))
        assert torch.cuda.current_device() == 0
    assert torch.equal(other.to("cuda:0"), y)
    with pytest.raises(ValueError, match=r"x: got device cuda:0, must be cuda:1"):
        cute_fp8.decoder_block(x, there.weights, there.at(0, tokens))
