"""What a whole decoder is given when it is timed, and how its logits are compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16
#: Llama 3 8B, and what a dry run makes of it.
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
SMALL = LARGE | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
#: Name, sequences, tokens of each, tokens in the cache.
CASES = (
    ("prefill", 1, 2048, 0),
    ("decode", 1, 1, 1024),
    ("decode", 16, 1, 1024),
    ("decode_static", 1, 1, 1024),
    ("decode_static", 16, 1, 1024),
)


@dataclass(frozen=True)
class Case:
    """New tokens of some sequences behind old ones: what a call of the model is given."""

    sizes: dict[str, int]
    device: str
    name: str
    batch: int
    tokens: int
    cached: int

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """Tokens, positions, and old keys and values; the same for every model."""
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (self.batch, self.tokens)
        ids = torch.randint(
            self.sizes["vocab_size"], shape, device=self.device, generator=generator
        )
        heads, dim = self.sizes["num_key_value_heads"], self.sizes["head_dim"]
        old = [
            tuple(
                torch.randn(
                    (self.batch, heads, self.cached, dim),
                    device=self.device,
                    generator=generator,
                    dtype=BF16,
                )
                for _ in range(2)
            )
            for _ in range(self.sizes["num_hidden_layers"] if self.cached else 0)
        ]
        positions = torch.arange(self.tokens, device=self.device) + self.cached
        return {"ids": ids, "positions": positions.expand(shape), "old": old}

    @cached_property
    def static(self) -> Any:
        """A cache of a fixed size with the old tokens, which every call adds one to."""
        import transformers

        config = transformers.LlamaConfig(**self.sizes)
        cache = transformers.StaticCache(config=config, max_cache_len=self.cached + 64)
        for layer, (keys, values) in enumerate(self.inputs["old"]):
            cache.update(keys, values, layer)
        return cache

    def growing(self) -> Any:
        """One that grows, with the old tokens in it, not copied."""
        import transformers

        cache = transformers.DynamicCache(config=transformers.LlamaConfig(**self.sizes))
        for layer, (keys, values) in zip(cache.layers, self.inputs["old"], strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache

    def run(self, model: Any, keep: int) -> Tensor:
        """Logits ``[B, keep, vocabulary]`` of the last tokens."""
        options: dict[str, Any] = {"use_cache": bool(self.cached), "logits_to_keep": keep}
        if self.cached:
            options["past_key_values"] = (
                self.static if self.name.endswith("static") else self.growing()
            )
        inputs = self.inputs
        y: Tensor = model(inputs["ids"], position_ids=inputs["positions"], **options).logits
        return y


def distances(y: Tensor, ref: Tensor) -> dict[str, Any]:
    """Of logits ``[tokens, vocabulary]``: of all of them, and of the worst token's."""
    y, ref = y.float(), ref.float()
    off = (y - ref).norm(dim=1) / ref.norm(dim=1)
    return {
        "tokens": len(y),
        "cosine": float(torch.nn.functional.cosine_similarity(y.flatten(), ref.flatten(), dim=0)),
        "rel_l2": float((y - ref).norm() / ref.norm()),
        "least_cosine": float(torch.nn.functional.cosine_similarity(y, ref, dim=1).min()),
        "worst_rel_l2": float(off.max()),
        "same_best_token": float((y.argmax(1) == ref.argmax(1)).float().mean()),
    }
