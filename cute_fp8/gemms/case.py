"""One GEMM problem with data and its exact answer: the set-up that tests and sweeps share.

The answer is computed in float64 from the very codes and scales, and comes with the error that the
numerics contract allows per element. Outputs are made inside poisoned buffers, so that an element
which is not written, or one outside which is, cannot go unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor

from cute_fp8 import settings
from cute_fp8.api import gemm
from cute_fp8.numerics import (
    MX_BLOCK,
    quantize_fp8,
    quantize_fp8_activations,
    quantize_mxfp8,
)
from cute_fp8.scales import from_blocked, to_blocked
from cute_fp8.targets import capability_of_device
from cute_fp8.testing import accumulation_bound, inputs

#: Unit roundoff of an output dtype, and the spacing of its denormals.
_ROUNDOFF = {
    torch.bfloat16: (2.0**-8, 2.0**-133),
    torch.float16: (2.0**-11, 2.0**-24),
    torch.float32: (2.0**-24, 2.0**-149),
}
#: No activation is steeper than gelu, whose slope reaches 1.13.
_STEEPEST = 1.13
#: fp32 operations of the epilogue, each with half an ulp; exp, erf and tanh have a few.
_EPILOGUE_ROUNDINGS = 16
#: Rows and columns of guard around a guarded output.
_GUARD_ROWS, _GUARD_COLUMNS = 2, 16
#: Rows of a large result that are compared with float64 where its time is what is asked for.
SAMPLE = 256


@dataclass(frozen=True)
class GemmCase:
    """Operands of one call of ``gemm``; with e8m0 scales, of its MXFP8 variant."""

    xq: Tensor
    sx: Tensor
    wq: Tensor
    sw: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: str | None = None
    out_dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def m(self) -> int:
        """Tokens."""
        return self.xq.shape[0]

    @property
    def n(self) -> int:
        """Output channels."""
        return self.wq.shape[0]

    @property
    def k(self) -> int:
        """Length of the sums."""
        return self.xq.shape[1]

    def run(self, out: Tensor | None = None) -> Tensor:
        """``gemm`` of this case."""
        y = gemm(
            self.xq,
            self.sx,
            self.wq,
            self.sw,
            self.bias,
            residual=self.residual,
            activation=self.activation,
            out_dtype=self.out_dtype,
            out=out,
            **self.options,
        )
        assert isinstance(y, Tensor)
        return y

    def run_guarded(self) -> Tensor:
        """``run`` into the middle of a buffer of NaN.

        Raises:
            AssertionError: something outside the output was written.
        """
        rows, columns = self.m + 2 * _GUARD_ROWS, self.n + 2 * _GUARD_COLUMNS
        buffer = torch.full(
            (rows, columns), float("nan"), dtype=self.out_dtype, device=self.xq.device
        )
        inside = (
            slice(_GUARD_ROWS, _GUARD_ROWS + self.m),
            slice(_GUARD_COLUMNS, _GUARD_COLUMNS + self.n),
        )
        y = self.run(out=buffer[inside]).clone()
        buffer[inside] = float("nan")
        written = int((~buffer.isnan()).sum())
        assert written == 0, f"{written} elements outside the output were written"
        return y

    def exact(self) -> tuple[Tensor, Tensor]:
        """The float64 result ``[M, N]`` and the allowed absolute error per element, for kernels."""
        a, b = self.xq.double(), self.wq.double()
        scale = torch.ones((), dtype=torch.float64, device=a.device)
        if is_mx(self.sx):
            a, b = a * _factors(self.sx, self.m, self.k), b * _factors(self.sw, self.n, self.k)
        else:
            scale = self.sx.double().view(-1, 1) * self.sw.double().view(1, -1)
        acc, sum_of_abs = a @ b.t(), a.abs() @ b.abs().t()
        scaled = acc * scale
        error = accumulation_bound(self.k, sum_of_abs, _accumulation(a.device)) * scale.abs()
        magnitude = scaled.abs()
        if self.bias is not None:
            scaled = scaled + self.bias.double()
            magnitude = magnitude + self.bias.double().abs()
        y = activate64(self.activation, scaled)
        if self.residual is not None:
            y = y + self.residual.double()
            magnitude = magnitude + self.residual.double().abs()
        roundoff, denormal = _ROUNDOFF[self.out_dtype]
        error = error * _STEEPEST + magnitude * (_EPILOGUE_ROUNDINGS * 2.0**-24)
        return y, error + (y.abs() + error) * roundoff + denormal

    def check_exact(self) -> None:
        """Run, guarded: right to the last bit everywhere, and nothing else written.

        Raises:
            AssertionError: otherwise.
        """
        y, (exact, _) = self.run_guarded(), self.exact()
        wrong = int((y.double() != exact).sum())
        shape = f"M={self.m} N={self.n} K={self.k}"
        assert wrong == 0, f"{shape}: {wrong} of {y.numel()} elements differ"

    def check(self, y: Tensor) -> None:
        """Compare a result with the exact one.

        Raises:
            AssertionError: a wrong dtype or shape, an element past its allowed error, or a NaN
                where the exact result has none (or the reverse).
        """
        assert y.dtype is self.out_dtype and y.shape == (self.m, self.n), (y.dtype, y.shape)
        exact, allowed = self.exact()
        nan = exact.isnan()
        assert torch.equal(y.isnan(), nan), "NaN in the wrong rows"
        excess = ((y.double() - exact).abs() - allowed).masked_fill(nan, -1.0)
        # Where the exact result overflows the output's dtype, so must the result.
        overflow = exact.to(self.out_dtype).isinf()
        assert torch.equal(y.isinf(), overflow), "Inf in the wrong places"
        worst = excess.masked_fill(overflow, -1.0).max() if excess.numel() else torch.tensor(-1.0)
        assert worst.item() <= 0, f"error exceeds the bound by {worst.item():.3g}"


def _accumulation(device: torch.device) -> str:
    """By whose bound sums made on a device are judged: see ``accumulation_bound``."""
    hopper = capability_of_device(device) == (9, 0)
    return "sm_90" if hopper and settings.current().backend != "stand-in" else "sm_120"


def activate64(name: str | None, x: Tensor) -> Tensor:
    """The activations in float64, written independently of the package's."""
    if name is None:
        return x
    if name == "relu":
        return torch.where(x < 0, torch.zeros_like(x), x)
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "gelu":
        return x * 0.5 * torch.erfc(-x * 0.5**0.5)
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


def gemm_case(
    m: int,
    n: int,
    k: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cuda",
    kind: str = "gaussian",
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.dtype | None = None,
    residual: torch.dtype | None = None,
    activation: str | None = None,
) -> GemmCase:
    """A case with activations of the named kind and Gaussian weights, quantised.

    Args:
        m, n, k: sizes.
        kind: as in :func:`cute_fp8.testing.inputs`.
        out_dtype, bias, residual, activation: as in ``gemm``; bias and residual by dtype.
    """
    x = inputs(kind, m, k, seed=seed, dtype=torch.float32, device=device)
    w = inputs("gaussian", n, k, seed=seed + 1, dtype=torch.float32, device=device)
    xq, sx = quantize_fp8_activations(x)
    wq, sw = quantize_fp8(w / k**0.5)
    case = GemmCase(xq, sx, wq, sw, activation=activation, out_dtype=out_dtype)
    return _with_extras(case, bias, residual, seed)


def quantized_case(
    variant: str, m: int, n: int, k: int, *, device: torch.device | str = "cuda", **epilogue: Any
) -> GemmCase:
    """:func:`gemm_case` of either variant, with scales as ``quantize_*`` makes them."""
    case = gemm_case(m, n, k, device=device, **epilogue)
    if variant == "per_token":
        return case
    # Row-major scales: rows can still be taken out of them.
    x = inputs("gaussian", m, k, seed=0, dtype=torch.float32, device=device)
    w = inputs("gaussian", n, k, seed=1, dtype=torch.float32, device=device)
    (xq, sx), (wq, sw) = quantize_mxfp8(x), quantize_mxfp8(w / k**0.5)
    return replace(case, xq=xq, sx=sx, wq=wq, sw=sw)


def take(case: GemmCase, rows: Tensor | slice) -> GemmCase:
    """The case of some of its tokens."""
    residual = None if case.residual is None else case.residual[rows]
    xq = case.xq.view(torch.uint8)[rows].view(case.xq.dtype)
    return replace(case, xq=xq, sx=_take(case.sx, rows), residual=residual)


def _take(scale: Tensor, rows: Tensor | slice) -> Tensor:
    if scale.numel() == 1:
        return scale
    return scale.view(torch.uint8)[rows].view(scale.dtype) if is_mx(scale) else scale[rows]


def is_mx(scale: Tensor) -> bool:
    """Whether scales are those of blocks."""
    return scale.dtype is torch.float8_e8m0fnu


def sample(m: int, device: torch.device | str) -> Tensor | None:
    """One random row of each of ``SAMPLE`` equal parts, and both ends; None where that is all."""
    if m <= SAMPLE:
        return None
    generator = torch.Generator().manual_seed(m)
    start = torch.arange(SAMPLE) * m // SAMPLE
    size = torch.arange(1, SAMPLE + 1) * m // SAMPLE - start
    rows = start + (torch.rand(SAMPLE, generator=generator) * size).long()
    rows[0], rows[-1] = 0, m - 1
    return rows.to(device)


def exact_case(
    m: int,
    n: int,
    k: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cuda",
    out_dtype: torch.dtype = torch.float32,
    bias: torch.dtype | None = None,
    residual: torch.dtype | None = None,
) -> GemmCase:
    """A case that fp32 computes without rounding, so that a result must be right to the last bit.

    Codes are integers of at most 4, scales are powers of two, distinct between neighbouring rows
    and columns: a swapped or shifted scale cannot pass. Bias and residual are small integers.
    """
    generator = torch.Generator().manual_seed(seed)
    xq = _integers((m, k), 4, generator).to(torch.float8_e4m3fn).to(device)
    wq = _integers((n, k), 4, generator).to(torch.float8_e4m3fn).to(device)
    sx = torch.exp2(torch.arange(m) % 5 - 2.0).to(device)
    sw = torch.exp2(torch.arange(n) % 7 - 3.0).to(device)
    return _with_extras(GemmCase(xq, sx, wq, sw, out_dtype=out_dtype), bias, residual, seed)


def mxfp8_case(
    m: int,
    n: int,
    k: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cuda",
    exponents: int = 1,
    base: int = 0,
    blocked: bool = True,
    out_dtype: torch.dtype = torch.float32,
    bias: torch.dtype | None = None,
    residual: torch.dtype | None = None,
) -> GemmCase:
    """An MXFP8 case that fp32 computes without rounding if ``exponents`` is 1.

    Codes are integers of at most 2; every block's scale is a random power of two from
    ``2**-exponents`` to ``2**exponents``. The padding of blocked scales is poisoned with 0xFF.

    Args:
        base: each 32 of K moves powers of two between the operands: ``2**b`` into A's scales and
            out of B's, with b random from -base to base. The product does not change.
    """
    generator = torch.Generator().manual_seed(seed)
    xq = _integers((m, k), 2, generator).to(torch.float8_e4m3fn).to(device)
    wq = _integers((n, k), 2, generator).to(torch.float8_e4m3fn).to(device)
    shift = torch.randint(-base, base + 1, (1, k // MX_BLOCK), generator=generator)
    scales = []
    for rows, sign in ((m, 1), (n, -1)):
        shape = (rows, k // MX_BLOCK)
        exponent = torch.randint(-exponents, exponents + 1, shape, generator=generator)
        scale = (exponent + sign * shift + 127).clamp(0, 254).to(torch.uint8).to(device)
        scales.append(poisoned_blocks(scale) if blocked else scale.view(torch.float8_e8m0fnu))
    case = GemmCase(xq, scales[0], wq, scales[1], out_dtype=out_dtype)
    return _with_extras(case, bias, residual, seed)


def poisoned_blocks(scale: Tensor) -> Tensor:
    """Row-major scale bytes in 128x4 blocks, with 0xFF (NaN) in all padding."""
    blocked = to_blocked(scale)
    exists = to_blocked(torch.ones_like(scale))
    return blocked.masked_fill(exists == 0, 0xFF).view(torch.float8_e8m0fnu)


def _factors(scale: Tensor, rows: int, k: int) -> Tensor:
    """The float64 factor of every code, ``[rows, k]``."""
    if scale.dim() == 1:
        scale = from_blocked(scale, rows, k // MX_BLOCK)
    return scale.double().repeat_interleave(MX_BLOCK, dim=1)


def _with_extras(
    case: GemmCase, bias: torch.dtype | None, residual: torch.dtype | None, seed: int
) -> GemmCase:
    generator = torch.Generator().manual_seed(seed + 2)
    device = case.xq.device
    if bias is not None:
        case = replace(case, bias=_integers((case.n,), 8, generator).to(bias).to(device))
    if residual is not None:
        values = _integers((case.m, case.n), 8, generator)
        case = replace(case, residual=values.to(residual).to(device))
    return case


def _integers(shape: tuple[int, ...], limit: int, generator: Generator) -> Tensor:
    return torch.randint(-limit, limit + 1, shape, generator=generator).float()
