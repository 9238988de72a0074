"""Rotary embedding and append on the CPU: Hugging Face's rounding, the ops, the checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_fp8.decoder import rope
from cute_fp8.decoder.rope import Heads, RopeInputs, check_heads, check_rotation, rope_append, split

llama = pytest.importorskip("transformers.models.llama.modeling_llama")

HEADS = Heads(4, 2, 32)
B, S = 2, 5


def inputs(dtype: torch.dtype = torch.bfloat16, norms: bool = False) -> RopeInputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    cos, sin = normal(1, S, 16).repeat(1, 1, 2).cos(), normal(B, S, 32).sin()
    weights = (normal(32), normal(32)) if norms else (None, None)
    return RopeInputs(normal(B, S, HEADS.columns), cos, sin, *weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("norms", [False, True])
def test_it_is_what_transformers_do(dtype: torch.dtype, norms: bool) -> None:
    given = inputs(dtype, norms)
    q, k, v = (t.transpose(1, 2) for t in split(given.qkv, HEADS))
    if given.q_norm is not None and given.k_norm is not None:
        q, k = normed(q, given.q_norm), normed(k, given.k_norm)
    cos, sin = (t.expand(B, -1, -1) for t in (given.cos, given.sin))
    wanted_q, wanted_k = llama.apply_rotary_pos_emb(q, k, cos, sin)
    got_q, got_k, got_v = rope_append(given, HEADS, 1e-5, None)
    assert torch.equal(got_q.transpose(1, 2), wanted_q)
    assert torch.equal(got_k, wanted_k) and torch.equal(got_v, v)


@torch.no_grad()
def normed(x: Tensor, weight: Tensor) -> Tensor:
    norm = llama.LlamaRMSNorm(32, eps=1e-5)
    norm.weight.data = weight
    return norm(x)


def test_slots_are_written_and_nothing_else() -> None:
    given = inputs()
    caches = [torch.full((B, 2, 9, 32), 7.0, dtype=torch.bfloat16) for _ in range(2)]
    slots = tuple(cache[:, :, 3 : 3 + S] for cache in caches)
    q, k, v = rope_append(given, HEADS, 1e-5, slots)
    assert k is slots[0] and v is slots[1]
    for cache, wanted in zip(caches, rope_append(given, HEADS, 1e-5, None)[1:], strict=True):
        assert torch.equal(cache[:, :, 3 : 3 + S], wanted)
        assert bool((cache[:, :, :3] == 7).all() and (cache[:, :, 3 + S :] == 7).all())
    assert torch.equal(q, rope_append(given, HEADS, 1e-5, None)[0])


def test_queries_by_the_heads_of_keys_that_they_share() -> None:
    given = inputs()
    q, k, v = rope_append(given, HEADS, 1e-5, None, grouped=True)
    wanted, *others = rope_append(given, HEADS, 1e-5, None)
    assert q.shape == (B, 2, 2 * S, 32)
    for head in range(4):
        mine = q.view(B, 2, S, 2, 32)[:, head // 2, :, head % 2]
        assert torch.equal(mine, wanted[:, :, head])
    assert torch.equal(k, others[0]) and torch.equal(v, others[1])


def test_the_ops_are_sound() -> None:
    given = inputs(norms=True)
    for grouped in (False, True):
        torch.library.opcheck(torch.ops.cute_fp8.rope, (*given, 1e-5, *HEADS, grouped))
    slots = tuple(torch.zeros((B, 2, S, 32), dtype=torch.bfloat16) for _ in range(2))
    torch.library.opcheck(torch.ops.cute_fp8.rope_append, (*given, 1e-5, *HEADS, *slots))


def test_no_tokens() -> None:
    given = inputs()
    given = RopeInputs(given.qkv[:, :0], given.cos[:, :0], given.sin[:, :0])
    q, k, _ = rope_append(given, HEADS, 1e-5, None)
    assert q.shape == (B, 0, 4, 32) and k.shape == (B, 2, 0, 32)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (Heads(4, 2, 40), "head_dim: got 40, must be a multiple of 16 up to 512"),
        (Heads(4, 2, 528), "head_dim: got 528, must be a multiple of 16 up to 512"),
        (Heads(4, 3, 64), "heads: got 4 of queries and 3 of keys, must be a multiple of them"),
    ],
)
def test_heads(heads: Heads, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check_heads(heads)
    assert str(caught.value) == message


X = torch.zeros((B, S, 128), dtype=torch.bfloat16)
ROTATION = torch.zeros((S, 32), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (None, "position_embeddings: got NoneType, must be the pair (cos, sin)"),
        ((ROTATION, 1.0), "sin: got float, must be a torch.Tensor"),
        ((ROTATION.float(), ROTATION), "cos: got torch.float32, must be torch.bfloat16 as x is"),
        (
            (ROTATION[:4], ROTATION),
            "cos: got shape (4, 32), must be (2, 5, 32), (1, 5, 32) or (5, 32)",
        ),
        ((ROTATION, ROTATION.to("meta")), "sin: got device meta, must be cpu as x is"),
        (
            (ROTATION.t().contiguous().t(), ROTATION),
            "cos: got strides (1, 5), must be 16-byte aligned rows",
        ),
    ],
)
def test_rotation(pair: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        check_rotation(pair, B, S, 32, X)
    assert str(caught.value) == message


def test_rotation_of_any_shape() -> None:
    for shape in ((S, 32), (1, S, 32), (B, S, 32)):
        tensor = torch.zeros(shape, dtype=torch.bfloat16)
        assert check_rotation((tensor, tensor), B, S, 32, X)[0].dim() == 3
    assert rope.aligned(ROTATION) and not rope.aligned(torch.zeros(3, 33)[:, :32])
