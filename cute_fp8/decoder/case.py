"""A decoder block with its data, what it replaces, and the check of what it made: for tests and
measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cute_fp8 import testing
from cute_fp8.decoder import projection, rope
from cute_fp8.decoder.block import MlpIntermediates, Quantised, attention
from cute_fp8.decoder.projection import Projected
from cute_fp8.decoder.weights import (
    DecoderConfig,
    DecoderWeights,
    Projection,
    gated,
    project,
)
from cute_fp8.gating import split_gate_up
from cute_fp8.numerics import (
    dequantize_fp8,
    dequantize_mxfp8,
    quantize_fp8_activations,
    quantize_mxfp8,
)
from cute_fp8.producers import rmsnorm_quantize
from cute_fp8.scales import from_blocked

#: Of elements that another order of additions may round the other way.
MOST_DIFFERENT = 1e-3


class ProjectionCall(NamedTuple):
    """The arguments of a projection of rows ``[M, K]``, which are normalised if there is a norm."""

    rows: Tensor
    norm: Tensor | None
    w: Projection
    residual: Tensor | None
    eps: float = 1e-5

    def run(self) -> Projected:
        """As a decoder block does."""
        rows, norm, w, residual, eps = self
        if norm is not None:
            return projection.norm_project(rows, norm, eps, w, "per_token")
        assert residual is not None
        return projection.project(rows, w, residual)

    def quantised(self) -> Quantised:
        """What is multiplied, made by itself."""
        if self.norm is None:
            return quantize_fp8_activations(self.rows)
        codes, scales = rmsnorm_quantize(self.rows, self.norm, self.eps)
        return codes, scales

    def errors(self, made: Projected, arch: str) -> list[str]:
        """What is wrong with a result: codes and scales are a producer's, bit for bit, and the
        output is the float64 result of those; ``arch`` as of :func:`mlp_errors`.
        """
        wanted = self.quantised()
        wrong = _unequal((made.codes, made.scales), wanted)
        found = [f"{name} are not the producer's" for name in wrong]
        exact, bound = _product(wanted, self.w, "per_token", arch)
        if self.residual is not None:
            exact = exact + self.residual.double()
        return [*found, *_rounded("output", made.y, exact, bound)]


@dataclass(frozen=True)
class DecoderCase:
    """Raw bf16 weights of a layer, and the same quantised.

    ``raw``: by the names of transformers' projections and norms; biases as ``q_proj.bias``.
    """

    config: DecoderConfig
    raw: dict[str, Tensor]
    weights: DecoderWeights
    cos: Tensor
    sin: Tensor

    @property
    def rotation(self) -> tuple[Tensor, Tensor]:
        """Cos and sin of the first tokens."""
        return self.cos, self.sin

    def x(self, batch: int, tokens: int, kind: str = "gaussian", seed: int = 1) -> Tensor:
        """Activations ``[B, S, hidden]``."""
        rows = testing.inputs(kind, batch * tokens, self.config.hidden, seed=seed)
        return rows.view(batch, tokens, self.config.hidden).to(self.cos.device)

    def at(self, first: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Cos and sin of some tokens."""
        return self.cos[first : first + tokens], self.sin[first : first + tokens]

    def module(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The layer that is replaced, in x's dtype; ``past`` are earlier keys and values."""
        c, raw = self.config, self.raw
        first = 0 if past is None else past[0].shape[2]
        normed = self._norm(x, "input_layernorm")
        parts = (self._linear(normed, f"{name}_proj") for name in "qkv")
        q, k, v = (part.unflatten(-1, (-1, c.head_dim)) for part in parts)  # type: ignore[no-untyped-call]
        if "q_norm" in raw:
            q, k = self._norm(q, "q_norm"), self._norm(k, "k_norm")
        cos, sin = (t.unsqueeze(1) for t in self.at(first, x.shape[1]))
        q, k = (t * cos + rope.rotated_half(t) * sin for t in (q, k))
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if past is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True))
        o = attention(q, k, v, c.causal, None).transpose(1, 2).flatten(2)
        return self.mlp_module(x + self._linear(o, "o_proj"))

    def mlp_module(self, x: Tensor) -> Tensor:
        """Its second half."""
        normed = self._norm(x, "post_attention_layernorm")
        gate, up = (self._linear(normed, f"{name}_proj") for name in ("gate", "up"))
        return x + self._linear(F.silu(gate) * up, "down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.raw[name], self.raw.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rope.normalised(x, self.raw[name], self.config.eps)


def decoder_case(
    config: DecoderConfig,
    *,
    seed: int = 0,
    norms: bool = False,
    biases: bool = False,
    positions: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> DecoderCase:
    """A layer with Gaussian weights of variance 1/K.

    Args:
        norms: of the heads of queries and keys.
        biases: of q, k and v.
        positions: of which cos and sin are there.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def linear(n: int, k: int) -> Tensor:
        return (normal(n, k) / k**0.5).to(dtype)

    def norm(size: int) -> Tensor:
        return (1 + 0.1 * normal(size)).to(dtype)

    c, d = config, config.head_dim
    raw = {
        "q_proj": linear(c.heads * d, c.hidden),
        "k_proj": linear(c.kv_heads * d, c.hidden),
        "v_proj": linear(c.kv_heads * d, c.hidden),
        "o_proj": linear(c.hidden, c.heads * d),
        "gate_proj": linear(c.ffn, c.hidden),
        "up_proj": linear(c.ffn, c.hidden),
        "down_proj": linear(c.hidden, c.ffn),
        "input_layernorm": norm(c.hidden),
        "post_attention_layernorm": norm(c.hidden),
    }
    if norms:
        raw |= {"q_norm": norm(d), "k_norm": norm(d)}
    if biases:
        raw |= {f"{n}_proj.bias": normal(raw[f"{n}_proj"].shape[0]).to(dtype) for n in "qkv"}
    angles = torch.arange(positions)[:, None] * 10_000.0 ** (-torch.arange(0, d, 2) / d)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
    return DecoderCase(config, raw, quantised(config, raw), cos, sin)


def quantised(config: DecoderConfig, raw: dict[str, Tensor]) -> DecoderWeights:
    """Raw weights as a block has them."""
    names = ("q_proj", "k_proj", "v_proj")
    biases = [raw[f"{name}.bias"] for name in names if f"{name}.bias" in raw]
    bias = torch.cat(biases) if biases else None
    return DecoderWeights(
        config,
        input_norm=raw["input_layernorm"],
        qkv=project(torch.cat([raw[name] for name in names]), bias, config.variant),
        o=project(raw["o_proj"], None, config.variant),
        mlp_norm=raw["post_attention_layernorm"],
        gate_up=gated((raw["gate_proj"], None), (raw["up_proj"], None), config.variant),
        down=project(raw["down_proj"], None, config.variant),
        q_norm=raw.get("q_norm"),
        k_norm=raw.get("k_norm"),
    ).check()


# ------------------------------------------------------------------------------------- judging


def mlp_errors(
    x: Tensor, weights: DecoderWeights, y: Tensor, made: MlpIntermediates, arch: str
) -> list[str]:
    """What is wrong with an MLP half, each step judged by the float64 result of the step before.

    Args:
        x: rows ``[M, hidden]``; y: the output.
        arch: as :func:`cute_fp8.testing.accumulation_bound` knows it.
    """
    found: list[str] = []
    normed = rope.normalised(x, weights.mlp_norm, weights.config.eps)
    found += _different("norm", made.normed, _quantised(normed, weights))
    sums, bound = _product(made.normed, weights.gate_up, weights.config.variant, arch)
    gate, up = split_gate_up(sums)
    gate_bound, up_bound = split_gate_up(bound)
    exact = F.silu(gate) * up
    # |silu'| is at most 1.1.
    slack = 1.1 * gate_bound * up.abs() + F.silu(gate).abs() * up_bound
    if made.product is not None:
        found += _rounded("product", made.product, exact, slack)
        exact = made.product.double()
        wrong = _unequal(made.product_quantised, _quantised(made.product, weights))
        found += [f"product: {name} are not the quantiser's" for name in wrong]
    else:
        rounded = exact.to(x.dtype)
        found += _different("product", made.product_quantised, _quantised(rounded, weights))
    sums, bound = _product(made.product_quantised, weights.down, weights.config.variant, arch)
    return [*found, *_rounded("output", y.view(x.shape), sums + x.double(), bound)]


def _quantised(values: Tensor, weights: DecoderWeights) -> Quantised:
    if weights.config.variant == "mxfp8":
        return quantize_mxfp8(values, blocked=True)
    return quantize_fp8_activations(values)


def _unequal(made: Quantised, wanted: Quantised) -> list[str]:
    """Which of the two, codes and scales, are not the same bits."""
    return [
        name
        for name, a, b in zip(("codes", "scales"), made, wanted, strict=True)
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    ]


def _different(what: str, made: Quantised, wanted: Quantised) -> Iterator[str]:
    codes, others = (pair[0].view(torch.uint8) for pair in (made, wanted))
    share = float((codes != others).double().mean())
    if share > MOST_DIFFERENT:
        yield f"{what}: {share:.2%} of the codes differ from the reference's"


def _product(x: Quantised, w: Projection, variant: str, arch: str) -> tuple[Tensor, Tensor]:
    """``x @ w.T`` and its bias in float64, and by how much an accumulation may differ."""
    a, b = (_values(codes, scales, variant) for codes, scales in (x, w[:2]))
    bound = testing.accumulation_bound(a.shape[1], a.abs() @ b.abs().t(), arch)
    sums = a @ b.t()
    return sums if w.bias is None else sums + w.bias.double(), bound


def _values(codes: Tensor, scales: Tensor, variant: str) -> Tensor:
    codes = codes.view(-1, codes.shape[-1])
    if variant == "mxfp8":
        scales = from_blocked(scales, codes.shape[0], codes.shape[1] // 32)
        return dequantize_mxfp8(codes, scales, torch.float32).double()
    return (
        dequantize_fp8(codes, torch.ones_like(scales), torch.float32).double()
        * scales[:, None].double()
    )


def _rounded(what: str, made: Tensor, exact: Tensor, slack: Tensor) -> Iterator[str]:
    """Whether ``made`` is ``exact``, which is known but for ``slack``, rounded to its dtype."""
    # Half a unit in the last place, of the larger binade where a sum lies close below one.
    unit = torch.finfo(made.dtype).eps
    allowed = slack + unit / 2 * (exact.abs() + slack) + torch.finfo(torch.float32).tiny
    # fp32's own roundings, of the scales' products and the sum.
    allowed = allowed + 8 * 2.0**-24 * exact.abs()
    nan = exact.isnan()
    wrong = ((made.double() - exact).abs() > allowed) & ~nan | (made.isnan() != nan)
    if bool(wrong.any()):
        yield f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong"
