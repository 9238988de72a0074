"""A cache of keys and values: views of its slots, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_fp8.decoder.kv_cache import KVCache
from cute_fp8.decoder.rope import Heads

HEADS = Heads(8, 2, 64)


def empty(capacity: int = 10) -> KVCache:
    return KVCache.empty(3, HEADS, capacity, device="cpu")


def test_slots_and_what_is_filled() -> None:
    cache = empty()
    cache.length = 4
    k, v = cache.slots(5)
    k.fill_(1.0)
    v.fill_(2.0)
    keys, values = cache.filled(5)
    assert keys.shape == (3, 2, 9, 64) and keys.data_ptr() == cache.k.data_ptr()
    assert not keys[:, :, :4].any() and bool((keys[:, :, 4:] == 1).all())
    assert bool((values[:, :, 4:] == 2).all()) and not cache.v[:, :, 9:].any()


def test_what_fits_is_taken() -> None:
    cache = empty()
    cache.length = 4
    cache.check(torch.zeros(3, 6, 32, dtype=torch.bfloat16), HEADS)


@pytest.mark.parametrize(
    ("cache", "tokens", "message"),
    [
        (
            replace(empty(), length=4),
            7,
            "cache: got room for 10 tokens of which 4 are taken, must have room for 7 more",
        ),
        (
            replace(empty(), length=-1),
            1,
            "cache: got room for 10 tokens of which -1 are taken, must have room for 1 more",
        ),
        (
            KVCache.empty(2, HEADS, 10, device="cpu"),
            1,
            "cache.k: got shape (2, 2, 10, 64), must be (3, 2, capacity, 64)",
        ),
        (
            KVCache.empty(3, HEADS, 10, torch.float16, "cpu"),
            1,
            "cache.k: got torch.float16, must be torch.bfloat16 as x is",
        ),
        (
            replace(empty(), v=torch.zeros((3, 2, 10, 64), device="meta").bfloat16()),
            1,
            "cache.v: got device meta, must be cpu as x is",
        ),
        (
            replace(empty(), k=torch.zeros((3, 2, 64, 10)).bfloat16().transpose(2, 3)),
            1,
            "cache.k: got strides (1280, 640, 1, 10), must be 16-byte aligned rows",
        ),
    ],
)
def test_what_does_not_fit(cache: KVCache, tokens: int, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        cache.check(torch.zeros(3, tokens, 32, dtype=torch.bfloat16), HEADS)
    assert str(caught.value) == message
