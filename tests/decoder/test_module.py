"""Decoder layers of transformers as FP8 modules: four families, alone and in a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cute_fp8
from cute_fp8 import DecoderBlock, KVCache
from cute_fp8.gating import split_gate_up
from cute_fp8.numerics import dequantize_fp8

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "vocab_size": 500,
}
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def model_of(family: str, **changes: Any) -> Any:
    """A tiny causal language model, whose weights keep the residual stream's size."""
    torch.manual_seed(0)
    extra = {"sliding_window": None} if family == "Mistral" else {}
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **extra, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.5)
        elif hasattr(module, "variance_epsilon"):
            nn.init.normal_(module.weight, mean=1.0, std=0.1)
    return model.to(torch.bfloat16)


def inputs_of(model: Any, tokens: int = 9) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x = torch.randn((2, tokens, 128), generator=torch.Generator().manual_seed(1)).bfloat16()
    return x, model.model.rotary_emb(x, torch.arange(tokens)[None])


@pytest.mark.parametrize("variant", ["per_token", "mxfp8"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_layer(family: str, variant: str) -> None:
    model = model_of(family)
    layer = model.model.layers[2]
    block = DecoderBlock.from_module(layer, variant=variant)
    x, rotation = inputs_of(model)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    wanted = layer(x, attention_mask=mask, position_embeddings=rotation)
    verdict = cute_fp8.near_lossless(block(x, position_embeddings=rotation), wanted)
    assert verdict.passed, verdict
    assert (block.config.head_dim, block.config.kv_heads, block.layer) == (32, 2, 2)


@torch.no_grad()
def test_the_weights_are_the_layer_s() -> None:
    layer = model_of("Qwen2").model.layers[0]
    weights = DecoderBlock.from_module(layer).weights
    attention = layer.self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = dequantize_fp8(weights.qkv.codes, weights.qkv.scales)
    torch.testing.assert_close(qkv, torch.cat([p.weight for p in parts]), rtol=0.07, atol=0.002)
    assert torch.equal(weights.qkv.bias, torch.cat([p.bias for p in parts]))
    gate, _ = split_gate_up(dequantize_fp8(weights.gate_up.codes, weights.gate_up.scales).t())
    torch.testing.assert_close(gate.t(), layer.mlp.gate_proj.weight, rtol=0.07, atol=0.002)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@torch.no_grad()
def test_a_model_end_to_end(family: str) -> None:
    """In a model's own hands: prompt, cache of transformers, greedy tokens."""
    model = model_of(family)
    fp8 = copy.deepcopy(model)
    for i, layer in enumerate(fp8.model.layers):
        fp8.model.layers[i] = DecoderBlock.from_module(layer)
    ids = torch.randint(1, 500, (2, 9), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    verdict = cute_fp8.near_lossless(fp8(ids).logits, model(ids).logits)
    assert verdict.cosine > 0.98, verdict
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    tokens = fp8.generate(ids, **options, pad_token_id=0)
    # The reference decodes with one token at a time, without any cache.
    wanted = ids
    for _ in range(6):
        wanted = torch.cat([wanted, by_steps(fp8, wanted)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(tokens, wanted)


def by_steps(model: Any, ids: Tensor) -> Tensor:
    """Logits through caches of our own."""
    inner = model.model
    x = inner.embed_tokens(ids)
    caches = [
        KVCache.empty(ids.shape[0], block.config.columns, ids.shape[1], device="cpu")
        for block in inner.layers
    ]
    outputs = []
    for i in range(ids.shape[1]):
        rotation = inner.rotary_emb(x, torch.tensor([[i]]))
        h = x[:, i : i + 1]
        for block, cache in zip(inner.layers, caches, strict=True):
            h = block(h, cache=cache, position_embeddings=rotation)
        outputs.append(h)
    return model.lm_head(inner.norm(torch.cat(outputs, dim=1)))


@torch.no_grad()
def test_nothing_of_the_layer_is_kept() -> None:
    layer = model_of("Llama").model.layers[0]
    block = DecoderBlock.from_module(layer)
    assert not list(block.parameters())
    weights = sum(p.numel() for p in layer.parameters())
    size = sum(t.numel() * t.element_size() for t in block.state_dict().values())
    assert size < 1.1 * weights, "a byte for each weight, and scales"
    assert "hidden=128, ffn=256, heads=4/2x32, variant=per_token, causal=True" in repr(block)


@torch.no_grad()
def test_to_converts_nothing_and_states_load() -> None:
    model = model_of("Llama")
    first, second = (DecoderBlock.from_module(model.model.layers[i]) for i in range(2))
    x, rotation = inputs_of(model)
    wanted = first(x, position_embeddings=rotation)
    first.half()
    assert first.weights.qkv.codes.dtype == torch.float8_e4m3fn
    assert first.weights.qkv.scales.dtype == torch.float32
    assert torch.equal(first(x, position_embeddings=rotation), wanted)
    assert not torch.equal(second(x, position_embeddings=rotation), wanted)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x, position_embeddings=rotation), wanted)
    assert_loading_replaces_all(first, second, rotation, x)
    meta = DecoderBlock.from_module(model.model.layers[0]).to("meta")
    assert meta.weights.device.type == "meta"


def assert_loading_replaces_all(first: Any, second: Any, rotation: Any, x: Any) -> None:
    """Through a parent, by assignment, after a call; and no codes from values that are none."""
    parent = torch.nn.Sequential(DecoderBlock(second.weights))
    parent[0](x, position_embeddings=rotation)
    state = {f"0.{name}": value.clone() for name, value in first.state_dict().items()}
    state["0.qkv_scales"] = state["0.qkv_scales"] * 2
    parent.load_state_dict(state, assign=True)
    wanted = DecoderBlock(parent[0].weights)(x, position_embeddings=rotation)
    assert torch.equal(parent[0](x, position_embeddings=rotation), wanted)
    assert torch.equal(parent[0].weights.qkv.scales, state["0.qkv_scales"])
    state["0.o_codes"] = state["0.o_codes"].float()
    with pytest.raises(RuntimeError, match=r"0.o_codes: got torch.float32, must be torch.float8_"):
        parent.load_state_dict(state)
    cache = first.make_cache(2, 16, x.dtype)
    assert cache.k.shape == (2, 2, 16, 32) and cache.k.dtype is x.dtype
    with pytest.raises(TypeError, match=r"^heads: got int, must be Heads"):
        cute_fp8.KVCache.empty(1, 2, 16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^weights: got int, must be DecoderWeights"):
        DecoderBlock(3)  # type: ignore[arg-type]


def test_layers_that_are_refused() -> None:
    def layer(**changes: Any) -> Any:
        return model_of("Llama", num_hidden_layers=1, **changes).model.layers[0]

    def edited(change: Any) -> Any:
        found = layer()
        change(found)
        return found

    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    windowed = model_of("Qwen3", num_hidden_layers=1, **window).model.layers[0]
    mistral = model_of("Mistral", sliding_window=64).model.layers[0]
    for bad, error, message in (
        (nn.Linear(2, 2), TypeError, "layer: got Linear, must be one of LlamaDecoderLayer, "),
        (layer(hidden_act="gelu"), ValueError, "layer: got activation 'gelu', must be 'silu'"),
        (windowed, ValueError, "layer: got a sliding window of 8, must attend to all tokens"),
        (mistral, ValueError, "layer: got a sliding window of 64, must attend to all tokens"),
        (
            edited(lambda x: setattr(x, "mlp", nn.Identity())),
            ValueError,
            "layer: got Identity, must have a gated MLP (no experts)",
        ),
        (
            edited(lambda x: setattr(x.self_attn, "o_proj", nn.Identity())),
            TypeError,
            "o_proj: got Identity, must be nn.Linear",
        ),
        (
            edited(lambda x: setattr(x.self_attn, "scaling", 1.0)),
            ValueError,
            "layer: got attention scaling 1.0, must be ",
        ),
        (
            edited(lambda x: setattr(x.input_layernorm, "variance_epsilon", 0.1)),
            ValueError,
            "layer: got norms with epsilons [1e-06, 0.1], must be one for all",
        ),
        (
            edited(lambda x: setattr(x.self_attn.q_proj, "bias", nn.Parameter(torch.ones(128)))),
            ValueError,
            "layer: got biases on some of q, k and v, must be on all or none",
        ),
    ):
        with pytest.raises(error) as caught:
            DecoderBlock.from_module(bad)
        assert str(caught.value).startswith(message)
    with pytest.raises(ValueError, match="variant: got 'int8', must be one of"):
        DecoderBlock.from_module(layer(), variant="int8")


def test_a_layer_without_its_embeddings_is_told() -> None:
    block = DecoderBlock.from_module(model_of("Llama").model.layers[0])
    with pytest.raises(TypeError, match="position_embeddings: got NoneType, must be the pair"):
        block(torch.zeros(1, 2, 128, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Llama", (4096, 14336, 32, 8, 128)),
        ("Qwen3", (4096, 12288, 32, 8, 128)),
        ("Qwen3", (1024, 3072, 16, 8, 128)),
    ],
)
@torch.no_grad()
def test_published_sizes_on_a_gpu(family: str, sizes: tuple[int, ...]) -> None:
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim")
    changes = dict(zip(names, sizes, strict=True))
    with torch.device("cuda"):
        model = model_of(family, **changes, num_hidden_layers=1)
    layer = model.model.layers[0]
    block = DecoderBlock.from_module(layer)
    for batch, tokens in ((1, 1), (16, 1), (1, 300)):
        generator = torch.Generator("cuda").manual_seed(tokens)
        shape = (batch, tokens, sizes[0])
        x = torch.randn(shape, generator=generator, device="cuda").bfloat16()
        rotation = model.model.rotary_emb(x, torch.arange(tokens, device="cuda")[None])
        mask = torch.ones((tokens, tokens), dtype=torch.bool, device="cuda").tril()[None, None]
        wanted = layer(x, attention_mask=mask, position_embeddings=rotation)
        verdict = cute_fp8.near_lossless(block(x, position_embeddings=rotation), wanted)
        assert verdict.passed, (batch, tokens, verdict)


def test_a_replaced_buffer_is_used() -> None:
    model = model_of("Llama")
    block = DecoderBlock.from_module(model.model.layers[0])
    x = torch.randn(1, 3, 128, dtype=torch.bfloat16)
    angles = torch.zeros(1, 3, 32, dtype=torch.bfloat16)
    embeddings = (angles + 1, angles)
    before = block(x, position_embeddings=embeddings)
    zero = {"mlp_norm": torch.zeros_like(block.mlp_norm)}
    swapped = torch.func.functional_call(
        block, zero, (x,), {"position_embeddings": embeddings}, strict=False
    )
    assert not torch.equal(swapped, before)
    assert torch.equal(block(x, position_embeddings=embeddings), before)
    block.mlp_norm = zero["mlp_norm"]
    assert torch.equal(block(x, position_embeddings=embeddings), swapped)
