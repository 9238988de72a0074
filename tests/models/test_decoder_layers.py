"""Decoder layers of transformers as blocks, in models: every way in which a layer is called."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import LAYERS, by_how_much, decoder, greedy, logits, prompt, same_state
from torch import Tensor, nn

import cute_fp8
from cute_fp8.decoder import block as blocks
from cute_fp8.models import decoder_layers
from cute_fp8.models.linear import VARIANTS

transformers = pytest.importorskip("transformers")
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
NAMES = tuple(f"model.layers.{i}" for i in range(LAYERS))
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every call that a block answers."""
    made: list[int] = []
    right = blocks.decoder_block

    def counting(x: Tensor, *arguments: Any, **options: Any) -> Any:
        made.append(x.shape[1])
        return right(x, *arguments, **options)

    monkeypatch.setattr(decoder_layers, "decoder_block", counting)
    return made


def converted(
    family: str, how: Any, device: str = "cpu", variant: str = "per_token", **options: Any
) -> Any:
    model = decoder(family, **options).to(device)
    cute_fp8.convert(model, fuse=how, variant=variant)
    return model


def padded(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Two prompts, of which the shorter is padded on the left."""
    ids, mask = prompt(2, 11), torch.ones(2, 11, dtype=torch.long)
    ids[1, :4], mask[1, :4] = 0, 0
    return ids.to(device), mask.to(device)


@on_devices
@pytest.mark.parametrize(
    ("family", "variant"),
    [(family, "per_token") for family in FAMILIES] + [(f, "mxfp8") for f in ("Llama", "Qwen3")],
)
def test_logits(family: str, variant: str, device: str, calls: list[int]) -> None:
    """Within the tier of bf16's, and close to those of the same projections one by one."""
    biased = {"mlp_bias": True, "attention_bias": True} if family == "Llama" else {}
    original = decoder(family, **biased).to(device)
    apart, fused = copy.deepcopy(original), copy.deepcopy(original)
    cute_fp8.convert(apart, variant=variant, fuse=False)
    report = cute_fp8.convert(fused, variant=variant)
    assert report.blocks == NAMES and report.no_blocks == ()
    assert len(report.quantised) == 7 * LAYERS and len(report.fused) == 2 * LAYERS
    ids = prompt(2, 24).to(device)
    expected, separate, y = (logits(model, ids) for model in (original, apart, fused))
    assert calls == [24] * LAYERS
    verdict = cute_fp8.near_lossless(y, expected)
    assert verdict.passed, str(verdict)
    # Residuals and the gated product are rounded once.
    assert cute_fp8.near_lossless(y, separate).rel_l2 < 0.04
    assert same_state(apart, fused)


@on_devices
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generation(family: str, cache: str, device: str, calls: list[int]) -> None:
    """Greedy tokens of padded prompts, in both kinds of cache: those that the same projections one
    by one, without any cache, find best, or as good but for roundings.
    """
    apart, fused = (converted(family, how, device) for how in (False, True))
    ids, mask = padded(device)
    options = {"cache_implementation": cache}
    tokens = greedy(fused, ids, mask, **options)
    assert calls == [11] * LAYERS + [1] * (7 * LAYERS)
    assert_best(apart, tokens, mask)
    alone = greedy(fused, ids[1:, 4:], **options)
    assert torch.equal(alone[0], tokens[1, 4:]), "padding changes nothing"
    assert torch.equal(greedy(fused, ids[:1], **options)[0], tokens[0])


def assert_best(model: nn.Module, tokens: Tensor, mask: Tensor) -> None:
    """Logits are about 0.23 in size, and 0.01 is by how much roundings move them."""
    lost = by_how_much(model, tokens, mask, tokens.shape[1] - mask.shape[1])
    assert float(lost.max()) < 0.02 and float((lost == 0).float().mean()) > 0.6, lost


@on_devices
def test_a_prompt_in_pieces(device: str) -> None:
    """Several tokens behind others in a cache, of both kinds: all that came before is seen."""
    fused = converted("Qwen3", True, device)
    ids = prompt(1, 12).to(device)
    whole = logits(fused, ids)
    static = transformers.StaticCache(config=fused.config, max_cache_len=20)
    for cache in (transformers.DynamicCache(config=fused.config), static):
        pieces = []
        with torch.no_grad():
            for piece in ids.split(5, dim=1):
                pieces.append(fused(piece, past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0.03, atol=0.03)


def test_a_sliding_window(calls: list[int]) -> None:
    """The mask has it, so that the layer's own forward and the block see the same tokens."""
    fused, apart = (converted("Mistral", how, sliding_window=4) for how in (True, False))
    ids = prompt(2, 13)
    y, expected = logits(fused, ids), logits(apart, ids)
    assert calls == [13] * LAYERS
    assert cute_fp8.near_lossless(y, expected).passed
    ids, mask = padded()
    assert_best(apart, greedy(fused, ids, mask), mask)


@on_devices
def test_tracing(device: str) -> None:
    """One graph, of any length; with a static cache of the room that is left, too."""
    torch._dynamo.reset()
    fused = converted("Qwen3", True, device)
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    for length in (8, 23, 40):
        ids = prompt(2, length).to(device)
        assert torch.equal(logits(compiled, ids), logits(fused, ids))
    caches = [transformers.StaticCache(config=fused.config, max_cache_len=16) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            fused(prompt(2, 9).to(device), past_key_values=cache)
        token = prompt(2, 1).to(device)
        for _ in range(3):
            y, z = (
                model(token, past_key_values=cache).logits
                for model, cache in zip((fused, compiled), caches, strict=True)
            )
            assert torch.equal(y, z)


@on_devices
@torch.no_grad()
def test_export(device: str) -> None:
    """One program for prompts of any length."""
    if device == "cuda" and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11's exporter cannot prove that 32 * tokens <= 64 * tokens")
    fused = converted("Qwen3", True, device)
    dim = torch.export.Dim("tokens", min=2, max=512)
    shapes = {"input_ids": {1: dim}, "use_cache": None}
    options = {"use_cache": False}
    program = torch.export.export(
        fused, (prompt(2, 30).to(device),), options, dynamic_shapes=shapes, strict=False
    )
    for length in (5, 60):
        ids = prompt(2, length).to(device)
        assert torch.equal(program.module()(ids, **options).logits, logits(fused, ids))


@pytest.mark.gpu
@pytest.mark.slow
def test_generation_that_transformers_compiles() -> None:
    """With a static cache, steps are compiled with CUDA graphs."""
    torch._dynamo.reset()
    apart, fused = (converted("Llama", how, "cuda") for how in (False, True))
    ids, mask = padded("cuda")
    options = {"cache_implementation": "static", "disable_compile": False}
    assert_best(apart, greedy(fused, ids, mask, **options), mask)


@pytest.mark.gpu
@torch.inference_mode()
def test_cuda_graph() -> None:
    """A step of a static cache, captured once."""
    fused = converted("Llama", True, "cuda")
    cache = transformers.StaticCache(config=fused.config, max_cache_len=32)
    prefix, token = prompt(2, 9).cuda(), prompt(2, 1).cuda()
    positions = torch.full((2, 1), 9, device="cuda")
    expected = []
    fused(prefix, past_key_values=cache)
    for _ in range(3):
        expected.append(fused(token, position_ids=positions, past_key_values=cache).logits.clone())
        positions += 1
    cache.reset()
    fused(prefix, past_key_values=cache)
    positions.fill_(9)
    kept = [tensor.clone() for tensor in _tensors(cache)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fused(token, position_ids=positions, past_key_values=cache).logits
    for tensor, old in zip(_tensors(cache), kept, strict=True):
        tensor.copy_(old)
    for wanted in expected:
        graph.replay()
        assert torch.equal(y, wanted)
        positions += 1


def _tensors(cache: Any) -> list[Tensor]:
    values = [value for layer in cache.layers for value in vars(layer).values()]
    return [value for value in values if isinstance(value, Tensor)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(how: str, variant: str) -> None:
    """A copy is a block of its own tensors."""
    fused = converted("Qwen2", True, variant=variant)
    made = copy.deepcopy(fused) if how == "deepcopy" else pickle.loads(pickle.dumps(fused))
    ids = prompt(1, 9)
    before = logits(fused, ids)
    assert torch.equal(logits(made, ids), before) and same_state(made, fused)
    assert type(made.model.layers[0]) is type(fused.model.layers[0])
    layer = made.model.layers[0].mlp.down_proj
    (layer.weight_scale if variant == "per_token" else layer.scale_blocks).add_(1)
    assert torch.equal(logits(fused, ids), before)
    assert not torch.equal(logits(made, ids), before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoints(variant: str, tmp_path: Path, calls: list[int]) -> None:
    """Bit for bit, from a model of blocks into one; and into one that is not fused."""
    fused = decoder("Llama")
    cute_fp8.convert(fused, variant=variant)
    expected = logits(fused, prompt(1, 9))
    cute_fp8.save_checkpoint(fused, tmp_path)
    for how in (True, "projections", False):
        other = decoder("Llama")
        report = cute_fp8.load_checkpoint(other, tmp_path, fuse=how)
        assert same_state(other, fused)
        assert report.blocks == (NAMES if how is True else ())
        if how is True:
            assert torch.equal(logits(other, prompt(1, 9)), expected)
    assert len(calls) == 2 * LAYERS


def test_changes_are_heard() -> None:
    """Of a dtype, a device, a parameter, its data, a module, in place: after a call, too."""
    fused, ids = converted("Llama", True), prompt(1, 9)
    layer, found = fused.model.layers[0], [logits(fused, ids)]

    def data(linear: Any) -> None:
        linear.weight_scale.data = linear.weight_scale.data * 2

    def parameter(linear: Any) -> None:
        linear.weight_scale = nn.Parameter(linear.weight_scale.detach() * 2, requires_grad=False)

    def in_place(linear: Any) -> None:
        linear.weight_scale.mul_(2)

    for change in (data, parameter, in_place):
        change(layer.mlp.down_proj)
        found.append(logits(fused, ids))
    layer.mlp = converted("Llama", True).model.layers[1].mlp
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data * 2
    found.append(logits(fused, ids))
    assert len({tuple(y.flatten().tolist()) for y in found}) == len(found)
    fused.to(torch.float16)
    assert logits(fused, ids).dtype is torch.float16
    with torch.no_grad():
        meta = copy.deepcopy(fused).to("meta")
        assert meta(ids.to("meta")).logits.device.type == "meta"


@pytest.mark.parametrize("variant", VARIANTS)
def test_loads_are_heard(variant: str) -> None:
    """And a state dict without scales is refused."""
    fused, other = (converted("Llama", how, variant=variant) for how in (True, False))
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name.endswith("weight_scale"):
                # A power of two more, in either form.
                whole = parameter.view(torch.uint8) if variant == "mxfp8" else parameter
                whole += 1 if variant == "mxfp8" else parameter
    state = other.state_dict()
    before = logits(fused, prompt(1, 9))
    fused.load_state_dict(state)
    assert same_state(fused, other)
    assert not torch.equal(logits(fused, prompt(1, 9)), before)
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        bad = {k: v for k, v in state.items() if k != f"model.layers.1.{name}.weight_scale"}
        with pytest.raises(RuntimeError, match=rf'Missing key.*"model.layers.1.{name}.weight_sc'):
            fused.load_state_dict(bad)


def test_mxfp8_scales_are_kept_once() -> None:
    """In blocks; alone, a layer also keeps the rows that tensor parallelism shards."""
    sizes = {}
    for how in (True, False):
        model = decoder("Llama")
        report = cute_fp8.convert(model, fuse=how, variant="mxfp8")
        tensors = [*model.model.layers.parameters(), *model.model.layers.buffers()]
        sizes[how] = sum(t.nbytes for t in tensors if t.element_size() == 1)
        # Blocks are padded to 128 rows, the whole ones less often than their parts.
        assert 0 <= report.bytes_after - sizes[how] - _head(report) < 0.02 * sizes[how]
    codes = 2 * 128 * (128 + 2 * 64 + 128 + 3 * 288)
    assert sizes[True] < 1.05 * codes < 1.06 * codes < sizes[False]


def _head(report: Any) -> int:
    return next(layer.bytes_after for layer in report.layers if layer.name == "lm_head")


# ------------------------------------------------------------------- what is left to the layer


def test_calls_that_the_layer_answers_itself(calls: list[int]) -> None:
    """Attention by something else, its weights asked for, autocast, fast accumulation."""
    fused, ids = converted("Llama", True), prompt(1, 9)
    expected = logits(fused, ids)
    assert len(calls) == LAYERS
    with torch.autocast("cpu", dtype=torch.float16):
        logits(fused, ids)
    fused.model.layers[0].mlp.down_proj.fast_accum = True
    logits(fused, ids)
    assert len(calls) == 2 * LAYERS - 1
    fused.model.layers[0].mlp.down_proj.fast_accum = False
    fused.set_attn_implementation("eager")
    with torch.no_grad():
        found = fused(ids, output_attentions=True, output_hidden_states=True)
    assert len(calls) == 2 * LAYERS - 1
    assert [a.shape for a in found.attentions] == [(1, 4, 9, 9)] * LAYERS
    assert cute_fp8.near_lossless(found.logits, expected).passed
    fused.set_attn_implementation("sdpa")
    with torch.no_grad():
        found = fused(ids, output_hidden_states=True)
    assert len(calls) == 3 * LAYERS - 1
    assert len(found.hidden_states) == LAYERS + 1
    assert torch.equal(found.logits, expected)


def test_layers_that_are_no_blocks() -> None:
    """Each with its reason, in the report's text and data; the others are blocks."""
    model = decoder("Llama")
    report = cute_fp8.convert(model, exclude="*.0.self_attn.k_proj")
    reason = "its k_proj is not in FP8"
    assert report.blocks == NAMES[1:] and report.no_blocks == ((NAMES[0], reason),)
    assert f"  {NAMES[0]}: {reason}" in report.table().splitlines()
    assert f"decoder blocks: {NAMES[1]}" in report.table().splitlines()
    assert report.as_dict()["no_blocks"] == {NAMES[0]: reason}
    assert "Block" not in type(model.model.layers[0]).__name__

    def why(change: Any, family: str = "Llama", **options: Any) -> str:
        made = decoder(family, **options)
        change(made.model.layers[1])
        return dict(cute_fp8.convert(made).no_blocks)[NAMES[1]]

    def nothing(layer: Any) -> None:
        pass

    def hook(layer: Any) -> None:
        layer.mlp.register_forward_hook(lambda *_: None)

    def epsilon(layer: Any) -> None:
        layer.input_layernorm.variance_epsilon = 0.1

    assert why(nothing, "Gemma") == "no block computes what a GemmaDecoderLayer does"
    assert why(nothing, hidden_act="gelu") == "got activation 'gelu', must be 'silu'"
    assert why(hook) == "has forward hooks inside, which would not be called"
    assert why(epsilon) == "got norms with epsilons [1e-06, 0.1], must be one for all"


def test_how_to_fuse_is_checked() -> None:
    model = decoder("Llama")
    with pytest.raises(ValueError, match=r"fuse: got 'layers', must be True, False or 'projec"):
        cute_fp8.convert(model, fuse="layers")
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    report = cute_fp8.convert(model, fuse="projections")
    assert len(report.fused) == 2 * LAYERS and report.blocks == report.no_blocks == ()
    assert cute_fp8.convert(model).blocks == NAMES, "what is fused so far becomes blocks"
