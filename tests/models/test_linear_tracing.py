"""``cute_fp8.Linear`` under torch.compile and torch.export, whatever M is; in CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import Counting
from torch import Tensor, nn

import cute_fp8
from cute_fp8.models.linear import VARIANTS
from cute_fp8.testing import inputs

K, HIDDEN, N = 96, 160, 136
#: M of successive calls of one compiled model.
TOKENS = (2, 17, 64, 130, 300, 5)
BF16 = torch.bfloat16
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def model(variant: str, device: str = "cpu") -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    layers = []
    for n, k in ((HIDDEN, K), (N, HIDDEN)):
        linear = nn.Linear(k, n, dtype=BF16)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(n, k, generator=generator) / k**0.5)
        layers.append(cute_fp8.Linear.from_linear(linear, variant))
    return nn.Sequential(layers[0], nn.ReLU(), layers[1]).to(device)


def tokens(*batch: int, device: str = "cpu") -> Tensor:
    x = inputs("gaussian", torch.Size(batch).numel(), K, seed=sum(batch))
    return x.to(device=device, dtype=BF16).view(*batch, K)


@on_devices
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_no_recompilation_past_the_second_size(
    variant: str, guard: Callable[[], Any], device: str
) -> None:
    """The default of ``dynamic``: the first size is taken as fixed, the second is not."""
    backend = Counting()
    layers = model(variant, device)
    compiled = torch.compile(layers, fullgraph=True, backend=backend)
    with guard():
        for m in (*TOKENS, 0, 1):
            x = tokens(m, device=device)
            assert torch.equal(compiled(x), layers(x)), m
            assert backend.graphs <= (2 if m > 1 else 4), m
        for m in TOKENS[::-1]:
            compiled(tokens(m, device=device))
        assert backend.graphs <= 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_graph_break(variant: str) -> None:
    explained = torch._dynamo.explain(model(variant))(tokens(2, 3))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@on_devices
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_through_inductor(variant: str, device: str) -> None:
    layers = model(variant, device)
    compiled = torch.compile(layers, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in TOKENS[:3]:
            x = tokens(m, device=device)
            assert torch.equal(compiled(x), layers(x)), m


@on_devices
@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_inside(variant: str, device: str) -> None:
    layers = model(variant, device).float()

    def call(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=BF16):
            return layers(x)

    x = tokens(4, device=device).float()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    y = compiled(x)
    assert y.dtype == BF16 and torch.equal(y, call(x))


@on_devices
@pytest.mark.parametrize("variant", VARIANTS)
def test_export(variant: str, device: str) -> None:
    """One program for every M >= 2."""
    layers = model(variant, device)
    dim = torch.export.Dim("tokens", min=2, max=4096)
    example = (tokens(300, device=device),)
    program = torch.export.export(layers, example, dynamic_shapes=({0: dim},))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.cute_fp8.gemm.default) == 2
    for m in TOKENS:
        x = tokens(m, device=device)
        assert torch.equal(program.module()(x), layers(x))


def test_a_new_weight_is_seen_without_recompiling() -> None:
    """Weights are arguments of the graph, not constants in it."""
    layers, backend = model("per_token"), Counting()
    compiled = torch.compile(layers, fullgraph=True, backend=backend)
    before = compiled(tokens(3)).clone()
    other = copy.deepcopy(layers)
    other[2].weight_scale.mul_(2)
    layers.load_state_dict(other.state_dict())
    assert torch.equal(compiled(tokens(3)), other(tokens(3)))
    assert not torch.equal(before, other(tokens(3))) and backend.graphs == 1


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_scales_that_change_between_compiled_calls(variant: str) -> None:
    """Written, and said; loaded; seen by an eager call first: all with one graph."""
    layers, backend = model(variant), Counting()
    compiled, x = torch.compile(layers, fullgraph=True, backend=backend), tokens(3)
    results = [compiled(x)]
    for layer in (layers[0], layers[2]):
        layer.weight_scale.view(torch.uint8)[:, -1].add_(1)
        layer.scales_changed()
    results.append(compiled(x))
    assert torch.equal(results[-1], layers(x))
    for assign in (False, True):
        layers.load_state_dict(model(variant).state_dict(), assign=assign)
        results.append(compiled(x))
        assert torch.equal(results[-1], layers(x))
    layers[0].weight_scale.view(torch.uint8)[:, -1].add_(1)
    wanted = copy.deepcopy(layers)(x)
    assert torch.equal(layers(x), wanted)
    assert torch.equal(compiled(x), wanted) and backend.graphs == 1
    assert not torch.equal(results[0], results[1])


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_parameters_in_a_compiled_call(variant: str) -> None:
    layers, other, x = model(variant), model(variant), tokens(3)
    for layer in (other[0], other[2]):
        layer.weight_scale.view(torch.uint8)[:, -1].add_(1)
        layer.scales_changed()

    def call(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layers, parameters, (x,))

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(dict(other.named_parameters()), x), other(x))


# ---------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_graph(variant: str) -> None:
    """What is captured is replayed on new values of the same tensors."""
    layers = model(variant, "cuda")
    x = tokens(17, device="cuda")
    with torch.inference_mode():
        layers(x)  # compiles what cannot be compiled during a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layers(x)
        for seed in range(3):
            x.copy_(inputs("gaussian", 17, K, seed=seed).to("cuda", BF16))
            graph.replay()
            assert torch.equal(y, layers(x))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_with_cuda_graphs(variant: str) -> None:
    layers = model(variant, "cuda")
    compiled = torch.compile(layers, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            for m in (4, 33):
                x = tokens(m, device="cuda")
                assert torch.equal(compiled(x).clone(), layers(x))
