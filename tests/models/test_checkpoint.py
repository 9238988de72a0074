"""Checkpoints: our own to the bit, those of others, and what is wrong with one, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import BF16, INDEX, TOKENS, Net, layers_of, net, same_state, state_of
from torch import Tensor, nn

import cute_fp8
from cute_fp8.models.conversion import dequantized
from cute_fp8.models.linear import VARIANTS

safetensors = pytest.importorskip("safetensors.torch")
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


# ---------------------------------------------------------------------------- our own


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shard_bytes", [10**9, 40_000])
@pytest.mark.parametrize("into", ["bf16", "fp8", "meta"])
def test_a_round_trip_changes_no_bit(
    variant: str, shard_bytes: int, into: str, tmp_path: Path
) -> None:
    model = net(1)
    cute_fp8.convert(model, variant=variant)
    files = cute_fp8.save_checkpoint(model, tmp_path, shard_bytes=shard_bytes)
    assert (len(files) > 1) == (shard_bytes < 10**9) == (tmp_path / (INDEX)).is_file()
    assert not list(tmp_path.glob("*.part"))
    if into == "meta":
        with torch.device("meta"):
            other: nn.Module = Net().to(BF16)
        other.lm_head.weight = other.embed.weight
    else:
        other = net(2)
        if into == "fp8":
            cute_fp8.convert(other, variant=variant)
    report = cute_fp8.load_checkpoint(other, tmp_path)
    assert same_state(state_of(other), state_of(model))
    assert {layer.name: layer.variant for layer in report.layers} == {
        "up": variant,
        "down": variant,
        "lm_head": None,
    }
    assert other.lm_head.weight is other.embed.weight and int(other.steps) == 1
    with torch.no_grad():
        assert torch.equal(other(TOKENS), model(TOKENS))


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_decoders_and_others_have_the_same_files(variant: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        attention_bias=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(BF16)
    cute_fp8.convert(model, variant=variant)
    cute_fp8.save_checkpoint(model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    assert sorted(safetensors.load_file(file)) == sorted(model.state_dict())
    for fuse in (True, False):
        other = transformers.LlamaForCausalLM(config).to(BF16)
        report = cute_fp8.load_checkpoint(other, tmp_path, fuse=fuse)
        assert len(report.fused) == 2 * fuse
        names = sorted(model.state_dict())
        states = [{n: s[n] for n in names} for s in (state_of(other), state_of(model))]
        assert same_state(*states)
        for module in other.modules():  # what is loaded over a fused model lands in its parts
            if isinstance(module, cute_fp8.Linear):
                module.weight.detach().view(torch.uint8).zero_()
        cute_fp8.load_checkpoint(other, tmp_path, fuse=fuse)
        assert same_state({n: state_of(other)[n] for n in names}, states[1])
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["model_type"] == "llama"
    assert said["quantization_config"]["ignore"] == ["lm_head"]
    with pytest.raises(ValueError, match=r"folder: got one with model.safetensors in it, must"):
        cute_fp8.save_checkpoint(model, tmp_path, shard_bytes=1000)


# ---------------------------------------------------------------------------- compressed-tensors


def block_scales(weight: Tensor, rows: int = 128, columns: int = 128) -> Tensor:
    """``[ceil(N/rows), ceil(K/columns)]``, of each block's largest value."""
    n, k = weight.shape
    padded = nn.functional.pad(weight.float().abs(), (0, -k % columns, 0, -n % rows))
    blocks = padded.view(-(-n // rows), rows, -(-k // columns), columns)
    return blocks.amax((1, 3)) / 448


def scales_for(weight: Tensor, strategy: str) -> Tensor:
    """What an observer of compressed-tensors would have found."""
    w = weight.float()
    if strategy == "channel":
        return w.abs().amax(1, keepdim=True) / 448
    if strategy == "tensor":
        return (w.abs().amax() / 448).reshape(1)
    if strategy == "block":
        return block_scales(weight)
    return torch.exp2(torch.ceil(torch.log2(block_scales(weight, 1, 32))))


PRESETS = {"FP8_DYNAMIC": "channel", "FP8": "tensor", "FP8_BLOCK": "block", "MXFP8": "mxfp8"}


def made_by_compressed_tensors(preset: str, folder: Path) -> dict[str, Tensor]:
    """A folder that the package has written; its own idea of the weights' values."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor

    model = net(3)
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    config = quantization.QuantizationConfig(config_groups={"g": scheme}, ignore=["lm_head"])
    quantization.apply_quantization_config(model, config)
    for module in (model.up, model.down):
        strategy = str(module.quantization_scheme.weights.strategy)
        module.weight_scale.data.copy_(scales_for(module.weight, strategy))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.5)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors = {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    safetensors.save_file(tensors, folder / "model.safetensors")
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {n: getattr(model, n).weight.detach().float() for n in ("up", "down")}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_files_of_compressed_tensors(preset: str, variant: str | None, tmp_path: Path) -> None:
    """Values are those that the package reads back, or as near as the report says."""
    pytest.importorskip("compressed_tensors")
    theirs = made_by_compressed_tensors(preset, tmp_path)
    model, kind = net(4), PRESETS[preset]
    report = cute_fp8.load_checkpoint(model, tmp_path, variant=variant)
    natural = {"mxfp8": "mxfp8", "block": None}.get(kind, "per_token")
    wanted = variant or natural or "per_token"
    assert {layer.variant for layer in report.quantised} == {wanted}
    for layer in report.quantised:
        expected, mine = theirs[layer.name], dequantized(getattr(model, layer.name))
        error = float((mine - expected).norm() / expected.norm())
        if wanted == natural:
            # They round their product to bf16.
            assert layer.weight_rel_l2 is None and layer.notes == ()
            assert torch.equal(mine.to(BF16).float(), expected)
        else:
            assert error == pytest.approx(layer.weight_rel_l2, abs=2e-3) and error < 0.04
            assert "quantised again from" in layer.notes[0]
            assert f"{layer.weight_rel_l2:.4f}" in report.table()
    assert bool(report.notes) == (preset == "FP8")  # scales of static activations
    with torch.no_grad():
        y = model(TOKENS)
        for name, weight in theirs.items():
            module = nn.Linear(*weight.shape[::-1], bias=getattr(model, name).bias is not None)
            module.weight.copy_(weight)
            if module.bias is not None:
                module.bias.copy_(getattr(model, name).bias)
            setattr(model, name, module.to(BF16))
        assert cute_fp8.near_lossless(y, model(TOKENS)).passed


@pytest.mark.parametrize("variant", VARIANTS)
def test_compressed_tensors_reads_our_files(variant: str, tmp_path: Path) -> None:
    """By our ``quantization_config``, to the values that we have."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor

    model = net(5)
    cute_fp8.convert(model, variant=variant)
    cute_fp8.save_checkpoint(model, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(said)
    (scheme,) = config.config_groups.values()
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    for name, layer in layers_of(model).items():
        local = {key: tensors[f"{name}.{key}"] for key in ("weight", "weight_scale")}
        weight = compressor.decompress(local, scheme)["weight"]
        assert torch.equal(weight.to(BF16), dequantized(layer).to(BF16))


# ---------------------------------------------------------------------------- 128x128 blocks


def block_checkpoint(
    folder: Path, power_of_two: bool = False, e8m0: bool = False
) -> dict[str, Tensor]:
    """As DeepSeek and Qwen publish it; returns the values."""
    model, tensors, values = net(6), {}, {}
    for name, tensor in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer not in ("up", "down"):
            if name != "lm_head.weight":
                tensors[name] = tensor
            continue
        scale = block_scales(tensor)
        scale = torch.exp2(torch.ceil(torch.log2(scale))) if power_of_two else scale
        n, k = tensor.shape
        wide = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        codes = (tensor.float() / wide).to(E4M3)
        tensors |= {name: codes, f"{name}_scale_inv": scale.to(E8M0) if e8m0 else scale}
        values[layer] = codes.float() * wide
    safetensors.save_file(tensors, folder / "model.safetensors")
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    return values


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_are_quantised_again(variant: str, tmp_path: Path) -> None:
    values = block_checkpoint(tmp_path)
    model = net(7)
    report = cute_fp8.load_checkpoint(model, tmp_path, variant=variant)
    for layer in report.quantised:
        module = getattr(model, layer.name)
        expected = values[layer.name]
        error = float((dequantized(module) - expected).norm() / expected.norm())
        assert layer.weight_rel_l2 == pytest.approx(error, rel=1e-4)
        quantise = cute_fp8.quantize_mxfp8 if variant == "mxfp8" else cute_fp8.quantize_fp8
        codes, scale = quantise(expected)
        assert torch.equal(module.weight.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(
            module.weight_scale.view(torch.uint8), scale.view(len(codes), -1).view(torch.uint8)
        )


@pytest.mark.parametrize("e8m0", [False, True])
def test_blocks_of_powers_of_two_lose_nothing_as_mxfp8(e8m0: bool, tmp_path: Path) -> None:
    values = block_checkpoint(tmp_path, power_of_two=True, e8m0=e8m0)
    model = net(7)
    report = cute_fp8.load_checkpoint(model, tmp_path, variant="mxfp8")
    assert [layer.weight_rel_l2 for layer in report.quantised] == [0.0, 0.0]
    for name, expected in values.items():
        assert torch.equal(dequantized(getattr(model, name)), expected)
