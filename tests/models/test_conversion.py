"""``convert``: which layers it takes, what it leaves alone and why, and what it reports."""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cute_fp8
from cute_fp8.accuracy import activation_error
from cute_fp8.models import conversion
from cute_fp8.models.linear import VARIANTS
from cute_fp8.testing import inputs

BF16 = torch.bfloat16


class Net(nn.Module):
    """Layers of every fate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)
        self.odd = nn.Linear(64, 12)
        self.lm_head = nn.Linear(64, 40, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(x)))
        self.odd(x)
        return self.lm_head(x)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(BF16)


def tokens(rows: int = 30) -> Tensor:
    return torch.randint(0, 40, (2, rows // 2), generator=torch.Generator().manual_seed(1))


def fates(report: Any) -> dict[str, str | None]:
    return {layer.name: layer.reason for layer in report.layers}


HEAD = "an output head, which stays unless it is included by name"
ODD = "N = 12 is no multiple of 8"


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_converted_and_what_is_not(variant: str) -> None:
    model = net()
    before = model(tokens()).detach()
    report = cute_fp8.convert(model, variant=variant, sample_inputs=tokens())
    assert fates(report) == {"up": None, "down": None, "odd": ODD, "lm_head": HEAD}
    assert [type(m) for m in (model.up, model.down, model.odd, model.lm_head)] == [
        cute_fp8.Linear,
        cute_fp8.Linear,
        nn.Linear,
        nn.Linear,
    ]
    assert {model.up.variant, model.down.variant} == {variant}
    assert model.up.bias is not None and model.down.bias is None
    with torch.no_grad():
        assert cute_fp8.near_lossless(model(tokens()), before).passed
    assert cute_fp8.convert(model, variant=variant).quantised == ()  # nothing is left to do


@pytest.mark.parametrize(
    ("choice", "taken"),
    [
        ({"include": "u*"}, {"up"}),
        ({"include": ["up", re.compile("own$")]}, {"up", "down"}),
        ({"include": lambda name, module: module.bias is None}, {"down", "lm_head"}),
        ({"exclude": re.compile("^d")}, {"up"}),
        ({"include": "*", "exclude": ("up", "odd")}, {"down", "lm_head"}),
        ({"include": ()}, set()),
    ],
    ids=["glob", "several", "predicate", "exclude", "both", "none"],
)
def test_choices(choice: dict[str, Any], taken: set[str]) -> None:
    report = cute_fp8.convert(net(), **choice)
    assert {layer.name for layer in report.quantised} == taken


def test_layers_that_must_not_be_touched() -> None:
    class Special(nn.Linear):
        pass

    class T5DenseActDense(nn.Module):  # casts its input to the dtype of wo's weight
        def __init__(self) -> None:
            super().__init__()
            self.wo = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.wo(x.to(self.wo.weight.dtype))

    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(64, 2),
            "special": Special(64, 64),
            "t5": T5DenseActDense(),
            "hooked": nn.Linear(64, 64),
            "fp64": nn.Linear(64, 64, bias=False, dtype=torch.float64),
            "lazy": nn.LazyLinear(64),
            "empty": nn.Linear(64, 64, device="meta"),
            "fp64 bias": nn.Linear(64, 64),
            "nan": nn.Linear(64, 64),
            "embed": nn.Embedding(64, 64),
            "tied": nn.Linear(64, 64, bias=False),
        }
    )
    model["hooked"].register_forward_hook(lambda *_: None)
    model["tied"].weight = model["embed"].weight
    model["fp64 bias"].bias = nn.Parameter(torch.zeros(64, dtype=torch.float64))
    with torch.no_grad():
        model["nan"].weight[5, 0] = float("inf")
    report = cute_fp8.convert(model)
    assert report.quantised == ()
    assert fates(report) == {
        "attention.out_proj": (
            "is a NonDynamicallyQuantizableLinear, only nn.Linear itself is replaced"
        ),
        "special": "is a Special, only nn.Linear itself is replaced",
        "t5.wo": "T5DenseActDense reads its weight itself",
        "hooked": "has forward hooks, which would be lost",
        "fp64": "its weight is torch.float64",
        "fp64 bias": "its bias is torch.float64",
        "empty": "has no values, for it is on the meta device",
        "nan": "w: got a NaN or Inf in output channel 5, must be finite",
        "tied": "shares its weight with embed",
    }


def test_a_layer_that_misses_the_tier_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales that are 5 % too large, for one of the layers only."""
    right = cute_fp8.Linear.from_linear.__func__

    def wrong(cls: Any, linear: nn.Linear, variant: str) -> cute_fp8.Linear:
        layer = right(cls, linear, variant)
        if linear.bias is None:
            with torch.no_grad():
                layer.weight_scale.mul_(1.05)
        return layer

    monkeypatch.setattr(conversion.Linear, "from_linear", classmethod(wrong))
    model = net()
    original = model.down
    report = cute_fp8.convert(model, sample_inputs=tokens())
    assert model.down is original and type(model.up) is cute_fp8.Linear
    reason = fates(report)["down"]
    assert reason is not None and reason.startswith("misses the tier: near-lossless: FAIL")
    (layer,) = [layer for layer in report.layers if layer.name == "down"]
    assert layer.verdict is not None and not layer.verdict.passed
    assert layer.bytes_after == layer.bytes_before and layer.weight_rel_l2 > 0.04


def test_few_rows_stay() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.pool = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(self.body(x)[:, 0])

    model = Pooled()
    x = torch.randn(4, 16, 64)
    report = cute_fp8.convert(model, min_rows=16, sample_inputs=[x, x[:1]])
    assert fates(report) == {"body": None, "pool": "sees 4 rows, fewer than min_rows = 16"}
    with pytest.raises(ValueError, match=r"min_rows: got 16 without sample_inputs, must come with"):
        cute_fp8.convert(Pooled(), min_rows=16)


@pytest.mark.parametrize("form", ["tensor", "tuple", "mapping", "list"])
def test_sample_inputs(form: str) -> None:
    """In every form; dropout is off meanwhile, and modes are what they were."""
    t = tokens()
    samples = {"tensor": t, "tuple": (t,), "mapping": {"tokens": t}, "list": [t, (t,)]}[form]
    model = nn.Sequential(net(), nn.Dropout(0.9)) if form != "mapping" else net()
    model.train()
    model[0].eval() if form != "mapping" else None
    modes = [module.training for module in model.modules()]
    report = cute_fp8.convert(model, sample_inputs=samples)
    (up,) = [layer for layer in report.layers if layer.name.endswith("up")]
    assert up.m == (60 if form == "list" else 30)
    assert up.verdict is not None and up.verdict.passed
    assert [module.training for module in model.modules()] == modes
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_many_rows_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SAMPLE_ROWS", 16)
    report = cute_fp8.convert(net(), sample_inputs=[tokens(40), tokens(30)])
    assert {layer.m for layer in report.quantised} <= set(range(12, 17))


def test_the_errors_that_are_reported_are_right() -> None:
    """Against the measures of a single layer, on a weight with an outlier channel."""
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 48, dtype=BF16), inputs("heavy_tailed", 40, 96, seed=3).to(BF16)
    with torch.no_grad():
        layer.weight[7] = torch.logspace(-4, 0, 96)
    report = cute_fp8.convert(nn.Sequential(layer), sample_inputs=x)
    wrong = cute_fp8.fp8_w8a8_error(layer.weight, *cute_fp8.quantize_fp8(layer.weight), x)
    (found,) = report.layers
    assert found.weight_rel_l2 == pytest.approx(wrong["rel_l2"], rel=1e-4)
    assert found.worst_channel_rel_l2 == pytest.approx(wrong["worst_channel_rel_l2"], rel=1e-4)
    assert found.activation_rel_l2 == wrong["activation_rel_l2"]
    assert found.activation_crest == wrong["activation_crest"]
    assert found.verdict is not None
    assert found.verdict.rel_l2 == pytest.approx(wrong["output_rel_l2"], rel=0.05)


def test_activation_error_of_mxfp8() -> None:
    """One large element spoils its token's scale, but only its own block's."""
    x = inputs("gaussian", 8, 128, seed=5)
    x[:, 0] = 3e4
    rest = x.clone()
    rest[:, :32] = 0
    per_token, mx = (activation_error(x, variant) for variant in VARIANTS)
    assert mx["activation_crest"] == per_token["activation_crest"] > 11
    assert mx["activation_underflow"] < 0.7 * per_token["activation_underflow"]
    assert activation_error(rest, "mxfp8")["activation_rel_l2"] < 0.04


# ---------------------------------------------------------------------------- the report


def test_the_report_as_text_json_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = cute_fp8.convert(net(), sample_inputs=tokens())
    text = report.table()
    for layer in report.layers:
        (line,) = [i for i in text.splitlines() if i.startswith(f"{layer.name} ")]
        assert f"{layer.n} x {layer.k}" in line
        assert ("pass" in line) == layer.quantised == ("per_token" in line)
    assert f"  odd: {ODD}" in text.splitlines()
    assert "2 of 4 linear layers in FP8" in text.splitlines()[0]
    report.save_json(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data == report.as_dict()
    assert [layer["quantised"] for layer in data["layers"]] == [True, True, False, False]
    assert data["layers"][0]["verdict"]["cosine"] > 0.996
    assert data["bytes_after"] == 96 * 64 * 2 + 4 * (96 + 64) + 2 * 64 * (12 + 40)
    assert data["bytes_before"] == 2 * 64 * (96 + 96 + 12 + 40)
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"plot: got a report of no layers"):
        cute_fp8.convert(nn.Sequential()).plot(tmp_path / "none.png")


def test_without_samples_nothing_is_judged() -> None:
    report = cute_fp8.convert(net())
    assert all(layer.verdict is None and layer.m is None for layer in report.layers)
    assert "tier" not in report.table() and "weight err" in report.table()


def test_the_old_weights_are_let_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a layer is quantised, every layer before it has lost its bf16 weight."""
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=BF16) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []
    right = conversion.Linear.from_linear

    def counting(linear: nn.Linear, variant: str) -> cute_fp8.Linear:
        alive.append(sum(ref() is not None for ref in weights))
        return right(linear, variant)

    gc.disable()
    try:
        monkeypatch.setattr(conversion.Linear, "from_linear", counting)
        cute_fp8.convert(model)
    finally:
        gc.enable()
    assert alive == [4, 3, 2, 1]
    assert all(ref() is None for ref in weights)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"variant": "fp4"}, ValueError, "variant: got 'fp4', must be one of per_token, mxfp8"),
        ({"include": 3}, TypeError, "include: got int, must be a glob, a compiled regular"),
        ({"exclude": ["a", 3]}, TypeError, "exclude: got int, must be a glob"),
        ({"sample_inputs": 3}, TypeError, "sample_inputs: got int, must be a tensor, a tuple"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """Refused before any layer is replaced; the next good call works."""
    model = net()
    with pytest.raises(error, match=re.escape(message)):
        cute_fp8.convert(model, **arguments)
    assert not any(isinstance(m, cute_fp8.Linear) for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert len(cute_fp8.convert(model).quantised) == 2


def test_bad_models() -> None:
    with pytest.raises(TypeError, match=r"model: got str, must be an nn.Module"):
        cute_fp8.convert("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model: got an nn.Linear, must contain it"):
        cute_fp8.convert(nn.Linear(64, 64))
