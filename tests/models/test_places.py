"""Which linear layers must stay what they are: by ``convert``, in a folder, and when loading."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import net, same_state, state_of
from torch import Tensor, nn

import cute_fp8
from cute_fp8.cli import main
from cute_fp8.models import places
from cute_fp8.models.folder import convert_folder
from cute_fp8.models.places import refusal

BF16 = torch.bfloat16


class Reader(nn.Module):
    """Reads weights of ``own``, ``deep.inner.0``, ``some`` and ``late``; not of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.some, self.late, self.free, self.made = (nn.Linear(64, 64) for _ in range(5))
        self.deep = nn.ModuleDict({"inner": nn.ModuleList(nn.Linear(64, 64) for _ in range(2))})
        self.rows = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(64, 64)}) for _ in range(2))
        nn.init.zeros_(self.made.weight)

    @property
    def kind(self) -> torch.dtype:
        return self.rows[0].fc.weight.dtype

    def _reset_weights(self) -> None:
        self.made.weight.data.zero_()

    def fuse_projections(self) -> Tensor:
        return torch.cat([self.made.weight, self.free.weight])

    def helper(self, x: Tensor) -> Tensor:
        return x + self.late.bias

    def forward(self, x: Tensor, i: int = 0) -> Tensor:
        x = x.to(self.free.weight.device)
        return self.helper(x.to(self.own.weight.dtype)) @ self.some.weight


def test_weights_that_a_module_around_reads() -> None:
    model = nn.Sequential(Reader())
    kept = {name for name, _ in places.linear_places(model).items() if refusal(model, name)}
    assert kept == {"0.own", "0.some", "0.late", "0.rows.0.fc"}
    assert refusal(model, "0.own") == "Reader reads its weight itself"


def test_without_a_source_names_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that uses a layer's name and reads weights may read that layer's."""

    def none(method: Any) -> str:
        raise OSError("no source")

    places._readings.cache_clear()
    monkeypatch.setattr(places.inspect, "getsource", none)
    try:
        model = Reader()
        assert refusal(model, "own") and refusal(model, "late")
        assert refusal(model, "made") is None and refusal(model, "deep.inner.0") is None
    finally:
        places._readings.cache_clear()


@torch.no_grad()
def test_torchs_encoder_layers_go_on_working() -> None:
    """Their fast path takes both linear layers' weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 64)
    before = model(x)
    report = cute_fp8.convert(model)
    assert {layer.reason for layer in report.kept} == {
        "TransformerEncoderLayer reads its weight itself",
        "is a NonDynamicallyQuantizableLinear, only nn.Linear itself is replaced",
    }
    assert torch.equal(model(x), before)


def t5(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        d_model=64,
        d_ff=128,
        num_layers=1,
        num_heads=4,
        d_kv=16,
        vocab_size=64,
        feed_forward_proj="gated-gelu",
        architectures=[f"{name}EncoderModel"],
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}EncoderModel")(config).to(BF16).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ["T5", "UMT5", "MT5"])
def test_the_kin_of_t5(name: str) -> None:
    """Who casts to the dtype of a weight would cast to FP8."""
    model, ids = t5(name), torch.arange(1, 40)[None]
    before = model(input_ids=ids).last_hidden_state
    report = cute_fp8.convert(model)
    assert [layer.name for layer in report.kept] == ["encoder.block.0.layer.1.DenseReluDense.wo"]
    assert cute_fp8.near_lossless(model(input_ids=ids).last_hidden_state, before).passed


def test_the_same_layers_stay_in_a_folder(tmp_path: Path) -> None:
    model = t5("UMT5")
    wo = "encoder.block.0.layer.1.DenseReluDense.wo"
    model.save_pretrained(tmp_path / "in")
    report = convert_folder(tmp_path / "in", tmp_path / "out")
    assert {layer.name: layer.reason for layer in report.kept} == {
        wo: "UMT5DenseGatedActDense reads its weight itself"
    }
    other = t5("UMT5")
    assert len(cute_fp8.load_checkpoint(other, tmp_path / "out").quantised) == 6
    cute_fp8.convert(model)
    assert same_state(
        {n: t for n, t in state_of(other).items() if ".layer." in n},
        {n: t for n, t in state_of(model).items() if ".layer." in n},
    )


def test_fp8_codes_for_such_a_layer_are_refused(tmp_path: Path) -> None:
    """Before anything is replaced."""
    quantised = nn.ModuleDict({"first": nn.Linear(64, 64), "own": nn.Linear(64, 64)}).to(BF16)
    cute_fp8.convert(quantised)
    cute_fp8.save_checkpoint(quantised, tmp_path)

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.own = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.own(self.first(x).to(self.own.weight.dtype))

    model = Casts().to(BF16)
    before = state_of(model)
    message = "own: got FP8 codes, must be in bf16: Casts reads its weight itself"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cute_fp8.load_checkpoint(model, tmp_path)
    assert same_state(state_of(model), before) and type(model.first) is nn.Linear


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize("choice", ["*.typo", re.compile("typo"), ["up", "*.typo"]])
def test_a_pattern_that_matches_nothing(argument: str, choice: Any) -> None:
    model = net()
    before = state_of(model)
    said = "typo" if isinstance(choice, re.Pattern) else "*.typo"
    message = f"{argument}: got {said!r}, must match the name of a linear layer"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cute_fp8.convert(model, **{argument: choice})
    assert same_state(state_of(model), before)
    assert len(cute_fp8.convert(model, include=(name for name in ("up", "down"))).quantised) == 2
    # What is in FP8 already has its name still.
    assert cute_fp8.convert(model, exclude="up").quantised == ()


def test_the_command_refuses_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cute_fp8.save_checkpoint(net(), tmp_path / "in")
    target = tmp_path / "out"
    assert main(["convert", str(tmp_path / "in"), str(target), "--include", "*.typo"]) != 0
    assert "include: got '*.typo', must match the name of a linear layer" in capsys.readouterr().err
    assert not target.exists()
    assert main(["convert", str(tmp_path / "in"), str(target), "--exclude", "up"]) == 0
    assert "quantization_config" in json.loads((target / "config.json").read_text())
