"""What is wrong with a checkpoint is said by name, before anything is changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import BF16, INDEX, Net, net, same_state, state_of
from torch import Tensor, nn

import cute_fp8

safetensors = pytest.importorskip("safetensors.torch")
E4M3 = torch.float8_e4m3fn


def written(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    model = net(8)
    cute_fp8.convert(model)
    cute_fp8.save_checkpoint(model, folder)
    tensors = safetensors.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.save_file(tensors, folder / "model.safetensors")


def nan_code(tensors: dict[str, Any]) -> None:
    tensors["up.weight"].view(torch.uint8)[3, 5] = 0xFF


def zero_codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(E4M3)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no scale": (
        lambda t: t.pop("up.weight_scale"),
        "up.weight_scale: got no such tensor, must be",
    ),
    "no bias": (lambda t: t.pop("up.bias"), "up.bias: got no such tensor, must be there"),
    "no weight": (
        lambda t: (t.pop("down.weight"), t.pop("down.weight_scale")),
        "down.weight: got no such tensor, must be there",
    ),
    "a norm": (
        lambda t: t.update({"norm.weight": torch.ones(7)}),
        "norm.weight: got shape (7,), mu",
    ),
    "shape": (
        lambda t: t.update(
            {"up.weight": t["up.weight"][:16].clone(), "up.weight_scale": torch.ones(16)}
        ),
        "up.weight: got shape (16, 160), must be (288, 160)",
    ),
    "scales": (
        lambda t: t.update({"up.weight_scale": torch.ones(287, 1)}),
        "up.weight_scale: got torch.float32 of shape (287, 1), must be one element, (288, 1), "
        "(288, 5) bytes, or (3, 2) for blocks of 128x128",
    ),
    "scales' dtype": (
        lambda t: t.update({"up.weight_scale": torch.ones(288, 1, dtype=torch.int32)}),
        "up.weight_scale: got torch.int32 of shape",
    ),
    "e5m2": (
        lambda t: t.update({"up.weight": t["up.weight"].float().to(torch.float8_e5m2)}),
        "up.weight: got torch.float8_e5m2, must be torch.float8_e4m3fn",
    ),
    "extra": (
        lambda t: t.update({"left.weight": torch.ones(2), "right.weight": torch.ones(2)}),
        "left.weight: got a tensor that the model has no place for (and 1 more)",
    ),
    "FP8 norm": (
        lambda t: t.update({"norm.weight": torch.ones(160).to(E4M3)}),
        "norm.weight: got torch.float8_e4m3fn, must be the weight of a linear layer",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_checkpoint_is_refused_by_name(what: str, tmp_path: Path) -> None:
    """Before anything is changed; a right one loads afterwards."""
    change, message = WRONG[what]
    written(tmp_path, change)
    model = net(9)
    before = state_of(model)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
        cute_fp8.load_checkpoint(model, tmp_path)
    assert "\n" not in str(caught.value)
    assert same_state(state_of(model), before)
    written(tmp_path, lambda tensors: None)
    assert len(cute_fp8.load_checkpoint(model, tmp_path).quantised) == 2


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    written(tmp_path, nan_code)
    with pytest.raises(ValueError, match=r"up.weight: got a NaN among its codes, must be finite"):
        cute_fp8.load_checkpoint(net(9), tmp_path)
    written(tmp_path, lambda t: t["down.weight_scale"].__setitem__(4, float("inf")))
    with pytest.raises(ValueError, match=r"down.weight_scale: got a NaN or Inf, must be finite"):
        cute_fp8.load_checkpoint(net(9), tmp_path)


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    load = cute_fp8.load_checkpoint
    with pytest.raises(ValueError, match=r"folder: got .*nowhere', must be a folder that exists"):
        load(net(), tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"folder: got .*, must hold \*.safetensors files"):
        load(net(), tmp_path)
    model = net(1)
    cute_fp8.convert(model)
    files = cute_fp8.save_checkpoint(model, tmp_path, shard_bytes=40_000)
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:100])
    with pytest.raises(ValueError, match=rf"{files[0].name}: half-written or no safetensors"):
        load(net(), tmp_path)
    files[0].unlink()
    with pytest.raises(ValueError, match=rf"{INDEX}: got '{files[0].name}' for .* not there"):
        load(net(), tmp_path)
    safetensors.save_file({"other": torch.ones(1)}, files[0])
    with pytest.raises(ValueError, match=rf": got no such tensor in {files[0].name}, where"):
        load(net(), tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": ')
    with pytest.raises(ValueError, match=rf"{INDEX}: half-written or no JSON"):
        load(net(), tmp_path)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "gptq"}, "config.json: got quant_method 'gptq', must be 'compressed-ten"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "config.json: got format 'pack-quantized', must be one of float-quantized",
        ),
    ],
)
def test_other_quantisations_are_refused(said: Any, message: str, tmp_path: Path) -> None:
    written(tmp_path, lambda tensors: None)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with pytest.raises(ValueError, match=re.escape(message)):
        cute_fp8.load_checkpoint(net(), tmp_path)


def test_a_model_that_cannot_take_it(tmp_path: Path) -> None:
    """An unquantised weight for an FP8 layer; buffers that no checkpoint fills."""
    cute_fp8.save_checkpoint(net(1), tmp_path)
    model = net(2)
    cute_fp8.convert(model)
    with pytest.raises(TypeError, match=r"up.weight: got torch.bfloat16, must be torch.float8_e4"):
        cute_fp8.load_checkpoint(model, tmp_path)
    with torch.device("meta"):
        empty: nn.Module = Net().to(BF16)
        empty.register_buffer("cache", torch.zeros(3), persistent=False)
    empty.lm_head.weight = empty.embed.weight
    with pytest.raises(RuntimeError, match=r"steps: got a tensor on the meta device"):
        cute_fp8.save_checkpoint(empty, tmp_path / "empty")
    with pytest.raises(ValueError, match=r"cache: got no values, for it is on the meta device"):
        cute_fp8.load_checkpoint(empty, tmp_path)
    # Nothing was touched, and what was wrong can be put right.
    assert empty.up.weight.is_meta and empty.steps.is_meta
    empty.cache = torch.zeros(3)
    cute_fp8.load_checkpoint(empty, tmp_path)
    assert same_state(state_of(empty), state_of(net(1)))
    with pytest.raises(ValueError, match=r"variant: got 'int8', must be one of"):
        cute_fp8.load_checkpoint(net(), tmp_path, variant="int8")
