"""The space of configurations of the sm_120 GEMM: split-K, gated and MXFP8 outputs, and everything
together on random shapes. What each tile does with a plain problem is tested beside this file.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cute_fp8
from cute_fp8.gating import split_gate_up
from cute_fp8.gemms.case import GemmCase, exact_case, gemm_case, mxfp8_case
from cute_fp8.gemms.choice import Choice
from cute_fp8.kernels.config import EpilogueConfig, GemmConfig, TileConfig
from cute_fp8.kernels.tiles import TILES
from cute_fp8.numerics import quantize_mxfp8

pytestmark = pytest.mark.gpu
BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
MAKE = {"per_token": exact_case, "mxfp8": mxfp8_case}
SPACE = [(variant, tile) for variant, tiles in TILES.items() for tile in tiles]
ALL = pytest.mark.parametrize(
    ("variant", "tile"), SPACE, ids=lambda part: getattr(part, "name", part)
)
#: A tile of each kind: cooperative, ping-pong, eight warps, small, swapped.
KINDS = [(v, TILES[v][i]) for v in TILES for i in (1, 2, 3, 7, 10, 12)]
SOME = pytest.mark.parametrize(
    ("variant", "tile"), KINDS, ids=lambda part: getattr(part, "name", part)
)


def most_splits(variant: str, tile: TileConfig, m: int, n: int, k: int) -> int:
    """1 where that tile's K cannot be split."""
    config = GemmConfig(tile, EpilogueConfig("float32"), variant, split_k=True)
    try:
        return config.check().max_splits(m, n, k)
    except ValueError:
        return 1


@ALL
def test_split_k_is_exact(backend, variant, tile):
    """Around tile edges, with as many parts as there can be: some of one k-tile alone."""
    m, n = tile.m + 1, 2 * tile.n + 8
    for seed, k in enumerate((tile.k + 32, 3 * tile.k - 32, 11 * tile.k)):
        most = most_splits(variant, tile, m, n, k)
        case = MAKE[variant](m, n, k, seed=seed)
        for splits in {min(2, most), most} - {1}:
            with cute_fp8.use(config=Choice(tile, splits)):
                case.check_exact()
    assert most > 1 or tile.warp_m * tile.warp_n == 64 * 64


@ALL
def test_split_k_after_a_larger_launch(backend, variant, tile):
    """Launches of one stream share a workspace: the counters must not be where parts were."""
    if most_splits(variant, tile, tile.m, tile.n, 4 * tile.k) == 1:
        pytest.skip("64x64 warp tiles have no split-K")
    with cute_fp8.use(config=Choice(tile, 2)):
        for tiles in (1, 9, 2, 30):
            MAKE[variant](tile.m, tile.n * tiles, 4 * tile.k, seed=tiles).check_exact()


@pytest.mark.parametrize("variant", TILES)
def test_split_k_repeats_bit_for_bit_under_load(backend, variant):
    """Whoever is last adds the parts in the same order."""
    tile = TILES[variant][7]
    case = gemm_case(352, 1024, 4096, seed=4) if variant == "per_token" else None
    case = case or mxfp8_case(352, 1024, 4096, seed=4, exponents=20)
    case = replace(case, out_dtype=FP32)
    load = torch.cuda.Stream()
    a = torch.randn((2048, 2048), device="cuda", dtype=BF16)
    with cute_fp8.use(config=Choice(tile, 4)):
        expected = case.run()
        for _ in range(200):
            with torch.cuda.stream(load):
                torch.mm(a, a)
            assert torch.equal(case.run(), expected)
    torch.cuda.synchronize()


def test_split_k_on_streams_and_in_graphs_at_once(backend):
    """Launches that overlap have workspaces of their own: two streams, and a graph replayed."""
    tile = TILES["per_token"][7]
    cases = [exact_case(200, 1024, 4096, seed=seed) for seed in range(3)]
    exact = [case.exact()[0] for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    with cute_fp8.use(config=Choice(tile, 8)):
        cases[0].run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [cases[0].run() for _ in range(4)]
        torch.cuda.synchronize()
        outs: list[Tensor] = []
        for _ in range(20):
            with torch.cuda.stream(streams[0]):
                graph.replay()
            for case, stream in zip(cases[1:], streams[1:], strict=True):
                with torch.cuda.stream(stream):
                    outs.append(case.run())
        torch.cuda.synchronize()
    assert all(torch.equal(y.double(), exact[0]) for y in captured)
    for i, y in enumerate(outs):
        assert torch.equal(y.double(), exact[1 + i % 2])


@ALL
def test_gated(backend, variant, tile):
    for m, n, k in ((1, 16, 96), (tile.m + 3, tile.n + 16, 5 * tile.k), (45, 208, 256)):
        case = MAKE[variant](m, n, k, seed=m, bias=BF16)
        gate, up = split_gate_up(case.exact()[0])
        out = torch.full((m, n // 2), float("nan"), device="cuda")
        with cute_fp8.use(config=tile):
            y = gated(case, activation=None, out=out, out_dtype=FP32)
        # Products of exact sums: one rounding.
        assert torch.equal(y, (gate.float() * up.float()))


def test_a_gated_output_of_the_wrong_width_is_refused_every_time(backend):
    """Once the kernel is known, too: it could not tell."""
    case = exact_case(16, 64, 96)
    gated(case)
    for width in (8, 64):
        with pytest.raises(ValueError, match=r"^out: got shape \(16, \d+\), must be \(16, 32\)"):
            gated(case, out=torch.empty((16, width), dtype=BF16, device="cuda"))


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_gated_activations(backend, activation):
    case = gemm_case(70, 208, 288, seed=6, bias=FP32, out_dtype=FP32)
    gate, _ = split_gate_up(replace(case, activation=activation).exact()[0])
    _, up = split_gate_up(case.exact()[0])
    y = gated(case, activation=activation, out_dtype=FP32)
    torch.testing.assert_close(y.double(), gate * up, rtol=1e-4, atol=1e-4)


@ALL
@pytest.mark.parametrize("gating", [False, True], ids=["plain", "gated"])
def test_mxfp8_output(backend, variant, tile, gating):
    """Bit for bit what quantising the bf16 output gives, padding of the scales included."""
    if variant == "per_token":
        pytest.skip("MXFP8 output is for MXFP8 inputs")
    if gating and tile.warp_n < 64:
        pytest.skip("32 output columns of a warp's 32 channels are 16 when gated")
    run = gated if gating else plain
    for m, n, k in ((1, 64, 96), (tile.m + 3, 2 * tile.n + 64, 5 * tile.k), (140, 448, 256)):
        case = special(mxfp8_case(m, n, k, seed=m))
        options = {"activation": "silu" if gating else None}
        with cute_fp8.use(config=tile):
            codes, scales = run(case, **options, out_dtype=E4M3)
            expected = quantize_mxfp8(run(case, **options, out_dtype=BF16), blocked=True)
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scales.view(torch.uint8), expected[1].view(torch.uint8))


def special(case: GemmCase) -> GemmCase:
    """With a token of NaN, one of zeros, and one of tiny values."""
    xq = case.xq.clone()
    for row, byte in zip(range(0, case.m, max(1, case.m // 4)), (0x7F, 0x00, 0x01), strict=False):
        xq.view(torch.uint8)[row] = byte
    return replace(case, xq=xq)


@pytest.mark.parametrize("m", range(1, 18))
@pytest.mark.parametrize("variant", TILES)
def test_few_tokens(backend, variant, m):
    """What selection takes for them."""
    for n, k in ((264, 416), (1024, 4096)):
        MAKE[variant](m, n, k, seed=m).check_exact()


@pytest.mark.parametrize("seed", range(30))
def test_random_problems(backend, seed):
    """Ten of each seed: any shape, any tile or split, any epilogue of a few."""
    draw = random.Random(seed)
    for _ in range(10):
        variant, tile = draw.choice(SPACE)
        multiple = 32 if variant == "mxfp8" else 16
        m, n = draw.randint(1, 3 * tile.m), 8 * draw.randint(1, 3 * tile.n // 8)
        k = multiple * draw.randint(1, 2000 // multiple)
        splits = draw.randint(1, min(5, most_splits(variant, tile, m, n, k)))
        extras = draw.choice(({}, {"bias": FP32, "residual": FP32}))
        case = MAKE[variant](m, n, k, seed=seed, **extras)
        with cute_fp8.use(config=Choice(tile, splits)):
            case.check_exact()


@SOME
def test_dependent_launch_changes_no_bit(backend, variant, tile):
    """A chain of two: the second's tokens are the first's output, in a graph and without."""
    first = MAKE[variant](tile.m + 1, 512, 512, seed=9)
    weights = MAKE[variant](1, 264, 512, seed=10)

    def chain() -> Tensor:
        y = replace(first, out_dtype=BF16).run()
        if variant == "per_token":
            return replace(weights, xq=y.clamp(-448, 448).to(E4M3), sx=first.sx).run()
        xq, sx = quantize_mxfp8(y, blocked=True)
        return replace(weights, xq=xq, sx=sx).run()

    with cute_fp8.use(config=tile):
        expected = chain()
    with pinned_pdl(tile):
        assert torch.equal(chain(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain()
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, expected)


@contextmanager
def pinned_pdl(tile: TileConfig) -> Iterator[None]:
    with cute_fp8.use(config=Choice(tile, pdl=True)):
        yield


def plain(case: GemmCase, **options):
    return cute_fp8.gemm(case.xq, case.sx, case.wq, case.sw, case.bias, **options)


def gated(case: GemmCase, **options):
    return cute_fp8.gemm_gated(case.xq, case.sx, case.wq, case.sw, case.bias, **options)
