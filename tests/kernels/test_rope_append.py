"""The RoPE kernel against plain torch: bits, strides, caches, head sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8.decoder import lookup
from cute_fp8.decoder.rope import Heads, RopeInputs, rope_append

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def inputs(
    heads: Heads, batch: int, tokens: int, dtype: torch.dtype, norms: bool, shared: bool = True
) -> RopeInputs:
    generator = torch.Generator("cuda").manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    rotations = [normal(1 if shared else batch, tokens, heads.dim) for _ in range(2)]
    weights = (normal(heads.dim), normal(heads.dim)) if norms else (None, None)
    return RopeInputs(normal(batch, tokens, heads.columns), *rotations, *weights)


def check(given: RopeInputs, heads: Heads, cached: bool) -> None:
    batch, tokens = given.qkv.shape[:2]
    slots, caches = None, []
    if cached:
        shape = (batch, heads.keys, tokens + 7, heads.dim)
        caches = [torch.full(shape, 7.0, dtype=given.qkv.dtype, device="cuda") for _ in range(2)]
        slots = tuple(cache[:, :, 3 : 3 + tokens] for cache in caches)
    made = rope_append(given, heads, 1e-5, slots)
    with cute_fp8.use(backend="reference"):
        wanted = rope_append(given, heads, 1e-5, None)
    for name, a, b in zip("qkv", made, wanted, strict=True):
        if given.q_norm is None and a.dtype != torch.float32:
            assert torch.equal(a, b), name
            continue
        # In fp32 a product may be fused with the sum.
        # Another order of a norm's sum flips a few roundings, by a unit in the last place.
        unit = 4 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, b, rtol=unit, atol=unit * 4)
        assert a.dtype == torch.float32 or float((a != b).float().mean()) < 1e-3
    for cache in caches:
        assert bool((cache[:, :, :3] == 7).all() and (cache[:, :, 3 + tokens :] == 7).all())


def test_the_kernel_is_what_runs() -> None:
    explanation = cute_fp8.explain("rope_append", m=4, k=1024, variant="any")
    assert explanation.route is not None and explanation.route.entry.name == "cute:rope_append"


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_and_tokens(dtype: torch.dtype, norms: bool, cached: bool) -> None:
    for heads in (Heads(32, 8, 128), Heads(3, 1, 80), Heads(8, 8, 64), Heads(4, 2, 256)):
        for batch, tokens in ((1, 1), (3, 5), (2, 130)):
            check(inputs(heads, batch, tokens, dtype, norms), heads, cached)


@pytest.mark.parametrize("dim", [16, 96, 512])
def test_head_sizes(dim: int) -> None:
    heads = Heads(6, 2, dim)
    check(inputs(heads, 2, 9, torch.bfloat16, True, shared=False), heads, True)


def test_rotations_of_each_sequence() -> None:
    heads = Heads(4, 2, 128)
    check(inputs(heads, 3, 5, torch.bfloat16, False, shared=False), heads, True)


def test_one_launch(launched) -> None:
    heads = Heads(4, 2, 128)
    given = inputs(heads, 2, 5, torch.bfloat16, True)
    rope_append(given, heads, 1e-5, None)
    assert len(launched(lambda: rope_append(given, heads, 1e-5, None))) == 1


@pytest.mark.parametrize("heads", [Heads(16, 2, 128), Heads(3, 1, 80), Heads(8, 8, 64)], ids=str)
def test_queries_by_the_heads_of_keys_that_they_share(heads: Heads) -> None:
    given = inputs(heads, 3, 11, torch.bfloat16, False)
    made = rope_append(given, heads, 1e-5, None, grouped=True)
    with cute_fp8.use(backend="reference"):
        wanted = rope_append(given, heads, 1e-5, None, grouped=True)
    for name, a, b in zip("qkv", made, wanted, strict=True):
        assert torch.equal(a, b), name


def test_without_dependent_launch() -> None:
    heads = Heads(4, 2, 128)
    given = inputs(heads, 2, 5, torch.bfloat16, True)
    wanted = rope_append(given, heads, 1e-5, None)[0]
    with cute_fp8.use(pdl=False):
        assert torch.equal(rope_append(given, heads, 1e-5, None)[0], wanted)
    ropes = [key for key in lookup._kernels if key[0] == "rope_append"]
    assert any(key[-1].pdl is False for key in ropes)


def test_outside_the_cache_at_odd_places() -> None:
    """A cache whose heads lie elsewhere than side by side."""
    heads = Heads(4, 2, 64)
    given = inputs(heads, 2, 5, torch.bfloat16, False)
    memory = [torch.zeros((2, 12, 2, 64), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    slots = tuple(m.transpose(1, 2)[:, :, 4:9] for m in memory)
    rope_append(given, heads, 1e-5, slots)
    _, k, v = rope_append(given, heads, 1e-5, None)
    assert torch.equal(slots[0], k) and torch.equal(slots[1], v)
