"""The MLP half in one launch: every step against float64, tails, NaN, graphs, the workspace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8 import workspace
from cute_fp8.decoder import lookup, problem
from cute_fp8.decoder.case import DecoderCase, decoder_case, mlp_errors
from cute_fp8.decoder.weights import DecoderConfig
from cute_fp8.testing import TIER_KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SMALL = (256, 512)
#: Hidden and FFN width: models', few and odd numbers of blocks, tails of K.
SIZES = (SMALL, (1024, 4096), (4096, 14336), (16, 16), (400, 1040), (2064, 48), (3584, 18944))


@pytest.fixture(autouse=True)
def _every_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, too, where many tokens are launched in parts."""
    monkeypatch.setattr(problem, "most_tokens", lambda hopper: problem.MOST_TOKENS)
    monkeypatch.setattr(lookup, "_kernels", {})


def arch() -> str:
    return "sm_120" if torch.cuda.get_device_capability()[0] == 12 else "stand-in"


def case_of(hidden: int, ffn: int, **options: Any) -> DecoderCase:
    config = DecoderConfig(hidden, ffn, 1, 1, 16)
    return decoder_case(config, device="cuda", **options)


def check(case: DecoderCase, x: Tensor) -> None:
    y, made = cute_fp8.decoder_mlp(x, case.weights, return_intermediates=True)
    rows = x.view(-1, x.shape[-1])
    assert mlp_errors(rows, case.weights, y, made, arch()) == []
    again, others = cute_fp8.decoder_mlp(x, case.weights, return_intermediates=True)
    assert torch.equal(as_bytes(y), as_bytes(again))
    assert torch.equal(as_bytes(made.product_quantised[0]), as_bytes(others.product_quantised[0]))
    counters = workspace.workspace(x.device, 1)[: workspace.WORKSPACE_COUNTERS]
    assert not counters.any(), "not left as it was found"


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def test_the_kernel_is_what_runs(launched: Callable[..., list[str]]) -> None:
    found = cute_fp8.explain("decoder_mlp", m=4, n=512, k=256)
    assert found.route is not None and found.route.entry.name == "cute:mlp"
    case = case_of(*SMALL)
    x = case.x(1, 4)
    cute_fp8.decoder_mlp(x, case.weights)
    assert len(launched(lambda: cute_fp8.decoder_mlp(x, case.weights))) == 1


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("m", [1, 5, 8, 16, 33, 64])
def test_every_step_follows_from_the_one_before(sizes: tuple[int, int], m: int) -> None:
    case = case_of(*sizes)
    check(case, case.x(1, m))


@pytest.mark.parametrize("kind", [*TIER_KINDS, "zeros", "denormals", "max_codes"])
def test_values_that_provoke_a_rule(kind: str) -> None:
    case = case_of(*SMALL)
    check(case, case.x(1, 13, kind))


def test_near_lossless() -> None:
    case = case_of(1024, 4096)
    for seed in range(4):
        for kind in TIER_KINDS:
            x = case.x(1, 16, kind, seed)
            y = cute_fp8.decoder_mlp(x, case.weights)
            assert (verdict := cute_fp8.near_lossless(y, case.mlp_module(x))).passed, verdict


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype, norm: torch.dtype) -> None:
    case = case_of(*SMALL, dtype=dtype)
    weights = replace(case.weights, mlp_norm=case.weights.mlp_norm.to(norm))
    x = case.x(1, 9).to(dtype)
    y, made = cute_fp8.decoder_mlp(x, weights, return_intermediates=True)
    found = mlp_errors(x[0], weights, y, made, arch())
    # A norm's weight of another dtype is applied in fp32 by the producers, not by the check.
    assert [text for text in found if norm == dtype or not text.startswith("norm")] == []


@pytest.mark.parametrize("m", [4, 16])
def test_nan_stays_in_its_row(m: int) -> None:
    case = case_of(1024, 4096)
    x = case.x(1, m)
    good = cute_fp8.decoder_mlp(x, case.weights)
    bad = [m // 4, m - 1]
    x[0, bad[0], 100], x[0, bad[1], 7] = float("nan"), float("inf")
    y, made = cute_fp8.decoder_mlp(x, case.weights, return_intermediates=True)
    rows = torch.tensor(bad, device="cuda")
    others = torch.tensor([i for i in range(m) if i not in bad], device="cuda")
    assert bool(y[0, rows].isnan().all()) and torch.equal(y[0, others], good[0, others])
    codes, scales = made.product_quantised
    assert bool((as_bytes(codes)[rows] == 0x7F).all()) and bool(scales[rows].isnan().all())
    assert torch.equal(cute_fp8.decoder_mlp(case.x(1, m), case.weights), good)


@pytest.mark.parametrize("m", [1, 4, 16])
def test_a_graph_of_layers(m: int) -> None:
    """Launches that follow one another share a workspace, and find it as it was."""
    cases = [case_of(1024, 4096, seed=seed) for seed in range(3)]
    static = cases[0].x(1, m)

    def layers(x: Tensor) -> Tensor:
        for case in cases:
            x = cute_fp8.decoder_mlp(x, case.weights)
        return x

    layers(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layers(static)
    for seed in range(3):
        static.copy_(cases[0].x(1, m, seed=seed))
        for _ in range(20):
            graph.replay()
        assert torch.equal(y, layers(static))


def test_on_two_streams() -> None:
    case = case_of(1024, 4096)
    xs = [case.x(1, 16, seed=seed) for seed in range(2)]
    wanted = [cute_fp8.decoder_mlp(x, case.weights) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for x, stream, made in zip(xs, streams, found, strict=True):
            with torch.cuda.stream(stream):
                made.append(cute_fp8.decoder_mlp(x, case.weights))
    torch.cuda.synchronize()
    for y, made in zip(wanted, found, strict=True):
        assert all(torch.equal(one, y) for one in made)


def test_torch_compile() -> None:
    case = case_of(*SMALL)
    x = case.x(1, 4)
    compiled = torch.compile(lambda x: cute_fp8.decoder_mlp(x, case.weights), fullgraph=True)
    assert torch.equal(compiled(x), cute_fp8.decoder_mlp(x, case.weights))


def test_what_goes_in_parts(launched: Callable[..., list[str]]) -> None:
    case = case_of(*SMALL)
    for x in (case.x(1, 65), case.x(1, 4).float()):
        cute_fp8.decoder_mlp(x, case.weights)
        assert len(launched(lambda x=x: cute_fp8.decoder_mlp(x, case.weights))) > 1
