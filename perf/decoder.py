"""Time the decoder block, and its MLP half, beside ``torch.compile``.

    python -m perf.decoder
    python -m perf.decoder --cases mlp-4096x14336-16 layer-1024x4096-352 --no-peers

Every call has its own layer's weights, more in all than any L2 holds; times are of CUDA graphs.
``inductor_bf16`` is the module that is replaced, ``inductor_w8a8`` the same with ``_scaled_mm``
(row-wise, fast accumulation) and its quantisation written in torch; both compiled for the sizes.
Results are compared with the module's in bf16, those of the timed buffers again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import cute_fp8
from cute_fp8.decoder.block import attention
from cute_fp8.decoder.case import DecoderCase, decoder_case
from cute_fp8.decoder.kv_cache import KVCache
from cute_fp8.decoder.weights import DecoderConfig
from cute_fp8.environment import commit, environment
from cute_fp8.numerics import quantize_fp8
from cute_fp8.timing import Contender, time_contenders
from perf import roofs
from perf.measure import Times, fake_times, paced_times
from perf.producers import META
from perf.report import geomean
from perf.results_io import Row, save

#: Bytes of e4m3 weights that the calls of one round read in all, and layers at most.
ROTATED_BYTES, MOST_LAYERS = 300_000_000, 24
#: Largest relative L2 error of an output: that of one e4m3 layer.
LIMIT = 0.08
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """What is timed: ``mlp`` or ``layer``, its sizes, and tokens as sequences of a length."""

    what: str
    hidden: int
    ffn: int
    batch: int
    tokens: int
    cached: int = 0
    causal: bool = True

    @property
    def name(self) -> str:
        """As ``--cases`` takes it."""
        return f"{self.what}-{self.hidden}x{self.ffn}-{self.batch * self.tokens}"

    @property
    def config(self) -> DecoderConfig:
        """The layer's shape."""
        heads = (32, 8) if self.hidden == 4096 else (16, 2)
        return DecoderConfig(self.hidden, self.ffn, *heads, 128, causal=self.causal)


CASES = (
    *(Case("mlp", 4096, 14336, 1, m) for m in (1, 4, 16)),
    *(Case("mlp", 1024, 4096, 1, m) for m in (1, 4, 16)),
    *(Case("layer", 4096, 14336, b, 1, cached=1024) for b in (1, 16)),
    Case("layer", 4096, 14336, 1, 2048),
    Case("layer", 1024, 4096, 32, 11, causal=False),
)


class Layer(Contender):
    """A contender that is compared with the bf16 module."""

    def error(self, y: Any, copy: int = 0) -> float:
        """Relative L2; infinite if it is more than the recipe explains."""
        wanted = self.exact.double()
        worst = float((y.double() - wanted).norm() / wanted.norm())
        # `time_contenders` knows the limit of GEMMs only.
        return worst * 1e-3 if worst <= LIMIT else float("inf")


# ------------------------------------------------------------------------------------- peers


def bf16_linear(x: Tensor, w: Weights, name: str) -> Tensor:
    """A projection."""
    return F.linear(x, w[name])


def w8a8_linear(x: Tensor, w: Weights, name: str) -> Tensor:
    """The same per token x per channel, as people write it."""
    values = x.float()
    scale = values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 448.0
    codes = (values / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    shape = (*x.shape[:-1], w[name].shape[0])
    y = torch._scaled_mm(
        codes.view(-1, x.shape[-1]),
        w[name].t(),
        scale_a=scale.view(-1, 1),
        scale_b=w[f"{name}.scale"].view(1, -1),
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return y.view(shape)


Linear = Callable[[Tensor, Weights, str], Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Llama's RMSNorm."""
    values = x.float()
    return weight * (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def mlp(x: Tensor, w: Weights, linear: Linear, eps: float) -> Tensor:
    """The second half of the layer; gate and up in one projection."""
    gate, up = linear(norm(x, w["mlp_norm"], eps), w, "gate_up").chunk(2, dim=-1)
    return x + linear(F.silu(gate) * up, w, "down")


def layer(
    x: Tensor,
    w: Weights,
    linear: Linear,
    config: DecoderConfig,
    cos: Tensor,
    sin: Tensor,
    cache: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The layer; a cache is written behind what is in it."""
    d, tokens = config.head_dim, x.shape[1]
    qkv = linear(norm(x, w["input_norm"], config.eps), w, "qkv")
    sizes = [config.heads * d, config.kv_heads * d, config.kv_heads * d]
    q, k, v = (part.unflatten(-1, (-1, d)) for part in qkv.split(sizes, dim=-1))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = (rotated(t, cos, sin) for t in (q, k))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if cache is not None:
        for memory, new in zip(cache, (k, v), strict=True):
            memory[:, :, -tokens:] = new
        k, v = cache
    o = attention(q, k, v, config.causal, None).transpose(1, 2).reshape(*x.shape[:2], -1)
    return mlp(x + linear(o, w, "o"), w, linear, config.eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of halves."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def bf16_weights(raw: dict[str, Tensor]) -> Weights:
    """Fused as a layer's may be."""
    return {
        "qkv": torch.cat([raw[f"{n}_proj"] for n in "qkv"]),
        "o": raw["o_proj"].clone(),
        "gate_up": torch.cat([raw["gate_proj"], raw["up_proj"]]),
        "down": raw["down_proj"].clone(),
        "input_norm": raw["input_layernorm"],
        "mlp_norm": raw["post_attention_layernorm"],
    }


def w8a8_weights(weights: Weights) -> Weights:
    """The same quantised."""
    found = {name: weights[name] for name in ("input_norm", "mlp_norm")}
    for name in ("qkv", "o", "gate_up", "down"):
        found[name], found[f"{name}.scale"] = quantize_fp8(weights[name])
    return found


# ------------------------------------------------------------------------------------- timing


def ours(case: Case, made: DecoderCase, x: Tensor, copies: int) -> Callable[[int], Tensor]:
    """A call of each copy."""
    weights = [
        replace(
            made.weights,
            **{
                name: (p := getattr(made.weights, name))._replace(codes=p.codes.clone())
                for name in ("qkv", "o", "gate_up", "down")
            },
        )
        for _ in range(copies)
    ]
    if case.what == "mlp":
        return lambda i: cute_fp8.decoder_mlp(x, weights[i])
    config, at = case.config, made.at(case.cached, case.tokens)
    caches = None
    if case.cached:
        capacity = case.cached + case.tokens
        caches = [
            KVCache.empty(case.batch, config.columns, capacity, device=x.device) for _ in weights
        ]
        for cache, (k, v) in zip(caches, past(case, copies, x.device), strict=True):
            cache.k.copy_(k)
            cache.v.copy_(v)

    def call(i: int) -> Tensor:
        cache = None
        if caches is not None:
            cache = caches[i]
            cache.length = case.cached
        y: Tensor = cute_fp8.decoder_block(x, weights[i], at, cache)
        return y

    return call


def past(case: Case, copies: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Filled caches with room for the new tokens, the same for all copies."""
    generator = torch.Generator(device).manual_seed(1)
    c = case.config
    shape = (case.batch, c.kv_heads, case.cached + case.tokens, c.head_dim)
    k, v = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2))
    return [(k.clone(), v.clone()) for _ in range(copies)]


def peer(
    case: Case, made: DecoderCase, x: Tensor, weights: Sequence[Weights], linear: Linear
) -> Callable[[int], Tensor]:
    """A compiled call of each copy."""
    torch._dynamo.reset()
    config = case.config
    if case.what == "mlp":
        half = torch.compile(partial(mlp, linear=linear, eps=config.eps), dynamic=False)
        return lambda i: half(x, weights[i])
    whole = torch.compile(partial(layer, linear=linear, config=config), dynamic=False)
    cos, sin = made.at(case.cached, case.tokens)
    caches: Sequence[Any] = [None] * len(weights)
    if case.cached:
        caches = past(case, len(weights), x.device)
    return lambda i: whole(x, weights[i], cos=cos, sin=sin, cache=caches[i])


@torch.no_grad()
def rows(case: Case, device: str, peers: bool, dry: bool) -> Iterator[Row]:
    """A row for every contender of a case."""
    config = case.config
    made = decoder_case(config, device=device, positions=case.cached + case.tokens)
    x = made.x(case.batch, case.tokens)
    size = sum(n * k for name, (n, k) in config.sizes.items() if case.what == "layer" or name in (
        "gate_up", "down"
    ))  # fmt: skip
    copies = 2 if dry else max(2, min(MOST_LAYERS, -(-ROTATED_BYTES // size)))
    weights = bf16_weights(made.raw)
    if case.what == "mlp":
        exact = mlp(x, weights, bf16_linear, config.eps)
    else:
        cache = past(case, 1, x.device)[0] if case.cached else None
        at = made.at(case.cached, case.tokens)
        exact = layer(x, weights, bf16_linear, config, *at, cache)
    found: list[Contender] = [
        Layer("cute_fp8", ours(case, made, x, copies), copies, exact, route(case))
    ]
    if peers:
        plain = [{n: t.clone() for n, t in weights.items()} for _ in range(copies)]
        call = peer(case, made, x, plain, bf16_linear)
        found.append(Layer("inductor_bf16", call, copies, exact))
        codes = w8a8_weights(weights)
        quantised = [{n: t.clone() for n, t in codes.items()} for _ in range(copies)]
        call = peer(case, made, x, quantised, w8a8_linear)
        found.append(Layer("inductor_w8a8", call, copies, exact))
    timer: Callable[[Sequence[Contender]], Times] = fake_times if dry else paced_times
    head: Row = {"op": f"decoder_{case.what}", "variant": "per_token"}
    head |= {"M": case.batch * case.tokens, "N": case.hidden, "K": case.ffn}
    for row in time_contenders(found, timer):
        if "us" in row:
            width = 2 if row["impl"] == "inductor_bf16" else 1
            row["gbps"] = float(f"{1e-3 * width * size / row['us']:.4g}")
            row["error"] = float(f"{row['error'] * 1e3:.3g}")
        yield {**head, **row}


def route(case: Case) -> dict[str, str]:
    """What serves the MLP half."""
    m = case.batch * case.tokens
    found = cute_fp8.explain("decoder_mlp", m=m, n=case.ffn, k=case.hidden).route
    assert found is not None
    name = {} if found.block is None else {"tile": found.block.name}
    return {"route": found.entry.name, **name}


def summary(found: Sequence[Row], read_gbps: float | None) -> Iterator[str]:
    """A line for each case, then the mean."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in found:
        groups.setdefault((row["op"], row["M"], row["N"], row["K"]), {})[row["impl"]] = row
    speedups = []
    for (op, m, hidden, ffn), impls in groups.items():
        us = {impl: row["us"] for impl, row in impls.items() if "us" in row}
        text = ", ".join(f"{impl} {value:.2f}" for impl, value in us.items())
        others = [value for impl, value in us.items() if impl != "cute_fp8"]
        if others and "cute_fp8" in us:
            speedups.append(min(others) / us["cute_fp8"])
            text += f"; {speedups[-1]:.2f}x the faster peer"
        if read_gbps and "cute_fp8" in us:
            text += f"; weights at {impls['cute_fp8']['gbps'] / read_gbps:.0%} of the bandwidth"
        failed = [f"{impl}: {row['failed']}" for impl, row in impls.items() if "failed" in row]
        yield f"{op} {hidden}x{ffn} M={m} us: {'; '.join([text, *failed])}"
    if speedups:
        yield f"geometric mean {geomean(speedups):.2f}x, worst {min(speedups):.2f}x"


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 if a result of ours is wrong; 2 if nothing can be measured so."""
    begun = time.perf_counter()
    p = argparse.ArgumentParser("python -m perf.decoder")
    p.add_argument("--cases", nargs="+", help=f"of {', '.join(case.name for case in CASES)}")
    p.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--out", type=Path, help="of the result, written anew after every case")
    p.add_argument("--dry-run", action="store_true", help="on the CPU, tiny, times made up")
    args = p.parse_args(arguments)
    if not (args.dry_run or torch.cuda.is_available()):
        print("perf.decoder: got no CUDA GPU, must run on one", file=sys.stderr)
        return 2
    named = {case.name: case for case in CASES}
    wanted = args.cases or list(named)
    chosen = [named[name] for name in wanted if name in named]
    if len(chosen) < len(wanted):
        print(f"perf.decoder: got {args.cases}, must name cases", file=sys.stderr)
        return 2
    meta: dict[str, Any] = {**environment(), "commit": commit(), "date": date.today().isoformat()}
    meta |= {"gpu": "dry run"} if args.dry_run else roofs.bandwidths()
    meta = {name: value for name, value in meta.items() if name in META}
    found: list[Row] = []
    for case in chosen:
        if args.dry_run:
            tokens, cached = min(case.tokens, 5), min(case.cached, 7)
            case = replace(case, hidden=128, ffn=64, batch=1, tokens=tokens, cached=cached)
        device = "cpu" if args.dry_run else "cuda"
        fresh = list(rows(case, device, args.peers, args.dry_run))
        found += fresh
        line = next(summary(fresh, meta.get("read_gbps")))
        print(f"{line} ({time.perf_counter() - begun:.0f} s)", flush=True)
        if args.out is not None:
            save(args.out, {**meta, "seconds": round(time.perf_counter() - begun, 1)}, found)
        if not args.dry_run:
            torch.cuda.empty_cache()
    print(list(summary(found, meta.get("read_gbps")))[-1])
    return int(any("failed" in row and row["impl"] == "cute_fp8" for row in found))


if __name__ == "__main__":
    sys.exit(main())
