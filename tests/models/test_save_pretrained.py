"""``save_pretrained`` of what was converted: read right by transformers, or refused by it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import decoder, logits, prompt
from torch import nn

import cute_fp8
from cute_fp8.models.formats import MXFP8_STATE
from cute_fp8.models.linear import VARIANTS

transformers = pytest.importorskip("transformers")
BF16 = torch.bfloat16


def read_back(folder: Path, **options: Any) -> Any:
    pytest.importorskip("compressed_tensors")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("fuse", [True, False])
def test_transformers_reads_what_it_wrote(fuse: bool, tmp_path: Path) -> None:
    """Per-token layers, through compressed-tensors; and so it does what we write."""
    model = decoder("Llama")
    cute_fp8.convert(model, fuse=fuse)
    wanted = logits(model, prompt(1, 20))
    model.save_pretrained(tmp_path / "theirs")
    cute_fp8.save_checkpoint(model, tmp_path / "ours")
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        verdict = cute_fp8.near_lossless(logits(read_back(folder), prompt(1, 20)), wanted)
        assert verdict.passed, str(verdict)


def test_mxfp8(tmp_path: Path) -> None:
    """Scales of a state dict are no bytes, which its reader would take for numbers; ours are."""
    model = decoder("Llama")
    cute_fp8.convert(model, variant="mxfp8")
    wanted = logits(model, prompt(1, 20))
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"format\n +Input should be 'dense'"):
        read_back(tmp_path / "theirs")
    cute_fp8.save_checkpoint(model, tmp_path / "ours")
    verdict = cute_fp8.near_lossless(logits(read_back(tmp_path / "ours"), prompt(1, 20)), wanted)
    assert verdict.passed, str(verdict)
    assert model.config.quantization_config["format"] == MXFP8_STATE


@pytest.mark.parametrize("variant", VARIANTS)
def test_load_checkpoint_reads_it(variant: str, tmp_path: Path) -> None:
    """To the bit, and the model that it was read into can be saved likewise."""
    model, other = decoder("Qwen2"), decoder("Qwen2")
    cute_fp8.convert(model, variant=variant, exclude="*.0.mlp.down_proj")
    model.save_pretrained(tmp_path)
    cute_fp8.load_checkpoint(other, tmp_path)
    assert torch.equal(logits(other, prompt(1, 20)), logits(model, prompt(1, 20)))
    said = other.config.quantization_config
    assert said == model.config.quantization_config
    assert set(said["ignore"]) == {"lm_head", "model.layers.0.mlp.down_proj"}


def test_diffusers_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    options = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 1}
    kind = diffusers.DiTTransformer2DModel
    model = kind(sample_size=8, norm_type="ada_norm_zero", num_embeds_ada_norm=10, **options)
    assert cute_fp8.convert(model).quantised
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Unknown quantization type, got compressed-tensors"):
        kind.from_pretrained(tmp_path)


def test_a_model_that_is_not_converted_says_nothing() -> None:
    model = decoder("Llama")
    cute_fp8.convert(model, include=())
    assert not hasattr(model.config, "quantization_config")
    plain = nn.Sequential(nn.Linear(64, 64))
    assert cute_fp8.convert(plain).notes == ()


def test_the_report_says_what_dtype_the_model_has_now() -> None:
    """transformers takes it from the first parameter."""

    class Config(transformers.PretrainedConfig):
        model_type = "linear"

    class First(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config: Config):
            super().__init__(config)
            self.first = nn.Linear(64, 64)

    model = First(Config()).to(BF16)
    report = cute_fp8.convert(copy.deepcopy(model))
    note = "model.dtype is torch.float8_e4m3fn now, for that is its first parameter's"
    assert report.notes == (note,)
    assert cute_fp8.convert(decoder("Llama")).notes == ()
