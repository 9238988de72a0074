"""Decoders of transformers, small enough for every test, and what is asked of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 2


def decoder(family: str, **options: Any) -> nn.Module:
    """Random weights, sizes of its own for every kind of channel."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        hidden_size=128,
        intermediate_size=288,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=320,
        pad_token_id=0,
        **options,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
        # As in trained models, a layer adds little to what its input is.
        model.get_input_embeddings().weight.normal_(std=0.1)
    return model


def prompt(*shape: int) -> Tensor:
    return torch.randint(3, 320, shape, generator=torch.Generator().manual_seed(2))


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def greedy(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True, **options}
    return model.generate(ids, attention_mask=mask, **options)


def by_how_much(model: nn.Module, tokens: Tensor, mask: Tensor, new: int) -> Tensor:
    """How far below a model's best logit the last ``new`` tokens' are: 0 where it is the best."""
    mask = torch.cat([mask, mask.new_ones(len(mask), new)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        y = model(tokens, attention_mask=mask, position_ids=positions).logits.float()
    y = y[:, -new - 1 : -1]
    return y.amax(-1) - y.gather(-1, tokens[:, -new:, None])[..., 0]


def same_state(a: nn.Module, b: nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return sorted(mine) == sorted(theirs) and all(
        torch.equal(mine[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in mine
    )
