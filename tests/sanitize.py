r"""A small workload for compute-sanitizer: every tile, tails in M, N and K, a second tile per CTA.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python tests/sanitize.py [KERNEL] [I/N]

and the same with ``--tool racecheck`` and ``--tool synccheck --num-cuda-barriers 4096``; by itself
that one follows fewer than a long ring has, and takes good ones for bad. ``KERNEL`` is the
beginning of a job's name, as ``gemm_sm90`` or ``mlp``; ``I/N``, as ``0/8``, is the I-th of N shares
of all jobs, to be run side by side.

Prints one line per call and exits 0 if all results are right; the sanitizer adds its findings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_fp8
from cute_fp8 import gpus, testing
from cute_fp8.build import shipped
from cute_fp8.decoder import problem
from cute_fp8.decoder.case import ProjectionCall, decoder_case, mlp_errors
from cute_fp8.decoder.weights import DecoderConfig, project
from cute_fp8.gemms.case import GemmCase, exact_case, mxfp8_case
from cute_fp8.gemms.choice import Choice
from cute_fp8.kernels.config import EpilogueConfig, GemmConfig, TileConfig
from cute_fp8.kernels.config_sm90 import HopperTile
from cute_fp8.kernels.tiles import TILES
from cute_fp8.kernels.tiles_sm90 import TILES_SM90
from cute_fp8.rows.case import errors, row_case


def cases(variant: str, tile: TileConfig) -> Iterator[tuple[Choice, GemmCase]]:
    """Tails everywhere, several output tiles per CTA, every stage used again; K in two parts."""
    make = exact_case if variant == "per_token" else mxfp8_case
    m, n, k = 2 * tile.m + 1, 2 * tile.n + 8, (tile.stages + 1) * tile.k + 32
    yield Choice(tile), make(m, n, k, bias=torch.float32, residual=torch.float32)
    if GemmConfig(tile, EpilogueConfig(), variant, split_k=True) in shipped.shipped_configs():
        yield Choice(tile, 2), make(m, n, k)


def hopper_cases(tile: HopperTile, fast: bool) -> Iterator[GemmCase]:
    """The same for a tile of Hopper's, every chain of k-tiles among it; outputs of 32 bits from
    registers, of 16 through boxes where it has some. A cluster that splits K has one tile each.
    """
    # Two tiles for each of two CTAs; more where several turns are taken, for these tools are slow.
    turns = 1 + (tile.pingpong or tile.dynamic)
    m, n = turns * tile.m + 1, turns * tile.n + 8
    k = (max(tile.stages, sum(tile.links(fast))) + 1) * tile.k + 32
    options = {"fast_accum": fast}
    case = exact_case(m, n, k, bias=torch.float32, residual=torch.float32)
    yield replace(case, options=options)
    # 16 products of at most 4 are exact in 8 bits of mantissa.
    short = exact_case(m, n, k, out_dtype=torch.bfloat16)
    codes = torch.arange(k, device=short.xq.device) < 16
    xq = (short.xq.float() * codes).to(short.xq.dtype)
    wq = short.wq.float().sign().to(short.wq.dtype)
    yield replace(short, xq=xq, wq=wq, options=options)


#: What is run, and how many of its results are wrong.
Job = tuple[str, Callable[[], int]]


def jobs() -> Iterator[Job]:
    """All that there is for this GPU."""
    capability = torch.cuda.get_device_capability()
    if capability == (9, 0):
        for tile, fast in product(TILES_SM90, (False, True)):
            if tile.fits(fast):
                yield f"gemm_sm90 {tile.name}", partial(wrong_on_hopper, tile, fast)
    backend = "cute" if capability[0] == 12 else "stand-in"
    for variant, tiles in TILES.items():
        for tile in tiles:
            yield f"gemm_sm120 {tile.name}", partial(wrong_tile, backend, variant, tile)
    yield "gemm_sm120 mxfp8", partial(wrong_scales, backend)
    for pdl in (True, False):
        yield "row_quantize", partial(wrong_rows, pdl)
    yield "mlp and rope_append", wrong_blocks
    yield "projection", wrong_projections


def wrong_on_hopper(tile: HopperTile, fast: bool) -> int:
    """How many elements of its own kernel's results are wrong, with early launches and without."""
    wrong = 0
    choice = Choice(tile, pdl=fast)
    with cute_fp8.use(backend="cute", config=choice):
        for case in hopper_cases(tile, fast):
            wrong += differing(case, f"gemm_sm90 {'fast' if fast else 'precise'} {choice.name}")
        gated = exact_case(tile.m + 1, 2 * tile.n + 16, 2 * tile.k + 16)
        y = cute_fp8.gemm_gated(gated.xq, gated.sx, gated.wq, gated.sw, fast_accum=fast)
        return wrong + int(y.isnan().sum())


def wrong_tile(backend: str, variant: str, tile: TileConfig) -> int:
    """The same of the sm_120 kernel's."""
    wrong = 0
    for choice, case in cases(variant, tile):
        with cute_fp8.use(backend=backend, config=choice):
            wrong += differing(case, f"gemm_sm120 {backend} {variant} {choice.name}")
    return wrong


def wrong_scales(backend: str) -> int:
    """The same with scales that are not in the blocked layout; outputs that have some."""
    with cute_fp8.use(backend=backend, config=TILES["mxfp8"][0]):
        wrong = differing(mxfp8_case(129, 136, 160, blocked=False), "gemm_sm120 row-major scales")
        case = mxfp8_case(129, 192, 160)
        cute_fp8.gemm(case.xq, case.sx, case.wq, case.sw, out_dtype=torch.float8_e4m3fn)
        cute_fp8.gemm_gated(case.xq, case.sx, case.wq, case.sw, out_dtype=torch.float8_e4m3fn)
    return wrong


def main(arguments: list[str]) -> int:
    """Run those that are asked for; 1 if a result is wrong."""
    # So few CTAs that each has several tiles: a sanitizer multiplies the time of every one.
    gpus.sm_count = lambda device: 2
    kernel = next((text for text in arguments if "/" not in text), "")
    part = next((text for text in arguments if "/" in text), "0/1")
    first, parts = map(int, part.split("/"))
    chosen = [job for name, job in jobs() if name.startswith(kernel)]
    return int(sum(job() for job in chosen[first::parts]) > 0)


def wrong_rows(pdl: bool) -> int:
    """How many producers' results are wrong: one and several warps a row, tails, a row too long."""
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    blocked = {"variant": "mxfp8", "blocked": True}
    found = 0
    with cute_fp8.use(pdl=pdl):
        for case in (
            row_case("quantize", 3, 1040, **bf16),
            row_case("quantize", 130, 160, **bf16, **blocked),
            row_case("rmsnorm_quantize", 5, 2064, residual=True, **bf16),
            row_case("rmsnorm_quantize", 2, 33024, residual=True, **bf16),
            row_case("layernorm_quantize", 3, 544, residual=True, **bf16),
            row_case("silu_mul_quantize", 3, 1056, "mxfp8", **bf16),
            row_case("gelu_mul_quantize", 3, 288, layout="interleaved", **bf16),
            row_case("gelu_tanh_mul_quantize", 3, 288, **bf16),
            row_case("attention_out_quantize", 6, 1056, **bf16),
        ):
            wrong = errors(case.kept(), case.kept().run())
            p = case.problem
            print(f"{p.op} {p.variant} {p.m}x{p.k}: {'; '.join(wrong) or 'right'}", flush=True)
            found += bool(wrong)
    return found


def wrong_blocks(device: str = "cuda") -> int:
    """How many MLP halves are wrong, with tails and several passes; RoPE and its append, too."""
    native = device == "cuda" and torch.cuda.get_device_capability()[0] == 12
    arch = "sm_120" if native else "stand-in"
    found = 0
    # Tokens of which every CTA does all; normalises all; does some for all.
    for hidden, ffn, counts in ((144, 272, (1, 13)), (144, 1296, (13,)), (1040, 272, (13,))):
        config = DecoderConfig(hidden, ffn, 2, 1, 16)
        case = decoder_case(config, norms=True, device=device)
        for tokens in counts:
            x = case.x(1, tokens)
            y, made = cute_fp8.decoder_mlp(x, case.weights, return_intermediates=True)
            wrong = mlp_errors(x[0], case.weights, y, made, arch)
            cache = cute_fp8.KVCache.empty(1, config.columns, 16, device=device)
            with sdpa_kernel(SDPBackend.MATH):  # racecheck takes cuDNN's for racing
                cute_fp8.decoder_block(x, case.weights, case.at(0, tokens), cache)
            print(f"decoder_mlp {tokens}x{ffn}x{hidden}: {'; '.join(wrong) or 'right'}", flush=True)
            found += bool(wrong)
    return found


def wrong_projections(device: str = "cuda") -> int:
    """How many projections of few tokens are wrong: tails, several passes, rounds of rows."""
    problem.faster_on_hopper = lambda m, n, k: True
    native = device == "cuda" and torch.cuda.get_device_capability()[0] == 12
    found = 0
    for m, n, k in ((1, 72, 144), (3, 1000, 400), (16, 136, 2064)):
        w = project(testing.inputs("gaussian", n, k, seed=1).to(device), None, "per_token")
        x = testing.inputs("outlier_token", m, k, seed=2).to(device)
        added = testing.inputs("gaussian", m, n, seed=3).to(device)
        norm = testing.inputs("gaussian", 1, k, seed=4).to(device)[0]
        for call in (ProjectionCall(x, norm, w, None), ProjectionCall(x, None, w, added)):
            wrong = call.errors(call.run(), "sm_120" if native else "stand-in")
            print(f"projection {m}x{n}x{k}: {'; '.join(wrong) or 'right'}", flush=True)
            found += bool(wrong)
    return found


def differing(case: GemmCase, what: str) -> int:
    """How many elements of a result are wrong."""
    differ = int((case.run().double() != case.exact()[0]).sum())
    print(f"{what} {case.m}x{case.n}x{case.k}: {differ} differ", flush=True)
    return differ


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
