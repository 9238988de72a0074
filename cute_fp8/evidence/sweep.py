"""What ``validate`` runs itself: GEMMs timed beside torch's, and the near-lossless tier.

Every contender multiplies the same codes. ``cute_fp8/timing.py`` times them and checks what they
return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import cute_fp8
from cute_fp8.accuracy import near_lossless
from cute_fp8.dispatch import TABLE, explain
from cute_fp8.numerics import (
    dequantize_mxfp8,
    quantize_fp8,
    quantize_fp8_activations,
    quantize_mxfp8,
)
from cute_fp8.scales import to_blocked
from cute_fp8.targets import Capability
from cute_fp8.testing import TIER_KINDS, inputs
from cute_fp8.timing import (
    Contender,
    Timer,
    copies_of,
    graph_times,
    rates,
    rotated,
    time_contenders,
)

#: M x N x K: decoding, prompts and large batches of the models that the kernels are for.
SHAPES = (
    (16, 4096, 4096),
    (16, 28672, 4096),
    (16, 4096, 14336),
    (352, 2560, 1024),
    (352, 1024, 4096),
    (512, 6144, 4096),
    (2048, 4096, 4096),
    (4096, 4096, 4096),
)
QUICK_SHAPES = (SHAPES[0], SHAPES[3], SHAPES[6])

#: M x N x K of the tier checks: a tile of few tokens, and a large one with edges.
TIER_SHAPES = ((64, 128, 1024), (300, 264, 1024))
TIER_SEEDS = (0, 1)

#: ``(backend, variant)`` of a GEMM of ours.
Use = tuple[str, str]
Shape = tuple[int, int, int]


def uses_of(capability: Capability) -> list[Use]:
    """Every GEMM of ours to check on such a GPU: the CuTe kernels, or torch where there is none."""
    uses = [
        (entry.backend, entry.variant)
        for entry in TABLE
        if entry.op == "gemm" and entry.targets and entry.serves(capability)
    ]
    return list(dict.fromkeys(uses)) or [("torch", "per_token")]


def impl_of(backend: str) -> str:
    """Our name in result files. A stand-in's time says nothing about any GPU's speed."""
    return "cute_fp8_stand_in" if backend == "stand-in" else "cute_fp8"


def route_of(use: Use, shape: Shape, device: str, fast: bool = False) -> dict[str, str]:
    """The route that such a call takes, and the tile of a CuTe kernel."""
    how: dict[str, Any] = {"variant": use[1], "backend": use[0], "fast_accum": fast}
    m, n, k = shape
    route = explain("gemm", m=m, n=n, k=k, device=device, **how).route
    if route is None:
        return {"route": "none"}
    tile = {} if route.pick is None else {"tile": route.pick.name}
    return {"route": route.entry.name, **tile}


# ----------------------------------------------------------------------------------------- sweep


def sweep(
    uses: Sequence[Use],
    shapes: Sequence[Shape] = SHAPES,
    *,
    device: str = "cuda",
    timer: Timer | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for each variant, shape and contender, in the form of the result files.

    Args:
        uses: ours to time.
        timer: by default :func:`graph_times`.
    """
    variants: dict[str, list[str]] = {}
    for backend, variant in uses:
        variants.setdefault(variant, []).append(backend)
    for variant, backends in variants.items():
        for m, n, k in shapes:
            found = contenders(variant, backends, (m, n, k), device)
            for c, row in zip(found, time_contenders(found, timer or graph_times), strict=True):
                row |= rates(row, (m, n, k), c.operand_bytes)
                yield {"op": "gemm", "variant": variant, "M": m, "N": n, "K": k, **row}


def contenders(variant: str, backends: Sequence[str], shape: Shape, device: str) -> list[Contender]:
    """Ours, by each of these backends, and torch's, on random codes of one shape."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(m + n + k)
    x, w = (torch.randn((rows, k), device=device, generator=generator) for rows in (m, n))
    make = _per_token if variant == "per_token" else _mxfp8
    (call, copies), exact, peers = make(x, w / k**0.5)
    ours = [
        Contender(
            impl_of(backend),
            pinned(backend, call),
            copies,
            exact,
            route_of((backend, variant), shape, device),
        )
        for backend in backends
    ]
    return ours + peers


#: A call of ours by copy of the weight, and how many copies there are.
_Calls = tuple[Callable[[int], Tensor], int]


def _per_token(x: Tensor, w: Tensor) -> tuple[_Calls, Tensor, list[Contender]]:
    """Our call, its exact result, and torch's contenders, for fp32 scales."""
    xq, sx = quantize_fp8_activations(x)
    wq, sw = quantize_fp8(w)
    acc = xq.double() @ wq.double().t()
    copies = copies_of(wq)
    weights, scales = rotated(wq, copies), rotated(sw, copies)
    exact = acc * sx.double().view(-1, 1) * sw.double().view(1, -1)
    rows, ones = sx.view(-1, 1), [torch.ones((), device=x.device)] * copies
    columns = [scale.view(1, -1) for scale in scales]
    peers = [_bf16(xq.to(torch.bfloat16), wq.to(torch.bfloat16), acc)]
    for suffix, fast in (("", False), ("_fast", True)):
        rowwise = _scaled_mm(xq, rows, weights, columns, fast)
        tensorwise = _scaled_mm(xq, ones[0], weights, ones, fast)
        peers += [
            Contender(f"torch_rowwise{suffix}", rowwise, copies, exact),
            Contender(f"torch_tensorwise{suffix}", tensorwise, copies, acc),
        ]
    return (lambda i: _gemm(xq, sx, weights[i], scales[i]), copies), exact, peers


def _mxfp8(x: Tensor, w: Tensor) -> tuple[_Calls, Tensor, list[Contender]]:
    """Our call, its exact result, and torch's contenders, for scales of blocks, in their order."""
    xq, ex = quantize_mxfp8(x)
    wq, ew = quantize_mxfp8(w)
    copies = copies_of(wq)
    weights = rotated(wq, copies)
    sx, scales = to_blocked(ex), [to_blocked(e) for e in rotated(ew, copies)]
    # Codes times powers of two: exact in bf16.
    x16, w16 = dequantize_mxfp8(xq, ex), dequantize_mxfp8(wq, ew)
    exact = x16.double() @ w16.double().t()

    blocked = _scaled_mm(xq, sx, weights, scales, False)
    peers = [_bf16(x16, w16, exact), Contender("torch_mxfp8", blocked, copies, exact)]
    return (lambda i: _gemm(xq, sx, weights[i], scales[i]), copies), exact, peers


def _scaled_mm(
    xq: Tensor, sx: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], fast: bool
) -> Callable[[int], Tensor]:
    """torch's scaled matmul; the scales' shapes choose its recipe."""
    return lambda i: torch._scaled_mm(
        xq,
        weights[i].t(),
        scale_a=sx,
        scale_b=scales[i],
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _bf16(x: Tensor, w: Tensor, exact: Tensor) -> Contender:
    copies = copies_of(w)
    weights = rotated(w, copies)
    return Contender("torch_bf16", lambda i: x @ weights[i].t(), copies, exact, operand_bytes=2)


def _gemm(xq: Tensor, sx: Tensor, wq: Tensor, sw: Tensor) -> Tensor:
    y = cute_fp8.gemm(xq, sx, wq, sw)
    assert isinstance(y, Tensor)
    return y


def pinned(backend: str, call: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """The call, by one of our backends."""

    def by_backend(i: int) -> Tensor:
        with cute_fp8.use(backend=backend):
            return call(i)

    return by_backend


# ------------------------------------------------------------------------------------------ tier


def tier(
    uses: Sequence[Use], shapes: Sequence[Shape] = TIER_SHAPES, *, device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """The near-lossless tier on every kind of input, through our routes, and a negative control.

    The control has every weight scale wrong; it passes if the tier catches that.
    """
    for use in uses:
        for shape in shapes:
            for kind in TIER_KINDS:
                for seed in TIER_SEEDS:
                    yield tier_check(use, shape, kind, seed, device=device)
            yield tier_check(use, shape, "gaussian", 0, device=device, control=True)


def tier_check(
    use: Use, shape: Shape, kind: str, seed: int, *, device: str, control: bool = False
) -> dict[str, Any]:
    """One verdict on one layer, quantised here and multiplied by the route of ``use``."""
    m, n, k = shape
    x = inputs(kind, m, k, seed=seed)
    w = (inputs("gaussian", n, k, seed=1000 + seed) * k**-0.5).bfloat16()
    ref = (x.float() @ w.float().t()).bfloat16()
    per_token = use[1] == "per_token"
    xq, sx = (quantize_fp8_activations if per_token else quantize_mxfp8)(x.to(device))
    wq, sw = (quantize_fp8 if per_token else quantize_mxfp8)(w.to(device))
    row: dict[str, Any] = {"op": "gemm", "variant": use[1], "kind": kind, "seed": seed}
    row |= {"M": m, "N": n, "K": k, **route_of(use, shape, device)}
    if control:
        row["control"] = "weight scales x 1.05" if per_token else "weight scales x 2"
        sw = sw * 1.05 if per_token else (sw.view(torch.uint8) + 1).view(sw.dtype)
    with cute_fp8.use(backend=use[0]):
        verdict = near_lossless(_gemm(xq, sx, wq, sw).cpu(), ref)
    figures = {key: value for key, value in asdict(verdict).items() if key != "passed"}
    row |= {name: float(f"{value:.5g}") for name, value in figures.items()}
    return {**row, "passed": verdict.passed is not control}
