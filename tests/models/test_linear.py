"""``cute_fp8.Linear``: the reference's numbers, and all that modules are put through."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cute_fp8
from cute_fp8.models import linear as linear_module
from cute_fp8.models.linear import VARIANTS
from cute_fp8.producers import quantize_input
from cute_fp8.reference_linear import fp8_w8a8_linear, mxfp8_linear
from cute_fp8.testing import inputs

N, K = 48, 96
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def original(bias: bool = True, dtype: torch.dtype = BF16) -> nn.Linear:
    linear = nn.Linear(K, N, bias=bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(inputs("gaussian", N, K, seed=1))
        if bias:
            linear.bias.copy_(torch.arange(N))
    return linear


def tokens(*batch: int, dtype: torch.dtype = BF16) -> Tensor:
    x = inputs("heavy_tailed", torch.Size(batch).numel(), K, seed=2)
    return x.to(dtype).view(*batch, K)


def expected(linear: nn.Linear, x: Tensor, variant: str) -> Tensor:
    weight, bias = linear.weight.detach(), linear.bias
    bias = None if bias is None else bias.detach()
    if variant == "mxfp8":
        return mxfp8_linear(x, *cute_fp8.quantize_mxfp8(weight), bias)
    return fp8_w8a8_linear(x, *cute_fp8.quantize_fp8(weight), bias)


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return list(mine) == list(theirs) and all(
        mine[name].dtype == theirs[name].dtype
        and torch.equal(mine[name].view(torch.uint8), theirs[name].view(torch.uint8))
        for name in mine
    )


# ---------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("bias", [False, True])
def test_from_linear_equals_the_reference(variant: str, dtype: torch.dtype, bias: bool) -> None:
    linear = original(bias)
    layer = cute_fp8.Linear.from_linear(linear, variant)
    for batch in ((5,), (2, 3), (1,), (0,), ()):
        x = tokens(*batch, dtype=dtype)
        y = layer(x)
        assert y.dtype == dtype and y.shape == (*batch, N)
        assert torch.equal(y, expected(linear, x, variant))
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert isinstance(layer, nn.Linear) and layer.variant == variant


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_bf16_weight_is_kept(variant: str) -> None:
    linear = original(bias=False)
    layer = cute_fp8.Linear.from_linear(linear, variant)
    tensors = [*layer.parameters(), *layer.buffers()]
    assert sum(t.nbytes for t in tensors) < 0.6 * linear.weight.nbytes
    assert linear.weight.dtype == BF16  # the original is left alone


@pytest.mark.parametrize("form", ["n", "n1", "1n", "one", "rows", "blocked"])
def test_codes_and_scales_are_taken_as_they_are(form: str) -> None:
    """From a producer, in every form of the scales; no value is touched."""
    weight = original().weight.detach()
    if form in ("rows", "blocked"):
        codes, scale = cute_fp8.quantize_mxfp8(weight, blocked=form == "blocked")
    else:
        codes, scale = cute_fp8.quantize_fp8(weight)
        shape = {"n": (N,), "n1": (N, 1), "1n": (1, N), "one": (1,)}[form]
        scale = scale[:1] if form == "one" else scale.view(shape)
    layer = cute_fp8.Linear.from_quantized(codes, scale)
    assert layer.weight.data_ptr() == codes.data_ptr()
    xq, sx = quantize_input(tokens(4), layer.variant)
    assert torch.equal(layer(tokens(4)), cute_fp8.gemm(xq, sx, codes, scale))


def test_fast_accum_reaches_the_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else is asked of it."""
    asked: list[Any] = []

    def gemm(*operands: Tensor, **options: Any) -> Tensor:
        asked.append(options)
        return cute_fp8.gemm(*operands, **options)

    monkeypatch.setattr(linear_module, "gemm", gemm)
    layer = cute_fp8.Linear.from_linear(original())
    layer(tokens(2))
    layer.fast_accum = True
    layer(tokens(2))
    assert [options["fast_accum"] for options in asked] == [False, True]


# ---------------------------------------------------------------------------- as a module


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "state", "assign"])
def test_copies_are_equal_to_the_bit(variant: str, how: str) -> None:
    layer = cute_fp8.Linear.from_linear(original(), variant).eval()
    layer.fast_accum = True

    def through_state(device: str, assign: bool) -> nn.Module:
        made = cute_fp8.Linear(K, N, device=device, dtype=BF16, variant=variant).eval()
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        made.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        made.fast_accum = True
        return made

    def saved() -> nn.Module:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    made = {
        "deepcopy": lambda: copy.deepcopy(layer),
        "pickle": lambda: pickle.loads(pickle.dumps(layer)),
        "save": saved,
        "state": lambda: through_state("cpu", False),
        "assign": lambda: through_state("meta", True),
    }[how]()
    assert same_parameters(made, layer) and made.fast_accum and not made.training
    assert torch.equal(made(tokens(3)), layer(tokens(3)))
    assert made.weight.data_ptr() != layer.weight.data_ptr()
    assert not any(parameter.requires_grad for parameter in made.parameters())


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": nn.Module.half,
    "to bf16": lambda m: m.to(BF16),
    "double": nn.Module.double,
    "float": nn.Module.float,
    "to cpu and dtype": lambda m: m.to("cpu", FP16),
    "type": lambda m: m.type(FP16),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cast", CASTS)
def test_casts_leave_codes_and_scales_alone(variant: str, cast: str) -> None:
    layer = cute_fp8.Linear.from_linear(original(), variant)
    before = copy.deepcopy(layer)
    assert CASTS[cast](nn.Sequential(layer))[0] is layer
    for name in ("weight", "weight_scale"):
        mine, theirs = getattr(layer, name), getattr(before, name)
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert layer.bias.dtype == CASTS[cast](original()).bias.dtype
    if layer.bias.dtype is not torch.float64:
        assert torch.equal(layer(tokens(2)), before(tokens(2)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_moves_take_everything_along(variant: str) -> None:
    layer = cute_fp8.Linear.from_linear(original(), variant)
    before = copy.deepcopy(layer)
    layer.to("meta")
    assert {t.device.type for t in (*layer.parameters(), *layer.buffers())} == {"meta"}
    assert (layer.weight.dtype, layer.weight_scale.dtype) == (E4M3, before.weight_scale.dtype)
    assert layer(tokens(2).to("meta")).shape == (2, N)
    layer.to_empty(device="cpu").load_state_dict(before.state_dict())
    assert torch.equal(layer(tokens(2)), before(tokens(2)))
    layer.share_memory()
    assert layer.weight.is_shared() and layer.weight_scale.is_shared()


def test_what_is_printed() -> None:
    layer = cute_fp8.Linear.from_linear(original(), "mxfp8")
    assert repr(layer) == f"Linear(in_features={K}, out_features={N}, bias=True, variant=mxfp8)"
    before = copy.deepcopy(layer)
    layer.reset_parameters()
    assert same_parameters(layer, before)


@pytest.mark.parametrize("shape", [(N,), (1, N), (N, 1)])
def test_a_state_dict_may_have_the_usual_shapes_of_scales(shape: tuple[int, ...]) -> None:
    layer = cute_fp8.Linear.from_linear(original())
    state = layer.state_dict()
    state["weight_scale"] = state["weight_scale"].reshape(shape)
    made = cute_fp8.Linear(K, N, dtype=BF16)
    made.load_state_dict(state)
    assert same_parameters(made, layer)


def test_codes_at_any_address_are_taken() -> None:
    """As they lie in a file: copied, if a GEMM could not read them there."""
    layer = cute_fp8.Linear.from_linear(original())
    room = torch.empty(N * K + 8, dtype=torch.uint8)
    room[8:] = layer.weight.detach().view(torch.uint8).flatten()
    codes = room[8:].view(N, K).view(E4M3)
    assert codes.data_ptr() % 16
    made = cute_fp8.Linear.from_quantized(codes, layer.weight_scale.detach(), layer.bias)
    loaded = cute_fp8.Linear(K, N, device="meta", dtype=BF16)
    loaded.load_state_dict({**layer.state_dict(), "weight": codes}, assign=True)
    for other in (made, loaded):
        assert torch.equal(other(tokens(3)), layer(tokens(3)))


def assigned(layer: cute_fp8.Linear, scale: Tensor, x: Tensor) -> Tensor:
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    return layer(x)


def written(layer: cute_fp8.Linear, scale: Tensor, x: Tensor) -> Tensor:
    layer.weight_scale.view(torch.uint8).copy_(scale.view(torch.uint8))
    return layer(x)


def exchanged(layer: cute_fp8.Linear, scale: Tensor, x: Tensor) -> Tensor:
    layer.weight_scale.data = scale
    return layer(x)


def said(layer: cute_fp8.Linear, scale: Tensor, x: Tensor) -> Tensor:
    layer.weight_scale.data.view(torch.uint8).copy_(scale.view(torch.uint8))
    layer.scales_changed()
    return layer(x)


@pytest.mark.parametrize("how", [assigned, written, exchanged, said])
def test_new_scales_are_seen(how: Callable[..., Tensor]) -> None:
    """The blocks follow what is loaded, assigned and written, on a moved or copied layer too."""
    layer = cute_fp8.Linear.from_linear(original(bias=False), "mxfp8")
    for made in (copy.deepcopy(layer), copy.deepcopy(layer).to(FP32), layer):
        y = made(tokens(2)).float()
        scale = (made.weight_scale.detach().view(torch.uint8) + 1).view(E8M0)
        assert torch.equal(how(made, scale, tokens(2)).float(), 2 * y)
        blocks = made.scale_blocks
        assert torch.equal(made(tokens(2)).float(), 2 * y) and made.scale_blocks is blocks


def test_blocks_that_are_kept_alone_are_of_the_last_scales() -> None:
    layer = cute_fp8.Linear.from_linear(original(bias=False), "mxfp8")
    y = layer(tokens(2)).float()
    layer.weight_scale.view(torch.uint8).add_(1)
    layer.keep_blocks()
    assert torch.equal(layer(tokens(2)).float(), 2 * y)


@pytest.mark.parametrize("variant", VARIANTS)
def test_called_with_other_parameters(variant: str) -> None:
    """Which leaves the layer as it was."""
    layer, other = (cute_fp8.Linear.from_linear(original(), variant) for _ in range(2))
    other.weight_scale.view(torch.uint8)[:, -1].add_(1)
    x = tokens(3)
    before, wanted = layer(x), other(x)
    assert not torch.equal(before, wanted)
    called = torch.func.functional_call(layer, dict(other.named_parameters()), (x,))
    assert torch.equal(called, wanted) and torch.equal(layer(x), before)


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda s: s.update(weight=original().weight.detach()), "weight: got torch.bfloat16, must"),
        (lambda s: s.pop("weight_scale"), 'Missing key(s) in state_dict: "0.weight_scale"'),
        (lambda s: s.update(weight_scale=torch.ones(N + 8)), "weight_scale: got shape (56,), must"),
        (
            lambda s: s.update(weight_scale=torch.zeros((N, 3), dtype=torch.uint8).view(E8M0)),
            "weight_scale: got torch.float8_e8m0fnu, must be torch.float32 (per_token)",
        ),
        (
            lambda s: s.update(weight=torch.zeros(N, 2 * K).to(E4M3)),
            "size mismatch for 0.weight",
        ),
    ],
    ids=["bf16", "no scale", "length", "variant", "size"],
)
def test_a_wrong_state_dict_is_refused(wrong: Callable[[Any], Any], message: str) -> None:
    """By the name of the tensor; and the right one loads afterwards."""
    layer = cute_fp8.Linear.from_linear(original())
    model = nn.Sequential(cute_fp8.Linear(K, N, dtype=BF16))
    state = layer.state_dict()
    wrong(state)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        model.load_state_dict({f"0.{name}": tensor for name, tensor in state.items()})
    model.load_state_dict({f"0.{name}": tensor for name, tensor in layer.state_dict().items()})
    assert same_parameters(model[0], layer)


def nan_weight() -> nn.Linear:
    linear = original()
    with torch.no_grad():
        linear.weight[7, 3] = float("nan")
    return linear


@pytest.mark.parametrize("variant", VARIANTS)
def test_bad_layers_are_refused(variant: str) -> None:
    make = cute_fp8.Linear.from_linear
    with pytest.raises(ValueError, match=r"w: got a NaN or Inf in output channel 7, must be fini"):
        make(nan_weight(), variant)
    with pytest.raises(ValueError, match=r"^linear: got N = 12, must be a positive multiple of 8$"):
        make(nn.Linear(64, 12), variant)
    with pytest.raises(ValueError, match=r"^linear: got K = 40, must be a positive multiple of "):
        make(nn.Linear(40, 16), variant)
    with pytest.raises(TypeError, match=r"linear: got Linear, must be an nn.Linear"):
        make(make(original(), variant), variant)
    with pytest.raises(TypeError, match=r"linear: got Conv1d, must be an nn.Linear"):
        make(nn.Conv1d(16, 16, 1), variant)
    with pytest.raises(
        ValueError, match=r"^in_features, out_features: got K = 40, must be a positive mult"
    ):
        cute_fp8.Linear(40, 16, variant=variant)


def test_bad_codes_and_scales_are_refused() -> None:
    codes, scale = cute_fp8.quantize_fp8(original().weight)
    make = cute_fp8.Linear.from_quantized
    with pytest.raises(TypeError, match=r"codes: got torch.bfloat16, must be torch.float8_e4m3fn"):
        make(original().weight, scale)
    with pytest.raises(ValueError, match=r"codes: got shape \(48, 96, 1\), must be 2-D"):
        make(codes.unsqueeze(-1), scale)
    with pytest.raises(ValueError, match=r"scale: got shape \(47,\), must be \(48,\)"):
        make(codes, scale[1:])
    with pytest.raises(TypeError, match=r"scale: got torch.bfloat16, must be torch.float32 or"):
        make(codes, scale.to(BF16))
    with pytest.raises(ValueError, match=r"bias: got shape \(3,\), must be \(48,\)"):
        make(codes, scale, torch.zeros(3))
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(TypeError, match=rf"^bias: got {dtype}, must be torch.bfloat16, torch"):
            make(codes, scale, torch.zeros(N, dtype=dtype))
    for bad in (1.0, None, [1.0]):
        kind = type(bad).__name__
        with pytest.raises(TypeError, match=rf"^scale: got {kind}, must be a torch.Tensor$"):
            make(codes, bad)
    with pytest.raises(TypeError, match=r"^codes: got list, must be a torch.Tensor$"):
        make([1.0], scale)
    with pytest.raises(TypeError, match=r"^bias: got int, must be a torch.Tensor$"):
        make(codes, scale, 0)
    with pytest.raises(TypeError, match=r"^dtype: got torch.float8_e4m3fn, must be torch.bfloat16"):
        cute_fp8.Linear(K, N, dtype=E4M3)
    with pytest.raises(ValueError, match=r"scale: got device meta, must be cpu"):
        make(codes, scale.to("meta"))
    with pytest.raises(ValueError, match=r"variant: got 'int8', must be one of per_token, mxfp8"):
        cute_fp8.Linear(K, N, variant="int8")
    assert make(codes, scale)(tokens(2)).shape == (2, N)


def test_inputs_that_need_grad_are_refused() -> None:
    layer = cute_fp8.Linear.from_linear(original())
    x = tokens(2).requires_grad_()
    with pytest.raises(RuntimeError, match=r"x: got a tensor that requires grad, must be called"):
        layer(x)
    with torch.no_grad():
        assert layer(x).shape == (2, N)


# ---------------------------------------------------------------------------- autocast, inference


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_decides_the_output_only(variant: str) -> None:
    """fp32 input is quantised as it is; the result is in autocast's dtype, as nn.Linear's is."""
    linear = original(dtype=FP32)
    layer = cute_fp8.Linear.from_linear(linear, variant)
    x = tokens(4, dtype=FP32)
    with torch.autocast("cpu", dtype=BF16):
        y = layer(x)
        assert y.dtype == linear(x).dtype == BF16
    assert torch.equal(y, layer(x).to(BF16))


@pytest.mark.parametrize("variant", VARIANTS)
def test_inference_mode(variant: str) -> None:
    outside = cute_fp8.Linear.from_linear(original(), variant)
    with torch.inference_mode():
        inside = cute_fp8.Linear.from_linear(original(), variant)
        y = inside(tokens(3))
        assert torch.equal(outside(tokens(3)), y)
    assert torch.equal(outside(tokens(3)), y)
