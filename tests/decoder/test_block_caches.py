"""What a decoder block leaves of a cache: all that it says, or nothing where something fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8.decoder import block
from cute_fp8.decoder.case import DecoderCase, decoder_case
from cute_fp8.decoder.weights import DecoderConfig


def small_case() -> DecoderCase:
    return decoder_case(DecoderConfig(64, 96, 4, 2, 16), norms=True, device="cpu")


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        (torch.zeros(5, 5), TypeError, "must be torch.bool or torch.bfloat16"),
        (torch.ones(5, 5, dtype=torch.int64), TypeError, "got torch.int64"),
        (torch.ones(5, 6, dtype=torch.bool), ValueError, r"must broadcast to \[2, 4, 5, 5\]"),
        (torch.ones(2, 1, 1, 1, 5, dtype=torch.bool), ValueError, "must broadcast to"),
        ([1], TypeError, "attention_mask: got list, must be a torch.Tensor"),
    ],
)
def test_a_mask_that_does_not_fit_leaves_the_cache(mask: Any, error: Any, text: str) -> None:
    case = small_case()
    cache = cute_fp8.KVCache.empty(2, case.config.columns, 8, device="cpu")
    before = cache.k.clone()
    with pytest.raises(error, match=text):
        cute_fp8.decoder_block(
            case.x(2, 5), case.weights, case.at(0, 5), cache, attention_mask=mask
        )
    assert cache.length == 0 and torch.equal(cache.k, before)


def test_a_failure_of_attention_leaves_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_case()
    cache = cute_fp8.KVCache.empty(1, case.config.columns, 8, device="cpu")

    def fails(*a: Any, **k: Any) -> None:
        raise RuntimeError("attention")

    x, at = case.x(1, 5), case.at(0, 5)
    with monkeypatch.context() as patch:
        patch.setattr(block.F, "scaled_dot_product_attention", fails)
        with pytest.raises(RuntimeError, match="attention"):
            cute_fp8.decoder_block(x, case.weights, at, cache)
    assert cache.length == 0
    cute_fp8.decoder_block(case.x(1, 5), case.weights, case.at(0, 5), cache)
    assert cache.length == 5


def test_a_view_of_wider_rows_is_as_good_as_its_copy() -> None:
    case = small_case()
    x = case.x(1, 5)
    wide = torch.zeros(1, 5, 65, dtype=x.dtype)
    wide[..., 1:] = x
    y = cute_fp8.decoder_block(wide[..., 1:], case.weights, case.at(0, 5))
    assert torch.equal(y, cute_fp8.decoder_block(x, case.weights, case.at(0, 5)))


def test_keys_and_values_in_the_same_memory_are_refused() -> None:
    case = small_case()
    k = cute_fp8.KVCache.empty(1, case.config.columns, 8, device="cpu").k
    with pytest.raises(ValueError, match=r"cache.v: got the memory of cache.k, must be separate"):
        cute_fp8.decoder_block(case.x(1, 5), case.weights, case.at(0, 5), cute_fp8.KVCache(k, k))


def test_a_weight_at_an_odd_address_is_refused() -> None:
    case = small_case()
    norm = torch.ones(65, dtype=torch.bfloat16)[1:]
    with pytest.raises(ValueError, match=r"^mlp_norm: got an address 2 bytes past a multiple of"):
        replace(case.weights, mlp_norm=norm).check()


def test_a_prompt_into_a_cache_of_a_fixed_size_attends_to_itself() -> None:
    """As transformers means it where there is no mask; what is not filled is not attended to."""

    class Fixed:
        is_compileable = True

        def update(self, k: Tensor, v: Tensor, layer: int) -> list[Tensor]:
            return [torch.cat([t, torch.full_like(t, 9.0)], dim=2) for t in (k, v)]

    case = small_case()
    x, at = case.x(1, 5), case.at(0, 5)
    y = cute_fp8.decoder_block(x, case.weights, at, Fixed())
    assert torch.equal(y, cute_fp8.decoder_block(x, case.weights, at))
