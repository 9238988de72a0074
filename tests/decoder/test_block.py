"""The decoder block: its steps, its neighbours, and what it refuses; on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8.decoder import block
from cute_fp8.decoder.block import Intermediates, attention
from cute_fp8.decoder.case import DecoderCase, decoder_case, mlp_errors
from cute_fp8.decoder.kv_cache import KVCache
from cute_fp8.decoder.weights import DecoderConfig
from cute_fp8.testing import TIER_KINDS

CONFIG = DecoderConfig(256, 512, 8, 2, 32)
VARIANTS = ("per_token", "mxfp8")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=VARIANTS)
def case(request: pytest.FixtureRequest, device: str) -> Iterator[DecoderCase]:
    """A block with everything on; MXFP8 on a Hopper GPU through the stand-in."""
    config = replace(CONFIG, variant=request.param)
    with backend_of(request.param, device):
        yield decoder_case(config, norms=True, biases=True, device=device)


def backend_of(variant: str, device: str) -> Any:
    if device == "cuda" and variant == "mxfp8" and torch.cuda.get_device_capability()[0] == 9:
        return cute_fp8.use(backend="stand-in")
    return nullcontext()


def arch_of(device: str) -> str:
    if device == "cpu":
        return "cpu"
    return "sm_90" if torch.cuda.get_device_capability()[0] == 9 else "sm_120"


def run(case: DecoderCase, x: Tensor, **options: Any) -> Any:
    return cute_fp8.decoder_block(x, case.weights, case.at(0, x.shape[1]), **options)


def test_near_lossless_on_redrawn_inputs(case: DecoderCase) -> None:
    for seed in range(4):
        for kind in TIER_KINDS:
            x = case.x(2, 11, kind, seed)
            assert (verdict := cute_fp8.near_lossless(run(case, x), case.module(x))).passed, verdict


def test_bidirectional(device: str) -> None:
    case = decoder_case(replace(CONFIG, causal=False), device=device)
    x = case.x(3, 11)
    y = run(case, x)
    assert (verdict := cute_fp8.near_lossless(y, case.module(x))).passed, verdict
    causal = decoder_case(CONFIG, device=device)
    assert not torch.equal(y, run(causal, x))


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_of_a_group_attend_together_or_not(
    device: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In short sequences, where every token attends to all."""
    config = replace(CONFIG, causal=False, variant=variant)
    with backend_of(variant, device):
        case = decoder_case(config, norms=True, device=device)
        x = case.x(3, 11)
        y, made = run(case, x, return_intermediates=True)
        monkeypatch.setattr(block, "MOST_GROUPED", 0)
        wanted, apart = run(case, x, return_intermediates=True)
    assert torch.equal(made.q, apart.q) and torch.equal(made.k, apart.k)
    close = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(made.attention, apart.attention, **close)
    assert (verdict := cute_fp8.near_lossless(y, wanted)).passed, verdict


def test_negative_controls_fail(device: str) -> None:
    """On what the MLP half adds to x, which hides nothing."""
    case = decoder_case(CONFIG, device=device)
    for kind in TIER_KINDS:
        x = case.x(2, 11, kind)

        def added(weights: Any, x: Tensor = x) -> Tensor:
            return cute_fp8.decoder_mlp(x, weights).float() - x.float()

        wanted = case.mlp_module(x).float() - x.float()
        assert (verdict := cute_fp8.near_lossless(added(case.weights), wanted)).passed, (
            kind,
            verdict,
        )
        for name in ("gate_up", "down"):
            projection = getattr(case.weights, name)
            for scales in (projection.scales * 1.05, projection.scales.roll(1)):
                broken = replace(case.weights, **{name: projection._replace(scales=scales)})
                assert not cute_fp8.near_lossless(added(broken), wanted).passed, (kind, name)


@pytest.mark.parametrize("kind", ["gaussian", "massive_channel", "outlier_token"])
def test_every_step_follows_from_the_one_before(case: DecoderCase, device: str, kind: str) -> None:
    x = case.x(3, 7, kind)
    y, made = run(case, x, return_intermediates=True)
    assert isinstance(made, Intermediates)
    assert mlp_errors(made.hidden, case.weights, y, made.mlp, arch_of(device)) == []
    again = run(case, x, return_intermediates=True)
    for a, b in zip(flat((y, made)), flat(again), strict=True):
        assert torch.equal(as_bytes(a), as_bytes(b)), "not the same twice"


def flat(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif value is not None:
            yield from flat(value)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_the_mlp_half_alone(case: DecoderCase) -> None:
    x = case.x(2, 11)
    _, made = run(case, x, return_intermediates=True)
    y, mlp = cute_fp8.decoder_mlp(made.hidden, case.weights, return_intermediates=True)
    assert torch.equal(y, run(case, x).view(y.shape))
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(
        flat(mlp), flat(made.mlp), strict=True
    ))  # fmt: skip
    assert torch.equal(cute_fp8.decoder_mlp(made.hidden, case.weights), y)


def test_a_row_with_nan_spoils_no_other(case: DecoderCase) -> None:
    x = case.x(2, 8)
    good = cute_fp8.decoder_mlp(x, case.weights)
    x[0, 3, 5] = float("nan")
    x[1, 2, 7] = float("inf")
    y = cute_fp8.decoder_mlp(x, case.weights)
    bad = torch.zeros(2, 8, dtype=torch.bool, device=x.device)
    bad[0, 3] = bad[1, 2] = True
    assert bool(y[bad].isnan().all()) and torch.equal(y[~bad], good[~bad])


@pytest.mark.parametrize("tokens", [[8, 1, 1], [3, 4, 3], [1, 9]])
def test_a_cache_changes_nothing(case: DecoderCase, device: str, tokens: list[int]) -> None:
    x = case.x(2, sum(tokens))
    whole, made = run(case, x, return_intermediates=True)
    cache = KVCache.empty(2, CONFIG.columns, 12, device=device)
    parts, first = [], 0
    for count in tokens:
        part = x[:, first : first + count]
        at = case.at(first, count)
        parts.append(cute_fp8.decoder_block(part, case.weights, at, cache))
        first += count
        assert cache.length == first
    # Other numbers of tokens take other kernels, which add in other orders.
    assert (verdict := cute_fp8.near_lossless(torch.cat(parts, 1), whole)).passed, verdict
    close = {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(cache.k[:, :, :first], made.k, **close)
    torch.testing.assert_close(cache.v[:, :, :first], made.v.contiguous(), **close)
    assert not cache.k[:, :, first:].any()


def test_a_mask_decides_alone(device: str) -> None:
    case = decoder_case(CONFIG, device=device)
    x = case.x(2, 6)
    mask = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
    masked = run(case, x, attention_mask=mask)
    torch.testing.assert_close(masked, run(case, x), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 5])
def test_attention_is_what_it_says(device: str, causal: bool, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    q, k, v = normal(2, tokens, 6, 32), normal(2, 3, 9, 32), normal(2, 3, 9, 32)
    o = attention(q, k, v, causal, None)
    keys, values = (t.double().repeat_interleave(2, dim=1) for t in (k, v))
    scores = q.double().transpose(1, 2) @ keys.transpose(2, 3) / 32**0.5
    if causal:
        seen = torch.ones(tokens, 9, dtype=torch.bool, device=device).tril(9 - tokens)
        scores = scores.masked_fill(~seen, float("-inf"))
    wanted = scores.softmax(-1) @ values
    torch.testing.assert_close(o.double(), wanted, rtol=0.02, atol=0.02)


def test_no_tokens(case: DecoderCase) -> None:
    assert run(case, case.x(2, 0)).shape == (2, 0, 256)


def test_other_dtypes(device: str) -> None:
    for dtype in (torch.float16, torch.float32):
        for variant in VARIANTS:
            with backend_of(variant, device):
                config = replace(CONFIG, variant=variant)
                case = decoder_case(config, norms=True, dtype=dtype, device=device)
                x = case.x(2, 5).to(dtype)
                assert (y := run(case, x)).dtype == dtype
                assert (verdict := cute_fp8.near_lossless(y, case.module(x))).passed, verdict


# ------------------------------------------------------------------------------------- refusals

X = torch.zeros((2, 5, 256), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": 1}, "x: got int, must be a torch.Tensor"),
        ({"x": X.double()}, "x: got torch.float64, must be bfloat16, float16 or float32"),
        ({"x": X[..., :128]}, "x: got shape (2, 5, 128), must be [..., 256]"),
        ({"x": X[0]}, "x: got 2 dimensions, must be 3-D [B, S, hidden]"),
        ({"x": X.to("meta")}, "x: got device meta, must be cpu as the weights are"),
        ({"x": X.float()}, "q_norm: got torch.bfloat16, must be torch.float32 as x is"),
        ({"weights": None}, "weights: got NoneType, must be DecoderWeights"),
        ({"cache": 3}, "cache: got int, must be a KVCache, or have an update method"),
        ({"attention_mask": 3}, "attention_mask: got int, must be a torch.Tensor"),
        (
            {"cache": KVCache.empty(2, CONFIG.columns, 4, device="cpu")},
            "cache: got room for 4 tokens of which 0 are taken, must have room for 5 more",
        ),
        (
            {"position_embeddings": None},
            "position_embeddings: got NoneType, must be the pair (cos, sin)",
        ),
    ],
)
def test_what_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    case = decoder_case(CONFIG, norms=True)
    call = {"x": X, "weights": case.weights, "position_embeddings": case.at(0, 5), **change}
    with monkeypatch.context() as patch:
        patch.setattr(
            "cute_fp8.decoder.projection.rmsnorm_quantize", lambda *_, **__: pytest.fail("it ran")
        )
        with pytest.raises((TypeError, ValueError)) as caught:
            cute_fp8.decoder_block(**call)
    assert str(caught.value) == message
    assert torch.isfinite(run(case, X)).all()


def test_grad_is_refused() -> None:
    case = decoder_case(CONFIG)
    x = case.x(1, 2).requires_grad_()
    with pytest.raises(RuntimeError, match="x: got a tensor that requires grad"):
        run(case, x)
    with torch.no_grad():
        assert run(case, x).shape == x.shape


def test_an_odd_address_is_refused() -> None:
    case = decoder_case(CONFIG)
    x = torch.zeros(257, dtype=torch.bfloat16)[1:].view(1, 1, 256)
    with pytest.raises(ValueError, match="x: got an address 2 bytes past a multiple of 16"):
        run(case, x)


# ------------------------------------------------------------------------------------- tracing


def test_torch_compile_sees_one_op_per_launch(case: DecoderCase) -> None:
    graphs = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    x = case.x(1, 70)
    compiled = torch.compile(lambda x: run(case, x), backend=keep, fullgraph=True)
    assert torch.equal(compiled(x), run(case, x))
    (graph,) = graphs
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    ours = [target for target in targets if target.startswith("cute_fp8.")]
    assert len(ours) == (8 if case.config.variant == "mxfp8" else 9)
    assert sum("scaled_dot_product_attention" in target for target in targets) == 1


@pytest.mark.gpu
def test_launches(case: DecoderCase, device: str, launched: Callable[..., list[str]]) -> None:
    if device == "cpu":
        pytest.skip("counts a GPU's launches")
    x = case.x(2, 100)
    cache = KVCache.empty(2, CONFIG.columns, 200)
    at = case.at(0, 100)
    cute_fp8.decoder_block(x, case.weights, at, cache)
    cache.length = 0
    names = launched(lambda: cute_fp8.decoder_block(x, case.weights, at, cache))
    # cuDNN's attention has a word of its own cleared.
    names = [name for name in names if not name.startswith("Memset")]
    assert len(names) == (9 if case.config.variant == "mxfp8" else 10), names


@pytest.mark.gpu
def test_launches_of_few_tokens(launched: Callable[..., list[str]]) -> None:
    """Norm and q|k|v, RoPE and append, attention, o, the MLP half; attention may be two."""
    case = decoder_case(CONFIG, norms=True, biases=True, device="cuda")
    x, cache = case.x(2, 1), KVCache.empty(2, CONFIG.columns, 200)
    cache.length = 100

    def call() -> None:
        cache.length = 100
        cute_fp8.decoder_block(x, case.weights, case.at(100, 1), cache)

    call()
    names = [name for name in launched(call) if not name.startswith("Memset")]
    assert 5 <= len(names) <= 6, names
    assert [sum(kernel in name for name in names) for kernel in ("Projection", "Mlp")] == [2, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_cuda_graph(case: DecoderCase, device: str, tokens: int) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU")
    cache = KVCache.empty(2, CONFIG.columns, 64)
    x, at = case.x(2, tokens), case.at(0, tokens)
    eager = cute_fp8.decoder_block(x, case.weights, at, cache)
    cache.length = 0
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        y = cute_fp8.decoder_block(static, case.weights, at, cache)
    for seed in (1, 2):
        static.copy_(case.x(2, tokens, seed=seed))
        graph.replay()
        if seed == 1:
            assert torch.equal(y, eager)
    cache.length = 0
    assert torch.equal(y, cute_fp8.decoder_block(static, case.weights, at, cache))
