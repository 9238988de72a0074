"""What a decoder block is made of: its shape, and its quantised weights.

    qkv       rows of the queries' projection, then of the keys' and the values'
    gate_up   channels of gate and up in turn, as ``interleave_gate_up`` has them

No copy in another precision is kept of what is quantised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cute_fp8.arguments import check_aligned, check_tensor
from cute_fp8.decoder.rope import Heads, check_heads
from cute_fp8.gating import interleave_gate_up
from cute_fp8.gemms.problem import E4M3, E8M0, OUT_DTYPES
from cute_fp8.kernels.config import K_MULTIPLE, VARIANTS
from cute_fp8.numerics import MX_BLOCK, quantize_fp8
from cute_fp8.producers import quantize_mxfp8
from cute_fp8.scales import blocked_numel


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a pre-norm decoder block as Llama and Qwen have it.

    Attributes:
        hidden, ffn: widths of the residual stream and of the MLP.
        heads, kv_heads, head_dim: of attention; ``heads`` a multiple of ``kv_heads``.
        eps: of all norms.
        causal: whether a token attends to those before it and itself only.
        variant: of every GEMM: ``per_token`` or ``mxfp8``.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-6
    causal: bool = True
    variant: str = "per_token"

    @property
    def columns(self) -> Heads:
        """How q|k|v divides."""
        return Heads(self.heads, self.kv_heads, self.head_dim)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Output and input width of every projection."""
        return {
            "qkv": (self.columns.columns, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }

    def check(self) -> DecoderConfig:
        """Return self, or raise ``ValueError`` naming the first rule that is broken."""
        if self.variant not in VARIANTS:
            raise ValueError(f"variant: got {self.variant!r}, must be one of {', '.join(VARIANTS)}")
        check_heads(self.columns)
        multiple = MX_BLOCK if self.variant == "mxfp8" else K_MULTIPLE
        widths = {"hidden": self.hidden, "ffn": self.ffn, "heads * head_dim": self.sizes["o"][1]}
        for name, width in widths.items():
            if width <= 0 or width % multiple:
                raise ValueError(f"{name}: got {width}, must be a positive multiple of {multiple}")
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps: got {self.eps}, must be finite and at least 0")
        return self


class Projection(NamedTuple):
    """A quantised weight ``[N, K]``: codes, scales (MXFP8: in 128x4 blocks), maybe a bias."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """The weights of a decoder block; see the module. ``q_norm`` and ``k_norm`` come together."""

    config: DecoderConfig
    input_norm: Tensor
    qkv: Projection
    o: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Of all of them."""
        return self.input_norm.device

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name, such as ``qkv_codes``."""
        for name in ("input_norm", "mlp_norm", "q_norm", "k_norm"):
            if (norm := getattr(self, name)) is not None:
                yield name, norm
        for name in self.config.sizes:
            projection: Projection = getattr(self, name)
            for part in ("codes", "scales", "bias"):
                if (tensor := getattr(projection, part)) is not None:
                    yield f"{name}_{part}", tensor

    @classmethod
    def of(cls, config: DecoderConfig, tensors: Mapping[str, Tensor | None]) -> DecoderWeights:
        """The inverse of :meth:`tensors`; checked."""
        projections = {
            name: Projection(*(tensors.get(f"{name}_{p}") for p in ("codes", "scales", "bias")))  # type: ignore[arg-type]
            for name in config.sizes
        }
        norms = {n: tensors.get(n) for n in ("input_norm", "mlp_norm", "q_norm", "k_norm")}
        return cls(config, **norms, **projections).check()  # type: ignore[arg-type]

    def check(self) -> DecoderWeights:
        """Return self, or raise ``TypeError`` or ``ValueError``: what does not fit ``config``."""
        config = self.config.check()
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("q_norm: got one of q_norm and k_norm, must be both or none")
        for name, size in (
            ("input_norm", config.hidden),
            ("mlp_norm", config.hidden),
            ("q_norm", config.head_dim),
            ("k_norm", config.head_dim),
        ):
            norm = getattr(self, name)
            if norm is None and name in ("q_norm", "k_norm"):
                continue
            self._check(name, norm, (size,), OUT_DTYPES)
        for name, (n, k) in config.sizes.items():
            projection: Projection = getattr(self, name)
            self._check(f"{name}.codes", projection.codes, (n, k), (E4M3,))
            shape, dtype = (n,), torch.float32
            if config.variant == "mxfp8":
                shape, dtype = (blocked_numel(n, k // MX_BLOCK),), E8M0
            self._check(f"{name}.scales", projection.scales, shape, (dtype,))
            if projection.bias is not None:
                self._check(f"{name}.bias", projection.bias, (n,), OUT_DTYPES)
        return self

    def _check(
        self, name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
    ) -> None:
        check_tensor(name, tensor)
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise TypeError(f"{name}: got {tensor.dtype}, must be {wanted}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, must be {shape}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: got strides {tuple(tensor.stride())}, must be contiguous")
        if tensor.device != self.device:
            raise ValueError(
                f"{name}: got device {tensor.device}, must be {self.device} as input_norm is"
            )
        check_aligned(name, tensor)


def project(weight: Tensor, bias: Tensor | None, variant: str) -> Projection:
    """Quantise a weight ``[N, K]``.

    Raises:
        ValueError: a weight that is not finite.
    """
    weight = weight.detach()
    bias = None if bias is None else bias.detach().clone()
    if variant == "per_token":
        return Projection(*quantize_fp8(weight), bias)
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight: got values that are not finite, must be finite")
    return Projection(*quantize_mxfp8(weight, blocked=True), bias)


def gated(
    gate: tuple[Tensor, Tensor | None], up: tuple[Tensor, Tensor | None], variant: str
) -> Projection:
    """Gate and up, weight and bias each, as one projection.

    Raises:
        ValueError: one of the two biases is missing.
    """
    (w_gate, b_gate), (w_up, b_up) = gate, up
    bias = None
    if b_gate is not None and b_up is not None:
        bias = interleave_gate_up(b_gate.detach(), b_up.detach())
    elif b_gate is not None or b_up is not None:
        raise ValueError("bias: got one of gate's and up's, must be both or none")
    return project(interleave_gate_up(w_gate.detach(), w_up.detach()), bias, variant)
