"""Decoder blocks of layers that are in FP8 already: converted, or read from a checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import LAYERS, decoder, logits, prompt, same_state
from torch import Tensor, nn

import cute_fp8
from cute_fp8 import DecoderBlock
from cute_fp8.models.linear import VARIANTS
from cute_fp8.models.tensor_files import write_json, write_tensors

pytest.importorskip("transformers")
NAMES = tuple(f"model.layers.{i}" for i in range(LAYERS))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("how", [False, "projections", True])
@torch.no_grad()
def test_blocks_of_converted_layers(how: Any, variant: str) -> None:
    """Codes and scales are those of the layer, put together; as from its bf16 weights."""
    original = decoder("Qwen2")
    model = copy.deepcopy(original)
    cute_fp8.convert(model, variant=variant, fuse=how)
    made = DecoderBlock.from_module(model.model.layers[1])
    assert made.config.variant == variant
    wanted = DecoderBlock.from_module(original.model.layers[1], variant=variant)
    mine, theirs = made.state_dict(), wanted.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name].view(torch.uint8), tensor.view(torch.uint8)), name
    other = next(v for v in VARIANTS if v != variant)
    with pytest.raises(ValueError, match=f"^variant: got '{other}', must be '{variant}' as the"):
        DecoderBlock.from_module(model.model.layers[1], variant=other)


def fp8_files(model: nn.Module, folder: Path, size: int | None) -> dict[str, Tensor]:
    """A checkpoint as published ones are: a scale for each tensor, or for blocks of ``size``."""
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        w = tensors[name].float()
        rows, columns = (size or n for n in w.shape)
        scale = torch.stack(
            [
                torch.stack([part.abs().amax() for part in strip.split(columns, dim=1)])
                for strip in w.split(rows)
            ]
        )
        scale = scale / 448
        spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        tensors[name] = (w / spread[: w.shape[0], : w.shape[1]]).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale" + "_inv" * bool(size)] = scale if size else scale.view(1)
    write_tensors(folder / "model.safetensors", tensors)
    config: dict[str, Any] = {"quant_method": "fp8"}
    config |= {"weight_block_size": [size, size]} if size else {}
    write_json(folder / "config.json", {"quantization_config": config})
    return tensors


@pytest.mark.parametrize("size", [None, 128], ids=["per tensor", "blocks"])
def test_fp8_checkpoints_become_blocks(size: int | None, tmp_path: Path) -> None:
    """Codes that a file has go into a block as they are."""
    original = decoder("Llama")
    files = fp8_files(original, tmp_path, size)
    fused, apart = decoder("Llama"), decoder("Llama")
    assert cute_fp8.load_checkpoint(fused, tmp_path).blocks == NAMES
    cute_fp8.load_checkpoint(apart, tmp_path, fuse=False)
    assert same_state(fused, apart)
    ids = prompt(2, 24)
    assert cute_fp8.near_lossless(logits(fused, ids), logits(original, ids)).rel_l2 < 0.08
    made = [DecoderBlock.from_module(model.model.layers[1]) for model in (fused, apart)]
    for name, tensor in made[0].state_dict().items():
        assert torch.equal(made[1].state_dict()[name].view(torch.uint8), tensor.view(torch.uint8))
    if size is None:
        parts = [f"{NAMES[1]}.self_attn.{name}_proj.weight" for name in "qkv"]
        codes = torch.cat([files[part].view(torch.uint8) for part in parts])
        scales = torch.cat([files[f"{p}_scale"].expand(len(files[p])) for p in parts])
        assert torch.equal(made[0].weights.qkv.codes.view(torch.uint8), codes)
        assert torch.equal(made[0].weights.qkv.scales, scales)


def test_a_block_of_mixed_projections_is_refused() -> None:
    model = decoder("Llama")
    cute_fp8.convert(model, exclude="*down_proj", fuse=False)
    wanted = r"^layer: got q_proj in per_token, down_proj in no FP8, must be all projections of"
    with pytest.raises(ValueError, match=wanted):
        DecoderBlock.from_module(model.model.layers[0])
